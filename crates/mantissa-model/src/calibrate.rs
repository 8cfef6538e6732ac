//! Levels and ranges of [`KvScheme::Nuq`](crate::KvScheme) from a calibration text.
//!
//! The model runs over the text layer by layer with an unquantized cache. Levels minimize the weighted squared error
//! (weighted k-means, KVQuant sec. 3.2). KVQuant weights an element by the square of the loss's gradient with respect
//! to it; here the weight is the square of what the element's token adds to the errors of the attention output, `o_i =
//! Σ_j p_ij v_j`, which needs no backward pass: an error of `v_j` reaches `o_i` with `p_ij`, one of `k_j` with `p_ij
//! |v_j - o_i| |q_i| scale`, at most. Masks count; soft caps and sinks do not.

use std::ops::ControlFlow;

use mantissa_kernels::{CausalAttention, kernels};
use mantissa_num::lloyd;
use mantissa_store::convention::KvLevels;

use crate::buffers::Buffers;
use crate::carried::Carried;
use crate::config::ModelConfig;
use crate::embedding::{Embedding, load_embedding};
use crate::error::{ForwardError, LoadError};
use crate::kv::book::{BookCodec, KeyBook, LayerBooks, Scaling, Span};
use crate::kv::{CacheInF32, KvPolicy, KvScheme};
use crate::layer::Layer;
use crate::source::WeightSource;

/// Error of calibrating levels.
#[derive(Debug, thiserror::Error)]
pub enum KvCalibrationError {
    /// The model's heads cannot be stored that way, or there is not enough memory.
    #[error(transparent)]
    Load(#[from] LoadError),
    /// A window cannot be run.
    #[error("window {window} of the calibration text: {error}")]
    Forward {
        /// Index of the window.
        window: usize,
        /// Underlying error.
        error: ForwardError,
    },
    /// The caller ended the run.
    #[error("interrupted before the end")]
    Stopped,
}

/// Tokens of a layer with their weights.
#[derive(Debug, Default)]
struct Samples {
    /// `[tokens, key width]` each.
    keys: Vec<f32>,
    values: Vec<f32>,
    /// `[tokens, heads]` each.
    key_weights: Vec<f32>,
    value_weights: Vec<f32>,
}

/// A calibration text on its way through a model.
pub(crate) struct Text<'a> {
    windows: &'a [Vec<u32>],
    /// Input of the next layer for each window, `[tokens, hidden]`.
    states: Vec<Vec<f32>>,
    /// What layers read besides the states.
    carried: Vec<Carried>,
    buffers: Buffers,
}

impl<'a> Text<'a> {
    /// Embeds the text.
    ///
    /// # Errors
    /// [`KvCalibrationError`].
    pub(crate) fn begin(
        config: &ModelConfig,
        embedding: &Embedding,
        windows: &'a [Vec<u32>],
    ) -> Result<Self, KvCalibrationError> {
        let longest = windows.iter().map(Vec::len).max().unwrap_or(0);
        let buffers = Buffers::plan(config, longest, longest)?;
        let (mut states, mut carried) = (Vec::new(), Vec::new());
        for (window, tokens) in windows.iter().enumerate() {
            let mut x = vec![0.0; tokens.len() * config.hidden_size];
            let embedded = embedding.embed(tokens, &[tokens.len()], 0, &mut x);
            embedded.map_err(|error| KvCalibrationError::Forward { window, error })?;
            carried.push(Carried::new(embedding, tokens, &x));
            states.push(x);
        }
        Ok(Text { windows, states, carried, buffers })
    }

    /// Runs the text through the next layer, which must not quantize its cache, and finds its levels for `policy`; `None`
    /// if it has no keys and values.
    /// `tick` is called before every window and may stop the run.
    ///
    /// # Errors
    /// [`KvCalibrationError`].
    pub(crate) fn through(
        &mut self,
        policy: &KvPolicy,
        config: &ModelConfig,
        index: usize,
        layer: &Layer,
        tick: &mut dyn FnMut() -> ControlFlow<()>,
    ) -> Result<Option<LayerBooks>, KvCalibrationError> {
        let attends = layer.flow().attends();
        let mut samples = Samples::default();
        let windows = self.states.iter_mut().zip(self.windows).zip(&mut self.carried);
        for (window, ((states, tokens), carried)) in windows.enumerate() {
            if tick().is_break() {
                return Err(KvCalibrationError::Stopped);
            }
            carried.enter(config, index, &mut self.buffers);
            let run = layer.run(config, &[tokens.len()], states, None, &mut self.buffers);
            carried.leave(config, index, tokens.len(), &self.buffers);
            carried.advance(config, tokens.len(), &self.buffers);
            run.map_err(|error| KvCalibrationError::Forward { window, error })?;
            if attends {
                samples.take(policy, layer, tokens.len(), &mut self.buffers);
            }
        }
        Ok(attends.then(|| samples.books(policy, &config.of_layer(index))))
    }
}

/// Finds the levels of `policy` for every layer of `source` with keys and values on `windows` of tokens, with keys and values in f32: those
/// of [`Decoder::set_kv_calibrated`](crate::Decoder::set_kv_calibrated). One layer is in memory at a time. `tick` is
/// called before every window of a layer and may stop the run.
///
/// # Errors
/// [`KvCalibrationError`].
pub fn find_kv_levels(
    source: &dyn WeightSource,
    config: &ModelConfig,
    policy: &KvPolicy,
    windows: &[Vec<u32>],
    tick: &mut dyn FnMut() -> ControlFlow<()>,
) -> Result<Vec<Option<KvLevels>>, KvCalibrationError> {
    // Checks that the heads can be stored that way.
    policy.quantizer(config)?;
    let plain = CacheInF32(source);
    let mut text = Text::begin(config, &load_embedding(&plain, config)?, windows)?;
    let mut levels = Vec::with_capacity(config.num_hidden_layers);
    for layer in 0..config.num_hidden_layers {
        let books = text.through(policy, config, layer, &Layer::load(&plain, config, layer)?, tick)?;
        levels.push(books.map(|books| books.stored(policy)));
    }
    Ok(levels)
}

