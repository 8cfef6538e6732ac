//! Quantization by methods that calibrate. The calibration windows go through the model as it is quantized, with one
//! layer in memory.
//!
//! The inputs of a layer are processed in the order of the forward pass (GPTQ's `true_sequential`). For each input its
//! Hessian is collected with all earlier weights already quantized; then the weights that read it are quantized.
//! Collecting all inputs of a layer at once would take a quarter of the passes, but leaves more error. Inputs of
//! experts do not depend on one another, so several are collected in one pass. An expert that no calibration token was
//! routed to falls back to RTN and is reported.
//!
//! Every solution is compared with RTN ([`crate::error_gate`]), on held-out windows if there are any.
//!
//! If the recipe quantizes inputs at run time, finished layers quantize theirs too, and statistics and learning see
//! quantized inputs.
//!
//! A resumed run takes finished layers from the output. It reads them back only if a later layer needs their states,
//! and so computes the same statistics and the same bytes.

mod drift;
mod fisher;
mod learning;
mod needs;

use std::collections::{BTreeMap, BTreeSet};

use mantissa_methods::method::{InputSolver, InputTask, Prepared, SolveInput, Solver, WeightTask, Work};
use mantissa_model::{InputQuantizer, LinearInfo, LinearInput, LinearKind};
use mantissa_num::minifloat::F16;
use mantissa_num::stored::Map;
use mantissa_num::{Scheme, TensorError};
use mantissa_store::convention::{ModelFiles, Weight};

use crate::calibrate::{CalibrateError, CalibratedLayer, Calibration, Tick};
use crate::error::{QuantError, Result};
use crate::error_gate::{Case, ErrorGate};
use crate::exl2;
use crate::fold::Folded;
use crate::gptq::{Drift, GptqError, Hessian};
use crate::input_scales::{self, InputScales};
use crate::metric::Metric;
use crate::plan::{MethodId, Plan};
use crate::rounding::{method_error, round_to_nearest, whole};
use crate::source::{DenseTensor, Scratch};
use crate::units;
use mantissa_methods::{Method, Solved};

pub(crate) use fisher::{BATCH_TOKENS, options as learning_options, options_of as learning_options_of};
pub(crate) use fisher::{metrics_buffers, metrics_bytes, outputs_bytes};
pub(crate) use learning::ToLearn;
pub(crate) use needs::{needs_drift, reads_last, uses_drift};

pub(crate) struct Sequential<'a> {
    plan: &'a Plan,
    source: &'a Folded<'a>,
    /// Opens the output as far as it is written.
    stored: Box<dyn Fn() -> Result<ModelFiles> + 'a>,
    /// Modules to read back from the output.
    recovered: BTreeSet<String>,
    /// Calibration states, started at the first layer that is not finished.
    calibration: Option<Calibration<'a>>,
    /// States of the held-out windows, if there are any, at the same layer.
    held_out: Option<Calibration<'a>>,
    layer: Option<CalibratedLayer>,
    /// Solvers of the current layer.
    solvers: Vec<(Readers, Solver)>,
    /// Comparisons with RTN of the current layer.
    judges: Vec<(Readers, ErrorGate)>,
    /// Unquantized model, for methods that need the drift from it.
    original: Original<'a>,
    /// State of methods that learn a whole decoder layer.
    learning: Learning<'a>,
    /// Stored scales of inputs.
    input_scales: Option<InputScales>,
    /// Output factors of the Fisher information by module, once computed; empty if the method does not need them.
    outputs: Option<BTreeMap<String, Hessian>>,
}

/// Unquantized model, at the same layer as the quantized one.
#[derive(Default)]
struct Original<'a> {
    /// States of its windows; `None` if the method does not need the drift.
    states: Option<Calibration<'a>>,
    /// Layer after these states.
    layer: Option<CalibratedLayer>,
}

/// State of methods that learn, in addition to the state of all methods that calibrate.
#[derive(Default)]
struct Learning<'a> {
    /// Windows in the unquantized model.
    reference: Option<Calibration<'a>>,
    /// Held-out windows in the unquantized model.
    unseen: Option<Calibration<'a>>,
    /// Fisher information of each layer's output.
    metrics: Option<Vec<Option<Metric>>>,
    /// Results of the current layer, by module.
    solved: BTreeMap<String, Solved>,
}

/// Hessian of an input, and its drift from the unquantized model.
type Moments = (Hessian, Option<Drift>);

