//! Whole tensors: `[rows, cols]` of f32 ↔ codes and scales. The reference that every fast path is compared with.

use std::ops::Range as Rows;

use crate::blockwise::{Block, Range};
use crate::format::{Blocks, Code, Format};
use crate::scheme::Scheme;

/// A list of codes, each in the smallest unit that holds it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Codes {
    /// Codes of at most 8 bits.
    U8(Vec<u8>),
    /// Codes of 9 to 16 bits.
    U16(Vec<u16>),
    /// Codes of 17 to 32 bits.
    U32(Vec<u32>),
}

impl Codes {
    /// An empty list for codes of `unit_bytes` 1, 2 or 4.
    pub fn with_capacity(unit_bytes: usize, n: usize) -> Self {
        match unit_bytes {
            1 => Codes::U8(Vec::with_capacity(n)),
            2 => Codes::U16(Vec::with_capacity(n)),
            _ => Codes::U32(Vec::with_capacity(n)),
        }
    }

    /// Number of codes.
    pub fn len(&self) -> usize {
        match self {
            Codes::U8(v) => v.len(),
            Codes::U16(v) => v.len(),
            Codes::U32(v) => v.len(),
        }
    }

    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Code `i`.
    pub fn get(&self, i: usize) -> u32 {
        match self {
            Codes::U8(v) => v[i].into(),
            Codes::U16(v) => v[i].into(),
            Codes::U32(v) => v[i],
        }
    }

    /// Appends a code, cut to the unit.
    pub fn push(&mut self, code: u32) {
        match self {
            Codes::U8(v) => v.push(code as u8),
            Codes::U16(v) => v.push(code as u16),
            Codes::U32(v) => v.push(code),
        }
    }

    /// Little-endian bytes, one unit per code.
    pub fn to_le_bytes(&self) -> Vec<u8> {
        match self {
            Codes::U8(v) => v.clone(),
            Codes::U16(v) => v.iter().flat_map(|c| c.to_le_bytes()).collect(),
            Codes::U32(v) => v.iter().flat_map(|c| c.to_le_bytes()).collect(),
        }
    }

    /// The inverse of [`to_le_bytes`](Self::to_le_bytes); a trailing partial unit is dropped.
    pub fn from_le_bytes(unit_bytes: usize, bytes: &[u8]) -> Self {
        match unit_bytes {
            1 => Codes::U8(bytes.to_vec()),
            2 => Codes::U16(bytes.chunks_exact(2).map(|b| u16::from_le_bytes([b[0], b[1]])).collect()),
            _ => Codes::U32(
                bytes.chunks_exact(4).map(|b| u32::from_le_bytes([b[0], b[1], b[2], b[3]])).collect(),
            ),
        }
    }
}

/// A quantized `[rows, cols]` tensor, unpacked: one code per element, row-major.
#[derive(Clone, Debug, PartialEq)]
pub struct Quantized {
    /// How to read it.
    pub format: Format,
    /// Product of all axes but the last.
    pub rows: usize,
    /// Last axis.
    pub cols: usize,
    /// One per element. Integers are sign-extended to 8 bits.
    pub codes: Codes,
    /// Stored block scales, in the order of [`Blocks::grid`]; empty for a plain cast.
    pub scales: Codes,
    /// Tensor-wide scale as stored, where the format has one.
    pub outer: Option<f32>,
    /// Zero points in the signed domain, one per block; empty where the format has none.
    pub zeros: Vec<i32>,
}

/// Why a tensor could not be quantized or a quantized tensor not be read.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
#[non_exhaustive]
pub enum TensorError {
    /// NaN or infinity where the format has no code for it.
    #[error(
        "found {count} non-finite values, the first ({value}) at element {index}, allowed finite values only"
    )]
    NonFinite {
        /// How many.
        count: usize,
        /// Flat index of the first.
        index: usize,
        /// The first.
        value: f32,
    },
    /// A list does not have the length that the shape requires.
    #[error("{what}: found {found}, allowed {expected} for shape [{rows}, {cols}]")]
    Length {
        /// Which list.
        what: &'static str,
        /// Its length.
        found: usize,
        /// The length required.
        expected: usize,
        /// Rows of the tensor.
        rows: usize,
        /// Columns of the tensor.
        cols: usize,
    },
}

