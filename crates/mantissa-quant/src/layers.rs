//! Quantizes the layers of a plan one after another.

pub(crate) mod units;

use std::collections::BTreeSet;

use mantissa_methods::Solved;
use mantissa_methods::method::{SolveLayer, SolveWeight, WeightTask, Work};
use mantissa_model::{FusedGroup, LinearInfo};
use mantissa_num::codec::Codec;
use mantissa_num::{CodecId, Quantized, Scheme, StaticScale};
use mantissa_store::Error;
use mantissa_store::convention::{LinearPlan, ModelFiles, SideTensors};

use crate::awq;
use crate::calibrate::{CalibrateError, Tick};
use crate::clip;
use crate::convert;
use crate::error::Result;
use crate::error_stats::ErrorStats;
use crate::fold::Folded;
use crate::gguf;
use crate::importance::Importance;
use crate::input_scales::{self, InputScales};
use crate::plan::{Plan, Use, WeightJob};
use crate::range;
use crate::report::LayerReport;
use crate::rounding::{check_range, dense_error, method_error, round_to_nearest, whole};
use crate::rtn;
use crate::sequential::{Sequential, ToLearn};
use crate::shared::Shared;
use crate::source::{self, DenseError, DenseTensor, Scratch};
use crate::transform::Prepared;

/// Tensors of a quantized layer by name, and its report.
pub(crate) type QuantizedLayer = (Vec<(String, Vec<u8>)>, LayerReport);

/// Quantizer of a plan's layers.
pub(crate) struct Layers<'a> {
    plan: &'a Plan,
    source: &'a Folded<'a>,
    /// Result of the transform: clips of weights, warnings and comparisons.
    prepared: Option<&'a Prepared>,
    /// Tensor-wide scale of the last fused group. Fused layers follow each other, so one is enough.
    shared: Option<((usize, FusedGroup), Option<f32>)>,
    /// State of a method that calibrates.
    sequential: Option<Sequential<'a>>,
    /// Importance that weights the errors of searched blocks.
    importance: Option<&'a Importance>,
    /// Stored scales of inputs, once computed.
    input_scales: Option<InputScales>,
    /// Output of the same run that has the codes and scales of all layers.
    given: Option<&'a Shared<'a>>,
    /// Units that have a result, if several workers solve the layers.
    completed: BTreeSet<String>,
}

impl<'a> Layers<'a> {
    /// Creates the quantizer. `stored` opens the output, to read back layers of a resumed run.
    pub(crate) fn new(
        plan: &'a Plan,
        source: &'a Folded<'a>,
        stored: Box<dyn Fn() -> Result<ModelFiles> + 'a>,
    ) -> Self {
        let calibrates = plan.solving_text().is_some();
        let sequential = calibrates.then(|| Sequential::new(plan, source, stored));
        Layers {
            plan,
            source,
            prepared: None,
            shared: None,
            sequential,
            importance: None,
            input_scales: None,
            given: None,
            completed: BTreeSet::new(),
        }
    }

    /// Sets the importance that weights the errors of searched blocks.
    pub(crate) fn with_importance(self, importance: Option<&'a Importance>) -> Self {
        Layers { importance, ..self }
    }

    /// Sets an output of the same run that has the codes and scales of all layers.
    pub(crate) fn given(self, given: Option<&'a Shared<'a>>) -> Self {
        Layers { given, ..self }
    }

    /// Sets the result of the transform.
    pub(crate) fn prepared(self, prepared: &'a Prepared) -> Self {
        Layers { prepared: Some(prepared), ..self }
    }

    /// Reads a layer and quantizes it into the tensors of the plan's container. Layers come in the order of the plan.
    pub(crate) fn quantize(
        &mut self,
        info: &LinearInfo,
        scheme: &Scheme,
        tick: &mut Tick<'_>,
    ) -> Result<QuantizedLayer> {
        if let Some(given) = self.given {
            let (solved, report) = given.layer(self.plan, info, scheme)?;
            let input_scale = self.input_scale(info, tick)?;
            return Ok((self.packed(info, scheme, &solved, input_scale)?, report));
        }
        let plan = self.plan;
        let mut solved = self.solved(info, scheme, tick)?;
        if let WeightJob::Quantize(_) = &plan.job
            && range::is_suspect(&solved.stats)
        {
            check_range(plan, self.source, info, scheme, &self.weight(info)?, &solved.stats)?;
        }
        // Notes of the transform: gaps in the calibration, and scales that did not help.
        if let Some(prepared) = self.prepared {
            solved.notes.extend(prepared.uncovered.get(&info.module).cloned());
            prepared.judge(&info.module, self.plan.job.rounds_to_nearest(), &mut solved);
        }
        let input_scale = match solved.input_scale {
            None => self.input_scale(info, tick)?,
            scale => scale,
        };
        let tensors = self.packed(info, scheme, &solved, input_scale)?;
        let method = match self.clips(info) {
            Some(_) => awq::NAME,
            None if solved.fallback.is_some() => rtn::NAME,
            None => self.plan.method_named(info, scheme),
        };
        Ok((tensors, self.plan.layer_report(info, scheme, method, solved)))
    }

