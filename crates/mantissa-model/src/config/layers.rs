//! Values of single layers of a configuration.

use std::borrow::Cow;

use super::{HeadNorms, LayerFeatures, LayerHeads, ModelConfig, Recurrent};

impl ModelConfig {
    /// True if a layer has attention.
    pub fn attends(&self, layer: usize) -> bool {
        self.mixing[layer].attends()
    }

    /// Iterates over the layers that have attention.
    pub fn attention_layers(&self) -> impl Iterator<Item = usize> {
        (0..self.num_hidden_layers).filter(|layer| self.attends(*layer))
    }

    /// True if layers have heads of attention, be it to compressed entries.
    pub fn has_heads(&self) -> bool {
        let compressed = matches!(self.recurrent, Some(Recurrent::CompressedAttention(_)));
        compressed || self.attention_layers().next().is_some()
    }

    /// Recurrent mixer of a layer, if it has one.
    pub fn recurrent_in(&self, layer: usize) -> Option<Recurrent> {
        let recurrent = self.recurrent.filter(|_| self.mixing[layer].recurs())?;
        Some(recurrent.with_entries(self.by_layer.compression.get(layer).copied().flatten()))
    }

    /// Heads of a layer.
    pub fn heads(&self, layer: usize) -> LayerHeads {
        let (query, key_value, dim) = (self.num_attention_heads, self.num_key_value_heads, self.head_dim);
        match self.by_layer.global_heads.filter(|_| self.windows[layer].is_none()) {
            None => LayerHeads { query, key_value, dim },
            Some(global) => LayerHeads { query, key_value: global.num_key_value_heads, dim: global.head_dim },
        }
    }

    /// Layer whose keys and values a layer reads: itself, unless it shares those of an earlier one.
    pub fn kv_layer(&self, layer: usize) -> usize {
        let first = self.by_layer.shared_from;
        if layer < first {
            return layer;
        }
        let alike = |other: &usize| self.windows[*other].is_some() == self.windows[layer].is_some();
        (0..first).rev().find(alike).unwrap_or(layer)
    }

    /// True if a layer projects keys and values of its own.
    pub fn has_own_kv(&self, layer: usize) -> bool {
        self.attends(layer) && self.kv_layer(layer) == layer
    }

    /// True if later layers read the keys and values of `layer`.
    pub fn shares_kv(&self, layer: usize) -> bool {
        let readers = self.by_layer.shared_from..self.num_hidden_layers;
        layer < readers.start && readers.into_iter().any(|reader| self.kv_layer(reader) == layer)
    }

    /// True if the keys of a layer, before their norm, are its values too.
    pub fn keys_are_values(&self, layer: usize) -> bool {
        self.windows[layer].is_none() && self.by_layer.global_heads.is_some_and(|heads| heads.keys_are_values)
    }

    /// Width of the MLP of a layer without experts.
    pub fn ffn(&self, layer: usize) -> usize {
        let wide = self.by_layer.wide_shared && layer >= self.by_layer.shared_from;
        self.intermediate_size * if wide { 2 } else { 1 }
    }

    /// True if layers read more than the states: embeddings of their own, or keys and values or the choices of tokens of
    /// other layers.
    pub fn carries(&self) -> bool {
        let features = &self.by_layer;
        features.inputs.is_some()
            || features.streams.is_some()
            || features.hyper.is_some()
            || features.shared_from < self.num_hidden_layers
            || self.indexer.as_ref().is_some_and(|indexer| indexer.own.contains(&false))
    }

    /// Width of what each layer reads besides the states: its embedding, or 1 for the token that chooses experts.
    pub(crate) fn own_input_width(&self) -> usize {
        let hashed = self.experts.as_ref().is_some_and(|experts| experts.hashed.contains(&true));
        self.by_layer.inputs.map_or(usize::from(hashed), |inputs| inputs.width)
    }

    /// Values of a row of parallel streams, the first one included; 0 in models with one.
    pub(crate) fn streams_width(&self) -> usize {
        let of_hyper = self.by_layer.hyper.map_or(0, |hyper| hyper.row(self.hidden_size));
        self.by_layer.streams.map_or(of_hyper, |streams| streams.count * self.hidden_size)
    }

    /// Returns the configuration of a model all of whose layers have the heads of `layer`: for code that needs the
    /// heads of one layer.
    pub fn of_layer(&self, layer: usize) -> Cow<'_, Self> {
        if self.by_layer.global_heads.is_none() {
            return Cow::Borrowed(self);
        }
        let LayerHeads { key_value, dim, .. } = self.heads(layer);
        let by_layer = LayerFeatures { global_heads: None, ..self.by_layer.clone() };
        Cow::Owned(ModelConfig {
            head_dim: dim,
            num_key_value_heads: key_value,
            rotary_dim: self.rotary_dim_of(layer),
            by_layer,
            ..self.clone()
        })
    }

    /// Width of the rotated part of a head of a layer; 0 if positions are learned.
    pub fn rotary_dim_of(&self, layer: usize) -> usize {
        match self.by_layer.global_heads.filter(|_| self.windows[layer].is_none()) {
            Some(global) => global.head_dim,
            None => self.rotary_dim,
        }
    }

    /// Width of the tables of rotary angles of layers without a window.
    pub fn global_rotary_dim(&self) -> usize {
        self.by_layer.global_heads.map_or(self.rotary_dim, |global| global.head_dim)
    }

    /// Widths of the norms of queries and keys of a layer.
    pub(crate) fn head_norm_widths(&self, layer: usize) -> (usize, usize) {
        let LayerHeads { query, key_value, dim } = self.heads(layer);
        match self.head_norms {
            HeadNorms::Whole => (query * dim, key_value * dim),
            _ => (dim, dim),
        }
    }
}

impl ModelConfig {
    /// Width of the index keys that a layer caches for each token; 0 in layers without an indexer of their own.
    pub fn index_width(&self, layer: usize) -> usize {
        self.indexer.as_ref().filter(|indexer| indexer.own[layer]).map_or(0, |indexer| indexer.dim)
    }

    /// True if a layer uses the choice of an earlier one.
    pub(crate) fn uses_choice(&self, layer: usize) -> bool {
        self.indexer.as_ref().is_some_and(|indexer| !indexer.own[layer])
    }

    /// Numbers that a token's choice takes in work that runs one layer at a time on windows of up to `longest` tokens: 0
    /// if no layer uses the choice of an earlier one, or all tokens are chosen.
    pub(crate) fn carried_choice(&self, longest: usize) -> usize {
        let shared = self.indexer.as_ref().filter(|indexer| indexer.own.contains(&false));
        shared.map_or(0, |indexer| indexer.chosen).min(if self.chooses(longest) { usize::MAX } else { 0 })
    }

    /// True if queries among `positions` tokens attend to a part of them.
    pub(crate) fn chooses(&self, positions: usize) -> bool {
        self.indexer.as_ref().is_some_and(|indexer| indexer.chosen < positions)
    }
}
