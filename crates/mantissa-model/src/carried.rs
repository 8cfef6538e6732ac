//! Inputs of the layers of some models besides the states: embeddings of their own, keys and values of earlier layers,
//! parallel streams of states (Gemma 3n and 4), tokens that an earlier layer has chosen (GLM-5).

use std::sync::Arc;

use crate::buffers::Buffers;
use crate::config::ModelConfig;
use crate::embedding::{Embedding, LayerEmbeddings};

/// What the layers read besides the states of one window, for work that runs one layer at a time: [`enter`](Self::enter)
/// before a layer, [`leave`](Self::leave) and [`advance`](Self::advance) after it. Without memory for models whose layers read only the states.
#[derive(Clone, Debug, Default)]
pub struct Carried {
    inputs: Option<Arc<LayerEmbeddings>>,
    tokens: Vec<u32>,
    /// Scaled embeddings, `[tokens, hidden]`.
    first: Arc<[f32]>,
    /// Keys and values of the last layer that has its own: without a window, and with one.
    shared: [Option<Arc<[Vec<f32>; 2]>>; 2],
    /// Parallel streams of states, `[streams, tokens, hidden]`; empty before the first layer.
    streams: Arc<[f32]>,
    /// Tokens that the queries attend to, by the last layer that has chosen, `[tokens, chosen]`.
    chosen: Arc<[u32]>,
}

impl Carried {
    /// Makes what the first layer reads for a window of `tokens`, whose embeddings are `states` `[tokens, hidden]`.
    pub fn new(embedding: &Embedding, tokens: &[u32], states: &[f32]) -> Self {
        match embedding.layer_embeddings() {
            None => Carried::default(),
            inputs => Carried {
                inputs: inputs.cloned(),
                tokens: tokens.to_vec(),
                first: states.into(),
                ..Carried::default()
            },
        }
    }

    /// Bytes that a token of this model takes in windows of up to `longest` tokens, in f32.
    pub fn bytes_per_token(config: &ModelConfig, longest: usize) -> usize {
        let inputs = if config.own_input_width() > 0 { 4 * config.hidden_size } else { 0 };
        let layers = (0..config.num_hidden_layers).filter(|layer| config.shares_kv(*layer));
        let shared = layers.map(|layer| {
            let heads = config.heads(layer);
            8 * heads.key_value * heads.dim
        });
        let streams = 4 * config.streams_width();
        inputs + shared.sum::<usize>() + streams + 4 * config.carried_choice(longest)
    }

    /// Writes what `layer` reads besides the states into the buffers.
    ///
    /// # Panics
    /// If the buffers are of another model, or planned for fewer tokens.
    pub fn enter(&self, config: &ModelConfig, layer: usize, b: &mut Buffers) {
        if let Some(inputs) = &self.inputs {
            inputs.fill(layer, &self.tokens, &self.first, &mut b.layer_input, 1);
        }
        if let Some(streams) = config.by_layer.streams {
            // The first layer makes the others from the first.
            let (len, stride) = (self.tokens.len() * config.hidden_size, b.streams.len() / streams.count);
            let own = if self.streams.is_empty() { &self.first } else { &self.streams };
            for (from, to) in own.chunks_exact(len.max(1)).zip(b.streams.chunks_exact_mut(stride)) {
                to[..len].copy_from_slice(from);
                to[len..].fill(0.0);
            }
        }
        // Those that the first layer makes are of the states.
        if config.by_layer.hyper.is_some() {
            b.streams[..self.streams.len()].copy_from_slice(&self.streams);
            b.streams[self.streams.len()..].fill(0.0);
        }
        if config.uses_choice(layer) {
            b.chosen[..self.chosen.len()].copy_from_slice(&self.chosen);
        }
        let windowed = config.windows[layer].is_some();
        if let Some(shared) =
            self.shared[usize::from(windowed)].as_ref().filter(|_| !config.has_own_kv(layer))
        {
            let (keys, values) = b.shared(windowed);
            for (from, to) in shared.iter().zip([keys, values]) {
                to[..from.len()].copy_from_slice(from);
            }
        }
    }

    /// Keeps the parallel streams that the buffers hold after `tokens` tokens have run to the end of a layer, if the model
    /// has them.
    ///
    /// # Panics
    /// As [`enter`](Self::enter).
    pub fn advance(&mut self, config: &ModelConfig, tokens: usize, b: &Buffers) {
        if let Some(streams) = config.by_layer.streams {
            let (len, stride) = (tokens * config.hidden_size, b.streams.len() / streams.count);
            self.streams =
                b.streams.chunks_exact(stride).flat_map(|stream| &stream[..len]).copied().collect();
        }
        if let Some(hyper) = config.by_layer.hyper {
            self.streams = b.streams[..tokens * hyper.count * config.hidden_size].into();
        }
    }

    /// Keeps the keys and values, and the tokens that the queries attend to, that the buffers hold after `tokens` tokens have
    /// run through `layer`, if later layers read them.
    ///
    /// # Panics
    /// As [`enter`](Self::enter).
    pub fn leave(&mut self, config: &ModelConfig, layer: usize, tokens: usize, b: &Buffers) {
        if config.shares_kv(layer) {
            let (keys, values) = b.keys_and_values(config, layer, tokens);
            let windowed = config.windows[layer].is_some();
            self.shared[usize::from(windowed)] = Some(Arc::new([keys.to_vec(), values.to_vec()]));
        }
        if config.index_width(layer) > 0 {
            let len = tokens * config.carried_choice(tokens);
            self.chosen = b.chosen[..len].into();
        }
    }
}
