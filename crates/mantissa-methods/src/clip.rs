//! Clipping: narrows the range of each block if that lowers the error.
//!
//! Tries round to nearest under `Range(r · min, r · max)` for ratios `r` from 1 down, and keeps the one with the
//! least `Σ |w - q|^2.4` over the block's weights. This is the norm of llm-compressor's observer "mse". (OMSE of
//! Choukroun et al. 2019, "Low-bit Quantization of Neural Networks for Efficient Inference", arXiv 1902.06822, has
//! the exponent 2, which clips large weights more than is good for the model.) The ratios include 1, so no block is
//! worse than without clipping.

use std::ops::Range as Span;

use mantissa_kernels::{kernels, map_reduce_fixed};
use mantissa_num::blockwise::{Block, Range};
use mantissa_num::{Blocks, Codes, Given, Quantized, Scheme, TensorError, check_finite, code_unit};

use crate::error::MethodError;
use crate::error_stats::ErrorStats;
use crate::method::{Arithmetic, Buffer, Extent, Method, Phase, SolveWeight, WeightTask, Work};
use crate::rtn::{append, outer_scale_of};
use crate::solved::Solved;
use crate::source::PANEL;

/// Number of ratios tried: 1, 1 - 1/[`STEPS`], …
const RATIOS: usize = 71;

/// Steps from 1 to 0: as fine as in that observer, which goes down to 0.81.
const STEPS: usize = 100;

/// Exponent of the error norm.
pub(crate) const NORM: f32 = 2.4;

/// Values whose errors are raised to the power together.
const AT_ONCE: usize = 16;

/// Rows (or groups) of `len` values that one thread takes at a time. Affects results only by the order of their sums.
pub(crate) fn rows_at_once(len: usize) -> usize {
    (PANEL / len.max(1)).max(1)
}

/// Checks that [`quantize`] takes `scheme`.
///
/// # Errors
/// Names the schemes that it takes.
pub fn check_scheme(scheme: &Scheme) -> Result<(), &'static str> {
    let within = matches!(scheme.format.blocks(), Blocks::Row | Blocks::Group(_));
    let blockwise = scheme.format.codec().is_none() && !scheme.needs_whole_tensor();
    let fits = within && blockwise && scheme.format.scale().is_some();
    if fits { Ok(()) } else { Err("codes with a scale per group of a row or per channel, such as int4-g128") }
}

/// Columns that share a clip.
pub fn group_of(scheme: &Scheme, cols: usize) -> usize {
    match scheme.format.blocks() {
        Blocks::Group(group) => group as usize,
        _ => cols,
    }
}

/// Quantizes `w` (`[rows, cols]`) by `scheme`, with the range of least error for each block. `outer` is the global
/// scale if fused layers share one; `None` computes it from `w`.
///
/// # Errors
/// [`TensorError::NonFinite`] and [`TensorError::Length`]. Schemes that [`check_scheme`] refuses are rounded to
/// nearest.
pub fn quantize(
    scheme: &Scheme,
    w: &[f32],
    rows: usize,
    cols: usize,
    outer: Option<f32>,
    threads: usize,
) -> Result<(Quantized, ErrorStats), TensorError> {
    if check_scheme(scheme).is_err() || cols == 0 || rows * cols != w.len() {
        let q = mantissa_num::quantize(
            scheme,
            w,
            rows,
            cols,
            Given { outer, first_index: 0, ..Given::default() },
        )?;
        let stats = ErrorStats::of(w, &q);
        return Ok((q, stats));
    }
    check_finite(w)?;
    let outer = outer_scale_of(scheme, w, outer);
    let empty = Quantized::empty(scheme.format.clone(), rows, cols);
    let mut start = Quantized { codes: codes_of(scheme, 0), ..empty };
    start.set_outer(outer);
    let panel = |span: Span<usize>| panel(scheme, w, cols, outer, span);
    let q = map_reduce_fixed(threads, rows, rows_at_once(cols), panel, start, |mut all, part| {
        all.scales.extend_zeros(part.zeros().iter().copied());
        all.scales.extend_biases(part.biases().iter().copied());
        append(&mut all.scales.codes, part.scales.codes);
        append(&mut all.codes, part.codes);
        all
    });
    let stats = ErrorStats::of(w, &q);
    Ok((q, stats))
}

fn codes_of(scheme: &Scheme, len: usize) -> Codes {
    Codes::with_capacity(code_unit(&scheme.format), len)
}

/// Quantizes some rows.
fn panel(scheme: &Scheme, w: &[f32], cols: usize, outer: Option<f32>, span: Span<usize>) -> Quantized {
    let format = &scheme.format;
    let empty = Quantized::empty(format.clone(), span.len(), cols);
    let mut q = Quantized { codes: codes_of(scheme, span.len() * cols), ..empty };
    for row in span {
        let x = &w[row * cols..(row + 1) * cols];
        for (_, start, end) in format.blocks().runs(cols, row) {
            let first = row * cols + start;
            let block = best(scheme, &x[start..end], first, outer);
            (start..end).for_each(|i| {
                q.codes.push(scheme.encode(x[i], &block, (row * cols + i) as u64));
            });
            q.scales.push(block.scale);
            if format.has_zero() {
                q.scales.extend_zeros([block.zero]);
            }
            if format.has_bias() {
                q.scales.extend_biases([block.bias]);
            }
        }
    }
    q
}

