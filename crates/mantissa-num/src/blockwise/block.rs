//! Range of a block, the parameters chosen from it, and what decodes its elements.

/// Statistics of a block that determine its scale.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Range {
    /// Smallest value, NaN aside.
    pub min: f32,
    /// Largest value, NaN aside.
    pub max: f32,
    /// True if a NaN was seen.
    pub nan: bool,
    /// Sum of the magnitudes.
    pub abs_sum: f64,
    /// Number of values.
    pub count: u64,
}

impl Range {
    /// Empty range.
    pub const EMPTY: Range =
        Range { min: f32::INFINITY, max: f32::NEG_INFINITY, nan: false, abs_sum: 0.0, count: 0 };

    /// Computes the range of `x`.
    pub fn of(x: &[f32]) -> Self {
        x.iter().fold(Self::EMPTY, |range, &v| range.with(v))
    }

    /// The range widened by one value.
    pub fn with(self, v: f32) -> Self {
        // f32::min and max ignore NaN.
        Range {
            min: self.min.min(v),
            max: self.max.max(v),
            nan: self.nan | v.is_nan(),
            abs_sum: self.abs_sum + f64::from(v.abs()),
            count: self.count + 1,
        }
    }

    /// The union of two ranges.
    pub fn union(self, other: Self) -> Self {
        Range {
            min: self.min.min(other.min),
            max: self.max.max(other.max),
            nan: self.nan | other.nan,
            abs_sum: self.abs_sum + other.abs_sum,
            count: self.count + other.count,
        }
    }

    /// Largest magnitude; 0 if empty.
    pub fn amax(self) -> f32 {
        if self.min > self.max { 0.0 } else { self.min.abs().max(self.max.abs()) }
    }

    /// Mean magnitude; 0 if empty.
    pub fn abs_mean(self) -> f32 {
        (self.abs_sum / self.count.max(1) as f64) as f32
    }

    /// The range widened to hold 0, as integer grids require.
    pub(super) fn with_zero(self) -> (f32, f32) {
        (self.min.min(0.0), self.max.max(0.0))
    }
}

/// Turns elements into values: `(element - zero) · inner`, times `tail` for formats that multiply twice, plus the
/// block's bias if it has one.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Decoder {
    pub(super) zero: f32,
    pub(super) inner: f32,
    pub(super) tail: Option<f32>,
    pub(super) bias: Option<f32>,
}

impl Decoder {
    /// Multiplies elements by `scale`: a block with a known numeric scale.
    pub const fn scaled(scale: f32) -> Self {
        Decoder { zero: 0.0, inner: scale, tail: None, bias: None }
    }

    /// Adds the bias of a block of a format that [has one](crate::Format::has_bias).
    pub fn with_bias(self, bias: f32) -> Self {
        Decoder { bias: Some(bias), ..self }
    }

    /// Factor of every element, without zero point and bias.
    pub fn scale(&self) -> f32 {
        self.tail.map_or(self.inner, |tail| self.inner * tail)
    }

    /// The value of an element (see [`Format::element`](crate::Format::element)).
    pub fn value(&self, element: f32) -> f32 {
        let scaled = (element - self.zero) * self.inner;
        let scaled = self.tail.map_or(scaled, |tail| scaled * tail);
        self.bias.map_or(scaled, |bias| scaled + bias)
    }

    /// (`zero`, `inner`, `tail`) of the formula, for loops over many elements. `inner` is 1 in a format without
    /// scales; the caller adds the bias.
    pub const fn parts(&self) -> (f32, f32, Option<f32>) {
        (self.zero, self.inner, self.tail)
    }
}

/// A block's chosen parameters.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Block {
    /// Scale code as stored (bit pattern for an f32 scale). 0 if the format has none. Under double quantization it is
    /// the bit pattern of the scale before [`nest`](super::nest) quantizes it.
    pub scale: u32,
    /// Zero point in the signed domain; 0 if the format has none.
    pub zero: i32,
    /// Value of the lowest code, if the format has a bias.
    pub bias: f32,
    pub(super) step: Step,
}

impl Block {
    pub(super) const fn new(scale: u32, step: Step) -> Self {
        Block { scale, zero: 0, bias: 0.0, step }
    }

    /// Step that brings a value to the element's grid, for loops over many elements.
    pub const fn step(&self) -> Step {
        self.step
    }
}

/// Step that brings a value to the element's grid.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Step {
    /// Unchanged.
    Unit,
    /// Divided by this.
    Divide(f32),
    /// Multiplied by this.
    Multiply(f32),
    /// Every value becomes this one.
    Constant(f32),
}

impl Step {
    pub(super) fn apply(self, x: f32) -> f32 {
        match self {
            Step::Unit => x,
            Step::Divide(scale) => x / scale,
            Step::Multiply(inverse) => x * inverse,
            Step::Constant(value) => value,
        }
    }
}
