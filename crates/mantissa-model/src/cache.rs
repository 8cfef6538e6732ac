//! Keys and values of the tokens so far, in f32, for generation. Per layer `[capacity, key width]`.

use crate::buffers::{check_context, zeros};
use crate::config::ModelConfig;
use crate::error::{ForwardError, LoadError};

/// The KV cache of one sequence.
#[derive(Debug)]
pub struct KvCache {
    layers: Vec<LayerCache>,
    len: usize,
    capacity: usize,
    width: usize,
}

/// One layer's part.
#[derive(Debug)]
pub(crate) struct LayerCache {
    keys: Vec<f32>,
    values: Vec<f32>,
}

impl KvCache {
    /// Allocates for `capacity` tokens.
    ///
    /// # Errors
    /// [`LoadError::Context`] where the model's context is shorter, [`LoadError::Memory`] where there is not
    /// enough memory.
    pub fn plan(config: &ModelConfig, capacity: usize) -> Result<Self, LoadError> {
        check_context(config, capacity)?;
        let memory = || LoadError::Memory { what: "KV cache", bytes: Self::bytes_needed(config, capacity) };
        let width = config.key_value_width();
        let len = capacity.checked_mul(width).ok_or_else(memory)?;
        let layer = |_| Some(LayerCache { keys: zeros(len)?, values: zeros(len)? });
        let layers = (0..config.num_hidden_layers).map(layer).collect::<Option<_>>().ok_or_else(memory)?;
        Ok(KvCache { layers, len: 0, capacity, width })
    }

    /// Bytes that [`plan`](Self::plan) allocates; `u64::MAX` where the number overflows.
    pub fn bytes_needed(config: &ModelConfig, capacity: usize) -> u64 {
        let per_token = config.key_value_width() as u64 * config.num_hidden_layers as u64 * 2 * 4;
        per_token.saturating_mul(capacity as u64)
    }

    /// Tokens held.
    pub fn len(&self) -> usize {
        self.len
    }

    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Tokens that fit.
    pub fn capacity(&self) -> usize {
        self.capacity
    }

    /// Forgets all tokens from `len` on.
    pub fn truncate(&mut self, len: usize) {
        self.len = self.len.min(len);
    }

    /// Whether `tokens` more of this model fit.
    pub(crate) fn check(&self, config: &ModelConfig, tokens: usize) -> Result<(), ForwardError> {
        if (self.layers.len(), self.width) != (config.num_hidden_layers, config.key_value_width()) {
            return Err(ForwardError::OtherModel { what: "KV cache" });
        }
        let needed = self.len.saturating_add(tokens);
        if needed > self.capacity {
            return Err(ForwardError::Plan {
                what: "tokens of the KV cache",
                needed,
                planned: self.capacity,
            });
        }
        Ok(())
    }

    pub(crate) fn layer(&mut self, layer: usize) -> &mut LayerCache {
        &mut self.layers[layer]
    }

    /// Makes the tokens that every layer has written since the last call part of the cache.
    pub(crate) fn commit(&mut self, tokens: usize) {
        self.len += tokens;
    }
}

impl LayerCache {
    /// Writes the new keys and values (`[t, width]`) behind the `start` tokens held, and returns all of them.
    pub(crate) fn append(&mut self, start: usize, width: usize, k: &[f32], v: &[f32]) -> (&[f32], &[f32]) {
        let end = start * width + k.len();
        self.keys[start * width..end].copy_from_slice(k);
        self.values[start * width..end].copy_from_slice(v);
        (&self.keys[..end], &self.values[..end])
    }
}
