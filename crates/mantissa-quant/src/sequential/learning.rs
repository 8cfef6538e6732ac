//! AutoRound in the order of the pipeline: the original model's states go along beside those of the quantized one, and a
//! layer's linear layers are learned together.

use std::collections::BTreeMap;

use mantissa_kernels::kernels;
use mantissa_model::{LinearInfo, LinearInput, LinearKind};
use mantissa_num::Scheme;
use mantissa_store::convention::ModelFiles;
use mantissa_train::{LayerTrainer, Options, Policy};

use super::fisher::{MetricsError, metrics};
use super::{Sequential, dequantized, put};
use crate::autoround::{
    AutoRoundError, ErrorMetric, LearnedWeight, Metric, Windows, reconstruct, reconstruction_error,
};
use crate::calibrate::{CalibrateError, Calibration, CalibrationSet, Squares, Tick};
use crate::error::{QuantError, Result};
use crate::error_stats::ErrorStats;
use crate::fold::Folded;
use crate::judge::{self, Judgement, Output};
use crate::layers::{Solved, round_to_nearest, whole};
use crate::plan::Plan;
use crate::source::{DenseTensor, Scratch};

/// A linear layer whose rounding is to be learned.
#[derive(Clone, Copy)]
pub(crate) struct ToLearn<'a> {
    pub(crate) info: &'a LinearInfo,
    pub(crate) scheme: &'a Scheme,
    /// The tensor-wide scale, where fused partners share one.
    pub(crate) outer: Option<f32>,
}

/// What AutoRound has beside what every method that calibrates has.
#[derive(Default)]
pub(crate) struct Learning<'a> {
    /// The windows in the original model.
    reference: Option<Calibration<'a>>,
    /// Those that are held out, in the original model.
    unseen: Option<Calibration<'a>>,
    /// What errors of each layer's output cost.
    metrics: Option<Vec<Option<Metric>>>,
    /// What was learned of the layer at hand, by module.
    solved: BTreeMap<String, Solved>,
}

/// What a layer is trained with.
pub(crate) fn options(plan: &Plan, set: &CalibrationSet) -> Options {
    let (max_tokens, max_len) = [Some(set), plan.held_out().as_ref()]
        .into_iter()
        .flatten()
        .map(|set| {
            let each = (plan.recipe.autoround.batch_tokens / set.longest().max(1)).max(1);
            (each.min(set.windows.len().max(1)).saturating_mul(set.longest()), set.longest())
        })
        .fold((0, 0), |(tokens, len), of| (tokens.max(of.0), len.max(of.1)));
    Options { max_tokens, max_len, threads: plan.options.threads, policy: Policy::fp32() }
}

impl<'a> Sequential<'a> {
    /// What [`learn`](Self::learn) made of a linear layer.
    pub(crate) fn take_learned(&mut self, module: &str) -> Option<Solved> {
        self.learning.solved.remove(module)
    }

