//! What each architecture calls its parameters in a Hugging Face checkpoint. Nothing else in the project spells these names.

use super::kinds::{LinearKind, NormKind, SideKind, VectorKind};
use crate::config::{ModelConfig, ModelType};

/// Module of the embedding in checkpoints named as Llama's are.
pub const EMBEDDING: &str = "model.embed_tokens";
/// Module of the head there.
pub const HEAD: &str = "lm_head";
/// Weight of the norm before the head there.
pub const FINAL_NORM: &str = "model.norm.weight";

impl ModelConfig {
    /// Module of the embedding.
    pub fn embedding_module(&self) -> String {
        match self.model_type {
            ModelType::Gpt2 => format!("{}wte", self.gpt2_root()),
            ModelType::GptNeox => "gpt_neox.embed_in".into(),
            _ => EMBEDDING.into(),
        }
    }

    /// Module of the learned positions.
    pub fn positions_module(&self) -> String {
        format!("{}wpe", self.gpt2_root())
    }

    /// Module of the head, where it is not the embedding.
    pub fn head_module(&self) -> &'static str {
        if self.model_type == ModelType::GptNeox { "embed_out" } else { HEAD }
    }

    /// Module of the norm before the head.
    pub fn final_norm_module(&self) -> String {
        match self.model_type {
            ModelType::Gpt2 => format!("{}ln_f", self.gpt2_root()),
            ModelType::GptNeox => "gpt_neox.final_layer_norm".into(),
            ModelType::Phi => "model.final_layernorm".into(),
            _ => "model.norm".into(),
        }
    }

    /// Module of a linear layer.
    pub fn linear_module(&self, layer: usize, kind: LinearKind) -> String {
        format!("{}{}", self.layer_prefix(layer), self.linear_name(kind))
    }

    /// Module of a layer's attention, beside whose name the scales of a quantized cache stand.
    pub fn attention_module(&self, layer: usize) -> String {
        let name = match self.model_type {
            ModelType::Gpt2 => "attn",
            ModelType::GptNeox => "attention",
            _ => "self_attn",
        };
        format!("{}{name}", self.layer_prefix(layer))
    }

    /// Module of a layer's norm.
    pub fn norm_module(&self, layer: usize, kind: NormKind) -> String {
        let name = match (self.model_type, kind) {
            (ModelType::Gpt2, NormKind::Input) => "ln_1",
            (ModelType::Gpt2, _) => "ln_2",
            (ModelType::Gemma2 | ModelType::Gemma3, NormKind::Post) => "pre_feedforward_layernorm",
            (_, NormKind::Input) => "input_layernorm",
            (_, NormKind::Query) => "self_attn.q_norm",
            (_, NormKind::Key) => "self_attn.k_norm",
            (_, NormKind::AttentionSub) => "self_attn.attn_sub_norm",
            (_, NormKind::Post | NormKind::AfterAttention) => "post_attention_layernorm",
            (_, NormKind::MlpSub) => "mlp.ffn_sub_norm",
            (_, NormKind::AfterMlp) => "post_feedforward_layernorm",
            (_, NormKind::QLatent) => "self_attn.q_a_layernorm",
            (_, NormKind::KvLatent) => "self_attn.kv_a_layernorm",
        };
        format!("{}{name}", self.layer_prefix(layer))
    }

    /// Weight of a layer's norm.
    pub fn norm_name(&self, layer: usize, kind: NormKind) -> String {
        format!("{}.weight", self.norm_module(layer, kind))
    }

    /// Module of a layer's router, or of the gate of its shared experts.
    pub fn side_module(&self, layer: usize, kind: SideKind) -> String {
        let name = match (self.model_type, kind) {
            (ModelType::Mixtral, SideKind::Router) => "block_sparse_moe.gate",
            (ModelType::GptOss, SideKind::Router) => "mlp.router",
            (_, SideKind::Router) => "mlp.gate",
            (_, SideKind::SharedGate) => "mlp.shared_expert_gate",
        };
        format!("{}{name}", self.layer_prefix(layer))
    }

    /// A vector beside a layer's linear layers.
    pub fn vector_name(&self, layer: usize, kind: VectorKind) -> String {
        let name = match kind {
            VectorKind::Sinks => "self_attn.sinks",
            VectorKind::Correction => "mlp.gate.e_score_correction_bias",
        };
        format!("{}{name}", self.layer_prefix(layer))
    }

    /// The tensors in which gpt-oss keeps its experts, stacked: gate and up `[experts, hidden, 2 · width]` and down
    /// `[experts, width, hidden]`, each with its bias at `{name}_bias`.
    pub fn stacked_experts(&self, layer: usize) -> (String, String) {
        let prefix = self.layer_prefix(layer);
        (format!("{prefix}mlp.experts.gate_up_proj"), format!("{prefix}mlp.experts.down_proj"))
    }

    /// What the names of a layer's parameters begin with.
    fn layer_prefix(&self, layer: usize) -> String {
        match self.model_type {
            ModelType::Gpt2 => format!("{}h.{layer}.", self.gpt2_root()),
            ModelType::GptNeox => format!("gpt_neox.layers.{layer}."),
            _ => format!("model.layers.{layer}."),
        }
    }

    /// GPT-2 as its authors' checkpoints have it lacks the prefix that transformers writes.
    fn gpt2_root(&self) -> &'static str {
        if self.bare_names { "" } else { "transformer." }
    }

    fn linear_name(&self, kind: LinearKind) -> String {
        let special = match self.model_type {
            ModelType::Gpt2 => gpt2(kind),
            ModelType::GptNeox => gpt_neox(kind),
            ModelType::Phi => phi(kind),
            _ => None,
        };
        if let Some(name) = special {
            return name.into();
        }
        let experts = if self.model_type == ModelType::Mixtral { "block_sparse_moe" } else { "mlp" };
        let shared = if self.model_type == ModelType::Qwen2Moe { "shared_expert" } else { "shared_experts" };
        match kind {
            LinearKind::ExpertGate(e) | LinearKind::ExpertUp(e) | LinearKind::ExpertDown(e) => {
                let mixtral = self.model_type == ModelType::Mixtral;
                let name = match kind {
                    LinearKind::ExpertGate(_) if mixtral => "w1",
                    LinearKind::ExpertUp(_) if mixtral => "w3",
                    LinearKind::ExpertDown(_) if mixtral => "w2",
                    LinearKind::ExpertGate(_) => "gate_proj",
                    LinearKind::ExpertUp(_) => "up_proj",
                    _ => "down_proj",
                };
                format!("{experts}.experts.{e}.{name}")
            }
            LinearKind::SharedGate => format!("mlp.{shared}.gate_proj"),
            LinearKind::SharedUp => format!("mlp.{shared}.up_proj"),
            LinearKind::SharedDown => format!("mlp.{shared}.down_proj"),
            _ => kind.name().into(),
        }
    }
}

impl LinearKind {
    /// Module name within a layer, as Llama and its kin have it; empty for what only mixtures of experts have, whose names
    /// differ ([`ModelConfig::linear_module`]).
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
            _ => "",
        }
    }
}

fn gpt2(kind: LinearKind) -> Option<&'static str> {
    match kind {
        LinearKind::Qkv => Some("attn.c_attn"),
        LinearKind::O => Some("attn.c_proj"),
        LinearKind::Up => Some("mlp.c_fc"),
        LinearKind::Down => Some("mlp.c_proj"),
        _ => None,
    }
}

fn gpt_neox(kind: LinearKind) -> Option<&'static str> {
    match kind {
        LinearKind::Qkv => Some("attention.query_key_value"),
        LinearKind::O => Some("attention.dense"),
        LinearKind::Up => Some("mlp.dense_h_to_4h"),
        LinearKind::Down => Some("mlp.dense_4h_to_h"),
        _ => None,
    }
}

fn phi(kind: LinearKind) -> Option<&'static str> {
    match kind {
        LinearKind::O => Some("self_attn.dense"),
        LinearKind::Up => Some("mlp.fc1"),
        LinearKind::Down => Some("mlp.fc2"),
        _ => None,
    }
}
