//! AWQ, activation-aware weight quantization (Lin, Tang, Tang, Yang, Chen, Wang, Xiao, Dang, Gan & Han 2023, "AWQ:
//! Activation-aware Weight Quantization for LLM Compression and Acceleration", arXiv 2306.00978, section 3.2;
//! `auto_scale.py` and `auto_clip.py` of the published code).
//!
//! The importance of a weight follows the magnitude of the activations it multiplies. AWQ divides channel `j` of a
//! layer's input by `s[j]` and multiplies the matching weight columns by it, which lowers the error of large
//! channels:
//!
//! ```text
//! s = mean |X|^r / sqrt(max · min),   the r of 0, 0.05, … 0.95 with the least  ‖X Wᵀ - (X / s) Q(W · s)ᵀ‖²
//! ```
//!
//! (`r = 0` changes nothing.) Then each group of a weight is clipped to `1 - k/20` of its amax. `k` is the value from
//! 0 to 9 with the least error of the group's contribution to the output.

use mantissa_kernels::{MatMut, MatRef, for_each, kernels};

use crate::method::{Arithmetic, Extent};
use crate::transform::{Change, Channels, ScaleChannels, Transform};

/// Number of ratios tried.
pub const RATIOS: usize = 20;

/// Number of clipping ratios tried.
pub const CLIPS: u8 = 10;

/// Steps from a group's largest magnitude to 0.
const CLIP_STEPS: f32 = 20.0;

/// [Steps](Arithmetic::steps) on a weight to scale, round and compare it; measured.
const STEPS: f64 = 10.0;

/// Smallest scale before normalization.
const LEAST: f32 = 1e-4;

/// Rows of a weight that one thread multiplies at a time.
const ROWS: usize = 64;

/// Weight `[rows, cols]` that reads the input, with its quantizer.
pub struct WeightReader<'a> {
    /// Its values.
    pub weight: &'a [f32],
    /// Quantizes and dequantizes other values in place of the weight.
    pub quantize: &'a (dyn Fn(&[f32]) -> Vec<f32> + Sync),
}

/// Replaces activations (`[tokens, cols]`) by their dequantized values.
pub type QuantizeInputs<'a> = dyn Fn(&mut [f32]) + Sync + 'a;

/// Result of a search.
#[derive(Clone, Debug, PartialEq)]
pub struct ScaleSearch {
    /// Sum over the readers and tokens of the squared error of their output, for each candidate.
    pub losses: Vec<f64>,
    /// First candidate with the least sum.
    pub best: usize,
}

/// Scales of each ratio, from the mean magnitudes of the channels.
pub fn candidates(means: &[f32]) -> Vec<Vec<f32>> {
    let ratio_scales = |k: usize| {
        let ratio = k as f32 / RATIOS as f32;
        let mut raw = means.to_vec();
        kernels().pow_inplace(&mut raw, ratio);
        raw.iter_mut().for_each(|s| *s = s.max(LEAST));
        let (low, high) =
            raw.iter().fold((f32::INFINITY, 0f32), |(low, high), s| (low.min(*s), high.max(*s)));
        let middle = (f64::from(low) * f64::from(high)).sqrt() as f32;
        raw.into_iter().map(|s| s / middle).collect()
    };
    (0..RATIOS).map(ratio_scales).collect()
}

