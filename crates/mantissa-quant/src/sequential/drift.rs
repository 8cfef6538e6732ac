//! Unquantized model beside the quantized one, for methods that correct weights for the drift of their inputs (GPTAQ).

use mantissa_model::{LinearInfo, LinearInput};

use mantissa_methods::method::Solver;

use super::needs::{reads_last, uses_drift};
use super::{Moments, Original, Sequential};
use crate::calibrate::{CalibrateError, CalibratedLayer, Tick};
use crate::error::Result;
use crate::rounding::{method_error, whole};
use crate::source::{DenseTensor, Scratch};

impl Sequential<'_> {
    /// Collects the Hessians of `inputs` of `layer` with its present weights and, where [used](uses_drift), their
    /// drift.
    pub(super) fn moments(
        &mut self,
        layer: &CalibratedLayer,
        inputs: &[LinearInput],
        tick: &mut Tick<'_>,
    ) -> Result<Vec<Moments>> {
        let plan = self.plan;
        let drifts = |input| plan.solved_on(layer.index(), input).any(|info| uses_drift(plan, info));
        if !inputs.iter().all(|&input| drifts(input)) {
            let hessians = self.calibration()?.statistics(layer, inputs, tick)?;
            return Ok(hessians.into_iter().map(|hessian| (hessian, None)).collect());
        }
        self.reach_original(layer.index(), tick)?;
        let Original { mut states, layer: original } = std::mem::take(&mut self.original);
        let found = match (&mut states, &original) {
            (Some(states), Some(original)) => {
                self.calibration()?.statistics_with_drift(layer, (states, original), inputs, tick)?
            }
            _ => return Err(CalibrateError::Empty.into()),
        };
        self.original = Original { states, layer: original };
        Ok(found.into_iter().map(|(hessian, drift)| (hessian, Some(drift))).collect())
    }

    /// Runs the windows of the original model to the input of layer `target`.
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

    /// Returns the weight that the solution approximates if it is not `w`: the one corrected for the drift of its
    /// input.
    pub(super) fn target(&mut self, info: &LinearInfo, w: &DenseTensor<'_>) -> Result<Option<Vec<f32>>> {
        let (plan, source, readers) = (self.plan, self.source, self.readers(info));
        let solver = self.solvers.iter_mut().find(|(of, _)| *of == readers).map(|(_, solver)| solver);
        let Some(Solver::Ready(solver)) = solver else { return Ok(None) };
        if !solver.corrects() {
            return Ok(None);
        }
        let mut scratch = Scratch::default();
        let w = whole(source, info, w, &mut scratch)?;
        // Workers take weights in any order: none is known to be the last.
        let last = reads_last(plan, info) && !plan.options.team.is_shared();
        let corrected = solver.corrected(w, last, plan.options.threads);
        corrected.map_err(|error| method_error(source, &info.module, error))
    }
}
