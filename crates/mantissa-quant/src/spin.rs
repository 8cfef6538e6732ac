//! SpinQuant (Liu, Zhao, Fedorov, Soran, Choudhary, Krishnamoorthi, Chandra, Tian & Blankevoort 2024, "SpinQuant: LLM Quantization with
//! Learned Rotations", arXiv:2405.16406, section 3): QuaRot's rotations of the residual stream (R1) and of values within each head (R2),
//! from the randomized Hadamard matrices on learned by descent on the orthogonal matrices (`orthogonal.rs`).
//!
//! What is learned on is the folded model itself, whole, with inputs of linear layers rounded as the recipe has them at run time, and
//! weights as they are: whoever rounds them comes after. Where a recipe leaves inputs as they are, weights are rounded to nearest
//! instead. The input of the down projection is rotated by a matrix that is not learned, and what rounding does to it is, in the original
//! coordinates, the same whatever the others are; it is left as it is.
//!
//! Four things differ from the paper:
//! * The gradient may be that by way of the ranges ([`Gradient`]): errors of a block are as large as its greatest magnitude, which a
//!   rotation changes (Esser et al. 2020, "Learned Step Size Quantization", arXiv:1902.08153, has this derivative). The paper's passes the
//!   rounding as if it were none, and holds ranges; it takes errors for vectors that turn with the values to where they do less harm, but
//!   the next rounding draws them anew, with one range for a whole token in all directions alike.
//! * The loss is the divergence from the model's own unrounded predictions, not the likelihood of the text: it is nothing but what
//!   rounding costs, and its gradient has less noise.
//! * A step has a given length, the root mean square of the angles by which it turns; 0.9 of the last direction stays in the next.
//! * One window of the calibration in sixteen is not learned on: if it is not better off at the end, the rotations stay as they were.

use std::ops::ControlFlow;
use std::sync::Arc;

use mantissa_model::{Batch, InputQuantizer, LinearInfo, LinearInput, ModelConfig};
use mantissa_num::{Blocks, Source};
use mantissa_store::convention::{ActivationQuant, ModelFiles};
use mantissa_train::{Policy, TrainError, TrainModel, range_slope};

use crate::autoround::shuffled;
use crate::calibrate::{Calibration, CalibrationSet, States, check_tick};
use crate::error::{QuantError, Result};
use crate::fold::{Coordinates, Folded, Folds};
use crate::input_scales::{self, InputScales};
use crate::orthogonal::Orthogonal;
use crate::plan::{Plan, Use};
use crate::rotate::{self, RotateOptions, Rotations, residual_of};
use crate::rtn;

pub use mantissa_methods::spin::{Gradient, SpinOptions};

/// Share of the last direction in the next.
const MOMENTUM: f64 = 0.9;

/// One window in so many is not learned on.
const HELD_OUT: usize = 16;

/// Learned rotations.
pub(crate) struct Learned {
    pub(crate) rotations: Rotations,
    /// KL on the windows that are not learned on, in nats per token: before, and after.
    pub(crate) kl: [f64; 2],
}

/// Learns the rotations of `source` on `set`. `tick` is told which step is next, and asked whether to go on.
///
/// # Errors
/// [`QuantError::Spin`] for architectures without a backward; as [`Calibration`] and as reading weights.
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
    let held_out: Vec<Vec<usize>> = batches.held_out.chunks(batches.each).map(<[usize]>::to_vec).collect();
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
    // Also where one is no number.
    let rotations = if after < before { learner.rotations } else { start };
    Ok(Learned { rotations, kl: [before, after] })
}

/// Last hidden states of the unquantized model, window by window.
fn teacher(
    plan: &Plan,
    source: &ModelFiles,
    set: &CalibrationSet,
    tick: &mut dyn FnMut() -> ControlFlow<()>,
) -> Result<States> {
    let source = Folded::plain(source);
    let mut calibration =
        Calibration::begin(&source, &plan.config, &set.windows, plan.threads())?.to_the_end();
    while let Some(layer) = calibration.next_layer()? {
        calibration.advance(&layer, tick)?;
    }
    Ok(calibration.into_states())
}

