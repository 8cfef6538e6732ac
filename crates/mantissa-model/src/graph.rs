//! Parameters of a model as data: name, shape and role of each. Loading, inspecting, quantizing, verifying and
//! synthesizing a model all use this list.
//!
//! Names are those of Hugging Face checkpoints. Shapes are `[out, in]` for linear layers, `[rows, width]` for the
//! embedding.

mod mixing;
mod names;
mod shapes;
mod sides;

pub use mantissa_arch::kinds::{
    FusedGroup, Half, HyperPart, HyperSite, LinearInput, LinearKind, NormKind, SideInfo, SideKind, VectorKind,
};
pub use names::{EMBEDDING, HEAD};

use mantissa_store::convention::Stack;

use crate::config::{ModelConfig, NormForm};
use crate::source::WeightSource;

/// Role of a parameter.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Role {
    /// Token embedding.
    Embedding,
    /// Output head; absent if it is tied to the embedding.
    Head,
    /// Weight of a norm.
    Norm {
        /// Layer index; `None` for the last norm.
        layer: Option<usize>,
    },
    /// Weight of a decoder linear layer.
    Linear {
        /// Layer index.
        layer: usize,
        /// Kind.
        kind: LinearKind,
    },
    /// Bias of a decoder linear layer.
    Bias {
        /// Layer index.
        layer: usize,
        /// Kind.
        kind: LinearKind,
    },
    /// Bias of a norm.
    NormBias {
        /// Layer index; `None` for the last norm.
        layer: Option<usize>,
    },
    /// Bias of the head.
    HeadBias,
    /// Learned positions.
    Positions,
    /// Weight of a router, of the gate of shared experts, of the latent of experts, or of a recurrent mixer's rates. They are small, and no engine
    /// runs them quantized.
    Side {
        /// Layer index.
        layer: usize,
        /// Kind.
        kind: SideKind,
    },
    /// Bias of a router or gate.
    SideBias {
        /// Layer index.
        layer: usize,
        /// Kind.
        kind: SideKind,
    },
    /// Attention sinks, the correction that a router adds to its scores, or a vector of a recurrent mixer.
    Vector {
        /// Layer index.
        layer: usize,
        /// Kind.
        kind: VectorKind,
    },
    /// Embeddings of all layers, their projection or its norm (Gemma 4).
    LayerInputs,
    /// Weights or biases of all experts in one tensor.
    Stacked {
        /// Layer index.
        layer: usize,
    },
}

/// A parameter.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TensorInfo {
    /// Name in a dense checkpoint.
    pub name: String,
    /// Shape.
    pub shape: Vec<usize>,
    /// Role.
    pub role: Role,
}

/// A linear layer of the decoder.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LinearInfo {
    /// Module name; `.weight` and `.bias` follow it in a dense checkpoint.
    pub module: String,
    /// Layer index.
    pub layer: usize,
    /// Kind.
    pub kind: LinearKind,
    /// Output features.
    pub rows: usize,
    /// Input features.
    pub cols: usize,
    /// True if it has a bias.
    pub bias: bool,
    /// Storage in a dense checkpoint.
    pub stored: StoredAs,
}

/// Storage of a linear layer in a dense checkpoint.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum StoredAs {
    /// One tensor, `[out, in]`.
    Rows,
    /// One tensor, `[in, out]` (GPT-2's `Conv1D`).
    Columns,
    /// Part of a tensor of all experts.
    Stacked(Stack),
}

impl LinearInfo {
    /// Returns name and shape of the tensor of a dense checkpoint that holds the weight.
    pub fn dense_tensor(&self) -> (String, Vec<usize>) {
        let own = format!("{}.weight", self.module);
        match &self.stored {
            StoredAs::Rows => (own, vec![self.rows, self.cols]),
            StoredAs::Columns => (own, vec![self.cols, self.rows]),
            StoredAs::Stacked(stack) => (stack.tensor.clone(), stack.shape(self.rows, self.cols).to_vec()),
        }
    }

    /// Returns name and shape of the tensor of the dense model `source` that holds the weight: its own, or else
    /// [`dense_tensor`](Self::dense_tensor).
    pub fn tensor_in(&self, source: &dyn WeightSource) -> (String, Vec<usize>) {
        match self.is_by_rows(source) {
            true => (format!("{}.weight", self.module), vec![self.rows, self.cols]),
            false => self.dense_tensor(),
        }
    }

    /// True if `source` holds the layer as one tensor `[out, in]`. Quantized layers are stored that way, even if the
    /// architecture's dense checkpoints are not.
    pub fn is_by_rows(&self, source: &dyn WeightSource) -> bool {
        match &self.stored {
            StoredAs::Rows => true,
            StoredAs::Columns => !source.is_dense(&format!("{}.weight", self.module)),
            StoredAs::Stacked(_) => source.has_linear(&self.module),
        }
    }
}

