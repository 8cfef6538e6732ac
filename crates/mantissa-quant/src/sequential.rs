//! Layers by a method that calibrates: the windows go through the model as it becomes, one layer in memory.
//!
//! For each layer and each of its inputs in the order of the forward pass (GPTQ's `true_sequential`): second moments of the
//! input, computed with every weight before it already quantized; the weights that read it; then the next. Asking once for
//! all inputs of a layer would take a quarter of the passes and leaves more error. Of experts, whose inputs do not depend on
//! one another, some are asked for in one pass. An expert that no token of the calibration was routed to is rounded to
//! nearest and reported.
//!
//! A run that is resumed takes the layers that are done from the output, reads them back only when a later layer needs the
//! states behind them, and so comes to the same statistics and the same bytes.

mod fisher;
mod learning;

use std::collections::BTreeSet;

use mantissa_model::{LinearInfo, LinearInput, LinearKind};
use mantissa_num::stored::Map;
use mantissa_num::{Scheme, TensorError};
use mantissa_store::convention::{Container, ModelFiles, Weight};

use crate::calibrate::{CalibrateError, CalibratedLayer, Calibration, Tick};
use crate::error::{QuantError, Result};
use crate::error_stats::ErrorStats;
use crate::exl2;
use crate::fold::Folded;
use crate::gptq::{GptqError, InverseFactor, dequantize_by_group};
use crate::layers::{Solved, round_to_nearest, whole};
use crate::plan::Plan;
use crate::source::{DenseTensor, Scratch};

pub(crate) use fisher::{metrics_buffers, metrics_bytes};
pub(crate) use learning::{ToLearn, options as learning_options};

pub(crate) struct Sequential<'a> {
    plan: &'a Plan,
    source: &'a Folded<'a>,
    /// The output as far as it is written.
    stored: Box<dyn Fn() -> Result<ModelFiles> + 'a>,
    /// Modules to be read from there.
    recovered: BTreeSet<String>,
    /// From the first layer that is not.
    calibration: Option<Calibration<'a>>,
    layer: Option<CalibratedLayer>,
    /// Of the layer at hand.
    solvers: Vec<(LinearInput, Solver)>,
    /// Of AutoRound.
    learning: learning::Learning<'a>,
}

/// Inputs of experts whose statistics are collected in one pass.
pub(crate) const EXPERTS_AT_ONCE: usize = 8;

/// What there is to solve the weights that share an input with.
enum Solver {
    Gptq(Box<InverseFactor>),
    /// Nothing, and why.
    RoundToNearest(String),
}

impl<'a> Sequential<'a> {
    pub(crate) fn new(
        plan: &'a Plan,
        source: &'a Folded<'a>,
        stored: Box<dyn Fn() -> Result<ModelFiles> + 'a>,
    ) -> Self {
        Sequential {
            plan,
            source,
            stored,
            recovered: BTreeSet::new(),
            calibration: None,
            layer: None,
            solvers: Vec::new(),
            learning: learning::Learning::default(),
        }
    }

    /// A layer that is stored already.
    pub(crate) fn recovered(&mut self, info: &LinearInfo) -> Result<()> {
        match self.layer.as_mut().filter(|layer| layer.index() == info.layer) {
            Some(layer) => put_back(&(self.stored)()?, info, layer)?,
            None => drop(self.recovered.insert(info.module.clone())),
        }
        Ok(())
    }

    /// A layer that is not.
    pub(crate) fn quantize(
        &mut self,
        info: &LinearInfo,
        scheme: &Scheme,
        w: &DenseTensor<'_>,
        outer: Option<f32>,
        tick: &mut Tick<'_>,
    ) -> Result<Solved> {
        self.reach(info.layer, tick)?;
        self.prepare(info.kind.input(), tick)?;
        let input = info.kind.input();
        let solved = match self.solvers.iter().find(|(of, _)| *of == input).map(|(_, solver)| solver) {
            Some(Solver::Gptq(factor)) => self.solve(factor, info, scheme, w, outer)?,
            Some(Solver::RoundToNearest(why)) => Solved {
                fallback: Some(why.clone()),
                ..round_to_nearest(self.plan, self.source, info, scheme, w, outer)?
            },
            None => round_to_nearest(self.plan, self.source, info, scheme, w, outer)?,
        };
        if let Some(layer) = &mut self.layer {
            let values = dequantize_by_group(&solved.quantized, solved.g_idx.as_deref());
            put(layer, info.kind, dequantized(self.source.files(), info, values)?)?;
        }
        Ok(solved)
    }

    fn solve(
        &self,
        factor: &InverseFactor,
        info: &LinearInfo,
        scheme: &Scheme,
        w: &DenseTensor<'_>,
        outer: Option<f32>,
    ) -> Result<Solved> {
        let mut scratch = Scratch::default();
        let w = whole(self.source, info, w, &mut scratch)?;
        let threads = self.plan.options.threads;
        let result = if self.plan.container == Container::Exl2 {
            let (scheme, shape) = (exl2::with_f16_scales(scheme), (info.rows, info.cols));
            let scales = exl2::searched_scales(&scheme, w, shape, factor.diagonal(), threads);
            let scales = scales.ok_or_else(|| exl2::out_of_reach(self.source, info))?;
            factor.quantize_under(&scheme, w, &scales, threads)
        } else {
            factor.quantize(scheme, w, outer, threads)
        };
        let result = result.map_err(|error| self.gptq_error(info, error))?;
        let stats = match &result.g_idx {
            None => ErrorStats::of(w, &result.quantized),
            Some(_) => {
                let tensor_error = |error| self.gptq_error(info, GptqError::Weight(error));
                ErrorStats::of_rows(w, &result.dequantize().map_err(tensor_error)?, info.cols)
            }
        };
        Ok(Solved {
            stats,
            quantized: result.quantized,
            input_scale: None,
            g_idx: result.g_idx,
            fallback: None,
            output_error: Some(result.loss),
            notes: result.notes,
        })
    }

