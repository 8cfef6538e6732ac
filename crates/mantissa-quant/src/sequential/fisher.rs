//! Fisher information, computed before the first layer is quantized: metrics of all layers' outputs, and output factors
//! of all linear layers.

use std::collections::BTreeMap;

use mantissa_kernels::kernels;
use mantissa_model::{LinearInfo, LinearKind, ModelConfig, WeightSource};
use mantissa_train::{LayerTrainer, Options, Policy, SampledHead};

use crate::calibrate::{CalibrateError, Calibration, CalibrationSet, IN_MEMORY, States, Tick, check_tick};
use crate::gptq::Hessian;
use crate::metric::Metric;
use crate::plan::Plan;

/// Tokens per backward batch for methods that do not set a number.
pub(crate) const BATCH_TOKENS: usize = 512;

/// Returns the options of the layer trainer for the method that learns layers, if there is one.
pub(crate) fn options(plan: &Plan, set: &CalibrationSet) -> Options {
    options_of(plan, set, plan.job.learner().map_or(BATCH_TOKENS, |(method, _)| method.batch_tokens()))
}

/// Returns the options of the layer trainer for batches of about `batch_tokens`.
pub(crate) fn options_of(plan: &Plan, set: &CalibrationSet, batch_tokens: usize) -> Options {
    let (max_tokens, max_len) = [Some(set), plan.held_out().as_ref()]
        // Batches must hold whole windows of the calibration set and of the held-out set.
        .into_iter()
        .flatten()
        .map(|set| {
            let each = (batch_tokens / set.longest().max(1)).max(1);
            (each.min(set.windows.len().max(1)).saturating_mul(set.longest()), set.longest())
        })
        .fold((0, 0), |(tokens, len), of| (tokens.max(of.0), len.max(of.1)));
    Options { max_tokens, max_len, threads: plan.options.threads, policy: Policy::fp32() }
}

/// Error of the forward or backward pass.
pub(super) enum MetricsError {
    Calibrate(CalibrateError),
    Train(mantissa_train::TrainError),
}

impl From<CalibrateError> for MetricsError {
    fn from(error: CalibrateError) -> Self {
        MetricsError::Calibrate(error)
    }
}

impl From<mantissa_train::TrainError> for MetricsError {
    fn from(error: mantissa_train::TrainError) -> Self {
        MetricsError::Train(error)
    }
}

/// Maximum length of a token's gradient in units of the median. Norms have an almost infinite slope at states near zero
/// (padding with a zero embedding); one such token would dominate the mean.
const MAX_LENGTH: f64 = 10.0;

/// Number of calibration tokens that the Fisher information is averaged over, if there are as many.
const TOKENS: usize = 1 << 15;

/// Result of the backward pass.
type Found<T> = Result<T, MetricsError>;

/// Returns the metric of every layer's output for the model in `source`; `None` for a layer whose output no prediction
/// depends on. Targets are sampled with `seed`.
pub(super) fn metrics(
    source: &dyn WeightSource,
    config: &ModelConfig,
    set: &CalibrationSet,
    options: &Options,
    seed: u64,
    tick: &mut Tick<'_>,
) -> Found<Vec<Option<Metric>>> {
    let mut back = WayBack::begin(source, config, set, options, seed, tick)?;
    let mut metrics = Vec::with_capacity(config.num_hidden_layers);
    for index in (0..config.num_hidden_layers).rev() {
        let mut moments = Hessian::new(config.hidden_size).map_err(CalibrateError::Statistics)?;
        back.gradients.iter().for_each(|g| moments.add(g, options.threads));
        metrics.push(Metric::new(&moments));
        // No metric is needed for the input of the first layer.
        if index > 0 {
            back.through(index, None, tick)?;
        }
    }
    metrics.reverse();
    Ok(metrics)
}

/// Returns, by module, the output factor of the Fisher information of `linears` for the model in `source` (YAQA: Tseng
/// et al. 2025, arXiv 2505.22988, section 4.1): `Σ G Gᵀ` over batches, with `G[rows, cols]` the gradient of the weight.
/// Targets are sampled, so gradients of different tokens are uncorrelated, and the mean equals the mean of `|x|² g gᵀ` over
/// tokens with input `x` and output gradient `g`.
pub(super) fn output_moments<'l>(
    source: &dyn WeightSource,
    config: &ModelConfig,
    set: &CalibrationSet,
    options: &Options,
    linears: impl Iterator<Item = &'l LinearInfo>,
    tick: &mut Tick<'_>,
) -> Found<BTreeMap<String, Hessian>> {
    let mut by_layer: BTreeMap<usize, Vec<&LinearInfo>> = BTreeMap::new();
    linears.for_each(|info| by_layer.entry(info.layer).or_default().push(info));
    let first = by_layer.keys().next().copied().unwrap_or(config.num_hidden_layers);
    let mut back = WayBack::begin(source, config, set, options, SEED, tick)?;
    let mut found = BTreeMap::new();
    for index in (first..config.num_hidden_layers).rev() {
        let linears = by_layer.remove(&index).unwrap_or_default();
        let mut moments = Vec::with_capacity(linears.len());
        for info in &linears {
            moments.push((info.kind, Hessian::new(info.rows).map_err(CalibrateError::Statistics)?));
        }
        back.through(index, Some(&mut moments), tick)?;
        found.extend(linears.iter().map(|info| info.module.clone()).zip(moments.into_iter().map(|(_, h)| h)));
    }
    Ok(found)
}

