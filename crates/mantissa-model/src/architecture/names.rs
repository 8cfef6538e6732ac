//! Names of an architecture's parameters in a Hugging Face checkpoint. No other module contains these names.

mod mixers;

pub(crate) use self::mixers::MixerNames;
use crate::graph::kinds::{LinearKind, NormKind};

/// Names of an architecture's modules.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Names {
    /// Prefix of all names that some checkpoints lack (GPT-2).
    pub(crate) root: &'static str,
    /// Embedding.
    pub(crate) embedding: &'static str,
    /// Learned positions.
    pub(crate) positions: &'static str,
    /// Output head.
    pub(crate) head: &'static str,
    /// Norm before the head.
    pub(crate) final_norm: &'static str,
    /// Prefix of a layer's modules, before its number.
    pub(crate) layers: &'static str,
    /// Attention of a layer.
    pub(crate) attention: &'static str,
    /// Norms of a layer that are not named as in Llama and its relatives.
    pub(crate) norms: &'static [(NormKind, &'static str)],
    /// Linear layers that are not named as in Llama.
    pub(crate) linears: &'static [(LinearKind, &'static str)],
    /// Mixture of experts.
    pub(crate) experts: ExpertNames,
    /// Recurrent mixer.
    pub(crate) mixer: MixerNames,
    /// Names that publishers use where transformers writes others; a checkpoint shows which by its embedding.
    pub(crate) published: Option<&'static Names>,
}

