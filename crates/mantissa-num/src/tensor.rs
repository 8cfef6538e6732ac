//! Whole tensors: `[rows, cols]` of f32 ↔ codes and scales. Every fast path is tested against this reference.

use std::ops::Range as Rows;

use crate::blockwise::{Block, Decoder, Range, nest};
use crate::codec::Codec;
use crate::codes::Codes;
use crate::error::TensorError;
use crate::format::{Blocks, Code, Format};
use crate::level::{Nested, ScaleLevel};
use crate::scheme::{Rule, Scheme};
use crate::trellis::Trellis;

/// A quantized `[rows, cols]` tensor, unpacked: one code per element, row-major, or the blocks of a codec.
#[derive(Clone, Debug, PartialEq)]
pub struct Quantized {
    /// Format of codes and scales.
    pub format: Format,
    /// Product of all axes but the last.
    pub rows: usize,
    /// Last axis.
    pub cols: usize,
    /// One code per element. Integers are sign-extended to 8 bits. [`Codes::Packed`] for a codec or trellis.
    pub codes: Codes,
    /// Stored block scales and offsets, and the levels above them.
    pub scales: ScaleLevel,
}

/// Parameters that a caller may fix.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Given {
    /// Global scale as stored, in place of one from this tensor's amax: fused layers share theirs, and a static
    /// activation scale comes from calibration. For a format with a single level of scales it is the scale of every
    /// block.
    pub outer: Option<f32>,
    /// Zero point of every block, in the signed domain, where `outer` is their scale.
    pub zero: i32,
    /// Flat index of the first element in its tensor, for stochastic rounding of a panel.
    pub first_index: u64,
}

/// Scale of an activation that calibration found, with its zero point.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct StaticScale {
    /// Scale, or NVFP4's global scale as stored.
    pub scale: f32,
    /// Zero point in the signed domain; 0 for a symmetric scheme.
    pub zero: i32,
}

impl From<f32> for StaticScale {
    fn from(scale: f32) -> Self {
        StaticScale { scale, zero: 0 }
    }
}

/// Quantizes `x` (`[rows, cols]`, row-major).
///
/// # Errors
/// [`TensorError::NonFinite`] unless the scheme [accepts](Scheme::accepts_non_finite) such values,
/// [`TensorError::Length`] if `x` does not match the shape, [`TensorError::Ragged`] and
/// [`TensorError::ScaleOverflow`] for a codec, [`TensorError::Searched`] for a trellis.
pub fn quantize(
    scheme: &Scheme,
    x: &[f32],
    rows: usize,
    cols: usize,
    given: Given,
) -> Result<Quantized, TensorError> {
    if let Some(codec) = scheme.format.codec() {
        let codes = Codes::Packed(encode_blocks(codec, x, rows, cols)?);
        return Ok(Quantized { codes, ..Quantized::empty(scheme.format.clone(), rows, cols) });
    }
    let plan = BlockParameters::new(scheme, x, rows, cols, given)?;
    let format = &scheme.format;
    let mut q = Quantized::empty(format.clone(), rows, cols);
    plan.for_each(|i, block| q.codes.push(scheme.encode(x[i], block, given.first_index + i as u64)));
    match plan.nested {
        Some(scales) => q.scales = scales,
        None if format.scale().is_some() => plan.blocks.iter().for_each(|b| q.scales.push(b.scale)),
        None => {}
    }
    if format.has_zero() {
        q.scales.extend_zeros(plan.blocks.iter().map(|b| b.zero));
    }
    if format.has_bias() {
        q.scales.extend_biases(plan.blocks.iter().map(|b| b.bias));
    }
    if plan.outer.is_some() {
        q.scales = q.scales.with_outer(plan.outer);
    }
    Ok(q)
}

