//! Names of a model's parameters, from its architecture's names.

use crate::config::{LayerHeads, ModelConfig};
use mantissa_arch::kinds::{HyperSite, LinearKind, NormKind, SideKind, VectorKind};
use mantissa_arch::names::Names;
use mantissa_arch::wrapper::TextPlace;

/// Module of the embedding in checkpoints with the names of Llama.
pub const EMBEDDING: &str = Names::LLAMA.embedding;
/// Module of the head in checkpoints with the names of Llama.
pub const HEAD: &str = Names::LLAMA.head;

impl ModelConfig {
    /// Decides what the names in a checkpoint show and no config records: [`bare_names`](Self::bare_names), the place of
    /// a text model among a multimodal model's tensors, and whether the [experts are fused](crate::config::Experts::fused).
    /// `has` is true for the names of its tensors.
    pub fn find_names(&mut self, has: impl Fn(&str) -> bool) {
        self.find_place(&has);
        let names = &self.architecture.names;
        let published = names.published.or((!names.root.is_empty()).then_some(names));
        self.bare_names = published.is_some_and(|names| has(&format!("{}.weight", names.embedding)));
        let Some(rules) = self.architecture.experts.as_ref() else { return };
        // Biases of experts are stored fused beside experts one by one.
        let fused =
            self.biases.experts || (0..self.num_hidden_layers).any(|layer| has(&self.fused_experts(layer).0));
        if let Some(experts) = self.experts.as_mut() {
            let form = self.wrapper.and_then(|wrapper| wrapper.fused).unwrap_or(rules.fused);
            experts.fused = fused.then_some(form);
        }
    }

    /// Finds the place of a text model in a multimodal one.
    fn find_place(&mut self, has: impl Fn(&str) -> bool) {
        let Some(wrapper) = self.wrapper else { return };
        // No format quantizes a norm.
        let found = |place: &&TextPlace| {
            let own = ModelConfig { place: Some(**place), ..self.clone() };
            has(&format!("{}.weight", own.final_norm_module()))
        };
        if let Some(place) = wrapper.places.iter().find(found) {
            self.place = Some(*place);
        }
    }

    /// Module of the embedding.
    pub fn embedding_module(&self) -> String {
        self.placed(self.names().embedding)
    }

    /// Module of the learned positions.
    pub fn positions_module(&self) -> String {
        self.placed(self.names().positions)
    }

