//! GPTAQ in the order of the pipeline: the original model's states go along beside those of the quantized one, and weights make up for
//! the difference of what they read.

use mantissa_model::{LinearInfo, LinearInput};

use super::{Sequential, Solver, gptq_error};
use crate::calibrate::{CalibrateError, CalibratedLayer, Calibration, Tick};
use crate::error::Result;
use crate::fold::Folded;
use crate::gptq::{Drift, Hessian, InverseFactor};
use crate::layers::whole;
use crate::plan::Plan;
use crate::recipe::Method;
use crate::source::{DenseTensor, Scratch};

/// The original model, as far as the quantized one is.
#[derive(Default)]
pub(super) struct Original<'a> {
    /// Its windows, where weights make up for anything.
    pub(super) states: Option<Calibration<'a>>,
    /// The layer that they are before.
    layer: Option<CalibratedLayer>,
}

/// Whether weights make up for the drift of inputs.
pub(crate) fn asymmetric(plan: &Plan) -> bool {
    plan.recipe.method == Method::Gptq && plan.recipe.gptq.asymmetric > 0.0
}

/// Whether those that read `input` do. Of experts they do not: a token may not be routed to the same ones.
pub(crate) fn makes_up(plan: &Plan, input: LinearInput) -> bool {
    asymmetric(plan) && !matches!(input, LinearInput::Expert(_) | LinearInput::ExpertDown(_))
}

/// Whether no later layer to be quantized reads the input of this one.
pub(crate) fn reads_last(plan: &Plan, info: &LinearInfo) -> bool {
    let same = |other: &LinearInfo| other.layer == info.layer && other.kind.input() == info.kind.input();
    let last = plan.quantized().map(|(other, _)| other).filter(|other| same(other)).last();
    last.is_some_and(|last| last.module == info.module)
}

impl Sequential<'_> {
    /// Second moments of `inputs` of `layer`, as it now is, and of those that weights [make up for](makes_up) how they have moved.
    pub(super) fn moments(
        &mut self,
        layer: &CalibratedLayer,
        inputs: &[LinearInput],
        tick: &mut Tick<'_>,
    ) -> Result<Vec<(Hessian, Option<Drift>)>> {
        if !inputs.iter().all(|&input| makes_up(self.plan, input)) {
            let hessians = self.calibration()?.statistics(layer, inputs, tick)?;
            return Ok(hessians.into_iter().map(|hessian| (hessian, None)).collect());
        }
        self.reach_original(layer.index(), tick)?;
        let Original { mut states, layer: original } = std::mem::take(&mut self.original);
        let found = match (&mut states, &original) {
            (Some(states), Some(original)) => {
                self.calibration()?.statistics_beside(layer, (states, original), inputs, tick)?
            }
            _ => return Err(CalibrateError::Empty.into()),
        };
        self.original = Original { states, layer: original };
        Ok(found.into_iter().map(|(hessian, drift)| (hessian, Some(drift))).collect())
    }

    /// Takes the windows in the original model to the input of layer `target`.
    fn reach_original(&mut self, target: usize, tick: &mut Tick<'_>) -> Result<()> {
        let Original { states: Some(states), layer } = &mut self.original else { return Ok(()) };
        while layer.as_ref().is_none_or(|layer| layer.index() < target) {
            if let Some(done) = layer.take() {
                states.advance(&done, tick)?;
            }
            *layer = states.next_layer()?;
            if layer.is_none() {
                break;
            }
        }
        Ok(())
    }

    /// What a weight is to be instead where its input has moved; how that has is forgotten with the last weight that reads it.
    pub(super) fn target(&mut self, info: &LinearInfo, w: &DenseTensor<'_>) -> Result<Option<Vec<f32>>> {
        let (plan, source, input) = (self.plan, self.source, info.kind.input());
        let solver = self.solvers.iter_mut().find(|(of, _)| *of == input).map(|(_, solver)| solver);
        let Some(Solver::Gptq(factor, moved)) = solver else { return Ok(None) };
        let drift = moved.take();
        let found = drift.as_ref().map(|drift| corrected(plan, source, (factor, drift), info, w));
        if !reads_last(plan, info) {
            *moved = drift;
        }
        Ok(found.transpose()?.flatten())
    }
}

/// A weight that makes up for how its input has moved, if it has.
fn corrected(
    plan: &Plan,
    source: &Folded<'_>,
    (factor, drift): (&InverseFactor, &Drift),
    info: &LinearInfo,
    w: &DenseTensor<'_>,
) -> Result<Option<Vec<f32>>> {
    if drift.is_zero() {
        return Ok(None);
    }
    let mut scratch = Scratch::default();
    let w = whole(source, info, w, &mut scratch)?;
    let found = factor.corrected(w, drift, plan.recipe.gptq.asymmetric, plan.options.threads);
    found.map(Some).map_err(|error| gptq_error(source, info, error))
}