/// Parameters with the least error for the block `x`, whose first element has index `first` in its tensor.
fn best(scheme: &Scheme, x: &[f32], first: usize, outer: Option<f32>) -> Block {
    let whole = scheme.block_of(x, false, outer);
    let (mut best, mut least) = (whole, error(scheme, x, first, &whole, outer, f64::INFINITY));
    let (range, mut last) = (Range::of(x), whole);
    for i in 1..RATIOS {
        let ratio = 1.0 - i as f32 / STEPS as f32;
        let narrowed = Range {
            min: range.min * ratio,
            max: range.max * ratio,
            abs_sum: range.abs_sum * f64::from(ratio),
            ..range
        };
        let block = scheme.block(narrowed, false, outer);
        // Scales with few bits are the same for several ratios.
        if (block.scale, block.zero, block.bias) == (last.scale, last.zero, last.bias) {
            continue;
        }
        last = block;
        let found = error(scheme, x, first, &block, outer, least);
        if found < least {
            (best, least) = (block, found);
        }
    }
    best
}

/// Error of `x` under `block`; may stop early above `most`.
fn error(scheme: &Scheme, x: &[f32], first: usize, block: &Block, outer: Option<f32>, most: f64) -> f64 {
    let format = &scheme.format;
    let mut decoder = format.decoder(block.scale, block.zero, outer);
    if format.has_bias() {
        decoder = decoder.with_bias(block.bias);
    }
    let mut sum = 0.0;
    let mut errors = [0f32; AT_ONCE];
    for (k, x) in x.chunks(AT_ONCE).enumerate() {
        let errors = &mut errors[..x.len()];
        for (i, (error, &v)) in errors.iter_mut().zip(x).enumerate() {
            let code = scheme.encode(v, block, (first + k * AT_ONCE + i) as u64);
            *error = (decoder.value(format.element(code)) - v).abs();
        }
        kernels().pow_inplace(errors, NORM);
        sum += errors.iter().map(|e| f64::from(*e)).sum::<f64>();
        if sum > most {
            break;
        }
    }
    sum
}

/// RTN with a searched range for each block.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct RtnMse;

impl Method for RtnMse {
    fn name(&self) -> &'static str {
        "rtn-mse"
    }

    fn work(&self) -> Work<'_> {
        Work::Weight(self)
    }

    fn takes(&self, scheme: &Scheme, _: (usize, usize), _: bool) -> Result<(), MethodError> {
        check_scheme(scheme).map_err(MethodError::Scheme)
    }

    fn arithmetic(&self, extent: &Extent<'_>) -> Arithmetic {
        let steps = RATIOS as f64 * extent.weights() as f64;
        Arithmetic { steps, ..Arithmetic::default() }
    }

    fn buffers(&self, phase: Phase, extent: &Extent<'_>) -> Vec<Buffer> {
        pieces(phase, extent)
    }
}

impl SolveWeight for RtnMse {
    fn solve(&self, task: &WeightTask<'_>) -> Result<Solved, MethodError> {
        let WeightTask { scheme, rows, cols, w, outer, threads, .. } = *task;
        Ok(Solved::rounded(quantize(scheme, w, rows, cols, outer, threads)?))
    }
}

/// Memory of a search in which each thread produces a piece of the codes, concatenated at the end.
pub(crate) fn pieces(phase: Phase, extent: &Extent<'_>) -> Vec<Buffer> {
    let bytes = extent.codes + 2 * extent.scales;
    Vec::from_iter((phase == Phase::Solve).then_some(("codes and scales of the pieces", bytes)))
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;
    use crate::rtn;

    fn weights(n: usize) -> Vec<f32> {
        (0..n).map(|i| ((i * i % 997) as f32 * 0.37).sin().powi(5) * 0.1).collect()
    }

    #[test]
    fn no_block_is_worse_than_rounded_to_nearest() {
        let (rows, cols) = (24, 192);
        let w = weights(rows * cols);
        for text in [
            "int4-g32",
            "int4-g32-asym",
            "int2-channel",
            "int3-g64-asym:minmax",
            "fp8-e4m3-channel",
            "nvfp4",
            "nvfp4:4over6",
            "mxfp4",
            "mxint8",
        ] {
            let scheme: Scheme = text.parse().unwrap();
            check_scheme(&scheme).unwrap();
            let (ours, stats) = quantize(&scheme, &w, rows, cols, None, 1).unwrap();
            let (again, _) = quantize(&scheme, &w, rows, cols, None, 3).unwrap();
            assert_eq!(ours, again, "{text}");
            ours.check().unwrap();
            let (plain, nearest) = rtn::quantize(&scheme, &w, rows, cols, None, 2).unwrap();
            let (ours, plain) = (ours.dequantize().unwrap(), plain.dequantize().unwrap());
            for row in 0..rows {
                for (_, start, end) in scheme.format.blocks().runs(cols, row) {
                    let at = row * cols + start..row * cols + end;
                    let error = |q: &[f32]| -> f64 {
                        let each = q[at.clone()].iter().zip(&w[at.clone()]);
                        each.map(|(q, w)| f64::from((q - w).abs()).powf(f64::from(NORM))).sum()
                    };
                    assert!(error(&ours) <= error(&plain) * (1.0 + 1e-6), "{text} {row} {start}");
                }
            }
            let (ours, plain) = (stats.report().mse, nearest.report().mse);
            assert!(!text.starts_with("int") || ours < plain, "{text}: {ours} {plain}");
        }
    }

    #[test]
    fn other_blocks_and_non_finite_values_are_reported() {
        for text in ["nf4", "int4-t4x4-asym", "fp8-e4m3-tensor", "bf16"] {
            assert!(check_scheme(&text.parse().unwrap()).is_err(), "{text}");
        }
        let mut w = weights(64);
        w[3] = f32::NAN;
        let error = quantize(&"int4-g32".parse().unwrap(), &w, 2, 32, None, 1).unwrap_err();
        assert!(matches!(error, TensorError::NonFinite { index: 3, .. }), "{error}");
    }
}
