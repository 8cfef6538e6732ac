//! QTIP in the order of the pipeline: what errors of outputs cost is found in the original model before the first layer, what errors of
//! inputs cost in the quantized one.

use mantissa_model::{LinearInfo, LinearInput};
use mantissa_num::Scheme;

use super::fisher::output_moments;
use super::{Sequential, Solver, learning};
use crate::calibrate::Tick;
use crate::error::{QuantError, Result};
use crate::error_stats::ErrorStats;
use crate::gptq::{GptqError, Hessian};
use crate::layers::{Solved, whole};
use crate::plan::Plan;
use crate::qtip::RotatedInput;
use crate::source::{DenseTensor, Scratch};

/// Bytes of what errors of the outputs of all layers cost.
pub(crate) fn outputs_bytes(plan: &Plan) -> u64 {
    let each = plan.quantized().map(|(info, _)| Hessian::bytes_needed(info.rows));
    if plan.weighs_outputs() { each.sum() } else { 0 }
}

impl Sequential<'_> {
    /// Finds what errors of outputs cost, where that is asked for.
    pub(super) fn find_outputs(&mut self, tick: &mut Tick<'_>) -> Result<()> {
        let plan = self.plan;
        let Some(set) = plan.calibration().filter(|_| plan.weighs_outputs() && self.outputs.is_none()) else {
            return Ok(());
        };
        let options = learning::options(plan, set);
        let linears = plan.quantized().map(|(info, _)| info);
        let found = output_moments(self.source, &plan.config, set, &options, linears, tick);
        self.outputs = Some(found.map_err(|error| learning::metrics_error(self.source, "qtip", error))?);
        Ok(())
    }

    /// Codes a weight whose input is at hand; `fallback` says why nothing is known of that.
    pub(super) fn solve_rotated(
        &self,
        input: &RotatedInput,
        fallback: Option<String>,
        info: &LinearInfo,
        scheme: &Scheme,
        w: &DenseTensor<'_>,
    ) -> Result<Solved> {
        let mut scratch = Scratch::default();
        let w = whole(self.source, info, w, &mut scratch)?;
        let linears = self.plan.config.layer_linears(info.layer);
        let place = linears.iter().position(|linear| linear.module == info.module);
        let seed = seed(info.layer, 2 * place.unwrap_or(0) + 1);
        let outputs = self.outputs.as_ref().and_then(|all| all.get(&info.module));
        let found = input.quantize(scheme, w, outputs, seed, self.plan.options.threads);
        let found = found.map_err(|error| self.gptq_error(info, error))?;
        let values = found.quantized.dequantize().map_err(|error| self.gptq_error(info, error.into()))?;
        let rounded = Solved::rounded((found.quantized, ErrorStats::of_rows(w, &values, info.cols)));
        let output_error = Some(found.loss).filter(|_| fallback.is_none());
        Ok(Solved { fallback, output_error, notes: found.notes, ..rounded })
    }

    /// The solver of `input`.
    pub(super) fn rotated(&self, layer: usize, input: LinearInput, hessian: Hessian) -> Result<Solver> {
        let (damp, threads) = (self.plan.recipe.qtip.damp, self.plan.options.threads);
        let linears = self.plan.config.layer_linears(layer);
        let place = linears.iter().position(|linear| linear.kind.input() == input);
        let (cols, seed) = (hessian.cols(), seed(layer, 2 * place.unwrap_or(0)));
        let found = match hessian.tokens() {
            0 => Err(GptqError::NoTokens),
            _ => RotatedInput::new(hessian, damp, seed, threads),
        };
        let (found, why) = match found {
            Err(GptqError::NoTokens) => {
                let why = "no token of the calibration was routed to it".to_owned();
                (RotatedInput::plain(cols, seed, threads), Some(why))
            }
            Err(error @ GptqError::Singular { .. }) => {
                (RotatedInput::plain(cols, seed, threads), Some(error.to_string()))
            }
            found => (found, None),
        };
        match found {
            Ok(input) => Ok(Solver::Rotated(Box::new(input), why)),
            Err(error) => {
                let what = format!("input of {}", self.plan.config.readers_of(layer, input));
                Err(QuantError::Gptq { path: self.source.path().to_owned(), what, error })
            }
        }
    }
}

/// The seed of the signs of a vector of `layer`: of the input of its linear layer `i` at `2 i`, of its output at `2 i + 1`.
fn seed(layer: usize, place: usize) -> u64 {
    (layer as u64) << 32 | place as u64
}
