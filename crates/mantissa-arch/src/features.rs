//! Parts in which decoder architectures differ: norms, activations, projections, biases, scores of a router.

/// Kind of norm.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum NormForm {
    /// RMSNorm with a weight.
    Rms,
    /// RMSNorm with 1 plus a weight (Gemma).
    RmsPlusOne,
    /// LayerNorm with a weight and a bias.
    Layer,
    /// LayerNorm with a weight (Cohere).
    LayerWeight,
    /// LayerNorm without parameters (OLMo).
    LayerPlain,
}

impl NormForm {
    /// True if the mean is subtracted.
    pub fn centers(self) -> bool {
        matches!(self, NormForm::Layer | NormForm::LayerWeight | NormForm::LayerPlain)
    }
}

/// Places of a decoder layer's norms.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum NormPlaces {
    /// Before attention and MLP.
    Before,
    /// After attention and MLP, before their results are added (OLMo 2).
    After,
    /// Before and after (Gemma 2 and 3).
    Both,
    /// Before attention and MLP, which run in parallel on the same states (GPT-NeoX).
    Parallel,
    /// One norm for attention and MLP in parallel (Phi).
    ParallelShared,
}

/// Norms of queries and keys (QK norm), before RoPE unless stated otherwise.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum HeadNorms {
    /// No QK norm.
    Absent,
    /// Norms each head by itself.
    Each,
    /// Norms all heads together (OLMo 2).
    Whole,
    /// Norms each head by itself, without weights, in layers that are rotated (Llama 4).
    Plain,
    /// Norms each head by itself, after RoPE (HunYuan).
    Rotated,
}

/// Storage of the projections to queries, keys and values.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum QkvForm {
    /// Three linear layers.
    Separate,
    /// One linear layer: all queries, all keys, all values.
    Joined,
    /// One linear layer, head by head: its query, its key, its value.
    ByHead,
}

/// Structure of the MLP.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum MlpForm {
    /// `down(act(gate(x)) · up(x))`.
    Gated,
    /// Gated, with gate and up stored as one linear layer.
    GatedJoined,
    /// `down(act(up(x)))`.
    Plain,
}

/// Dense MLP of a layer with experts.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum DenseMlp {
    /// None: experts stand in its place.
    None,
    /// Reads the same states as the experts; both results are added (Granite 4).
    Same,
    /// Has norms of its own before and after, and so have the experts, whose router reads the states by another norm
    /// and weights each expert by a factor (Gemma 4).
    Normed,
}

/// Linear layers that have a bias.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub struct Biases {
    /// True if q, k and v have one.
    pub qkv: bool,
    /// True if the attention's output projection has one.
    pub output: bool,
    /// True if gate, up and down have one.
    pub mlp: bool,
    /// True if the experts have them.
    pub experts: bool,
}

/// Scores that a router computes from its logits.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Scores {
    /// Softmax over all experts.
    Softmax,
    /// Sigmoid of each logit.
    Sigmoid,
    /// Softmax over the chosen experts.
    SoftmaxOfChosen,
    /// `sqrt(ln(1 + e^x))` of each logit.
    SqrtSoftplus,
}
