//! End-to-end training of scales, offsets and norms after the method (E2E-QP of EfficientQAT: Chen et al. 2024,
//! arXiv:2407.11062, section 3.3; the parametrization is `mantissa_train::Tuner`). Codes stay.
//!
//! The loss is the KL divergence from the unquantized model's predictions on the calibration windows (the paper: the
//! likelihood of the text). One window in sixteen is held out, or the windows of `--hold-out`: after every epoch the loss
//! is measured on them, and the best values are stored. If none is better than the start, the weights stay as they
//! are. The whole model is in memory, with gradients and the activations of a batch.

use std::collections::BTreeMap;
use std::ops::ControlFlow;

use mantissa_methods::e2e::{EndToEnd, With};
use mantissa_methods::reconstruction::shuffled;
use mantissa_model::{Batch, InputQuantizer, LinearInfo, ModelConfig, Role, linear_weight};
use mantissa_num::stored::Map;
use mantissa_num::{Codes, Quantized, Scheme, StaticScale};
use mantissa_store::Dtype;
use mantissa_store::convention::{
    ActivationQuant, LinearPlan, LinearWeight, ModelFiles, SideTensors, Weight,
};
use mantissa_train::{Coded, Dense, Policy, Precision, TeacherHead, TrainError, TrainModel, Tuner};

use crate::calibrate::{Calibration, CalibrationSet, States, check_tick};
use crate::error::{QuantError, Result};
use crate::error_stats::{ErrorReport, ErrorStats};
use crate::fold::{Folded, round_to};
use crate::plan::{Plan, Use};
use crate::source::{DenseTensor, Scratch};
use crate::spin::{teacher, windows_of_batch};

/// Period of held-out windows: the last of each 16 is held out.
const HELD_OUT: usize = 16;

/// Result of the training.
pub(crate) struct Tuned {
    /// Changed tensors with their bytes.
    pub(crate) tensors: BTreeMap<String, Vec<u8>>,
    /// New error figures of the weights, by module.
    pub(crate) errors: BTreeMap<String, ErrorReport>,
    /// KL divergence on the held-out windows, in nats per token: before and after.
    pub(crate) kl: [f64; 2],
    /// Modules whose scales were not trained.
    pub(crate) fixed: Vec<String>,
}

/// Trains the quantized model `stored`, made from `source` with the changes of `folded`, as `plan` says. `tick` gets
/// the name of the next step; `Break` interrupts the run.
///
/// # Errors
/// [`QuantError::EndToEnd`] for architectures without a backward pass; errors of [`Calibration`] and of reading.
pub(crate) fn tune(
    plan: &Plan,
    options: EndToEnd,
    (source, folded, stored): (&ModelFiles, &Folded<'_>, &ModelFiles),
    tick: &mut dyn FnMut(&str) -> ControlFlow<()>,
) -> Result<Tuned> {
    let windows = Windows::new(plan, options)?;
    let states = teacher(plan, source, &windows.set, &mut || tick("original model"))?;
    let head = TeacherHead::load(source, &plan.config).map_err(|error| fault(source, error))?;
    let mut run = Run::new(plan, options, (source, folded, stored), &windows)?;
    let held_out = |run: &mut Run<'_>| run.loss(&windows, &states, &head);
    let before = held_out(&mut run)?;
    let (mut best, mut values) = (before, run.tuner.values().to_vec());
    for epoch in 0..options.epochs {
        for step in 0..windows.steps() {
            let name =
                format!("epoch {} of {}, step {step} of {}", epoch + 1, options.epochs, windows.steps());
            check_tick(&mut || tick(&name))?;
            let rate = rate(options, epoch * windows.steps() + step, options.epochs * windows.steps());
            run.step(&windows.of_step(epoch, step, options.seed), &windows, (&states, &head), rate)?;
        }
        let loss = held_out(&mut run)?;
        // False also if the loss is NaN.
        if loss < best {
            best = loss;
            values.copy_from_slice(run.tuner.values());
        }
    }
    run.tuner.set_values(&values);
    run.finish(folded, stored, [before, best])
}

/// Rate of a step: half a cosine from the first to 0.
fn rate(options: EndToEnd, step: usize, steps: usize) -> f32 {
    let done = step as f64 / steps.max(1) as f64;
    options.rate * (0.5 * (1.0 + (std::f64::consts::PI * done).cos())) as f32
}

/// Returns the calibration windows, followed by the held-out ones if they are given.
pub(crate) fn windows(plan: &Plan, set: &CalibrationSet) -> CalibrationSet {
    let mut all = set.clone();
    all.windows.extend(plan.held_out().into_iter().flat_map(|given| given.windows));
    all
}

/// Windows to learn on and to judge on.
struct Windows {
    set: CalibrationSet,
    learned: Vec<usize>,
    held_out: Vec<usize>,
    /// Windows per batch.
    batch: usize,
}

impl Windows {
    fn new(plan: &Plan, options: EndToEnd) -> Result<Self> {
        let no_text = || QuantError::NoCalibration { recipe: plan.job.name() };
        let set = plan.text_for(Use::Tune).ok_or_else(no_text)?;
        let (all, count) = (windows(plan, set), set.windows.len());
        let (held_out, learned): (Vec<usize>, Vec<usize>) = match all.windows.len() > count {
            true => ((count..all.windows.len()).collect(), (0..count).collect()),
            false => (0..count).partition(|window| window % HELD_OUT == HELD_OUT - 1),
        };
        // A set of fewer than 16 windows is used both to learn and to judge.
        let held_out = if held_out.is_empty() { (0..count).collect() } else { held_out };
        let batch = windows_of_batch(&all, options.batch_tokens);
        Ok(Windows { set: all, learned, held_out, batch })
    }

    /// Number of steps of an epoch.
    fn steps(&self) -> usize {
        self.learned.len().div_ceil(self.batch)
    }

    fn of_step(&self, epoch: usize, step: usize, seed: u64) -> Vec<usize> {
        let order = shuffled(self.learned.len(), seed, epoch as u64);
        let span = step * self.batch..((step + 1) * self.batch).min(order.len());
        order[span].iter().map(|&at| self.learned[at]).collect()
    }

    /// Returns tokens and lengths of some windows, and the original model's last states.
    fn batch(&self, states: &States, windows: &[usize]) -> Result<(Vec<u32>, Vec<usize>, Vec<f32>)> {
        let (mut tokens, mut lens, mut all) = (Vec::new(), Vec::new(), Vec::new());
        for &window in windows {
            tokens.extend_from_slice(&self.set.windows[window]);
            lens.push(self.set.windows[window].len());
            states.append_to(window, &mut all)?;
        }
        Ok((tokens, lens, all))
    }
}

/// Trained weight with its plan and stored form at the start.
struct Start<'a> {
    info: &'a LinearInfo,
    scheme: &'a Scheme,
    quantized: Quantized,
    input_scale: Option<StaticScale>,
}