    /// Takes the windows to the input of `layer`, through the layers before it as they are stored.
    fn reach(&mut self, target: usize, tick: &mut Tick<'_>) -> Result<()> {
        while self.layer.as_ref().is_none_or(|layer| layer.index() < target) {
            if let Some(done) = self.layer.take() {
                self.solvers.clear();
                self.calibration()?.advance(&done, tick)?;
            }
            let Some(mut layer) = self.calibration()?.next_layer()? else { break };
            let plan = self.plan;
            let of_layer = plan.quantized().map(|(info, _)| info).filter(|info| info.layer == layer.index());
            let stored: Vec<_> = of_layer.filter(|info| self.recovered.remove(&info.module)).collect();
            if !stored.is_empty() {
                let files = (self.stored)()?;
                stored.into_iter().try_for_each(|info| put_back(&files, info, &mut layer))?;
            }
            self.layer = Some(layer);
        }
        Ok(())
    }

    fn calibration(&mut self) -> Result<&mut Calibration<'a>> {
        if self.calibration.is_none() {
            let windows = self.plan.options.calibration.as_ref().map_or(&[][..], |set| &set.windows);
            let (source, config) = (self.source, &self.plan.config);
            let begun = Calibration::begin(source, config, windows, self.plan.options.threads)?;
            self.calibration = Some(begun);
        }
        self.calibration.as_mut().ok_or(QuantError::Calibrate(CalibrateError::Empty))
    }

    /// Makes the solver of `input`, unless it is at hand.
    fn prepare(&mut self, input: LinearInput, tick: &mut Tick<'_>) -> Result<()> {
        if self.solvers.iter().any(|(of, _)| *of == input) {
            return Ok(());
        }
        self.solvers.clear();
        let Some(layer) = self.layer.take() else { return Ok(()) };
        let inputs = self.together(layer.index(), input);
        let hessians = self.calibration()?.statistics(&layer, &inputs, tick);
        let index = layer.index();
        self.layer = Some(layer);
        let (options, threads) = (self.plan.recipe.gptq, self.plan.options.threads);
        for (input, hessian) in inputs.into_iter().zip(hessians?) {
            if hessian.tokens() == 0 {
                let why = "no token of the calibration was routed to it".to_owned();
                self.solvers.push((input, Solver::RoundToNearest(why)));
                continue;
            }
            let solver = match InverseFactor::new(&hessian, options, threads) {
                Ok(factor) if factor.dead_columns() == factor.cols() => {
                    Solver::RoundToNearest("its input is zero in every token of the calibration".to_owned())
                }
                Ok(factor) => Solver::Gptq(Box::new(factor)),
                Err(error @ GptqError::Singular { .. }) => Solver::RoundToNearest(error.to_string()),
                Err(error) => {
                    let what = format!("layer {index}, input of {:?}", input.readers().collect::<Vec<_>>());
                    return Err(QuantError::Gptq { path: self.source.path().to_owned(), what, error });
                }
            };
            self.solvers.push((input, solver));
        }
        Ok(())
    }

    /// The inputs whose statistics are collected with those of `input`: of experts the next few, which are of one kind and so
    /// do not change each other; in the order of the plan.
    fn together(&self, layer: usize, input: LinearInput) -> Vec<LinearInput> {
        let experts = std::mem::discriminant(&input);
        if !matches!(input, LinearInput::Expert(_) | LinearInput::ExpertDown(_)) {
            return vec![input];
        }
        let of_layer = self.plan.quantized().filter(|(info, _)| info.layer == layer);
        let mut inputs: Vec<_> = of_layer.map(|(info, _)| info.kind.input()).collect();
        inputs.retain(|next| std::mem::discriminant(next) == experts && *next >= input);
        inputs.dedup();
        inputs.truncate(EXPERTS_AT_ONCE);
        inputs
    }

    fn gptq_error(&self, info: &LinearInfo, error: GptqError) -> QuantError {
        let path = self.source.path().to_owned();
        match error {
            GptqError::Weight(error) => {
                QuantError::Tensor { path, tensor: format!("{}.weight", info.module), error }
            }
            error => QuantError::Gptq { path, what: info.module.clone(), error },
        }
    }
}

/// Puts a layer that is stored in its place.
fn put_back(files: &ModelFiles, info: &LinearInfo, layer: &mut CalibratedLayer) -> Result<()> {
    let mut linear = files.linear(&info.module, info.rows, info.cols, false)?;
    let weight = match linear.weight {
        Weight::Quantized(q) => {
            let values = q.dequantize().map(|mut values| {
                // A rotation of the input is the layer's own as well: it stays around the codes.
                linear.transforms.before.retain(|map| !matches!(map, Map::Hadamard(_)));
                linear.transforms.fold(&mut values, info.rows, info.cols);
                values
            });
            dequantized(files, info, values)?
        }
        weight => weight,
    };
    put(layer, info.kind, weight)
}

/// As f32, whoever made it: stored and computed weights then run through the same loops.
fn dequantized(
    files: &ModelFiles,
    info: &LinearInfo,
    values: std::result::Result<Vec<f32>, TensorError>,
) -> Result<Weight> {
    values.map(Weight::F32).map_err(|error| QuantError::Tensor {
        path: files.dir().to_owned(),
        tensor: format!("{}.weight", info.module),
        error,
    })
}

fn put(layer: &mut CalibratedLayer, kind: LinearKind, weight: Weight) -> Result<()> {
    Ok(layer.replace(kind, weight)?)
}