/// What a caller may fix beforehand.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Given {
    /// Tensor-wide scale as stored, instead of one from this tensor's amax: fused partners share theirs, and a static
    /// activation scale comes from calibration. For a format with a single level of scales it is the scale of every block.
    pub outer: Option<f32>,
    /// Flat index of the first element in its tensor, for stochastic rounding of a panel.
    pub first_index: u64,
}

/// Quantizes `x` (`[rows, cols]`, row-major).
///
/// # Errors
/// [`TensorError::NonFinite`] unless the scheme [accepts](Scheme::accepts_non_finite) such values, and
/// [`TensorError::Length`] when `x` does not match the shape.
pub fn quantize(
    scheme: &Scheme,
    x: &[f32],
    rows: usize,
    cols: usize,
    given: Given,
) -> Result<Quantized, TensorError> {
    let plan = Plan::new(scheme, x, rows, cols, given)?;
    let format = &scheme.format;
    let mut codes = Codes::with_capacity(code_unit(format), x.len());
    plan.for_each(|i, block| codes.push(scheme.encode(x[i], block, given.first_index + i as u64)));
    let mut scales =
        Codes::with_capacity(format.scale().map_or(1, |s| s.code.unit_bytes()), plan.blocks.len());
    let mut zeros = Vec::new();
    if format.scale().is_some() {
        plan.blocks.iter().for_each(|b| scales.push(b.scale));
    }
    if format.has_zero() {
        zeros.extend(plan.blocks.iter().map(|b| b.zero));
    }
    Ok(Quantized { format: format.clone(), rows, cols, codes, scales, outer: plan.outer, zeros })
}

/// Replaces each element by the value of its code: quantize and dequantize in place, as an activation is.
///
/// # Errors
/// As [`quantize`].
pub fn fake_quantize(
    scheme: &Scheme,
    x: &mut [f32],
    rows: usize,
    cols: usize,
    given: Given,
) -> Result<(), TensorError> {
    let plan = Plan::new(scheme, x, rows, cols, given)?;
    let format = &scheme.format;
    let decoders: Vec<_> = plan.blocks.iter().map(|b| format.decoder(b.scale, b.zero, plan.outer)).collect();
    plan.for_each_block(|i, b| {
        let code = scheme.encode(x[i], &plan.blocks[b], given.first_index + i as u64);
        x[i] = decoders[b].value(format.element(code));
    });
    Ok(())
}

impl Quantized {
    /// Dequantizes all rows.
    ///
    /// # Errors
    /// [`TensorError::Length`] when codes, scales or zero points do not match the shape.
    pub fn dequantize(&self) -> Result<Vec<f32>, TensorError> {
        self.check()?;
        let mut out = vec![0.0; self.rows * self.cols];
        self.dequantize_rows(0..self.rows, &mut out);
        Ok(out)
    }

    /// Dequantizes some rows into `out` (`[rows.len(), cols]`). The tensor must have passed [`check`](Self::check).
    pub fn dequantize_rows(&self, rows: Rows<usize>, out: &mut [f32]) {
        let blocks = self.format.blocks();
        for (row, out) in rows.zip(out.chunks_exact_mut(self.cols.max(1))) {
            for (block, start, end) in blocks.runs(self.cols, row) {
                let decoder = self.decoder(block);
                for col in start..end {
                    out[col] = decoder.value(self.format.element(self.codes.get(row * self.cols + col)));
                }
            }
        }
    }

