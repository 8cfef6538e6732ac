//! Rules of an architecture: values that it fixes, and fields of config.json that state the others.

use crate::features::{DenseMlp, HeadNorms, Scores};
use crate::stack::StackForm;

/// A flag that an architecture fixes, or that a field of its config.json states.
#[derive(Clone, Copy, Debug)]
pub enum Flag {
    /// Always this value.
    Fixed(bool),
    /// The value of the field, or this default if the field is absent.
    Field(&'static str, bool),
}

/// Epsilon of the norms.
#[derive(Clone, Copy, Debug)]
pub enum Eps {
    /// The value of `rms_norm_eps`, which is required.
    Required,
    /// The value of `rms_norm_eps`, or this default.
    Default(f64),
    /// Always this value.
    Fixed(f64),
    /// The value of `rms_norm_eps`, with RMSNorm in place of LayerNorm; without it that of `layer_norm_eps`, or this
    /// default.
    OrLayer(f64),
}

/// Width of a head.
#[derive(Clone, Copy, Debug)]
pub enum HeadDim {
    /// The value of `head_dim`, or `hidden_size / num_attention_heads`.
    Stated,
    /// The value of `head_dim`; this default if the field is absent, or `hidden_size / num_attention_heads` if it is
    /// null.
    IfAbsent(usize),
    /// The value of `head_dim`, or this default.
    Default(usize),
    /// `hidden_size / num_attention_heads`, ignoring the config; every query head has its own key-value head.
    Divided,
}

/// Width of the MLP.
#[derive(Clone, Copy, Debug)]
pub enum FeedForward {
    /// The value of `intermediate_size`, which is required.
    Stated,
    /// The value of the row's field, or of this one.
    Or(&'static str),
    /// The value of the row's field, or the one that its list states for every layer.
    Listed,
    /// The value of `intermediate_size`, or this multiple of `hidden_size`.
    Multiple(usize),
    /// Two thirds of `block_ff_dim` or `intermediate_size` times `block_ffn_dim_multiplier`, rounded up to a multiple of
    /// `block_multiple_of`, unless `block_auto_adjust_ff_dim` is false (LFM2).
    Adjusted,
}

/// Linear layers that have a bias.
#[derive(Clone, Copy, Debug)]
pub struct BiasRules {
    /// True if q, k and v have one.
    pub qkv: Flag,
    /// True if the output projection of the attention has one.
    pub output: Flag,
    /// True if gate, up and down have one.
    pub mlp: Flag,
    /// True if the experts have them.
    pub experts: bool,
}

impl BiasRules {
    /// No biases.
    pub const NONE: Self = Self::all(Flag::Fixed(false));
    /// Biases of the attention only, if `attention_bias` is set.
    pub const ATTENTION: Self = {
        let flag = Flag::Field("attention_bias", false);
        BiasRules { qkv: flag, output: flag, ..Self::NONE }
    };

