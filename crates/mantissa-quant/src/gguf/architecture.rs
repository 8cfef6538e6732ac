//! Metadata of a model in GGUF beyond its sizes.
//!
//! Keys are named as in llama.cpp's converter (`convert_hf_to_gguf.py`); [`Architecture`] has the facts of each.

use mantissa_model::config::{Experts, Latent, NormPlaces, Recurrent, Scores};
use mantissa_model::rope::{Rope, RopeScaling};
use mantissa_model::{Activation, ModelConfig};
use mantissa_store::convention::gguf::{
    Architecture, GgufExperts, Indexers, LONG_ROPE, LocalTheta, ROPE_FACTORS, Sizes, UNROTATED, Windows, Yarn,
};
use mantissa_store::gguf::{Value, ValueType};

use super::compressed::put_compressed;
use super::keys::Keys;
use super::limits::{expert_step, is_window_period, window_period};
use super::recurrent::put_recurrence;
use super::streams::put_streams;

pub(super) fn sizes(config: &ModelConfig) -> Sizes {
    let sizes = plain_sizes(config);
    match config.latent {
        _ if !config.has_heads() => Sizes { heads: 0, rotated: 0, ..sizes },
        // llama.cpp counts one head of keys and values, the latent, which every query head reads.
        Some(latent) => Sizes {
            kv_heads: 1,
            head_dim: latent.kv_rank + latent.rotated,
            value_dim: latent.kv_rank,
            ..sizes
        },
        None => sizes,
    }
}

fn plain_sizes(config: &ModelConfig) -> Sizes {
    Sizes {
        layers: config.num_hidden_layers,
        context: config.max_position_embeddings,
        hidden: config.hidden_size,
        ffn: config.intermediate_size,
        heads: config.num_attention_heads,
        kv_heads: config.num_key_value_heads,
        head_dim: config.head_dim,
        value_dim: config.head_dim,
        rotated: config.rotary_dim,
        vocab: config.vocab_size,
        // Divided with the residual stream (`ModelConfig::residual_scale`), except in a mixer.
        eps: config
            .recurrent
            .as_ref()
            .and_then(Recurrent::gguf_eps)
            .unwrap_or(config.rms_norm_eps * config.residual_scale * config.residual_scale),
        rope_theta: config.rope.theta as f32,
    }
}

/// Lists what llama.cpp computes differently from the model, and no file can state.
pub(super) fn notes(row: &Architecture, config: &ModelConfig) -> Vec<String> {
    let mut notes = super::recurrent::notes(config);
    notes.extend(super::streams::notes(row, config));
    if let Some(other) = stated_activation(row, config) {
        let first = row.activation;
        notes.push(format!(
            "hidden_act: {other} is in the file; llama.cpp of before it had that key computes {first}"
        ));
    }
    if config.latent.is_some() && config.rms_norm_eps != Latent::EPS {
        notes.push(format!(
            "rms_norm_eps: llama.cpp has {} for the norms of latents too, the model {}",
            config.rms_norm_eps,
            Latent::EPS
        ));
    }
    if row.yarn == Yarn::Untruncated && matches!(config.rope.scaling, RopeScaling::Yarn(_)) {
        notes.push("rope_scaling: llama.cpp rounds the ends of YaRN's ramp, gpt-oss does not".to_owned());
    }
    notes
}

/// The activation, if a key has to state it.
fn stated_activation(row: &Architecture, config: &ModelConfig) -> Option<&'static str> {
    row.other_activation.filter(|name| Activation::parse(name) == Some(config.hidden_act))
}