impl ModelConfig {
    /// Lists every parameter, in the order of the forward pass.
    pub fn tensors(&self) -> Vec<TensorInfo> {
        let d = self.hidden_size;
        let tensor = |name: String, shape: Vec<usize>, role| TensorInfo { name, shape, role };
        let table = vec![self.vocab_size, d];
        let embedding = format!("{}.weight", self.embedding_module());
        let mut tensors = vec![tensor(embedding, table.clone(), Role::Embedding)];
        if self.learned_positions {
            let name = format!("{}.weight", self.positions_module());
            tensors.push(tensor(name, vec![self.max_position_embeddings, d], Role::Positions));
        }
        (0..self.num_hidden_layers).for_each(|layer| self.layer_tensors(layer, &mut tensors));
        if let Some(inputs) = self.by_layer.inputs {
            let all = self.num_hidden_layers * inputs.width;
            let shapes = [vec![inputs.vocabulary, all], vec![all, d], vec![inputs.width]];
            let named = self.layer_input_names().into_iter().zip(shapes);
            tensors.extend(named.map(|(name, shape)| tensor(name, shape, Role::LayerInputs)));
        }
        self.norm_tensors(&self.final_norm_module(), d, None, &mut tensors);
        if !self.tie_word_embeddings {
            tensors.push(tensor(format!("{}.weight", self.head_module()), table, Role::Head));
        }
        if self.head_bias {
            tensors.push(tensor(
                format!("{}.bias", self.head_module()),
                vec![self.vocab_size],
                Role::HeadBias,
            ));
        }
        tensors
    }

    /// Lists the linear layers of the decoder layers that a dense checkpoint stores as one tensor `[out, in]`, in the
    /// order of the forward pass. The head is not included.
    pub fn linears(&self) -> Vec<LinearInfo> {
        self.decoder_linears().filter(|info| info.stored == StoredAs::Rows).collect()
    }

    /// Iterates over every linear layer of the decoder layers, however stored, in the order of the forward pass.
    pub fn decoder_linears(&self) -> impl Iterator<Item = LinearInfo> {
        (0..self.num_hidden_layers).flat_map(|layer| self.layer_linears(layer))
    }

    /// Lists the linear layers of the decoder layers that `source` stores as one tensor `[out, in]`.
    pub fn linears_by_rows(&self, source: &dyn WeightSource) -> Vec<LinearInfo> {
        self.decoder_linears().filter(|info| info.is_by_rows(source)).collect()
    }

    /// Lists the linear layers of one decoder layer, in the order of the forward pass.
    pub fn layer_linears(&self, layer: usize) -> Vec<LinearInfo> {
        self.kinds(layer).into_iter().map(|kind| self.linear(layer, kind)).collect()
    }

    /// Names the modules of `layer` that read `input`, for a message.
    pub fn readers_of(&self, layer: usize, input: LinearInput) -> String {
        let readers = self.layer_linears(layer).into_iter().filter(|linear| linear.kind.input() == input);
        readers.map(|linear| linear.module).collect::<Vec<_>>().join(", ")
    }

    /// Lists the matrices outside the decoder layers: the embedding, and the head unless it is tied to it.
    pub fn tables(&self) -> Vec<LinearInfo> {
        let head = (!self.tie_word_embeddings).then_some(LinearKind::Head);
        [LinearKind::Embedding].into_iter().chain(head).map(|kind| self.table(kind)).collect()
    }

    /// Returns the embedding or the head as a matrix, in a layer after the last one.
    pub fn table(&self, kind: LinearKind) -> LinearInfo {
        let (rows, cols, bias) = self.linear_shape(0, kind);
        let module = match kind {
            LinearKind::Head => self.head_module().to_owned(),
            _ => self.embedding_module(),
        };
        LinearInfo { module, layer: self.num_hidden_layers, kind, rows, cols, bias, stored: StoredAs::Rows }
    }

    /// Returns one linear layer.
    pub fn linear(&self, layer: usize, kind: LinearKind) -> LinearInfo {
        let (rows, cols, bias) = self.linear_shape(layer, kind);
        let stored = match kind {
            _ if self.architecture.conv1d => StoredAs::Columns,
            _ => self.stack(layer, kind).map_or(StoredAs::Rows, StoredAs::Stacked),
        };
        LinearInfo { module: self.linear_module(layer, kind), layer, kind, rows, cols, bias, stored }
    }

    /// Number of parameters.
    pub fn parameters(&self) -> u64 {
        let count = |t: TensorInfo| t.shape.iter().map(|&n| n as u64).product::<u64>();
        self.tensors().into_iter().map(count).sum()
    }

