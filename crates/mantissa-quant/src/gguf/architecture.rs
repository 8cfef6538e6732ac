//! What GGUF calls an architecture, what llama.cpp can run of it, and the keys that say the rest.
//!
//! Keys and rules are those of llama.cpp's converter (`convert_hf_to_gguf.py`) and loaders (`llama-model.cpp`).

use mantissa_model::config::{Experts, NormPlaces};
use mantissa_model::rope::{Rope, RopeScaling, yarn_mscale};
use mantissa_model::{Activation, ModelConfig};
use mantissa_store::convention::ModelFiles;
use mantissa_store::convention::gguf::{Architecture, Sizes};
use mantissa_store::gguf::Value;

use super::fault;
use crate::error::Result;

/// Base of the rotation in layers with a window where no key says it.
const LOCAL_THETA: f64 = 10_000.0;

/// The architecture that the model is written as.
///
/// # Errors
/// The field of what llama.cpp does not compute in it.
pub(super) fn architecture(source: &ModelFiles, config: &ModelConfig) -> Result<Architecture> {
    let name = config.model_type.name();
    let Some(architecture) = Architecture::of_model_type(name) else {
        let known = Architecture::NAMES.map(|(.., model_type)| model_type).join(", ");
        return Err(fault(source, "model_type", name, &format!("{known}, mistral or mixtral")));
    };
    let activation = match architecture {
        Architecture::Gemma | Architecture::Gemma2 | Architecture::Gemma3 | Architecture::Phi2 => {
            Activation::GeluTanh
        }
        Architecture::GptNeox => Activation::Gelu,
        _ => Activation::Silu,
    };
    if config.hidden_act != activation {
        let found = format!("{:?}", config.hidden_act);
        return Err(fault(source, "hidden_act", found, &format!("{activation:?} in this architecture")));
    }
    check_windows(source, config, architecture)?;
    if let Some(experts) = &config.experts {
        check_experts(source, experts, architecture)?;
    }
    check_scores(source, config, architecture)?;
    Ok(architecture)
}

/// Windows that llama.cpp does not have, or has on other layers.
fn check_windows(source: &ModelFiles, config: &ModelConfig, architecture: Architecture) -> Result<()> {
    if architecture.default_window_period().is_some() {
        return match window_period(config) {
            Some(_) => Ok(()),
            None => {
                let allowed = "all layers but each of so many with one and the same window";
                Err(fault(source, "layer_types", "another pattern", allowed))
            }
        };
    }
    let cut = config.windows.iter().flatten().find(|&&window| window < config.max_position_embeddings);
    match cut {
        Some(window) => Err(fault(
            source,
            "sliding_window",
            window.to_string(),
            "none: llama.cpp has none in this architecture",
        )),
        None => Ok(()),
    }
}

/// The least period after which layers without a window come again; 0 where all layers have one.
fn window_period(config: &ModelConfig) -> Option<usize> {
    let layers = config.windows.len();
    let fits = |period: usize| {
        let windowed = |layer: usize| period == 0 || layer % period < period - 1;
        config.windows.iter().enumerate().all(|(layer, window)| window.is_some() == windowed(layer))
    };
    (0..=layers).find(|&period| fits(period))
}

/// Every layer has experts, and their weights are made to add up to 1 or not by the architecture.
fn check_experts(source: &ModelFiles, experts: &Experts, architecture: Architecture) -> Result<()> {
    if let Some(layer) = experts.layers.iter().position(|has| !has) {
        let found = format!("no experts in layer {layer}");
        return Err(fault(
            source,
            "mlp_only_layers",
            found,
            "experts in every layer: llama.cpp requires them",
        ));
    }
    let normalized = architecture != Architecture::Qwen2Moe;
    if experts.routing.normalize != normalized {
        let found = experts.routing.normalize.to_string();
        let allowed = format!("{normalized}: llama.cpp has no other in this architecture");
        return Err(fault(source, "norm_topk_prob", found, &allowed));
    }
    Ok(())
}

/// The scale and the cap of attention scores that llama.cpp has no key for.
fn check_scores(source: &ModelFiles, config: &ModelConfig, architecture: Architecture) -> Result<()> {
    let of = |n: usize| n as u64;
    let (hidden, heads) = (config.hidden_size, config.num_attention_heads);
    let layers = config.num_hidden_layers;
    let width = architecture.query_scale(of(layers), of(hidden), of(heads), of(config.head_dim));
    let scale = (width as f64).powf(-0.5);
    if (f64::from(config.attention_scale) - scale).abs() > 1e-6 * scale {
        let found = f64::from(config.attention_scale).powi(-2).to_string();
        return Err(fault(source, "query_pre_attn_scalar", found, &format!("{width}: llama.cpp has no key")));
    }
    if let (Architecture::Gemma3, Some(cap)) = (architecture, config.attention_softcap) {
        return Err(fault(source, "attn_logit_softcapping", cap.to_string(), "null in this architecture"));
    }
    match &config.local_rope {
        Some(rope) if rope.scaling != RopeScaling::Default => Err(fault(
            source,
            "rope_parameters.sliding_attention",
            "a scaling",
            "none in layers with a window",
        )),
        _ => Ok(()),
    }
}

