//! Comparison of solutions with RTN: the pipeline's part of [`mantissa_methods::error_gate`].

use mantissa_methods::Solved;
pub(crate) use mantissa_methods::error_gate::ErrorGate;
use mantissa_model::LinearInfo;
use mantissa_num::Scheme;

use crate::error::{QuantError, Result};
use crate::fold::Folded;
use crate::plan::Plan;
use crate::rounding::{round_to_nearest, whole};
use crate::source::{DenseTensor, Scratch};

pub use mantissa_methods::error_gate::{Judgement, Output, Windows};

/// A weight, its scheme and its solution's target.
#[derive(Clone, Copy)]
pub(crate) struct Case<'a> {
    pub(crate) plan: &'a Plan,
    pub(crate) source: &'a Folded<'a>,
    pub(crate) info: &'a LinearInfo,
    pub(crate) scheme: &'a Scheme,
    pub(crate) w: &'a DenseTensor<'a>,
    /// Tensor-wide scale, if fused layers share one.
    pub(crate) outer: Option<f32>,
    /// Weight that the solution approximates, if corrected for the drift of its input.
    pub(crate) target: Option<&'a [f32]>,
}

impl Case<'_> {
    /// Returns `solved`, or RTN of `w` if its error is smaller. A solution that already is RTN is returned unchanged.
    pub(crate) fn better(&self, judge: &ErrorGate, solved: Solved) -> Result<Solved> {
        if solved.fallback.is_some() {
            return Ok(solved);
        }
        let Case { plan, source, info, scheme, w, outer, target } = *self;
        let (mut scratch, threads) = (Scratch::default(), plan.threads());
        let nearest = round_to_nearest(plan, source, info, scheme, w, outer)?;
        let values = match target {
            Some(target) => target,
            None => whole(source, info, w, &mut scratch)?,
        };
        let error = |of: &Solved| self.values(of).map(|q| judge.error(values, q, threads));
        let judged = Judgement {
            of: Output::Layer,
            windows: judge.windows(),
            solved: error(&solved)?,
            nearest: error(&nearest)?,
        };
        Ok(match judged.fallback() {
            None => Solved { judged: Some(judged), ..solved },
            fallback => Solved { fallback, judged: Some(judged), ..nearest },
        })
    }

    /// Dequantizes a solution.
    fn values(&self, of: &Solved) -> Result<Vec<f32>> {
        of.values().map_err(|error| {
            let (path, tensor) = (self.source.path().to_owned(), format!("{}.weight", self.info.module));
            QuantError::Tensor { path, tensor, error }
        })
    }
}
