//! Keys and values of earlier tokens, for generation: per layer `[capacity, key width]` in f32, quantized, or the
//! latents that they are projected from; and the states of recurrent mixers.

mod attend;
mod latent;
mod packed;
mod state;

use crate::config::ModelConfig;
use crate::error::{ForwardError, LoadError};
use crate::kv::policy::KvPolicy;
use crate::kv::quantizer::KvQuantizer;
use crate::latent::LatentScratch;
use crate::memory::{check_context, zeros};

use self::latent::LatentCache;
use self::packed::{Scratch, SideCache};
use self::state::StateCache;

/// The KV cache of one sequence.
#[derive(Debug)]
pub struct KvCache {
    layers: Vec<LayerCache>,
    /// Layer whose keys and values each layer reads.
    sources: Vec<usize>,
    /// States of recurrent mixers, by layer.
    states: Vec<Option<Box<StateCache>>>,
    /// Scratch that quantized layers are decoded into.
    scratch: Option<Scratch>,
    /// Scratch that latents are decoded into.
    latent: Option<Box<LatentScratch>>,
    len: usize,
    /// Tokens held before the last pass, whose states are saved.
    saved: usize,
    capacity: usize,
    width: usize,
}

/// One layer's part of the cache.
#[derive(Debug)]
enum LayerCache {
    Exact {
        keys: Vec<f32>,
        values: Vec<f32>,
    },
    Quantized {
        keys: Box<SideCache>,
        values: Box<SideCache>,
    },
    Latent(Box<LatentCache>),
    /// Nothing: the layer reads the keys and values of another.
    Shared,
}

/// One layer's part of the cache, with the scratch to read it.
#[derive(Debug)]
pub(crate) struct Past<'a> {
    layer: &'a mut LayerCache,
    state: Option<&'a mut StateCache>,
    scratch: Option<&'a mut Scratch>,
    latent: Option<&'a mut LatentScratch>,
}

/// Keys and values of all tokens, `[tokens, width]` each.
pub(crate) type KeysAndValues<'a> = (&'a mut [f32], &'a mut [f32]);

impl KvCache {
    /// Allocates for `capacity` tokens in f32.
    ///
    /// # Errors
    /// [`LoadError::Context`] if the model's context is shorter, [`LoadError::Memory`] if there is not enough memory.
    pub fn plan(config: &ModelConfig, capacity: usize) -> Result<Self, LoadError> {
        Self::with_layers(config, capacity, config.num_hidden_layers, |_| None)
    }

