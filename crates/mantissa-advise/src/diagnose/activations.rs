//! One pass over a text, layer by layer: magnitudes of states, inputs, keys and values, and what quantizing them costs.
//!
//! The model runs with its weights and inputs as stored and an unquantized cache. Of each input some tokens are held
//! until the layer is done, so that memory does not grow with the text.

use std::collections::BTreeMap;

use mantissa_eval::Sequence;
use mantissa_model::{Buffers, CacheInF32, InputQuantizer, Layer, Linear, LinearInput, ModelConfig};
use mantissa_num::Source;
use mantissa_quant::input_scales::scale;
use mantissa_store::convention::{ActivationQuant, KvQuant, ModelFiles};
use serde::Serialize;

use super::harm::{Sampled, amax, rows_of};
use super::request::Request;
use crate::error::Result;
use crate::run::{Ends, State, States, each};

/// Tokens of each input that errors are measured on.
const SAMPLE: usize = 96;

/// Largest magnitude of some states, with its place.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize)]
pub struct Peak {
    /// Magnitude; NaN if a value is not finite.
    pub amax: f32,
    /// Window of the text.
    pub window: usize,
    /// Position in the window.
    pub position: usize,
    /// Channel.
    pub channel: usize,
}

/// Input of linear layers.
#[derive(Clone, Debug, Serialize)]
pub struct InputStats {
    /// Modules that read it.
    pub modules: Vec<String>,
    /// Tokens that reached it.
    pub tokens: u64,
    /// Largest magnitude.
    pub amax: f32,
    /// Largest channel, by its amax.
    pub channel: usize,
    /// Its amax over the median amax of the channels.
    pub channel_ratio: f32,
    /// Token with the largest magnitude; `None` for experts, whose tokens are chosen.
    pub token: Option<Peak>,
    /// Its amax over the median amax of the tokens.
    pub token_ratio: f32,
    /// Mean kurtosis of the tokens: 3 for normal values.
    pub kurtosis: f64,
    /// The same after a Hadamard rotation; `None` if the width has none.
    pub kurtosis_rotated: Option<f64>,
    /// Relative error of the products of ordinary tokens (without spikes) with the input in int8 by token.
    pub error_by_token: f64,
    /// The same after a Hadamard rotation.
    pub error_rotated: Option<f64>,
    /// The same with one int8 range for all tokens.
    pub error_by_tensor: f64,
    /// The same with one int8 range for all ordinary tokens.
    pub error_without_spikes: f64,
    /// Scheme of the input that the model states.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub scheme: Option<String>,
    /// Error under that scheme.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub error_own: Option<f64>,
    /// For a stored range: the range that this text needs over the stored one.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub range_ratio: Option<f32>,
    /// For a stored range: the error with a range of this text.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub error_refitted: Option<f64>,
    /// Error of int8 with one range from the calibration text.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub error_calibrated: Option<f64>,
    /// The same with the range of this text.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub error_on_text: Option<f64>,
    /// True if every token or group has a range of its own, computed at run time.
    #[serde(skip)]
    pub dynamic: bool,
    #[serde(skip)]
    pub(super) input: Option<LinearInput>,
}

/// Keys or values under the stored scale of the cache.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct CacheStats {
    /// `keys` or `values`.
    pub side: &'static str,
    /// Scale that this text needs over the stored one, of the head where they differ most.
    pub range_ratio: f32,
    /// Relative error with the stored scales.
    pub error: f64,
    /// Relative error with scales of this text.
    pub error_refitted: f64,
}

/// A layer on the text.
#[derive(Clone, Debug, Serialize)]
pub struct LayerStats {
    /// Layer index.
    pub layer: usize,
    /// States after the layer.
    pub states: Peak,
    /// Inputs of its linear layers, in the order of the model.
    pub inputs: Vec<InputStats>,
    /// Keys and values, if the model stores scales of its cache.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub cache: Vec<CacheStats>,
    /// Tokens routed to each expert.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub routed: Vec<u64>,
}

/// The model on the text.
#[derive(Clone, Debug)]
pub struct ActivationStats {
    /// Number of tokens.
    pub tokens: usize,
    /// States that enter the first layer.
    pub embedded: Peak,
    /// Layers.
    pub layers: Vec<LayerStats>,
}

/// A token counts as a spike beyond this many times the median amax of the tokens.
pub(super) const SPIKE: f32 = 8.0;

/// Tokens of one window at an input: amax of each channel and token, and a sample of tokens.
#[derive(Default)]
struct Taken {
    rows: u64,
    channels: Vec<f32>,
    tokens: Vec<f32>,
    sample: Vec<f32>,
}

