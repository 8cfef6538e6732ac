//! Round to nearest (RTN): each weight independently, with the scale from its block's range.
//!
//! RTN has no paper; it is the baseline of every method. With `W[N, K]`, blocks `B` and the scheme's functions of
//! [`mantissa_num::blockwise`]: `s_B = block(range of W over B)`, `code[n, k] = encode(W[n, k], s_B)`.
//!
//! Blocks are independent, so rows are split into panels of whole blocks, which run on several threads. The result
//! does not depend on the number of threads. A panel uses the kernels if they support its elements and all values are
//! finite, and the reference otherwise; the bits are the same.

mod blocks;
pub mod method;
mod panel;

use mantissa_kernels::{for_each_with, kernels};
use mantissa_num::blockwise::{self, Block};
use mantissa_num::{Blocks, Codes, Given, Quantized, ScaleLevel, Scheme, TensorError, code_unit};

use crate::error_stats::ErrorStats;
use crate::source::{self, PANEL, Scratch, WeightReader};
pub use blocks::{Sink, quantize_blocks, stream_blocks};
use panel::Elements;

/// Name of rounding to nearest in recipes and reports.
pub const NAME: &str = "rtn";

/// Quantizes `w` (`[rows, cols]`, row-major) and measures the error. `outer` is the global scale if fused layers
/// share one; `None` computes it from `w`.
///
/// # Errors
/// [`TensorError::NonFinite`] with the index in `w`, and [`TensorError::Length`].
pub fn quantize(
    scheme: &Scheme,
    w: &[f32],
    rows: usize,
    cols: usize,
    outer: Option<f32>,
    threads: usize,
) -> Result<(Quantized, ErrorStats), TensorError> {
    if w.len() != rows * cols {
        return Err(TensorError::Length {
            what: "values",
            found: w.len(),
            expected: rows * cols,
            rows,
            cols,
        });
    }
    quantize_source(scheme, w, rows, cols, outer, threads)
}

/// Like [`quantize`], for a tensor read panel by panel, so that its f32 values are never in memory together.
/// Exception: a single block over the whole tensor that only the reference can encode.
///
/// # Errors
/// Errors of `source`, and [`TensorError::NonFinite`] as in [`quantize`].
pub fn quantize_source<S: WeightReader + ?Sized>(
    scheme: &Scheme,
    source: &S,
    rows: usize,
    cols: usize,
    outer: Option<f32>,
    threads: usize,
) -> Result<(Quantized, ErrorStats), S::Error> {
    if let Some(codec) = scheme.format.codec() {
        return quantize_blocks(codec, source, rows, cols, None, threads);
    }
    let outer = match outer.filter(|_| scheme.has_outer_scale()) {
        None if scheme.has_outer_scale() => scheme.outer_scale(source::amax(source, rows * cols, threads)?),
        outer => outer,
    };
    let mut job = Job { scheme, cols, outer, elements: Elements::of(scheme), fixed: None };
    let one_block = scheme.format.scale().is_some() && scheme.format.blocks() == Blocks::Tensor;
    if one_block && job.elements.is_some() {
        let range = source::min_max(source, rows * cols, threads)?;
        let range = range.map(|(min, max)| blockwise::Range { min, max, ..blockwise::Range::EMPTY });
        job.fixed = range.map(|range| scheme.block(range, false, outer));
    }
    if rows * cols == 0 || (one_block && job.fixed.is_none()) || !in_panels(scheme) {
        let mut scratch = Scratch::default();
        let x = source.elements(0..rows * cols, &mut scratch)?;
        let q = job.reference(x, rows, 0)?;
        let stats = ErrorStats::of(x, &q);
        return Ok((q, stats));
    }
    job.panels(source, rows, threads)
}

/// True if panels of rows can be quantized separately and concatenated. False for schemes with quantized scales, for
/// formats not used for weights (KV caches, f64) and for formats without element codes.
pub fn in_panels(scheme: &Scheme) -> bool {
    let format = &scheme.format;
    !scheme.needs_whole_tensor() && !format.has_bias() && format.codec().is_none() && code_unit(format) <= 4
}

/// Global scale of `w` under `scheme`, if it has one: `given`, or from its amax.
pub(crate) fn outer_scale_of(scheme: &Scheme, w: &[f32], given: Option<f32>) -> Option<f32> {
    given.or_else(|| scheme.outer_scale(kernels().amax(w))).filter(|_| scheme.has_outer_scale())
}

