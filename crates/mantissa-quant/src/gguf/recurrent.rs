//! Recurrent mixers in GGUF: their keys, and what llama.cpp does not compute of them, which each mixer states
//! ([`mantissa_model::mixer`]), and the keys of layers with them.

use mantissa_model::ModelConfig;
use mantissa_model::config::{Mixing, Multipliers};
use mantissa_model::mixer::{GgufAround, Uncomputed};
use mantissa_store::convention::gguf::{Architecture, LayerTypes, MixerLayers, Unrotated};
use mantissa_store::gguf::{Value, ValueType};

use super::keys::Keys;
use super::limits::Limits;
use crate::error::Result;

/// Lists the keys of the mixers and of the layers that have them.
pub(super) fn put_recurrence(keys: &mut Keys, row: &Architecture, config: &ModelConfig) {
    let (Some(recurrent), Some(mixers)) = (&config.recurrent, row.recurrence) else { return };
    recurrent.gguf_numbers().into_iter().for_each(|(key, number)| keys.put_number(key, number));
    match mixers.layers {
        MixerLayers::Every => {}
        MixerLayers::Interval => put_interval(keys, config),
        MixerLayers::WithoutKeys => {
            // llama.cpp counts one head of keys and values in latent attention.
            let own = if config.latent.is_some() { 1 } else { config.num_key_value_heads };
            let heads = |mixing: &Mixing| if mixing.attends() { own } else { 0 };
            keys.put_numbers("attention.head_count_kv", config.mixing.iter().map(heads));
        }
    }
    if mixers.types == LayerTypes::Blocks {
        let mlp = config.experts.as_ref().map_or(config.intermediate_size, |experts| experts.width);
        let width = |has: &bool| if *has { mlp } else { 0 };
        keys.put_numbers("feed_forward_length", config.has_mlp.iter().map(width));
    }
    if row.both_epsilons {
        keys.put("attention.layer_norm_epsilon", Value::F32(config.rms_norm_eps));
    }
    if row.unrotated == Unrotated::Switched {
        let rotated = config.rotated_layers.first().copied().unwrap_or(true);
        keys.put("rope.scaling.finetuned", Value::Bool(rotated));
    }
    if row.sections {
        // Coordinates of positions are equal in text; a third of the pairs each, as in the published models.
        let pairs = config.rotary_dim / 2;
        let sections = [pairs.div_ceil(3), (pairs + 1) / 3, pairs / 3, 0];
        let numbers = sections.map(|n| Value::I32(i32::try_from(n).unwrap_or(i32::MAX)));
        keys.put("rope.dimension_sections", Value::Array(ValueType::I32, numbers.to_vec()));
    }
}

/// Puts the period of the layers with attention, or a flag for each layer if there is none.
fn put_interval(keys: &mut Keys, config: &ModelConfig) {
    let recurs = |layer: usize| config.mixing[layer - 1].recurs();
    let layers = config.num_hidden_layers;
    let fits = |interval: &usize| (1..=layers).all(|layer| recurs(layer) != layer.is_multiple_of(*interval));
    match (1..=layers + 1).find(fits) {
        Some(interval) => keys.put_number("full_attention_interval", interval),
        None => {
            let flags = (1..=layers).map(|layer| Value::Bool(recurs(layer)));
            keys.put("attention.recurrent_layers", Value::Array(ValueType::Bool, flags.collect()));
        }
    }
}

/// Lists what llama.cpp computes differently from the mixers.
pub(super) fn notes(config: &ModelConfig) -> Vec<String> {
    config.recurrent.iter().filter_map(|recurrent| recurrent.gguf_note(config.rms_norm_eps)).collect()
}

impl Limits<'_> {
    /// Checks the mixers, and that factors are multiplied into the weights.
    pub(super) fn check_recurrence(&self) -> Result<()> {
        let none = Multipliers { scores: 1.0, attended: 1.0, mixed: 1.0, gate: 1.0, inner: 1.0 };
        if self.config.multipliers.is_some_and(|multipliers| multipliers != none) {
            let allowed =
                "1: llama.cpp has none; fix: `quantize --format gguf` alone multiplies them into the weights";
            return self.refuse("mlp_multipliers and others", "other numbers", allowed);
        }
        let config = self.config;
        let (Some(recurrent), Some(recurrence)) = (&config.recurrent, self.row.recurrence) else {
            return Ok(());
        };
        let around = GgufAround {
            hidden: config.hidden_size,
            heads: config.num_attention_heads,
            q_rank: config.latent.and_then(|latent| latent.q_rank),
            eps: config.rms_norm_eps,
            recurrence,
            aliases: config.architecture.aliases,
        };
        match recurrent.check_gguf(&around) {
            Ok(()) => Ok(()),
            Err(Uncomputed { field, found, allowed }) => self.refuse(field, found, &allowed),
        }
    }
}
