//! Parameters of a model as data: name, shape and role of each. Loading, inspecting, quantizing, verifying and
//! synthesizing a model all use this list.
//!
//! Names are those of Hugging Face checkpoints. Shapes are `[out, in]` for linear layers, `[rows, width]` for the
//! embedding.

pub(crate) mod kinds;
mod mixing;
mod names;
mod sides;

pub use kinds::{FusedGroup, HyperPart, HyperSite, LinearInput, LinearKind, NormKind, SideKind, VectorKind};
pub use names::{EMBEDDING, HEAD};

use mantissa_kernels::CausalAttention;
use mantissa_store::convention::Stack;

use crate::config::{DenseMlp, LayerHeads, MlpForm, ModelConfig, NormForm, NormPlaces, QkvForm};
use crate::mixer::{MixerLinear, Mixing};
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

/// Small projection of a layer, which is never quantized.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SideInfo {
    /// Kind.
    pub kind: SideKind,
    /// Output features.
    pub rows: usize,
    /// Input features.
    pub cols: usize,
    /// True if it has a bias.
    pub bias: bool,
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

    /// Returns the place of an expert's weight among the others, if they are fused.
    fn stack(&self, layer: usize, kind: LinearKind) -> Option<Stack> {
        let all = self.experts.as_ref()?;
        let (down, expert, turns, turn) = match kind {
            LinearKind::ExpertGate(e) => (false, e, 2, 0),
            LinearKind::ExpertUp(e) if !all.gated => (false, e, 1, 0),
            LinearKind::ExpertUp(e) => (false, e, 2, 1),
            LinearKind::ExpertDown(e) => (true, e, 1, 0),
            _ => return None,
        };
        let (form, names) = (all.fused?, self.fused_experts(layer));
        let tensor = if down { names.1 } else { names.0 };
        let (experts, expert) = (usize::from(all.count), usize::from(expert));
        Some(Stack { tensor, form, experts, expert, turns, turn })
    }

    /// Rows, columns, and true if there is a bias.
    fn linear_shape(&self, layer: usize, kind: LinearKind) -> (usize, usize, bool) {
        if let Some(MixerLinear { rows, cols, bias, .. }) = self.mixer_linear(kind) {
            return (rows, cols, bias);
        }
        let (d, ffn, biases) = (self.hidden_size, self.ffn(layer), self.biases);
        let LayerHeads { query, key_value, dim } = self.heads(layer);
        let (q, kv) = (query * dim, key_value * dim);
        let input = self.by_layer.inputs.map_or(0, |inputs| inputs.width);
        let latent = self.latent.unwrap_or_default();
        let experts = self.experts.as_ref();
        let width = experts.map_or(0, |experts| experts.width);
        let routed = self.expert_input();
        let shared = experts.and_then(|experts| experts.shared).map_or(0, |shared| shared.width);
        match kind {
            LinearKind::Q if self.latent.is_some() => (self.latent_query_width(), d, false),
            // Each head's query, then its gate.
            LinearKind::Q if self.gated_attention => (2 * q, d, biases.qkv),
            LinearKind::Q => (q, d, biases.qkv),
            LinearKind::K | LinearKind::V => (kv, d, biases.qkv),
            LinearKind::O if self.latent.is_some() => (d, self.attended_width(), biases.output),
            LinearKind::O => (d, q, biases.output),
            LinearKind::Gate | LinearKind::Up => (ffn, d, biases.mlp),
            LinearKind::Down => (d, ffn, biases.mlp),
            LinearKind::Qkv => (q + 2 * kv, d, biases.qkv),
            LinearKind::GateUp => (2 * ffn, d, biases.mlp),
            LinearKind::QA => (latent.q_rank.unwrap_or(0), d, biases.qkv),
            LinearKind::QB => (self.latent_query_width(), latent.q_rank.unwrap_or(0), false),
            LinearKind::KvA => (latent.kv_rank + latent.rotated, d, biases.qkv),
            LinearKind::KvB => {
                (self.num_attention_heads * (latent.unrotated + latent.value), latent.kv_rank, false)
            }
            LinearKind::ExpertGate(_) | LinearKind::ExpertUp(_) => (width, routed, biases.experts),
            LinearKind::ExpertDown(_) => (routed, width, biases.experts),
            LinearKind::SharedGate | LinearKind::SharedUp => (shared, d, biases.mlp),
            LinearKind::SharedDown => (d, shared, biases.mlp),
            LinearKind::InputGate => (input, d, false),
            LinearKind::InputProjection => (d, input, false),
            LinearKind::MixIn
            | LinearKind::MixGate
            | LinearKind::MixQ
            | LinearKind::MixK
            | LinearKind::MixV
            | LinearKind::MixOut => (0, 0, false),
            LinearKind::Embedding => (self.vocab_size, d, false),
            LinearKind::Head => (self.vocab_size, d, self.head_bias),
        }
    }

    /// Iterates over the shapes of all linear layers of the model; for experts, which are alike, that of the first.
    pub(crate) fn linear_shapes(&self) -> impl Iterator<Item = (usize, usize)> {
        use LinearKind as L;
        const ALL: [LinearKind; 27] = [
            L::Q,
            L::K,
            L::V,
            L::O,
            L::Gate,
            L::Up,
            L::Down,
            L::Qkv,
            L::GateUp,
            L::QA,
            L::QB,
            L::KvA,
            L::KvB,
            L::ExpertGate(0),
            L::ExpertUp(0),
            L::ExpertDown(0),
            L::SharedGate,
            L::SharedUp,
            L::SharedDown,
            L::InputGate,
            L::InputProjection,
            L::MixIn,
            L::MixGate,
            L::MixQ,
            L::MixK,
            L::MixV,
            L::MixOut,
        ];
        let has = |kind: &LinearKind| match kind {
            L::Qkv => self.qkv != QkvForm::Separate,
            L::GateUp => self.mlp == MlpForm::GatedJoined,
            L::QA | L::QB | L::KvA | L::KvB => self.latent.is_some() || self.mixer_linear(*kind).is_some(),
            L::InputGate | L::InputProjection => self.by_layer.inputs.is_some(),
            L::MixIn | L::MixGate | L::MixQ | L::MixK | L::MixV | L::MixOut => self.recurrent.is_some(),
            _ => true,
        };
        let of_layer =
            move |layer| ALL.into_iter().filter(has).map(move |kind| self.linear_shape(layer, kind));
        self.distinct_layers().flat_map(of_layer).map(|(rows, cols, _)| (rows, cols))
    }

    /// Iterates over layers of which every shape of another layer has one.
    fn distinct_layers(&self) -> impl Iterator<Item = usize> {
        let alike = self.by_layer.global_heads.is_none() && !self.by_layer.wide_shared;
        0..if alike { 1 } else { self.num_hidden_layers }
    }

    /// Lists the linear layers of a decoder layer, in the order of the forward pass.
    fn kinds(&self, layer: usize) -> Vec<LinearKind> {
        use LinearKind as L;
        let mut kinds = self.mixing_kinds(layer);
        if !self.has_mlp[layer] {
            return kinds;
        }
        let experts = self.experts.as_ref().filter(|experts| experts.layers[layer]);
        if experts.is_none_or(|experts| experts.dense != DenseMlp::None) {
            kinds.extend(match self.mlp {
                MlpForm::Gated => &[L::Gate, L::Up, L::Down][..],
                MlpForm::GatedJoined => &[L::GateUp, L::Down],
                MlpForm::Plain => &[L::Up, L::Down],
            });
        }
        if let Some(experts) = experts {
            // The inputs of routed experts do not depend on one another: all inputs, then all outputs.
            let all = 0..experts.count;
            let gate = |kind| experts.gated.then_some(kind);
            kinds
                .extend(all.clone().flat_map(|e| gate(L::ExpertGate(e)).into_iter().chain([L::ExpertUp(e)])));
            kinds.extend(all.map(L::ExpertDown));
            if experts.shared.is_some() {
                kinds.extend(gate(L::SharedGate).into_iter().chain([L::SharedUp, L::SharedDown]));
            }
        }
        if self.by_layer.inputs.is_some() {
            kinds.extend([L::InputGate, L::InputProjection]);
        }
        kinds
    }

    /// Width of an input of linear layers, of the layer with the widest; 0 for inputs that the model does not have.
    pub fn input_width(&self, input: LinearInput) -> usize {
        self.distinct_layers().map(|layer| self.layer_input_width(layer, input)).max().unwrap_or(0)
    }

    /// Width of an input of linear layers of `layer`; 0 for inputs that the model does not have.
    pub fn layer_input_width(&self, layer: usize, input: LinearInput) -> usize {
        match input {
            LinearInput::Qkv | LinearInput::GateUp => self.hidden_size,
            LinearInput::Expert(_) => self.expert_input(),
            _ => input.readers().next().map_or(0, |kind| self.linear_shape(layer, kind).1),
        }
    }

    /// Width of what routed experts read and return.
    pub fn expert_input(&self) -> usize {
        self.experts.as_ref().and_then(|experts| experts.latent).unwrap_or(self.hidden_size)
    }

    /// Iterates over the norms of decoder layer `layer` and their widths, in the order of the forward pass.
    pub fn norms(&self, layer: usize) -> impl Iterator<Item = (NormKind, usize)> {
        let (d, attends, mlp) = (self.hidden_size, self.attends(layer), self.has_mlp[layer]);
        let before = self.norm_places != NormPlaces::After;
        let after = matches!(self.norm_places, NormPlaces::After | NormPlaces::Both);
        let (queries, keys) = self.head_norm_widths(layer);
        let (heads, subs) = (self.has_head_norms() && attends, self.has_sub_norms());
        let experts = self.experts.as_ref().filter(|experts| experts.layers[layer]);
        let beside = experts.is_some_and(|experts| experts.dense == DenseMlp::Normed);
        let latent = self.latent.unwrap_or_default();
        let all = [
            (before && self.mixing[layer] != Mixing::None, NormKind::Input, d),
            (latent.q_rank.is_some() && attends, NormKind::QLatent, latent.q_rank.unwrap_or(0)),
            (self.latent.is_some() && attends, NormKind::KvLatent, latent.kv_rank),
            (heads, NormKind::Query, queries),
            (heads && self.has_own_kv(layer), NormKind::Key, keys),
            (subs && attends, NormKind::AttentionSub, self.query_width()),
            (after, NormKind::AfterAttention, d),
            (before && mlp && self.norm_places != NormPlaces::ParallelShared, NormKind::Post, d),
            (subs && mlp, NormKind::MlpSub, self.intermediate_size),
            (beside, NormKind::AfterDense, d),
            (beside, NormKind::Experts, d),
            (beside, NormKind::AfterExperts, d),
            (after, NormKind::AfterMlp, d),
            (self.by_layer.inputs.is_some(), NormKind::AfterInput, d),
            (self.by_layer.streams.is_some(), NormKind::Modalities, d),
            (self.by_layer.streams.is_some(), NormKind::AfterLaurel, d),
        ];
        all.into_iter().filter(|norm| norm.0).map(|(_, kind, width)| (kind, width))
    }

    /// Number of parameters.
    pub fn parameters(&self) -> u64 {
        let count = |t: TensorInfo| t.shape.iter().map(|&n| n as u64).product::<u64>();
        self.tensors().into_iter().map(count).sum()
    }

    /// Shape of the attention of a layer.
    pub(crate) fn attention_shape(&self, layer: usize) -> CausalAttention {
        let LayerHeads { query, key_value, dim } = self.heads(layer);
        let (scale, window) = (self.attention_scale, self.windows[layer]);
        let chunk = self.by_layer.chunk.filter(|_| self.rotated_layers[layer]);
        CausalAttention { heads: query, kv_heads: key_value, head_dim: dim, scale, window, chunk }
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
    use crate::architecture::Architecture;

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
            assert_eq!(
                bias,
                ["glm4", "qwen2", "seed_oss", "starcoder2", "qwen2_moe", "phi", "gpt_oss"]
                    .contains(&model_type)
            );
            let norm = names.contains("model.layers.0.self_attn.k_norm.weight");
            let normed = [
                "qwen3",
                "exaone4",
                "exaone_moe",
                "gemma3n_text",
                "gemma4_text",
                "qwen3_moe",
                "gemma3_text",
                "minimax_m2",
                "olmo2",
                "olmo3",
            ];
            assert_eq!(norm, normed.contains(&model_type));
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