/// Chooses from `candidates` (scales of each column) the one with the least output error of `readers` on `x`
/// (`[tokens, cols]`). `inputs` quantizes the scaled activations if activations are quantized too.
pub fn search(
    x: &[f32],
    readers: &[WeightReader<'_>],
    candidates: &[Vec<f32>],
    inputs: Option<&QuantizeInputs<'_>>,
    threads: usize,
) -> ScaleSearch {
    let mut losses = Vec::with_capacity(candidates.len());
    for s in candidates {
        let scaled = inputs.map(|quantize| {
            let mut scaled = x.to_vec();
            divide_columns(&mut scaled, s);
            quantize(&mut scaled);
            scaled
        });
        let mut loss = 0.0;
        for reader in readers {
            let mut weight = reader.weight.to_vec();
            multiply_columns(&mut weight, s);
            let mut found = (reader.quantize)(&weight);
            loss += match &scaled {
                None => {
                    // X Wᵀ - (X / s) Qᵀ = X (W - Q / s)ᵀ: one product, and exactly 0 where both agree.
                    divide_columns(&mut found, s);
                    found.iter_mut().zip(reader.weight).for_each(|(q, w)| *q = w - *q);
                    squares(&[(x, &found)], s.len(), threads)
                }
                Some(scaled) => {
                    found.iter_mut().for_each(|q| *q = -*q);
                    squares(&[(x, reader.weight), (scaled, &found)], s.len(), threads)
                }
            };
        }
        losses.push(loss);
    }
    let least = losses.iter().enumerate().min_by(|a, b| a.1.total_cmp(b.1));
    ScaleSearch { best: least.map_or(0, |(i, _)| i), losses }
}

/// Sum over the tokens of `x` (`[_, cols]`) of the squared output error of `reader`, with `weight` quantized in place
/// of its own.
pub fn loss(x: &[f32], reader: &WeightReader<'_>, weight: &[f32], cols: usize, threads: usize) -> f64 {
    let mut error = (reader.quantize)(weight);
    error.iter_mut().zip(reader.weight).for_each(|(q, w)| *q = w - *q);
    squares(&[(x, &error)], cols, threads)
}

/// Divides each column of `x` (`[_, cols]`) by its scale of `s`.
pub fn divide_columns(x: &mut [f32], s: &[f32]) {
    for row in x.chunks_exact_mut(s.len().max(1)) {
        row.iter_mut().zip(s).for_each(|(v, s)| *v /= s);
    }
}

/// Multiplies each column of `w` (`[_, cols]`) with its scale of `s`.
pub fn multiply_columns(w: &mut [f32], s: &[f32]) {
    for row in w.chunks_exact_mut(s.len().max(1)) {
        row.iter_mut().zip(s).for_each(|(v, s)| *v *= s);
    }
}

/// The sum of squares of `Σ xᵢ wᵢᵀ`.
fn squares(products: &[(&[f32], &[f32])], cols: usize, threads: usize) -> f64 {
    let Some((x, w)) = products.first().filter(|_| cols > 0) else { return 0.0 };
    let (tokens, rows) = (x.len() / cols, w.len() / cols);
    let mut sums = vec![0.0; rows.div_ceil(ROWS)];
    for_each(threads, sums.iter_mut().enumerate(), |(i, sum)| {
        let span = i * ROWS..rows.min((i + 1) * ROWS);
        let mut y = vec![0.0; tokens * span.len()];
        for (j, (x, w)) in products.iter().enumerate() {
            let (a, b) = (MatRef::new(x, tokens, cols), &w[span.start * cols..span.end * cols]);
            let c = MatMut::with_stride(&mut y, tokens, span.len(), span.len());
            kernels().gemm_nt(a, MatRef::new(b, span.len(), cols), c, j > 0);
        }
        *sum = y.iter().map(|v| f64::from(*v) * f64::from(*v)).sum();
    });
    sums.iter().sum()
}

/// Clip index `k` for each group of `group` columns of each row, chosen by the error of the group's contribution to
/// the output on `x` (`[tokens, cols]`).
pub fn clips(x: &[f32], reader: &WeightReader<'_>, cols: usize, group: usize, threads: usize) -> Vec<u8> {
    let (rows, groups) = (reader.weight.len() / cols.max(1), cols.div_ceil(group.max(1)));
    let mut best = vec![(f64::INFINITY, 0u8); rows * groups];
    for clip in 0..CLIPS {
        let mut weight = reader.weight.to_vec();
        clip_groups(&mut weight, cols, group, |_| clip);
        let mut error = (reader.quantize)(&weight);
        error.iter_mut().zip(reader.weight).for_each(|(q, w)| *q = w - *q);
        let work = best.chunks_mut(ROWS * groups).enumerate();
        for_each(threads, work, |(i, best)| {
            let error = &error[i * ROWS * cols..];
            for g in 0..groups {
                let found =
                    group_errors(x, error, best.len() / groups, cols, g * group..cols.min((g + 1) * group));
                for (row, found) in found.into_iter().enumerate() {
                    let best = &mut best[row * groups + g];
                    if found < best.0 {
                        *best = (found, clip);
                    }
                }
            }
        });
    }
    best.into_iter().map(|(_, clip)| clip).collect()
}

/// Sum over tokens of the squared `x · error` over the columns of `span`, for each of `rows` rows.
fn group_errors(
    x: &[f32],
    error: &[f32],
    rows: usize,
    cols: usize,
    span: std::ops::Range<usize>,
) -> Vec<f64> {
    let (tokens, width) = (x.len() / cols, span.len());
    let mut y = vec![0.0; tokens * rows];
    let a = MatRef::with_stride(&x[span.start..], tokens, width, cols);
    let b = MatRef::with_stride(&error[span.start..], rows, width, cols);
    kernels().gemm_nt(a, b, MatMut::with_stride(&mut y, tokens, rows, rows), false);
    let mut sums = vec![0.0; rows];
    for row in y.chunks_exact(rows) {
        sums.iter_mut().zip(row).for_each(|(sum, v)| *sum += f64::from(*v) * f64::from(*v));
    }
    sums
}

/// Clips each group of `group` columns of each row of `w` (`[_, cols]`) to `1 - k/20` of its amax, where `k` is
/// `of(group)`.
pub fn clip_groups(w: &mut [f32], cols: usize, group: usize, of: impl Fn(usize) -> u8) {
    let groups = cols.div_ceil(group.max(1));
    for (row, values) in w.chunks_exact_mut(cols.max(1)).enumerate() {
        for (g, values) in values.chunks_mut(group.max(1)).enumerate() {
            let clip = of(row * groups + g);
            if clip == 0 {
                continue;
            }
            let amax = values.iter().fold(0f32, |amax, v| amax.max(v.abs()));
            let limit = amax * (1.0 - f32::from(clip) / CLIP_STEPS);
            values.iter_mut().for_each(|v| *v = v.clamp(-limit, limit));
        }
    }
}

/// AWQ: scales up weight columns that read large channels, then clips groups.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Awq;

/// Name of AWQ in recipes and reports.
pub const NAME: &str = "awq";

impl Transform for Awq {
    fn name(&self) -> &'static str {
        NAME
    }

    fn change(&self) -> Change<'_> {
        Change::Scales(self)
    }

    fn arithmetic(&self, extent: &Extent<'_>, tokens: usize) -> Arithmetic {
        searched(RATIOS + usize::from(CLIPS), extent, tokens)
    }
}

