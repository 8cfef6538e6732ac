//! Zero points told to be off by one by the mean of the weights, where that costs too little for the loss to show.
//!
//! The weights of a linear layer sum to nearly 0. With zero points off by one, every weight is off by one step of its scale,
//! and so is the mean.

use mantissa_num::Quantized;
use serde::Serialize;

use super::Alternative;

/// Range of a mean in steps that means one step.
const ONE: std::ops::Range<f64> = 0.7..1.3;

/// Largest mean of the median tensor, in steps: in a model whose weights have means of their own nothing is concluded.
const MEDIAN: f64 = 0.2;

/// Least mean in standard errors over the rows.
const ERRORS: f64 = 6.0;

/// Most bits of codes: steps of more are small beside the means that weights may have.
const BITS: u32 = 4;

/// Mean of the weights of a tensor with zero points.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Mean {
    /// Tensor.
    pub tensor: String,
    /// Mean in steps of the weights' scales.
    pub steps: f64,
    /// Standard error of `steps` over the rows.
    pub se: f64,
}

impl Mean {
    /// Measures the tensor `tensor`; `None` without zero points, or with codes of more than 4 bits.
    pub(super) fn of(tensor: String, q: &Quantized) -> Option<Self> {
        if q.format.code_bits() > BITS || q.cols == 0 {
            return None;
        }
        // One step below each weight.
        let below = Alternative::ZeroPointUp.codes(q)?.dequantize().ok()?;
        let values = q.dequantize().ok()?;
        let rows = values.chunks_exact(q.cols).zip(below.chunks_exact(q.cols));
        let mean_of = |(values, below): (&[f32], &[f32])| {
            let steps = values.iter().zip(below).map(|(x, y)| (f64::from(*x), f64::from(x - y)));
            // A group of zeros has no step.
            let (sum, count) = steps
                .filter(|(_, step)| *step > 0.0)
                .fold((0.0, 0usize), |(sum, count), (x, step)| (sum + x / step, count + 1));
            (count > 0).then(|| sum / count as f64)
        };
        let means: Vec<f64> = rows.filter_map(mean_of).collect();
        let n = means.len() as f64;
        let steps = means.iter().sum::<f64>() / n;
        let se = (means.iter().map(|x| (x - steps).powi(2)).sum::<f64>() / (n * (n - 1.0))).sqrt();
        (steps.is_finite() && se.is_finite()).then_some(Mean { tensor, steps, se })
    }

    /// Returns the alternative that moves the mean to 0, if it is a step away.
    pub(super) fn repair(&self) -> Option<Alternative> {
        let off = ONE.contains(&self.steps.abs()) && self.steps.abs() > ERRORS * self.se;
        off.then_some(if self.steps > 0.0 { Alternative::ZeroPointUp } else { Alternative::ZeroPointDown })
    }
}

/// True if the means of most tensors are near 0.
pub(super) fn are_even(means: &[Mean]) -> bool {
    let mut sizes: Vec<f64> = means.iter().map(|mean| mean.steps.abs()).collect();
    sizes.sort_by(f64::total_cmp);
    sizes.get(sizes.len() / 2).is_some_and(|median| *median < MEDIAN)
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use mantissa_num::{Given, Scheme, quantize};

    use super::*;

    #[test]
    fn a_step_off_is_found_in_its_direction() {
        let scheme: Scheme = "int4-g32-asym".parse().unwrap();
        let x: Vec<f32> = (0..64 * 128).map(|i| (i as f32 * 0.37).sin() + (i as f32 * 0.11).cos()).collect();
        let q = quantize(&scheme, &x, 64, 128, Given::default()).unwrap();
        let repair = |q: &Quantized| Mean::of("w".to_owned(), q).unwrap().repair();
        assert_eq!(repair(&q), None);
        for (planted, right) in [
            (Alternative::ZeroPointUp, Alternative::ZeroPointDown),
            (Alternative::ZeroPointDown, Alternative::ZeroPointUp),
        ] {
            assert_eq!(repair(&planted.codes(&q).unwrap()), Some(right));
        }
        let scheme: Scheme = "int8-g32-asym".parse().unwrap();
        assert_eq!(
            Mean::of("w".to_owned(), &quantize(&scheme, &x, 64, 128, Given::default()).unwrap()),
            None
        );
    }
}