/// Lists the keys of features that not every architecture has.
pub(super) fn family_metadata(row: &Architecture, config: &ModelConfig) -> Vec<(String, Value)> {
    let mut keys = Keys::new(row.name);
    if let Some(experts) = &config.experts {
        put_experts(&mut keys, row, experts);
        if matches!(row.experts, GgufExperts::BesideShared { .. }) {
            keys.put_number("feed_forward_length", experts.width);
            keys.put_number("expert_shared_feed_forward_length", config.intermediate_size);
        }
    }
    put_windows(&mut keys, row, config);
    // Without these keys llama.cpp uses the caps of the published models.
    for (key, cap) in [
        ("attn_logit_softcapping", config.attention_softcap),
        ("final_logit_softcapping", config.logit_softcap),
    ] {
        if row.has_key(key) {
            keys.put(key, Value::F32(cap.unwrap_or(0.0)));
        }
    }
    let default = match row.local_theta {
        LocalTheta::Default(theta) => theta,
        _ => config.rope.theta,
    };
    let local = config.local_rope.as_ref().filter(|_| row.recurrence.is_none_or(|mixers| !mixers.attends));
    if let Some(local) = local.filter(|local| local.theta != default) {
        keys.put("rope.freq_base_swa", Value::F32(local.theta as f32));
    }
    if let Some(clip) = config.clip_qkv {
        keys.put("attention.clamp_kqv", Value::F32(clip));
    }
    for (key, _) in row.factors {
        let factor = match *key {
            "embedding_scale" => config.embedding_scale.unwrap_or(1.0) * config.residual_scale,
            "residual_scale" => config.residual_scale,
            "attention.scale" => config.attention_scale,
            _ if row.divided_logits => config.logit_scale.unwrap_or(1.0).recip(),
            _ => config.logit_scale.unwrap_or(1.0),
        };
        keys.put(key, Value::F32(factor));
    }
    if let Some(growth) = config.query_growth.filter(|_| row.has_key("attention.temperature_scale")) {
        keys.put("attention.temperature_scale", Value::F32(growth.rate));
    }
    if row.by_layer {
        put_by_layer(&mut keys, config);
    }
    put_streams(&mut keys, config);
    put_recurrence(&mut keys, row, config);
    put_compressed(&mut keys, row, config);
    if row.parallel_key {
        keys.put("use_parallel_residual", Value::Bool(config.norm_places == NormPlaces::Parallel));
    }
    if let Some(other) = stated_activation(row, config) {
        keys.put("hidden_activation", Value::String(other.to_owned()));
    }
    if let Some(latent) = &config.latent {
        put_latent(&mut keys, row, config, latent);
    }
    keys.into_pairs()
}

fn put_experts(keys: &mut Keys, row: &Architecture, experts: &Experts) {
    keys.put("expert_count", Value::U32(experts.count.into()));
    keys.put_number("expert_used_count", experts.per_token);
    // Experts of Mixtral, Jamba and Granite are as wide as their MLPs.
    let as_mlp = matches!(
        row.experts,
        GgufExperts::Some { .. } | GgufExperts::Periodic { .. } | GgufExperts::BesideShared { .. }
    );
    if !as_mlp {
        keys.put_number("expert_feed_forward_length", experts.width);
    }
    if let Some(shared) = &experts.shared.filter(|shared| shared.gated) {
        keys.put_number("expert_shared_feed_forward_length", shared.width);
    }
    if let (GgufExperts::Interleaved { .. }, Some(step)) = (row.experts, expert_step(experts)) {
        keys.put_number("interleave_moe_layer_step", step);
    }
    if matches!(row.experts, GgufExperts::Averaged { .. }) {
        let routing = &experts.routing;
        let dense = experts.layers.iter().take_while(|has| !**has).count();
        keys.put_number("leading_dense_block_count", dense);
        let sigmoid = routing.scores == Scores::Sigmoid;
        keys.put("expert_gating_func", Value::U32(if sigmoid { 2 } else { 1 }));
        keys.put("expert_weights_norm", Value::Bool(routing.normalize || !sigmoid));
        if let Some(shared) = &experts.shared {
            keys.put_number("expert_shared_count", shared.width / experts.width.max(1));
            keys.put_number("expert_shared_feed_forward_length", shared.width);
        }
    }
    if matches!(row.experts, GgufExperts::Blocks { .. }) {
        let routing = &experts.routing;
        keys.put_number("expert_shared_count", 1);
        keys.put_number("expert_shared_feed_forward_length", experts.shared.map_or(0, |shared| shared.width));
        keys.put("expert_gating_func", Value::U32(2));
        keys.put("expert_weights_scale", Value::F32(routing.scale));
        keys.put("expert_weights_norm", Value::Bool(routing.normalize));
        if let Some(groups) = routing.groups {
            keys.put_number("expert_group_count", groups.count);
            keys.put_number("expert_group_used_count", groups.chosen);
        }
        if let Some(latent) = experts.latent {
            keys.put_number("moe_latent_size", latent);
        }
    }
    let GgufExperts::Routed { first, shared, sigmoid, scaled, stepped, .. } = row.experts else { return };
    if first.is_some() {
        let dense = experts.layers.iter().take_while(|has| !**has).count();
        keys.put_number("leading_dense_block_count", dense);
    }
    if shared.is_some() {
        let width = experts.shared.map_or(0, |shared| shared.width);
        keys.put_number("expert_shared_count", width / experts.width.max(1));
        keys.put_number("expert_shared_feed_forward_length", width);
    }
    if sigmoid {
        // Number of llama.cpp.
        keys.put("expert_gating_func", Value::U32(2));
    }
    if scaled {
        keys.put("expert_weights_scale", Value::F32(experts.routing.scale));
        keys.put("expert_weights_norm", Value::Bool(experts.routing.normalize));
    }
    if stepped {
        keys.put_number("interleave_moe_layer_step", 1);
    }
}

