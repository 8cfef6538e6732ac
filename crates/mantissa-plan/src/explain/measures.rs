//! Small measurements on made-up numbers: signal-to-noise ratios, and errors of accumulators.

use std::f64::consts::TAU;

use mantissa_num::minifloat::MiniFloat;
use mantissa_num::round::random_u32;
use mantissa_num::{Accumulator, Given, Hadamard, Scheme, fake_quantize, minifloat};

/// Rows and columns of a made-up tensor.
const ROWS: usize = 32;
const COLS: usize = 1024;

/// Says what [`sqnr`] measures: the tensor, its width, and the rule of the scales of integers.
pub(crate) const MEASURED_ON: &str = "measured on 32 rows of 1024 normal numbers (a wider row or tensor has a larger maximum and fewer dB); scales are the largest magnitude of each row, group or tensor over 127.5 (INT8), 7.5 (INT4) or 3.5 (INT3): rule :full, the default of weights";

/// Returns `count` numbers of a standard normal distribution: the same ones for the same seed (Box and Muller 1958).
pub(crate) fn normal(count: usize, seed: u64) -> Vec<f32> {
    let uniform = |index: u64| (f64::from(random_u32(seed, index)) + 0.5) / f64::from(u32::MAX);
    let value = |i: usize| {
        let (u, v) = (uniform(2 * i as u64), uniform(2 * i as u64 + 1));
        ((-2.0 * u.ln()).sqrt() * (TAU * v).cos()) as f32
    };
    (0..count).map(value).collect()
}

/// Returns the signal-to-noise ratio in dB of normal numbers under a scheme; with `outlier`, one number of each row is
/// so many standard deviations large, and counts in neither signal nor noise. `None` for schemes that need a search.
pub fn sqnr(scheme: &str, outlier: Option<f32>) -> Option<f64> {
    ratio(scheme, &with_outlier(outlier), outlier.is_some(), None)
}

/// Returns the same where each row is rotated by a randomized Hadamard matrix before it is quantized, and back afterwards.
pub(crate) fn rotated_sqnr(scheme: &str, outlier: Option<f32>) -> Option<f64> {
    let rotation = Hadamard::new(COLS)?.randomized(5);
    ratio(scheme, &with_outlier(outlier), outlier.is_some(), Some(&rotation))
}

/// Returns the same of normal numbers whose negative ones are 0, as a ReLU leaves them.
pub(crate) fn positive_sqnr(scheme: &str) -> Option<f64> {
    let x: Vec<f32> = with_outlier(None).into_iter().map(|x| x.max(0.0)).collect();
    ratio(scheme, &x, false, None)
}

/// Made-up tensor of normal numbers, in which the first number of each row may be an outlier.
fn with_outlier(outlier: Option<f32>) -> Vec<f32> {
    let mut x = normal(ROWS * COLS, 7);
    if let Some(outlier) = outlier {
        x.iter_mut().step_by(COLS).for_each(|x| *x = outlier);
    }
    x
}

/// Returns the power of `x` over that of its errors under a scheme in dB; with `skip` without the first number of each row.
fn ratio(scheme: &str, x: &[f32], skip: bool, rotation: Option<&Hadamard>) -> Option<f64> {
    let scheme: Scheme = scheme.parse().ok()?;
    let mut y = x.to_vec();
    if let Some(rotation) = rotation {
        rotation.forward(&mut y);
    }
    fake_quantize(&scheme, &mut y, ROWS, COLS, Given::default()).ok()?;
    if let Some(rotation) = rotation {
        rotation.transpose(&mut y);
    }
    let (mut signal, mut noise) = (0.0, 0.0);
    for (i, (x, y)) in x.iter().zip(&y).enumerate() {
        if !skip || i % COLS != 0 {
            signal += f64::from(x * x);
            noise += f64::from((x - y) * (x - y));
        }
    }
    Some(10.0 * (signal / noise).log10())
}

/// Returns the smallest positive element of a scheme over its largest.
pub(crate) fn smallest_level(scheme: &Scheme) -> Option<f64> {
    let format = &scheme.format;
    let codes =
        Some(format.code_bits()).filter(|bits| (1..=16).contains(bits)).map(|bits| 0..1u32 << bits)?;
    let levels = || codes.clone().map(|code| format.element(code)).filter(|x| x.is_finite() && *x > 0.0);
    let (least, largest) = (levels().reduce(f32::min)?, levels().reduce(f32::max)?);
    Some(f64::from(least) / f64::from(largest))
}

