//! SpinQuant (Liu et al. 2024, "SpinQuant: LLM Quantization with Learned Rotations", arXiv:2405.16406, section 3):
//! learns QuaRot's rotations of the residual stream (R1) and of the values within each head (R2). It starts at the
//! randomized Hadamard matrices and descends on the orthogonal matrices (`orthogonal.rs`).
//!
//! The loss is computed on the complete folded model. Inputs of linear layers are quantized as the recipe says; weights
//! stay unquantized, because a later method quantizes them. If the recipe leaves inputs unquantized, weights are
//! quantized by RTN instead. The online rotation of the down projection's input is not learned. Its quantization error
//! does not depend on the other rotations, so this input stays unquantized.
//!
//! Four differences from the paper:
//! * The gradient may go through the quantization ranges ([`Gradient`]). The error of a block is proportional to its
//!   amax, which a rotation changes (derivative: Esser et al. 2020, "Learned Step Size Quantization",
//!   arXiv:1902.08153). The paper uses the straight-through estimator with fixed ranges. That treats errors as vectors
//!   that rotate with the values, although the errors change at every rounding.
//! * The loss is the KL divergence from the unquantized model's predictions, not the likelihood of the text. It
//!   contains only the cost of rounding, and its gradient has less noise.
//! * A step has a given length, the root mean square of its angles, and a momentum of 0.9.
//! * One calibration window in sixteen is held out. If its loss is not lower at the end, the initial rotations are
//!   used.

use std::ops::ControlFlow;
use std::sync::Arc;

use mantissa_methods::reconstruction::shuffled;
use mantissa_model::{Batch, InputQuantizer, LinearInfo, LinearInput, ModelConfig};
use mantissa_num::{Blocks, Source};
use mantissa_store::convention::{ActivationQuant, ModelFiles};
use mantissa_train::{Policy, TrainError, TrainModel, range_slope};

use crate::calibrate::{Calibration, CalibrationSet, States, check_tick};
use crate::error::{QuantError, Result};
use crate::fold::{Coordinates, Folded, Folds};
use crate::input_scales::{self, InputScales};
use crate::orthogonal::Orthogonal;
use crate::plan::{Plan, Use};
use crate::rotate::{self, RotateOptions, Rotations, residual_of};
use crate::rtn;

pub use mantissa_methods::spin::{Gradient, SpinOptions};

/// Momentum of the direction.
const MOMENTUM: f64 = 0.9;

/// Period of held-out windows: the last of each 16 is held out.
const HELD_OUT: usize = 16;

/// Learned rotations.
pub(crate) struct Learned {
    pub(crate) rotations: Rotations,
    /// KL divergence on the held-out windows, in nats per token: before and after.
    pub(crate) kl: [f64; 2],
}

/// Learns the rotations of `source` on `set`. `tick` gets the name of the next step; `Break` interrupts the run.
///
/// # Errors
/// [`QuantError::Spin`] for architectures without a backward pass; errors of [`Calibration`] and of reading weights.
pub(crate) fn learn(
    plan: &Plan,
    source: &ModelFiles,
    options: SpinOptions,
    set: &CalibrationSet,
    tick: &mut dyn FnMut(&str) -> ControlFlow<()>,
) -> Result<Learned> {
    let batches = Batches::new(set, options);
    let teacher = teacher(plan, source, set, &mut || tick("original model"))?;
    let rotations = dense(&plan.config, Rotations::random(&plan.config, options.rotate));
    let mut learner = Learner::new(plan, source, options, rotations, &mut || tick("inputs"))?;
    let start = learner.rotations.clone();
    let held_out: Vec<Vec<usize>> =
        batches.held_out.chunks(batches.batch_windows).map(<[usize]>::to_vec).collect();
    let before = learner.loss(set, &teacher, &held_out)?;
    for step in 0..options.iterations {
        check_tick(&mut || tick(&format!("step {step} of {}", options.iterations)))?;
        let left = 1.0 - step as f64 / options.iterations as f64;
        learner.step(
            set,
            &teacher,
            &batches.of_step(step, options.rotate.seed),
            f64::from(options.rate) * left,
        )?;
    }
    let after = learner.loss(set, &teacher, &held_out)?;
    // False also if a loss is NaN.
    let rotations = if after < before { learner.rotations } else { start };
    Ok(Learned { rotations, kl: [before, after] })
}

