//! The architecture as data: every parameter's name, shape and role. Loading, inspecting, quantizing,
//! verifying and writing a synthetic model all walk this list, so that none has its own idea of a model.
//!
//! Names are those of Hugging Face checkpoints. Shapes are `[out, in]` for linear layers, `[rows, width]` for
//! the embedding.

use crate::config::ModelConfig;
use crate::flow::NormKind;

/// Module of the embedding.
pub const EMBEDDING: &str = "model.embed_tokens";
/// Module of the head.
pub const HEAD: &str = "lm_head";
/// Weight of the norm before the head.
pub const FINAL_NORM: &str = "model.norm.weight";

/// The linear layers of a decoder layer.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum LinearKind {
    /// Queries.
    Q,
    /// Keys.
    K,
    /// Values.
    V,
    /// The attention's output.
    O,
    /// Gate of the MLP.
    Gate,
    /// The MLP's other input projection.
    Up,
    /// The MLP's output.
    Down,
}

/// Linear layers that read the same input, which serving engines fuse into one.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum FusedGroup {
    /// Queries, keys and values.
    Qkv,
    /// Gate and up.
    GateUp,
}

/// What the linear layers of a decoder layer read.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum LinearInput {
    /// The normed states that queries, keys and values are made of.
    Qkv,
    /// The joined heads.
    O,
    /// The normed states that gate and up read.
    GateUp,
    /// The inner activation of the MLP.
    Down,
}

impl LinearInput {
    /// All of a layer, in the order of the forward pass.
    pub const ALL: [LinearInput; 4] =
        [LinearInput::Qkv, LinearInput::O, LinearInput::GateUp, LinearInput::Down];

    /// The linears that read it.
    pub fn readers(self) -> impl Iterator<Item = LinearKind> {
        LinearKind::ALL.into_iter().filter(move |kind| kind.input() == self)
    }
}

impl LinearKind {
    /// All of a layer, in the order of the forward pass.
    pub const ALL: [LinearKind; 7] = [
        LinearKind::Q,
        LinearKind::K,
        LinearKind::V,
        LinearKind::O,
        LinearKind::Gate,
        LinearKind::Up,
        LinearKind::Down,
    ];

    /// The linears it is fused with, itself included.
    pub const fn fused(self) -> Option<FusedGroup> {
        match self {
            LinearKind::Q | LinearKind::K | LinearKind::V => Some(FusedGroup::Qkv),
            LinearKind::Gate | LinearKind::Up => Some(FusedGroup::GateUp),
            LinearKind::O | LinearKind::Down => None,
        }
    }

    /// What it reads.
    pub const fn input(self) -> LinearInput {
        match self {
            LinearKind::Q | LinearKind::K | LinearKind::V => LinearInput::Qkv,
            LinearKind::O => LinearInput::O,
            LinearKind::Gate | LinearKind::Up => LinearInput::GateUp,
            LinearKind::Down => LinearInput::Down,
        }
    }

    /// Module name within a layer.
    pub const fn name(self) -> &'static str {
        match self {
            LinearKind::Q => "self_attn.q_proj",
            LinearKind::K => "self_attn.k_proj",
            LinearKind::V => "self_attn.v_proj",
            LinearKind::O => "self_attn.o_proj",
            LinearKind::Gate => "mlp.gate_proj",
            LinearKind::Up => "mlp.up_proj",
            LinearKind::Down => "mlp.down_proj",
        }
    }
}

/// What a parameter is for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Role {
    /// Token embedding.
    Embedding,
    /// Output head; absent where it is tied to the embedding.
    Head,
    /// Weight of a norm.
    Norm {
        /// Its layer; `None` for the last norm.
        layer: Option<usize>,
    },
    /// Weight of a decoder linear.
    Linear {
        /// Its layer.
        layer: usize,
        /// Which one.
        kind: LinearKind,
    },
    /// Bias of a decoder linear.
    Bias {
        /// Its layer.
        layer: usize,
        /// Which one.
        kind: LinearKind,
    },
}

/// A parameter.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TensorInfo {
    /// Name in a dense checkpoint.
    pub name: String,
    /// Shape.
    pub shape: Vec<usize>,
    /// What it is for.
    pub role: Role,
}

/// A linear layer of the decoder.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LinearInfo {
    /// Module name; `.weight` and `.bias` follow it in a dense checkpoint.
    pub module: String,
    /// Its layer.
    pub layer: usize,
    /// Which one.
    pub kind: LinearKind,
    /// Output features.
    pub rows: usize,
    /// Input features.
    pub cols: usize,
    /// Whether it has a bias.
    pub bias: bool,
}

impl ModelConfig {
    /// Every parameter, in the order of the forward pass.
    pub fn tensors(&self) -> Vec<TensorInfo> {
        let table = vec![self.vocab_size, self.hidden_size];
        let embedding =
            TensorInfo { name: format!("{EMBEDDING}.weight"), shape: table.clone(), role: Role::Embedding };
        let mut tensors = vec![embedding];
        (0..self.num_hidden_layers).for_each(|layer| self.layer_tensors(layer, &mut tensors));
        tensors.push(norm(FINAL_NORM.into(), self.hidden_size, None));
        if !self.tie_word_embeddings {
            tensors.push(TensorInfo { name: format!("{HEAD}.weight"), shape: table, role: Role::Head });
        }
        tensors
    }

