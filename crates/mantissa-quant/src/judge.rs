//! Solutions held against rounding to nearest: the pipeline's part of [`mantissa_methods::judge`].

use mantissa_methods::Solved;
pub(crate) use mantissa_methods::judge::Judge;
use mantissa_model::LinearInfo;
use mantissa_num::Scheme;

use crate::error::{QuantError, Result};
use crate::fold::Folded;
use crate::plan::Plan;
use crate::rounding::{round_to_nearest, whole};
use crate::source::{DenseTensor, Scratch};

pub use mantissa_methods::judge::{Judgement, Output, Windows};

/// A weight and how it is to be stored.
#[derive(Clone, Copy)]
pub(crate) struct Case<'a> {
    pub(crate) plan: &'a Plan,
    pub(crate) source: &'a Folded<'a>,
    pub(crate) info: &'a LinearInfo,
    pub(crate) scheme: &'a Scheme,
    pub(crate) w: &'a DenseTensor<'a>,
    /// The tensor-wide scale, where fused partners share one.
    pub(crate) outer: Option<f32>,
    /// The weight that the solution should be near, where it makes up for the drift of its input.
    pub(crate) target: Option<&'a [f32]>,
}

impl Case<'_> {
    /// `solved`, or the weight `w` rounded to nearest where that errs less. What is rounded to nearest already has nothing to be held
    /// against.
    pub(crate) fn better(&self, judge: &Judge, solved: Solved) -> Result<Solved> {
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
        let error = |of: &Solved| {
            judge.error(values, of, threads).map_err(|error| {
                let (path, tensor) = (source.path().to_owned(), format!("{}.weight", info.module));
                QuantError::Tensor { path, tensor, error }
            })
        };
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
}