fn put_windows(keys: &mut Keys, row: &Architecture, config: &ModelConfig) {
    match row.windows {
        Windows::Periodic { period, .. } if row.has_windows(config.num_hidden_layers) => {
            let window = config.windows.iter().flatten().next();
            keys.put_number("attention.sliding_window", window.copied().unwrap_or(0));
            if let Some(period) = window.and_then(|_| stated_period(config, period)) {
                keys.put_number("attention.sliding_window_pattern", period);
            }
        }
        Windows::Listed { .. } => {
            let window = config.windows.iter().flatten().next();
            keys.put_number("attention.sliding_window", window.copied().unwrap_or(0));
            let windowed = config.windows.iter().map(|window| Value::Bool(window.is_some()));
            let listed = Value::Array(ValueType::Bool, windowed.collect());
            keys.put("attention.sliding_window_pattern", listed);
        }
        // 0 tells llama.cpp that there is no window.
        Windows::Zero => keys.put_number("attention.sliding_window", 0),
        _ => {}
    }
}

/// Lists the keys of a model whose layers differ (Gemma 4).
fn put_by_layer(keys: &mut Keys, config: &ModelConfig) {
    let (layers, by_layer) = (config.num_hidden_layers, &config.by_layer);
    let global = global_dim(config);
    for (key, width) in [
        ("attention.key_length", global),
        ("attention.value_length", global),
        ("rope.dimension_count", global),
        ("attention.key_length_swa", config.head_dim),
        ("attention.value_length_swa", config.head_dim),
        ("rope.dimension_count_swa", config.head_dim),
    ] {
        keys.put_number(key, width);
    }
    if let Some(local) = &config.local_rope {
        keys.put("rope.freq_base_swa", Value::F32(local.theta as f32));
    }
    keys.put_numbers("attention.head_count_kv", (0..layers).map(|layer| config.heads(layer).key_value));
    let shared = layers - by_layer.shared_from;
    keys.put_number("attention.shared_kv_layers", shared);
    let wide = |layer| if by_layer.wide_shared && layer >= by_layer.shared_from { 2 } else { 1 };
    let widths = (0..layers).map(|layer| config.intermediate_size * wide(layer));
    keys.put_numbers("feed_forward_length", widths);
    keys.put_number("embedding_length_per_layer_input", by_layer.inputs.map_or(0, |inputs| inputs.width));
}

/// Returns the width of a head in layers without a window.
fn global_dim(config: &ModelConfig) -> usize {
    config.by_layer.global_heads.map_or(config.head_dim, |heads| heads.head_dim)
}

