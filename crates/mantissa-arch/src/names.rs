//! Names of an architecture's parameters in a Hugging Face checkpoint. No other module contains these names.

mod mixers;

pub use self::mixers::MixerNames;
use crate::kinds::{LinearKind, NormKind};

/// Names of an architecture's modules.
#[derive(Clone, Copy, Debug)]
pub struct Names {
    /// Prefix of all names that some checkpoints lack (GPT-2).
    pub root: &'static str,
    /// Embedding.
    pub embedding: &'static str,
    /// Learned positions.
    pub positions: &'static str,
    /// Output head.
    pub head: &'static str,
    /// Norm before the head.
    pub final_norm: &'static str,
    /// Prefix of a layer's modules, before its number.
    pub layers: &'static str,
    /// Attention of a layer.
    pub attention: &'static str,
    /// Norms of a layer that are not named as in Llama and its relatives.
    pub norms: &'static [(NormKind, &'static str)],
    /// Linear layers that are not named as in Llama.
    pub linears: &'static [(LinearKind, &'static str)],
    /// Mixture of experts.
    pub experts: ExpertNames,
    /// Recurrent mixer.
    pub mixer: MixerNames,
    /// Names that publishers use where transformers writes others; a checkpoint shows which by its embedding.
    pub published: Option<&'static Names>,
}

/// Names of a mixture of experts within a layer.
#[derive(Clone, Copy, Debug)]
pub struct ExpertNames {
    /// Prefix of the experts, before their number.
    pub experts: &'static str,
    /// Gate, up and down of an expert.
    pub parts: [&'static str; 3],
    /// Gate and up, and down, of experts that are fused in one tensor.
    pub fused: [&'static str; 2],
    /// Prefix of the shared experts.
    pub shared: &'static str,
    /// Router.
    pub router: &'static str,
    /// Correction that the router adds to its scores.
    pub correction: &'static str,
    /// Projections to and from the latent of the experts.
    pub latent: [&'static str; 2],
}

impl Names {
    /// Gate of the shared experts.
    pub const SHARED_GATE: &str = "mlp.shared_expert_gate";
    /// Sinks of the attention.
    pub const SINKS: &str = "self_attn.sinks";
    /// Weight of the router's norm, before it is divided by the root of the width; and factors of the experts.
    pub const ROUTER: [&str; 2] = ["router.scale", "router.per_expert_scale"];
    /// Projections to the streams other than the first, and back from them, before their numbers.
    pub const STREAMS: [&str; 2] = ["model.altup_projections.", "model.altup_unembed_projections."];
    /// Factor of the states after a layer.
    pub const SCALE: &str = "layer_scalar";
    /// Embeddings of all layers, their projection from the embedding, and its norm.
    pub const INPUTS: [&str; 3] = [
        "model.embed_tokens_per_layer.weight",
        "model.per_layer_model_projection.weight",
        "model.per_layer_projection_norm.weight",
    ];

    /// Names of Llama, which most architectures share.
    pub const LLAMA: Self = Names {
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

    /// Name of a norm within its layer.
    pub fn norm(&self, kind: NormKind) -> &'static str {
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
    pub fn linear(&self, kind: LinearKind) -> String {
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
    pub const QWEN: Self = ExpertNames {
        experts: "mlp.experts.",
        parts: ["gate_proj", "up_proj", "down_proj"],
        fused: ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"],
        shared: "mlp.shared_expert.",
        router: "mlp.gate",
        correction: "mlp.gate.e_score_correction_bias",
        latent: ["", ""],
    };
}

impl LinearKind {
    /// Module name within a layer, as in Llama; empty for linear layers of experts, whose names differ
    /// (`ModelConfig::linear_module` of `mantissa-model`).
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