/// State of the training.
struct Run<'a> {
    plan: &'a Plan,
    source: &'a ModelFiles,
    tuner: Tuner,
    /// Trained weights, by the name of the dense tensor.
    weights: BTreeMap<String, Start<'a>>,
    fixed: Vec<String>,
}

impl<'a> Run<'a> {
    fn new(
        plan: &'a Plan,
        options: EndToEnd,
        (source, folded, stored): (&'a ModelFiles, &Folded<'_>, &ModelFiles),
        windows: &Windows,
    ) -> Result<Self> {
        let training = training_options(plan, &windows.set, options);
        let mut model = TrainModel::load(folded, training).map_err(|error| fault(source, error))?;
        let (mut weights, mut coded, mut fixed) = (BTreeMap::new(), Vec::new(), Vec::new());
        for (info, scheme) in plan.quantized().chain(plan.quantized_tables()) {
            let linear = linear_weight(stored, &LinearInfo { bias: false, ..info.clone() })?;
            let name = info.dense_tensor().0;
            let input_scale = linear.input.as_ref().and_then(ActivationQuant::stored);
            if let Some(input) = linear.input.as_ref().filter(|_| plan.activations.is_some()) {
                let quantizer = InputQuantizer::new(&info.module, input)?;
                let input = info.kind.input();
                model
                    .quantize_input(info.layer, input, quantizer, None)
                    .map_err(|error| fault(source, error))?;
            }
            match codes(&name, scheme, &linear)
                .filter(|_| !plan.quantized_tables().any(|(table, _)| table.module == info.module))
            {
                Some(found) => {
                    let quantized = found.quantized.clone();
                    weights.insert(name, Start { info, scheme, quantized, input_scale });
                    coded.push(found);
                }
                None => {
                    fixed.push(info.module.clone());
                    put(&mut model, &name, &values(&linear));
                }
            }
        }
        let (tuner, untrained) = Tuner::new(model, coded, plain(plan, options));
        for name in untrained {
            fixed.extend(weights.remove(&name).map(|start| start.info.module.clone()));
        }
        Ok(Run { plan, source, tuner, weights, fixed })
    }

    /// Returns the KL divergence on the held-out windows, in nats per token.
    fn loss(&mut self, windows: &Windows, states: &States, head: &TeacherHead) -> Result<f64> {
        let (mut sum, mut count) = (0.0, 0);
        for held_out in windows.held_out.chunks(windows.batch) {
            let (tokens, lens, states) = windows.batch(states, held_out)?;
            let batch = Batch { tokens: &tokens, lens: &lens };
            let model = self.tuner.model_mut();
            sum += model.divergence_from(head, &batch, &states).map_err(|error| fault(self.source, error))?;
            count += tokens.len();
        }
        Ok(sum / count.max(1) as f64)
    }