/// Quantizes `x` (`[rows, cols]`, row-major) under these block scales, such as learned ones, each rounded to the code
/// that stores it, to nearest and without zero points.
///
/// # Errors
/// [`TensorError::Length`] if `x` or `scales` do not match the shape.
///
/// # Panics
/// If the format has no block scales.
pub fn quantize_with_scales(
    scheme: &Scheme,
    x: &[f32],
    rows: usize,
    cols: usize,
    scales: &[f32],
) -> Result<Quantized, TensorError> {
    let (blocks, count) = (scheme.format.blocks(), rows * cols);
    for (what, found, expected) in
        [("values", x.len(), count), ("scales", scales.len(), blocks.count(rows, cols))]
    {
        if found != expected {
            return Err(TensorError::Length { what, found, expected, rows, cols });
        }
    }
    let mut q = Quantized::empty(scheme.format.clone(), rows, cols);
    let all: Vec<Block> = scales.iter().map(|scale| scheme.block_with_scale(*scale)).collect();
    all.iter().for_each(|block| q.scales.push(block.scale));
    for (row, x) in x.chunks_exact(cols.max(1)).enumerate() {
        for (block, start, end) in blocks.runs(cols, row) {
            let at = (row * cols + start) as u64;
            let codes = x[start..end].iter().zip(at..).map(|(x, at)| scheme.encode(*x, &all[block], at));
            codes.for_each(|code| q.codes.push(code));
        }
    }
    Ok(q)
}

/// Quantizes and dequantizes each element in place, as for activations.
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
    if let Some(codec) = scheme.format.codec() {
        let blocks = encode_blocks(codec, x, rows, cols)?;
        codec.decode(&blocks, x);
        return Ok(());
    }
    let plan = BlockParameters::new(scheme, x, rows, cols, given)?;
    let format = &scheme.format;
    let decoders: Vec<_> = (0..plan.blocks.len()).map(|i| plan.decoder(format, i)).collect();
    plan.for_each_block(|i, b| {
        let code = scheme.encode(x[i], &plan.blocks[b], given.first_index + i as u64);
        x[i] = decoders[b].value(format.element(code));
    });
    Ok(())
}

impl Quantized {
    /// Creates a tensor without codes or scales, for a reader or writer of `format` to fill.
    pub fn empty(format: Format, rows: usize, cols: usize) -> Self {
        let codes = match format {
            Format::Codec(_) | Format::Trellis(_) => Codes::Packed(Vec::new()),
            _ => Codes::with_capacity(code_unit(&format), rows.saturating_mul(cols).min(MAX_RESERVED)),
        };
        let scales = Codes::with_capacity(format.scale().map_or(1, |s| s.code.unit_bytes()), 0);
        Quantized { format, rows, cols, codes, scales: scales.into() }
    }

    /// Global scale as stored, if the format has one.
    pub fn outer(&self) -> Option<f32> {
        self.scales.tensor_wide()
    }

    /// Zero points in the signed domain, one per block; empty if the format has none.
    pub fn zeros(&self) -> &[i32] {
        self.scales.zeros()
    }

    /// Values of the lowest code, one per block; empty if the format has no bias.
    pub fn biases(&self) -> &[f32] {
        self.scales.biases()
    }

