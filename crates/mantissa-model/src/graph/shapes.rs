//! Shapes of linear layers and norms, and the order of a layer's parts.

use mantissa_kernels::CausalAttention;
use mantissa_store::convention::Stack;

use crate::config::{DenseMlp, LayerHeads, Mixing, MlpForm, ModelConfig, NormPlaces, QkvForm};
use crate::mixer::MixerLinear;
use mantissa_arch::kinds::{LinearInput, LinearKind, NormKind};

impl ModelConfig {
    /// Returns the place of an expert's weight among the others, if they are fused.
    pub(super) fn stack(&self, layer: usize, kind: LinearKind) -> Option<Stack> {
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
    pub(super) fn linear_shape(&self, layer: usize, kind: LinearKind) -> (usize, usize, bool) {
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
            LinearKind::Q if self.attention.gated => (2 * q, d, biases.qkv),
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
    pub(super) fn kinds(&self, layer: usize) -> Vec<LinearKind> {
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

    /// Shape of the attention of a layer.
    pub(crate) fn attention_shape(&self, layer: usize) -> CausalAttention {
        let LayerHeads { query, key_value, dim } = self.heads(layer);
        let (scale, window) = (self.attention_scale, self.windows[layer]);
        let chunk = self.by_layer.chunk.filter(|_| self.rotated_layers[layer]);
        CausalAttention { heads: query, kv_heads: key_value, head_dim: dim, scale, window, chunk }
    }
}