    pub(crate) fn with_layers<'q>(
        config: &ModelConfig,
        capacity: usize,
        count: usize,
        quantizer: impl Fn(usize) -> Option<&'q KvQuantizer>,
    ) -> Result<Self, LoadError> {
        check_context(config, capacity)?;
        let memory = || LoadError::Memory {
            what: "KV cache",
            bytes: (0..count).map(|layer| layer_bytes(config, layer, capacity, quantizer(layer))).sum(),
        };
        let width = config.key_value_width();
        let len = capacity.checked_mul(width).ok_or_else(memory)?;
        let layer = |layer| layer_cache(config, layer, capacity, quantizer(layer));
        let layers: Vec<_> = (0..count).map(layer).collect::<Option<_>>().ok_or_else(memory)?;
        let quantized = layers.iter().any(|layer| matches!(layer, LayerCache::Quantized { .. }));
        let scratch = quantized.then(|| Scratch::plan(len).ok_or_else(memory)).transpose()?;
        let latent = config.latent.as_ref();
        let latent = latent.map(|latent| LatentScratch::plan(latent, config, capacity).ok_or_else(memory));
        let latent = latent.transpose()?.map(Box::new);
        let sources = (0..count).map(|layer| config.kv_layer(layer)).collect();
        let state = |layer| match config.recurrent_in(layer) {
            Some(recurrent) => StateCache::plan(recurrent.state(capacity)).map(|state| Some(Box::new(state))),
            None => Some(None),
        };
        let states = (0..count).map(state).collect::<Option<_>>().ok_or_else(memory)?;
        Ok(KvCache { layers, sources, states, scratch, latent, len: 0, saved: 0, capacity, width })
    }

    /// Bytes that [`plan`](Self::plan) allocates; `u64::MAX` on overflow.
    pub fn bytes_needed(config: &ModelConfig, capacity: usize) -> u64 {
        let layers = (0..config.num_hidden_layers).map(|layer| layer_bytes(config, layer, capacity, None));
        let layers = layers.fold(0u64, u64::saturating_add);
        layers.saturating_add(latent_scratch(config, capacity))
    }

    /// Bytes that [`for_decoder`](Self::for_decoder) allocates for a decoder under `policy`.
    ///
    /// # Errors
    /// [`LoadError::KvScheme`].
    pub fn bytes_needed_under(
        config: &ModelConfig,
        capacity: usize,
        policy: &KvPolicy,
    ) -> Result<u64, LoadError> {
        let (mut layers, mut scratch) = (0u64, 0);
        for layer in 0..config.num_hidden_layers {
            let quantizer = policy.quantizer(&config.of_layer(layer))?;
            layers = layers.saturating_add(layer_bytes(config, layer, capacity, Some(&quantizer)));
            if quantizer.stores_heads() {
                scratch = (8 * config.key_value_width() as u64).saturating_mul(capacity as u64);
            }
        }
        Ok(layers.saturating_add(scratch).saturating_add(latent_scratch(config, capacity)))
    }

    /// Tokens held.
    pub fn len(&self) -> usize {
        self.len
    }

    /// True if there are no tokens.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Tokens that fit.
    pub fn capacity(&self) -> usize {
        self.capacity
    }

    /// Removes all tokens from `len` on. Tokens that have left a window do not return to it. The state of a recurrent
    /// mixer cannot be cut back: in models with one, all tokens are removed unless `len` is the number before the last
    /// pass.
    pub fn truncate(&mut self, len: usize) {
        let recurs = self.states.iter().any(Option::is_some);
        match recurs && len < self.len {
            true if len == self.saved => self.restore(len),
            true => self.cut(0),
            false => self.cut(len),
        }
    }

    /// Copies the states of recurrent mixers before a pass, for [`restore`](Self::restore).
    pub(crate) fn save(&mut self) {
        self.saved = self.len;
        self.states.iter_mut().flatten().for_each(|state| state.save());
    }

    /// Removes the tokens of the last pass, of which there were `len` before.
    pub(crate) fn restore(&mut self, len: usize) {
        self.cut(len);
        self.states.iter_mut().flatten().for_each(|state| state.restore());
    }

    /// Removes keys and values from `len` on.
    fn cut(&mut self, len: usize) {
        self.len = self.len.min(len);
        for layer in &mut self.layers {
            match layer {
                LayerCache::Quantized { keys, values } => {
                    keys.truncate(self.len);
                    values.truncate(self.len);
                }
                LayerCache::Latent(latents) => latents.truncate(self.len),
                LayerCache::Exact { .. } | LayerCache::Shared => {}
            }
        }
    }

    /// Checks that `tokens` more tokens of this model fit.
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

    pub(crate) fn layer(&mut self, layer: usize) -> Past<'_> {
        let latent = self.latent.as_deref_mut();
        let state = self.states[layer].as_deref_mut();
        let source = self.sources.get(layer).copied().unwrap_or(layer);
        Past { layer: &mut self.layers[source], state, scratch: self.scratch.as_mut(), latent }
    }

    /// Adds to the cache the tokens that every layer has written since the last call.
    pub(crate) fn commit(&mut self, tokens: usize) {
        self.len += tokens;
    }
}

/// Allocates one layer for `capacity` tokens; `None` if there is not enough memory.
fn layer_cache(
    config: &ModelConfig,
    layer: usize,
    capacity: usize,
    quantizer: Option<&KvQuantizer>,
) -> Option<LayerCache> {
    if !config.has_own_kv(layer) {
        return Some(LayerCache::Shared);
    }
    if let Some(latent) = &config.latent {
        let cache = LatentCache::plan(latent, config.index_width(layer), quantizer, capacity);
        return cache.map(Box::new).map(LayerCache::Latent);
    }
    let width = config.of_layer(layer).key_value_width();
    let Some(quantizer) = quantizer.filter(|quantizer| quantizer.stores_heads()) else {
        let len = capacity.checked_mul(width)?;
        return Some(LayerCache::Exact { keys: zeros(len)?, values: zeros(len)? });
    };
    let parts = quantizer.parts();
    let plan = |side: &Option<_>| {
        SideCache::plan(side.clone(), width, parts.window, parts.sinks, capacity).map(Box::new)
    };
    Some(LayerCache::Quantized { keys: plan(&parts.keys)?, values: plan(&parts.values)? })
}