    fn layer_tensors(&self, layer: usize, tensors: &mut Vec<TensorInfo>) {
        for (kind, width) in self.norms(layer) {
            self.norm_tensors(&self.norm_module(layer, kind), width, Some(layer), tensors);
        }
        let mut put = |name, shape, role| tensors.push(TensorInfo { name, shape, role });
        for (kind, shape) in self.vectors(layer) {
            put(self.vector_name(layer, kind), shape, Role::Vector { layer, kind });
        }
        for SideInfo { kind, rows, cols, bias } in self.sides(layer) {
            let module = self.side_module(layer, kind);
            put(format!("{module}.weight"), vec![rows, cols], Role::Side { layer, kind });
            if bias {
                put(format!("{module}.bias"), vec![rows], Role::SideBias { layer, kind });
            }
        }
        for info in self.layer_linears(layer) {
            let LinearInfo { module, kind, rows, cols, bias, stored, .. } = info;
            let shape = match stored {
                StoredAs::Rows => vec![rows, cols],
                StoredAs::Columns => vec![cols, rows],
                StoredAs::Stacked(_) => continue,
            };
            put(format!("{module}.weight"), shape, Role::Linear { layer, kind });
            if bias {
                put(format!("{module}.bias"), vec![rows], Role::Bias { layer, kind });
            }
        }
        let Some(experts) = self.experts.as_ref().filter(|experts| experts.layers[layer]) else { return };
        let Some(form) = experts.fused else { return };
        let (n, d, width) = (usize::from(experts.count), self.expert_input(), experts.width);
        let (gate_up, down) = self.fused_experts(layer);
        let turns = if experts.gated { 2 } else { 1 };
        for (name, turns, rows, cols) in [(gate_up, turns, width, d), (down, 1, d, width)] {
            if self.biases.experts {
                put(format!("{name}_bias"), vec![n, turns * rows], Role::Stacked { layer });
            }
            put(name, form.shape(n, turns, rows, cols).to_vec(), Role::Stacked { layer });
        }
    }

    fn norm_tensors(&self, module: &str, width: usize, layer: Option<usize>, tensors: &mut Vec<TensorInfo>) {
        let mut put = |part: &str, role| {
            tensors.push(TensorInfo { name: format!("{module}.{part}"), shape: vec![width], role });
        };
        match self.norm {
            NormForm::Rms | NormForm::RmsPlusOne | NormForm::LayerWeight => {
                put("weight", Role::Norm { layer });
            }
            NormForm::Layer => {
                put("weight", Role::Norm { layer });
                put("bias", Role::NormBias { layer });
            }
            NormForm::LayerPlain => {}
        }
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]
mod tests {
    use std::collections::HashSet;

    use super::*;
    use crate::config::{KEY_NORMS, QUERY_BIASES};
    use mantissa_arch::Architecture;

    fn config(model_type: &str, extra: &str) -> ModelConfig {
        let mut value = crate::config::example(model_type);
        let extra: serde_json::Value = serde_json::from_str(&format!("{{{extra}}}")).unwrap();
        extra.as_object().unwrap().iter().for_each(|(field, x)| value[field] = x.clone());
        ModelConfig::from_json(&value, "config.json").unwrap()
    }

    #[test]
    fn names_are_unique_and_linears_are_among_them() {
        for model_type in Architecture::all().map(|row| row.name) {
            let config = config(model_type, "");
            let names: HashSet<_> = config.tensors().into_iter().map(|t| t.name).collect();
            assert_eq!(names.len(), config.tensors().len());
            assert!(config.linears().iter().all(|l| names.contains(&format!("{}.weight", l.module))));
            assert_eq!(config.linears().is_empty(), model_type == "gpt2");
            let bias = names.contains("model.layers.1.self_attn.q_proj.bias");
            assert_eq!(bias, QUERY_BIASES.contains(&model_type), "{model_type}");
            let norm = names.contains("model.layers.0.self_attn.k_norm.weight");
            assert_eq!(norm, KEY_NORMS.contains(&model_type), "{model_type}");
            assert_eq!(names.contains("model.layers.0.mlp.ffn_sub_norm.weight"), model_type == "bitnet");
        }
    }

    #[test]
    fn readers_of_an_input_are_named_by_their_modules() {
        let readers = config("llama", "").readers_of(1, LinearInput::GateUp);
        assert_eq!(readers, "model.layers.1.mlp.gate_proj, model.layers.1.mlp.up_proj");
    }

    #[test]
    fn inputs_have_the_width_of_their_readers() {
        for model_type in Architecture::all().map(|row| row.name) {
            let config = config(model_type, "");
            for info in config.layer_linears(1) {
                assert_eq!(config.layer_input_width(1, info.kind.input()), info.cols, "{}", info.module);
                assert!(info.kind.input().readers().any(|kind| kind == info.kind), "{}", info.module);
                assert!(config.linear_shapes().any(|shape| shape == (info.rows, info.cols)));
            }
        }
    }

    #[test]
    fn parameters_are_counted() {
        let layer = 2 * 64 * 64 + 2 * 32 * 64 + 3 * 96 * 64 + 2 * 64;
        assert_eq!(config("llama", "").parameters(), 2 * layer + 64 + 2 * 100 * 64);
        let tied = config("llama", r#""tie_word_embeddings": true"#);
        assert_eq!(tied.parameters(), 2 * layer + 64 + 100 * 64);
    }
}
