//! Preparation before any layer is quantized: scales that a transform folds into the model, and clipping of its
//! weights.
//!
//! The unquantized model runs over the calibration set once, layer by layer. Results do not depend on the number of
//! threads, so a resumed run finds the same. Scales are searched on [`TOKENS`] evenly spaced tokens.

pub(crate) mod record;

use std::collections::BTreeMap;
use std::ops::ControlFlow;

use mantissa_methods::transform::{Change, Channels, ScaleChannels};
use mantissa_model::{LinearInfo, LinearInput, LinearKind};
use mantissa_num::{Given, Scheme, Source};
use mantissa_store::convention::ModelFiles;

use crate::awq::{self, WeightReader};
use crate::calibrate::{CalibrateError, Calibration, CalibrationSet, Sample};
use crate::clip;
use crate::error::Result;
use crate::error_gate::{Judgement, Output, Windows};
use crate::fold::sites::{Site, sites};
use crate::fold::{Folded, Folds};
use crate::plan::{Plan, Use};
use crate::rounding::whole;
use crate::rtn;
use crate::smooth;
use crate::source::{DenseTensor, Scratch};
use crate::spin;
use mantissa_methods::Solved;
use record::{Record, storable};

/// Number of tokens that a search uses.
pub(crate) const TOKENS: usize = 512;

/// Results of the transform.
#[derive(Debug, Default)]
pub(crate) struct Prepared {
    /// Changes folded into the model; `None` without a transform.
    pub(crate) record: Option<Record>,
    /// The same changes, by tensor.
    pub(crate) folds: Folds,
    /// Clipping step of each group of a weight ([`awq::clip_groups`]), by module.
    pub(crate) clips: BTreeMap<String, Vec<u8>>,
    /// Warning about channels or experts that the calibration never reaches, by module.
    pub(crate) uncovered: BTreeMap<String, String>,
    /// Error with the scales of a layer's input relative to none, by module.
    judged: BTreeMap<String, Judgement>,
}

impl Prepared {
    /// Adds to `solved` the comparison of its input's scales with none and, if they were rejected, the reason.
    pub(crate) fn judge(&self, module: &str, rounded: bool, solved: &mut Solved) {
        let Some(judged) = self.judged.get(module) else { return };
        let rejected = judged.fallback().map(|why| format!("scales of its input not applied: {why}"));
        if rounded {
            solved.judged = solved.judged.or(Some(*judged));
            solved.fallback = solved.fallback.take().or(rejected);
        } else {
            solved.notes.extend(rejected);
        }
    }
}

/// Computes the transform of `plan` for `source`. `tick` gets the layer or step; `Break` interrupts the run.
///
/// # Errors
/// Errors of [`Calibration`] and of reading weights.
pub(crate) fn prepare(
    plan: &Plan,
    source: &ModelFiles,
    tick: &mut dyn FnMut(&str) -> ControlFlow<()>,
) -> Result<Prepared> {
    let Some(transform) = plan.job.transform() else {
        let mut found = Prepared::default();
        untie(plan, source, &mut found.folds);
        return Ok(found);
    };
    let record = Record::new(transform.name());
    let (mut record, mut found) = (record, Prepared::default());
    match (transform.change(), plan.text_for(Use::Transform)) {
        (Change::Rotation(options), _) => record.rotation = Some(options),
        (Change::LearnedRotation(options), Some(set)) => {
            let spin::Learned { rotations, kl } = spin::learn(plan, source, options, set, tick)?;
            record.rotate(options.rotate, &rotations, kl);
        }
        (Change::Scales(scaling), Some(set)) => {
            let mut search = Search { plan, source, scaling, record, found };
            search.run(set, tick)?;
            Search { record, found, .. } = search;
        }
        _ => {}
    }
    let mut folds = record.folds(source, &plan.config)?;
    untie(plan, source, &mut folds);
    Ok(Prepared { record: Some(record), folds, ..found })
}

