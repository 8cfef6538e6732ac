//! Architectures as data: one row of features each. No code depends on a model's name, only on its features.
//!
//! A row states everything that `config.json` does not, which fields state the rest, and how the checkpoint's tensors
//! are named. [`ModelConfig`](crate::ModelConfig) is a row applied to a config. To add an architecture without new
//! features, add one row in `architecture/table.rs` and recorded logits in `tests/data/tiny`.

mod bases;
pub(crate) mod features;
pub(crate) mod names;
pub(crate) mod rules;
mod table;
pub(crate) mod wrapper;

use std::fmt;

use features::{Activation, HeadNorms, MlpForm, NormForm, NormPlaces, QkvForm};
use mantissa_num::nearest_list;
use names::Names;
use rules::{
    BiasRules, ByLayer, Eps, ExpertRules, FeedForward, Flag, GrowthRule, HeadDim, LatentRules, QueryScale,
    RecurrentRules, RopeRules, ScaleRules, Softcaps, Windows,
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
    pub(crate) aliases: &'static [(&'static str, &'static str)],
    /// Flags that change the computation and are supported with one value only, the default of configs without them.
    pub(crate) fixed_flags: &'static [(&'static str, bool)],
    /// Fields that are supported with these values only, or absent.
    pub(crate) only: &'static [(&'static str, &'static [&'static str])],
    /// Counts that are supported with one value only, and must be stated.
    pub(crate) fixed_counts: &'static [(&'static str, u64)],
    /// Names of its tensors.
    pub(crate) names: Names,
    /// True if the head is the embedding if `tie_word_embeddings` is absent.
    pub(crate) tied: bool,
    /// Kind of norm.
    pub(crate) norm: NormForm,
    /// Epsilon of the norms.
    pub(crate) eps: Eps,
    /// Places of the norms.
    pub(crate) norm_places: NormPlaces,
    /// True if attention and MLP run in parallel, each with its norm.
    pub(crate) parallel: Flag,
    /// QK norms.
    pub(crate) head_norms: HeadNorms,
    /// True if the model has these QK norms.
    pub(crate) norms_heads: Flag,
    /// True if each head of the values is normed, without weights.
    pub(crate) value_norm: bool,
    /// Features that distinguish the layers.
    pub(crate) by_layer: ByLayer,
    /// True if the inputs of the output and down projections are normed.
    pub(crate) sub_norms: bool,
    /// Activation if `hidden_act` is absent.
    pub(crate) activation: Activation,
    /// True if configs say `gelu` and mean the tanh approximation.
    pub(crate) gelu_is_tanh: bool,
    /// Width of a head.
    pub(crate) head_dim: HeadDim,
    /// Field for the width of MLPs.
    pub(crate) ffn: &'static str,
    /// Width of the MLP.
    pub(crate) feed_forward: FeedForward,
    /// Storage of q, k and v.
    pub(crate) qkv: QkvForm,
    /// Structure of the MLP.
    pub(crate) mlp: MlpForm,
    /// Linear layers with a bias.
    pub(crate) biases: BiasRules,
    /// True if the head has a bias.
    pub(crate) head_bias: bool,
    /// True if a dense checkpoint stores linear layers as `[in, out]`.
    pub(crate) conv1d: bool,
    /// Layers with a sliding window.
    pub(crate) windows: Windows,
    /// Window if `sliding_window` is absent; null means no window.
    pub(crate) default_window: Option<usize>,
    /// Rotary position embedding.
    pub(crate) rope: RopeRules,
    /// True if positions are learned vectors and heads are not rotated.
    pub(crate) learned_positions: bool,
    /// True if the embedding is multiplied by `sqrt(hidden_size)`.
    pub(crate) scaled_embedding: bool,
    /// Factor of the scores.
    pub(crate) query_scale: QueryScale,
    /// Constant factors of embedding, residual stream, scores and logits.
    pub(crate) scales: Option<ScaleRules>,
    /// Factor of the queries that grows with the position.
    pub(crate) query_growth: GrowthRule,
    /// Caps of scores and logits.
    pub(crate) softcaps: Option<Softcaps>,
    /// True if `clip_qkv` limits q, k and v.
    pub(crate) clips_qkv: bool,
    /// True if heads have attention sinks.
    pub(crate) sinks: bool,
    /// Multi-head latent attention.
    pub(crate) latent: Option<LatentRules>,
    /// True if the joined heads are gated, by the second half of each head's query projection.
    pub(crate) gated_attention: bool,
    /// True if attention, mixer and MLP have constant factors.
    pub(crate) multipliers: bool,
    /// Recurrent mixer of layers.
    pub(crate) recurrent: Option<RecurrentRules>,
    /// Mixture of experts.
    pub(crate) experts: Option<ExpertRules>,
}

impl Architecture {
    /// Finds the architecture with this `model_type`.
    pub fn find(name: &str) -> Option<&'static Self> {
        Self::all().find(|architecture| architecture.name == name)
    }

    /// Every architecture.
    pub fn all() -> impl Iterator<Item = &'static Self> {
        table::TABLE.iter()
    }

    /// Lists the names nearest to `got`, for a message.
    pub fn nearest(got: &str) -> String {
        let names = nearest_list(got, Self::all().map(|architecture| architecture.name));
        format!("{names} (docs/reference/architectures.md lists all)")
    }
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