/// Returns the relative error of a dot product of `k` positive E4M3 numbers in Hopper's accumulator of 14 bits, without
/// and with promotion to f32 every 128 products; the mean over 16 products.
pub fn accumulator_error(k: usize) -> [f64; 2] {
    let error = |accumulator: Accumulator| {
        (0..TRIALS).map(|trial| accumulated(accumulator, k, trial).abs()).sum::<f64>() / TRIALS as f64
    };
    [None, Some(128)].map(|promote| error(Accumulator::Hopper { promote }))
}

/// Returns the mean relative error, with its sign, of the same sums without promotion: the bits below the accumulator are cut
/// off towards 0, so that a sum of positive products is always too small.
pub(crate) fn accumulator_bias(k: usize) -> f64 {
    (0..TRIALS).map(|trial| accumulated(Accumulator::Hopper { promote: None }, k, trial)).sum::<f64>()
        / TRIALS as f64
}

/// Sums that are averaged.
const TRIALS: u64 = 16;

/// Returns the relative error of one sum of `k` positive E4M3 products.
fn accumulated(accumulator: Accumulator, k: usize, trial: u64) -> f64 {
    let element = |x: f32| minifloat::E4M3.decode(minifloat::E4M3.encode_saturating(x.abs() + 0.5));
    let a: Vec<f32> = normal(k, 2 * trial).into_iter().map(element).collect();
    let b: Vec<f32> = normal(k, 2 * trial + 1).into_iter().map(element).collect();
    let exact: f64 = a.iter().zip(&b).map(|(a, b)| f64::from(*a) * f64::from(*b)).sum();
    f64::from(accumulator.dot(&a, &b)) / exact - 1.0
}

/// Inputs of the made-up router of [`router_changes`], and tokens that it routes.
const ROUTED: usize = 256;

/// Returns the share of made-up tokens of which at least one of the `active` chosen of `experts` experts changes where the
/// inputs and weights of the router are rounded by a scheme. Both are normal numbers, 256 for each expert and token.
/// `None` for schemes that need a search.
pub(crate) fn router_changes(scheme: &str, experts: usize, active: usize) -> Option<f64> {
    let scheme: Scheme = scheme.parse().ok()?;
    let experts = experts.clamp(1, 1024);
    let (weights, tokens) = (normal(experts * ROUTED, 13), normal(ROUTED * ROUTED, 17));
    let rounded = |x: &[f32]| {
        let mut x = x.to_vec();
        let rows = x.len() / ROUTED;
        fake_quantize(&scheme, &mut x, rows, ROUTED, Given::default()).ok().map(|_| x)
    };
    let (rounded_weights, rounded_tokens) = (rounded(&weights)?, rounded(&tokens)?);
    let chosen = |weights: &[f32], token: &[f32]| {
        let score =
            |row: &[f32]| row.iter().zip(token).map(|(w, x)| f64::from(*w) * f64::from(*x)).sum::<f64>();
        let scores: Vec<f64> = weights.chunks(ROUTED).map(score).collect();
        let mut order: Vec<usize> = (0..experts).collect();
        order.sort_by(|a, b| scores[*b].total_cmp(&scores[*a]));
        order.truncate(active);
        order.sort_unstable();
        order
    };
    let pairs = tokens.chunks(ROUTED).zip(rounded_tokens.chunks(ROUTED));
    let changed =
        pairs.filter(|(exact, rounded)| chosen(&weights, exact) != chosen(&rounded_weights, rounded)).count();
    Some(changed as f64 / ROUTED as f64)
}

/// Returns the relative changes of a weight below which rounding to nearest drops every one, and above which it keeps every
/// one: half the spacing of a float with `m` mantissa bits is `2^-(m + 2)` of the largest values with an exponent, and
/// `2^-(m + 1)` of the smallest.
pub(crate) fn update_limits(float: MiniFloat) -> [f64; 2] {
    let kept = half_spacing(float);
    [kept / 2.0, kept]
}

/// Returns the magnitude from which on no weight is changed by steps of this size: the least power of two of which half the
/// spacing exceeds the step.
pub(crate) fn immovable_from(float: MiniFloat, step: f64) -> f64 {
    (step / half_spacing(float)).log2().floor().exp2() * 2.0
}

/// Half the spacing of the values just above a power of two, over it.
fn half_spacing(float: MiniFloat) -> f64 {
    0.5f64.powi(float.mantissa_bits as i32 + 1)
}

/// Inputs and samples of the made-up layer of [`compensation_error`].
const WIDTH: usize = 12;
const SAMPLES: usize = 64;