    /// Level above the block scales, under double quantization.
    pub fn nested(&self) -> Option<Nested<'_>> {
        self.scales.nested(self.format.scale()?)
    }

    /// Replaces the tensor-wide scale.
    pub fn set_outer(&mut self, scale: Option<f32>) {
        self.scales.outer = scale.map(|scale| Box::new(ScaleLevel::single(scale)));
    }

    /// Dequantizes all rows.
    ///
    /// # Errors
    /// [`TensorError::Length`] if codes, scales or zero points do not match the shape.
    pub fn dequantize(&self) -> Result<Vec<f32>, TensorError> {
        self.check()?;
        if let Format::Trellis(trellis) = &self.format {
            return Ok(self.folded(trellis));
        }
        let mut out = vec![0.0; self.rows * self.cols];
        self.dequantize_rows(0..self.rows, &mut out);
        Ok(out)
    }

    /// Dequantizes some rows into `out` (`[rows.len(), cols]`); a trellis decodes all rows for it. The tensor must
    /// have passed [`check`](Self::check).
    pub fn dequantize_rows(&self, rows: Rows<usize>, out: &mut [f32]) {
        if let Some(codec) = self.format.codec() {
            return self.decode_blocks(codec, rows, out);
        }
        if let Format::Trellis(trellis) = &self.format {
            let whole = self.folded(trellis);
            return out.copy_from_slice(&whole[rows.start * self.cols..rows.end * self.cols]);
        }
        let blocks = self.format.blocks();
        for (row, out) in rows.zip(out.chunks_exact_mut(self.cols.max(1))) {
            for (block, start, end) in blocks.runs(self.cols, row) {
                let decoder = self.block_decoder(block);
                for col in start..end {
                    out[col] = decoder.value(self.format.element(self.codes.get(row * self.cols + col)));
                }
            }
        }
    }

    fn decode_blocks(&self, codec: &Codec, rows: Rows<usize>, out: &mut [f32]) {
        let (Codes::Packed(bytes) | Codes::U8(bytes)) = &self.codes else { return };
        let row_bytes = self.cols / codec.elements * codec.bytes;
        codec.decode(&bytes[rows.start * row_bytes..rows.end * row_bytes], out);
    }

    /// Checks that all lists match the shape and the format.
    ///
    /// # Errors
    /// [`TensorError::Length`] names the first mismatch, [`TensorError::Ragged`] a codec whose blocks do not divide
    /// rows, [`TensorError::Tiles`] a trellis whose tiles do not divide the tensor.
    pub fn check(&self) -> Result<(), TensorError> {
        let blocks = self.format.blocks().count(self.rows, self.cols);
        let per_block = |present: bool| if present { blocks } else { 0 };
        let scale = self.format.scale();
        let outer = usize::from(scale.is_some_and(|s| s.tensor_wide().is_some()));
        let nested = scale.and_then(|s| s.nested()).map_or(0, |(b, _)| b.count(1, blocks));
        let scales = match &self.format {
            Format::Trellis(_) => self.rows + self.cols,
            _ => per_block(scale.is_some()),
        };
        let lists = [
            ("codes", self.codes.len(), self.code_count()?),
            ("scales", self.scales.len(), scales),
            ("zero points", self.zeros().len(), per_block(self.format.has_zero())),
            ("biases", self.biases().len(), per_block(self.format.has_bias())),
            ("tensor-wide scales", usize::from(self.outer().is_some()), outer),
            ("nested scales", self.nested().map_or(0, |n| n.len()), nested),
        ];
        match lists.into_iter().find(|(_, found, expected)| found != expected) {
            None => Ok(()),
            Some((what, found, expected)) => {
                Err(TensorError::Length { what, found, expected, rows: self.rows, cols: self.cols })
            }
        }
    }

    /// Number of codes, or bytes of a codec, required by the shape.
    fn code_count(&self) -> Result<usize, TensorError> {
        let (rows, cols) = (self.rows, self.cols);
        match &self.format {
            Format::Trellis(_) if !Trellis::fits(rows, cols) => Err(TensorError::Tiles { rows, cols }),
            Format::Trellis(trellis) => Ok(trellis.code_bytes(rows, cols)),
            _ => match self.format.codec() {
                None => Ok(self.rows * self.cols),
                Some(codec) => {
                    codec.total_bytes(self.rows, self.cols).ok_or_else(|| ragged(codec, self.cols))
                }
            },
        }
    }

    /// Decoder of the elements of `block`, in the order of [`Blocks::grid`]. The tensor must have passed [`check`](Self::check).
    pub fn block_decoder(&self, block: usize) -> Decoder {
        let scale = if self.scales.is_empty() { 0 } else { self.scales.get(block) };
        if let (Some(nested), Some(tree)) = (self.nested(), self.format.scale()) {
            return Decoder::scaled(nested.scale(block, tree.code.decode(scale)));
        }
        let (zeros, biases) = (self.zeros(), self.biases());
        let zero = if zeros.is_empty() { 0 } else { zeros[block] };
        let decoder = self.format.decoder(scale, zero, self.outer());
        if biases.is_empty() { decoder } else { decoder.with_bias(biases[block]) }
    }
}