/// The same rotations as matrices that can turn.
fn dense(config: &ModelConfig, mut rotations: Rotations) -> Rotations {
    let turned = |by: &mut Coordinates, n: usize| {
        if let Coordinates::Rotated(hadamard) = by {
            *by = Coordinates::Turned(Arc::new(Orthogonal::of_hadamard(hadamard, n)));
        }
    };
    rotations.residual.iter_mut().for_each(|by| turned(by, config.hidden_size));
    rotations.values.iter_mut().flatten().for_each(|by| turned(by, config.head_dim));
    rotations
}

/// Which windows a step takes.
struct Batches {
    learned: Vec<usize>,
    held_out: Vec<usize>,
    /// Windows of a batch.
    each: usize,
}

impl Batches {
    fn new(set: &CalibrationSet, options: SpinOptions) -> Self {
        let (held_out, learned): (Vec<_>, Vec<_>) =
            (0..set.windows.len()).partition(|window| window % HELD_OUT == HELD_OUT - 1);
        // A text of few windows is all learned on, and judged by.
        let held_out = if held_out.is_empty() { learned.clone() } else { held_out };
        Batches { learned, held_out, each: windows_of_batch(set, options.batch_tokens) }
    }

    /// Windows come in a new order each time that all have been taken.
    fn of_step(&self, step: usize, seed: u64) -> Vec<usize> {
        let n = self.learned.len();
        let taken = (step * self.each..(step + 1) * self.each).map(|at| {
            let order = shuffled(n, seed, (at / n) as u64);
            self.learned[order[at % n]]
        });
        taken.collect()
    }
}

fn windows_of_batch(set: &CalibrationSet, batch_tokens: usize) -> usize {
    (batch_tokens / set.longest().max(1)).clamp(1, set.windows.len().max(1))
}

/// Options of the trainer.
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