/// Global scale that fused layers share, from their largest amax.
pub fn shared_outer_scale(scheme: &Scheme, amaxes: impl IntoIterator<Item = f32>) -> Option<f32> {
    let range = amaxes.into_iter().fold(blockwise::Range::EMPTY, blockwise::Range::with);
    scheme.outer_scale(range.amax())
}

/// Parameters shared by all panels of a tensor.
struct Job<'a> {
    scheme: &'a Scheme,
    cols: usize,
    outer: Option<f32>,
    elements: Option<Elements>,
    /// Block of a single-block tensor.
    fixed: Option<Block>,
}

impl Job<'_> {
    fn panels<S: WeightReader + ?Sized>(
        &self,
        source: &S,
        rows: usize,
        threads: usize,
    ) -> Result<(Quantized, ErrorStats), S::Error> {
        let (format, cols) = (&self.scheme.format, self.cols);
        let grain = panel_rows(self.scheme, rows, cols);
        let panels = rows.div_ceil(grain);
        let blocks = format.blocks().count(grain, cols);
        let mut q = self.blank(rows);
        let mut results: Vec<Result<ErrorStats, S::Error>> =
            (0..panels).map(|_| Ok(ErrorStats::default())).collect();
        let codes = pieces(&mut q.codes, grain * cols, panels);
        let scales = pieces(&mut q.scales.codes, blocks, panels);
        let zeros = pieces_of(q.scales.offsets.zeros_mut(), blocks, panels);
        let parts = codes.into_iter().zip(scales).zip(zeros).zip(&mut results);
        for_each_with(threads, Scratch::default, parts.enumerate(), |scratch, (i, part)| {
            let (((codes, scales), zeros), result) = part;
            let (first, last) = (i * grain, rows.min((i + 1) * grain));
            *result = source.elements(first * cols..last * cols, scratch).and_then(|x| {
                let part = self.panel(x, first)?;
                codes.copy_from(&part.codes);
                // A single block is the same in every panel.
                if self.fixed.is_none() || i == 0 {
                    scales.copy_from(&part.scales.codes);
                    zeros.copy_from_slice(part.zeros());
                }
                Ok(ErrorStats::of(x, &part))
            });
        });
        let mut stats = ErrorStats::default();
        for result in results {
            stats.merge(&result?);
        }
        Ok((q, stats))
    }

    /// Zeroed tensor of the right size.
    fn blank(&self, rows: usize) -> Quantized {
        let format = self.scheme.format.clone();
        let blocks = format.blocks().count(rows, self.cols);
        let codes = zeroed(code_unit(&format), rows * self.cols);
        let scales = match format.scale() {
            Some(scale) => zeroed(scale.code.unit_bytes(), blocks),
            None => zeroed(1, 0),
        };
        let zeros = vec![0; if format.has_zero() { blocks } else { 0 }];
        let scales = ScaleLevel::from(scales).with_zeros(zeros).with_outer(self.outer);
        Quantized { codes, scales, ..Quantized::empty(format, rows, self.cols) }
    }

    fn panel(&self, x: &[f32], first_row: usize) -> Result<Quantized, TensorError> {
        let fast = self.elements.as_ref().and_then(|elements| {
            panel::quantize(self.scheme, elements, x, self.cols, self.outer, self.fixed)
        });
        match fast {
            Some(q) => Ok(q),
            None => self.reference(x, x.len() / self.cols, first_row),
        }
    }

    fn reference(&self, x: &[f32], rows: usize, first_row: usize) -> Result<Quantized, TensorError> {
        let first = first_row * self.cols;
        let given = Given { outer: self.outer, first_index: first as u64, ..Given::default() };
        mantissa_num::quantize(self.scheme, x, rows, self.cols, given).map_err(|error| error.shifted(first))
    }
}

/// Rows of a panel of whole blocks; a block over all rows is chosen before.
fn panel_rows(scheme: &Scheme, rows: usize, cols: usize) -> usize {
    let unit = match scheme.format.blocks() {
        Blocks::Row | Blocks::Group(_) | Blocks::Tensor => 1,
        Blocks::Tile { rows, .. } => rows as usize,
        Blocks::Flat(block) => block as usize / gcd(block as usize, cols),
        _ => rows,
    };
    (PANEL / cols / unit).max(1) * unit
}

fn gcd(a: usize, b: usize) -> usize {
    if b == 0 { a } else { gcd(b, a % b) }
}

/// Appends the codes of a part.
pub(crate) fn append(all: &mut Codes, part: Codes) {
    match (all, part) {
        (Codes::U8(all), Codes::U8(part)) => all.extend(part),
        (Codes::U16(all), Codes::U16(part)) => all.extend(part),
        (Codes::U32(all), Codes::U32(part)) => all.extend(part),
        (all, part) => (0..part.len()).for_each(|i| all.push(part.get(i))),
    }
}

