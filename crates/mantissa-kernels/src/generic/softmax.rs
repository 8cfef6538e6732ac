//! Softmax of attention scores in f32, and the log-softmax statistics of logits in f64.

use super::activation::tanh;
use super::exp::{exp, exp_f64_nonpositive};
use super::reduce::{max_ignoring_nan, sum, sum_terms_f64};
use crate::simd::Simd;

/// The two numbers that turn a logit into a log-probability: `ln p(i) = (x[i] - max) - ln_sum`.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct LogSumExp {
    /// The greatest logit.
    pub max: f32,
    /// ln of the sum of `exp(x[i] - max)` over the row, in f64.
    pub ln_sum: f64,
}

impl LogSumExp {
    /// Negative log-likelihood in nats of the entry whose logit is `logit`.
    pub fn nll(&self, logit: f32) -> f64 {
        self.ln_sum - (f64::from(logit) - f64::from(self.max))
    }
}

#[inline(always)]
pub(crate) fn softmax<S: Simd>(simd: S, row: &mut [f32]) {
    let sum = softmax_numerators(simd, row, 1.0);
    for v in row {
        *v /= sum;
    }
}

#[inline(always)]
pub(crate) fn softmax_numerators<S: Simd>(simd: S, row: &mut [f32], scale: f32) -> f32 {
    softmax_numerators_max(simd, row, scale).0
}

#[inline(always)]
pub(crate) fn softmax_numerators_max<S: Simd>(simd: S, row: &mut [f32], scale: f32) -> (f32, f32) {
    for v in row.iter_mut() {
        *v *= scale;
    }
    let max = max_ignoring_nan(simd, row);
    for v in row.iter_mut() {
        *v = exp(*v - max);
    }
    (sum(simd, row), max)
}

/// `p = exp(scale · s - lse)`, `ds = scale · p (dp - delta)` with `delta = Σ p dp` (Dao et al. 2022,
/// "FlashAttention", app. B.2, eq. 8).
#[inline(always)]
pub(crate) fn softmax_backward(scores: &mut [f32], grads: &mut [f32], scale: f32, lse: f32, delta: f32) {
    assert_eq!(scores.len(), grads.len(), "softmax_backward: lengths differ");
    for (s, g) in scores.iter_mut().zip(grads) {
        let p = exp(scale * *s - lse);
        (*s, *g) = (p, (p * (*g - delta)) * scale);
    }
}

/// [`softmax_backward`] of scores that were capped: `c = cap tanh(scale s / cap)`, `p = exp(c - lse)`,
/// `ds = scale · (1 - (c / cap)²) · p (dp - delta)`.
#[inline(always)]
pub(crate) fn softmax_backward_capped(
    scores: &mut [f32],
    grads: &mut [f32],
    scale: f32,
    cap: f32,
    lse: f32,
    delta: f32,
) {
    assert_eq!(scores.len(), grads.len(), "softmax_backward_capped: lengths differ");
    for (s, g) in scores.iter_mut().zip(grads) {
        let t = tanh(*s * scale / cap);
        let p = exp(cap * t - lse);
        (*s, *g) = (p, (p * (*g - delta)) * (1.0 - t * t) * scale);
    }
}

#[inline(always)]
pub(crate) fn cross_entropy_backward<S: Simd>(simd: S, row: &mut [f32], target: usize, scale: f32) -> f64 {
    assert!(target < row.len(), "cross_entropy_backward: target {target} of {} logits", row.len());
    let logit = f64::from(row[target]);
    let max = max_ignoring_nan(simd, row);
    for v in row.iter_mut() {
        *v = exp(*v - max);
    }
    let sum = sum_terms_f64(simd, row, f64::from);
    let factor = (f64::from(scale) / sum) as f32;
    for v in row.iter_mut() {
        *v *= factor;
    }
    row[target] -= scale;
    ln(sum) - (logit - f64::from(max))
}

#[inline(always)]
pub(crate) fn log_softmax_stats<S: Simd>(simd: S, row: &[f32]) -> LogSumExp {
    let max = max_ignoring_nan(simd, row);
    let sum = sum_terms_f64(simd, row, |x| exp_f64_nonpositive(f64::from(x) - f64::from(max)));
    LogSumExp { max, ln_sum: ln(sum) }
}