/// The folded model, and the rotations that it is folded by.
struct Learner<'a> {
    plan: &'a Plan,
    source: &'a ModelFiles,
    /// Nothing that runs beside the model is in it.
    folded_by: RotateOptions,
    rotations: Rotations,
    folds: Folds,
    /// Directions of the last step, of those that turn.
    directions: Vec<Vec<f64>>,
    model: TrainModel,
    /// The parameters before they are rounded, where they are.
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
        let folded_by = RotateOptions { online: false, ..options.rotate };
        let folds = rotate::folds(source, &plan.config, folded_by, &rotations)?;
        let folded = Folded::new(source, &folds);
        let no_text = || QuantError::NoCalibration { recipe: plan.job.name() };
        let set = plan.text_for(Use::Transform).ok_or_else(no_text)?;
        let fault = |error| fault(source, error);
        let mut model =
            TrainModel::load(&folded, training_options(set, options, plan.threads())).map_err(fault)?;
        if let Some(scheme) = &plan.activations {
            let scales = if scheme.has_outer_scale() || scheme.source == Source::Static {
                let observed = (scheme, plan.observer);
                input_scales::collect(&folded, &plan.config, observed, set, plan.threads(), tick)?
            } else {
                InputScales::new()
            };
            for (info, input) in rounded_inputs(plan, options.rotate) {
                let order = match input {
                    LinearInput::Qkv | LinearInput::GateUp => Some(plan.config.hidden_size),
                    LinearInput::O => Some(plan.config.head_dim),
                    _ => None,
                };
                let quant = ActivationQuant::new(scheme.clone(), scales.get(&info.module).copied());
                let quantizer = InputQuantizer::new(&info.module, &quant)?;
                model.quantize_input(info.layer, input, quantizer, order).map_err(fault)?;
            }
        }
        let unrounded = plan.activations.is_none().then(Vec::new);
        let rounded = plan.activations.as_ref().unwrap_or(&plan.weights);
        let in_groups = matches!(rounded.format.blocks(), Blocks::Group(_));
        let best = match &plan.activations {
            _ if in_groups => Gradient::StraightThrough,
            Some(_) => Gradient::Ranges,
            None => Gradient::Both,
        };
        let (directions, gradient) = (Vec::new(), options.gradient.unwrap_or(best));
        let mut learner =
            Learner { plan, source, folded_by, rotations, folds, directions, model, unrounded, gradient };
        if learner.unrounded.is_some() {
            // Loaded as they are, and rounded as they are folded.
            learner.refold()?;
        }
        Ok(learner)
    }

    /// Folds the model by the rotations as they now are.
    fn refold(&mut self) -> Result<()> {
        self.folds = rotate::folds(self.source, &self.plan.config, self.folded_by, &self.rotations)?;
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
                    // What cannot be rounded stays as it is, and is refused where it is quantized.
                    values = rounded.ok().and_then(|(q, _)| q.dequantize().ok()).unwrap_or(values);
                }
            }
            self.model.parameters_mut().set(param.range.start, &values);
        }
        Ok(())
    }

    /// KL in nats per token over `batches` of windows.
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

    /// Turns every rotation by `angle` against the gradient of a batch.
    fn step(&mut self, set: &CalibrationSet, teacher: &States, windows: &[usize], angle: f64) -> Result<()> {
        let (tokens, lens, states) = self.batch(set, teacher, windows)?;
        let batch = Batch { tokens: &tokens, lens: &lens };
        self.model.zero_gradients();
        let scale = 1.0 / tokens.len().max(1) as f32;
        let (errors, ranges) =
            (self.gradient != Gradient::Ranges, self.gradient != Gradient::StraightThrough);
        let weights = errors || self.unrounded.is_some();
        self.model.distill(&batch, &states, scale, weights).map_err(|error| fault(self.source, error))?;
        let mut slopes: Vec<_> =
            turning(&self.rotations).map(|matrix| vec![0.0; matrix.order() * matrix.order()]).collect();
        let mut add = |found: Vec<Vec<f64>>| {
            for (to, from) in slopes.iter_mut().zip(found) {
                to.iter_mut().zip(from).for_each(|(to, from)| *to += from);
            }
        };
        if errors {
            add(self.of_errors());
        }
        match &self.unrounded {
            _ if !ranges => {}
            Some(unrounded) => add(self.of_weights(unrounded)),
            None => add(self.of_inputs()),
        }
        self.directions.resize_with(slopes.len(), Vec::new);
        for (direction, slope) in self.directions.iter_mut().zip(&slopes) {
            direction.resize(slope.len(), 0.0);
            direction.iter_mut().zip(slope).for_each(|(d, s)| *d = MOMENTUM * *d - s);
        }
        let mut directions = self.directions.iter();
        for by in self.rotations.residual.iter_mut().chain(self.rotations.values.iter_mut().flatten()) {
            if let Coordinates::Turned(matrix) = by
                && let Some(direction) = directions.next()
            {
                let n = matrix.order();
                let mean = (direction.iter().map(|v| v * v).sum::<f64>() / n as f64).sqrt();
                if mean.is_finite() && mean > 0.0 {
                    let a: Vec<f64> = direction.iter().map(|v| v * angle / mean).collect();
                    *matrix = Arc::new(matrix.turned(&a));
                }
            }
        }
        self.refold()
    }

    /// Gradient of the loss in each rotation, by way of the ranges of inputs.
    fn of_inputs(&self) -> Vec<Vec<f64>> {
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
        for matrix in self.rotations.residual.iter().filter_map(turned) {
            let mut sum = vec![0.0; matrix.order() * matrix.order()];
            for layer in 0..config.num_hidden_layers {
                let slopes = slopes(layer, &[Qkv, GateUp], matrix.order());
                sum.iter_mut().zip(slopes).for_each(|(sum, v)| *sum += v);
            }
            all.push(skew(&sum, matrix.order()));
        }
        for (layer, by) in self.rotations.values.iter().enumerate() {
            let matrix = by.as_ref().and_then(turned);
            all.extend(matrix.map(|matrix| skew(&slopes(layer, &[O], matrix.order()), matrix.order())));
        }
        all
    }

    /// The same, by way of the errors of inputs or weights.
    fn of_errors(&self) -> Vec<Vec<f64>> {
        let (values, gradients) = (self.model.parameters().values(), self.model.gradients().to_f32());
        let values = self.unrounded.as_deref().unwrap_or(&values);
        turning(&self.rotations).map(|matrix| self.slope(matrix, values, &gradients)).collect()
    }

    /// The same, by way of the ranges of weights.
    fn of_weights(&self, unrounded: &[f32]) -> Vec<Vec<f64>> {
        let (parameters, gradients) = (self.model.parameters(), self.model.gradients().to_f32());
        let (rounded, mut of_ranges) = (parameters.values(), vec![0.0; gradients.len()]);
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
                if let Some((m, slope)) = range_slope(x, q, g) {
                    of_ranges[span.start + m] = slope;
                }
            }
        }
        turning(&self.rotations).map(|matrix| self.slope(matrix, unrounded, &of_ranges)).collect()
    }

    /// Gradient in `matrix` of a loss that has these gradients with respect to the parameters, of these values.
    fn slope(&self, matrix: &Arc<Orthogonal>, values: &[f32], gradients: &[f32]) -> Vec<f64> {
        let table = self.model.parameters().table();
        let s = self.folds.turning(matrix, |name| {
            let range = table.by_name(name)?.range.clone();
            Some((&values[range.clone()], &gradients[range]))
        });
        skew(&s, matrix.order())
    }

    /// Tokens and lengths of some windows, and what the original model gives in the end, in the coordinates of the folded one.
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
        self.rotations.residual.iter().for_each(|by| by.of_vectors(&mut states));
        Ok((tokens, lens, states))
    }
}