fn zeroed(unit_bytes: usize, n: usize) -> Codes {
    match unit_bytes {
        1 => Codes::U8(vec![0; n]),
        2 => Codes::U16(vec![0; n]),
        _ => Codes::U32(vec![0; n]),
    }
}

/// A panel's part of a list of codes.
enum Piece<'a> {
    U8(&'a mut [u8]),
    U16(&'a mut [u16]),
    U32(&'a mut [u32]),
}

impl Piece<'_> {
    fn copy_from(self, codes: &Codes) {
        match (self, codes) {
            (Piece::U8(piece), Codes::U8(codes)) => piece.copy_from_slice(codes),
            (Piece::U16(piece), Codes::U16(codes)) => piece.copy_from_slice(codes),
            (Piece::U32(piece), Codes::U32(codes)) => piece.copy_from_slice(codes),
            // Both come from the same format.
            _ => debug_assert!(false, "units differ"),
        }
    }
}

fn pieces(codes: &mut Codes, size: usize, count: usize) -> Vec<Piece<'_>> {
    match codes {
        Codes::U8(all) => pieces_of(all, size, count).into_iter().map(Piece::U8).collect(),
        Codes::U16(all) => pieces_of(all, size, count).into_iter().map(Piece::U16).collect(),
        Codes::U32(all) => pieces_of(all, size, count).into_iter().map(Piece::U32).collect(),
        // Not quantized in panels.
        Codes::U64(_) | Codes::Packed(_) => Vec::new(),
    }
}