/// ln x for finite normal x > 0, relative error below 1e-15 (NaN and other values use the library).
///
/// The C library's version differs between platforms: x = 2^k·m with m in [1/√2, √2), s = (m - 1)/(m + 1), ln m = 2(s
/// + s³/3 + s⁵/5 + …).
#[inline(always)]
pub(crate) fn ln(x: f64) -> f64 {
    if !x.is_normal() || x <= 0.0 {
        return x.ln();
    }
    let offset = x.to_bits().wrapping_sub(std::f64::consts::FRAC_1_SQRT_2.to_bits());
    let k = (offset as i64) >> 52;
    let m = f64::from_bits(x.to_bits().wrapping_sub((k as u64) << 52));
    let s = (m - 1.0) / (m + 1.0);
    let s2 = s * s;
    // |s| <= 0.1716, so the first omitted term (s^25 / 25) is below 3e-21.
    let mut sum = 0.0;
    for odd in (0..12).rev().map(|i| f64::from(2 * i + 1)) {
        sum = sum * s2 + 1.0 / odd;
    }
    k as f64 * std::f64::consts::LN_2 + 2.0 * s * sum
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::simd::Portable;

    #[test]
    fn ln_matches_the_library() {
        for i in 1..200_000 {
            let x = f64::from(i) * 1e-2;
            assert!((ln(x) - x.ln()).abs() <= 4e-16 * x.ln().abs().max(1e-3), "ln({x})");
        }
        assert_eq!(ln(1.0), 0.0);
        assert_eq!(ln(0.0), f64::NEG_INFINITY);
        assert!(ln(f64::NAN).is_nan());
    }

    #[test]
    fn softmax_sums_to_one() {
        let mut row: Vec<f32> = (0..77_u8).map(|i| f32::from(i) * 0.3 - 10.0).collect();
        softmax(Portable, &mut row);
        assert!((row.iter().map(|&v| f64::from(v)).sum::<f64>() - 1.0).abs() < 1e-6);
        let mut masked = [f32::NEG_INFINITY, 3.0];
        softmax(Portable, &mut masked);
        assert_eq!(masked, [0.0, 1.0]);
    }

    #[test]
    fn nll_is_exact_to_f64() {
        let row: Vec<f32> = (0..50_000_u32).map(|i| ((i * 7919) % 4001) as f32 * 0.01 - 20.0).collect();
        let stats = log_softmax_stats(Portable, &row);
        let max = row.iter().copied().fold(f32::MIN, f32::max);
        let sum: f64 = row.iter().map(|&x| (f64::from(x) - f64::from(max)).exp()).sum();
        assert_eq!(stats.max, max);
        for &x in &row[..10] {
            let exact = sum.ln() + f64::from(max) - f64::from(x);
            assert!((stats.nll(x) - exact).abs() < 1e-12);
        }
    }

    #[test]
    fn cross_entropy_and_its_gradient_match_the_definition() {
        let row: Vec<f32> = (0..333_u16).map(|i| (f32::from(i) * 0.7).sin() * 6.0).collect();
        let sum: f64 = row.iter().map(|&x| f64::from(x).exp()).sum();
        for target in [0, 100, 332] {
            let mut grads = row.clone();
            let nll = cross_entropy_backward(Portable, &mut grads, target, 0.125);
            assert!((nll - (sum.ln() - f64::from(row[target]))).abs() < 1e-6);
            for (i, (g, x)) in grads.iter().zip(&row).enumerate() {
                let p = f64::from(*x).exp() / sum - f64::from(u8::from(i == target));
                assert!((f64::from(*g) - 0.125 * p).abs() < 1e-7, "target {target}, logit {i}");
            }
        }
        assert!(cross_entropy_backward(Portable, &mut [f32::NAN, 1.0], 1, 1.0).is_nan());
    }

    #[test]
    fn degenerate_rows() {
        assert_eq!(log_softmax_stats(Portable, &[]).ln_sum, f64::NEG_INFINITY);
        assert_eq!(log_softmax_stats(Portable, &[5.0]), LogSumExp { max: 5.0, ln_sum: 0.0 });
        assert!(log_softmax_stats(Portable, &[1.0, f32::NAN]).ln_sum.is_nan());
        assert!(log_softmax_stats(Portable, &[f32::NEG_INFINITY; 2]).ln_sum.is_nan());
    }
}