impl Taken {
    fn add(&mut self, x: &[f32], width: usize, every: usize) {
        self.channels.resize(width, 0.0);
        for token in x.chunks_exact(width) {
            if self.rows.is_multiple_of(every as u64) {
                self.sample.extend_from_slice(token);
            }
            self.rows += 1;
            self.tokens.push(amax(token));
            self.channels.iter_mut().zip(token).for_each(|(most, x)| *most = most.max(x.abs()));
        }
    }

    fn merge(&mut self, other: &Taken) {
        self.rows += other.rows;
        self.channels.resize(self.channels.len().max(other.channels.len()), 0.0);
        self.channels.iter_mut().zip(&other.channels).for_each(|(most, x)| *most = most.max(*x));
        self.tokens.extend_from_slice(&other.tokens);
        self.sample.extend_from_slice(&other.sample);
    }
}

/// A window after a layer: its states, and what was taken on the way.
struct Passed {
    state: State,
    inputs: BTreeMap<LinearInput, Taken>,
    keys: Vec<f32>,
    values: Vec<f32>,
}

/// Runs the model of `request` over `windows`. With `calibrated`, errors under the ranges of that pass are measured.
/// `progress` receives the number of layers done.
///
/// # Errors
/// A model that cannot be loaded or run.
pub(super) fn collect(
    request: &Request<'_>,
    config: &ModelConfig,
    windows: &[Sequence],
    calibrated: Option<&ActivationStats>,
    progress: &dyn Fn(usize),
) -> Result<ActivationStats> {
    let source = CacheInF32(request.files);
    let ends = Ends::load(&source, config)?;
    let mut states = ends.embed(config, windows)?;
    let tokens: usize = windows.iter().map(|window| window.tokens.len()).sum();
    let embedded = peak(&states, config.hidden_size);
    let mut looking =
        Looking { files: request.files, config, every: 1, threads: request.threads, calibrated: None };
    looking.every = (tokens / SAMPLE).max(1);
    let mut layers = Vec::with_capacity(config.num_hidden_layers);
    for number in 0..config.num_hidden_layers {
        let layer = Layer::load(&source, config, number)?;
        looking.calibrated = calibrated.and_then(|seen| seen.layers.get(number));
        let (seen, next) = looking.layer(&layer, &states)?;
        states = next;
        layers.push(seen);
        progress(number + 1);
    }
    Ok(ActivationStats { tokens, embedded, layers })
}

struct Looking<'a> {
    files: &'a ModelFiles,
    config: &'a ModelConfig,
    every: usize,
    threads: usize,
    calibrated: Option<&'a LayerStats>,
}

