//! Casts one tensor panel by panel.
//!
//! A panel is a run of whole blocks and whole bytes of packed codes. Panels are quantized independently on
//! any thread and written at known offsets, so the output does not depend on the number of threads.

use std::ops::Range;
use std::sync::{Mutex, PoisonError};

use mantissa_kernels::map_reduce_fixed;
use mantissa_num::blockwise::{self, Block};
use mantissa_num::{Blocks, Codes, Given, Quantized, ScaleLevel, Scheme, TensorError, code_unit, quantize};
use mantissa_store::SafetensorsWriter;
use mantissa_store::Shown;
use mantissa_store::convention::native;

use crate::error::{BadInput, JobError, Result};
use crate::float_tensor::FloatTensor;
use crate::progress::Meter;

/// Approximate number of elements per panel.
const PANEL: usize = 1 << 18;

/// Number of codes that fill whole bytes and whole 32-bit words at every bit width.
const WORD_CODES: usize = 32;

/// Suffixes of tensors that belong to the whole tensor rather than to blocks.
const WHOLE: [&str; 3] = [".global", ".nested_scale", ".nested_offset"];

/// Maximum number of scales of a tensor without elements (`[2^40, 0]` per channel would have 2^40).
const MAX_EMPTY_SCALES: usize = 1 << 20;

/// Tensors that are written beside the scales.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Parts {
    /// Codes in whole bytes and dequantized values.
    Plain,
    /// These and the packed bytes.
    Both,
    /// The packed bytes alone.
    Packed,
}

/// Tensor with the way it is stored.
pub struct Caster<'a> {
    /// Tensor to read.
    pub tensor: FloatTensor<'a>,
    scheme: &'a Scheme,
    /// True if `n.packed` is written: on request, and for block codecs, which have no codes.
    pub packed: bool,
    /// True if codes of whole bytes and dequantized values are written.
    pub plain: bool,
    /// Elements per panel; the last may have fewer.
    step: usize,
    /// True if a panel is treated as one row.
    flat: bool,
}

/// Error of a cast: sums over the elements whose value and code are finite.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Cost {
    signal: f64,
    noise: f64,
    /// Largest |x - dequant|.
    pub max_abs: f64,
    /// Number of excluded elements.
    pub non_finite: u64,
}

/// Whole-tensor quantities that every panel needs.
#[derive(Clone, Copy, Default)]
struct Shared {
    outer: Option<f32>,
    block: Option<Block>,
}

impl<'a> Caster<'a> {
    /// Plans the panels.
    ///
    /// # Errors
    /// A tensor without elements but with too many scales; a read-only scheme; blocks that do not divide a
    /// row.
    pub fn new(scheme: &'a Scheme, tensor: FloatTensor<'a>, parts: Parts) -> Result<Self> {
        let FloatTensor { rows, cols, .. } = tensor;
        let (unit, flat) = unit(scheme, rows, cols);
        let step = unit.saturating_mul((PANEL / unit.max(1)).max(1)).max(1);
        let packed = parts != Parts::Plain || scheme.format.codec().is_some();
        let caster = Caster { tensor, scheme, packed, plain: parts != Parts::Packed, step, flat };
        if scheme.format.codec().is_some() {
            // Encoding a tensor without rows checks the scheme and the row length.
            quantize(scheme, &[], 0, cols, Given::default()).map_err(|e| caster.error(&e))?;
        }
        if tensor.len() == 0 && scheme.format.blocks().count(rows, cols) > MAX_EMPTY_SCALES {
            let found = format!("shape {:?}", tensor.meta().shape);
            let allowed = format!("at most {MAX_EMPTY_SCALES} scales for a tensor without elements");
            return Err(BadInput::new(caster.label(), found, allowed).into());
        }
        Ok(caster)
    }

    /// Returns the bits per element, scales and zero points included.
    pub fn bits_per_weight(&self) -> f64 {
        self.scheme.format.bits_per_weight(self.tensor.rows, self.tensor.cols)
    }