/// Names of a mixture of experts within a layer.
#[derive(Clone, Copy, Debug)]
pub(crate) struct ExpertNames {
    /// Prefix of the experts, before their number.
    pub(crate) experts: &'static str,
    /// Gate, up and down of an expert.
    pub(crate) parts: [&'static str; 3],
    /// Gate and up, and down, of experts that are fused in one tensor.
    pub(crate) fused: [&'static str; 2],
    /// Prefix of the shared experts.
    pub(crate) shared: &'static str,
    /// Router.
    pub(crate) router: &'static str,
    /// Correction that the router adds to its scores.
    pub(crate) correction: &'static str,
    /// Projections to and from the latent of the experts.
    pub(crate) latent: [&'static str; 2],
}

impl Names {
    /// Gate of the shared experts.
    pub(crate) const SHARED_GATE: &str = "mlp.shared_expert_gate";
    /// Sinks of the attention.
    pub(crate) const SINKS: &str = "self_attn.sinks";
    /// Weight of the router's norm, before it is divided by the root of the width; and factors of the experts.
    pub(crate) const ROUTER: [&str; 2] = ["router.scale", "router.per_expert_scale"];
    /// Projections to the streams other than the first, and back from them, before their numbers.
    pub(crate) const STREAMS: [&str; 2] = ["model.altup_projections.", "model.altup_unembed_projections."];
    /// Factor of the states after a layer.
    pub(crate) const SCALE: &str = "layer_scalar";
    /// Embeddings of all layers, their projection from the embedding, and its norm.
    pub(crate) const INPUTS: [&str; 3] = [
        "model.embed_tokens_per_layer.weight",
        "model.per_layer_model_projection.weight",
        "model.per_layer_projection_norm.weight",
    ];

    /// Names of Llama, which most architectures share.
    pub(crate) const LLAMA: Self = Names {
        root: "",
        embedding: "model.embed_tokens",
        positions: "",
        head: "lm_head",
        final_norm: "model.norm",
        layers: "model.layers.",
        attention: "self_attn",
        norms: &[],
        linears: &[],
        experts: ExpertNames::QWEN,
        mixer: MixerNames::NONE,
        published: None,
    };

    /// Names of Gemma 2 and 3.
    pub(crate) const GEMMA2: Self =
        Names { norms: &[(NormKind::Post, "pre_feedforward_layernorm")], ..Self::LLAMA };

    /// Names of GLM-4.
    pub(crate) const GLM4: Self = Names {
        norms: &[
            (NormKind::AfterAttention, "post_self_attn_layernorm"),
            (NormKind::AfterMlp, "post_mlp_layernorm"),
        ],
        ..Self::LLAMA
    };

    /// Names of Qwen3-Next.
    pub(crate) const QWEN3_NEXT: Self = Names {
        linears: &[
            (LinearKind::MixIn, "linear_attn.in_proj_qkvz"),
            (LinearKind::MixOut, "linear_attn.out_proj"),
        ],
        mixer: MixerNames::QWEN,
        ..Self::LLAMA
    };

    /// Names of Qwen3.5.
    pub(crate) const QWEN3_5: Self = Names {
        linears: &[
            (LinearKind::MixIn, "linear_attn.in_proj_qkv"),
            (LinearKind::MixGate, "linear_attn.in_proj_z"),
            (LinearKind::MixOut, "linear_attn.out_proj"),
        ],
        mixer: MixerNames::QWEN,
        ..Self::LLAMA
    };

    /// Names of Granite 4.
    pub(crate) const GRANITE4: Self = Names {
        linears: &[
            (LinearKind::GateUp, "shared_mlp.input_linear"),
            (LinearKind::Down, "shared_mlp.output_linear"),
            (LinearKind::MixIn, "mamba.in_proj"),
            (LinearKind::MixOut, "mamba.out_proj"),
        ],
        experts: ExpertNames::GRANITE4,
        mixer: MixerNames::GRANITE,
        ..Self::LLAMA
    };

    /// Names of Falcon-H1.
    pub(crate) const FALCON_H1: Self = Names {
        final_norm: "model.final_layernorm",
        norms: &[(NormKind::Post, "pre_ff_layernorm")],
        linears: &[
            (LinearKind::Gate, "feed_forward.gate_proj"),
            (LinearKind::Up, "feed_forward.up_proj"),
            (LinearKind::Down, "feed_forward.down_proj"),
            (LinearKind::MixIn, "mamba.in_proj"),
            (LinearKind::MixOut, "mamba.out_proj"),
        ],
        mixer: MixerNames::GRANITE,
        ..Self::LLAMA
    };

    /// Names of Jamba.
    pub(crate) const JAMBA: Self =
        Names { experts: ExpertNames::JAMBA, mixer: MixerNames::JAMBA, ..Self::FALCON_H1 };

    /// Names of Nemotron-H, whose layers have one half each.
    pub(crate) const NEMOTRON_H: Self = Names {
        embedding: "backbone.embeddings",
        final_norm: "backbone.norm_f",
        layers: "backbone.layers.",
        attention: "mixer",
        norms: &[(NormKind::Input, "norm"), (NormKind::Post, "norm")],
        linears: &[
            (LinearKind::Q, "mixer.q_proj"),
            (LinearKind::K, "mixer.k_proj"),
            (LinearKind::V, "mixer.v_proj"),
            (LinearKind::O, "mixer.o_proj"),
            (LinearKind::Up, "mixer.up_proj"),
            (LinearKind::Down, "mixer.down_proj"),
            (LinearKind::MixIn, "mixer.in_proj"),
            (LinearKind::MixOut, "mixer.out_proj"),
        ],
        experts: ExpertNames::NEMOTRON,
        mixer: MixerNames::NEMOTRON,
        ..Self::LLAMA
    };

    /// Names of Kimi Linear, whose mixer's projections are named as those of the attention in other layers.
    pub(crate) const KIMI_LINEAR: Self = Names {
        linears: &[
            (LinearKind::MixQ, "self_attn.q_proj"),
            (LinearKind::MixK, "self_attn.k_proj"),
            (LinearKind::MixV, "self_attn.v_proj"),
            (LinearKind::MixOut, "self_attn.o_proj"),
        ],
        experts: ExpertNames::KIMI_LINEAR,
        mixer: MixerNames::KIMI,
        ..Self::LLAMA
    };

    /// Names of DeepSeek-V4, as published.
    pub(crate) const DEEPSEEK_V4_PUBLISHED: Self = Names {
        embedding: "embed",
        head: "head",
        final_norm: "norm",
        layers: "layers.",
        attention: "attn",
        norms: &[(NormKind::Input, "attn_norm"), (NormKind::Post, "ffn_norm")],
        linears: &[
            (LinearKind::QA, "attn.wq_a"),
            (LinearKind::QB, "attn.wq_b"),
            (LinearKind::KvA, "attn.wkv"),
            (LinearKind::MixOut, "attn.wo_b"),
            (LinearKind::SharedGate, "ffn.shared_experts.w1"),
            (LinearKind::SharedUp, "ffn.shared_experts.w3"),
            (LinearKind::SharedDown, "ffn.shared_experts.w2"),
        ],
        experts: ExpertNames::DEEPSEEK_V4,
        mixer: MixerNames::DEEPSEEK_V4_PUBLISHED,
        ..Self::LLAMA
    };

    /// Names of DeepSeek-V4, as transformers writes them.
    pub(crate) const DEEPSEEK_V4: Self = Names {
        embedding: "model.embed_tokens",
        final_norm: "model.norm",
        layers: "model.layers.",
        mixer: MixerNames::DEEPSEEK_V4,
        published: Some(&Self::DEEPSEEK_V4_PUBLISHED),
        ..Self::DEEPSEEK_V4_PUBLISHED
    };

    /// Names of LFM2.
    pub(crate) const LFM2: Self = Names {
        final_norm: "model.embedding_norm",
        norms: &[
            (NormKind::Input, "operator_norm"),
            (NormKind::Post, "ffn_norm"),
            (NormKind::Query, "self_attn.q_layernorm"),
            (NormKind::Key, "self_attn.k_layernorm"),
        ],
        linears: &[
            (LinearKind::O, "self_attn.out_proj"),
            (LinearKind::Gate, "feed_forward.w1"),
            (LinearKind::Up, "feed_forward.w3"),
            (LinearKind::Down, "feed_forward.w2"),
            (LinearKind::MixIn, "conv.in_proj"),
            (LinearKind::MixOut, "conv.out_proj"),
        ],
        mixer: MixerNames::LFM2,
        ..Self::LLAMA
    };

    /// Names of Phi-1 to Phi-2.
    pub(crate) const PHI: Self = Names {
        final_norm: "model.final_layernorm",
        linears: &[
            (LinearKind::O, "self_attn.dense"),
            (LinearKind::Up, "mlp.fc1"),
            (LinearKind::Down, "mlp.fc2"),
        ],
        ..Self::LLAMA
    };

    /// Names of GPT-2.
    pub(crate) const GPT2: Self = Names {
        root: "transformer.",
        embedding: "wte",
        positions: "wpe",
        final_norm: "ln_f",
        layers: "h.",
        attention: "attn",
        norms: &[(NormKind::Input, "ln_1"), (NormKind::Post, "ln_2")],
        linears: &[
            (LinearKind::Qkv, "attn.c_attn"),
            (LinearKind::O, "attn.c_proj"),
            (LinearKind::Up, "mlp.c_fc"),
            (LinearKind::Down, "mlp.c_proj"),
        ],
        ..Self::LLAMA
    };

    /// Names of GPT-NeoX.
    pub(crate) const GPT_NEOX: Self = Names {
        embedding: "gpt_neox.embed_in",
        head: "embed_out",
        final_norm: "gpt_neox.final_layer_norm",
        layers: "gpt_neox.layers.",
        attention: "attention",
        linears: &[
            (LinearKind::Qkv, "attention.query_key_value"),
            (LinearKind::O, "attention.dense"),
            (LinearKind::Up, "mlp.dense_h_to_4h"),
            (LinearKind::Down, "mlp.dense_4h_to_h"),
        ],
        ..Self::LLAMA
    };

    /// Name of a norm within its layer.
    pub(crate) fn norm(&self, kind: NormKind) -> &'static str {
        let own = self.norms.iter().find(|(known, _)| *known == kind).map(|(_, name)| *name);
        own.unwrap_or(match kind {
            NormKind::Input => "input_layernorm",
            NormKind::Query => "self_attn.q_norm",
            NormKind::Key => "self_attn.k_norm",
            NormKind::AttentionSub => "self_attn.attn_sub_norm",
            NormKind::Post | NormKind::AfterAttention => "post_attention_layernorm",
            NormKind::MlpSub => "mlp.ffn_sub_norm",
            NormKind::AfterMlp => "post_feedforward_layernorm",
            NormKind::QLatent => "self_attn.q_a_layernorm",
            NormKind::KvLatent => "self_attn.kv_a_layernorm",
            NormKind::Value => "self_attn.v_norm",
            NormKind::AfterInput => "post_per_layer_input_norm",
            NormKind::Router => "router.norm",
            NormKind::Modalities => "altup.router_norm",
            NormKind::AfterLaurel => "laurel.post_laurel_norm",
            NormKind::Experts => "pre_feedforward_layernorm_2",
            NormKind::AfterDense => "post_feedforward_layernorm_1",
            NormKind::AfterExperts => "post_feedforward_layernorm_2",
        })
    }

    /// Name of a linear layer within its layer.
    pub(crate) fn linear(&self, kind: LinearKind) -> String {
        if let Some((_, name)) = self.linears.iter().find(|(known, _)| *known == kind) {
            return (*name).to_owned();
        }
        let ExpertNames { experts, parts: [gate, up, down], shared, .. } = self.experts;
        match kind {
            LinearKind::ExpertGate(e) => format!("{experts}{e}.{gate}"),
            LinearKind::ExpertUp(e) => format!("{experts}{e}.{up}"),
            LinearKind::ExpertDown(e) => format!("{experts}{e}.{down}"),
            LinearKind::SharedGate => format!("{shared}gate_proj"),
            LinearKind::SharedUp => format!("{shared}up_proj"),
            LinearKind::SharedDown => format!("{shared}down_proj"),
            _ => kind.name().to_owned(),
        }
    }
}

impl ExpertNames {
    /// Names of the Qwen mixtures.
    pub(crate) const QWEN: Self = ExpertNames {
        experts: "mlp.experts.",
        parts: ["gate_proj", "up_proj", "down_proj"],
        fused: ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"],
        shared: "mlp.shared_expert.",
        router: "mlp.gate",
        correction: "mlp.gate.e_score_correction_bias",
        latent: ["", ""],
    };

    /// Names of Mixtral.
    pub(crate) const MIXTRAL: Self = ExpertNames {
        experts: "block_sparse_moe.experts.",
        parts: ["w1", "w3", "w2"],
        router: "block_sparse_moe.gate",
        correction: "block_sparse_moe.e_score_correction_bias",
        ..Self::QWEN
    };

    /// Names of Granite 4.
    pub(crate) const GRANITE4: Self = ExpertNames {
        fused: ["block_sparse_moe.input_linear.weight", "block_sparse_moe.output_linear.weight"],
        router: "block_sparse_moe.router.layer",
        ..Self::MIXTRAL
    };

    /// Names of Nemotron-H, whose experts have no gate.
    pub(crate) const NEMOTRON: Self = ExpertNames {
        experts: "mixer.experts.",
        fused: ["mixer.experts.up_proj", "mixer.experts.down_proj"],
        shared: "mixer.shared_experts.",
        router: "mixer.gate",
        correction: "mixer.gate.e_score_correction_bias",
        latent: ["mixer.fc1_latent_proj", "mixer.fc2_latent_proj"],
        ..Self::QWEN
    };

    /// Names of Kimi Linear.
    pub(crate) const KIMI_LINEAR: Self = ExpertNames {
        shared: "block_sparse_moe.shared_experts.",
        correction: "block_sparse_moe.gate.e_score_correction_bias",
        ..Self::MIXTRAL
    };

    /// Names of DeepSeek.
    pub(crate) const DEEPSEEK: Self = ExpertNames { shared: "mlp.shared_experts.", ..Self::QWEN };

    /// Names of DeepSeek-V4.
    pub(crate) const DEEPSEEK_V4: Self = ExpertNames {
        experts: "ffn.experts.",
        parts: ["w1", "w3", "w2"],
        fused: ["ffn.experts.gate_up_proj", "ffn.experts.down_proj"],
        shared: "ffn.shared_experts.",
        router: "ffn.gate",
        correction: "ffn.gate.bias",
        ..Self::QWEN
    };

    /// Names of EXAONE-MoE.
    pub(crate) const EXAONE: Self =
        ExpertNames { correction: "mlp.e_score_correction_bias", ..Self::DEEPSEEK };

    /// Names of ERNIE 4.5.
    pub(crate) const ERNIE: Self =
        ExpertNames { correction: "mlp.moe_statics.e_score_correction_bias", ..Self::DEEPSEEK };

    /// Names of Llama 4.
    pub(crate) const LLAMA4: Self = ExpertNames {
        experts: "feed_forward.experts.",
        fused: ["feed_forward.experts.gate_up_proj", "feed_forward.experts.down_proj"],
        shared: "feed_forward.shared_expert.",
        router: "feed_forward.router",
        ..Self::QWEN
    };

    /// Names of Gemma 4.
    pub(crate) const GEMMA4: Self = ExpertNames {
        experts: "experts.",
        fused: ["experts.gate_up_proj", "experts.down_proj"],
        router: "router.proj",
        ..Self::QWEN
    };

    /// Names of Jamba.
    pub(crate) const JAMBA: Self =
        ExpertNames { experts: "feed_forward.experts.", router: "feed_forward.router", ..Self::QWEN };

    /// Names of LFM2-MoE.
    pub(crate) const LFM2: Self = ExpertNames {
        experts: "feed_forward.experts.",
        parts: ["w1", "w3", "w2"],
        router: "feed_forward.gate",
        correction: "feed_forward.expert_bias",
        ..Self::QWEN
    };

    /// Names of gpt-oss.
    pub(crate) const GPT_OSS: Self = ExpertNames { router: "mlp.router", ..Self::QWEN };
}

impl LinearKind {
    /// Module name within a layer, as in Llama; empty for linear layers of experts, whose names differ
    /// ([`ModelConfig::linear_module`](crate::ModelConfig::linear_module)).
    pub const fn name(self) -> &'static str {
        match self {
            LinearKind::Q => "self_attn.q_proj",
            LinearKind::K => "self_attn.k_proj",
            LinearKind::V => "self_attn.v_proj",
            LinearKind::O => "self_attn.o_proj",
            LinearKind::Gate => "mlp.gate_proj",
            LinearKind::Up => "mlp.up_proj",
            LinearKind::Down => "mlp.down_proj",
            LinearKind::Qkv => "self_attn.qkv_proj",
            LinearKind::GateUp => "mlp.gate_up_proj",
            LinearKind::QA => "self_attn.q_a_proj",
            LinearKind::QB => "self_attn.q_b_proj",
            LinearKind::KvA => "self_attn.kv_a_proj_with_mqa",
            LinearKind::KvB => "self_attn.kv_b_proj",
            LinearKind::InputGate => "per_layer_input_gate",
            LinearKind::InputProjection => "per_layer_projection",
            _ => "",
        }
    }
}