/// Returns the last hidden states of the unquantized model, window by window.
pub(crate) fn teacher(
    plan: &Plan,
    source: &ModelFiles,
    set: &CalibrationSet,
    tick: &mut dyn FnMut() -> ControlFlow<()>,
) -> Result<States> {
    let source = Folded::plain(source);
    let mut calibration =
        Calibration::begin(&source, &plan.config, &set.windows, plan.limits())?.to_the_end();
    while let Some(layer) = calibration.next_layer()? {
        calibration.advance(&layer, tick)?;
    }
    Ok(calibration.into_states())
}

/// Converts Hadamard rotations to matrices that can be learned.
fn dense(config: &ModelConfig, mut rotations: Rotations) -> Rotations {
    let convert = |by: &mut Coordinates, n: usize| {
        if let Coordinates::Rotated(hadamard) = by {
            *by = Coordinates::Turned(Arc::new(Orthogonal::of_hadamard(hadamard, n)));
        }
    };
    rotations.residual.iter_mut().for_each(|by| convert(by, config.hidden_size));
    rotations.values.iter_mut().flatten().for_each(|by| convert(by, config.head_dim));
    rotations
}

/// Windows of each step.
struct Batches {
    learned: Vec<usize>,
    held_out: Vec<usize>,
    /// Windows per batch.
    batch_windows: usize,
}

impl Batches {
    fn new(set: &CalibrationSet, options: SpinOptions) -> Self {
        let (held_out, learned): (Vec<_>, Vec<_>) =
            (0..set.windows.len()).partition(|window| window % HELD_OUT == HELD_OUT - 1);
        // A set of fewer than 16 windows is used both to learn and to judge.
        let held_out = if held_out.is_empty() { learned.clone() } else { held_out };
        Batches { learned, held_out, batch_windows: windows_of_batch(set, options.batch_tokens) }
    }

    /// Returns the windows of a step. The order is shuffled again after each pass over all windows.
    fn of_step(&self, step: usize, seed: u64) -> Vec<usize> {
        let n = self.learned.len();
        let taken = (step * self.batch_windows..(step + 1) * self.batch_windows).map(|at| {
            let order = shuffled(n, seed, (at / n) as u64);
            self.learned[order[at % n]]
        });
        taken.collect()
    }
}

pub(crate) fn windows_of_batch(set: &CalibrationSet, batch_tokens: usize) -> usize {
    (batch_tokens / set.longest().max(1)).clamp(1, set.windows.len().max(1))
}

/// Returns the trainer's options.
pub(crate) fn training_options(
    set: &CalibrationSet,
    options: SpinOptions,
    threads: usize,
) -> mantissa_train::Options {
    mantissa_train::Options {
        max_tokens: windows_of_batch(set, options.batch_tokens).saturating_mul(set.longest()),
        max_len: set.longest(),
        threads,
        policy: Policy::fp32(),
    }
}

/// State of learning: the folded model and its rotations.
struct Learner<'a> {
    plan: &'a Plan,
    source: &'a ModelFiles,
    /// Rotations folded into the model: the recipe's without the online ones.
    fold_options: RotateOptions,
    rotations: Rotations,
    folds: Folds,
    /// Momentum of each learned rotation.
    directions: Vec<Vec<f64>>,
    model: TrainModel,
    /// Parameters before weights are rounded; `None` if inputs are quantized instead.
    unrounded: Option<Vec<f32>>,
    gradient: Gradient,
}

