//! One tensor through a scheme, panel by panel.
//!
//! A panel is a run of whole blocks and whole bytes of packed codes, so that panels can be quantized by themselves, on any
//! thread, and their parts written at known places: the output does not depend on the number of threads.

use std::ops::Range;
use std::sync::{Mutex, PoisonError};

use anyhow::Result;
use mantissa_kernels::map_reduce_fixed;
use mantissa_num::blockwise::{self, Block};
use mantissa_num::{Blocks, Codes, Given, Quantized, ScaleLevel, Scheme, TensorError, code_unit, quantize};
use mantissa_store::SafetensorsWriter;
use mantissa_store::convention::native;
use mantissa_store::error::Shown;

use crate::error::BadInput;
use crate::output;
use crate::progress::Progress;
use crate::tensors::FloatTensor;

/// Elements of a panel, about.
const PANEL: usize = 1 << 18;

/// Codes that fill whole bytes and whole 32-bit words at every width.
const WORD_CODES: usize = 32;

/// What belongs to a whole tensor, whatever its blocks.
const WHOLE: [&str; 3] = [".global", ".nested_scale", ".nested_offset"];

/// Most scales that a tensor without elements may ask for (`[2^40, 0]` per channel has 2^40).
const MAX_EMPTY_SCALES: usize = 1 << 20;

/// A tensor and how it is to be stored.
pub struct Caster<'a> {
    /// What is read.
    pub tensor: FloatTensor<'a>,
    scheme: &'a Scheme,
    /// Whether `n.packed` is written: where it is asked for, and of codecs, which have no codes.
    pub packed: bool,
    /// Elements of every panel but the last.
    step: usize,
    /// Whether a panel is seen as one row.
    flat: bool,
}

/// The error of a cast: sums over the elements whose value and code are finite.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Cost {
    signal: f64,
    noise: f64,
    /// Largest |x - dequant|.
    pub max_abs: f64,
    /// Elements left out.
    pub non_finite: u64,
}

/// What the whole tensor decides for each panel.
#[derive(Clone, Copy, Default)]
struct Shared {
    outer: Option<f32>,
    block: Option<Block>,
}

impl<'a> Caster<'a> {
    /// Plans the panels.
    ///
    /// # Errors
    /// The tensor has no elements and yet more scales than would make sense; the scheme is read only, or its blocks do not
    /// divide a row.
    pub fn new(scheme: &'a Scheme, tensor: FloatTensor<'a>, packed: bool) -> Result<Self> {
        let FloatTensor { rows, cols, .. } = tensor;
        let (unit, flat) = unit(scheme, rows, cols);
        let step = unit.saturating_mul((PANEL / unit.max(1)).max(1)).max(1);
        let packed = packed || scheme.format.codec().is_some();
        let caster = Caster { tensor, scheme, packed, step, flat };
        if scheme.format.codec().is_some() {
            // No rows at all show what is at fault with the scheme and their length.
            quantize(scheme, &[], 0, cols, Given::default()).map_err(|e| caster.error(&e))?;
        }
        if tensor.len() == 0 && scheme.format.blocks().count(rows, cols) > MAX_EMPTY_SCALES {
            let found = format!("shape {}", output::shape(&tensor.meta().shape));
            let allowed = format!("at most {MAX_EMPTY_SCALES} scales where there are no elements");
            return Err(BadInput::new(caster.label(), found, allowed).into());
        }
        Ok(caster)
    }

    /// Bits per element with scales and zero points.
    pub fn bits_per_weight(&self) -> f64 {
        self.scheme.format.bits_per_weight(self.tensor.rows, self.tensor.cols)
    }

    /// Bytes of `n.packed`.
    pub fn packed_bytes(&self) -> usize {
        packed_bytes(self.scheme, self.tensor.rows, self.tensor.cols)
    }

    /// Peak memory of [`cast`](Self::cast) in bytes: every thread holds one panel as read, as f32, as codes, dequantized, and as
    /// the bytes to be written, and its blocks.
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
    /// A value that the scheme has no code for; reading; writing.
    pub fn cast(&self, writer: &mut SafetensorsWriter, threads: usize, progress: &Progress) -> Result<Cost> {
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

    /// Rows and columns of a panel of `len` elements.
    fn shape(&self, len: usize) -> (usize, usize) {
        if self.flat { (1, len) } else { (len / self.tensor.cols.max(1), self.tensor.cols) }
    }

    /// What must be known of the whole tensor before its first panel, which a first pass finds.
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
            let given = Given { outer: shared.outer, first_index: first as u64 };
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

    /// A tensor without elements may still have scales.
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
        if q.format.codec().is_none() {
            writer.write_range(&format!("{n}.codes"), (first * code_unit(&q.format)) as u64, &codes)?;
        }
        writer.write_range(&format!("{n}.dequant"), (first * size_of::<f32>()) as u64, &values)?;
        if let Some(packed) = packed {
            writer.write_range(&format!("{n}.packed"), before, &packed)?;
        }
        let one_block = q.format.blocks() == Blocks::Tensor;
        for (name, bytes) in scales {
            // What belongs to the whole tensor comes with its first panel.
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

    fn error(&self, error: &TensorError) -> anyhow::Error {
        let path = self.tensor.path().display();
        anyhow::anyhow!("{path}: {}: {error} (scheme {})", self.label(), self.scheme)
    }
}

/// Elements that a panel must be a multiple of, and whether it may cut through rows.
fn unit(scheme: &Scheme, rows: usize, cols: usize) -> (usize, bool) {
    let single_row = rows == 1 && scheme.format.codec().is_none();
    match scheme.format.blocks() {
        _ if scheme.needs_whole_tensor() => (rows * cols, true),
        // Two blocks, so that the 4-bit codes of an odd block end with a byte.
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

/// Range and non-finite values of some elements.
#[derive(Clone, Copy)]
struct Survey {
    range: blockwise::Range,
    non_finite: usize,
    /// Index and value of the first that is not finite.
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

    /// `10 log10(signal / noise)`; `None` where either is zero.
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