impl Looking<'_> {
    fn layer(&self, layer: &Layer, states: &States) -> Result<(LayerStats, States)> {
        let number = layer.index();
        let quant = self.cache_quant(number)?;
        let passed = each(states.len(), self.threads, |i| self.window(layer, &states[i], quant.is_some()))?;
        let mut inputs: BTreeMap<LinearInput, Taken> = BTreeMap::new();
        let (mut keys, mut values, mut next) = (Vec::new(), Vec::new(), States::with_capacity(states.len()));
        let mut lens = Vec::new();
        for window in passed {
            for (input, taken) in &window.inputs {
                inputs.entry(*input).or_default().merge(taken);
            }
            keys.extend(window.keys);
            values.extend(window.values);
            lens.push(window.state.len() / self.config.hidden_size);
            next.push(window.state);
        }
        let cache = quant.map_or_else(Vec::new, |quant| self.cache(number, &quant, [&keys, &values]));
        let routed = self.routed(number, &inputs);
        let mut seen = LayerStats {
            layer: number,
            states: peak(&next, self.config.hidden_size),
            inputs: Vec::new(),
            cache,
            routed,
        };
        for info in self.config.layer_linears(number) {
            let input = info.kind.input();
            if seen.inputs.iter().any(|known| known.input == Some(input)) {
                continue;
            }
            if let Some(taken) = inputs.get(&input).filter(|taken| taken.rows > 0) {
                seen.inputs.push(self.input(layer, input, taken, &lens));
            }
        }
        Ok((seen, next))
    }

    fn window(&self, layer: &Layer, state: &State, cached: bool) -> Result<Passed> {
        let number = layer.index();
        let width = |input| self.config.layer_input_width(number, input);
        let mut inputs: BTreeMap<LinearInput, Taken> = BTreeMap::new();
        let mut observe = |input: LinearInput, x: &[f32]| {
            // An expert has fewer tokens, of which more are held.
            let every = if expert(input).is_some() { 1 } else { self.every };
            inputs.entry(input).or_default().add(x, width(input).max(1), every);
        };
        let tokens = state.len() / self.config.hidden_size;
        let (state, buffers) = state.clone().through(layer, self.config, Some(&mut observe))?;
        let (keys, values) = match cached {
            true => copied(&buffers, self.config, number, tokens),
            false => (Vec::new(), Vec::new()),
        };
        Ok(Passed { state, inputs, keys, values })
    }

    /// Returns the stored scales of the layer's cache.
    fn cache_quant(&self, layer: usize) -> Result<Option<KvQuant>> {
        if !self.config.has_own_kv(layer) || self.config.latent.is_some() {
            return Ok(None);
        }
        let heads = self.config.heads(layer).key_value;
        let quant = self.files.kv_quant(&self.config.attention_module(layer), heads)?;
        Ok(quant.filter(|quant| quant.scheme.source == Source::Static && !quant.k_scale.is_empty()))
    }

    /// Compares stored scales of keys and values with those that `sides` need.
    fn cache(&self, layer: usize, quant: &KvQuant, sides: [&[f32]; 2]) -> Vec<CacheStats> {
        let heads = self.config.heads(layer);
        let names = ["keys", "values"].into_iter().zip([&quant.k_scale, &quant.v_scale]);
        let side_report = |((side, scales), x): ((&'static str, &Vec<f32>), &[f32])| {
            let by_head = scales.len() == heads.key_value && scales.len() > 1;
            let (mut worst, mut own, mut refitted, mut norm) = (1f32, 0.0, 0.0, 0.0);
            for (head, &stored) in scales.iter().enumerate() {
                let part: Vec<f32> = match by_head {
                    true => x
                        .chunks_exact(heads.key_value * heads.dim)
                        .flat_map(|token| &token[head * heads.dim..][..heads.dim])
                        .copied()
                        .collect(),
                    false => x.to_vec(),
                };
                let needed = scale(&quant.scheme, amax(&part));
                let far = |ratio: f32| ratio.ln().abs();
                if far(needed / stored) > far(worst) {
                    worst = needed / stored;
                }
                norm += square(&part);
                own += self.cache_error(&part, quant, stored, heads.dim)?;
                refitted += self.cache_error(&part, quant, needed, heads.dim)?;
            }
            let (error, error_refitted) = ((own / norm).sqrt(), (refitted / norm).sqrt());
            Some(CacheStats { side, range_ratio: worst, error, error_refitted })
        };
        names.zip(sides).filter_map(side_report).collect()
    }

    /// Returns the squared error of `x` under the scheme of `quant` with this scale.
    fn cache_error(&self, x: &[f32], quant: &KvQuant, scale: f32, dim: usize) -> Option<f64> {
        let stated = ActivationQuant::new(quant.scheme.clone(), Some(scale));
        let quantizer = InputQuantizer::new("cache", &stated).ok()?;
        let mut y = x.to_vec();
        quantizer.apply(&mut y, dim).ok()?;
        y.iter_mut().zip(x).for_each(|(y, x)| *y -= x);
        Some(square(&y))
    }

    fn routed(&self, layer: usize, inputs: &BTreeMap<LinearInput, Taken>) -> Vec<u64> {
        let experts = self.config.experts.as_ref();
        let count = experts.filter(|experts| experts.layers.get(layer) == Some(&true)).map_or(0, |e| e.count);
        let reached = |e: u16| {
            let taken =
                inputs.get(&LinearInput::Expert(e)).or_else(|| inputs.get(&LinearInput::ExpertDown(e)));
            taken.map_or(0, |taken| taken.rows)
        };
        (0..count).map(reached).collect()
    }

    fn input(&self, layer: &Layer, input: LinearInput, taken: &Taken, lens: &[usize]) -> InputStats {
        let readers = self.config.layer_linears(layer.index()).into_iter();
        let readers: Vec<&Linear> = readers
            .filter(|info| info.kind.input() == input)
            .filter_map(|info| layer.linear(info.kind))
            .collect();
        let width = taken.channels.len();
        let channel = largest(&taken.channels);
        let most = taken.channels.get(channel).copied().unwrap_or(0.0);
        let token = largest(&taken.tokens);
        let ratio = |most: f32, of: &[f32]| most / median(of).max(f32::MIN_POSITIVE);
        let token_ratio = ratio(most, &taken.tokens);
        // What the codes read: the input behind the layer's own transforms, such as an online rotation.
        let mut sample: Vec<f32> =
            taken.sample.chunks_exact(width.max(1)).take(2 * SAMPLE).flatten().copied().collect();
        let before = readers.first().map_or(&[][..], |linear| &linear.transforms().before);
        before.iter().for_each(|map| map.apply(&mut sample, width));
        let all =
            Sampled { x: &sample, width: width.max(1), weights: rows_of(readers.iter().copied(), width) };
        let limit = SPIKE * median(&taken.tokens);
        let x = without_spikes(all.x, all.width, limit);
        let kept = Sampled { x: &x, width: all.width, weights: all.weights.clone() };
        let largest_kept = taken.tokens.iter().copied().filter(|x| *x <= limit).fold(0.0, f32::max);
        let (kurtosis, kurtosis_rotated) = all.kurtosis();
        let mut seen = InputStats {
            modules: readers.iter().map(|linear| linear.module().to_owned()).collect(),
            tokens: taken.rows,
            amax: most,
            channel,
            channel_ratio: ratio(most, &taken.channels),
            token: expert(input).is_none().then(|| place(token, lens, most, channel)),
            token_ratio,
            kurtosis,
            kurtosis_rotated,
            error_by_token: kept.by_token(),
            error_rotated: kept.rotated(),
            error_by_tensor: kept.by_tensor(most),
            error_without_spikes: kept.by_tensor(largest_kept),
            scheme: None,
            error_own: None,
            range_ratio: None,
            error_refitted: None,
            error_calibrated: None,
            error_on_text: None,
            dynamic: false,
            input: Some(input),
        };
        let behind = if before.is_empty() { most } else { amax(&sample) };
        if let Some(linear) = readers.iter().find(|linear| linear.input().is_some()) {
            stated(linear, &kept, behind, &mut seen);
        }
        let known = self.calibrated.and_then(|layer| layer.inputs.iter().find(|i| i.input == Some(input)));
        if let Some(known) = known.filter(|_| before.is_empty()) {
            seen.error_calibrated = Some(kept.by_tensor(known.amax));
            seen.error_on_text = Some(kept.by_tensor(most));
        }
        seen
    }
}