/// Returns the relative error of the update that GPTQ's factor gives the other weights of a row for the error of the
/// first, against the minimum of `δᵀ H δ` with that error fixed: with the upper Cholesky factor of `H⁻¹` (arXiv
/// 2210.17323, section 3.3), and with the Cholesky factor of `H` in its place. `H` `[12, 12]` belongs to correlated
/// inputs, damped by 1 % of its mean diagonal.
pub(crate) fn compensation_error() -> [f64; 2] {
    let x = normal((WIDTH + 1) * SAMPLES, 11);
    // Neighbouring inputs share half of their variance.
    let input = |t: usize, i: usize| f64::from(x[t * (WIDTH + 1) + i] + x[t * (WIDTH + 1) + i + 1]);
    let entry = |i: usize, j: usize| (0..SAMPLES).map(|t| input(t, i) * input(t, j)).sum::<f64>();
    let damping = 0.01 * (0..WIDTH).map(|i| entry(i, i)).sum::<f64>() / WIDTH as f64;
    let h: Vec<Vec<f64>> = (0..WIDTH)
        .map(|i| (0..WIDTH).map(|j| entry(i, j) + if i == j { damping } else { 0.0 }).collect())
        .collect();
    // The minimum: δ_F = -H_FF⁻¹ H_F0 for an error of 1 in the first weight.
    let rest: Vec<Vec<f64>> = h[1..].iter().map(|row| row[1..].to_vec()).collect();
    let right: Vec<f64> = inverse(&rest)
        .iter()
        .map(|row| -row.iter().zip(&h[1..]).map(|(a, h)| a * h[0]).sum::<f64>())
        .collect();
    let error = |factored: &[Vec<f64>]| {
        // Row 0 of the upper factor over its diagonal.
        let lower = cholesky(factored);
        let update = (1..WIDTH).map(|k| lower[k][0] / lower[0][0]);
        let (wrong, norm) = update.zip(&right).fold((0.0, 0.0), |(wrong, norm), (found, right)| {
            (wrong + (found - right).powi(2), norm + right * right)
        });
        (wrong / norm).sqrt()
    };
    [error(&inverse(&h)), error(&h)]
}

/// Returns the lower factor `L` of a positive definite `a = L Lᵀ`.
fn cholesky(a: &[Vec<f64>]) -> Vec<Vec<f64>> {
    let mut l = vec![vec![0.0; a.len()]; a.len()];
    for i in 0..a.len() {
        for j in 0..=i {
            let left = a[i][j] - (0..j).map(|k| l[i][k] * l[j][k]).sum::<f64>();
            l[i][j] = if i == j { left.sqrt() } else { left / l[j][j] };
        }
    }
    l
}