/// The matrices that turn, those of the residual stream first.
fn turning(rotations: &Rotations) -> impl Iterator<Item = &Arc<Orthogonal>> {
    let all = rotations.residual.iter().chain(rotations.values.iter().flatten());
    all.filter_map(turned)
}

fn turned(by: &Coordinates) -> Option<&Arc<Orthogonal>> {
    match by {
        Coordinates::Turned(matrix) => Some(matrix),
        _ => None,
    }
}

/// The skew-symmetric part of `s` (`[n, n]`).
fn skew(s: &[f32], n: usize) -> Vec<f64> {
    let entry = |at: usize| (f64::from(s[at]) - f64::from(s[at % n * n + at / n])) / 2.0;
    (0..n * n).map(entry).collect()
}

/// The inputs that are rounded as rotations are learned, each with one of the layers that read it.
fn rounded_inputs(plan: &Plan, options: RotateOptions) -> impl Iterator<Item = (&LinearInfo, LinearInput)> {
    let online: Vec<String> =
        rotate::rotated_inputs(&plan.config, options).map(|(info, _)| info.module).collect();
    let quantized = plan.quantized().map(|(info, _)| info).filter(move |info| !online.contains(&info.module));
    let mut seen = std::collections::BTreeSet::new();
    quantized
        .map(|info| (info, info.kind.input()))
        .filter(move |(info, input)| seen.insert((info.layer, *input)))
}

/// Checks that rotations of this architecture can be learned.
///
/// # Errors
/// [`QuantError::Spin`].
pub(crate) fn check(source: &ModelFiles, config: &ModelConfig) -> Result<()> {
    mantissa_train::LayerTrainer::check(config).map_err(|error| fault(source, error))
}

fn fault(source: &ModelFiles, error: TrainError) -> QuantError {
    QuantError::Spin { path: source.dir().to_owned(), error: Box::new(error) }
}

/// Peak memory of learning.
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
        ("states of the calibration", Calibration::state_bytes(&config, set)),
        ("model in training and what a batch saves", mantissa_train::Plan::new(&config, &training).bytes()),
        ("inputs as they are rounded", if rounds { 4 * tokens.saturating_mul(inputs) } else { 0 }),
        ("slopes of inputs", if rounds { 4 * (2 * layers * width * width + heads) } else { 0 }),
        ("weights before they are rounded, and slopes", if rounds { 0 } else { 8 * config.parameters() }),
        ("a tensor as it is folded", 16 * largest.unwrap_or(0)),
        (
            "states and predictions of the original model",
            8 * tokens * width + 4 * 512 * config.vocab_size as u64,
        ),
        // Two in f64 and f32, slopes and directions; two more as one is solved for.
        ("rotations and their directions", 44 * (residual + heads) + 16 * residual),
    ]
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests;