impl<'a> Learner<'a> {
    fn new(
        plan: &'a Plan,
        source: &'a ModelFiles,
        options: SpinOptions,
        rotations: Rotations,
        tick: &mut dyn FnMut() -> ControlFlow<()>,
    ) -> Result<Self> {
        let fold_options = RotateOptions { online: false, ..options.rotate };
        let folds = rotate::folds(source, &plan.config, fold_options, &rotations)?;
        let folded = Folded::new(source, &folds);
        let no_text = || QuantError::NoCalibration { recipe: plan.job.name() };
        let set = plan.text_for(Use::Transform).ok_or_else(no_text)?;
        let fault = |error| fault(source, error);
        let mut model =
            TrainModel::load(&folded, training_options(set, options, plan.threads())).map_err(fault)?;
        if let Some(scheme) = &plan.activations {
            // Scales that are stored, not computed at run time, come from the folded model's inputs.
            let scales = if scheme.has_outer_scale() || scheme.source == Source::Static {
                let of = |_: &LinearInfo| Some(scheme);
                let observed = (&of as &input_scales::SchemeOf<'_>, plan.observer);
                input_scales::collect(&folded, &plan.config, observed, set, plan.limits(), tick)?
            } else {
                InputScales::new()
            };
            for (info, input) in rounded_inputs(plan, options.rotate) {
                let order = match input {
                    LinearInput::Qkv | LinearInput::GateUp => Some(plan.config.hidden_size),
                    LinearInput::O => Some(plan.config.head_dim),
                    _ => None,
                };
                let quant = ActivationQuant::of(scheme.clone(), scales.get(&info.module).copied());
                let quantizer = InputQuantizer::new(&info.module, &quant)?;
                model.quantize_input(info.layer, input, quantizer, order).map_err(fault)?;
            }
        }
        let unrounded = plan.activations.is_none().then(Vec::new);
        let rounded = plan.activations.as_ref().unwrap_or(&plan.weights);
        // Default gradient: the best one measured (docs/results/weights.md, "Gradients of learned rotations").
        let in_groups = matches!(rounded.format.blocks(), Blocks::Group(_));
        let best = match &plan.activations {
            _ if in_groups => Gradient::StraightThrough,
            Some(_) => Gradient::Ranges,
            None => Gradient::Both,
        };
        let (directions, gradient) = (Vec::new(), options.gradient.unwrap_or(best));
        let mut learner =
            Learner { plan, source, fold_options, rotations, folds, directions, model, unrounded, gradient };
        if learner.unrounded.is_some() {
            // Weights were loaded unrounded.
            learner.refold()?;
        }
        Ok(learner)
    }

    /// Folds the model by the present rotations and, without input quantization, rounds its weights.
    fn refold(&mut self) -> Result<()> {
        self.folds = rotate::folds(self.source, &self.plan.config, self.fold_options, &self.rotations)?;
        let folded = Folded::new(self.source, &self.folds);
        let table = self.model.parameters().table().clone();
        if let Some(unrounded) = &mut self.unrounded {
            unrounded.resize(table.len(), 0.0);
        }
        for param in table.iter() {
            let name = &param.tensor.name;
            let mut values = folded.tensor(name, &param.tensor.shape)?;
            if let Some(unrounded) = &mut self.unrounded {
                unrounded[param.range.clone()].copy_from_slice(&values);
                let mut quantized = self.plan.quantized();
                if let Some((info, scheme)) = quantized.find(|(info, _)| info.dense_tensor().0 == *name) {
                    let rounded =
                        rtn::quantize(scheme, &values, info.rows, info.cols, None, self.plan.threads());
                    // A weight that cannot be rounded stays unrounded here; quantizing it later reports the error.
                    values = rounded.ok().and_then(|(q, _)| q.dequantize().ok()).unwrap_or(values);
                }
            }
            self.model.parameters_mut().set(param.range.start, &values);
        }
        Ok(())
    }

    /// Returns the KL divergence over `batches` of windows, in nats per token.
    fn loss(&mut self, set: &CalibrationSet, teacher: &States, batches: &[Vec<usize>]) -> Result<f64> {
        let (mut sum, mut count) = (0.0, 0);
        for windows in batches {
            let (tokens, lens, states) = self.batch(set, teacher, windows)?;
            let batch = Batch { tokens: &tokens, lens: &lens };
            sum += self.model.divergence(&batch, &states).map_err(|error| fault(self.source, error))?;
            count += tokens.len();
        }
        Ok(sum / count.max(1) as f64)
    }

    /// Rotates every learned matrix by `angle` against the gradient of a batch.
    fn step(&mut self, set: &CalibrationSet, teacher: &States, windows: &[usize], angle: f64) -> Result<()> {
        let (tokens, lens, states) = self.batch(set, teacher, windows)?;
        let batch = Batch { tokens: &tokens, lens: &lens };
        self.model.zero_gradients();
        let scale = 1.0 / tokens.len().max(1) as f32;
        let (errors, ranges) =
            (self.gradient != Gradient::Ranges, self.gradient != Gradient::StraightThrough);
        // Gradients of weights are needed unless only ranges of inputs count.
        let weights = errors || self.unrounded.is_some();
        self.model.distill(&batch, &states, scale, weights).map_err(|error| fault(self.source, error))?;
        let mut gradients: Vec<_> = learned_matrices(&self.rotations)
            .map(|matrix| vec![0.0; matrix.order() * matrix.order()])
            .collect();
        let mut add = |terms: Vec<Vec<f64>>| {
            for (to, from) in gradients.iter_mut().zip(terms) {
                to.iter_mut().zip(from).for_each(|(to, from)| *to += from);
            }
        };
        if errors {
            add(self.straight_through_gradients());
        }
        match &self.unrounded {
            _ if !ranges => {}
            Some(unrounded) => add(self.weight_range_gradients(unrounded)),
            None => add(self.input_range_gradients()),
        }
        self.directions.resize_with(gradients.len(), Vec::new);
        for (direction, gradient) in self.directions.iter_mut().zip(&gradients) {
            direction.resize(gradient.len(), 0.0);
            direction.iter_mut().zip(gradient).for_each(|(d, g)| *d = MOMENTUM * *d - g);
        }
        let mut directions = self.directions.iter();
        for by in self.rotations.residual.iter_mut().chain(self.rotations.values.iter_mut().flatten()) {
            if let Coordinates::Turned(matrix) = by
                && let Some(direction) = directions.next()
            {
                let n = matrix.order();
                // Scaled to a root mean square angle of `angle` per row.
                let mean = (direction.iter().map(|v| v * v).sum::<f64>() / n as f64).sqrt();
                if mean.is_finite() && mean > 0.0 {
                    let a: Vec<f64> = direction.iter().map(|v| v * angle / mean).collect();
                    *matrix = Arc::new(matrix.turned(&a));
                }
            }
        }
        self.refold()
    }

    /// Gradient of the loss in each rotation through the ranges of inputs.
    fn input_range_gradients(&self) -> Vec<Vec<f64>> {
        use LinearInput::{GateUp, O, Qkv};
        let slopes = |layer: usize, inputs: &[LinearInput], n: usize| {
            let mut sum = vec![0.0; n * n];
            for slopes in inputs.iter().filter_map(|&input| self.model.slopes(layer, input)) {
                sum.iter_mut().zip(slopes).for_each(|(sum, v)| *sum += v);
            }
            sum
        };
        let config = &self.plan.config;
        let mut all = Vec::new();
        for matrix in self.rotations.residual.iter().filter_map(learned_matrix) {
            let mut sum = vec![0.0; matrix.order() * matrix.order()];
            for layer in 0..config.num_hidden_layers {
                let slopes = slopes(layer, &[Qkv, GateUp], matrix.order());
                sum.iter_mut().zip(slopes).for_each(|(sum, v)| *sum += v);
            }
            all.push(skew(&sum, matrix.order()));
        }
        for (layer, rotation) in self.rotations.values.iter().enumerate() {
            let matrix = rotation.as_ref().and_then(learned_matrix);
            all.extend(matrix.map(|matrix| skew(&slopes(layer, &[O], matrix.order()), matrix.order())));
        }
        all
    }

    /// Gradient of the loss in each rotation through the rounded values of inputs or weights (straight-through
    /// estimator).
    fn straight_through_gradients(&self) -> Vec<Vec<f64>> {
        let (values, gradients) = (self.model.parameters().values(), self.model.gradients().to_f32());
        let values = self.unrounded.as_deref().unwrap_or(&values);
        learned_matrices(&self.rotations)
            .map(|matrix| self.rotation_gradient(matrix, values, &gradients))
            .collect()
    }

    /// Gradient of the loss in each rotation through the ranges of weights.
    fn weight_range_gradients(&self, unrounded: &[f32]) -> Vec<Vec<f64>> {
        let (parameters, gradients) = (self.model.parameters(), self.model.gradients().to_f32());
        let (rounded, mut range_gradients) = (parameters.values(), vec![0.0; gradients.len()]);
        for (info, scheme) in self.plan.quantized() {
            let Some(param) = parameters.table().by_name(&info.dense_tensor().0) else { continue };
            let block = crate::clip::group_of(scheme, info.cols).clamp(1, info.cols.max(1));
            let rows = param.range.clone().step_by(info.cols.max(1));
            let blocks = rows.flat_map(|row| {
                let end = row + info.cols;
                (row..end).step_by(block).map(move |at| at..end.min(at + block))
            });
            for span in blocks {
                let [x, q, g] = [unrounded, &rounded, &gradients].map(|of| &of[span.clone()]);
                // The range of a block depends only on its largest weight.
                if let Some((m, slope)) = range_slope(x, q, g) {
                    range_gradients[span.start + m] = slope;
                }
            }
        }
        learned_matrices(&self.rotations)
            .map(|matrix| self.rotation_gradient(matrix, unrounded, &range_gradients))
            .collect()
    }

    /// Gradient in `matrix` of a loss with `gradients` with respect to the parameters `values`.
    fn rotation_gradient(&self, matrix: &Arc<Orthogonal>, values: &[f32], gradients: &[f32]) -> Vec<f64> {
        let table = self.model.parameters().table();
        let s = self.folds.rotation_gradient(matrix, |name| {
            let range = table.by_name(name)?.range.clone();
            Some((&values[range.clone()], &gradients[range]))
        });
        skew(&s, matrix.order())
    }

    /// Returns tokens and lengths of some windows, and the original model's last states in the folded model's
    /// coordinates.
    fn batch(
        &self,
        set: &CalibrationSet,
        teacher: &States,
        windows: &[usize],
    ) -> Result<(Vec<u32>, Vec<usize>, Vec<f32>)> {
        let (mut tokens, mut lens, mut states) = (Vec::new(), Vec::new(), Vec::new());
        for &window in windows {
            tokens.extend_from_slice(&set.windows[window]);
            lens.push(set.windows[window].len());
            teacher.append_to(window, &mut states)?;
        }
        self.rotations.residual.iter().for_each(|by| by.apply(&mut states));
        Ok((tokens, lens, states))
    }
}

/// Iterates over the learned matrices, the residual stream first.
fn learned_matrices(rotations: &Rotations) -> impl Iterator<Item = &Arc<Orthogonal>> {
    let all = rotations.residual.iter().chain(rotations.values.iter().flatten());
    all.filter_map(learned_matrix)
}

fn learned_matrix(by: &Coordinates) -> Option<&Arc<Orthogonal>> {
    match by {
        Coordinates::Turned(matrix) => Some(matrix),
        _ => None,
    }
}

/// Returns the skew-symmetric part of `s` (`[n, n]`).
fn skew(s: &[f32], n: usize) -> Vec<f64> {
    let entry = |at: usize| (f64::from(s[at]) - f64::from(s[at % n * n + at / n])) / 2.0;
    (0..n * n).map(entry).collect()
}

/// Iterates over the inputs that are quantized during learning, each with one of its linear layers.
fn rounded_inputs(plan: &Plan, options: RotateOptions) -> impl Iterator<Item = (&LinearInfo, LinearInput)> {
    let online: Vec<String> =
        rotate::rotated_inputs(&plan.config, options).map(|(info, _)| info.module).collect();
    let quantized = plan.quantized().map(|(info, _)| info).filter(move |info| !online.contains(&info.module));
    let mut seen = std::collections::BTreeSet::new();
    quantized
        .map(|info| (info, info.kind.input()))
        .filter(move |(info, input)| seen.insert((info.layer, *input)))
}

/// Checks that the architecture has a backward pass.
///
/// # Errors
/// [`QuantError::Spin`].
pub(crate) fn check(source: &ModelFiles, config: &ModelConfig) -> Result<()> {
    mantissa_train::LayerTrainer::check(config).map_err(|error| fault(source, error))
}

fn fault(source: &ModelFiles, error: TrainError) -> QuantError {
    QuantError::Spin { path: source.dir().to_owned(), error: Box::new(error) }
}

/// Returns the buffers of learning with their bytes.
pub(crate) fn buffers(plan: &Plan, set: &CalibrationSet, options: SpinOptions) -> Vec<(&'static str, u64)> {
    let untied =
        plan.config.tie_word_embeddings && options.rotate.residual && residual_of(&plan.config).is_ok();
    let config = ModelConfig {
        tie_word_embeddings: plan.config.tie_word_embeddings && !untied,
        ..plan.config.clone()
    };
    let training = training_options(set, options, plan.threads());
    let (tokens, width) = (training.max_tokens as u64, config.hidden_size as u64);
    let inputs: u64 =
        rounded_inputs(plan, options.rotate).map(|(_, input)| config.input_width(input) as u64).sum();
    let rounds = plan.activations.is_some();
    let largest = config.tensors().into_iter().map(|t| t.shape.iter().product::<usize>() as u64).max();
    let residual = if options.rotate.residual { width * width } else { 0 };
    let layers = config.num_hidden_layers as u64;
    let heads = layers * (config.head_dim * config.head_dim) as u64;
    vec![
        ("states of the calibration", Calibration::state_bytes(&config, set, plan.limits().states)),
        (
            "model in training and its activations",
            mantissa_train::MemoryPlan::new(&config, &training).bytes(),
        ),
        ("quantized inputs", if rounds { 4 * tokens.saturating_mul(inputs) } else { 0 }),
        ("gradients of input ranges", if rounds { 4 * (2 * layers * width * width + heads) } else { 0 }),
        ("unrounded weights and gradients of their ranges", if rounds { 0 } else { 8 * config.parameters() }),
        ("tensor being folded", 16 * largest.unwrap_or(0)),
        (
            "states and predictions of the original model",
            8 * tokens * width + 4 * 512 * config.vocab_size as u64,
        ),
        // Matrices in f64 and f32, gradients and directions; two more matrices while the residual one is solved for.
        ("rotations and their directions", 44 * (residual + heads) + 16 * residual),
    ]
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests;
