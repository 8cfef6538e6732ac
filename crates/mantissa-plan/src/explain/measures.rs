//! Small measurements on made-up numbers: signal-to-noise ratios, and errors of accumulators.

use std::f64::consts::TAU;

use mantissa_num::round::random_u32;
use mantissa_num::{Accumulator, Code, Given, Scheme, fake_quantize, minifloat};

/// Rows and columns of a made-up tensor.
const ROWS: usize = 32;
const COLS: usize = 1024;

/// Returns `count` numbers of a standard normal distribution: the same ones for the same seed (Box and Muller 1958).
pub(crate) fn normal(count: usize, seed: u64) -> Vec<f32> {
    let uniform = |index: u64| (f64::from(random_u32(seed, index)) + 0.5) / f64::from(u32::MAX);
    let value = |i: usize| {
        let (u, v) = (uniform(2 * i as u64), uniform(2 * i as u64 + 1));
        ((-2.0 * u.ln()).sqrt() * (TAU * v).cos()) as f32
    };
    (0..count).map(value).collect()
}

/// Returns the signal-to-noise ratio in dB of normal numbers under a scheme; with `outlier`, one number of each row is so many
/// standard deviations large, and counts in neither signal nor noise. `None` for schemes that need a search.
pub fn sqnr(scheme: &str, outlier: Option<f32>) -> Option<f64> {
    let scheme: Scheme = scheme.parse().ok()?;
    let mut x = normal(ROWS * COLS, 7);
    if let Some(outlier) = outlier {
        x.iter_mut().step_by(COLS).for_each(|x| *x = outlier);
    }
    let mut y = x.clone();
    fake_quantize(&scheme, &mut y, ROWS, COLS, Given::default()).ok()?;
    let (mut signal, mut noise) = (0.0, 0.0);
    for (i, (x, y)) in x.iter().zip(&y).enumerate() {
        if outlier.is_none() || i % COLS != 0 {
            signal += f64::from(x * x);
            noise += f64::from((x - y) * (x - y));
        }
    }
    Some(10.0 * (signal / noise).log10())
}

/// Returns the relative error of a dot product of `k` positive E4M3 numbers in Hopper's accumulator of 14 bits, without and
/// with promotion to f32 every 128 products; the mean over 16 products.
pub fn accumulator_error(k: usize) -> [f64; 2] {
    let element = |x: f32| minifloat::E4M3.decode(minifloat::E4M3.encode_saturating(x.abs() + 0.5));
    let error = |accumulator: Accumulator| {
        let of = |trial: u64| {
            let a: Vec<f32> = normal(k, 2 * trial).into_iter().map(element).collect();
            let b: Vec<f32> = normal(k, 2 * trial + 1).into_iter().map(element).collect();
            let exact: f64 = a.iter().zip(&b).map(|(a, b)| f64::from(*a) * f64::from(*b)).sum();
            (f64::from(accumulator.dot(&a, &b)) / exact - 1.0).abs()
        };
        (0..16).map(of).sum::<f64>() / 16.0
    };
    [None, Some(128)].map(|promote| error(Accumulator::Hopper { promote }))
}

/// Returns the smallest relative change of a weight that its rounding to a float of this code keeps: half the spacing just above
/// a power of two, `2^-(m + 1)` of the value.
pub(crate) fn least_update(code: Code) -> f64 {
    match code {
        Code::Float(float) => 0.5f64.powi(float.mantissa_bits as i32 + 1),
        _ => 0.5f64.powi(24),
    }
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

    /// training.md, E12: .0007 / .003 / .012 without promotion at K = 1024, 4096, 16384; 1.1e-4 with it.
    #[test]
    fn promotion_keeps_long_sums_exact() {
        let [short, promoted] = accumulator_error(1024);
        let [long, _] = accumulator_error(4096);
        assert!(short > 3.0 * promoted && long > 2.0 * short, "{short} {long} {promoted}");
    }
}
