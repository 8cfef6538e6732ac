//! Architectures as data: one row of features each. No code depends on a model's name, only on its features.
//!
//! A row states everything that `config.json` does not, which fields state the rest, and how the checkpoint's tensors
//! are named. `ModelConfig` of `mantissa-model` is a row applied to a config.

use std::fmt;

use crate::attention::AttentionRules;
use crate::features::{HeadNorms, MlpForm, NormForm, NormPlaces, QkvForm};
use crate::names::Names;
use crate::rules::{
    BiasRules, ByLayer, Eps, ExpertRules, FeedForward, Flag, GrowthRule, HeadDim, LatentRules, QueryScale,
    RopeRules, ScaleRules, Softcaps, Windows,
};

/// A decoder architecture. Two are equal when their names are.
#[derive(Clone, Copy)]
pub struct Architecture {
    /// `model_type` in config.json.
    pub name: &'static str,
    /// Class in `architectures` of config.json, by which transformers and vLLM find the model.
    pub class: &'static str,
    /// True if weights are trained to be ternary, so that one scale and codes of -1, 0 and 1 hold them without loss.
    pub ternary: bool,
    /// Fields that its config.json names differently: `(ours, its own)`.
    pub aliases: &'static [(&'static str, &'static str)],
    /// Integers of fields that its config.json leaves out, under our names; flags are 0 or 1. In a multimodal model those of
    /// the wrapper hold instead.
    pub defaults: &'static [(&'static str, u64)],
    /// Flags that change the computation and are supported with one value only, the default of configs without them.
    pub fixed_flags: &'static [(&'static str, bool)],
    /// Fields that are supported with these values only, or absent.
    pub only: &'static [(&'static str, &'static [&'static str])],
    /// Counts that are supported with one value only, and must be stated.
    pub fixed_counts: &'static [(&'static str, u64)],
    /// Names of its tensors.
    pub names: Names,
    /// True if the head is the embedding if `tie_word_embeddings` is absent.
    pub tied: bool,
    /// Kind of norm.
    pub norm: NormForm,
    /// Epsilon of the norms.
    pub eps: Eps,
    /// Places of the norms.
    pub norm_places: NormPlaces,
    /// True if attention and MLP run in parallel, each with its norm.
    pub parallel: Flag,
    /// QK norms.
    pub head_norms: HeadNorms,
    /// True if the model has these QK norms.
    pub norms_heads: Flag,
    /// Features that distinguish the layers.
    pub by_layer: ByLayer,
    /// True if the inputs of the output and down projections are normed.
    pub sub_norms: bool,
    /// Activation if `hidden_act` is absent, by its name there.
    pub activation: &'static str,
    /// True if configs say `gelu` and mean the tanh approximation.
    pub gelu_is_tanh: bool,
    /// Width of a head.
    pub head_dim: HeadDim,
    /// Field for the width of MLPs.
    pub ffn: &'static str,
    /// Width of the MLP.
    pub feed_forward: FeedForward,
    /// Storage of q, k and v.
    pub qkv: QkvForm,
    /// Structure of the MLP.
    pub mlp: MlpForm,
    /// Linear layers with a bias.
    pub biases: BiasRules,
    /// True if the head has a bias.
    pub head_bias: bool,
    /// True if a dense checkpoint stores linear layers as `[in, out]`.
    pub conv1d: bool,
    /// Layers with a sliding window.
    pub windows: Windows,
    /// Window if `sliding_window` is absent; null means no window.
    pub default_window: Option<usize>,
    /// Rotary position embedding.
    pub rope: RopeRules,
    /// True if positions are learned vectors and heads are not rotated.
    pub learned_positions: bool,
    /// True if the embedding is multiplied by `sqrt(hidden_size)`.
    pub scaled_embedding: bool,
    /// Factor of the scores.
    pub query_scale: QueryScale,
    /// Constant factors of embedding, residual stream, scores and logits.
    pub scales: Option<ScaleRules>,
    /// Factor of the queries that grows with the position.
    pub query_growth: GrowthRule,
    /// Caps of scores and logits.
    pub softcaps: Option<Softcaps>,
    /// Multi-head latent attention.
    pub latent: Option<LatentRules>,
    /// Features of attention that few architectures have.
    pub attention: AttentionRules,
    /// True if attention, mixer and MLP have constant factors.
    pub multipliers: bool,
    /// Recurrent mixer of layers, by the name that it has in the list of `mantissa-model` (`mixer/mod.rs`).
    pub recurrent: Option<&'static str>,
    /// Mixture of experts.
    pub experts: Option<ExpertRules>,
}

impl PartialEq for Architecture {
    fn eq(&self, other: &Self) -> bool {
        self.name == other.name
    }
}

impl fmt::Debug for Architecture {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Architecture({})", self.name)
    }
}
