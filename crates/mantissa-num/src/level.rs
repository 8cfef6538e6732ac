//! Stored values of a [`ScaleTree`]: one [`ScaleLevel`] per node.

use crate::codes::Codes;
use crate::format::ScaleTree;

/// One level of stored scales: its codes, the offsets of its blocks and the level above.
#[derive(Clone, Debug, PartialEq)]
pub struct ScaleLevel {
    /// Scale codes, one per block of the level below, in the order of [`Blocks::grid`](crate::Blocks::grid). Empty
    /// for formats without scales. A trellis holds f16 patterns of the inputs, then of the outputs
    /// ([`crate::trellis`]).
    pub codes: Codes,
    /// Offsets of the values below.
    pub offsets: Offsets,
    /// Level above, which scales `codes`: the global scale of NVFP4, or the scales of double quantization.
    pub outer: Option<Box<ScaleLevel>>,
}

/// Offsets that one level of scales adds to the values below it.
#[derive(Clone, Debug, Default, PartialEq)]
pub enum Offsets {
    /// No offset.
    #[default]
    None,
    /// Zero points in the signed domain, one per block.
    Zero(Vec<i32>),
    /// Value of the lowest code, one per block.
    Bias(Vec<f32>),
    /// Mean of all scales below, under double quantization ([`Sense::Residual`](crate::Sense::Residual)).
    Mean(f32),
}

impl Offsets {
    /// Zero points, mutable; empty if the format has none.
    pub fn zeros_mut(&mut self) -> &mut [i32] {
        match self {
            Offsets::Zero(zeros) => zeros,
            _ => &mut [],
        }
    }

    /// Biases, mutable; empty if the format has none.
    pub fn biases_mut(&mut self) -> &mut [f32] {
        match self {
            Offsets::Bias(biases) => biases,
            _ => &mut [],
        }
    }
}

impl From<Codes> for ScaleLevel {
    fn from(codes: Codes) -> Self {
        ScaleLevel { codes, offsets: Offsets::None, outer: None }
    }
}

impl ScaleLevel {
    /// A single f32 scale for the whole tensor.
    pub fn single(scale: f32) -> Self {
        Codes::U32(vec![scale.to_bits()]).into()
    }

    /// Scales of double quantization: f32 `factors`, and the `mean` added after multiplying.
    pub fn residual(factors: &[f32], mean: f32) -> Self {
        let codes = Codes::U32(factors.iter().map(|factor| factor.to_bits()).collect());
        ScaleLevel { codes, offsets: Offsets::Mean(mean), outer: None }
    }

    /// The same level below an optional global scale.
    pub fn with_outer(self, scale: Option<f32>) -> Self {
        ScaleLevel { outer: scale.map(|scale| Box::new(Self::single(scale))), ..self }
    }

    /// The same level below the scales of double quantization.
    pub fn with_residual(self, level: ScaleLevel) -> Self {
        ScaleLevel { outer: Some(Box::new(level)), ..self }
    }

    /// The same level with zero points; an empty list means none.
    pub fn with_zeros(self, zeros: Vec<i32>) -> Self {
        if zeros.is_empty() { self } else { ScaleLevel { offsets: Offsets::Zero(zeros), ..self } }
    }

    /// The same level with biases; an empty list means none.
    pub fn with_biases(self, biases: Vec<f32>) -> Self {
        if biases.is_empty() { self } else { ScaleLevel { offsets: Offsets::Bias(biases), ..self } }
    }

    /// Number of scale codes.
    pub fn len(&self) -> usize {
        self.codes.len()
    }

    /// True if there are no scale codes.
    pub fn is_empty(&self) -> bool {
        self.codes.is_empty()
    }

    /// Scale code `i`.
    pub fn get(&self, i: usize) -> u32 {
        self.codes.get(i)
    }

    /// Appends a scale code.
    pub fn push(&mut self, code: u32) {
        self.codes.push(code);
    }