    fn step(
        &mut self,
        of_step: &[usize],
        windows: &Windows,
        (states, head): (&States, &TeacherHead),
        rate: f32,
    ) -> Result<()> {
        let (tokens, lens, states) = windows.batch(states, of_step)?;
        let batch = Batch { tokens: &tokens, lens: &lens };
        let model = self.tuner.model_mut();
        model.zero_gradients();
        let scale = 1.0 / tokens.len().max(1) as f32;
        model.distill_from(head, &batch, &states, scale).map_err(|error| fault(self.source, error))?;
        self.tuner.step(rate);
        Ok(())
    }

    /// Returns the tensors that differ from the stored ones, and the errors of the weights.
    fn finish(self, folded: &Folded<'_>, stored: &ModelFiles, kl: [f64; 2]) -> Result<Tuned> {
        let (mut tensors, mut errors) = (BTreeMap::new(), BTreeMap::new());
        for (name, quantized) in self.tuner.weights() {
            let Some(start) = self.weights.get(name) else { continue };
            let packed = |q: &Quantized| {
                let plan = LinearPlan {
                    input_scale: start.input_scale,
                    ..self.plan.linear_plan(start.info, start.scheme)
                };
                self.plan.container.tensors(&plan, q, SideTensors::Nothing).map_err(|error| {
                    let expected = "a scheme that the format holds";
                    mantissa_store::Error::field(
                        self.source.dir(),
                        &start.info.module,
                        error.to_string(),
                        expected,
                        "",
                    )
                })
            };
            let old: BTreeMap<_, _> = packed(&start.quantized)?.into_iter().collect();
            let changed = packed(quantized)?.into_iter().filter(|(name, bytes)| old.get(name) != Some(bytes));
            tensors.extend(changed);
            let mut scratch = Scratch::default();
            let (info, w) = (start.info, DenseTensor::of_linear(folded, start.info)?);
            let w = crate::rounding::whole(folded, info, &w, &mut scratch)?;
            let parameters = self.tuner.parameters();
            let range = parameters.table().by_name(name).map(|param| param.range.clone()).unwrap_or_default();
            let stats = ErrorStats::of_rows(w, &parameters.values()[range], info.cols);
            errors.insert(info.module.clone(), stats.report());
        }
        for (name, values) in self.tuner.plain() {
            let Some(meta) = stored.checkpoint().get(name) else { continue };
            let bytes = values.iter().flat_map(|value| round_to(*value, meta.dtype)).collect();
            tensors.insert(name.to_owned(), bytes);
        }
        Ok(Tuned { tensors, errors, kl, fixed: self.fixed })
    }
}

/// Returns the codes of a weight whose scales can be trained: no other column order, no outliers beside the codes.
fn codes(name: &str, scheme: &Scheme, linear: &LinearWeight) -> Option<Coded> {
    let name = name.to_owned();
    let (rows, cols) = (linear.rows, linear.cols);
    match &linear.weight {
        Weight::Quantized(q) if linear.transforms.is_empty() => {
            Some(Coded { name, quantized: q.clone(), inner: None })
        }
        Weight::F16(_) if scheme.format.trellis().is_some() => {
            // The reader returns a trellis as values between two rotations, each with a diagonal.
            let mut transforms = linear.transforms.clone();
            let diagonals =
                transforms.before.iter_mut().chain(&mut transforms.after).filter_map(|map| match map {
                    Map::Diag(diagonal) => Some(diagonal),
                    _ => None,
                });
            let mut scales = Vec::with_capacity(rows + cols);
            for diagonal in diagonals {
                scales.extend(
                    diagonal
                        .iter()
                        .map(|scale| mantissa_num::minifloat::F16.encode_saturating(*scale) as u16),
                );
                diagonal.fill(1.0);
            }
            let mut inner = dense(&linear.weight);
            transforms.fold(&mut inner, rows, cols);
            let bytes = scheme.format.trellis().map_or(0, |trellis| trellis.code_bytes(rows, cols));
            let quantized = Quantized {
                codes: Codes::Packed(vec![0; bytes]),
                scales: Codes::U16(scales).into(),
                ..Quantized::empty(scheme.format.clone(), rows, cols)
            };
            Some(Coded { name, quantized, inner: Some(inner) })
        }
        _ => None,
    }
}

/// Returns a weight as values `[rows, cols]`, without its side tensors.
fn dense(weight: &Weight) -> Vec<f32> {
    match weight {
        Weight::F32(values) => values.clone(),
        Weight::Bf16(bits) => bits.iter().map(|bits| f32::from_bits(u32::from(*bits) << 16)).collect(),
        Weight::F16(bits) => {
            bits.iter().map(|bits| mantissa_num::minifloat::F16.decode((*bits).into())).collect()
        }
        Weight::Quantized(q) => q.dequantize().unwrap_or_default(),
    }
}