/// Splits `all` into `count` consecutive pieces of `size` elements. The last may be shorter; a shared or absent list
/// goes to the first piece whole.
fn pieces_of<T>(mut all: &mut [T], size: usize, count: usize) -> Vec<&mut [T]> {
    let mut pieces = Vec::with_capacity(count);
    for _ in 0..count {
        let (piece, rest) = all.split_at_mut(size.min(all.len()));
        pieces.push(piece);
        all = rest;
    }
    pieces
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;
    use mantissa_num::codec::Codec;
    use mantissa_num::grammar::catalogue;
    use mantissa_num::{Code, Rounding};

    fn weights(n: usize) -> Vec<f32> {
        (0..n).map(|i| ((i * i) as f32 * 0.013).sin() * (1.0 + (i % 17) as f32)).collect()
    }

    fn schemes() -> Vec<Scheme> {
        let mut all = catalogue();
        for text in [
            "int4-g32",
            "int4-g32-asym",
            "int3-channel-asym",
            "int8-channel",
            "int2-g7",
            "int8-tensor",
            "int5-t4x8",
            "int4-g32:restricted",
            "int4-g32-asym:torchao",
            "fp8-e4m3-t128x128",
            "fp8-e4m3-tensor",
            "fp8-e5m2-channel",
            "fp8-e4m3fnuz-g32",
            "fp6-e2m3-g48",
            "nf4-g128",
            "nf4-g100",
            "fp4-bnb-g64",
            "nvfp4:te",
            "int8-tensor-asym",
            "int4-tensor-asym:torchao",
            "int8-channel-asym:torchao",
            "int4-g32:torchao",
            "int4-g32:no-clipping-err",
            "int3-t4x8-asym",
        ] {
            all.push(text.parse().unwrap());
        }
        for mx in ["mxfp8-e4m3", "mxfp8-e5m2", "mxfp6-e2m3", "mxfp6-e3m2", "mxfp4", "mxint8"] {
            for rule in ["floor", "ceil", "even", "rceil", "torchao-rceil", "ct"] {
                all.push(format!("{mx}:{rule}").parse().unwrap());
            }
        }
        for text in ["int4-g32", "int8-channel-asym", "fp8-e4m3-channel"] {
            let mut narrow: Scheme = text.parse().unwrap();
            narrow.format = narrow.format.with_scale_code(Code::Float(mantissa_num::minifloat::BF16));
            all.push(narrow);
        }
        let mut stochastic: Scheme = "int4-g32".parse().unwrap();
        stochastic.encoder.rounding = Rounding::Stochastic { seed: 9 };
        all.push(stochastic);
        all
    }

    #[test]
    fn panels_and_fast_paths_give_the_reference_at_any_thread_count() {
        for (rows, cols) in [(300, 264), (5, 1000), (1, 1), (64, 2048), (5, 512)] {
            let mut w = weights(rows * cols);
            w[..cols.min(40)].fill(0.0);
            for scheme in schemes() {
                // Searched types are slow.
                if scheme.format.codec().is_some_and(Codec::is_searched) && rows * cols > 1 << 16 {
                    continue;
                }
                let expected = mantissa_num::quantize(&scheme, &w, rows, cols, Given::default());
                let Ok(expected) = expected else {
                    // Codec blocks do not divide the rows.
                    assert_eq!(quantize(&scheme, &w, rows, cols, None, 2).err(), expected.err());
                    continue;
                };
                let single = quantize(&scheme, &w, rows, cols, None, 1).unwrap().1;
                for threads in [1, 2, 3] {
                    let (found, stats) = quantize(&scheme, &w, rows, cols, None, threads).unwrap();
                    assert_eq!(found, expected, "{scheme} [{rows}, {cols}] {threads} threads");
                    assert_eq!(stats, single, "{scheme}");
                }
            }
        }
    }

    /// Values at the limits of f32 and of the formats: subnormals, single outliers, ties, ranges near the maximum.
    fn extremes(rows: usize, cols: usize) -> Vec<f32> {
        let mut state = 1u32;
        let mut next = move || {
            state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
            state >> 8
        };
        let mut w = Vec::with_capacity(rows * cols);
        for row in 0..rows {
            for _ in 0..cols {
                let v = match row % 6 {
                    0 => f32::from_bits(next() << 8),          // any exponent
                    1 => f32::from_bits(next() & 0x00ff_ffff), // subnormal or barely normal
                    2 => (next() % 33) as f32 * 0.25 - 4.0,    // ties
                    3 => 2f32.powi((next() % 40) as i32 - 20) * if next() % 2 == 0 { 1.0 } else { -1.0 },
                    4 => f32::MAX * ((next() % 5) as f32 * 0.5 - 1.0),
                    _ => f32::from(next() % 50 == 0) * 1e30 + 1e-3 * (next() % 9) as f32,
                };
                w.push(if v.is_finite() { v } else { -0.0 });
            }
        }
        w
    }

    #[test]
    fn extremes_give_the_reference() {
        for (rows, cols) in [(48, 272), (12, 96)] {
            let w = extremes(rows, cols);
            for scheme in schemes() {
                let expected = mantissa_num::quantize(&scheme, &w, rows, cols, Given::default());
                let Ok(expected) = expected else { continue };
                let (found, _) = quantize(&scheme, &w, rows, cols, None, 2).unwrap();
                for i in 0..w.len().min(expected.codes.len()) {
                    let (found, expected) = (found.codes.get(i), expected.codes.get(i));
                    assert_eq!(found, expected, "{scheme} element {i} of {cols} columns: {:e}", w[i]);
                }
                assert_eq!(found, expected, "{scheme}");
            }
        }
    }

    #[test]
    fn non_finite_values_give_the_reference_where_they_have_codes() {
        let mut w = weights(64 * 96);
        (w[100], w[2000], w[5000]) = (f32::NAN, f32::INFINITY, -f32::INFINITY);
        for text in ["f16", "bf16", "fp8-e5m2", "mxfp4", "mxfp8-e4m3:ct", "mxint8"] {
            let scheme: Scheme = text.parse().unwrap();
            let expected = mantissa_num::quantize(&scheme, &w, 64, 96, Given::default()).unwrap();
            assert_eq!(quantize(&scheme, &w, 64, 96, None, 2).unwrap().0, expected, "{scheme}");
        }
        assert!(quantize(&"int8-tensor".parse().unwrap(), &w, 64, 96, None, 2).is_err());
        assert!(quantize(&"nvfp4".parse().unwrap(), &w, 64, 96, None, 2).is_err());
    }

    #[test]
    fn extreme_and_non_finite_rows_fall_back_to_the_reference() {
        let mut w = weights(4 * 64);
        w[70] = f32::MAX;
        w[71] = -f32::MAX;
        for text in ["int4-g32", "int4-g32-asym"] {
            let scheme: Scheme = text.parse().unwrap();
            let expected = mantissa_num::quantize(&scheme, &w, 4, 64, Given::default()).unwrap();
            assert_eq!(quantize(&scheme, &w, 4, 64, None, 2).unwrap().0, expected);
        }
        w[130] = f32::NAN;
        let error = quantize(&"int4-g32".parse().unwrap(), &w, 4, 64, None, 2).unwrap_err();
        assert!(matches!(error, TensorError::NonFinite { index: 130, count: 1, .. }), "{error}");
    }
}