    /// Whether all lists match the shape and the format.
    ///
    /// # Errors
    /// [`TensorError::Length`] names the first list that does not.
    pub fn check(&self) -> Result<(), TensorError> {
        let blocks = self.format.blocks().count(self.rows, self.cols);
        let scales = if self.format.scale().is_some() { blocks } else { 0 };
        let zeros = if self.format.has_zero() { blocks } else { 0 };
        let outer = usize::from(self.format.scale().is_some_and(|s| s.outer.is_some()));
        let lists = [
            ("codes", self.codes.len(), self.rows * self.cols),
            ("scales", self.scales.len(), scales),
            ("zero points", self.zeros.len(), zeros),
            ("tensor-wide scales", usize::from(self.outer.is_some()), outer),
        ];
        match lists.into_iter().find(|(_, found, expected)| found != expected) {
            None => Ok(()),
            Some((what, found, expected)) => {
                Err(TensorError::Length { what, found, expected, rows: self.rows, cols: self.cols })
            }
        }
    }

    fn decoder(&self, block: usize) -> crate::blockwise::Decoder {
        let scale = if self.scales.is_empty() { 0 } else { self.scales.get(block) };
        let zero = if self.zeros.is_empty() { 0 } else { self.zeros[block] };
        self.format.decoder(scale, zero, self.outer)
    }
}

/// Unit of the element codes of a format, in bytes.
pub fn code_unit(format: &Format) -> usize {
    match format {
        Format::Affine(a) => a.code.unit_bytes(),
        Format::Table(_) => Code::Int(8).unit_bytes(),
    }
}

/// The parameters of every block of a tensor.
struct Plan {
    geometry: Blocks,
    rows: usize,
    cols: usize,
    blocks: Vec<Block>,
    outer: Option<f32>,
}

impl Plan {
    fn new(scheme: &Scheme, x: &[f32], rows: usize, cols: usize, given: Given) -> Result<Self, TensorError> {
        if x.len() != rows * cols {
            return Err(TensorError::Length {
                what: "values",
                found: x.len(),
                expected: rows * cols,
                rows,
                cols,
            });
        }
        if !scheme.accepts_non_finite() {
            check_finite(x)?;
        }
        let geometry = scheme.format.blocks();
        let mut ranges = vec![Range::EMPTY; geometry.count(rows, cols)];
        let mut sizes = vec![0usize; ranges.len()];
        for row in 0..rows {
            for (block, start, end) in geometry.runs(cols, row) {
                let run = &x[row * cols + start..row * cols + end];
                ranges[block] = ranges[block].union(Range::of(run));
                sizes[block] += run.len();
            }
        }
        let two_levels = scheme.has_outer_scale();
        let outer = given.outer.filter(|_| two_levels).or_else(|| {
            scheme.outer_scale(ranges.iter().fold(Range::EMPTY, |all, &range| all.union(range)).amax())
        });
        let full = match geometry {
            Blocks::Flat(g) => g as usize,
            _ => 0,
        };
        let blocks = match given.outer.filter(|_| !two_levels) {
            Some(scale) => vec![scheme.block_with_scale(scale); ranges.len()],
            None => {
                ranges.iter().zip(sizes).map(|(&range, n)| scheme.block(range, n < full, outer)).collect()
            }
        };
        Ok(Plan { geometry, rows, cols, blocks, outer })
    }

    /// Calls `f` with every element's flat index and its block's index, in order.
    fn for_each_block(&self, mut f: impl FnMut(usize, usize)) {
        for row in 0..self.rows {
            for (block, start, end) in self.geometry.runs(self.cols, row) {
                (start..end).for_each(|col| f(row * self.cols + col, block));
            }
        }
    }

    fn for_each(&self, mut f: impl FnMut(usize, &Block)) {
        self.for_each_block(|i, b| f(i, &self.blocks[b]));
    }
}

fn check_finite(x: &[f32]) -> Result<(), TensorError> {
    let mut bad = x.iter().enumerate().filter(|(_, v)| !v.is_finite());
    match bad.next() {
        None => Ok(()),
        Some((index, &value)) => Err(TensorError::NonFinite { count: 1 + bad.count(), index, value }),
    }
}
