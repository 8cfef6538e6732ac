//! Tensors of a checkpoint that the text model does not use: towers and projectors of multimodal models, heads that
//! predict several tokens. They are copied bit for bit, and formats list their modules as unquantized.

use std::collections::{BTreeMap, BTreeSet};

use mantissa_model::{ModelConfig, Role, TensorInfo};
use mantissa_store::TensorMeta;
use mantissa_store::convention::{ModelFiles, levels};

/// Ends of the names of a KV cache's scales, which belong to the quantization of the source.
const CACHE_SCALES: [&str; 3] = ["k_scale", "v_scale", "q_scale"];

/// Names of what the text model uses.
pub(crate) struct Used {
    tensors: BTreeSet<String>,
    modules: BTreeSet<String>,
}

impl Used {
    pub(crate) fn new(config: &ModelConfig) -> Self {
        let linears = config.decoder_linears().chain(config.tables()).map(|info| info.module);
        // Sources may quantize the side tensors of an indexer.
        let side = |info: TensorInfo| match info.role {
            Role::Side { layer, kind } => Some(config.side_module(layer, kind)),
            _ => None,
        };
        Used {
            tensors: config.tensors().into_iter().map(|info| info.name).collect(),
            modules: linears.chain(config.tensors().into_iter().filter_map(side)).collect(),
        }
    }

    /// True if the text model uses the tensor, or a quantized layer of it does.
    pub(crate) fn has(&self, name: &str) -> bool {
        let last = name.rsplit('.').next().unwrap_or_default();
        // Names of a weight's tensors may have more dots (`weight.absmax`).
        let in_module = || name.match_indices('.').any(|(at, _)| self.modules.contains(&name[..at]));
        let is_cache_scale = || CACHE_SCALES.contains(&last) || levels::SUFFIXES.contains(&last);
        // Codes of fused experts are named after the tensor.
        let fused = || {
            let stem = name.strip_suffix("_blocks").or(name.strip_suffix("_scales"));
            stem.is_some_and(|stem| self.tensors.contains(stem))
        };
        self.tensors.contains(name) || in_module() || is_cache_scale() || fused()
    }
}

/// Lists the tensors of `files` that the text model does not use.
pub(crate) fn tensors<'a>(
    files: &'a ModelFiles,
    config: &ModelConfig,
) -> impl Iterator<Item = &'a TensorMeta> + use<'a> {
    let (used, config) = (Used::new(config), config.clone());
    // A GGUF file has names of its own, and holds a text model alone.
    let all = files.gguf().is_none().then(|| files.checkpoint().tensors());
    all.into_iter().flatten().filter(move |meta| !used.has(&meta.name) && !config.is_tied_head(&meta.name))
}

/// Returns the module of a weight that may belong to a linear layer: a tensor `weight` of two dimensions.
pub(crate) fn linear_module(meta: &TensorMeta) -> Option<&str> {
    meta.name.strip_suffix(".weight").filter(|_| meta.shape.len() == 2)
}

/// True if an unknown tensor may be the weight of linear layers within the decoder layers: a matrix `weight`, or experts
/// fused under a name that the architecture does not have.
pub(crate) fn is_decoder_weight(config: &ModelConfig, meta: &TensorMeta) -> bool {
    let weight = meta.name.ends_with(".weight") && meta.shape.len() == 2;
    let fused = meta.shape.len() == 3 && !meta.name.ends_with("bias") && meta.shape[1] > 1;
    (weight || fused) && config.layer_of(&meta.name).is_some()
}

/// Part of a model that the text model does not use.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct UnusedPart {
    /// Prefix of its tensors.
    pub(crate) name: String,
    /// Number of tensors.
    pub(crate) tensors: usize,
    /// Number of parameters.
    pub(crate) parameters: u64,
    /// Bytes as stored.
    pub(crate) bytes: u64,
}

/// Groups tensors by the part of the model that they belong to: a tower, or the names before the first number.
pub(crate) fn parts<'a>(
    config: &ModelConfig,
    tensors: impl Iterator<Item = &'a TensorMeta>,
) -> Vec<UnusedPart> {
    let mut parts: BTreeMap<String, UnusedPart> = BTreeMap::new();
    for meta in tensors {
        let name = part_of(config, &meta.name);
        let empty = UnusedPart { name: name.clone(), tensors: 0, parameters: 0, bytes: 0 };
        let part = parts.entry(name).or_insert(empty);
        part.tensors += 1;
        part.parameters += meta.numel();
        part.bytes += meta.len;
    }
    parts.into_values().collect()
}

fn part_of(config: &ModelConfig, name: &str) -> String {
    let within = |tower: &&&str| name.strip_prefix(**tower).is_some_and(|rest| rest.starts_with('.'));
    let towers = config.wrapper.iter().flat_map(|wrapper| wrapper.towers);
    if let Some(tower) = towers.filter(within).max_by_key(|tower| tower.len()) {
        return (*tower).to_owned();
    }
    let number = |part: &&str| part.bytes().all(|byte| byte.is_ascii_digit());
    let modules: Vec<&str> = name.split('.').collect();
    // A layer behind the decoder's layers is a part by itself.
    let end = match (modules.as_slice(), modules.iter().position(number)) {
        (["model", "layers", ..], Some(2)) => 3,
        (_, Some(end)) => end,
        (_, None) => modules.len().saturating_sub(1),
    };
    modules[..end.clamp(1, modules.len())].join(".")
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    fn config(json: serde_json::Value) -> ModelConfig {
        ModelConfig::from_json(&json, "config.json").unwrap()
    }

    #[test]
    fn parts_are_towers_and_modules_before_a_number() {
        let text = serde_json::json!({
            "model_type": "qwen3_vl_text", "hidden_size": 32, "intermediate_size": 24, "num_hidden_layers": 2,
            "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 64, "max_position_embeddings": 64,
            "rms_norm_eps": 1e-6
        });
        let config = config(serde_json::json!({"model_type": "qwen3_vl", "text_config": text}));
        for (name, part) in [
            ("model.visual.blocks.0.attn.qkv.weight", "model.visual"),
            ("visual.patch_embed.proj.weight", "visual"),
            ("mtp.layers.0.mlp.gate.weight", "mtp.layers"),
            ("mtp.fc.weight", "mtp.fc"),
            ("model.layers.46.eh_proj.weight", "model.layers.46"),
            ("alone", "alone"),
        ] {
            assert_eq!(part_of(&config, name), part);
        }
        let used = Used::new(&config);
        assert!(used.has("model.language_model.layers.1.mlp.up_proj.weight_scale"));
        assert!(used.has("model.language_model.layers.1.self_attn.k_scale"));
        assert!(!used.has("model.visual.merger.norm.weight"));
        assert_eq!(config.layer_of("model.language_model.layers.1.mlp.x"), Some(1));
        assert_eq!(config.layer_of("model.language_model.layers.2.mlp.x"), None);
    }
}