    /// Module of the head, if it is not the embedding.
    pub fn head_module(&self) -> &'static str {
        self.place.map_or(self.names().head, |place| place.head)
    }

    /// True for the tensors of a head that is tied to the embedding and stored all the same.
    pub fn is_tied_head(&self, name: &str) -> bool {
        let part = name.strip_prefix(self.head_module()).filter(|_| self.tie_word_embeddings);
        part.is_some_and(|part| part.starts_with('.') && part != ".bias")
    }

    /// Module of the norm before the head.
    pub fn final_norm_module(&self) -> String {
        self.placed(self.names().final_norm)
    }

    /// Module of a linear layer.
    pub fn linear_module(&self, layer: usize, kind: LinearKind) -> String {
        format!("{}{}", self.layer_prefix(layer), self.names().linear(kind))
    }

    /// Module of a layer's attention, the prefix of the scales of a quantized KV cache.
    pub fn attention_module(&self, layer: usize) -> String {
        format!("{}{}", self.layer_prefix(layer), self.names().attention)
    }

    /// Module of a layer's norm.
    pub fn norm_module(&self, layer: usize, kind: NormKind) -> String {
        format!("{}{}", self.layer_prefix(layer), self.names().norm(kind))
    }

    /// Weight of a layer's norm.
    pub fn norm_name(&self, layer: usize, kind: NormKind) -> String {
        format!("{}.weight", self.norm_module(layer, kind))
    }

    /// Module of a layer's router, or of the gate of its shared experts.
    pub fn side_module(&self, layer: usize, kind: SideKind) -> String {
        let name = match kind {
            _ if !self.names().mixer.side(kind).is_empty() => self.names().mixer.side(kind),
            SideKind::EnterStream(i) => {
                return self.placed(&format!("{}{}", Names::STREAMS[0], i.saturating_sub(1)));
            }
            SideKind::LeaveStream(i) => {
                return self.placed(&format!("{}{}", Names::STREAMS[1], i.saturating_sub(1)));
            }
            SideKind::Modalities => "altup.modality_router",
            SideKind::Prediction => "altup.prediction_coefs",
            SideKind::Correction => "altup.correction_coefs",
            SideKind::LaurelLeft => "laurel.linear_left",
            SideKind::LaurelRight => "laurel.linear_right",
            SideKind::Router => self.names().experts.router,
            SideKind::SharedGate => Names::SHARED_GATE,
            SideKind::IndexQueries => "self_attn.indexer.wq_b",
            SideKind::IndexKeys => "self_attn.indexer.wk",
            SideKind::IndexWeights => "self_attn.indexer.weights_proj",
            SideKind::ToExperts => self.names().experts.latent[0],
            SideKind::FromExperts => self.names().experts.latent[1],
            _ => "",
        };
        format!("{}{name}", self.layer_prefix(layer))
    }

    /// Name of a vector of a layer.
    pub fn vector_name(&self, layer: usize, kind: VectorKind) -> String {
        let own = self.names().mixer.vector(kind);
        if matches!(kind, VectorKind::Hyper(HyperSite::Head, _)) {
            return self.placed(own);
        }
        let name = match kind {
            _ if !own.is_empty() => own,
            VectorKind::Sinks => Names::SINKS,
            VectorKind::Correction => self.names().experts.correction,
            VectorKind::Scale => Names::SCALE,
            VectorKind::IndexNorm => "self_attn.indexer.k_norm.weight",
            VectorKind::IndexNormBias => "self_attn.indexer.k_norm.bias",
            VectorKind::StreamScale => "altup.correct_output_scale",
            VectorKind::RouterScale => Names::ROUTER[0],
            VectorKind::ExpertScales => Names::ROUTER[1],
            _ => "",
        };
        format!("{}{name}", self.layer_prefix(layer))
    }

    /// Names of the fused experts of a layer: gate and up, or up alone, and down, each with its bias at `{name}_bias`.
    pub fn fused_experts(&self, layer: usize) -> (String, String) {
        let prefix = self.layer_prefix(layer);
        let [gate_up, down] = self.names().experts.fused;
        (format!("{prefix}{gate_up}"), format!("{prefix}{down}"))
    }

    /// True for tensors that published checkpoints have and nothing reads: keys and values of layers that read those of
    /// earlier ones (Gemma 4).
    pub fn is_unread(&self, name: &str) -> bool {
        let of_layer = |layer: usize| {
            let linears = [LinearKind::K, LinearKind::V].map(|kind| self.linear_module(layer, kind));
            let norms = [NormKind::Key, NormKind::Value].map(|kind| self.norm_module(layer, kind));
            linears.into_iter().chain(norms)
        };
        let is_part = |module: String| name.strip_prefix(&module).is_some_and(|part| part.starts_with('.'));
        (self.by_layer.shared_from..self.num_hidden_layers).flat_map(of_layer).any(is_part)
    }

    /// Names and shapes of the weights that [`Self::is_unread`] holds for: keys, values and norm of keys of each such layer.
    pub fn unread(&self) -> Vec<(String, Vec<usize>)> {
        let of_layer = |layer: usize| {
            let LayerHeads { key_value, dim, .. } = self.heads(layer);
            let linear = |kind| {
                let shape = vec![key_value * dim, self.hidden_size];
                (format!("{}.weight", self.linear_module(layer, kind)), shape)
            };
            let norm = format!("{}.weight", self.norm_module(layer, NormKind::Key));
            [linear(LinearKind::K), linear(LinearKind::V), (norm, vec![self.head_norm_widths(layer).1])]
        };
        (self.by_layer.shared_from..self.num_hidden_layers).flat_map(of_layer).collect()
    }

    /// Names of the embeddings of all layers `[vocabulary, layers · width]`, of their projection from the embedding
    /// `[layers · width, hidden]`, and of its norm `[width]`.
    pub fn layer_input_names(&self) -> [String; 3] {
        Names::INPUTS.map(|name| self.placed(name))
    }

    /// Returns the index of the decoder layer that a tensor of this name belongs to.
    pub fn layer_of(&self, name: &str) -> Option<usize> {
        let (layer, _) = name.strip_prefix(&self.placed(self.names().layers))?.split_once('.')?;
        layer.parse().ok().filter(|layer| *layer < self.num_hidden_layers)
    }

    /// Prefix of the names of a layer's parameters.
    fn layer_prefix(&self, layer: usize) -> String {
        format!("{}{layer}.", self.placed(self.names().layers))
    }

    /// Returns the checkpoint's name for `name`: within a multimodal model, or after a prefix that checkpoints by GPT-2's
    /// authors do not have.
    fn placed(&self, name: &str) -> String {
        match self.place {
            Some(place) => format!("{}{}", place.model, name.strip_prefix("model.").unwrap_or(name)),
            None if self.bare_names => name.to_owned(),
            None => format!("{}{name}", self.names().root),
        }
    }

    fn names(&self) -> &'static Names {
        let names = &self.architecture.names;
        names.published.filter(|_| self.bare_names).unwrap_or(names)
    }
}