    /// Learns the rounding of `linears`, those of layer `index` that are quantized.
    pub(crate) fn learn(&mut self, index: usize, linears: &[ToLearn<'_>], tick: &mut Tick<'_>) -> Result<()> {
        self.metrics(tick)?;
        self.reach(index, tick)?;
        self.reference(index, tick)?;
        // Without what a run before this one may have finished of it, which it is not learned with.
        self.layer = self.next_layer()?;
        let mut weights = Vec::with_capacity(linears.len());
        let columns = self.columns(linears, tick)?;
        for linear in linears {
            let (input, info) = (linear.info.kind.input(), linear.info);
            let h = columns.get(&input).map_or(&[][..], |h| &h[..]);
            weights.push((info.kind, self.first(linear, h)?));
        }
        // Its weights are held as they are learned, and there is no room for them twice.
        self.layer = None;
        let (note, judged) = self.reconstruct(index, &mut weights, linears, tick)?;
        self.layer = self.next_layer()?;
        let given_up = judged.fallback();
        for (linear, (kind, weight)) in linears.iter().zip(weights) {
            let solved = match &given_up {
                Some(why) => Solved { fallback: Some(why.clone()), ..self.nearest(linear)? },
                None => {
                    let quantized = weight.quantized();
                    let stats = ErrorStats::of(weight.weight(), &quantized);
                    Solved { notes: vec![note.clone()], ..Solved::rounded((quantized, stats)) }
                }
            };
            let solved = Solved { judged: Some(judged), ..solved };
            if let Some(layer) = &mut self.layer {
                let values = solved.quantized.dequantize();
                put(layer, kind, dequantized(self.source.files(), linear.info, values)?)?;
            }
            self.learning.solved.insert(linear.info.module.clone(), solved);
        }
        Ok(())
    }

    /// A weight rounded to nearest.
    fn nearest(&self, linear: &ToLearn<'_>) -> Result<Solved> {
        let ToLearn { info, scheme, outer } = *linear;
        let w = DenseTensor::of_linear(self.source, info)?;
        round_to_nearest(self.plan, self.source, info, scheme, &w, outer)
    }

    /// Puts the values of `linears`, rounded to nearest, in place of the weights in `trainer`, one after another.
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

    /// Learns `weights` of layer `index`, whose windows are at hand and whose linear layers are `linears`; gives what there is to say
    /// of it, and how the layer errs against one of weights rounded to nearest.
    fn reconstruct(
        &self,
        index: usize,
        weights: &mut [(LinearKind, LearnedWeight)],
        linears: &[ToLearn<'_>],
        tick: &mut Tick<'_>,
    ) -> Result<(String, Judgement)> {
        let plan = self.plan;
        let (Some(set), Some(calibration), Some(reference)) =
            (plan.calibration(), &self.calibration, &self.learning.reference)
        else {
            return Err(CalibrateError::Empty.into());
        };
        let fault = |error| autoround_error(self.source.files(), &format!("layer {index}"), error);
        let mut trainer = LayerTrainer::load(self.source, &plan.config, index, options(plan, set))
            .map_err(|error| fault(AutoRoundError::Layer(error)))?;
        for (input, quantizer) in self.quantizers(index) {
            let quantized = trainer.quantize_input(input, quantizer);
            quantized.map_err(|error| fault(AutoRoundError::Layer(error)))?;
        }
        let metric = self.learning.metrics.as_ref().and_then(|all| all.get(index)?.as_ref());
        let windows = Windows {
            inputs: calibration.states(),
            targets: reference.states(),
            hidden: plan.config.hidden_size,
            metric,
        };
        let (options, threads) = (plan.recipe.autoround, plan.options.threads);
        let stopped = |error| match error {
            AutoRoundError::Interrupted => CalibrateError::Interrupted.into(),
            error => fault(error),
        };
        let unseen = match (&self.held_out, &self.learning.unseen) {
            (Some(inputs), Some(targets)) => {
                Some(Windows { inputs: inputs.states(), targets: targets.states(), ..windows })
            }
            _ => None,
        };
        // First, and then forgotten: there is no room for it beside what is learned.
        self.put_nearest(&mut trainer, linears)?;
        let judging = unseen.unwrap_or(windows);
        let nearest = reconstruction_error(&mut trainer, judging, options, threads, tick).map_err(stopped)?;
        let found = reconstruct(&mut trainer, weights, windows, options, threads, tick).map_err(stopped)?;
        let (windows, solved) = match unseen {
            None => (judge::Windows::Calibration, found.after),
            Some(unseen) => {
                for (kind, weight) in &*weights {
                    trainer.set_weight(*kind, |values| weight.fake_quantize(values, threads));
                }
                let solved = reconstruction_error(&mut trainer, unseen, options, threads, tick);
                (judge::Windows::HeldOut, solved.map_err(stopped)?)
            }
        };
        let judged = Judgement { of: Output::Block, windows, solved, nearest };
        let what = if metric.is_some() { "mean error under the Fisher metric" } else { "mean squared error" };
        let note = format!("{what} of the layer's output {:.4e} → {:.4e}", found.before, found.after);
        Ok((note, judged))
    }

    /// Finds what errors of the layers' outputs cost, where that is asked for.
    fn metrics(&mut self, tick: &mut Tick<'_>) -> Result<()> {
        let plan = self.plan;
        let wanted = plan.recipe.autoround.metric == ErrorMetric::Fisher && self.learning.metrics.is_none();
        let Some(set) = plan.calibration().filter(|_| wanted) else { return Ok(()) };
        let seed = plan.recipe.autoround.seed;
        let found = metrics(self.source, &plan.config, set, &options(plan, set), seed, tick);
        self.learning.metrics = Some(found.map_err(|error| metrics_error(self.source, "autoround", error))?);
        Ok(())
    }

    /// Takes the windows in the original model to what layer `index` gives.
    fn reference(&mut self, index: usize, tick: &mut Tick<'_>) -> Result<()> {
        let (plan, source) = (self.plan, self.source);
        if self.learning.reference.is_none() {
            let windows = plan.options.calibration.as_ref().map_or(&[][..], |set| &set.windows);
            let begun = Calibration::begin(source, &plan.config, windows, plan.options.threads)?;
            self.learning.reference = Some(begun.to_the_end());
            let unseen = &plan.options.held_out;
            if !unseen.is_empty() {
                let begun = Calibration::begin(source, &plan.config, unseen, plan.options.threads)?;
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

    /// Mean squares of what `linears` read, column by column, in the quantized model up to this layer.
    fn columns(
        &mut self,
        linears: &[ToLearn<'_>],
        tick: &mut Tick<'_>,
    ) -> Result<BTreeMap<LinearInput, Vec<f32>>> {
        let Some(layer) = self.layer.take() else { return Ok(BTreeMap::new()) };
        let kinds = linears.iter().map(|linear| linear.info.kind);
        let sums = self.calibration()?.squares(&layer, kinds, false, tick);
        self.layer = Some(layer);
        let tokens = self.plan.calibration().map_or(1, CalibrationSet::tokens).max(1) as f64;
        let mean = |sum: f64| (sum / tokens) as f32;
        let means = |squares: Squares| squares.sums.into_iter().map(mean).collect();
        Ok(sums?.into_iter().map(|(input, squares)| (input, means(squares))).collect())
    }

    fn first(&self, linear: &ToLearn<'_>, h: &[f32]) -> Result<LearnedWeight> {
        let (plan, info) = (self.plan, linear.info);
        let w = DenseTensor::of_linear(self.source, info)?;
        let mut scratch = Scratch::default();
        let w = whole(self.source, info, &w, &mut scratch)?;
        let outer = linear.outer.or_else(|| linear.scheme.outer_scale(kernels().amax(w)));
        let signed = plan.container.holds_signed_scales();
        LearnedWeight::new(linear.scheme, w, info.cols, h, outer, signed, plan.options.threads)
            .map_err(|error| autoround_error(self.source.files(), &info.module, error))
    }
}

/// An error of what `method` finds on the way back.
pub(super) fn metrics_error(source: &Folded<'_>, method: &str, error: MetricsError) -> QuantError {
    match error {
        MetricsError::Calibrate(error) => error.into(),
        MetricsError::AutoRound(error) => autoround_error(source.files(), method, error),
    }
}

fn autoround_error(source: &ModelFiles, what: &str, error: AutoRoundError) -> QuantError {
    QuantError::AutoRound { path: source.dir().to_owned(), what: what.to_owned(), error: Box::new(error) }
}