/// Number of codes reserved at once, for shapes that may come from a file.
const MAX_RESERVED: usize = 1 << 24;

fn ragged(codec: &Codec, cols: usize) -> TensorError {
    TensorError::Ragged { cols, block: codec.elements, codec: codec.name }
}

fn encode_blocks(codec: &Codec, x: &[f32], rows: usize, cols: usize) -> Result<Vec<u8>, TensorError> {
    check_length(x, rows, cols)?;
    check_finite(x)?;
    let bytes = codec.total_bytes(rows, cols).ok_or_else(|| ragged(codec, cols))?;
    let mut blocks = vec![0; bytes];
    codec.encode(x, None, &mut blocks);
    codec.check_scales(x, &blocks)?;
    Ok(blocks)
}

/// Unit of the element codes of a format, in bytes.
pub fn code_unit(format: &Format) -> usize {
    match format {
        Format::Affine(a) => a.code.unit_bytes(),
        Format::Table(_) | Format::Codec(_) | Format::Trellis(_) => Code::Int(8).unit_bytes(),
    }
}

/// The parameters of every block of a tensor.
struct BlockParameters {
    geometry: Blocks,
    rows: usize,
    cols: usize,
    blocks: Vec<Block>,
    outer: Option<f32>,
    nested: Option<ScaleLevel>,
}

impl BlockParameters {
    fn new(scheme: &Scheme, x: &[f32], rows: usize, cols: usize, given: Given) -> Result<Self, TensorError> {
        check_length(x, rows, cols)?;
        if scheme.format.trellis().is_some() {
            return Err(TensorError::Searched { scheme: scheme.to_string() });
        }
        if !scheme.accepts_non_finite() {
            check_finite(x)?;
        }
        let geometry = scheme.format.blocks();
        let ranges = ranges(geometry, x, rows, cols);
        let two_levels = scheme.has_outer_scale();
        let outer = given.outer.filter(|_| two_levels).or_else(|| {
            scheme.outer_scale(ranges.iter().fold(Range::EMPTY, |all, &range| all.union(range)).amax())
        });
        let full = match geometry {
            Blocks::Flat(g) => u64::from(g),
            _ => 0,
        };
        let blocks = match given.outer.filter(|_| !two_levels) {
            Some(scale) => {
                let zero = if scheme.format.has_zero() { given.zero } else { 0 };
                let mut block = scheme.block_with_scale(scale);
                block.zero = zero;
                vec![block; ranges.len()]
            }
            None => ranges.iter().map(|&range| scheme.block(range, range.count < full, outer)).collect(),
        };
        let mut plan = BlockParameters { geometry, rows, cols, blocks, outer, nested: None };
        if scheme.encoder.rule == Rule::FourOverSix {
            plan.choose_by_values(scheme, x);
        }
        if let Some(tree) = scheme.format.scale() {
            let scales: Vec<f32> = match tree.nested() {
                Some(_) => plan.blocks.iter().map(|b| f32::from_bits(b.scale)).collect(),
                None => Vec::new(),
            };
            plan.nested = nest(tree, &scales, None);
        }
        Ok(plan)
    }

    /// Blocks under a rule that needs more than their range: each is one run of a row.
    fn choose_by_values(&mut self, scheme: &Scheme, x: &[f32]) {
        for row in 0..self.rows {
            for (block, start, end) in self.geometry.runs(self.cols, row) {
                let run = &x[row * self.cols + start..row * self.cols + end];
                self.blocks[block] = scheme.block_of(run, false, self.outer);
            }
        }
    }