    /// Returns the bytes of `n.packed`.
    pub fn packed_bytes(&self) -> usize {
        packed_bytes(self.scheme, self.tensor.rows, self.tensor.cols)
    }

    /// Predicts the peak memory of [`cast`](Self::cast) in bytes: each thread holds one panel as read, as
    /// f32, as codes, dequantized, as output bytes, and its blocks.
    pub fn memory(&self, threads: usize) -> u64 {
        const PER_ELEMENT: usize = 32;
        const PER_BLOCK: usize = 64;
        const FIXED: u64 = 8 << 20;
        let elements = self.step.min(self.tensor.len());
        let (rows, cols) = self.shape(elements);
        let blocks = self.scheme.format.blocks().count(rows, cols);
        let panels = threads.min(self.panels()).max(1);
        let panel = elements.saturating_mul(PER_ELEMENT).saturating_add(blocks.saturating_mul(PER_BLOCK));
        FIXED + panel.saturating_mul(panels) as u64
    }

    /// Writes all tensors that this one becomes.
    ///
    /// # Errors
    /// A value without a code in the scheme; I/O.
    pub fn cast(&self, writer: &mut SafetensorsWriter, threads: usize, progress: &Meter) -> Result<Cost> {
        let shared = self.shared(threads)?;
        let writer = Mutex::new(writer);
        if self.tensor.len() == 0 {
            return self.cast_empty(&writer);
        }
        let panel = |i: Range<usize>| -> Result<Cost> {
            let range = self.range(i.start);
            let x = self.tensor.read(range.clone())?;
            let q = self.quantize(&x, range.start, shared);
            let mut q = q.map_err(|e| self.error(&e.shifted(range.start)))?;
            if let (Codes::U64(codes), Some(exact)) = (&mut q.codes, self.tensor.read_f64(range.clone())?) {
                *codes = exact.into_iter().map(f64::to_bits).collect();
            }
            let dequant = q.dequantize().map_err(|e| self.error(&e))?;
            self.write(&writer, i.start, range.start, &q, &dequant)?;
            progress.add(range.len() as u64 * self.tensor.unit());
            Ok(Cost::of(&x, &dequant))
        };
        let add = |sum: Result<Cost>, part: Result<Cost>| Ok(sum?.plus(part?));
        map_reduce_fixed(threads, self.panels(), 1, panel, Ok(Cost::default()), add)
    }

    fn panels(&self) -> usize {
        self.tensor.len().div_ceil(self.step)
    }

    fn range(&self, panel: usize) -> Range<usize> {
        let start = panel * self.step;
        start..self.tensor.len().min(start + self.step)
    }

    /// Returns rows and columns of a panel of `len` elements.
    fn shape(&self, len: usize) -> (usize, usize) {
        if self.flat { (1, len) } else { (len / self.tensor.cols.max(1), self.tensor.cols) }
    }

    /// Makes a first pass for the quantities that depend on the whole tensor.
    fn shared(&self, threads: usize) -> Result<Shared> {
        if self.scheme.accepts_non_finite() {
            return Ok(Shared::default());
        }
        let part = |i: Range<usize>| -> Result<Survey> {
            let range = self.range(i.start);
            Ok(Survey::of(&self.tensor.read(range.clone())?, range.start))
        };
        let add = |sum: Result<Survey>, part: Result<Survey>| Ok(sum?.then(part?));
        let survey = map_reduce_fixed(threads, self.panels(), 1, part, Ok(Survey::EMPTY), add)?;
        if let Some((index, value)) = survey.first {
            let count = survey.non_finite;
            return Err(self.error(&TensorError::NonFinite { count, index, value }));
        }
        let one_block = self.scheme.format.blocks() == Blocks::Tensor;
        Ok(Shared {
            outer: self.scheme.outer_scale(survey.range.amax()),
            block: one_block.then(|| self.scheme.block(survey.range, false, None)),
        })
    }