pub(super) fn sizes(config: &ModelConfig) -> Sizes {
    Sizes {
        layers: config.num_hidden_layers,
        context: config.max_position_embeddings,
        hidden: config.hidden_size,
        ffn: config.intermediate_size,
        heads: config.num_attention_heads,
        kv_heads: config.num_key_value_heads,
        head_dim: config.head_dim,
        rotated: config.rotary_dim,
        vocab: config.vocab_size,
        eps: config.rms_norm_eps,
        rope_theta: config.rope.theta as f32,
    }
}

/// The keys that only some architectures have.
pub(super) fn family_metadata(architecture: Architecture, config: &ModelConfig) -> Vec<(String, Value)> {
    let mut all = Vec::new();
    let mut put = |key: &str, value: Value| all.push((format!("{}.{key}", architecture.name()), value));
    let number = |n: usize| Value::U32(u32::try_from(n).unwrap_or(u32::MAX));
    if let Some(experts) = &config.experts {
        put("expert_count", Value::U32(experts.count.into()));
        put("expert_used_count", number(experts.per_token));
        if architecture != Architecture::Llama {
            put("expert_feed_forward_length", number(experts.width));
        }
        if let Some(shared) = &experts.shared {
            put("expert_shared_feed_forward_length", number(shared.width));
        }
    }
    if let Some(default) = architecture.default_window_period() {
        let window = config.windows.iter().flatten().next();
        put("attention.sliding_window", number(window.copied().unwrap_or(0)));
        if let Some(period) = window.and_then(|_| stated_period(config, default)) {
            put("attention.sliding_window_pattern", number(period));
        }
        // Without the key llama.cpp takes the caps of the published models.
        if architecture == Architecture::Gemma2 {
            put("attn_logit_softcapping", Value::F32(config.attention_softcap.unwrap_or(0.0)));
        }
        put("final_logit_softcapping", Value::F32(config.logit_softcap.unwrap_or(0.0)));
    }
    if let Some(local) = config.local_rope.as_ref().filter(|local| local.theta != LOCAL_THETA) {
        put("rope.freq_base_swa", Value::F32(local.theta as f32));
    }
    match architecture {
        // 0 tells llama.cpp that there is no window.
        Architecture::Phi3 => put("attention.sliding_window", Value::U32(0)),
        Architecture::Olmo => {
            if let Some(clip) = config.clip_qkv {
                put("attention.clamp_kqv", Value::F32(clip));
            }
        }
        Architecture::GptNeox => {
            put("use_parallel_residual", Value::Bool(config.norm_places == NormPlaces::Parallel));
        }
        _ => {}
    }
    all
}

/// The period of windows where `default` does not put them on the same layers.
fn stated_period(config: &ModelConfig, default: u32) -> Option<usize> {
    let default = default as usize;
    let windowed =
        |(layer, window): (usize, &Option<usize>)| window.is_some() == (layer % default < default - 1);
    if config.windows.iter().enumerate().all(windowed) { None } else { window_period(config) }
}

/// What llama.cpp divides each frequency by, where scaling is not one of the kinds that it computes.
pub(super) fn rope_factors(rope: &Rope, rotated: usize) -> Option<Vec<f32>> {
    match &rope.scaling {
        RopeScaling::Factors(factors) => Some(factors.clone()),
        RopeScaling::Llama3 { .. } => {
            let plain = Rope { theta: rope.theta, scaling: RopeScaling::Default };
            let scaled = rope.inverse_frequencies(rotated);
            Some(plain.inverse_frequencies(rotated).iter().zip(scaled).map(|(p, s)| p / s).collect())
        }
        _ => None,
    }
}

pub(super) fn rope_metadata(
    source: &ModelFiles,
    architecture: Architecture,
    rope: &Rope,
) -> Result<Vec<(String, Value)>> {
    let key = |key: &str| format!("{}.rope.scaling.{key}", architecture.name());
    let kind = |name: &str| (key("type"), Value::String(name.to_owned()));
    match &rope.scaling {
        RopeScaling::Default | RopeScaling::Llama3 { .. } | RopeScaling::Factors(_) => Ok(Vec::new()),
        RopeScaling::Linear { factor } => {
            Ok(vec![kind("linear"), (key("factor"), Value::F32(*factor as f32))])
        }
        RopeScaling::Yarn(yarn) => {
            let expected = yarn_mscale(yarn.factor, 1.0);
            let same = (yarn.attention_factor - expected).abs() < 1e-6 * expected;
            if !same || !yarn.truncate || (yarn.beta_fast, yarn.beta_slow) != (32.0, 1.0) {
                let allowed = "YaRN with its default betas, truncation and attention factor";
                return Err(fault(source, "rope_scaling", "other parameters", allowed));
            }
            let context = u32::try_from(yarn.original_context).unwrap_or(u32::MAX);
            Ok(vec![
                kind("yarn"),
                (key("factor"), Value::F32(yarn.factor as f32)),
                (key("original_context_length"), Value::U32(context)),
            ])
        }
        _ => Err(fault(source, "rope_scaling", "another kind", "linear, yarn or llama3")),
    }
}