    /// Biases of attention and MLP by one flag.
    pub const fn all(flag: Flag) -> Self {
        BiasRules { qkv: flag, output: flag, mlp: flag, experts: false }
    }
}

/// Layers with a sliding window.
#[derive(Clone, Copy, Debug)]
pub enum Windows {
    /// No layer: `sliding_window` is not read.
    None,
    /// Every layer.
    Every,
    /// Every layer; `layer_types` takes precedence.
    Listed,
    /// Layers from `max_window_layers` (28) on, if `use_sliding_window` is set; `layer_types` takes precedence.
    Late,
    /// Layers with an even index; `layer_types` takes precedence.
    Even,
    /// Every layer except the last of each period, which the first of these fields states; `layer_types` takes
    /// precedence.
    ButLast {
        /// Fields of the period.
        fields: &'static [&'static str],
        /// Period without the fields.
        default: usize,
    },
    /// Every layer except the last of each period, `sliding_window_pattern` with this default; recounted behind the
    /// first `first_k_dense_replace` layers, which have a period of their own, `prefix_dense_sliding_window_pattern` (1).
    /// `layer_types` takes precedence.
    BehindDense(usize),
    /// Every layer except the last of each so many; `layer_types` takes precedence. The last layer has none (Gemma 4).
    ButEnd(usize),
    /// Layers without compressed entries.
    Uncompressed,
}

/// Layers whose queries and keys are not rotated (NoPE).
#[derive(Clone, Copy, Debug)]
pub enum NoRope {
    /// No layer: all are rotated.
    None,
    /// Layers with a 0 in `no_rope_layers`; without it the last of each `no_rope_layer_interval` (4).
    Listed,
    /// Layers without a window, in a model with a `sliding_window`.
    FullAttention,
    /// Layers without a window that have experts, or if `prefix_dense_sliding_window_pattern` (1) is not 1.
    FullAttentionButDense,
    /// All layers, unless `position_embedding_type` is `rope`.
    UnlessRope,
    /// All layers.
    All,
}

/// Rotary position embedding.
#[derive(Clone, Copy, Debug)]
pub struct RopeRules {
    /// Base if the config has none.
    pub theta: f64,
    /// Share of a head that is rotated if the config does not state it; `None` if a head is always rotated whole.
    pub partial: Option<f64>,
    /// Base of layers with a window if the config has none; `None` if all layers have the same parameters.
    pub local_theta: Option<f64>,
    /// Base of layers with compressed entries if `compress_rope_theta` is absent; the others have parameters of their
    /// own. `None` if there are no such layers.
    pub compressed_theta: Option<f64>,
    /// True if the config must have rotary parameters.
    pub required: bool,
    /// Layers that are not rotated.
    pub no_rope: NoRope,
    /// True if the rotated pairs are adjacent in a head, not half of its rotated part apart.
    pub interleaved: bool,
    /// True if `alpha` of a `dynamic` scaling stretches the base, whatever the length (HunYuan).
    pub alpha: bool,
}

impl RopeRules {
    /// Plain rotary embedding of whole heads.
    pub const PLAIN: Self = RopeRules {
        theta: 10_000.0,
        partial: None,
        local_theta: None,
        compressed_theta: None,
        required: false,
        no_rope: NoRope::None,
        interleaved: false,
        alpha: false,
    };
}

/// Constant factors of Granite and Cohere: fields of config.json with their defaults.
#[derive(Clone, Copy, Debug)]
pub struct ScaleRules {
    /// Factor of the embedding.
    pub embedding: Option<&'static str>,
    /// Factor of what attention and MLP add to the residual stream.
    pub residual: Option<&'static str>,
    /// Factor of the attention scores, instead of the inverse square root of the width of a head.
    pub attention: Option<&'static str>,
    /// Factor of the logits.
    pub logits: Option<LogitScale>,
}

/// Factor of the logits.
#[derive(Clone, Copy, Debug)]
pub struct LogitScale {
    /// Field.
    pub field: &'static str,
    /// Value if the field is absent.
    pub default: f64,
    /// True if logits are divided by it.
    pub divides: bool,
}

/// Factor of the attention scores: the inverse square root of this.
#[derive(Clone, Copy, Debug)]
pub enum QueryScale {
    /// The width of a head.
    Head,
    /// The value of the field, or this default.
    Field(&'static str, f64),
    /// 1: scores are not scaled.
    One,
}

/// Features that distinguish the layers of a model (Gemma 3n and 4).
#[derive(Clone, Copy, Debug)]
pub struct ByLayer {
    /// True if heads of layers without a window have their own width (`global_head_dim`, with this default), and with
    /// `attention_k_eq_v` their own number of keys, which then are the values too; `per_layer_config` states the same.
    pub global_heads: Option<usize>,
    /// True if the last `num_kv_shared_layers` read the keys and values of earlier layers, and with
    /// `use_double_wide_mlp` have MLPs of twice the width; with the default of the number.
    pub shared_kv: Option<usize>,
    /// True if layers read embeddings of their own (`hidden_size_per_layer_input`).
    pub inputs: bool,
    /// True if the states are multiplied by a number after each layer.
    pub scales: bool,
    /// True if rotated layers attend within chunks of `attention_chunk_size` positions.
    pub chunks: bool,
    /// True if the states are `altup_num_inputs` parallel streams, of which a layer computes the first and predicts and
    /// corrects the others, with a low-rank path of `laurel_rank` beside attention (Gemma 3n).
    pub streams: bool,
    /// True if gates of MLPs are cut off by `activation_sparsity_pattern`.
    pub sparsity: bool,
    /// True if the states are `hc_mult` parallel streams, which each half of a layer joins into its input, and mixes
    /// (DeepSeek-V4).
    pub hyper: bool,
}

impl ByLayer {
    /// Layers alike.
    pub const NONE: Self = ByLayer {
        global_heads: None,
        shared_kv: None,
        inputs: false,
        scales: false,
        chunks: false,
        streams: false,
        sparsity: false,
        hyper: false,
    };
}

/// Caps of scores and logits, `cap · tanh(x / cap)`, if their fields are absent; null removes a cap.
#[derive(Clone, Copy, Debug)]
pub struct Softcaps {
    /// Default of `attn_logit_softcapping`.
    pub attention: Option<f64>,
    /// Default of `final_logit_softcapping`.
    pub logits: Option<f64>,
}

/// Multi-head latent attention.
#[derive(Clone, Copy, Debug)]
pub struct LatentRules {
    /// True if the rotated pairs are adjacent in the weights.
    pub interleaved: Flag,
    /// Indexer that chooses the tokens that a query attends to.
    pub indexer: Option<IndexerRules>,
}

/// Indexer of sparse attention (DeepSeek Sparse Attention, arXiv 2512.02556, sec. 2.1).
#[derive(Clone, Copy, Debug)]
pub struct IndexerRules {
    /// Default of `index_n_heads`.
    pub heads: usize,
    /// Default of `index_head_dim`.
    pub dim: usize,
    /// Default of `index_topk`, the number of tokens that a query attends to.
    pub chosen: usize,
    /// True if the rotated pairs are adjacent in the weights.
    pub interleaved: bool,
    /// True if a layer may use the choice of an earlier one: by `indexer_types`, or else `index_topk_pattern`, or else
    /// `index_topk_freq` and `index_skip_topk_offset`.
    pub shared: bool,
}

/// Mixture of experts.
#[derive(Clone, Copy, Debug)]
pub struct ExpertRules {
    /// Field of the number of experts.
    pub count: &'static str,
    /// Field that is read if `count` is absent.
    pub count_alias: Option<&'static str>,
    /// Field of an expert's inner width.
    pub width: &'static str,
    /// Layers that have experts.
    pub layers: ExpertLayers,
    /// Experts that every token passes through.
    pub shared: SharedRules,
    /// Scores of the router.
    pub scores: Scores,
    /// Field that names them, and its values.
    pub scores_by: Option<(&'static str, &'static [(&'static str, Scores)])>,
    /// True if a token's weights are normalized to add up to 1.
    pub normalize: Flag,
    /// Default of `routed_scaling_factor`; `None` if there is no such factor.
    pub scale: Option<f64>,
    /// Choice among groups of experts.
    pub groups: Option<GroupRules>,
    /// True if a correction is added to the scores when experts are chosen.
    pub correction: bool,
    /// True if a dense checkpoint stores the correction as a matrix of one row (ERNIE 4.5).
    pub correction_row: bool,
    /// True if the router has a bias.
    pub bias: bool,
    /// True if a token is multiplied by an expert's weight before it enters it, not after.
    pub scales_input: bool,
    /// Flag without which there are no experts; `None` if there always are.
    pub enabled: Option<&'static str>,
    /// True if a model with 0 experts has none.
    pub optional: bool,
    /// True if experts, shared ones too, have a gate; false if they are `down(act(up(x)))`.
    pub gated: bool,
    /// Field of the width that the states are projected to for the experts, and their result back from, if it is stated.
    pub latent: Option<&'static str>,
    /// Field and its value, the default, with which the results of routed and shared experts are averaged, not added.
    pub mean: Option<(&'static str, &'static str)>,
    /// Dense MLP beside the experts.
    pub dense: DenseMlp,
    /// Fields that are supported with these values only.
    pub only: &'static [(&'static str, &'static [&'static str])],
    /// Defaults of `swiglu_alpha` and `swiglu_limit`, and the number that is added to up, if the activation is clamped.
    pub swiglu: Option<[f64; 3]>,
    /// Default of `num_hash_layers`, the number of first layers whose experts are chosen by the token; `mlp_layer_types`
    /// takes precedence. `None` if there are no such layers.
    pub hashed: Option<usize>,
    /// Form of the tensors that hold all experts of a layer, in checkpoints that have such tensors.
    pub fused: StackForm,
    /// True if checkpoints of the architecture are published with such tensors. The names in a checkpoint decide; this
    /// holds for a config alone.
    pub published_fused: bool,
}

/// Layers that have experts.
#[derive(Clone, Copy, Debug)]
pub enum ExpertLayers {
    /// Every layer.
    All,
    /// Every `decoder_sparse_step`-th layer, except `mlp_only_layers`.
    Sparse,
    /// Layers from `first_k_dense_replace` on, with this default.
    From(usize),
    /// The same; `mlp_layer_types` takes precedence.
    Listed(usize),
    /// The layers of `moe_layers`; without it every `interleave_moe_layer_step`-th (1).
    Interleaved,
    /// Every `moe_layer_interval`-th layer from `moe_layer_start_index` (1) to `moe_layer_end_index` (the last).
    Range,
    /// Layers that are experts in the list of blocks (Nemotron-H); none without such a layer.
    Blocks,
    /// Layers at `expert_layer_offset` (1) of each `expert_layer_period` (2); none with one expert.
    Period,
}

/// Experts that every token passes through.
#[derive(Clone, Copy, Debug)]
pub enum SharedRules {
    /// No shared experts.
    None,
    /// One MLP of the width `shared_expert_intermediate_size`, weighted by a gate.
    Gated,
    /// One MLP as wide as an expert.
    One,
    /// As many as this field states times the width of an expert.
    Counted(&'static str),
    /// One of the width in a field. Another field, of their number, must be 1 if it is stated.
    Stated {
        /// Field of the width.
        width: &'static str,
        /// Field of the number.
        count: &'static str,
    },
}

/// Factor of the queries that grows with the position.
#[derive(Clone, Copy, Debug)]
pub enum GrowthRule {
    /// No factor.
    None,
    /// In layers that are not rotated, by `attn_scale` and `floor_scale`, if `attn_temperature_tuning` is set (Llama 4).
    Unrotated,
    /// In every layer, by `llama_4_scaling_beta` and `original_max_position_embeddings` of the rotary parameters
    /// (Ministral 3).
    Rotary,
}

/// Choice of experts within the best groups only.
#[derive(Clone, Copy, Debug)]
pub struct GroupRules {
    /// True if a group is ranked by its best two experts, else by its best one.
    pub best_two: bool,
    /// Field and value that select this choice; `None` if it is always made.
    pub when: Option<(&'static str, &'static str)>,
}

impl HeadNorms {
    /// True if queries and keys are normed with weights.
    pub fn present(self) -> bool {
        !matches!(self, HeadNorms::Absent | HeadNorms::Plain)
    }
}