/// Seed of the sampled targets of [`output_moments`].
const SEED: u64 = 42;

/// Sums of `G Gᵀ` of a layer's weights.
type Moments = Vec<(LinearKind, Hessian)>;

/// Backward pass, one layer in memory.
///
/// A forward pass first stores the states between all layers, in files if they are large.
struct WayBack<'a> {
    source: &'a dyn WeightSource,
    config: &'a ModelConfig,
    options: &'a Options,
    /// Inputs of the layers that are still to be passed.
    inputs: Vec<States>,
    /// Gradients of the output of the last of these layers, by window.
    gradients: Vec<Vec<f32>>,
    /// Windows per batch.
    batch_windows: usize,
}

impl<'a> WayBack<'a> {
    fn begin(
        source: &'a dyn WeightSource,
        config: &'a ModelConfig,
        set: &CalibrationSet,
        options: &'a Options,
        seed: u64,
        tick: &mut Tick<'_>,
    ) -> Found<Self> {
        let (d, threads) = (config.hidden_size, options.threads);
        let mut forward = Calibration::begin(source, config, enough(&set.windows), threads)?.to_the_end();
        let mut inputs = Vec::with_capacity(config.num_hidden_layers);
        while let Some(layer) = forward.next_layer()? {
            let copy = forward.states().copy(IN_MEMORY / config.num_hidden_layers as u64);
            inputs.push(copy.map_err(CalibrateError::States)?);
            forward.advance(&layer, tick)?;
        }
        let last = forward.into_states();
        let read = |window| last.window(window).map_err(CalibrateError::States);
        let mut gradients = (0..last.len()).map(read).collect::<Result<Vec<_>, _>>()?;
        drop(last);
        let batch_windows = (options.max_tokens / options.max_len.max(1)).max(1);
        let mut head = SampledHead::load(source, config, options)?;
        let mut first = 0;
        for states in gradients.chunks_mut(batch_windows) {
            let mut joined = states.concat();
            head.gradients(&mut joined, first, seed)?;
            first += (joined.len() / d) as u64;
            split(&joined, states);
            check_tick(tick)?;
        }
        clip_lengths(&mut gradients, d);
        Ok(WayBack { source, config, options, inputs, gradients, batch_windows })
    }

    /// Propagates the gradients back through layer `index`, the last that is left, and adds the gradients of its weights to
    /// `moments`.
    fn through(&mut self, index: usize, mut moments: Option<&mut Moments>, tick: &mut Tick<'_>) -> Found<()> {
        let (d, batch_windows) = (self.config.hidden_size, self.batch_windows);
        let Some(inputs) = self.inputs.pop() else { return Ok(()) };
        let mut layer = LayerTrainer::load(self.source, self.config, index, self.options.clone())?;
        for (batch, gradients) in self.gradients.chunks_mut(batch_windows).enumerate() {
            let lens: Vec<usize> = gradients.iter().map(|x| x.len() / d).collect();
            let (mut states, first) =
                (Vec::with_capacity(lens.iter().sum::<usize>() * d), batch * batch_windows);
            (first..first + lens.len())
                .try_for_each(|window| inputs.append_to(window, &mut states))
                .map_err(CalibrateError::States)?;
            layer.forward(&mut states, &lens)?;
            let mut joined = gradients.concat();
            match &mut moments {
                Some(moments) => {
                    layer.all_gradients(&mut joined, &lens);
                    moments.iter_mut().for_each(|(kind, sum)| add(&layer, *kind, sum, self.options.threads));
                }
                None => layer.input_gradient(&mut joined, &lens),
            }
            split(&joined, gradients);
            check_tick(tick)?;
        }
        clip_lengths(&mut self.gradients, d);
        Ok(())
    }
}

/// Adds `G Gᵀ` for the gradient `G` of a weight.
fn add(layer: &LayerTrainer, kind: LinearKind, sum: &mut Hessian, threads: usize) {
    let (gradient, rows) = (layer.gradient(kind), sum.cols().max(1));
    let cols = gradient.len() / rows;
    // `Hessian::add` sums over rows, so the gradient is transposed.
    let transposed: Vec<f32> = (0..gradient.len()).map(|i| gradient[i % rows * cols + i / rows]).collect();
    sum.add(&transposed, threads);
}