/// Makes the head a tensor of its own, if the plan says so and no rotation does.
fn untie(plan: &Plan, source: &ModelFiles, folds: &mut Folds) {
    if let (Some((head, embedding)), None) = (&plan.untied, folds.untied()) {
        folds.untie(head.clone(), embedding.clone(), source.config());
    }
}

/// Search for the scales and clipping of all layers.
struct Search<'a> {
    plan: &'a Plan,
    source: &'a ModelFiles,
    scaling: &'a dyn ScaleChannels,
    record: Record,
    found: Prepared,
}

/// Sampled inputs of a layer.
struct Samples {
    /// Samples of the calibration set.
    seen: BTreeMap<LinearInput, Sample>,
    /// Samples of the held-out windows.
    unseen: BTreeMap<LinearInput, Sample>,
}

impl Samples {
    /// Returns the sample to judge results for `input` on: held-out windows if there are any, else `seen`.
    fn judge_sample<'s>(&'s self, input: LinearInput, seen: &'s Sample) -> JudgeSample<'s> {
        match self.unseen.get(&input).filter(|sample| sample.tokens > 0) {
            Some(sample) => JudgeSample { sample, windows: Windows::HeldOut },
            None => JudgeSample { sample: seen, windows: Windows::Calibration },
        }
    }
}

/// Sample on which scales and clipping are compared with none.
#[derive(Clone, Copy)]
struct JudgeSample<'s> {
    sample: &'s Sample,
    windows: Windows,
}

/// A weight to be quantized.
struct Weight<'a> {
    info: &'a LinearInfo,
    scheme: &'a Scheme,
    values: Vec<f32>,
}