    /// Little-endian bytes of the scale codes.
    pub fn to_le_bytes(&self) -> Vec<u8> {
        self.codes.to_le_bytes()
    }

    /// Zero points in the signed domain, one per block; empty if the format has none.
    pub fn zeros(&self) -> &[i32] {
        match &self.offsets {
            Offsets::Zero(zeros) => zeros,
            _ => &[],
        }
    }

    /// Appends zero points.
    pub fn extend_zeros(&mut self, more: impl IntoIterator<Item = i32>) {
        let mut more = more.into_iter().peekable();
        // Appending nothing must not drop offsets of the other kind.
        if more.peek().is_none() {
            return;
        }
        let mut zeros = match std::mem::take(&mut self.offsets) {
            Offsets::Zero(zeros) => zeros,
            _ => Vec::new(),
        };
        zeros.extend(more);
        self.offsets = Offsets::Zero(zeros);
    }

    /// Values of the lowest code, one per block; empty if the format has no bias.
    pub fn biases(&self) -> &[f32] {
        match &self.offsets {
            Offsets::Bias(biases) => biases,
            _ => &[],
        }
    }

    /// Appends biases.
    pub fn extend_biases(&mut self, more: impl IntoIterator<Item = f32>) {
        let mut more = more.into_iter().peekable();
        // Appending nothing must not drop offsets of the other kind.
        if more.peek().is_none() {
            return;
        }
        let mut biases = match std::mem::take(&mut self.offsets) {
            Offsets::Bias(biases) => biases,
            _ => Vec::new(),
        };
        biases.extend(more);
        self.offsets = Offsets::Bias(biases);
    }

    /// Global scale as stored, if the format has one.
    pub fn tensor_wide(&self) -> Option<f32> {
        let outer = self.outer.as_ref()?;
        (outer.offsets == Offsets::None && outer.len() == 1).then(|| f32::from_bits(outer.get(0)))
    }

    /// Level above under double quantization, as described by `tree`.
    pub fn nested(&self, tree: &ScaleTree) -> Option<Nested<'_>> {
        let (blocks, _) = tree.nested()?;
        let outer = self.outer.as_deref()?;
        let Offsets::Mean(mean) = outer.offsets else { return None };
        Some(Nested { block: blocks.len(1, self.len()).max(1), factors: &outer.codes, mean })
    }
}

/// Scales of double quantization: each multiplies a run of block scales; their mean is added.
#[derive(Clone, Copy, Debug)]
pub struct Nested<'a> {
    /// Number of consecutive block scales that share a factor.
    pub block: usize,
    /// f32 patterns of the factors: the amax of each run of scales minus the mean.
    factors: &'a Codes,
    /// Mean of all block scales.
    pub mean: f32,
}

impl Nested<'_> {
    /// Factors, one per run of block scales.
    pub fn factors(&self) -> Vec<f32> {
        (0..self.factors.len()).map(|run| f32::from_bits(self.factors.get(run))).collect()
    }

    /// Number of factors.
    pub fn len(&self) -> usize {
        self.factors.len()
    }

    /// True if there are no factors.
    pub fn is_empty(&self) -> bool {
        self.factors.is_empty()
    }

    /// Factor of block scale `i`.
    pub fn factor(&self, i: usize) -> f32 {
        f32::from_bits(self.factors.get(i / self.block))
    }

    /// Value of block scale `i`, given its level in the code book: `level · factor + mean`.
    pub fn scale(&self, i: usize, level: f32) -> f32 {
        level * self.factor(i) + self.mean
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn appending_nothing_keeps_offsets_of_the_other_kind() {
        let mut level = ScaleLevel::from(Codes::U8(vec![1, 2]));
        level.extend_zeros([3, 4]);
        level.extend_biases([]);
        assert_eq!((level.zeros(), level.biases()), (&[3, 4][..], &[][..]));
    }
}
