//! The architectures that are known: their names, what their fields are called, and what they have that no field says.

use super::fields::{ConfigError, Fields};

/// The architectures that are known.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum ModelType {
    /// Llama 1, 2 and 3.
    Llama,
    /// Mistral: a sliding window on every layer, unless it is null.
    Mistral,
    /// Qwen2 and Qwen2.5: biases on q, k and v.
    Qwen2,
    /// Qwen3: norms on the heads of q and k.
    Qwen3,
    /// BitNet b1.58: norms before the output and the down projection.
    Bitnet,
    /// Gemma: scaled embedding, norms that add 1 to their weights, GELU.
    Gemma,
    /// Gemma 2: norms before and after attention and MLP, soft-capped scores and logits, a window on every other layer.
    Gemma2,
    /// Gemma 3 (text): norms on the heads, rotary parameters of their own for layers with a window.
    Gemma3,
    /// Phi-1, 1.5 and 2: attention and MLP side by side on one norm, partial rotation.
    Phi,
    /// Phi-3 and Phi-4: joined projections, partial rotation, LongRoPE.
    Phi3,
    /// OLMo: norms without parameters, clipped q, k and v.
    Olmo,
    /// OLMo 2: norms after attention and MLP, and on all heads of q and k at once.
    Olmo2,
    /// GPT-2: learned positions, joined projections stored `[in, out]`.
    Gpt2,
    /// GPT-NeoX and Pythia: attention and MLP side by side, projections joined head by head.
    GptNeox,
    /// Mixtral: experts.
    Mixtral,
    /// Qwen1.5-MoE and Qwen2-MoE: experts beside a shared one with a gate.
    Qwen2Moe,
    /// Qwen3-MoE.
    Qwen3Moe,
    /// DeepSeek-V2: multi-head latent attention, shared experts, routing limited to groups.
    DeepseekV2,
    /// DeepSeek-V3 and R1: the same with sigmoid scores and corrections.
    DeepseekV3,
    /// gpt-oss: attention sinks, stacked experts.
    GptOss,
}

impl ModelType {
    /// Every type with its name in `config.json`.
    pub const NAMES: [(ModelType, &'static str); 20] = [
        (ModelType::Llama, "llama"),
        (ModelType::Mistral, "mistral"),
        (ModelType::Qwen2, "qwen2"),
        (ModelType::Qwen3, "qwen3"),
        (ModelType::Bitnet, "bitnet"),
        (ModelType::Gemma, "gemma"),
        (ModelType::Gemma2, "gemma2"),
        (ModelType::Gemma3, "gemma3_text"),
        (ModelType::Phi, "phi"),
        (ModelType::Phi3, "phi3"),
        (ModelType::Olmo, "olmo"),
        (ModelType::Olmo2, "olmo2"),
        (ModelType::Gpt2, "gpt2"),
        (ModelType::GptNeox, "gpt_neox"),
        (ModelType::Mixtral, "mixtral"),
        (ModelType::Qwen2Moe, "qwen2_moe"),
        (ModelType::Qwen3Moe, "qwen3_moe"),
        (ModelType::DeepseekV2, "deepseek_v2"),
        (ModelType::DeepseekV3, "deepseek_v3"),
        (ModelType::GptOss, "gpt_oss"),
    ];

    pub(super) fn parse(fields: Fields<'_>) -> Result<Self, ConfigError> {
        let name = fields.text("model_type")?;
        let known = Self::NAMES.into_iter().find(|(_, known)| Some(*known) == name);
        known
            .map(|(model_type, _)| model_type)
            .ok_or_else(|| fields.error("model_type", Self::NAMES.map(|(_, name)| name).join(", ")))
    }

    /// Its name in `config.json`.
    pub fn name(self) -> &'static str {
        Self::NAMES.iter().find(|(known, _)| *known == self).map_or("", |(_, name)| name)
    }

    pub(super) fn is_gemma(self) -> bool {
        matches!(self, ModelType::Gemma | ModelType::Gemma2 | ModelType::Gemma3)
    }

    pub(super) fn is_deepseek(self) -> bool {
        matches!(self, ModelType::DeepseekV2 | ModelType::DeepseekV3)
    }

    /// Rotary base where the config has none.
    pub(super) fn default_theta(self) -> f64 {
        match self {
            ModelType::Bitnet => 500_000.0,
            ModelType::Mixtral | ModelType::Gemma3 => 1_000_000.0,
            ModelType::GptOss => 150_000.0,
            _ => 10_000.0,
        }
    }

    /// The share of a head that is rotated where the config does not say it; `None` where it is always whole.
    pub(super) fn default_rotated(self) -> Option<f64> {
        match self {
            ModelType::Phi => Some(0.5),
            ModelType::Phi3 => Some(1.0),
            ModelType::GptNeox => Some(0.25),
            _ => None,
        }
    }

    /// What the type calls fields that others call otherwise: `(ours, its own)`.
    pub(super) fn aliases(self) -> &'static [(&'static str, &'static str)] {
        match self {
            ModelType::Gpt2 => &[
                ("hidden_size", "n_embd"),
                ("num_hidden_layers", "n_layer"),
                ("num_attention_heads", "n_head"),
                ("intermediate_size", "n_inner"),
                ("max_position_embeddings", "n_positions"),
                ("rms_norm_eps", "layer_norm_epsilon"),
                ("hidden_act", "activation_function"),
            ],
            ModelType::GptNeox => &[
                ("rms_norm_eps", "layer_norm_eps"),
                ("rope_theta", "rotary_emb_base"),
                ("partial_rotary_factor", "rotary_pct"),
            ],
            ModelType::Phi => &[("rms_norm_eps", "layer_norm_eps")],
            ModelType::Gemma2 | ModelType::Gemma3 => &[("hidden_act", "hidden_activation")],
            _ => &[],
        }
    }

    /// Flags that change what a model of this type computes and that are supported with one value only, which is that of
    /// configs which lack them.
    pub(super) fn fixed_flags(self) -> &'static [(&'static str, bool)] {
        match self {
            ModelType::Gemma | ModelType::Gemma2 | ModelType::Gemma3 => {
                &[("use_bidirectional_attention", false)]
            }
            ModelType::Phi => &[("qk_layernorm", false)],
            ModelType::Gpt2 => &[
                ("scale_attn_weights", true),
                ("scale_attn_by_inverse_layer_idx", false),
                ("add_cross_attention", false),
            ],
            ModelType::Qwen2Moe | ModelType::Qwen3Moe => &[("use_sliding_window", false)],
            ModelType::DeepseekV2 => &[("norm_topk_prob", false)],
            _ => &[],
        }
    }
}