/// Arithmetic of trying `candidates` scales (or clips) of a weight: it is rounded, and its error multiplied with the inputs.
pub(crate) fn searched(candidates: usize, extent: &Extent<'_>, tokens: usize) -> Arithmetic {
    let (candidates, weights) = (candidates as f64, extent.weights() as f64);
    let products = candidates * weights * tokens as f64;
    Arithmetic { products, steps: candidates * STEPS * weights, ..Arithmetic::default() }
}

impl ScaleChannels for Awq {
    fn scales_inner(&self) -> bool {
        true
    }

    fn candidates(&self, channels: &Channels<'_>) -> Vec<Vec<f32>> {
        candidates(channels.means)
    }

    fn clips(&self) -> bool {
        true
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use mantissa_num::Scheme;
    use mantissa_num::round::random_u32;

    use super::*;
    use crate::gptq::Hessian;
    use crate::rtn;

    /// Pseudo-random values around 0, with some columns `outlier` times larger.
    fn values(seed: u64, rows: usize, cols: usize, outlier: f32) -> Vec<f32> {
        let value = |i: usize| {
            let uniform = random_u32(seed, i as u64) as f32 / u32::MAX as f32 - 0.5;
            uniform.powi(3) * if (i % cols).is_multiple_of(11) { outlier } else { 1.0 }
        };
        (0..rows * cols).map(value).collect()
    }

    #[test]
    fn scales_and_clips_together_are_no_worse_than_rounding_to_nearest() {
        let (tokens, rows, cols, group) = (80, 24, 96, 32);
        for (seed, text) in [(1, "int4-g32"), (2, "int3-g32-asym"), (3, "int2-g32-asym"), (4, "nvfp4")] {
            let scheme: Scheme = text.parse().unwrap();
            let (x, w) = (values(seed, tokens, cols, 20.0), values(seed + 9, rows, cols, 1.0));
            let mut hessian = Hessian::new(cols).unwrap();
            hessian.add(&x, 1);
            let quantize =
                |w: &[f32]| rtn::quantize(&scheme, w, rows, cols, None, 1).unwrap().0.dequantize().unwrap();
            let means: Vec<f32> = (0..cols)
                .map(|c| x.iter().skip(c).step_by(cols).map(|v| v.abs()).sum::<f32>() / tokens as f32)
                .collect();
            let candidates = candidates(&means);
            let plain = WeightReader { weight: &w, quantize: &quantize };
            let found = search(&x, &[plain], &candidates, None, 2);
            let s = &candidates[found.best];
            let (mut scaled, mut inputs) = (w.clone(), x.clone());
            multiply_columns(&mut scaled, s);
            divide_columns(&mut inputs, s);
            let reader = WeightReader { weight: &scaled, quantize: &quantize };
            let clips = clips(&inputs, &reader, cols, group, 2);
            let mut clipped = scaled.clone();
            clip_groups(&mut clipped, cols, group, |i| clips[i]);
            let better = loss(&inputs, &reader, &clipped, cols, 2) < loss(&inputs, &reader, &scaled, cols, 2);
            let mut ours = quantize(if better { &clipped } else { &scaled });
            divide_columns(&mut ours, s);
            // tr((W - Q) H (W - Q)ᵀ), computed independently.
            let (ours, nearest) = (hessian.loss(&w, &ours), hessian.loss(&w, &quantize(&w)));
            assert!(ours < nearest, "{text}: {ours} for {nearest}");
        }
    }

    #[test]
    fn a_ratio_of_zero_changes_nothing() {
        assert!(candidates(&[0.5, 3.0, 0.0])[0].iter().all(|s| *s == 1.0));
        let mut w = vec![1.0, -2.0, 4.0, 0.5];
        clip_groups(&mut w, 4, 2, |i| [0, 10][i]);
        assert_eq!(w, [1.0, -2.0, 2.0, 0.5]);
    }
}
