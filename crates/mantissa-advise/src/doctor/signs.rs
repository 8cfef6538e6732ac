//! Gate and up told apart by their signs, where swapping them costs too little for the loss to show.
//!
//! In a gated MLP `down(act(gate x) · up x)` nothing changes if a row of up and the column of down that reads it turn their
//! sign, so training gives rows of up no preferred sign. The activation does distinguish the signs of gate: in trained
//! models its rows lean to one side.

use mantissa_model::{Layer, Linear, LinearInput, LinearKind, ModelConfig};
use serde::Serialize;

use crate::error::AdviseError;
use crate::run::State;

/// Least lean of up, in standard errors: as for changes of parts, of which a model has hundreds; and where the loss falls too.
const ERRORS: f64 = 6.0;
const ERRORS_WITH_LOSS: f64 = 4.0;

/// Least ratio of up's lean to gate's. Sound up projections of the test models lean by less than 3 standard errors
/// (measured 2026-11-26).
const TIMES: f64 = 3.0;

/// Most tokens that a layer runs for it.
const TOKENS: usize = 256;

/// Lean of gate and up in one layer: mean over the rows of their mean output over the tokens, each divided by its standard
/// deviation, in standard errors.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct Lean {
    /// Layer index.
    pub layer: usize,
    /// Lean of the projection stored as gate.
    pub gate: f64,
    /// Lean of the projection stored as up.
    pub up: f64,
}

impl Lean {
    /// Measures layer `layer` on the first of `states`; `None` if its MLP is not gated or has experts only.
    ///
    /// # Errors
    /// A layer that cannot run.
    pub(super) fn of(
        layer: &Layer,
        config: &ModelConfig,
        states: &[State],
    ) -> Result<Option<Self>, AdviseError> {
        let (Some(gate), Some(up)) = (layer.linear(LinearKind::Gate), layer.linear(LinearKind::Up)) else {
            return Ok(None);
        };
        let mut x: Vec<f32> = Vec::new();
        for state in states {
            if x.len() >= TOKENS * gate.cols() {
                break;
            }
            let mut observe = |input: LinearInput, values: &[f32]| {
                if input == LinearInput::GateUp {
                    x.extend_from_slice(values);
                }
            };
            state.clone().through(layer, config, Some(&mut observe))?;
        }
        let lean = |linear: &Linear| lean(linear, &x);
        Ok(lean(gate).zip(lean(up)).map(|(gate, up)| Lean { layer: layer.index(), gate, up }))
    }

    /// True if the projection stored as up leans like a gate, and the one stored as gate does not.
    pub(super) fn is_swapped(&self) -> bool {
        self.is_suspect() && self.up.abs() > ERRORS
    }

    /// True if the same holds of smaller leans, which the loss has to confirm.
    pub(super) fn is_suspect(&self) -> bool {
        self.up.abs() > ERRORS_WITH_LOSS && self.up.abs() > TIMES * self.gate.abs()
    }
}

/// Returns the lean of a projection over the inputs `x` `[tokens, width]`; `None` if it is not finite.
fn lean(linear: &Linear, x: &[f32]) -> Option<f64> {
    let (rows, cols) = (linear.rows(), linear.cols());
    let tokens = x.len() / cols.max(1);
    if x.len() != tokens * cols || tokens < 2 || rows < 2 {
        return None;
    }
    let mut x = x.to_vec();
    if let Some(input) = linear.input() {
        input.apply(&mut x, cols).ok()?;
    }
    let mut y = vec![0.0; tokens * rows];
    linear.forward(&x, &mut y, false, &mut vec![0.0; Linear::scratch_len(rows, cols)]);
    let row_mean = |row: usize| {
        let values = y.iter().skip(row).step_by(rows).map(|y| f64::from(*y));
        let (mean, deviation) = moments(values);
        if deviation > 0.0 { mean / deviation } else { 0.0 }
    };
    let (mean, deviation) = moments((0..rows).map(row_mean));
    Some(mean / (deviation / (rows as f64).sqrt())).filter(|lean| lean.is_finite())
}

/// Returns mean and standard deviation.
fn moments(values: impl Iterator<Item = f64> + Clone) -> (f64, f64) {
    let n = values.clone().count() as f64;
    let mean = values.clone().sum::<f64>() / n;
    (mean, (values.map(|x| (x - mean).powi(2)).sum::<f64>() / n).sqrt())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_a_leaning_up_beside_an_even_gate_is_swapped() {
        let of = |gate, up| Lean { layer: 0, gate, up }.is_swapped();
        assert!(of(0.5, -8.0) && of(-2.0, 40.0) && !of(0.5, 5.0));
        assert!(Lean { layer: 0, gate: 0.5, up: 5.0 }.is_suspect());
        assert!(!of(-40.0, 0.5) && !of(0.1, 3.0) && !of(-40.0, 8.0) && !of(f64::NAN, f64::NAN));
    }
}
