//! Comparison of a method's solution with RTN, and fallback to RTN if the solution is worse.
//!
//! The measure is `tr((W - Q) H (W - Q)ᵀ)`, the mean over tokens of the squared error of the layer's output. `H = XᵀX
//! / t` comes from the layer's input behind the quantized layers before it. It is taken on held-out windows if there
//! are any, else on the calibration. Where weights are corrected for the drift of their input
//! ([`Drift`](crate::gptq::Drift)), W is the corrected weight at full precision. A solution with a larger error than
//! RTN in the same scheme is replaced by RTN, and the layer's report gives both errors.

use serde::{Deserialize, Deserializer, Serialize};

use crate::gptq::Hessian;
use crate::metric::weigh;

/// Rows of a weight whose errors are computed at a time.
const ROWS: usize = 2048;

/// Output whose error is measured.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Output {
    /// Output of the layer.
    Layer,
    /// Outputs of all layers that read the same input, because they share the scales of its channels.
    Input,
    /// Output of the decoder layer. Its linear layers are learned together, so one may err more if another
    /// compensates for it.
    Block,
}

/// Windows on which an error is measured.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Windows {
    /// Windows that the method works on.
    Calibration,
    /// Windows that the method has not seen.
    HeldOut,
}

impl Windows {
    /// Name for messages.
    pub fn name(self) -> &'static str {
        match self {
            Windows::Calibration => "the calibration",
            Windows::HeldOut => "held-out windows",
        }
    }
}

/// Comparison of a solution with rounding to nearest in the same scheme.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct Judgement {
    /// Output whose error is measured.
    pub of: Output,
    /// Windows on which it is measured.
    pub windows: Windows,
    /// Mean squared error of that output with the method's solution.
    #[serde(deserialize_with = "null_is_nan")]
    pub solved: f64,
    /// Mean squared error of that output with the RTN weight.
    #[serde(deserialize_with = "null_is_nan")]
    pub nearest: f64,
}

impl Judgement {
    /// Reason for the fallback to RTN; `None` if the solution is kept.
    pub fn fallback(&self) -> Option<String> {
        let Judgement { windows, solved, nearest, .. } = self;
        // NaN counts as worse.
        let kept = solved <= nearest;
        (!kept)
            .then(|| format!("worse than RTN on {}: error {solved:.4e}, RTN {nearest:.4e}", windows.name()))
    }
}

/// Measures output errors of weights that share an input.
#[derive(Debug)]
pub struct ErrorGate {
    /// Sum of the moments `[cols, cols]`, symmetric.
    moments: Vec<f32>,
    cols: usize,
    tokens: f64,
    windows: Windows,
}

impl ErrorGate {
    /// Uses the second moments of held-out windows if these have tokens (an expert may have none), else the second
    /// moments of the calibration.
    pub fn new(calibration: Hessian, held_out: Option<Hessian>) -> Self {
        let (hessian, windows) = match held_out.filter(|unseen| unseen.tokens() > 0) {
            Some(unseen) => (unseen, Windows::HeldOut),
            None => (calibration, Windows::Calibration),
        };
        let (cols, tokens) = (hessian.cols(), hessian.tokens().max(1) as f64);
        ErrorGate { moments: hessian.into_symmetric(), cols, tokens, windows }
    }

    /// Memory beside the moments for a weight of this shape, in bytes: the error and a part of its product with H.
    pub fn bytes_needed(rows: usize, cols: usize) -> u64 {
        4 * (rows + rows.min(ROWS)) as u64 * cols as u64
    }

    /// Windows on which errors are measured.
    pub fn windows(&self) -> Windows {
        self.windows
    }

    /// Error `tr((W - Q) H (W - Q)ᵀ)` of the solution `q`; the bits do not depend on `threads`.
    pub fn error(&self, w: &[f32], q: Vec<f32>, threads: usize) -> f64 {
        let mut errors = q;
        errors.iter_mut().zip(w).for_each(|(q, w)| *q = w - *q);
        let (mut weighed, mut sum) = (Vec::new(), 0.0);
        for part in errors.chunks(ROWS * self.cols.max(1)) {
            weigh(&self.moments, self.cols, part, &mut weighed, threads);
            sum += part.iter().zip(&weighed).map(|(e, m)| f64::from(*e) * f64::from(*m)).sum::<f64>();
        }
        sum / self.tokens
    }
}

/// Reads JSON `null` as NaN.
fn null_is_nan<'de, D: Deserializer<'de>>(deserializer: D) -> Result<f64, D::Error> {
    Option::<f64>::deserialize(deserializer).map(|number| number.unwrap_or(f64::NAN))
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use mantissa_num::Scheme;

    use super::*;
    use crate::rtn;
    use crate::solved::Solved;
    use crate::testing::values;

    #[test]
    fn the_error_matches_the_outputs() {
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
        let judge = ErrorGate::new(hessian.clone(), None);
        let found = judge.error(&w, read.clone(), 2);
        assert!((found / expected - 1.0).abs() < 1e-5 && (found / other - 1.0).abs() < 1e-5);
        assert_eq!(judge.error(&w, read, 1), found);
        assert_eq!(judge.windows, Windows::Calibration);
        // No token in the held-out windows, so the calibration decides.
        let none = Some(Hessian::new(cols).unwrap());
        assert_eq!(ErrorGate::new(hessian.clone(), none).windows, Windows::Calibration);
        assert_eq!(ErrorGate::new(hessian.clone(), Some(hessian)).windows, Windows::HeldOut);
    }

    #[test]
    fn worse_and_non_finite_solutions_fall_back() {
        let of = |solved: f64| {
            let windows = Windows::HeldOut;
            Judgement { of: Output::Layer, windows, solved, nearest: 2.0 }.fallback()
        };
        assert_eq!((of(1.5), of(2.0)), (None, None));
        assert!(of(2.5).is_some_and(|why| why.contains("held-out windows: error 2.5000e0, RTN 2.0000e0")));
        assert!(of(f64::NAN).is_some());
    }
}