/// Returns the buffers of computing the metrics at their peak; `table` is the bytes of the head as stored.
pub(crate) fn metrics_buffers(
    config: &ModelConfig,
    set: &CalibrationSet,
    options: &Options,
    table: u64,
) -> Vec<(&'static str, u64)> {
    let used = CalibrationSet::new("", enough(&set.windows).to_vec());
    let pass = Calibration::pass_bytes(config, &used, options.threads);
    let layer: u64 = config.layer_linears(0).iter().map(|l| 4 * (l.rows * l.cols) as u64).sum();
    let states = 4 * (used.tokens() as u64).saturating_mul(config.hidden_size as u64);
    let layers = config.num_hidden_layers as u64;
    let between = if states > IN_MEMORY / layers.max(1) { 0 } else { states.saturating_mul(layers) };
    let batch = 4 * (options.max_tokens as u64).saturating_mul(config.hidden_size as u64);
    let values = 4 * (config.vocab_size as u64).saturating_mul(config.hidden_size as u64);
    let head = SampledHead::bytes_needed(config, options);
    let always = [("states between all layers", between), ("gradients of all windows", states)];
    // The phases follow each other, so only the largest counts.
    let phases = [
        vec![("buffers of the calibration", pass), ("layer in f32", layer)],
        vec![("states after the last layer", states)],
        vec![("head", head.max(values.saturating_add(table))), ("states and gradients of a batch", batch)],
        vec![
            ("layer in training and its activations", LayerTrainer::bytes_needed(config, options)),
            ("states and gradients of a batch", 2 * batch),
            ("metrics", metrics_bytes(config)),
        ],
    ];
    let bytes = |phase: &Vec<(_, u64)>| phase.iter().map(|(_, bytes)| *bytes).sum::<u64>();
    let most = phases.into_iter().max_by_key(bytes).unwrap_or_default();
    always.into_iter().chain(most).collect()
}

/// Returns the bytes of the output factors of all layers.
pub(crate) fn outputs_bytes(plan: &Plan) -> u64 {
    let asking = plan.quantized().map(|(info, _)| info).filter(|info| plan.weighs_outputs_of(info));
    asking.map(|info| Hessian::bytes_needed(info.rows)).sum()
}

/// Returns the bytes of the metrics of all layers.
pub(crate) fn metrics_bytes(config: &ModelConfig) -> u64 {
    Hessian::bytes_needed(config.hidden_size).saturating_mul(config.num_hidden_layers as u64)
}

/// Returns the first windows that hold [`TOKENS`] tokens together.
fn enough(windows: &[Vec<u32>]) -> &[Vec<u32>] {
    let mut tokens = 0;
    let last = windows.iter().position(|window| {
        tokens += window.len();
        tokens >= TOKENS
    });
    &windows[..last.map_or(windows.len(), |last| last + 1)]
}

/// Clips the lengths of tokens' gradients to [`MAX_LENGTH`] medians and sets non-finite ones to zero.
fn clip_lengths(gradients: &mut [Vec<f32>], d: usize) {
    let squares = |g: &[f32]| kernels().sum_squares_f64(g);
    let rows = gradients.iter().flat_map(|g| g.chunks_exact(d));
    let mut all: Vec<f64> = rows.map(squares).filter(|n| n.is_finite()).collect();
    all.sort_unstable_by(f64::total_cmp);
    let most = all.get(all.len() / 2).map_or(0.0, |median| median * MAX_LENGTH * MAX_LENGTH);
    for row in gradients.iter_mut().flat_map(|g| g.chunks_exact_mut(d)) {
        let square = squares(row);
        if !square.is_finite() {
            row.fill(0.0);
        } else if square > most {
            let factor = (most / square).sqrt();
            row.iter_mut().for_each(|v| *v = (f64::from(*v) * factor) as f32);
        }
    }
}

/// Splits the concatenation `joined` back into its slices.
fn split(joined: &[f32], into: &mut [Vec<f32>]) {
    let mut rest = joined;
    for to in into {
        let (own, others) = rest.split_at(to.len());
        to.copy_from_slice(own);
        rest = others;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn long_gradients_are_clipped() {
        let mut gradients = vec![vec![3.0, 4.0, 1e30, 0.0], vec![0.0, -5.0, f32::NAN, 1.0, 0.0, 6.0]];
        clip_lengths(&mut gradients, 2);
        // The median of 5, 5, 6 and 1e30.
        let expected = [vec![3.0, 4.0, 60.0, 0.0], vec![0.0, -5.0, 0.0, 0.0, 0.0, 6.0]];
        assert_eq!(gradients, expected);
    }

    #[test]
    fn enough_takes_whole_windows() {
        let windows = vec![vec![0; TOKENS / 2]; 5];
        assert_eq!(enough(&windows).len(), 2);
        assert_eq!(enough(&windows[..1]).len(), 1);
    }
}