/// Returns the effective weight of a layer.
fn values(linear: &LinearWeight) -> Vec<f32> {
    let mut values = dense(&linear.weight);
    linear.transforms.fold(&mut values, linear.rows, linear.cols);
    values
}

/// Replaces a parameter of the model.
fn put(model: &mut TrainModel, name: &str, values: &[f32]) {
    let range = model.parameters().table().by_name(name).map(|param| param.range.clone());
    if let Some(range) = range.filter(|range| range.len() == values.len()) {
        model.parameters_mut().set(range.start, values);
    }
}

/// Returns the unquantized parameters to train.
fn plain(plan: &Plan, options: EndToEnd) -> Vec<Dense> {
    let stored = |name: &str| {
        plan.specs.iter().find(|spec| spec.name == name).and_then(|spec| precision_of(spec.dtype))
    };
    let of = |role: &Role| match options.with {
        With::Nothing => false,
        With::Norms => matches!(role, Role::Norm { .. } | Role::NormBias { .. }),
        With::Tables => {
            matches!(role, Role::Norm { .. } | Role::NormBias { .. } | Role::Embedding | Role::Head)
        }
    };
    let tensors = plan.config.tensors().into_iter().filter(|tensor| of(&tensor.role));
    tensors
        .filter_map(|tensor| Some(Dense { stored: stored(&tensor.name)?, name: tensor.name, rate: 1.0 }))
        .collect()
}

/// Returns the float format of a dtype that training can round to; `None` for others.
fn precision_of(dtype: Dtype) -> Option<Precision> {
    match dtype {
        Dtype::F32 => Some(Precision::F32),
        Dtype::BF16 => Some(Precision::Bf16),
        Dtype::F16 => Some(Precision::F16),
        _ => None,
    }
}

/// Returns the trainer's options.
fn training_options(plan: &Plan, set: &CalibrationSet, options: EndToEnd) -> mantissa_train::Options {
    mantissa_train::Options {
        max_tokens: windows_of_batch(set, options.batch_tokens).saturating_mul(set.longest()),
        max_len: set.longest(),
        threads: plan.threads(),
        policy: Policy::fp32(),
    }
}

/// Checks that the architecture has a backward pass.
///
/// # Errors
/// [`QuantError::EndToEnd`].
pub(crate) fn check(source: &ModelFiles, config: &ModelConfig) -> Result<()> {
    let whole = TrainModel::check_config(config);
    whole.and_then(|()| mantissa_train::LayerTrainer::check(config)).map_err(|error| fault(source, error))
}

fn fault(source: &ModelFiles, error: TrainError) -> QuantError {
    QuantError::EndToEnd { path: source.dir().to_owned(), error: Box::new(error) }
}

/// Returns the buffers of the training with their bytes.
pub(crate) fn buffers(plan: &Plan, set: &CalibrationSet, options: EndToEnd) -> Vec<(&'static str, u64)> {
    let config = &plan.config;
    let training = training_options(plan, set, options);
    let tokens = training.max_tokens as u64;
    let mut scales = 0u64;
    let mut codes = 0;
    for (info, scheme) in plan.quantized() {
        let weights = (info.rows * info.cols) as u64;
        let trellis = scheme.format.trellis().is_some();
        let blocks = scheme.format.blocks().count(info.rows, info.cols) as u64;
        scales += if trellis {
            (info.rows + info.cols) as u64
        } else {
            blocks * if scheme.format.has_bias() { 2 } else { 1 }
        };
        // Codes, and the codes at the start; the inner values of a trellis.
        codes += if trellis { 4 * weights + 2 * plan.bits(info, scheme) / 8 } else { 2 * weights };
    }
    let largest =
        config.tensors().into_iter().map(|t| t.shape.iter().product::<usize>() as u64).max().unwrap_or(0);
    let inputs: u64 = plan.quantized().map(|(info, _)| info.cols as u64).sum();
    vec![
        ("states of the calibration", Calibration::state_bytes(config, set, plan.limits().states)),
        ("model in training and its activations", mantissa_train::MemoryPlan::new(config, &training).bytes()),
        ("codes", codes),
        // Stored, at the start, units, sums, values, gradients, two means, and the best.
        ("scales and their training", 48 * scales),
        ("quantized inputs", if plan.activations.is_some() { 4 * tokens * inputs } else { 0 }),
        ("head of the original model", TeacherHead::bytes(config)),
        (
            "states and predictions of the original model",
            8 * tokens * config.hidden_size as u64 + 4 * 512 * config.vocab_size as u64,
        ),
        ("tensor being read", 12 * largest),
    ]
}