/// Returns the inverse of a positive definite matrix (Gauss and Jordan; such a matrix needs no pivots).
fn inverse(a: &[Vec<f64>]) -> Vec<Vec<f64>> {
    let n = a.len();
    let mut work: Vec<Vec<f64>> = a
        .iter()
        .enumerate()
        .map(|(i, row)| row.iter().copied().chain((0..n).map(|j| f64::from(u8::from(i == j)))).collect())
        .collect();
    for i in 0..n {
        let pivot = work[i][i];
        work[i].iter_mut().for_each(|x| *x /= pivot);
        let row = work[i].clone();
        for (_, other) in work.iter_mut().enumerate().filter(|(j, _)| *j != i) {
            let factor = other[i];
            other.iter_mut().zip(&row).for_each(|(x, y)| *x -= factor * y);
        }
    }
    work.into_iter().map(|row| row[n..].to_vec()).collect()
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    #[test]
    fn normal_numbers_have_unit_variance() {
        let x = normal(1 << 14, 3);
        let mean = x.iter().sum::<f32>() / x.len() as f32;
        let variance = x.iter().map(|x| (x - mean) * (x - mean)).sum::<f32>() / x.len() as f32;
        assert!(mean.abs() < 0.03 && (variance - 1.0).abs() < 0.03, "{mean} {variance}");
    }

    /// INT8 with one value of 100 σ in 1024: a step of 100 / 127.5 = .784 σ makes an error of .784² / 12 = .0512, 12.9 dB. Rotated
    /// it is 100 / √1024 = 3.1 σ in each value, so that the largest is about 3.1 + 3.3 = 6.5 σ: a step of .051, 36.7 dB. NVFP4 loses
    /// the 15 neighbours of the outlier of 1023 values, .0147, beside its noise of 20.4 dB, .0091: 16.2 dB. Rotated, all values
    /// become √(1 + 3.1²) = 3.3 times as large, and so does the noise: about 10 dB.
    #[test]
    fn rotations_spread_outliers() {
        let near = |found: Option<f64>, right: f64| {
            assert!((found.unwrap() - right).abs() < 1.0, "{found:?} {right}");
        };
        near(sqnr("int8-channel", Some(100.0)), 12.9);
        near(rotated_sqnr("int8-channel", Some(100.0)), 36.7);
        near(rotated_sqnr("int8-channel", None), sqnr("int8-channel", None).unwrap());
        near(sqnr("nvfp4", Some(100.0)), 16.2);
        let rotated = rotated_sqnr("nvfp4", Some(100.0)).unwrap();
        assert!((8.0..13.0).contains(&rotated), "{rotated}");
    }

    /// Checks that a symmetric integer uses half of its codes for values of one sign: one bit, 6 dB.
    #[test]
    fn zero_points_gain_a_bit_where_values_have_one_sign() {
        let gain = positive_sqnr("int8-channel-asym").unwrap() - positive_sqnr("int8-channel").unwrap();
        assert!((gain - 6.02).abs() < 0.3, "{gain}");
    }

    /// bitsandbytes' dynamic map for numbers of one sign begins with the middle of .1 and .55, times 1e-6 of the largest value
    /// (`create_dynamic_map`); a linear one has steps of 1/255.
    #[test]
    fn dynamic_maps_reach_far_down() {
        let of = |scheme: &str| smallest_level(&scheme.parse().unwrap()).unwrap();
        assert!((of("lin8-unsigned") - 1.0 / 255.0).abs() < 1e-6, "{}", of("lin8-unsigned"));
        assert!((of("dyn8-unsigned") - 3.25e-7).abs() < 1e-9, "{}", of("dyn8-unsigned"));
        assert_eq!(smallest_level(&"q4_k".parse().unwrap()), None);
    }

    /// Bits are cut off towards 0: every sum of positive products is too small, so the mean of the errors is the negative
    /// mean of their magnitudes.
    #[test]
    fn truncated_sums_err_to_one_side() {
        for k in [256, 1024, 4096] {
            let (bias, [size, _]) = (accumulator_bias(k), accumulator_error(k));
            assert!(bias < 0.0 && (bias + size).abs() < 1e-12, "{k}: {bias} {size}");
        }
    }

    /// bf16 has 7 mantissa bits: between 2^e and 2^(e+1) its values are 2^(e-7) apart, so an update of less than 2^(e-8) is
    /// lost: 2^-9 = .195 % of a weight just below 2^(e+1), 2^-8 = .391 % of one at 2^e. A step of 2e-5 is less than 2^(e-8)
    /// from e = -7 on (2^-15 = 3.05e-5; 2^-16 = 1.53e-5 is less than it): from 2^-7 = .0078 on nothing moves. All of it is
    /// counted with the codec, on weights of every exponent.
    #[test]
    fn bf16_drops_small_updates() {
        let bf16 = minifloat::BF16;
        assert_eq!(update_limits(bf16), [0.5f64.powi(9), 0.5f64.powi(8)]);
        assert_eq!(immovable_from(bf16, 2e-5), 0.0078125);
        // f16 has 10 bits: 2^-11; a step of 2^-15 is half the spacing at 2^-4 and less at 2^-3.
        assert_eq!(immovable_from(minifloat::F16, 0.5f64.powi(15)), 0.125);
        let kept = |weight: f64, step: f64| {
            f64::from(bf16.decode(bf16.encode_saturating((weight + step) as f32))) != weight
        };
        for exponent in [-20, -8, -7, 0, 5] {
            for i in 0..128 {
                let weight = 2f64.powi(exponent) * (1.0 + f64::from(i) / 128.0);
                assert!(!kept(weight, 0.00195 * weight) && kept(weight, 0.00391 * weight), "{weight}");
                assert!(weight < 0.0078125 || !kept(weight, 2e-5), "{weight}");
                assert!(!(0.001..0.0078).contains(&weight) || kept(weight, 2e-5), "{weight}");
            }
        }
    }

    /// Nothing changes without rounding, little in bf16, more in FP8 and most in four bits.
    #[test]
    fn routers_choose_other_experts_in_few_bits() {
        let of = |scheme| router_changes(scheme, 128, 8).unwrap();
        let found = ["f32", "bf16", "fp8-e4m3-channel", "int4-channel"].map(of);
        assert_eq!(found[0], 0.0);
        assert!(found.is_sorted() && found[1] > 0.0 && found[1] < 0.1 && found[2] > 0.2, "{found:?}");
    }

    /// training.md, E12: .0007 / .003 / .012 without promotion at K = 1024, 4096, 16384; 1.1e-4 with it.
    #[test]
    fn promotion_keeps_long_sums_exact() {
        let [short, promoted] = accumulator_error(1024);
        let [long, _] = accumulator_error(4096);
        assert!(short > 3.0 * promoted && long > 2.0 * short, "{short} {long} {promoted}");
    }
}
