//! Architectures in GGUF: names, what llama.cpp can compute of them, and their metadata keys.
//!
//! Keys and rules are those of llama.cpp's converter (`convert_hf_to_gguf.py`) and loaders (`llama-model.cpp`).

use mantissa_model::config::{Experts, Latent, LimitedSwiglu, NormPlaces, Scores};
use mantissa_model::rope::{Rope, RopeScaling, Yarn, yarn_mscale};
use mantissa_model::{Activation, ModelConfig};
use mantissa_store::convention::ModelFiles;
use mantissa_store::convention::gguf::{Architecture, LONG_ROPE, ROPE_FACTORS, Sizes};
use mantissa_store::gguf::Value;

use super::layout::fault;
use crate::error::Result;

/// Rotary base of layers with a window, if no key states it.
const LOCAL_THETA: f64 = 10_000.0;

/// Returns the architecture that the model is written as.
///
/// # Errors
/// Names the field that llama.cpp does not compute in it.
pub(super) fn architecture(source: &ModelFiles, config: &ModelConfig) -> Result<Architecture> {
    let name = config.architecture.name;
    let Some(architecture) = Architecture::of_model_type(name) else {
        let known = Architecture::NAMES.map(|(.., model_type)| model_type).join(", ");
        let known = format!("{known}, mistral, mixtral or deepseek_v2");
        return Err(fault(source, "model_type", name, &known));
    };
    let activation = match architecture {
        Architecture::Gemma
        | Architecture::Gemma2
        | Architecture::Gemma3
        | Architecture::Phi2
        | Architecture::Gpt2 => Activation::GeluTanh,
        Architecture::Bitnet if config.hidden_act == Activation::Relu2 => Activation::Relu2,
        Architecture::GptNeox => Activation::Gelu,
        _ => Activation::Silu,
    };
    if config.hidden_act != activation {
        let found = config.hidden_act.to_string();
        return Err(fault(source, "hidden_act", found, &format!("{activation} in this architecture")));
    }
    check_windows(source, config, architecture)?;
    if let Some(experts) = &config.experts {
        check_experts(source, experts, architecture)?;
    }
    check_scores(source, config, architecture)?;
    check_family(source, config, architecture)?;
    Ok(architecture)
}

/// Refuses windows that llama.cpp does not have, or has on other layers.
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

/// Least period of the layers without a window; 0 if all layers have one.
fn window_period(config: &ModelConfig) -> Option<usize> {
    (0..=config.windows.len()).find(|&period| is_window_period(config, period))
}

/// True if every layer but the last of each `period` has a window; for 0, if every layer has one.
fn is_window_period(config: &ModelConfig, period: usize) -> bool {
    let windowed = |layer: usize| period == 0 || layer % period < period - 1;
    config.windows.iter().enumerate().all(|(layer, window)| window.is_some() == windowed(layer))
}

/// Checks that every layer has experts, and that their weights are normalized as the architecture requires.
fn check_experts(source: &ModelFiles, experts: &Experts, architecture: Architecture) -> Result<()> {
    let leading = architecture == Architecture::Deepseek2;
    if let Some(layer) = experts.layers.iter().position(|has| !has).filter(|_| !leading) {
        let found = format!("no experts in layer {layer}");
        return Err(fault(
            source,
            "mlp_only_layers",
            found,
            "experts in every layer: llama.cpp requires them",
        ));
    }
    // DeepSeek's files state it; gpt-oss uses a softmax over the chosen experts.
    if leading || experts.routing.scores == Scores::SoftmaxOfChosen {
        return Ok(());
    }
    let normalized = architecture != Architecture::Qwen2Moe;
    if experts.routing.normalize != normalized {
        let found = experts.routing.normalize.to_string();
        let allowed = format!("{normalized}: llama.cpp has no other in this architecture");
        return Err(fault(source, "norm_topk_prob", found, &allowed));
    }
    Ok(())
}

/// Checks what llama.cpp fixes in these architectures, without a key.
fn check_family(source: &ModelFiles, config: &ModelConfig, architecture: Architecture) -> Result<()> {
    let refuse = |field: &str, found: String, allowed: &str| Err(fault(source, field, found, allowed));
    match architecture {
        Architecture::Bitnet | Architecture::Deepseek2 if config.biases.qkv => {
            refuse("attention_bias", "true".to_owned(), "false in this architecture")
        }
        Architecture::Bitnet if !config.tie_word_embeddings => {
            refuse("tie_word_embeddings", "false".to_owned(), "true in this architecture")
        }
        Architecture::GptOss => check_gpt_oss(source, config),
        Architecture::Deepseek2 => check_deepseek(source, config),
        _ => Ok(()),
    }
}