impl Samples {
    /// Adds the tokens of the window that `buffers` has just run.
    fn take(&mut self, policy: &KvPolicy, layer: &Layer, tokens: usize, buffers: &mut Buffers) {
        let flow = layer.flow();
        let shape = flow.attention_shape();
        let (a, _, _) = buffers.activations(flow.local);
        let width = shape.kv_heads * shape.head_dim;
        let (k, v) = (&mut a.k[..tokens * width], &a.v[..tokens * width]);
        // The norm after attention, or a latent, has overwritten the queries.
        let q = (!flow.attention().sub_norms).then_some(&a.q[..tokens * shape.heads * shape.head_dim]);
        let (keys, values) = weights(shape, q, k, v);
        self.key_weights.extend(keys);
        self.value_weights.extend(values);
        if policy.pre_rope && flow.attention().rotates() {
            let angles = ..tokens * flow.attention().half();
            kernels().rope_rotate_back(k, shape.kv_heads, shape.head_dim, &a.cos[angles], &a.sin[angles]);
        }
        self.keys.extend_from_slice(k);
        self.values.extend_from_slice(v);
    }

    fn books(&self, policy: &KvPolicy, config: &ModelConfig) -> LayerBooks {
        let (width, head) = (config.key_value_width(), config.head_dim);
        let keys = match policy.keys {
            Some(KvScheme::Nuq { bits, outliers }) => {
                let spans: Vec<Span> =
                    (0..width).map(|c| channel_span(&self.keys[c..], width, outliers)).collect();
                let mut pairs = Vec::new();
                for (i, &x) in self.keys.iter().enumerate() {
                    let span = spans[i % width];
                    let (place, weight) = (span.place(x), self.key_weights[i / head] * span.half * span.half);
                    // Values beyond the range are outliers, or clipped.
                    if place.abs() <= 1.0 {
                        pairs.push((place, weight));
                    }
                }
                Some(KeyBook { levels: lloyd::levels(&pairs, 1 << bits), spans })
            }
            _ => None,
        };
        let values = match policy.values {
            Some(KvScheme::Nuq { bits, outliers }) => {
                let codec =
                    BookCodec::new(vec![0.0; 2], width, Scaling::Range, BookCodec::kept_of(width, outliers));
                let mut pairs = Vec::new();
                for (token, row) in self.values.chunks_exact(width).enumerate() {
                    let kept = codec.farthest(row);
                    let span = codec.span(row, &kept);
                    for (c, &x) in row.iter().enumerate().filter(|(c, _)| !kept.contains(c)) {
                        let weight = self.value_weights[token * (width / head) + c / head];
                        pairs.push((span.place(x), weight * span.half * span.half));
                    }
                }
                Some(lloyd::levels(&pairs, 1 << bits))
            }
            _ => None,
        };
        LayerBooks { keys, values }
    }
}

/// Range of every `stride`-th value that excludes `outliers` hundredths of a percent, half on each side.
fn channel_span(values: &[f32], stride: usize, outliers: u32) -> Span {
    let mut sorted: Vec<f32> = values.iter().step_by(stride.max(1)).copied().collect();
    sorted.sort_by(f32::total_cmp);
    let outside = sorted.len() * outliers as usize / 20_000;
    match (sorted.get(outside), sorted.iter().rev().nth(outside)) {
        (Some(least), Some(greatest)) => Span::of(*least, *greatest),
        _ => Span::default(),
    }
}

/// Computes the weights of keys and of values, `[tokens, heads]`; all 1 without queries.
fn weights(shape: &CausalAttention, q: Option<&[f32]>, k: &[f32], v: &[f32]) -> (Vec<f32>, Vec<f32>) {
    let (d, kv_heads) = (shape.head_dim, shape.kv_heads);
    let tokens = k.len() / (kv_heads * d);
    let Some(q) = q else { return (vec![1.0; tokens * kv_heads], vec![1.0; tokens * kv_heads]) };
    let (mut of_keys, mut of_values) = (vec![0.0; tokens * kv_heads], vec![0.0; tokens * kv_heads]);
    let vector = |x: &[f32], j: usize, h: usize| {
        let at = (j * kv_heads + h) * d;
        at..(at + d).min(x.len())
    };
    for (i, q) in q.chunks_exact(shape.heads * d).enumerate() {
        let seen = shape.window.map_or(0, |window| (i + 1).saturating_sub(window))..i + 1;
        for (head, q) in q.chunks_exact(d).enumerate() {
            let h = head * kv_heads / shape.heads;
            let score = |j| shape.scale * kernels().dot(q, &k[vector(k, j, h)]);
            let mut p: Vec<f32> = seen.clone().map(score).collect();
            kernels().softmax(&mut p);
            let mut o = vec![0.0; d];
            p.iter().zip(seen.clone()).for_each(|(p, j)| kernels().axpy(*p, &v[vector(v, j, h)], &mut o));
            let reach = shape.scale * shape.scale * kernels().dot(q, q);
            for (p, j) in p.iter().zip(seen.clone()) {
                let squares = v[vector(v, j, h)].iter().zip(&o).map(|(v, o)| (v - o) * (v - o));
                of_values[j * kv_heads + h] += p * p;
                of_keys[j * kv_heads + h] += p * p * reach * squares.sum::<f32>();
            }
        }
    }
    (of_keys, of_values)
}