/// Lists the keys of DeepSeek's attention and experts.
fn put_latent(keys: &mut Keys, row: &Architecture, config: &ModelConfig, latent: &Latent) {
    keys.put_number("attention.kv_lora_rank", latent.kv_rank);
    keys.put_number("attention.key_length_mla", latent.head());
    keys.put_number("attention.value_length_mla", latent.value);
    if let Some(rank) = latent.q_rank {
        keys.put_number("attention.q_lora_rank", rank);
    }
    if let Some(indexer) = &config.indexer {
        keys.put_number("attention.indexer.head_count", indexer.heads);
        keys.put_number("attention.indexer.key_length", indexer.dim);
        keys.put_number("attention.indexer.top_k", indexer.chosen);
        if row.indexer == Indexers::Listed {
            let own = indexer.own.iter().map(|own| Value::Bool(*own));
            keys.put("attention.indexer.types", Value::Array(ValueType::Bool, own.collect()));
        }
    }
    let Some(experts) = &config.experts else { return };
    let routing = &experts.routing;
    let shared = experts.shared.map_or(0, |shared| shared.width / experts.width.max(1));
    keys.put_number("expert_shared_count", shared);
    keys.put_number("leading_dense_block_count", experts.layers.iter().take_while(|has| !**has).count());
    keys.put("expert_weights_scale", Value::F32(routing.scale));
    keys.put("expert_weights_norm", Value::Bool(routing.normalize));
    // Numbers of llama.cpp.
    keys.put("expert_gating_func", Value::U32(if routing.scores == Scores::Sigmoid { 2 } else { 1 }));
    if let Some(groups) = routing.groups {
        keys.put_number("expert_group_count", groups.count);
        keys.put_number("expert_group_used_count", groups.chosen);
    }
}

/// Period of windows, if `default` does not place them on the same layers.
fn stated_period(config: &ModelConfig, default: u32) -> Option<usize> {
    if is_window_period(config, default as usize) { None } else { window_period(config) }
}

/// Divisors of the frequencies, for a scaling that llama.cpp does not compute.
pub(super) fn rope_factors(row: &Architecture, config: &ModelConfig) -> Vec<(&'static str, Vec<f32>)> {
    let (rope, rotated) = (&config.rope, config.rotary_dim);
    if row.by_layer {
        // The loader requires them.
        let pairs = global_dim(config) / 2;
        let turned = match rope.scaling {
            RopeScaling::Proportional { rotated, .. } => rotated,
            _ => pairs,
        };
        let factor = |pair| if pair < turned { 1.0 } else { UNROTATED };
        return vec![(ROPE_FACTORS, (0..pairs).map(factor).collect())];
    }
    match &rope.scaling {
        RopeScaling::Factors(factors) => vec![(ROPE_FACTORS, factors.clone())],
        RopeScaling::Long(long) => {
            LONG_ROPE.into_iter().zip([long.long.clone(), long.short.clone()]).collect()
        }
        RopeScaling::Llama3 { .. } => {
            let plain = Rope { theta: rope.theta, scaling: RopeScaling::Default };
            let scaled = rope.inverse_frequencies(rotated);
            let factors = plain.inverse_frequencies(rotated).iter().zip(scaled).map(|(p, s)| p / s).collect();
            vec![(ROPE_FACTORS, factors)]
        }
        _ => Vec::new(),
    }
}

/// Lists the keys of the scaling of rotary frequencies, which has been checked.
pub(super) fn rope_metadata(row: &Architecture, rope: &Rope) -> Vec<(String, Value)> {
    let mut keys = Keys::new(row.name);
    let kind = |name: &str| Value::String(name.to_owned());
    match &rope.scaling {
        RopeScaling::Linear { factor } => {
            keys.put("rope.scaling.type", kind("linear"));
            keys.put("rope.scaling.factor", Value::F32(*factor as f32));
        }
        RopeScaling::Yarn(yarn) => {
            keys.put("rope.scaling.type", kind("yarn"));
            keys.put("rope.scaling.factor", Value::F32(yarn.factor as f32));
            keys.put_number("rope.scaling.original_context_length", yarn.original_context);
            if row.yarn == Yarn::Multiplier {
                // A tenth of it, as the converter of llama.cpp writes it.
                let tenth = (0.1 * yarn.mscale_all_dim) as f32;
                keys.put("rope.scaling.yarn_log_multiplier", Value::F32(tenth));
            }
            if row.yarn == Yarn::Ratio && yarn.mscale_all_dim != 0.0 {
                let all = yarn.mscale_all_dim as f32;
                keys.put("rope.scaling.yarn_log_multiplier", Value::F32(all));
            }
        }
        RopeScaling::Long(long) => {
            keys.put("rope.scaling.type", kind("longrope"));
            keys.put_number("rope.scaling.original_context_length", long.original_context);
            keys.put("rope.scaling.attn_factor", Value::F32(long.attention_factor as f32));
        }
        _ => {}
    }
    keys.into_pairs()
}