    fn quantize(&self, x: &[f32], first: usize, shared: Shared) -> Result<Quantized, TensorError> {
        let (rows, cols) = self.shape(x.len());
        let Some(block) = shared.block else {
            let given = Given { outer: shared.outer, first_index: first as u64, ..Given::default() };
            return quantize(self.scheme, x, rows, cols, given);
        };
        let format = &self.scheme.format;
        let mut codes = Codes::with_capacity(code_unit(format), x.len());
        x.iter().zip(first as u64..).for_each(|(&v, i)| codes.push(self.scheme.encode(v, &block, i)));
        let mut scales = Codes::with_capacity(format.scale().map_or(1, |s| s.code.unit_bytes()), 1);
        scales.push(block.scale);
        let zeros = if format.has_zero() { vec![block.zero] } else { Vec::new() };
        let biases = if format.has_bias() { vec![block.bias] } else { Vec::new() };
        Ok(Quantized {
            codes,
            scales: ScaleLevel::from(scales).with_zeros(zeros).with_biases(biases),
            ..Quantized::empty(format.clone(), rows, cols)
        })
    }

    /// Writes the scales of a tensor without elements.
    fn cast_empty(&self, writer: &Mutex<&mut SafetensorsWriter>) -> Result<Cost> {
        let FloatTensor { rows, cols, .. } = self.tensor;
        let q = quantize(self.scheme, &[], rows, cols, Given::default()).map_err(|e| self.error(&e))?;
        self.write(writer, 0, 0, &q, &[])?;
        Ok(Cost::default())
    }

    /// Writes the parts of panel `panel`, whose first element is `first`.
    fn write(
        &self,
        writer: &Mutex<&mut SafetensorsWriter>,
        panel: usize,
        first: usize,
        q: &Quantized,
        dequant: &[f32],
    ) -> Result<()> {
        let n = &self.tensor.meta().name;
        let codes = q.codes.to_le_bytes();
        let values: Vec<u8> = dequant.iter().flat_map(|v| v.to_le_bytes()).collect();
        let packed = self.packed.then(|| native::pack_codes(q));
        let scales = native::scale_tensors(n, q);
        let (rows, cols) = self.shape(self.step);
        let before = (panel * packed_bytes(self.scheme, rows, cols)) as u64;

        let mut writer = writer.lock().unwrap_or_else(PoisonError::into_inner);
        if self.plain && q.format.codec().is_none() {
            writer.write_range(&format!("{n}.codes"), (first * code_unit(&q.format)) as u64, &codes)?;
        }
        if self.plain {
            writer.write_range(&format!("{n}.dequant"), (first * size_of::<f32>()) as u64, &values)?;
        }
        if let Some(packed) = packed {
            writer.write_range(&format!("{n}.packed"), before, &packed)?;
        }
        let one_block = q.format.blocks() == Blocks::Tensor;
        for (name, bytes) in scales {
            // Whole-tensor parts are written with the first panel.
            let whole = one_block || WHOLE.iter().any(|part| name.ends_with(part));
            if whole && panel > 0 {
                continue;
            }
            let unit = bytes.len() / q.scales.len().max(1);
            let blocks = q.format.blocks().count(rows, cols);
            let offset = if whole { 0 } else { panel * blocks * unit };
            writer.write_range(&name, offset as u64, &bytes)?;
        }
        Ok(())
    }

    fn label(&self) -> String {
        let meta = self.tensor.meta();
        format!("tensor \"{}\"", Shown(&meta.name))
    }

    fn error(&self, error: &TensorError) -> JobError {
        let place = format!("{}: {}", self.tensor.path().display(), self.label());
        JobError::Cast { place, error: Box::new(error.clone()), scheme: self.scheme.to_string() }
    }
}

