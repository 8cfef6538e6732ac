//! Methods that learn all weights of a decoder layer together (AutoRound and others). The unquantized model runs beside
//! the quantized one; its outputs are the targets.

use std::borrow::Cow;
use std::collections::BTreeMap;

use mantissa_kernels::kernels;
use mantissa_methods::MethodError;
use mantissa_methods::method::{Block, Fisher, LayerSolver, Learned, Run, SolveLayer, WeightTask, Windows};
use mantissa_model::{LinearInfo, LinearInput, LinearKind};
use mantissa_num::Scheme;
use mantissa_train::LayerTrainer;

use super::fisher::{BATCH_TOKENS, MetricsError, metrics, options, options_of, output_moments};
use super::{Sequential, dequantized, put};
use crate::calibrate::{CalibrateError, Calibration, CalibrationSet, Squares, States, Tick};
use crate::error::{QuantError, Result};
use crate::error_gate::{self, Judgement, Output};
use crate::fold::Folded;
use crate::plan::Use;
use crate::rounding::{method_error, round_to_nearest, train_error, whole};
use crate::source::{DenseTensor, Scratch};
use mantissa_methods::Solved;

/// A weight whose rounding is learned.
#[derive(Clone, Copy)]
pub(crate) struct ToLearn<'a> {
    pub(crate) info: &'a LinearInfo,
    pub(crate) scheme: &'a Scheme,
    /// Tensor-wide scale, if fused layers share one.
    pub(crate) outer: Option<f32>,
}

impl<'a> Sequential<'a> {
    /// Takes the result of [`learn`](Self::learn) for a linear layer.
    pub(crate) fn take_learned(&mut self, module: &str) -> Option<Solved> {
        self.learning.solved.remove(module)
    }

