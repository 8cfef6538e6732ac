//! Sizes of a model for the planner, from its checked config: every architecture that can be loaded can be planned.

use std::collections::BTreeMap;

use mantissa_model::{LinearKind, ModelConfig};
use mantissa_plan::shape::{CacheLayers, Expanded, Index, Matrices, ModelPart, ModelShape, Role};

/// Returns the sizes of a model.
pub fn of_config(name: &str, config: &ModelConfig) -> ModelShape {
    let matrices = matrices(config);
    let sizes = |tensor: &mantissa_model::TensorInfo| tensor.shape.iter().product::<usize>() as u64;
    let all: u64 = config.tensors().iter().map(sizes).sum();
    let linear: u64 = matrices.iter().map(Matrices::weights).sum();
    let table = (config.vocab_size * config.hidden_size) as u64;
    let head = if config.tie_word_embeddings { 0 } else { table };
    let others = all.saturating_sub(linear + table + head);
    let experts = config.experts.as_ref().map_or(0, |experts| {
        let shared = experts.shared.as_ref().map_or(0, |shared| shared.width);
        experts.per_token * experts.width + shared
    });
    ModelShape {
        name: name.to_owned(),
        layers: config.num_hidden_layers as u64,
        hidden: config.hidden_size as u64,
        vocab: config.vocab_size as u64,
        context: config.max_position_embeddings as u64,
        heads: config.num_attention_heads,
        kv_heads: config.num_key_value_heads,
        inner: if experts > 0 { experts } else { config.intermediate_size } as u64,
        mixed: mixed(config, &matrices),
        tied: config.tie_word_embeddings,
        matrices,
        embedding: table,
        others,
        others_met: others.saturating_sub(looked_up(config) + expert_biases(config)),
        expert_biases: expert_biases(config),
        caches: caches(config),
        state_bytes: state_bytes(config),
        state_parts: state_parts(config),
        experts: config.experts.as_ref().map_or(0, |experts| u64::from(experts.count)),
        assumed: None,
    }
}

/// Weights of embeddings of layers and of learned positions, of which a token meets a row.
fn looked_up(config: &ModelConfig) -> u64 {
    let inputs = config.by_layer.inputs.map_or(0, |inputs| inputs.vocabulary * inputs.width);
    let positions =
        if config.learned_positions { config.max_position_embeddings * config.hidden_size } else { 0 };
    (inputs * config.num_hidden_layers + positions) as u64
}

/// Biases of routed experts.
fn expert_biases(config: &ModelConfig) -> u64 {
    let of_experts =
        config.decoder_linears().filter(|info| info.bias && part_of(info.kind) == ModelPart::Experts);
    of_experts.map(|info| info.rows as u64).sum()
}

/// Part of a layer that a linear layer belongs to.
fn part_of(kind: LinearKind) -> ModelPart {
    use LinearKind::{
        Down, ExpertDown, ExpertGate, ExpertUp, Gate, GateUp, InputGate, InputProjection, MixGate, MixIn,
        MixK, MixOut, MixQ, MixV, SharedDown, SharedGate, SharedUp, Up,
    };
    match kind {
        ExpertGate(_) | ExpertUp(_) | ExpertDown(_) => ModelPart::Experts,
        MixIn | MixGate | MixQ | MixK | MixV | MixOut => ModelPart::Mixer,
        Gate | Up | Down | GateUp | SharedGate | SharedUp | SharedDown | InputGate | InputProjection => {
            ModelPart::Mlp
        }
        _ => ModelPart::Attention,
    }
}

/// Groups the linear layers by part, projection and shape.
fn matrices(config: &ModelConfig) -> Vec<Matrices> {
    let mut groups: BTreeMap<(u8, Role, usize, usize), Matrices> = BTreeMap::new();
    for info in config.decoder_linears() {
        let (part, role) = (part_of(info.kind), Role::of(info.kind));
        let (rows, cols) = (info.rows, info.cols);
        let entry = groups.entry((part as u8, role, rows, cols));
        let group = entry.or_insert(Matrices { part, role, rows, cols, count: 0, active: 0 });
        group.count += 1;
    }
    let active = |group: Matrices| {
        let share = match (group.part, &config.experts) {
            (ModelPart::Experts, Some(experts)) => {
                (experts.per_token as u64, u64::from(experts.count).max(1))
            }
            _ => (1, 1),
        };
        Matrices { active: group.count * share.0 / share.1, ..group }
    };
    groups.into_values().map(active).collect()
}

/// Groups the layers that hold keys and values by width and window.
fn caches(config: &ModelConfig) -> Vec<CacheLayers> {
    let mut groups: Vec<CacheLayers> = Vec::new();
    for layer in config.attention_layers() {
        let owns = u64::from(config.has_own_kv(layer));
        let cache = CacheLayers { layers: owns, readers: 1, ..cache(config, layer) };
        let same = |other: &&mut CacheLayers| {
            CacheLayers { layers: 0, readers: 0, ..(**other).clone() }
                == CacheLayers { layers: 0, readers: 0, ..cache.clone() }
        };
        match groups.iter_mut().find(same) {
            Some(group) => (group.layers, group.readers) = (group.layers + owns, group.readers + 1),
            None => groups.push(cache),
        }
    }
    groups
}