/// Bytes of the scratch for latents.
fn latent_scratch(config: &ModelConfig, capacity: usize) -> u64 {
    config.latent.map_or(0, |latent| LatentScratch::bytes_needed(&latent, config, capacity))
}

/// Bytes of one layer for `capacity` tokens.
fn layer_bytes(config: &ModelConfig, layer: usize, capacity: usize, quantizer: Option<&KvQuantizer>) -> u64 {
    let state = config.recurrent_in(layer).map_or(0, |of| StateCache::bytes_needed(of.state(capacity)));
    if !config.has_own_kv(layer) {
        return state;
    }
    heads_bytes(config, layer, capacity, quantizer).saturating_add(state)
}

/// Bytes of the keys and values of one layer for `capacity` tokens.
fn heads_bytes(config: &ModelConfig, layer: usize, capacity: usize, quantizer: Option<&KvQuantizer>) -> u64 {
    if let Some(latent) = &config.latent {
        return LatentCache::bytes_needed(latent, config.index_width(layer), quantizer, capacity);
    }
    let width = config.of_layer(layer).key_value_width();
    match quantizer.filter(|quantizer| quantizer.stores_heads()) {
        None => (8 * width as u64).saturating_mul(capacity as u64),
        Some(quantizer) => {
            let parts = quantizer.parts();
            let bytes = |side: &Option<_>| {
                SideCache::bytes_needed(side.as_ref(), width, parts.window, parts.sinks, capacity)
            };
            bytes(&parts.keys).saturating_add(bytes(&parts.values))
        }
    }
}

impl Past<'_> {
    /// Appends new keys and values (`[t, width]`) to the `start` tokens held, and returns all of them: new ones
    /// unquantized, stored ones by their decoded values.
    ///
    /// # Errors
    /// [`ForwardError::Cache`] if a value has no code.
    pub(crate) fn append(
        &mut self,
        start: usize,
        width: usize,
        k: &[f32],
        v: &[f32],
    ) -> Result<KeysAndValues<'_>, ForwardError> {
        let end = start * width + k.len();
        match (&mut *self.layer, &mut self.scratch) {
            (LayerCache::Quantized { keys, values }, Some(scratch)) => {
                let fault = |what| move |error| ForwardError::Cache { what, error };
                keys.append(k, &mut scratch.keys[..end]).map_err(fault("keys"))?;
                values.append(v, &mut scratch.values[..end]).map_err(fault("values"))?;
                Ok((&mut scratch.keys[..end], &mut scratch.values[..end]))
            }
            (LayerCache::Exact { keys, values }, _) => {
                keys[start * width..end].copy_from_slice(k);
                values[start * width..end].copy_from_slice(v);
                Ok((&mut keys[..end], &mut values[..end]))
            }
            // A cache with quantized layers has scratch, and heads are not cached as latents.
            (LayerCache::Quantized { .. }, None) | (LayerCache::Latent(_) | LayerCache::Shared, _) => {
                Err(ForwardError::OtherModel { what: "KV cache" })
            }
        }
    }

    /// Appends new latents `[t, kv_rank]`, the rotated parts of their keys `[t, rotated]` and keys of an indexer, and returns
    /// the scratch that holds all of them, stored ones by their decoded values.
    ///
    /// # Errors
    /// [`ForwardError::Cache`] if a value has no code.
    pub(crate) fn append_latents(
        &mut self,
        latents: &[f32],
        rotated: &[f32],
        index: &[f32],
    ) -> Result<&mut LatentScratch, ForwardError> {
        match (&mut *self.layer, &mut self.latent) {
            (LayerCache::Latent(cache), Some(scratch)) => {
                let fault = |error| ForwardError::Cache { what: "latents", error };
                cache.append(latents, rotated, index, scratch).map_err(fault)?;
                Ok(scratch)
            }
            _ => Err(ForwardError::OtherModel { what: "KV cache" }),
        }
    }
}