    /// Solves a layer in this process.
    fn solved_here(&mut self, info: &LinearInfo, scheme: &Scheme, tick: &mut Tick<'_>) -> Result<Solved> {
        let (plan, files) = (self.plan, self.source.files());
        match &plan.job {
            WeightJob::Quantize(_) => self.solve(info, scheme, tick),
            WeightJob::Convert { drops_inputs, .. } => {
                convert::recoded(plan, files, info, scheme, *drops_inputs)
            }
            WeightJob::Requantize { .. } => {
                let outer = self.outer(info, scheme)?;
                convert::requantized(plan, files, info, scheme, outer)
            }
        }
    }

    /// Packs a solved layer into the tensors of the plan's container.
    fn packed(
        &self,
        info: &LinearInfo,
        scheme: &Scheme,
        solved: &Solved,
        input_scale: Option<StaticScale>,
    ) -> Result<Vec<(String, Vec<u8>)>> {
        let plan = LinearPlan { input_scale, ..self.plan.linear_plan(info, scheme) };
        let container = self.plan.container;
        let tensors = match (&solved.g_idx, &solved.outliers) {
            (Some(g_idx), _) => container.tensors(&plan, &solved.quantized, SideTensors::Groups(g_idx)),
            (None, Some(extra)) => container.tensors(&plan, &solved.quantized, SideTensors::Outliers(extra)),
            (None, None) => container.tensors(&plan, &solved.quantized, SideTensors::Nothing),
        };
        Ok(tensors.map_err(|e| {
            let expected = "a scheme that the format holds";
            Error::field(self.source.path(), &info.module, e.to_string(), expected, "")
        })?)
    }

    /// Returns the stored scale of a layer's input, if the plan has one.
    fn input_scale(&mut self, info: &LinearInfo, tick: &mut Tick<'_>) -> Result<Option<StaticScale>> {
        self.find_input_scales(tick)?;
        Ok(self.input_scales.as_ref().and_then(|scales| scales.get(&info.module)).copied())
    }

    /// Computes the stored scales of inputs, if the plan has them and they are not computed yet.
    fn find_input_scales(&mut self, tick: &mut Tick<'_>) -> Result<()> {
        let plan = self.plan;
        if let (Some(set), None) = (plan.text_for(Use::Inputs), &self.input_scales) {
            let scheme = |info: &LinearInfo| plan.input_of(info);
            let observed = (&scheme as &input_scales::SchemeOf<'_>, plan.observer);
            let found = input_scales::collect(self.source, &plan.config, observed, set, plan.limits(), tick)?;
            self.input_scales = Some(found);
        }
        Ok(())
    }

    /// Gives a method that calibrates the scales of inputs, if the plan has them: it must see inputs as at run time.
    fn quantize_inputs(&mut self, tick: &mut Tick<'_>) -> Result<()> {
        if self.sequential.is_some() && self.plan.activations.is_some() {
            self.find_input_scales(tick)?;
            let scales = self.input_scales.as_ref();
            self.sequential.iter_mut().for_each(|sequential| sequential.scale_inputs(scales));
        }
        Ok(())
    }

    /// Applies the method of a layer to its weight in the source.
    fn solve(&mut self, info: &LinearInfo, scheme: &Scheme, tick: &mut Tick<'_>) -> Result<Solved> {
        self.quantize_inputs(tick)?;
        let work = self.plan.work_on(info).unwrap_or(Work::Nearest);
        if let Work::Layer(method) = work {
            return self.learned(method, info, tick);
        }
        let outer = self.outer(info, scheme)?;
        let w = self.weight(info)?;
        // The transform has searched this clipping; only rounding is left.
        if let Some(clips) = self.clips(info) {
            return self.clipped_by(clips, info, scheme, &w, outer);
        }
        let solved = match work {
            Work::Input(_) => {
                let sequential = self.sequential.as_mut().ok_or(CalibrateError::Empty)?;
                return sequential.quantize(info, scheme, &w, outer, tick);
            }
            _ if self.plan.container.facts().square_scales => {
                round_to_nearest(self.plan, self.source, info, scheme, &w, outer)?
            }
            _ if self.plan.blocks_of_ternary(scheme).is_some() => self.ternary(info, scheme, &w)?,
            Work::Weight(method) => {
                let solved = self.searched(method, info, scheme, &w, outer)?;
                return match &mut self.sequential {
                    Some(sequential) => sequential.judge((info, scheme, outer), &w, None, solved, tick),
                    None => Ok(solved),
                };
            }
            _ => match (scheme.format.codec(), self.importance) {
                (Some(codec), Some(importance)) if codec.takes_importance() => {
                    self.search(info, codec, &w, importance)?
                }
                _ => round_to_nearest(self.plan, self.source, info, scheme, &w, outer)?,
            },
        };
        // Later layers with another method are calibrated behind this one.
        if let Some(sequential) = &mut self.sequential {
            sequential.place(info, &solved, tick)?;
        }
        Ok(solved)
    }

    /// Opens the weight of a layer, with its columns in the order in which they are stored.
    fn weight(&self, info: &LinearInfo) -> Result<DenseTensor<'a>> {
        let w = DenseTensor::of_linear(self.source, info)?;
        let Some(columns) = self.plan.columns_of(info) else { return Ok(w) };
        let mut scratch = Scratch::default();
        let values = whole(self.source, info, &w, &mut scratch)?;
        Ok(columns.columns_to_gguf(values, info.cols).into())
    }