/// Describes the cache of one layer.
fn cache(config: &ModelConfig, layer: usize) -> CacheLayers {
    let window = config.windows.get(layer).copied().flatten();
    let index = config.index_width(layer);
    if let Some(latent) = &config.latent {
        let width = latent.kv_rank + latent.rotated;
        let heads = config.num_attention_heads;
        let expanded =
            Expanded { queries: heads * (latent.rotated + latent.unrotated), values: heads * latent.value };
        let choice = config.indexer.as_ref().map(|indexer| {
            let queries = if index > 0 { indexer.heads * indexer.dim } else { 0 };
            Index { chosen: indexer.chosen, width: index, queries }
        });
        return CacheLayers {
            layers: 1,
            readers: 1,
            heads: 1,
            shared: width + index,
            keys: width + index,
            values: 0,
            queries: heads * width,
            attended: heads * latent.kv_rank,
            window,
            // Chosen tokens are attended to as they are cached, in a prompt too.
            expanded: choice.is_none().then_some(expanded),
            index: choice,
        };
    }
    let heads = config.heads(layer);
    let (kv, queries) = (heads.key_value * heads.dim, heads.query * heads.dim);
    CacheLayers {
        layers: 1,
        readers: 1,
        heads: heads.key_value,
        shared: index,
        keys: kv + index,
        values: kv,
        queries,
        attended: queries,
        window,
        expanded: None,
        index: None,
    }
}

/// Elements that the token mixing of all layers makes for one token when it is trained: see [`ModelShape::mixed`]. Of a recurrent
/// mixer: what its projections make, and the input of the last.
fn mixed(config: &ModelConfig, matrices: &[Matrices]) -> u64 {
    let attention: usize = config
        .attention_layers()
        .map(|layer| match &config.latent {
            Some(latent) => {
                let (width, value) = (latent.rotated + latent.unrotated, latent.value);
                let latents = latent.q_rank.unwrap_or(0) + latent.kv_rank + latent.rotated;
                2 * config.num_attention_heads * (width + value) + latents
            }
            None => {
                let heads = config.heads(layer);
                2 * (heads.query + heads.key_value) * heads.dim
            }
        })
        .sum();
    let made = matrices.iter().filter(|m| m.part == ModelPart::Mixer && m.rows != config.hidden_size);
    let read = matrices.iter().filter(|m| m.part == ModelPart::Mixer && m.rows == config.hidden_size);
    let mixers = made.map(|m| m.count * m.rows as u64).chain(read.map(|m| m.count * m.cols as u64));
    attention as u64 + mixers.sum::<u64>()
}

/// Tokens at which states that grow with the context (DeepSeek-V4's compressed entries) are counted.
const STATE_CONTEXT: usize = 8192;

/// Bytes of the recurrent states of a sequence, in f32.
fn state_bytes(config: &ModelConfig) -> u64 {
    let context = STATE_CONTEXT.min(config.max_position_embeddings);
    let of = |layer| config.recurrent_in(layer).map_or(0, |recurrent| recurrent.state(context).bytes());
    (0..config.num_hidden_layers).map(of).sum()
}

