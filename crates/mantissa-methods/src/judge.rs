//! Solutions held against rounding to nearest.
//!
//! What a method makes of a weight is to err less in the layer's output than rounding to nearest in the same scheme does. The measure is
//! `tr((W - Q) H (W - Q)ᵀ)`, the mean over tokens of the squared error of the layer's output, with `H = XᵀX / t` of what the layer
//! reads behind the quantized layers before it: on windows that the method has not seen, where some are held out, on the
//! calibration where not. Where weights make up for what their input has become ([`Drift`](crate::gptq::Drift)), W is what they would be
//! at full precision. A solution that errs more is given up for the rounded weight, and the layer's report says both figures.

use mantissa_num::TensorError;
use serde::{Deserialize, Deserializer, Serialize};

use crate::gptq::Hessian;
use crate::metric::weigh;
use crate::solved::Solved;

/// Rows of a weight whose errors are weighed at a time.
const ROWS: usize = 2048;

/// Whose error is measured.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Output {
    /// Output of the layer.
    Layer,
    /// Output of all layers that read one input together, as they share the scales of its channels.
    Input,
    /// Output of the decoder layer, whose linear layers are learned together: one of them may err more by itself and make up for
    /// another.
    Block,
}

/// Windows that an error is measured on.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Windows {
    /// The windows that the method works on.
    Calibration,
    /// Windows that it has not seen.
    HeldOut,
}

impl Windows {
    /// As sentences have it.
    pub fn name(self) -> &'static str {
        match self {
            Windows::Calibration => "the calibration",
            Windows::HeldOut => "the windows held out",
        }
    }
}

/// Comparison of a solution with rounding to nearest in the same scheme.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct Judgement {
    /// Whose error is measured.
    pub of: Output,
    /// On what.
    pub windows: Windows,
    /// Mean squared error of that output with the method's solution.
    #[serde(deserialize_with = "null_is_nan")]
    pub solved: f64,
    /// The same of the weight rounded to nearest.
    #[serde(deserialize_with = "null_is_nan")]
    pub nearest: f64,
}

impl Judgement {
    /// Why the solution is given up, where it is.
    pub fn fallback(&self) -> Option<String> {
        let Judgement { windows, solved, nearest, .. } = self;
        // Not a number is no better than anything.
        let kept = solved <= nearest;
        (!kept).then(|| {
            format!("worse than rounding to nearest on {}: {solved:.4e} for {nearest:.4e}", windows.name())
        })
    }
}

/// Measures errors of weights that share an input.
#[derive(Debug)]
pub struct Judge {
    /// Sum of the moments `[cols, cols]`, symmetric.
    moments: Vec<f32>,
    cols: usize,
    tokens: f64,
    windows: Windows,
}

impl Judge {
    /// By the moments of held-out windows where these have tokens (an expert may have seen none of them), by those of the
    /// calibration where not.
    pub fn new(calibration: Hessian, held_out: Option<Hessian>) -> Self {
        let (hessian, windows) = match held_out.filter(|unseen| unseen.tokens() > 0) {
            Some(unseen) => (unseen, Windows::HeldOut),
            None => (calibration, Windows::Calibration),
        };
        let (cols, tokens) = (hessian.cols(), hessian.tokens().max(1) as f64);
        Judge { moments: hessian.into_symmetric(), cols, tokens, windows }
    }

    /// Bytes that it takes beside the moments, for a weight of this shape: the error and a part of it weighed.
    pub fn bytes_needed(rows: usize, cols: usize) -> u64 {
        4 * (rows + rows.min(ROWS)) as u64 * cols as u64
    }

    /// Windows that errors are measured on.
    pub fn windows(&self) -> Windows {
        self.windows
    }

    /// `tr((W - Q) H (W - Q)ᵀ)`; the bits do not depend on `threads`.
    ///
    /// # Errors
    /// [`TensorError`] if the parts of the solution do not fit together.
    pub fn error(&self, w: &[f32], of: &Solved, threads: usize) -> Result<f64, TensorError> {
        let mut errors = of.values()?;
        errors.iter_mut().zip(w).for_each(|(q, w)| *q = w - *q);
        let (mut weighed, mut sum) = (Vec::new(), 0.0);
        for part in errors.chunks(ROWS * self.cols.max(1)) {
            weigh(&self.moments, self.cols, part, &mut weighed, threads);
            sum += part.iter().zip(&weighed).map(|(e, m)| f64::from(*e) * f64::from(*m)).sum::<f64>();
        }
        Ok(sum / self.tokens)
    }
}

/// A number that JSON has as `null` where it is none.
fn null_is_nan<'de, D: Deserializer<'de>>(deserializer: D) -> Result<f64, D::Error> {
    Option::<f64>::deserialize(deserializer).map(|number| number.unwrap_or(f64::NAN))
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use mantissa_num::Scheme;

    use super::*;
    use crate::rtn;
    use crate::testing::values;

    #[test]
    fn the_error_is_that_of_the_outputs() {
        let (tokens, rows, cols) = (50, 7, 32);
        let (x, w) = (values(1, tokens * cols), values(2, rows * cols));
        let scheme: Scheme = "int3-g16".parse().unwrap();
        let solved = Solved::rounded(rtn::quantize(&scheme, &w, rows, cols, None, 1).unwrap());
        let read = solved.values().unwrap();
        let mut hessian = Hessian::new(cols).unwrap();
        hessian.add(&x, 1);
        let mut expected = 0.0;
        for x in x.chunks_exact(cols) {
            for (w, q) in w.chunks_exact(cols).zip(read.chunks_exact(cols)) {
                let error = |i: usize| f64::from(x[i]) * (f64::from(w[i]) - f64::from(q[i]));
                expected += (0..cols).map(error).sum::<f64>().powi(2) / tokens as f64;
            }
        }
        let other = hessian.loss(&w, &read);
        let judge = Judge::new(hessian.clone(), None);
        let found = judge.error(&w, &solved, 2).unwrap();
        assert!((found / expected - 1.0).abs() < 1e-5 && (found / other - 1.0).abs() < 1e-5);
        assert_eq!(judge.error(&w, &solved, 1).unwrap(), found);
        assert_eq!(judge.windows, Windows::Calibration);
        // No token of the windows held out: those of the calibration decide.
        let none = Some(Hessian::new(cols).unwrap());
        assert_eq!(Judge::new(hessian.clone(), none).windows, Windows::Calibration);
        assert_eq!(Judge::new(hessian.clone(), Some(hessian)).windows, Windows::HeldOut);
    }

    #[test]
    fn what_is_worse_or_no_number_is_given_up() {
        let of = |solved: f64| {
            let windows = Windows::HeldOut;
            Judgement { of: Output::Layer, windows, solved, nearest: 2.0 }.fallback()
        };
        assert_eq!((of(1.5), of(2.0)), (None, None));
        assert!(of(2.5).is_some_and(|why| why.contains("held out: 2.5000e0 for 2.0000e0")));
        assert!(of(f64::NAN).is_some());
    }
}