    /// Every linear layer of the decoder layers, in the order of the forward pass. The head is not among them.
    pub fn linears(&self) -> Vec<LinearInfo> {
        let layers = 0..self.num_hidden_layers;
        layers.flat_map(|layer| LinearKind::ALL.map(|kind| self.linear(layer, kind))).collect()
    }

    /// One linear layer.
    pub fn linear(&self, layer: usize, kind: LinearKind) -> LinearInfo {
        let (d, ffn) = (self.hidden_size, self.intermediate_size);
        let (rows, cols, bias) = match kind {
            LinearKind::Q => (self.query_width(), d, self.biases.qkv),
            LinearKind::K | LinearKind::V => (self.key_value_width(), d, self.biases.qkv),
            LinearKind::O => (d, self.query_width(), self.biases.output),
            LinearKind::Gate | LinearKind::Up => (ffn, d, self.biases.mlp),
            LinearKind::Down => (d, ffn, self.biases.mlp),
        };
        LinearInfo { module: format!("{}{}", prefix(layer), kind.name()), layer, kind, rows, cols, bias }
    }

    /// The norms of a decoder layer and the widths that they norm, in the order of the forward pass.
    pub fn norms(&self) -> impl Iterator<Item = (NormKind, usize)> {
        let (heads, subs) = (self.has_head_norms(), self.has_sub_norms());
        let all = [
            (true, NormKind::Input, self.hidden_size),
            (heads, NormKind::Query, self.head_dim),
            (heads, NormKind::Key, self.head_dim),
            (subs, NormKind::AttentionSub, self.query_width()),
            (true, NormKind::Post, self.hidden_size),
            (subs, NormKind::MlpSub, self.intermediate_size),
        ];
        all.into_iter().filter(|norm| norm.0).map(|(_, kind, width)| (kind, width))
    }

    /// Number of parameters.
    pub fn parameters(&self) -> u64 {
        let count = |t: TensorInfo| t.shape.iter().map(|&n| n as u64).product::<u64>();
        self.tensors().into_iter().map(count).sum()
    }

    fn layer_tensors(&self, layer: usize, tensors: &mut Vec<TensorInfo>) {
        for (kind, width) in self.norms() {
            tensors.push(norm(norm_name(layer, kind), width, Some(layer)));
        }
        for info in LinearKind::ALL.map(|kind| self.linear(layer, kind)) {
            let LinearInfo { module, kind, rows, cols, bias, .. } = info;
            let role = Role::Linear { layer, kind };
            tensors.push(TensorInfo { name: format!("{module}.weight"), shape: vec![rows, cols], role });
            if bias {
                let role = Role::Bias { layer, kind };
                tensors.push(TensorInfo { name: format!("{module}.bias"), shape: vec![rows], role });
            }
        }
    }
}

/// Name of the weight of a layer's norm.
pub fn norm_name(layer: usize, kind: NormKind) -> String {
    let name = match kind {
        NormKind::Input => "input_layernorm",
        NormKind::Query => "self_attn.q_norm",
        NormKind::Key => "self_attn.k_norm",
        NormKind::AttentionSub => "self_attn.attn_sub_norm",
        NormKind::Post => "post_attention_layernorm",
        NormKind::MlpSub => "mlp.ffn_sub_norm",
    };
    format!("{}{name}.weight", prefix(layer))
}

/// What the names of a layer's parameters begin with.
pub(crate) fn prefix(layer: usize) -> String {
    format!("model.layers.{layer}.")
}

fn norm(name: String, width: usize, layer: Option<usize>) -> TensorInfo {
    TensorInfo { name, shape: vec![width], role: Role::Norm { layer } }
}

#[cfg(test)]
#[allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]
mod tests {
    use std::collections::HashSet;

    use super::*;

    fn config(model_type: &str, extra: &str) -> ModelConfig {
        let text = format!(
            r#"{{"model_type": "{model_type}", "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2,
                "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "vocab_size": 100,
                "max_position_embeddings": 32, "rms_norm_eps": 1e-5{extra}}}"#
        );
        ModelConfig::from_json(&serde_json::from_str(&text).unwrap(), "config.json").unwrap()
    }

    #[test]
    fn names_are_unique_and_linears_are_among_them() {
        for model_type in ["llama", "mistral", "qwen2", "qwen3", "bitnet"] {
            let config = config(model_type, "");
            let names: HashSet<_> = config.tensors().into_iter().map(|t| t.name).collect();
            assert_eq!(names.len(), config.tensors().len());
            assert!(config.linears().iter().all(|l| names.contains(&format!("{}.weight", l.module))));
            assert_eq!(names.contains("model.layers.1.self_attn.q_proj.bias"), model_type == "qwen2");
            assert_eq!(names.contains("model.layers.0.self_attn.k_norm.weight"), model_type == "qwen3");
            assert_eq!(names.contains("model.layers.0.mlp.ffn_sub_norm.weight"), model_type == "bitnet");
        }
    }

    #[test]
    fn parameters_are_counted() {
        let layer = 2 * 64 * 64 + 2 * 32 * 64 + 3 * 96 * 64 + 2 * 64;
        assert_eq!(config("llama", "").parameters(), 2 * layer + 64 + 2 * 100 * 64);
        let tied = config("llama", r#", "tie_word_embeddings": true"#);
        assert_eq!(tied.parameters(), 2 * layer + 64 + 100 * 64);
    }
}
