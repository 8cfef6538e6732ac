//! Entries of compressed attention, mixed streams and experts chosen by the token (DeepSeek-V4) in GGUF: their keys, and what llama.cpp's
//! loader and graph fix (`src/models/deepseek4.cpp`).

use mantissa_model::ModelConfig;
use mantissa_model::config::Experts;
use mantissa_store::convention::gguf::{Architecture, GgufExperts};
use mantissa_store::gguf::{Value, ValueType};

use super::keys::Keys;
use super::limits::Limits;
use crate::error::Result;

/// Streams of the only graph.
const STREAMS: usize = 4;
/// Tokens of entries that overlap, and of those that do not.
const RATIOS: [usize; 2] = [4, 128];
/// Number of llama.cpp for scores that are roots of softplus.
const SQRT_SOFTPLUS: u32 = 4;

/// Lists the keys of entries, streams and experts.
pub(super) fn put_compressed(keys: &mut Keys, row: &Architecture, config: &ModelConfig) {
    if row.recurrence.is_none_or(|mixers| !mixers.attends) {
        return;
    }
    let ratios = config.by_layer.compression.iter().map(|entries| entries.map_or(0, |entries| entries.ratio));
    keys.put_numbers("attention.compress_ratios", ratios);
    // Layers without entries have a rotary base of their own, the model's in GGUF.
    keys.put("attention.compress_rope_freq_base", Value::F32(config.rope.theta as f32));
    if let Some(rope) = &config.local_rope {
        keys.put("rope.freq_base", Value::F32(rope.theta as f32));
    }
    if let Some(streams) = config.by_layer.hyper {
        keys.put_number("hyper_connection.count", streams.count);
        keys.put_number("hyper_connection.sinkhorn_iterations", streams.iterations);
        keys.put("hyper_connection.epsilon", Value::F32(streams.eps));
        keys.put_number("embedding_length_out", streams.count * config.hidden_size);
    }
    let Some(experts) = &config.experts else { return };
    keys.put_number("hash_layer_count", experts.hashed.iter().filter(|hashed| **hashed).count());
    keys.put_number("expert_shared_count", 1);
    keys.put("expert_gating_func", Value::U32(SQRT_SOFTPLUS));
    keys.put("expert_weights_scale", Value::F32(experts.routing.scale));
    keys.put("expert_weights_norm", Value::Bool(experts.routing.normalize));
    let limit = experts.limited.map_or(0.0, |limited| limited.limit);
    let limits = || Value::Array(ValueType::F32, vec![Value::F32(limit); config.num_hidden_layers]);
    keys.put("swiglu_clamp_exp", limits());
    keys.put("swiglu_clamp_shexp", limits());
}

impl Limits<'_> {
    /// Checks what llama.cpp fixes of attention and streams.
    pub(super) fn check_compressed(&self) -> Result<()> {
        let by_layer = &self.config.by_layer;
        if self.row.recurrence.is_none_or(|mixers| !mixers.attends) {
            return Ok(());
        }
        if let Some(streams) = by_layer.hyper.filter(|streams| streams.count != STREAMS) {
            let allowed = format!("{STREAMS}: llama.cpp requires it");
            return self.refuse("hc_mult", streams.count.to_string(), &allowed);
        }
        let fits = |overlaps: bool, ratio: usize| ratio == RATIOS[usize::from(!overlaps)];
        let mut entries = by_layer.compression.iter().flatten();
        if let Some(other) = entries.find(|entries| !fits(entries.overlaps, entries.ratio)) {
            let allowed = format!("{} and {}: llama.cpp has no other", RATIOS[0], RATIOS[1]);
            return self.refuse("compress_rates", other.ratio.to_string(), &allowed);
        }
        Ok(())
    }

    /// Checks experts of which the first layers choose by the token.
    pub(super) fn check_hashed(&self, experts: &Experts) -> Result<()> {
        if self.row.experts != GgufExperts::Hashed {
            return Ok(());
        }
        let first = experts.hashed.iter().take_while(|hashed| **hashed).count();
        if experts.hashed[first..].contains(&true) {
            let allowed = "experts by token in the first layers: llama.cpp requires them";
            return self.refuse("mlp_layer_types", "others", allowed);
        }
        if experts.limited.is_none_or(|limited| (limited.alpha, limited.offset) != (1.0, 0.0)) {
            return self.refuse("swiglu_alpha", "another", "1: llama.cpp has no key");
        }
        Ok(())
    }
}