    /// Returns the result of a method that learns. The first call for a decoder layer learns all its linear layers.
    fn learned(&mut self, method: &dyn SolveLayer, info: &LinearInfo, tick: &mut Tick<'_>) -> Result<Solved> {
        if let Some(solved) = self.sequential.as_mut().and_then(|s| s.take_learned(&info.module)) {
            return Ok(solved);
        }
        let plan = self.plan;
        let layer_linears: Vec<_> = plan.quantized().filter(|(other, _)| other.layer == info.layer).collect();
        let mut linears = Vec::with_capacity(layer_linears.len());
        for (info, scheme) in layer_linears {
            linears.push(ToLearn { info, scheme, outer: self.outer(info, scheme)? });
        }
        let Some(sequential) = &mut self.sequential else { return Err(CalibrateError::Empty.into()) };
        sequential.learn(method, info.layer, &linears, tick)?;
        sequential.take_learned(&info.module).ok_or_else(|| CalibrateError::Empty.into())
    }

    /// Quantizes ternary weights to GGUF blocks with a factor for the whole weight.
    fn ternary(&self, info: &LinearInfo, scheme: &Scheme, w: &DenseTensor<'_>) -> Result<Solved> {
        let codec = self.plan.blocks_of_ternary(scheme).unwrap_or(CodecId::Tq2_0);
        let mut scratch = Scratch::default();
        let w = whole(self.source, info, w, &mut scratch)?;
        gguf::quantize_ternary(codec, w, info.rows, info.cols, self.plan.threads())
            .map_err(|error| dense_error(self.source, info, error.into()))
    }