fn check_gpt_oss(source: &ModelFiles, config: &ModelConfig) -> Result<()> {
    let published = LimitedSwiglu { alpha: 1.702, limit: 7.0 };
    if let Some(limited) = config.experts.as_ref().and_then(|experts| experts.limited)
        && limited != published
    {
        let found = format!("{} and {}", limited.alpha, limited.limit);
        return Err(fault(source, "swiglu_alpha, swiglu_limit", found, "1.702 and 7: llama.cpp has no key"));
    }
    if config.tie_word_embeddings || !config.biases.qkv {
        let found = format!("{} and {}", config.tie_word_embeddings, config.biases.qkv);
        let allowed = "false and true in this architecture";
        return Err(fault(source, "tie_word_embeddings, attention_bias", found, allowed));
    }
    match stated_period(config, 2) {
        None => Ok(()),
        Some(_) => Err(fault(source, "layer_types", "another pattern", "a window on every other layer")),
    }
}

fn check_deepseek(source: &ModelFiles, config: &ModelConfig) -> Result<()> {
    let refuse = |field: &str, found: String, allowed: &str| Err(fault(source, field, found, allowed));
    if config.rms_norm_eps != Latent::EPS {
        let allowed = "1e-6, the epsilon of the latents' norms: llama.cpp has one for all";
        return refuse("rms_norm_eps", config.rms_norm_eps.to_string(), allowed);
    }
    if config.latent.is_some_and(|latent| !latent.interleaved) {
        return refuse("rope_interleave", "false".to_owned(), "true: llama.cpp has no key");
    }
    let Some(experts) = &config.experts else { return Ok(()) };
    if experts.shared.is_none() {
        return refuse("n_shared_experts", "0".to_owned(), "at least 1: llama.cpp requires them");
    }
    if experts.routing.groups.is_some_and(|groups| !groups.best_two) {
        let allowed = "greedy: llama.cpp ranks groups by their best two experts only";
        return refuse("topk_method", "group_limited_greedy".to_owned(), allowed);
    }
    Ok(())
}

/// Checks scale and cap of the attention scores, for which llama.cpp has no key.
fn check_scores(source: &ModelFiles, config: &ModelConfig, architecture: Architecture) -> Result<()> {
    // DeepSeek's scale follows from its widths and from YaRN's parameters, which are checked.
    if config.latent.is_some() {
        return Ok(());
    }
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
    let sizes = plain_sizes(config);
    match config.latent {
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
        eps: config.rms_norm_eps,
        rope_theta: config.rope.theta as f32,
    }
}

/// Lists what llama.cpp computes differently from the model, and no file can state.
pub(super) fn notes(architecture: Architecture, config: &ModelConfig) -> Vec<String> {
    let mut notes = Vec::new();
    if architecture == Architecture::Bitnet && config.hidden_act == Activation::Relu2 {
        notes.push(
            "hidden_act: relu2 is in the file; llama.cpp of before it had that key computes silu".to_owned(),
        );
    }
    if architecture == Architecture::GptOss && matches!(config.rope.scaling, RopeScaling::Yarn(_)) {
        notes.push("rope_scaling: llama.cpp rounds the ends of YaRN's ramp, gpt-oss does not".to_owned());
    }
    notes
}

/// Lists the keys of particular architectures.
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
        if let Some(shared) = &experts.shared.filter(|shared| shared.gated) {
            put("expert_shared_feed_forward_length", number(shared.width));
        }
    }
    if let Some(default) = architecture.default_window_period() {
        let window = config.windows.iter().flatten().next();
        put("attention.sliding_window", number(window.copied().unwrap_or(0)));
        if let Some(period) = window.and_then(|_| stated_period(config, default)) {
            put("attention.sliding_window_pattern", number(period));
        }
        // Without the key llama.cpp uses the caps of the published models.
        if architecture == Architecture::Gemma2 {
            put("attn_logit_softcapping", Value::F32(config.attention_softcap.unwrap_or(0.0)));
        }
        if architecture != Architecture::GptOss {
            put("final_logit_softcapping", Value::F32(config.logit_softcap.unwrap_or(0.0)));
        }
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
        Architecture::Bitnet if config.hidden_act == Activation::Relu2 => {
            put("hidden_activation", Value::String("relu2".to_owned()));
        }
        _ => {}
    }
    if let Some(latent) = &config.latent {
        all.extend(latent_metadata(architecture, config, latent));
    }
    all
}