/// Parts into which devices divide the recurrent states: the fewest of any layer.
fn state_parts(config: &ModelConfig) -> usize {
    let of = |layer| config.recurrent_in(layer).map(|recurrent| recurrent.state(0).heads.max(1));
    (0..config.num_hidden_layers).filter_map(of).min().unwrap_or(1)
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use mantissa_plan::precision::Kv;
    use serde_json::{Value, json};

    use super::*;

    fn shape(config: &Value) -> ModelShape {
        of_config("test", &ModelConfig::from_json(config, "config.json").unwrap())
    }

    #[test]
    fn a_config_has_the_sizes_of_its_published_shape() {
        let config = json!({
            "model_type": "qwen2", "hidden_size": 5120, "intermediate_size": 27648, "num_hidden_layers": 64,
            "num_attention_heads": 40, "num_key_value_heads": 8, "vocab_size": 152064,
            "max_position_embeddings": 131072, "rms_norm_eps": 1e-6, "tie_word_embeddings": false,
        });
        let (read, known) = (shape(&config), ModelShape::named("Qwen2.5-32B").unwrap());
        assert_eq!(read.parameters(), known.parameters());
        assert_eq!((&read.caches, read.inner, read.others), (&known.caches, known.inner, known.others));
        assert_eq!((read.mixed, read.experts, read.state_parts), (known.mixed, 0, 1));
        assert_eq!(read.operations_per_token(), known.operations_per_token());
    }

    #[test]
    fn experts_windows_and_latents_are_seen() {
        let config = json!({
            "model_type": "qwen3_moe", "hidden_size": 2048, "intermediate_size": 6144, "num_hidden_layers": 48,
            "num_attention_heads": 32, "num_key_value_heads": 4, "head_dim": 128, "vocab_size": 151936,
            "max_position_embeddings": 40960, "rms_norm_eps": 1e-6, "tie_word_embeddings": false,
            "num_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": 768, "norm_topk_prob": true,
        });
        let (read, known) = (shape(&config), ModelShape::named("Qwen3-30B-A3B").unwrap());
        let near = |a: u64, b: u64| (a as f64 / b as f64 - 1.0).abs() < 1e-4;
        assert!(near(read.parameters(), known.parameters()), "{} {}", read.parameters(), known.parameters());
        assert!(near(read.active_parameters(), known.active_parameters()));
        assert_eq!((&read.caches, read.mixed, read.experts), (&known.caches, known.mixed, 128));
        let config = json!({
            "model_type": "gemma3_text", "hidden_size": 1152, "intermediate_size": 6912, "num_hidden_layers": 26,
            "num_attention_heads": 4, "num_key_value_heads": 1, "head_dim": 256, "vocab_size": 262144,
            "max_position_embeddings": 32768, "rms_norm_eps": 1e-6, "sliding_window": 512,
        });
        let read = shape(&config);
        let windowed: u64 = read.caches.iter().filter(|c| c.window.is_some()).map(|c| c.layers).sum();
        assert!(windowed > 20 && read.tied, "{:?}", read.caches);
        let kv = Kv::named("f16").unwrap();
        assert!(kv.bytes_of_sequence(&read, 32_768) < 0.3 * 32_768.0 * kv.bytes_per_token(&read));
    }

    fn tiny(name: &str) -> ModelShape {
        let file = format!("{}/../../tests/data/tiny/{name}/config.json", env!("CARGO_MANIFEST_DIR"));
        shape(&serde_json::from_slice(&std::fs::read(file).unwrap()).unwrap())
    }

    /// Biases of projections, routers and experts and attention sinks are counted alike.
    #[test]
    fn gpt_oss_has_the_sizes_of_its_published_shape() {
        let file = concat!(env!("CARGO_MANIFEST_DIR"), "/../../tests/data/tiny/gpt-oss/config.json");
        let mut config: Value = serde_json::from_slice(&std::fs::read(file).unwrap()).unwrap();
        let kinds: Vec<&str> =
            (0..24).map(|i| if i % 2 == 0 { "sliding_attention" } else { "full_attention" }).collect();
        config["layer_types"] = json!(kinds);
        for (key, value) in [
            ("hidden_size", 2880),
            ("intermediate_size", 2880),
            ("num_hidden_layers", 24),
            ("num_attention_heads", 64),
            ("num_key_value_heads", 8),
            ("head_dim", 64),
            ("num_local_experts", 32),
            ("num_experts_per_tok", 4),
            ("sliding_window", 128),
            ("max_position_embeddings", 131_072),
            ("vocab_size", 201_088),
        ] {
            config[key] = json!(value);
        }
        let (read, known) = (shape(&config), ModelShape::named("gpt-oss-20b").unwrap());
        assert_eq!((read.parameters(), read.others), (known.parameters(), known.others));
        assert_eq!((read.others_met, read.expert_biases), (known.others_met, known.expert_biases));
        assert_eq!(read.active_parameters(), known.active_parameters());
    }

    /// 4 heads, a latent of 12 + 4, an index of 2 heads of 8 elements for 2048 tokens; MLP and expert have a down projection.
    #[test]
    fn indexes_and_roles_are_seen() {
        let read = tiny("deepseek-v32");
        let cache = &read.caches[0];
        assert_eq!(cache.index, Some(Index { chosen: 2048, width: 8, queries: 16 }));
        assert_eq!((cache.keys, cache.queries, cache.expanded), (24, 64, None));
        let down: u64 = read.matrices.iter().filter(|m| m.role == Role::Down).map(|m| m.count).sum();
        // One dense MLP, and in the other layer six experts and a shared one.
        assert_eq!((down, read.expert_layers()), (8, 1));
        // Without an index: heads of 6 + 4 and of 8.
        let cache = &tiny("kimi-k2").caches[0];
        assert!(cache.index.is_none() && cache.expanded.is_some());
    }

    /// Biases of 4 experts, 2 × 16 + 32 in each of 2 layers, are not met; embeddings of layers are looked up.
    #[test]
    fn weights_that_a_token_does_not_meet_are_left_out() {
        let read = tiny("gpt-oss");
        assert_eq!(read.others - read.others_met, 2 * 4 * (2 * 16 + 32));
        assert_eq!(read.expert_biases, 2 * 4 * (2 * 16 + 32));
        let read = tiny("gemma3n");
        assert!(read.others_met < read.others);
        let read = tiny("qwen3-qknorm");
        assert_eq!(read.others_met, read.others);
    }
}