    /// Learns the quantized weights `linears` of layer `index` by `method`.
    pub(crate) fn learn(
        &mut self,
        method: &dyn SolveLayer,
        index: usize,
        linears: &[ToLearn<'_>],
        tick: &mut Tick<'_>,
    ) -> Result<()> {
        self.metrics(tick)?;
        self.reach(index, tick)?;
        self.reference(index, tick)?;
        // Weights that an earlier run finished are reset to the source's: learning starts from the whole layer.
        self.layer = self.next_layer()?;
        let mut solver = method.begin();
        let columns = self.columns(linears, tick)?;
        for linear in linears {
            let h = columns.get(&linear.info.kind.input()).map_or(&[][..], |h| &h[..]);
            self.add(&mut *solver, linear, h)?;
        }
        // The solver holds the weights that it learns; there is no memory for a second copy.
        self.layer = None;
        let (note, judged) = self.reconstruct(index, &mut *solver, linears, tick)?;
        self.layer = self.next_layer()?;
        let solved = match judged.fallback() {
            Some(why) => {
                drop(solver);
                let nearest = |linear| Ok(Solved { fallback: Some(why.clone()), ..self.nearest(linear)? });
                linears.iter().map(nearest).collect::<Result<Vec<_>>>()?
            }
            None => {
                let noted = |solved| Solved { notes: vec![note.clone()], ..solved };
                solver.finish().into_iter().map(noted).collect()
            }
        };
        for (linear, solved) in linears.iter().zip(solved) {
            let solved = Solved { judged: Some(judged), ..solved };
            if let Some(layer) = &mut self.layer {
                let values = solved.quantized.dequantize();
                put(layer, linear.info.kind, dequantized(self.source.files(), linear.info, values)?)?;
            }
            self.learning.solved.insert(linear.info.module.clone(), solved);
        }
        Ok(())
    }

    /// Quantizes a weight by RTN.
    fn nearest(&self, linear: &ToLearn<'_>) -> Result<Solved> {
        let ToLearn { info, scheme, outer } = *linear;
        let w = DenseTensor::of_linear(self.source, info)?;
        round_to_nearest(self.plan, self.source, info, scheme, &w, outer)
    }

    /// Replaces the weights of `linears` in `trainer` by their RTN values, one after another.
    fn put_nearest(&self, trainer: &mut LayerTrainer, linears: &[ToLearn<'_>]) -> Result<()> {
        for linear in linears {
            let quantized = self.nearest(linear)?.quantized;
            quantized.check().map_err(|error| QuantError::Tensor {
                path: self.source.path().to_owned(),
                tensor: format!("{}.weight", linear.info.module),
                error,
            })?;
            let rows = 0..linear.info.rows;
            trainer.set_weight(linear.info.kind, |weight| quantized.dequantize_rows(rows, weight));
        }
        Ok(())
    }

    /// Learns the weights of layer `index` on the present states. Returns the note for the report, and the layer's
    /// output error relative to RTN.
    fn reconstruct(
        &self,
        index: usize,
        solver: &mut dyn LayerSolver,
        linears: &[ToLearn<'_>],
        tick: &mut Tick<'_>,
    ) -> Result<(String, Judgement)> {
        let plan = self.plan;
        let (Some(set), Some(calibration), Some(reference)) =
            (plan.text_for(Use::Solve), &self.calibration, &self.learning.reference)
        else {
            return Err(CalibrateError::Empty.into());
        };
        let fault = |error| method_error(self.source, &format!("layer {index}"), error);
        let mut trainer = LayerTrainer::load(self.source, &plan.config, index, options(plan, set))
            .map_err(|error| fault(train_error(error)))?;
        for (input, quantizer) in self.quantizers(index) {
            trainer.quantize_input(input, quantizer).map_err(|error| fault(train_error(error)))?;
        }
        let metric = self.learning.metrics.as_ref().and_then(|all| all.get(index)?.as_ref());
        let threads = plan.options.threads;
        let mut with_run = |inputs: &dyn Windows, targets: &dyn Windows, work: &mut OnRun<'_>| {
            let hidden = plan.config.hidden_size;
            work(&mut Run { inputs, targets, hidden, metric, threads, tick }).map_err(fault)
        };
        let seen: [&dyn Windows; 2] = [calibration.states(), reference.states()];
        let unseen: Option<[&dyn Windows; 2]> = match (&self.held_out, &self.learning.unseen) {
            (Some(inputs), Some(targets)) => Some([inputs.states(), targets.states()]),
            _ => None,
        };
        // RTN's error is measured first and its weights are dropped: there is no memory for both.
        self.put_nearest(&mut trainer, linears)?;
        let kinds = linears.iter().map(|linear| linear.info.kind).collect();
        let mut block = Trained { trainer, kinds };
        let [inputs, targets] = unseen.unwrap_or(seen);
        let (mut nearest, mut learned) = (f64::NAN, None);
        with_run(inputs, targets, &mut |run| {
            nearest = solver.error(&mut block, run)?;
            Ok(())
        })?;
        with_run(seen[0], seen[1], &mut |run| {
            learned = Some(solver.learn(&mut block, run)?);
            Ok(())
        })?;
        let Some(Learned { after, note, .. }) = learned else { return Err(CalibrateError::Empty.into()) };
        let mut judged = Judgement {
            of: Output::Block,
            windows: error_gate::Windows::Calibration,
            solved: after,
            nearest,
        };
        if unseen.is_some() {
            for i in 0..linears.len() {
                block.set_weight(i, &mut |values| solver.dequantize(i, values, threads));
            }
            judged.windows = error_gate::Windows::HeldOut;
            with_run(inputs, targets, &mut |run| {
                judged.solved = solver.error(&mut block, run)?;
                Ok(())
            })?;
        }
        Ok((note, judged))
    }

    /// Computes the Fisher information of the layers' outputs, if the method needs it.
    fn metrics(&mut self, tick: &mut Tick<'_>) -> Result<()> {
        let plan = self.plan;
        let needs = plan.job.learner().map(|(_, needs)| needs);
        let Some(Fisher::Layers { seed }) = needs.and_then(|needs| needs.fisher) else { return Ok(()) };
        let Some(set) = plan.text_for(Use::Solve).filter(|_| self.learning.metrics.is_none()) else {
            return Ok(());
        };
        let found = metrics(self.source, &plan.config, set, &options(plan, set), seed, tick);
        let name = plan.job.method();
        self.learning.metrics = Some(found.map_err(|error| metrics_error(self.source, name, error))?);
        Ok(())
    }

    /// Computes the output factors of the Fisher information, if the method needs them.
    pub(super) fn find_outputs(&mut self, tick: &mut Tick<'_>) -> Result<()> {
        let plan = self.plan;
        let Some(set) = plan.text_for(Use::Solve).filter(|_| plan.weighs_outputs() && self.outputs.is_none())
        else {
            return Ok(());
        };
        let options = options_of(plan, set, BATCH_TOKENS);
        let linears = plan.quantized().map(|(info, _)| info).filter(|info| plan.weighs_outputs_of(info));
        let found = output_moments(self.source, &plan.config, set, &options, linears, tick);
        self.outputs = Some(found.map_err(|error| metrics_error(self.source, plan.job.method(), error))?);
        Ok(())
    }

    /// Runs the windows of the unquantized model through layer `index`.
    fn reference(&mut self, index: usize, tick: &mut Tick<'_>) -> Result<()> {
        let (plan, source) = (self.plan, self.source);
        if self.learning.reference.is_none() {
            let windows = plan.options.calibration.as_ref().map_or(&[][..], |set| &set.windows);
            let begun = Calibration::begin(source, &plan.config, windows, plan.limits())?;
            self.learning.reference = Some(begun.to_the_end());
            let unseen = &plan.options.held_out;
            if !unseen.is_empty() {
                let begun = Calibration::begin(source, &plan.config, unseen, plan.limits())?;
                self.learning.unseen = Some(begun.to_the_end());
            }
        }
        let Some(reference) = &mut self.learning.reference else { return Ok(()) };
        while reference.next_index() <= index {
            let Some(layer) = reference.next_layer()? else { break };
            reference.advance(&layer, tick)?;
            self.learning.unseen.as_mut().map_or(Ok(()), |unseen| unseen.advance(&layer, tick))?;
        }
        Ok(())
    }

    /// Returns the mean squares of the inputs of `linears`, column by column, in the quantized model up to this layer.
    fn columns(
        &mut self,
        linears: &[ToLearn<'_>],
        tick: &mut Tick<'_>,
    ) -> Result<BTreeMap<LinearInput, Vec<f32>>> {
        let Some(layer) = self.layer.take() else { return Ok(BTreeMap::new()) };
        let kinds = linears.iter().map(|linear| linear.info.kind);
        let sums = self.calibration()?.squares(&layer, kinds, false, tick);
        self.layer = Some(layer);
        let tokens = self.plan.text_for(Use::Solve).map_or(1, CalibrationSet::tokens).max(1) as f64;
        let mean = |sum: f64| (sum / tokens) as f32;
        let means = |squares: Squares| squares.sums.into_iter().map(mean).collect();
        Ok(sums?.into_iter().map(|(input, squares)| (input, means(squares))).collect())
    }

    /// Adds a weight to those that `solver` learns; `h` is the mean square of each input column.
    fn add(&self, solver: &mut dyn LayerSolver, linear: &ToLearn<'_>, h: &[f32]) -> Result<()> {
        let ToLearn { info, scheme, outer } = *linear;
        let plan = self.plan;
        let w = DenseTensor::of_linear(self.source, info)?;
        let mut scratch = Scratch::default();
        let w = whole(self.source, info, &w, &mut scratch)?;
        let outer = outer.or_else(|| scheme.outer_scale(kernels().amax(w)));
        let linears = plan.config.layer_linears(info.layer);
        let place = linears.iter().position(|linear| linear.module == info.module);
        let task = WeightTask {
            scheme,
            rows: info.rows,
            cols: info.cols,
            w,
            target: w,
            outer,
            outputs: None,
            scales: None,
            place: (info.layer, place.unwrap_or(0)),
            threads: plan.options.threads,
        };
        let added = solver.add(&task, h, plan.container.facts().signed_scales);
        added.map_err(|error| method_error(self.source, &info.module, error))
    }
}

/// Work on a set of windows.
type OnRun<'a> = dyn FnMut(&mut Run<'_>) -> std::result::Result<(), MethodError> + 'a;

/// Trainer of a layer; `kinds` maps the solver's indices of weights to linear layers.
struct Trained {
    trainer: LayerTrainer,
    kinds: Vec<LinearKind>,
}

impl Block for Trained {
    fn forward(&mut self, states: &mut [f32], lens: &[usize]) -> std::result::Result<(), MethodError> {
        self.trainer.forward(states, lens).map_err(train_error)
    }

    fn backward(&mut self, gradient: &[f32], lens: &[usize]) {
        self.trainer.backward(gradient, lens);
    }

    fn gradient(&self, index: usize) -> Cow<'_, [f32]> {
        self.trainer.gradient(self.kinds[index])
    }

    fn set_weight(&mut self, index: usize, write: &mut dyn FnMut(&mut [f32])) {
        self.trainer.set_weight(self.kinds[index], write);
    }
}

impl Windows for States {
    fn count(&self) -> usize {
        self.len()
    }

    fn elements(&self, index: usize) -> usize {
        States::elements(self, index)
    }

    fn append_to(&self, index: usize, out: &mut Vec<f32>) -> std::result::Result<(), MethodError> {
        States::append_to(self, index, out).map_err(|error| MethodError::Environment(error.into()))
    }
}

/// Converts an error of computing the Fisher information for `method`.
pub(super) fn metrics_error(source: &Folded<'_>, method: &str, error: MetricsError) -> QuantError {
    match error {
        MetricsError::Calibrate(error) => error.into(),
        MetricsError::Train(error) => method_error(source, method, train_error(error)),
    }
}