    fn decoder(&self, format: &Format, block: usize) -> Decoder {
        let Block { scale, zero, bias, .. } = self.blocks[block];
        let level = self.nested.as_ref().zip(format.scale());
        let nested = level.and_then(|(level, tree)| Some((level, tree, level.nested(tree)?)));
        match nested {
            Some((level, tree, nested)) => {
                Decoder::scaled(nested.scale(block, tree.code.decode(level.get(block))))
            }
            _ if format.has_bias() => format.decoder(scale, zero, self.outer).with_bias(bias),
            _ => format.decoder(scale, zero, self.outer),
        }
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

/// The range of each block.
fn ranges(geometry: Blocks, x: &[f32], rows: usize, cols: usize) -> Vec<Range> {
    let mut ranges = vec![Range::EMPTY; geometry.count(rows, cols)];
    for row in 0..rows {
        for (block, start, end) in geometry.runs(cols, row) {
            ranges[block] = ranges[block].union(Range::of(&x[row * cols + start..row * cols + end]));
        }
    }
    ranges
}

fn check_length(x: &[f32], rows: usize, cols: usize) -> Result<(), TensorError> {
    match x.len() == rows * cols {
        true => Ok(()),
        false => {
            Err(TensorError::Length { what: "values", found: x.len(), expected: rows * cols, rows, cols })
        }
    }
}

/// Checks that all values are finite.
///
/// # Errors
/// [`TensorError::NonFinite`] with the first value that is not, and their number.
pub fn check_finite(x: &[f32]) -> Result<(), TensorError> {
    let mut bad = x.iter().enumerate().filter(|(_, v)| !v.is_finite());
    match bad.next() {
        None => Ok(()),
        Some((index, &value)) => Err(TensorError::NonFinite { count: 1 + bad.count(), index, value }),
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used, clippy::panic)]
mod tests {
    use super::*;

    /// Types with f16 scales, and the largest magnitude, in units of 65504, that both signs reach.
    const REACH: [(&str, f32); 7] = [
        ("q4_0", 8.0),
        ("q5_0", 16.0),
        ("q8_0", 127.0),
        ("q4_1", 1.0),
        ("q5_1", 1.0),
        ("tq1_0", 1.0),
        ("tq2_0", 1.0),
    ];

    #[test]
    fn a_scale_past_f16_is_an_error_and_never_infinity() {
        for (name, reach) in REACH {
            let scheme: Scheme = name.parse().unwrap();
            let mut x = vec![0.25; 1024];
            (x[300], x[301]) = (-reach * 65504.0, reach * 65504.0);
            let q = quantize(&scheme, &x, 2, 512, Given::default()).unwrap();
            assert!(q.dequantize().unwrap().iter().all(|v| v.is_finite()), "{name}");
            (x[300], x[301], x[900]) = (-reach * 65600.0, reach * 65600.0, f32::MAX);
            let error = quantize(&scheme, &x, 2, 512, Given::default()).unwrap_err();
            let TensorError::ScaleOverflow { count: 2, index, amax, codec } = error else {
                panic!("{name}: {error}")
            };
            let block = scheme.format.codec().unwrap().elements;
            assert_eq!((index, amax, codec), (300 / block * block, reach * 65600.0, name));
            let mut y = x.clone();
            assert_eq!(fake_quantize(&scheme, &mut y, 2, 512, Given::default()), Err(error));
            assert!(error_text(&scheme, &x).contains("largest f16"));
        }
    }

    fn error_text(scheme: &Scheme, x: &[f32]) -> String {
        quantize(scheme, x, 2, 512, Given::default()).unwrap_err().to_string()
    }

    #[test]
    fn power_of_two_scales_reach_every_f32() {
        let scheme: Scheme = "gguf-mxfp4".parse().unwrap();
        let x = vec![f32::MAX; 32];
        let q = quantize(&scheme, &x, 1, 32, Given::default()).unwrap();
        assert!(q.dequantize().unwrap().iter().all(|v| v.is_finite()));
    }
}