/// Input of a layer, and the number of the method of the weights that read it.
type Readers = (LinearInput, MethodId);

/// Number of expert inputs whose statistics are collected in one pass.
pub(crate) const EXPERTS_AT_ONCE: usize = 8;

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
            held_out: None,
            layer: None,
            solvers: Vec::new(),
            judges: Vec::new(),
            original: Original::default(),
            learning: Learning::default(),
            input_scales: None,
            outputs: None,
        }
    }

    /// Sets the stored scales of inputs, so that finished layers quantize their inputs as at run time.
    pub(crate) fn scale_inputs(&mut self, scales: Option<&InputScales>) {
        if self.input_scales.is_none() {
            self.input_scales = scales.cloned();
        }
    }

    /// Returns the quantizers of the inputs of layer `index`.
    fn quantizers(&self, index: usize) -> BTreeMap<LinearInput, InputQuantizer> {
        let of_layer = self.plan.quantized().map(|(info, _)| info).filter(|info| info.layer == index);
        let scheme = self.plan.activations.as_ref();
        scheme.map_or_else(BTreeMap::new, |scheme| {
            input_scales::quantizers(scheme, self.input_scales.as_ref(), of_layer)
        })
    }

    /// Registers a weight that is already in the output.
    pub(crate) fn recovered(&mut self, info: &LinearInfo) -> Result<()> {
        match self.layer.as_mut().filter(|layer| layer.index() == info.layer) {
            Some(layer) => put_back(&(self.stored)()?, info, layer)?,
            None => drop(self.recovered.insert(info.module.clone())),
        }
        Ok(())
    }

    /// Registers the solution of a weight that another worker found.
    pub(crate) fn given(&mut self, info: &LinearInfo, solved: &Solved) -> Result<()> {
        match self.layer.as_ref().filter(|layer| layer.index() == info.layer) {
            Some(_) => self.put_solved(info, solved),
            None => {
                self.recovered.insert(info.module.clone());
                Ok(())
            }
        }
    }

    /// Runs the windows to the input of the layer of `info`, and unless its weights are `learned` together, collects the
    /// statistics of what `info` reads.
    pub(crate) fn begin(&mut self, info: &LinearInfo, learned: bool, tick: &mut Tick<'_>) -> Result<()> {
        if learned {
            return self.reach(info.layer, tick);
        }
        self.find_outputs(tick)?;
        self.reach(info.layer, tick)?;
        self.prepare(info, tick)
    }

    /// Quantizes a weight that is not yet in the output.
    pub(crate) fn quantize(
        &mut self,
        info: &LinearInfo,
        scheme: &Scheme,
        w: &DenseTensor<'_>,
        outer: Option<f32>,
        tick: &mut Tick<'_>,
    ) -> Result<Solved> {
        self.find_outputs(tick)?;
        self.reach(info.layer, tick)?;
        self.prepare(info, tick)?;
        let readers = self.readers(info);
        let target = self.target(info, w)?;
        let solved = match self.solvers.iter().find(|(of, _)| *of == readers).map(|(_, solver)| solver) {
            Some(Solver::Ready(solver)) => {
                self.solve(&**solver, (info, scheme, outer), w, target.as_deref())?
            }
            Some(Solver::RoundToNearest(why)) => Solved {
                fallback: Some(why.clone()),
                ..round_to_nearest(self.plan, self.source, info, scheme, w, outer)?
            },
            None => round_to_nearest(self.plan, self.source, info, scheme, w, outer)?,
        };
        self.judge((info, scheme, outer), w, target.as_deref(), solved, tick)
    }

    /// Compares a solution with RTN and puts the better one in place of the weight. `target` is the weight to
    /// approximate if it is not `w` ([`target`](Self::target)).
    pub(crate) fn judge(
        &mut self,
        (info, scheme, outer): (&LinearInfo, &Scheme, Option<f32>),
        w: &DenseTensor<'_>,
        target: Option<&[f32]>,
        solved: Solved,
        tick: &mut Tick<'_>,
    ) -> Result<Solved> {
        self.reach(info.layer, tick)?;
        self.prepare(info, tick)?;
        let readers = self.readers(info);
        let case = Case { plan: self.plan, source: self.source, info, scheme, w, outer, target };
        let solved = match self.judges.iter().find(|(of, _)| *of == readers) {
            Some((_, judge)) => case.better(judge, solved)?,
            None => solved,
        };
        self.put_solved(info, &solved)?;
        Ok(solved)
    }

    /// Puts a weight that is rounded to nearest in place, if a later layer is calibrated.
    pub(crate) fn place(&mut self, info: &LinearInfo, solved: &Solved, tick: &mut Tick<'_>) -> Result<()> {
        if !self.plan.solves_after(info) {
            return Ok(());
        }
        self.reach(info.layer, tick)?;
        self.put_solved(info, solved)
    }

    /// Puts a solved weight in place of the source's.
    fn put_solved(&mut self, info: &LinearInfo, solved: &Solved) -> Result<()> {
        let Some(layer) = &mut self.layer else { return Ok(()) };
        let values = solved.values().map(|values| match self.plan.columns_of(info) {
            Some(columns) => columns.columns_to_hf(&values, info.cols),
            None => values,
        });
        put(layer, info.kind, dequantized(self.source.files(), info, values)?)
    }

    /// Returns the key of the solver of a weight.
    fn readers(&self, info: &LinearInfo) -> Readers {
        (info.kind.input(), self.plan.method_id(info))
    }

    /// Solves one weight with the solver of its input.
    fn solve(
        &self,
        solver: &dyn InputSolver,
        (info, scheme, outer): (&LinearInfo, &Scheme, Option<f32>),
        w: &DenseTensor<'_>,
        target: Option<&[f32]>,
    ) -> Result<Solved> {
        let mut scratch = Scratch::default();
        let w = whole(self.source, info, w, &mut scratch)?;
        let LinearInfo { rows, cols, .. } = *info;
        let threads = self.plan.options.threads;
        let searched = |target: &[f32], diagonal: &[f64]| {
            let scheme = exl2::with_f16_scales(scheme);
            let scales = exl2::searched_scales(&scheme, target, (rows, cols), diagonal, threads)?;
            Some((scheme, scales))
        };
        let linears = self.plan.config.layer_linears(info.layer);
        let place = linears.iter().position(|linear| linear.module == info.module);
        let task = WeightTask {
            scheme,
            rows,
            cols,
            w,
            target: target.unwrap_or(w),
            outer,
            outputs: self.outputs.as_ref().and_then(|all| all.get(&info.module)),
            scales: self.plan.container.facts().square_scales.then_some(&searched),
            place: (info.layer, place.unwrap_or(0)),
            threads,
        };
        solver.solve(&task).map_err(|error| method_error(self.source, &info.module, error))
    }

    /// Runs the windows to the input of layer `target`, through the quantized layers before it.
    fn reach(&mut self, target: usize, tick: &mut Tick<'_>) -> Result<()> {
        if self.layer.is_none() {
            self.go_to(target)?;
        }
        while self.layer.as_ref().is_none_or(|layer| layer.index() < target) {
            if let Some(done) = self.layer.take() {
                self.solvers.clear();
                self.judges.clear();
                self.calibration()?.advance(&done, tick)?;
                self.held_out.as_mut().map_or(Ok(()), |unseen| unseen.advance(&done, tick))?;
            }
            let Some(layer) = self.next_layer()? else { break };
            let plan = self.plan;
            let of_layer = plan.quantized().map(|(info, _)| info).filter(|info| info.layer == layer.index());
            let stored: Vec<_> = of_layer.filter(|info| self.recovered.remove(&info.module)).collect();
            self.layer = Some(layer);
            self.put_finished(stored)?;
        }
        Ok(())
    }

    /// Takes the states that other workers have computed up to layer `target`, as far as all windows have them.
    fn go_to(&mut self, target: usize) -> Result<()> {
        self.calibration()?;
        let all = || [&self.calibration, &self.held_out, &self.original.states].into_iter().flatten();
        let Some(layer) = all().map(|windows| windows.found(target)).min() else { return Ok(()) };
        let own = [&mut self.calibration, &mut self.held_out, &mut self.original.states];
        let mut complete = true;
        for windows in own.into_iter().flatten() {
            complete &= windows.go_to(layer)?;
        }
        // States that are gone meanwhile are computed again, from the start.
        if !complete {
            (self.calibration, self.held_out, self.original) = (None, None, Original::default());
            self.calibration()?;
        }
        Ok(())
    }

    /// Puts weights of the present layer that another worker solved, or an earlier run stored, in place of the source's.
    fn put_finished(&mut self, mut weights: Vec<&LinearInfo>) -> Result<()> {
        let plan = self.plan;
        let mut stored = Vec::new();
        for info in weights.drain(..) {
            match units::solution(plan, info)? {
                Some(solved) => self.put_solved(info, &solved)?,
                None => stored.push(info),
            }
        }
        let Some(layer) = self.layer.as_mut().filter(|_| !stored.is_empty()) else { return Ok(()) };
        let files = (self.stored)()?;
        stored.into_iter().try_for_each(|info| put_back(&files, info, layer))
    }

    /// Loads the source's layer after the windows' present states.
    fn next_layer(&mut self) -> Result<Option<CalibratedLayer>> {
        let Some(mut layer) = self.calibration()?.next_layer()? else { return Ok(None) };
        layer.quantize_inputs(self.quantizers(layer.index()));
        Ok(Some(layer))
    }

    fn calibration(&mut self) -> Result<&mut Calibration<'a>> {
        if self.calibration.is_none() {
            let windows = self.plan.options.calibration.as_ref().map_or(&[][..], |set| &set.windows);
            let (source, config) = (self.source, &self.plan.config);
            let (limits, products) = (self.plan.limits(), self.plan.options.products);
            // Methods that learn a layer make only one pass before all its weights change; kept states would be
            // useless.
            let learns =
                |(info, _): (&LinearInfo, _)| matches!(self.plan.work_on(info), Some(Work::Layer(_)));
            let keeps = !self.plan.quantized().all(learns);
            let begin = |windows| {
                let begun = Calibration::begin(source, config, windows, limits)?.in_products(products);
                Ok::<_, CalibrateError>(if keeps { begun.keeping() } else { begun })
            };
            let (team, container) = (&self.plan.options.team, self.plan.container.name());
            let role = |what: &str| format!("{container}: {what}");
            let begun = begin(windows)?;
            if needs_drift(self.plan) {
                self.original.states = Some(begun.twin()?.shared_by(team, role("unquantized model")));
            }
            self.calibration = Some(begun.shared_by(team, role("calibration")));
            let unseen = &self.plan.options.held_out;
            if !unseen.is_empty() {
                self.held_out = Some(begin(unseen)?.shared_by(team, role("held-out windows")));
            }
        }
        self.calibration.as_mut().ok_or(QuantError::Calibrate(CalibrateError::Empty))
    }

    /// True if the solver of a weight, or its judge, exists.
    fn is_prepared(&self, info: &LinearInfo) -> bool {
        let (readers, judged) = (self.readers(info), self.judges.iter().map(|(of, _)| of));
        judged.chain(self.solvers.iter().map(|(of, _)| of)).any(|of| *of == readers)
    }

    /// Creates the solvers of the weights that read the input of `info`, and their comparisons with RTN, unless they
    /// exist.
    fn prepare(&mut self, info: &LinearInfo, tick: &mut Tick<'_>) -> Result<()> {
        if self.is_prepared(info) {
            return Ok(());
        }
        self.solvers.clear();
        self.judges.clear();
        let Some(layer) = self.layer.take() else { return Ok(()) };
        let inputs = self.together(layer.index(), info.kind.input());
        let moments = self.moments(&layer, &inputs, tick);
        let unseen = self.held_out.as_mut().map(|unseen| unseen.statistics(&layer, &inputs, tick));
        let index = layer.index();
        self.layer = Some(layer);
        let unseen = unseen.transpose()?.into_iter().flatten().map(Some).chain(std::iter::repeat(None));
        for ((input, moments), unseen) in inputs.into_iter().zip(moments?).zip(unseen) {
            let (moments, unseen) = self.in_order_of_columns(index, input, moments, unseen)?;
            self.prepare_methods((index, input), moments, unseen)?;
        }
        Ok(())
    }

    /// Creates the solver and the comparison of each method of the weights that read `input` of layer `index`.
    fn prepare_methods(
        &mut self,
        (index, input): (usize, LinearInput),
        (hessian, drift): Moments,
        unseen: Option<Hessian>,
    ) -> Result<()> {
        let plan = self.plan;
        let mut ids: Vec<MethodId> = plan.solved_on(index, input).map(|info| plan.method_id(info)).collect();
        ids.sort_unstable();
        ids.dedup();
        let mut statistics = Some((hessian, drift, unseen));
        for (at, &id) in ids.iter().enumerate() {
            // Methods that share an input start from the same statistics; the last one takes them.
            let own = if at + 1 == ids.len() { statistics.take() } else { statistics.clone() };
            let Some((hessian, drift, unseen)) = own else { break };
            let moments = match plan.method_numbered(id).map(Method::work) {
                Some(Work::Input(method)) => {
                    let drift = drift.filter(|_| plan.method_numbered(id).is_some_and(|m| m.needs().drift));
                    let Prepared { solver, moments } = self.solver(method, (hessian, drift), index, input)?;
                    self.solvers.push(((input, id), solver));
                    moments
                }
                _ => Some(hessian),
            };
            self.judges.extend(moments.map(|hessian| ((input, id), ErrorGate::new(hessian, unseen))));
        }
        Ok(())
    }

    /// Moves the moments of an input to the order in which the weights that read it are stored.
    fn in_order_of_columns(
        &self,
        layer: usize,
        input: LinearInput,
        (hessian, drift): Moments,
        unseen: Option<Hessian>,
    ) -> Result<(Moments, Option<Hessian>)> {
        let Some(columns) = self.plan.columns_of_input(layer, input) else {
            return Ok(((hessian, drift), unseen));
        };
        let maps = [Map::Perm(columns.places(hessian.cols()))];
        let mapped = || {
            let drift = drift.map(|drift| drift.mapped(&maps)).transpose()?;
            let unseen = unseen.map(|unseen| unseen.mapped(&maps)).transpose()?;
            Ok(((hessian.mapped(&maps)?, drift), unseen))
        };
        mapped().map_err(|error: GptqError| {
            let place = format!("input of {}", self.plan.config.readers_of(layer, input));
            method_error(self.source, &place, error.into())
        })
    }

    fn solver(
        &self,
        method: &dyn SolveInput,
        (hessian, drift): Moments,
        layer: usize,
        input: LinearInput,
    ) -> Result<Prepared> {
        let config = &self.plan.config;
        let place = config.layer_linears(layer).iter().position(|linear| linear.kind.input() == input);
        let place = (layer, place.unwrap_or(0));
        let task = InputTask { hessian, drift, place, threads: self.plan.options.threads };
        method.prepare(task).map_err(|error| {
            method_error(self.source, &format!("input of {}", config.readers_of(layer, input)), error)
        })
    }

    /// Returns the inputs whose statistics are collected together with `input`, in the order of the plan. For
    /// experts these are the next [`EXPERTS_AT_ONCE`] of the same kind, which do not change each other.
    pub(crate) fn together(&self, layer: usize, input: LinearInput) -> Vec<LinearInput> {
        let experts = std::mem::discriminant(&input);
        if !matches!(input, LinearInput::Expert(_) | LinearInput::ExpertDown(_)) {
            return vec![input];
        }
        let of_layer = self.plan.quantized().map(|(info, _)| info).filter(|info| info.layer == layer);
        let solved = of_layer.filter(|info| self.plan.solves(info));
        let mut inputs: Vec<_> = solved.map(|info| info.kind.input()).collect();
        inputs.retain(|next| std::mem::discriminant(next) == experts && *next >= input);
        inputs.dedup();
        inputs.truncate(EXPERTS_AT_ONCE);
        inputs
    }
}

/// Reads a stored weight back and puts it in place.
fn put_back(files: &ModelFiles, info: &LinearInfo, layer: &mut CalibratedLayer) -> Result<()> {
    let mut linear = files.linear(&info.module, info.rows, info.cols, false)?;
    let weight = match linear.weight {
        Weight::Quantized(q) => {
            let values = q.dequantize().map(|mut values| {
                // A rotation of the input stays with the layer; the other transforms are folded into the values.
                linear.transforms.before.retain(|map| !matches!(map, Map::Hadamard(_)));
                linear.transforms.fold(&mut values, info.rows, info.cols);
                values
            });
            dequantized(files, info, values)?
        }
        // Values of a trellis between rotations that belong to the weight.
        Weight::F16(values) if !linear.transforms.is_empty() => {
            let mut values: Vec<f32> = values.into_iter().map(|v| F16.decode(v.into())).collect();
            linear.transforms.fold(&mut values, info.rows, info.cols);
            Weight::F32(values)
        }
        weight => weight,
    };
    put(layer, info.kind, weight)
}

/// Wraps values as f32, so that stored and computed weights go through the same loops.
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