/// Returns the element count that a panel must be a multiple of, and whether a panel may split rows.
fn unit(scheme: &Scheme, rows: usize, cols: usize) -> (usize, bool) {
    let single_row = rows == 1 && scheme.format.codec().is_none();
    match scheme.format.blocks() {
        _ if scheme.needs_whole_tensor() => (rows * cols, true),
        // Two blocks, so that the 4-bit codes of an odd block size end on a byte.
        Blocks::Flat(g) => (2 * g as usize, true),
        Blocks::Tensor if single_row => (WORD_CODES, true),
        Blocks::Group(g) | Blocks::Tile { cols: g, .. } if single_row => (g as usize * WORD_CODES, true),
        Blocks::Tile { rows: r, .. } => (cols.saturating_mul(r as usize), false),
        _ => (cols, false),
    }
}

fn packed_bytes(scheme: &Scheme, rows: usize, cols: usize) -> usize {
    native::packed_bytes(&scheme.format, rows, cols)
}

/// Range and non-finite count of some elements.
#[derive(Clone, Copy)]
struct Survey {
    range: blockwise::Range,
    non_finite: usize,
    /// Index and value of the first non-finite element.
    first: Option<(usize, f32)>,
}

impl Survey {
    const EMPTY: Survey = Survey { range: blockwise::Range::EMPTY, non_finite: 0, first: None };

    fn of(x: &[f32], first_index: usize) -> Self {
        let non_finite = x.iter().filter(|v| !v.is_finite()).count();
        let first = match non_finite {
            0 => None,
            _ => x.iter().position(|v| !v.is_finite()).map(|i| (first_index + i, x[i])),
        };
        Survey { range: blockwise::Range::of(x), non_finite, first }
    }

    fn then(self, next: Self) -> Self {
        Survey {
            range: self.range.union(next.range),
            non_finite: self.non_finite + next.non_finite,
            first: self.first.or(next.first),
        }
    }
}

impl Cost {
    fn of(x: &[f32], dequant: &[f32]) -> Self {
        let mut cost = Cost::default();
        for (&x, &d) in x.iter().zip(dequant) {
            if x.is_finite() && d.is_finite() {
                let (x, error) = (f64::from(x), f64::from(x) - f64::from(d));
                cost.signal += x * x;
                cost.noise += error * error;
                cost.max_abs = cost.max_abs.max(error.abs());
            } else {
                cost.non_finite += 1;
            }
        }
        cost
    }

    fn plus(self, other: Self) -> Self {
        Cost {
            signal: self.signal + other.signal,
            noise: self.noise + other.noise,
            max_abs: self.max_abs.max(other.max_abs),
            non_finite: self.non_finite + other.non_finite,
        }
    }

    /// Returns `10 log10(signal / noise)`; `None` if either is zero.
    pub fn sqnr_db(&self) -> Option<f64> {
        let ratio = self.signal / self.noise;
        (ratio > 0.0 && ratio.is_finite()).then(|| 10.0 * ratio.log10())
    }
}

#[cfg(test)]
#[allow(clippy::expect_used)]
mod tests {
    use super::*;

    #[test]
    fn panels_end_with_blocks_and_bytes() {
        let unit = |scheme: &str, rows, cols| unit(&scheme.parse().expect("a scheme"), rows, cols);
        assert_eq!(unit("nf4-g3", 7, 5), (6, true));
        assert_eq!(unit("int4-g32", 4, 100), (100, false));
        assert_eq!(unit("int4-g5", 1, 1000), (160, true));
        assert_eq!(unit("fp8-e4m3-t128x128", 300, 10), (1280, false));
        assert_eq!(unit("int8-channel", 1, 77), (77, false));
        assert_eq!(unit("nf4-dq", 7, 5), (35, true));
        assert_eq!(unit("q4_0", 1, 320), (320, false));
    }

    #[test]
    fn cost_is_a_ratio_of_energies() {
        let cost = Cost::of(&[3.0, -4.0, f32::NAN], &[3.0, -4.5, 0.0]);
        assert_eq!((cost.max_abs, cost.non_finite), (0.5, 1));
        assert_eq!(cost.sqnr_db(), Some(20.0));
        assert_eq!(Cost::default().sqnr_db(), None);
    }
}