    /// Applies a method that needs no calibration.
    fn searched(
        &self,
        method: &dyn SolveWeight,
        info: &LinearInfo,
        scheme: &Scheme,
        w: &DenseTensor<'_>,
        outer: Option<f32>,
    ) -> Result<Solved> {
        let mut scratch = Scratch::default();
        let w = whole(self.source, info, w, &mut scratch)?;
        let linears = self.plan.config.layer_linears(info.layer);
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
            threads: self.plan.options.threads,
        };
        method.solve(&task).map_err(|error| method_error(self.source, &info.module, error))
    }

    /// Returns the clipping step of each group of a layer.
    fn clips(&self, info: &LinearInfo) -> Option<&'a [u8]> {
        self.prepared.and_then(|prepared| prepared.clips.get(&info.module)).map(Vec::as_slice)
    }

    /// Clips each group, then rounds to nearest.
    fn clipped_by(
        &self,
        clips: &[u8],
        info: &LinearInfo,
        scheme: &Scheme,
        w: &DenseTensor<'_>,
        outer: Option<f32>,
    ) -> Result<Solved> {
        let mut scratch = Scratch::default();
        let w = whole(self.source, info, w, &mut scratch)?;
        let mut clipped = w.to_vec();
        let group = clip::group_of(scheme, info.cols);
        awq::clip_groups(&mut clipped, info.cols, group, |i| clips.get(i).copied().unwrap_or(0));
        let threads = self.plan.options.threads;
        let found = rtn::quantize(scheme, &clipped, info.rows, info.cols, outer, threads);
        let (quantized, _) = found.map_err(|error| dense_error(self.source, info, error.into()))?;
        let stats = ErrorStats::of(w, &quantized);
        Ok(Solved::rounded((quantized, stats)))
    }

    /// Searches blocks of least error, weighted by the importance of their columns.
    fn search(
        &self,
        info: &LinearInfo,
        codec: &'static Codec,
        w: &DenseTensor<'_>,
        importance: &Importance,
    ) -> Result<Solved> {
        let weights = importance.of(&self.plan.config, info)?;
        let weights = match self.plan.columns_of(info) {
            Some(columns) => weights.map(|weights| columns.to_gguf(&weights, 1)),
            None => weights,
        };
        let threads = self.plan.options.threads;
        let found = rtn::quantize_blocks(codec, w, info.rows, info.cols, weights.as_deref(), threads);
        let solved = found.map(Solved::rounded).map_err(|error| dense_error(self.source, info, error))?;
        let notes = note_missing_importance(importance, weights.is_none());
        Ok(Solved { notes, ..solved })
    }

    /// Quantizes a layer that is [streamed](Plan::streamed): its blocks go to `sink`, panel by panel.
    pub(crate) fn stream(
        &mut self,
        info: &LinearInfo,
        (scheme, codec): (&Scheme, &'static Codec),
        sink: &rtn::Sink<'_, DenseError>,
    ) -> Result<LayerReport> {
        let (plan, shape) = (self.plan, (info.rows, info.cols));
        let w = DenseTensor::of_linear(self.source, info)?;
        let importance = self.importance.filter(|_| codec.takes_importance());
        let weights = importance.map(|importance| importance.of(&plan.config, info)).transpose()?.flatten();
        let stats = rtn::stream_blocks(codec, &w, shape, weights.as_deref(), plan.options.threads, sink);
        let stats = stats.map_err(|error| dense_error(self.source, info, error))?;
        check_range(plan, self.source, info, scheme, &w, &stats)?;
        let empty = Quantized::empty(scheme.format.clone(), info.rows, info.cols);
        let notes =
            importance.map_or_else(Vec::new, |given| note_missing_importance(given, weights.is_none()));
        let solved = Solved { notes, ..Solved::rounded((empty, stats)) };
        Ok(plan.layer_report(info, scheme, plan.method_named(info, scheme), solved))
    }

    /// Reuses a stored layer of an unfinished run.
    ///
    /// # Errors
    /// The layer cannot be read.
    pub(crate) fn recovered(&mut self, info: &LinearInfo) -> Result<()> {
        self.sequential.as_mut().map_or(Ok(()), |sequential| sequential.recovered(info))
    }

    /// Returns the tensor-wide scale that a layer shares with its fused layers, if the scheme has one.
    fn outer(&mut self, info: &LinearInfo, scheme: &Scheme) -> Result<Option<f32>> {
        let Some(group) = info.kind.fused().filter(|_| scheme.has_outer_scale()) else { return Ok(None) };
        if let Some((key, outer)) = self.shared
            && key == (info.layer, group)
        {
            return Ok(outer);
        }
        let outer = self.shared_outer(info.layer, group, scheme)?;
        self.shared = Some(((info.layer, group), outer));
        Ok(outer)
    }

    /// Computes the tensor-wide scale of fused layers. vLLM runs qkv (gate_up) as one matrix with one global scale.
    fn shared_outer(&self, layer: usize, group: FusedGroup, scheme: &Scheme) -> Result<Option<f32>> {
        let mut amaxes = Vec::new();
        for (info, partner) in self.plan.quantized() {
            if info.layer == layer && info.kind.fused() == Some(group) && partner.format == scheme.format {
                if self.plan.job.recipe().is_none() {
                    amaxes.push(convert::amax(self.source.files(), info)?);
                    continue;
                }
                let (len, threads) = (info.rows * info.cols, self.plan.options.threads);
                let amax = source::amax(&DenseTensor::of_linear(self.source, info)?, len, threads);
                amaxes.push(amax.map_err(|error| dense_error(self.source, info, error))?);
            }
        }
        Ok(rtn::shared_outer_scale(scheme, amaxes))
    }
}

/// Returns a note if the importance of a layer is `missing`.
fn note_missing_importance(importance: &Importance, missing: bool) -> Vec<String> {
    Vec::from_iter(missing.then(|| format!("no importance in {}", importance.name)))
}