/// Returns the tokens of `x` whose amax is at most `limit`.
fn without_spikes(x: &[f32], width: usize, limit: f32) -> Vec<f32> {
    x.chunks_exact(width).filter(|token| amax(token) <= limit).flatten().copied().collect()
}

/// Measures the input's own scheme on ordinary tokens, as `linear` states it, with a range of this text for comparison.
fn stated(linear: &Linear, kept: &Sampled<'_>, most: f32, seen: &mut InputStats) {
    let Some(quantizer) = linear.input() else { return };
    let quant = quantizer.quant();
    seen.scheme = Some(quant.scheme.to_string());
    seen.error_own = kept.under(quantizer);
    seen.dynamic = quant.outer.is_none();
    // A zero point shifts the range, which the amax does not describe.
    if let Some(stored) = quant.outer.filter(|_| quant.zero == 0) {
        let needed = scale(&quant.scheme, most);
        let refit = ActivationQuant { outer: Some(needed), ..quant.clone() };
        seen.range_ratio = Some(needed / stored);
        seen.error_refitted =
            InputQuantizer::new(linear.module(), &refit).ok().and_then(|refit| kept.under(&refit));
    }
}

/// Returns the expert that reads this input.
pub(super) fn expert(input: LinearInput) -> Option<u16> {
    match input {
        LinearInput::Expert(e) | LinearInput::ExpertDown(e) => Some(e),
        _ => None,
    }
}

fn copied(buffers: &Buffers, config: &ModelConfig, layer: usize, tokens: usize) -> (Vec<f32>, Vec<f32>) {
    let (keys, values) = buffers.keys_and_values(config, layer, tokens);
    (keys.to_vec(), values.to_vec())
}

fn square(x: &[f32]) -> f64 {
    x.iter().map(|&x| f64::from(x) * f64::from(x)).sum()
}

/// Returns the index of the largest value.
fn largest(x: &[f32]) -> usize {
    (0..x.len()).max_by(|&a, &b| x[a].total_cmp(&x[b])).unwrap_or(0)
}

fn median(x: &[f32]) -> f32 {
    let mut sorted = x.to_vec();
    sorted.sort_by(f32::total_cmp);
    sorted.get(sorted.len() / 2).copied().unwrap_or(0.0)
}

/// Returns the place of token `index` of the whole text.
fn place(index: usize, lens: &[usize], amax: f32, channel: usize) -> Peak {
    let mut position = index;
    for (window, &len) in lens.iter().enumerate() {
        if position < len {
            return Peak { amax, window, position, channel };
        }
        position -= len;
    }
    Peak { amax, channel, ..Peak::default() }
}

/// Returns the largest magnitude of the states of all windows.
fn peak(states: &States, width: usize) -> Peak {
    let mut most = Peak::default();
    for (window, state) in states.iter().enumerate() {
        for (i, x) in state.into_iter().enumerate() {
            if !x.is_finite() {
                return Peak { amax: f32::NAN, window, position: i / width, channel: i % width };
            }
            if x.abs() > most.amax {
                most = Peak { amax: x.abs(), window, position: i / width, channel: i % width };
            }
        }
    }
    most
}