impl Search<'_> {
    fn run(&mut self, set: &CalibrationSet, tick: &mut dyn FnMut(&str) -> ControlFlow<()>) -> Result<()> {
        let (plan, source) = (self.plan, Folded::plain(self.source));
        let begin = |windows| {
            let begun = Calibration::begin(&source, &plan.config, windows, plan.limits())?;
            Ok::<_, CalibrateError>(begun.in_products(plan.options.products))
        };
        let mut calibration = begin(&set.windows)?;
        let unseen = &plan.options.held_out;
        let mut held_out = if unseen.is_empty() { None } else { Some(begin(unseen)?) };
        while let Some(layer) = calibration.next_layer()? {
            let index = layer.index();
            let tick = &mut || tick(&format!("layer {index}"));
            let layer_linears: Vec<_> = plan.quantized().filter(|(info, _)| info.layer == index).collect();
            let kinds = layer_linears.iter().map(|(info, _)| info.kind);
            let samples = calibration.samples(&layer, kinds.clone(), TOKENS, true, tick)?;
            let unseen = held_out.as_mut().map(|unseen| unseen.samples(&layer, kinds, TOKENS, true, tick));
            let samples = Samples { seen: samples, unseen: unseen.transpose()?.unwrap_or_default() };
            self.note_coverage(&layer_linears, &samples.seen);
            let mut scales = BTreeMap::new();
            for site in sites(&plan.config, index) {
                if let Some(sample) = samples.seen.get(&site.input).filter(|sample| sample.tokens > 0)
                    && let Some(s) =
                        self.site_scales(&site, sample, samples.judge_sample(site.input, sample))?
                {
                    self.record.divide(&site, &s);
                    site.readers.iter().for_each(|info| {
                        scales.insert(info.kind, site.spread(&s));
                    });
                }
            }
            if self.scaling.clips() && plan.job.rounds_to_nearest() {
                self.clip(&layer_linears, &samples, &scales)?;
            }
        }
        Ok(())
    }

    /// Notes inputs of a layer that the calibration never reaches.
    fn note_coverage(
        &mut self,
        layer_linears: &[(&LinearInfo, &Scheme)],
        samples: &BTreeMap<LinearInput, Sample>,
    ) {
        for (info, _) in layer_linears {
            let sample = samples.get(&info.kind.input()).filter(|sample| sample.tokens > 0);
            let note = match sample {
                None => "no calibration token was routed to it".to_owned(),
                Some(sample) => match sample.peaks.iter().filter(|peak| **peak == 0.0).count() {
                    0 => continue,
                    n => format!("{n} of {} inputs were zero in every calibration token", info.cols),
                },
            };
            self.found.uncovered.insert(info.module.clone(), note);
        }
    }

    /// Returns the scales of a site; `None` if no scales are best, on the searched sample or on the one of `judging`.
    fn site_scales(
        &mut self,
        site: &Site,
        sample: &Sample,
        judging: JudgeSample<'_>,
    ) -> Result<Option<Vec<f32>>> {
        let inner = matches!(site.input, LinearInput::O | LinearInput::Down);
        if inner && !self.scaling.scales_inner() {
            return Ok(None);
        }
        let plan = self.plan;
        let readers = site.readers.iter().filter_map(|info| {
            let found = plan.quantized().find(|(known, _)| known.module == info.module)?;
            Some(self.weight(found.0, found.1))
        });
        let readers = readers.collect::<Result<Vec<_>>>()?;
        if readers.is_empty() {
            return Ok(None);
        }
        let candidates = self.candidates(site, sample, &readers);
        let spread: Vec<_> = candidates.iter().map(|s| site.spread(s)).collect();
        let found = (candidates.len() > 1).then(|| self.search(sample, &readers, &spread));
        let best = found.as_ref().map_or(0, |found| found.best);
        if let Some(losses) = found.filter(|_| best > 0).map(|found| found.losses) {
            // Candidate 0 has no scaling.
            let both = match judging.windows {
                Windows::Calibration => [losses[0], losses[best]],
                Windows::HeldOut => {
                    let two = [spread[0].clone(), spread[best].clone()];
                    let losses = self.search(judging.sample, &readers, &two).losses;
                    [losses[0], losses[1]]
                }
            };
            let [nearest, solved] = both.map(|sum| sum / judging.sample.rows().max(1) as f64);
            let judged = Judgement { of: Output::Input, windows: judging.windows, solved, nearest };
            let modules = readers.iter().map(|reader| (reader.info.module.clone(), judged));
            self.found.judged.extend(modules);
            if judged.fallback().is_some() {
                return Ok(None);
            }
        }
        let Some(s) = candidates.into_iter().nth(best) else { return Ok(None) };
        if s.iter().all(|s| *s == 1.0) {
            return Ok(None);
        }
        storable(self.source, &self.plan.config, site, s).map(Some)
    }

    /// Returns candidate scales of a site. If there are several, the first is no scaling.
    fn candidates(&self, site: &Site, sample: &Sample, readers: &[Weight<'_>]) -> Vec<Vec<f32>> {
        let largest = |columns: &[f32]| {
            let mut channels = vec![0f32; site.channels];
            columns.iter().enumerate().for_each(|(column, v)| {
                let channel = &mut channels[site.channel(column)];
                *channel = channel.max(*v);
            });
            channels
        };
        let mut weights = vec![0.0; site.width()];
        readers.iter().for_each(|reader| smooth::column_peaks(&reader.values, &mut weights));
        self.scaling.candidates(&Channels {
            peaks: &largest(&replace_dead(&sample.peaks)),
            means: &largest(&replace_dead(&sample.means())),
            weights: &largest(&weights),
        })
    }

    fn search(&self, sample: &Sample, readers: &[Weight<'_>], candidates: &[Vec<f32>]) -> awq::ScaleSearch {
        let threads = self.plan.threads();
        let quantizers: Vec<_> = readers.iter().map(|reader| quantizer(reader, threads)).collect();
        let readers: Vec<_> = readers
            .iter()
            .zip(&quantizers)
            .map(|(reader, quantize)| WeightReader { weight: &reader.values, quantize })
            .collect();
        let width = sample.peaks.len();
        let scheme =
            self.plan.activations.as_ref().map(|scheme| Scheme { source: Source::Dynamic, ..scheme.clone() });
        let quantize = scheme.map(|scheme| {
            move |x: &mut [f32]| {
                let rows = x.len() / width.max(1);
                // An input that cannot be quantized is compared unquantized.
                let _ = mantissa_num::fake_quantize(&scheme, x, rows, width, Given::default());
            }
        });
        let inputs = quantize.as_ref().map(|quantize| quantize as &awq::QuantizeInputs<'_>);
        awq::search(&sample.x, &readers, candidates, inputs, threads)
    }

    /// Searches clipping for the weights of a layer, after their columns were multiplied by `scales`.
    fn clip(
        &mut self,
        layer_linears: &[(&LinearInfo, &Scheme)],
        samples: &Samples,
        scales: &BTreeMap<LinearKind, Vec<f32>>,
    ) -> Result<()> {
        let threads = self.plan.threads();
        for (info, scheme) in layer_linears {
            // AWQ does not clip queries and keys: attention scores depend on their product, which the error of one does
            // not show.
            let scores = info.kind.makes_scores();
            let grouped = clip::check_scheme(scheme).is_ok();
            let sample = samples.seen.get(&info.kind.input()).filter(|sample| !sample.x.is_empty());
            let (Some(sample), true) = (sample, grouped && !scores) else { continue };
            let mut weight = self.weight(info, scheme)?;
            let (mut x, mut judging) =
                (sample.x.clone(), samples.judge_sample(info.kind.input(), sample).sample.x.clone());
            if let Some(s) = scales.get(&info.kind) {
                awq::multiply_columns(&mut weight.values, s);
                awq::divide_columns(&mut x, s);
                awq::divide_columns(&mut judging, s);
            }
            let quantize = quantizer(&weight, threads);
            let reader = WeightReader { weight: &weight.values, quantize: &quantize };
            let group = clip::group_of(scheme, info.cols);
            let found = awq::clips(&x, &reader, info.cols, group, threads);
            let mut clipped = weight.values.clone();
            awq::clip_groups(&mut clipped, info.cols, group, |i| found[i]);
            // Groups were searched one by one. Clipping all of them may be worse, or worse on held-out windows.
            let loss = |w: &[f32]| awq::loss(&judging, &reader, w, info.cols, threads);
            if loss(&clipped) < loss(&weight.values) {
                self.found.clips.insert(info.module.clone(), found);
            }
        }
        Ok(())
    }

    fn weight<'w>(&self, info: &'w LinearInfo, scheme: &'w Scheme) -> Result<Weight<'w>> {
        let source = Folded::plain(self.source);
        let w = DenseTensor::of_linear(&source, info)?;
        let mut scratch = Scratch::default();
        let values = whole(&source, info, &w, &mut scratch)?.to_vec();
        Ok(Weight { info, scheme, values })
    }
}

/// Returns a function that quantizes values by RTN like a weight and dequantizes them.
fn quantizer<'w>(weight: &'w Weight<'_>, threads: usize) -> impl Fn(&[f32]) -> Vec<f32> + Sync + 'w {
    let (scheme, info) = (weight.scheme, weight.info);
    move |values| {
        let found = rtn::quantize(scheme, values, info.rows, info.cols, None, threads);
        found.ok().and_then(|(q, _)| q.dequantize().ok()).unwrap_or_else(|| values.to_vec())
    }
}

/// Replaces zero columns by the smallest other column: a scale near 0 would lose their weights.
fn replace_dead(columns: &[f32]) -> Vec<f32> {
    let least = columns.iter().filter(|v| **v > 0.0).fold(f32::INFINITY, |least, v| least.min(*v));
    let least = if least.is_finite() { least } else { 1.0 };
    columns.iter().map(|v| if *v > 0.0 { *v } else { least }).collect()
}