/// Lists the keys of DeepSeek's attention and experts.
fn latent_metadata(
    architecture: Architecture,
    config: &ModelConfig,
    latent: &Latent,
) -> Vec<(String, Value)> {
    let number = |n: usize| Value::U32(u32::try_from(n).unwrap_or(u32::MAX));
    let mut all = vec![
        ("attention.kv_lora_rank", number(latent.kv_rank)),
        ("attention.key_length_mla", number(latent.head())),
        ("attention.value_length_mla", number(latent.value)),
    ];
    all.extend(latent.q_rank.map(|rank| ("attention.q_lora_rank", number(rank))));
    if let Some(experts) = &config.experts {
        let routing = &experts.routing;
        let shared = experts.shared.map_or(0, |shared| shared.width / experts.width.max(1));
        let dense = experts.layers.iter().take_while(|has| !**has).count();
        // Numbers of llama.cpp.
        let gating = if routing.scores == Scores::Sigmoid { 2 } else { 1 };
        all.push(("expert_shared_count", number(shared)));
        all.push(("leading_dense_block_count", number(dense)));
        all.push(("expert_weights_scale", Value::F32(routing.scale)));
        all.push(("expert_weights_norm", Value::Bool(routing.normalize)));
        all.push(("expert_gating_func", Value::U32(gating)));
        if let Some(groups) = routing.groups {
            all.push(("expert_group_count", number(groups.count)));
            all.push(("expert_group_used_count", number(groups.chosen)));
        }
    }
    let name = architecture.name();
    all.into_iter().map(|(key, value)| (format!("{name}.{key}"), value)).collect()
}

/// Period of windows, if `default` does not place them on the same layers.
fn stated_period(config: &ModelConfig, default: u32) -> Option<usize> {
    if is_window_period(config, default as usize) { None } else { window_period(config) }
}

/// Divisors of the frequencies, for a scaling that llama.cpp does not compute.
pub(super) fn rope_factors(rope: &Rope, rotated: usize) -> Vec<(&'static str, Vec<f32>)> {
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

pub(super) fn rope_metadata(
    source: &ModelFiles,
    architecture: Architecture,
    rope: &Rope,
) -> Result<Vec<(String, Value)>> {
    let key = |key: &str| format!("{}.rope.scaling.{key}", architecture.name());
    let context = |n: usize| Value::U32(u32::try_from(n).unwrap_or(u32::MAX));
    let kind = |name: &str| (key("type"), Value::String(name.to_owned()));
    match &rope.scaling {
        RopeScaling::Default | RopeScaling::Llama3 { .. } | RopeScaling::Factors(_) => Ok(Vec::new()),
        RopeScaling::Linear { factor } => {
            Ok(vec![kind("linear"), (key("factor"), Value::F32(*factor as f32))])
        }
        RopeScaling::Yarn(yarn) => {
            check_yarn(source, architecture, yarn)?;
            let mut all = vec![
                kind("yarn"),
                (key("factor"), Value::F32(yarn.factor as f32)),
                (key("original_context_length"), context(yarn.original_context)),
            ];
            if architecture == Architecture::Deepseek2 {
                // A tenth of it, as the converter of llama.cpp writes it.
                let tenth = Value::F32((0.1 * yarn.mscale_all_dim) as f32);
                all.push((key("yarn_log_multiplier"), tenth));
            }
            Ok(all)
        }
        RopeScaling::Long(long) if matches!(architecture, Architecture::Phi3 | Architecture::Llama) => {
            Ok(vec![
                kind("longrope"),
                (key("original_context_length"), context(long.original_context)),
                (key("attn_factor"), Value::F32(long.attention_factor as f32)),
            ])
        }
        _ => Err(fault(source, "rope_scaling", "another kind", "linear, yarn or llama3; longrope in phi3")),
    }
}

/// Checks what llama.cpp computes of YaRN. In gpt-oss it rounds the ends of the ramp outwards where the model does not
/// (`truncate`), which moves some frequencies; its files are written anyway, and read as the model is.
fn check_yarn(source: &ModelFiles, architecture: Architecture, yarn: &Yarn) -> Result<()> {
    // DeepSeek's two factors cancel in cosines and sines; the scores have their square.
    let latent = architecture == Architecture::Deepseek2;
    let expected = if latent { 1.0 } else { yarn_mscale(yarn.factor, 1.0) };
    let same = (yarn.attention_factor - expected).abs() < 1e-6 * expected
        && (!latent || yarn.mscale_all_dim != 0.0)
        && yarn.truncate == (architecture != Architecture::GptOss);
    if !same || (yarn.beta_fast, yarn.beta_slow) != (32.0, 1.0) {
        let allowed = "YaRN with its default betas, truncation and attention factor";
        return Err(fault(source, "rope_scaling", "other parameters", allowed));
    }
    Ok(())
}
