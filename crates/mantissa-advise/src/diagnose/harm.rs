//! Error that quantizing an input causes in the products that read it.
//!
//! `||W (q(x) - x)|| / ||W x||` over a sample of tokens `x` and of rows of `W`: what outliers, spikes and wrong ranges
//! cost, where ratios of magnitudes only show that they exist.

use mantissa_model::{InputQuantizer, Linear};
use mantissa_num::hadamard::Hadamard;

/// Rows of each weight that errors are measured on.
const ROWS: usize = 32;

/// Sampled tokens of an input as the codes read it, `[tokens, width]`, and rows of the weights that read it.
pub(super) struct Sampled<'a> {
    pub(super) x: &'a [f32],
    pub(super) width: usize,
    /// `[rows, width]`.
    pub(super) weights: Vec<f32>,
}

/// Returns evenly spaced rows of the weights of `linears`, `[rows, width]`.
pub(super) fn rows_of<'l>(linears: impl Iterator<Item = &'l Linear>, width: usize) -> Vec<f32> {
    let mut rows = Vec::new();
    for linear in linears.filter(|linear| linear.cols() == width && linear.rows() > 0) {
        let every = linear.rows().div_ceil(ROWS).max(1);
        for row in (0..linear.rows()).step_by(every) {
            let start = rows.len();
            rows.resize(start + width, 0.0);
            linear.row(row, &mut rows[start..]);
        }
    }
    rows
}

impl Sampled<'_> {
    /// Returns the relative error of the products if `x` becomes `other`, NaN without any value.
    fn error(&self, other: &[f32]) -> f64 {
        let (mut error, mut norm) = (0.0, 0.0);
        for (x, y) in self.x.chunks_exact(self.width).zip(other.chunks_exact(self.width)) {
            for w in self.weights.chunks_exact(self.width) {
                let (mut right, mut wrong) = (0f64, 0f64);
                for ((w, x), y) in w.iter().zip(x).zip(y) {
                    right += f64::from(*w) * f64::from(*x);
                    wrong += f64::from(*w) * (f64::from(*y) - f64::from(*x));
                }
                norm += right * right;
                error += wrong * wrong;
            }
        }
        if error == 0.0 { 0.0 } else { (error / norm).sqrt() }
    }

    /// Error under int8 with one range per token, the commonest scheme of inputs.
    pub(super) fn by_token(&self) -> f64 {
        let mut y = self.x.to_vec();
        y.chunks_exact_mut(self.width).for_each(|token| int8(token, amax(token)));
        self.error(&y)
    }

    /// The same after a Hadamard rotation of the input (and of the weights, which changes no product); `None` if there
    /// is none of this width.
    pub(super) fn rotated(&self) -> Option<f64> {
        let rotation = Hadamard::new(self.width)?.randomized(0);
        let mut y = self.x.to_vec();
        rotation.forward(&mut y);
        y.chunks_exact_mut(self.width).for_each(|token| int8(token, amax(token)));
        rotation.transpose(&mut y);
        Some(self.error(&y))
    }

    /// Error under int8 with one range for all tokens, up to `range`.
    pub(super) fn by_tensor(&self, range: f32) -> f64 {
        let mut y = self.x.to_vec();
        int8(&mut y, range);
        self.error(&y)
    }

    /// Error under the model's own quantizer; `None` if it has no code for a value.
    pub(super) fn under(&self, quantizer: &InputQuantizer) -> Option<f64> {
        let mut y = self.x.to_vec();
        quantizer.apply(&mut y, self.width).ok()?;
        Some(self.error(&y))
    }

    /// Mean kurtosis of the tokens, `m4 / m2²` over the channels, as it is and after a Hadamard rotation: 3 for normal
    /// values.
    pub(super) fn kurtosis(&self) -> (f64, Option<f64>) {
        let rotated = Hadamard::new(self.width).map(|rotation| {
            let mut y = self.x.to_vec();
            rotation.randomized(0).forward(&mut y);
            mean_kurtosis(&y, self.width)
        });
        (mean_kurtosis(self.x, self.width), rotated)
    }
}

fn mean_kurtosis(x: &[f32], width: usize) -> f64 {
    let token_kurtosis = |token: &[f32]| {
        let n = token.len() as f64;
        let mean = token.iter().map(|&x| f64::from(x)).sum::<f64>() / n;
        let moment = |power: i32| token.iter().map(|&x| (f64::from(x) - mean).powi(power)).sum::<f64>() / n;
        moment(4) / moment(2).powi(2)
    };
    let all: Vec<f64> = x.chunks_exact(width).map(token_kurtosis).filter(|k| k.is_finite()).collect();
    all.iter().sum::<f64>() / all.len() as f64
}

/// Rounds `x` to int8 with the range `±range`.
fn int8(x: &mut [f32], range: f32) {
    let scale = range / 127.0;
    if scale > 0.0 {
        x.iter_mut().for_each(|x| *x = (*x / scale).round_ties_even().clamp(-127.0, 127.0) * scale);
    }
}

/// Returns the largest magnitude.
pub(super) fn amax(x: &[f32]) -> f32 {
    x.iter().fold(0.0, |most, x| most.max(x.abs()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_outlier_that_the_weights_undo_costs_the_other_channels() {
        let width = 64;
        let mut x: Vec<f32> = (0..8 * width).map(|i| (i as f32 * 0.7).sin()).collect();
        let mut weights: Vec<f32> = (0..16 * width).map(|i| (i as f32 * 1.3).cos()).collect();
        let plain = Sampled { x: &x, width, weights: weights.clone() }.by_token();
        x.iter_mut().skip(5).step_by(width).for_each(|x| *x *= 200.0);
        weights.iter_mut().skip(5).step_by(width).for_each(|w| *w /= 200.0);
        let sampled = Sampled { x: &x, width, weights };
        let (by_token, rotated) = (sampled.by_token(), sampled.rotated().unwrap_or(f64::NAN));
        assert!(
            plain < 0.03 && by_token > 10.0 * plain && rotated < by_token,
            "{plain} {by_token} {rotated}"
        );
        let (kurtosis, after) = sampled.kurtosis();
        assert!(kurtosis > 10.0 && after.is_some_and(|after| after < 5.0), "{kurtosis} {after:?}");
        assert_eq!(sampled.by_tensor(0.0), 0.0);
    }
}
