//! Architectures of GGUF as data: one row of facts each. No code asks for an architecture by its name.
//!
//! A row states what llama.cpp's converter changes, which metadata keys the architecture has, and what its loader and graph
//! require without a key. Adding an architecture without new facts is one row in its family's file.

use std::fmt;

use super::order::RowOrder;
use super::recurrence::Recurrence;

/// An architecture of GGUF that is read and written. Two are equal when their names are.
#[derive(Clone, Copy)]
pub struct Architecture {
    /// Name in `general.architecture`.
    pub name: &'static str,
    /// `model_type` of the checkpoints that are written as it. Without experts, a file is read as the first.
    pub model_types: &'static [&'static str],
    /// `model_type` of files with windows, if it is another.
    pub windowed: Option<&'static str>,
    /// Activation of the MLP, under its name in `config.json`, and the field of its own that states it.
    pub activation: &'static str,
    /// Field of `config.json` for the activation.
    pub activation_field: &'static str,
    /// Another activation, which the key `hidden_activation` states.
    pub other_activation: Option<&'static str>,
    /// Fields that its `config.json` names differently: `(common name, its own)`.
    pub renamed: &'static [(&'static str, &'static str)],
    /// True if the norms are LayerNorms, whose epsilon has another key.
    pub layer_norms: bool,
    /// Epsilon of models whose `config.json` has no field for it.
    pub fixed_epsilon: Option<f64>,
    /// True if the weights of norms are stored with 1 added.
    pub norms_plus_one: bool,
    /// True if `post_attention_layernorm` is stored as `post_attention_norm`; else it is the norm before the MLP.
    pub post_attention_norm: bool,
    /// Order of the rows of q, k and v.
    pub rows: Rows,
    /// Modules of a layer with another name in the file than in other architectures: `(module, name)`; or tensors, whose whole
    /// name it is.
    pub own_names: &'static [(&'static str, &'static str)],
    /// Tensors that are several in the file, by their name in a layer.
    pub split: &'static [(&'static str, Split)],
    /// Tensors of a layer, of one number each, that a file has as a key of the same name with a number for each layer.
    pub listed: &'static [&'static str],
    /// True if a factor stands beside weights of any type.
    pub weight_factors: bool,
    /// Tensors of a layer that are named like the factor of a weight, and are vectors of the model.
    pub own_scales: &'static [&'static str],
    /// Tensors that are refused in other architectures, by the end of their names.
    pub tensors: &'static [&'static str],
    /// Keys that are refused in other architectures.
    pub keys: &'static [&'static str],
    /// Keys of constant factors, and the fields of `config.json` that they are.
    pub factors: &'static [(&'static str, &'static str)],
    /// Fields of `config.json` that llama.cpp fixes, for files, which do not state them.
    pub fixed: &'static [(&'static str, Fixed)],
    /// True if logits are divided by their factor.
    pub divided_logits: bool,
    /// Field that states whether heads of q and k are normed, if models differ.
    pub head_norms: Option<&'static str>,
    /// Number of experts of the model whose heads of q and k are not normed, if those of the others are, without weights.
    pub unnormed_with: Option<u16>,
    /// Biases that a field of `config.json` states.
    pub biases: &'static [Bias],
    /// Head that is the embedding.
    pub tied: Presence,
    /// True if the heads together must be as wide as the residual stream.
    pub heads_fill_width: bool,
    /// Field for the share of a head that is rotated; `None` if heads are rotated whole.
    pub partial: Option<&'static str>,
    /// Layers that are not rotated.
    pub unrotated: Unrotated,
    /// True if frequencies may have divisors (`rope_freqs`).
    pub rope_factors: bool,
    /// True if there may be divisors for short and for long contexts (LongRoPE).
    pub long_rope: bool,
    /// Form of YaRN.
    pub yarn: Yarn,
    /// Rotary base of layers with a window.
    pub local_theta: LocalTheta,
    /// Sliding windows.
    pub windows: Windows,
    /// Length of the chunks that rotated layers attend within, which no key states.
    pub chunk: Option<usize>,
    /// Growth of the queries in layers that are not rotated, which no key states: rate, period, and added positions.
    pub growth: Option<[f32; 3]>,
    /// True if layers differ in heads, width of the MLP and keys, and have embeddings of their own (Gemma 4).
    pub by_layer: bool,
    /// Sizes of parallel streams of states (Gemma 3n).
    pub streams: Option<FixedStreams>,
    /// True if a tokenizer with spaces as a character keeps its merges (`gemma4`).
    pub merged_tokens: bool,
    /// True if scores are not divided.
    pub unscaled: bool,
    /// Checkpoints of latent attention that are written although llama.cpp has one epsilon for all norms and their norms of
    /// latents another.
    pub one_epsilon: &'static [&'static str],
    /// Number of layers of the model whose scores are divided by the root of `hidden_size / heads`; `None` if all models divide
    /// by the root of a head's width, and no field says otherwise.
    pub wide_scale: Option<usize>,
    /// True if the key `use_parallel_residual` states where the MLP stands.
    pub parallel_key: bool,
    /// True if attention is latent.
    pub latent: bool,
    /// Indexers of sparse attention.
    pub indexer: Indexers,
    /// Recurrent mixers.
    pub recurrence: Option<Recurrence>,
    /// True if the file has numbers for each head of a recurrent mixer as columns, and the weights of its norm by groups.
    pub columns_of_heads: bool,
    /// True if a key must state how many frequencies belong to each coordinate of a position.
    pub sections: bool,
    /// True if a key must state the epsilon of LayerNorms too, which only other models have.
    pub both_epsilons: bool,
    /// Mixture of experts.
    pub experts: Experts,
    /// True if gate and up of the experts are one tensor, one after the other. Files of both forms are read.
    pub joined_experts: bool,
    /// `alpha` and `limit` of the experts' SwiGLU, which no key states.
    pub swiglu: Option<(f32, f32)>,
}

/// Order of rows that differs from Hugging Face's.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Rows {
    /// The same order.
    Same,
    /// The halves of each head of q and k are interleaved.
    Interleaved,
    /// q, k and v, which a checkpoint joins head by head, stand one after the other.
    ByHead,
}

/// Form in which a tensor is split into several of a layer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Split {
    /// Biases of experts; of several, elements take turns.
    Biases(&'static [&'static str]),
    /// Projections of the latent to keys and to values.
    KeysAndValues([&'static str; 2]),
    /// The two halves of the rows.
    Halves([&'static str; 2]),
    /// Projections to q, k, v and to z, which a checkpoint joins key head by key head.
    KeyGroups([&'static str; 2]),
}

/// Values of a tensor as a file has them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Stored {
    /// As they are.
    Same,
    /// With 1 added.
    PlusOne,
    /// Rates of decay, of which a checkpoint has the logarithm of the negative.
    Decay,
}

impl Stored {
    /// Value in the file.
    pub fn to_gguf(self, value: f32) -> f32 {
        match self {
            Stored::Same => value,
            Stored::PlusOne => value + 1.0,
            Stored::Decay => -f64::from(value).exp() as f32,
        }
    }

    /// Value in the checkpoint, to a rounding.
    pub fn to_hf(self, value: f32) -> f32 {
        match self {
            Stored::Same => value,
            Stored::PlusOne => value - 1.0,
            Stored::Decay => (-f64::from(value)).ln() as f32,
        }
    }
}

/// A field of `config.json` that states whether some linear layers have a bias.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Bias {
    /// Name of the field.
    pub field: &'static str,
    /// Tensors of a layer with the bias, without `.bias`.
    pub tensors: &'static [&'static str],
    /// Value of the field that llama.cpp loads.
    pub presence: Presence,
}

/// Possible values of a feature.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Presence {
    /// Never there.
    Absent,
    /// There or not.
    Optional,
    /// Always there.
    Required,
}

impl Presence {
    /// True if the feature may be `present`.
    pub fn allows(self, present: bool) -> bool {
        self == Presence::Optional || (self == Presence::Required) == present
    }
}

/// Value of a field of `config.json`.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Fixed {
    /// A flag.
    Flag(bool),
    /// A size.
    Size(u64),
    /// Another number.
    Number(f64),
}

/// Layers whose queries and keys are not rotated.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Unrotated {
    /// No layer.
    None,
    /// The last of each so many layers.
    LastOf(usize),
    /// Layers without a window, in models that have windows.
    WithoutWindow,
    /// Layers without a window.
    NotWindowed,
    /// Layers without a window that have experts.
    NotWindowedButDense,
    /// Every layer.
    All,
    /// Every layer or none, which the key `rope.scaling.finetuned` states.
    Switched,
}

/// Layers with an indexer of sparse attention.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Indexers {
    /// No layer.
    None,
    /// Every layer.
    Every,
    /// Those that a key lists; the others use the choice of the last one before them.
    Listed,
}

/// Rotary base of layers with a window.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum LocalTheta {
    /// There is none of their own.
    None,
    /// A key states it; this without the key.
    Default(f64),
    /// A key states it; without the key it is that of the other layers.
    Same,
}

/// Sliding windows that llama.cpp computes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Windows {
    /// No windows: keys are not read.
    Ignored,
    /// No windows, which a key of 0 states.
    Zero,
    /// Windows on all layers but the last of each period.
    Periodic {
        /// Period where no key states it.
        period: u32,
        /// True if a key may state another period.
        stated: bool,
        /// Number of layers of the only model with windows; `None` if any model may have them.
        only_with: Option<usize>,
    },
    /// Windows on the layers that a key lists.
    Listed {
        /// Period of the layers without a window where no key lists them.
        period: u32,
    },
}

/// Form of YaRN, the scaling of rotary frequencies.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Yarn {
    /// As in its reference.
    Standard,
    /// A key states the multiplier of the logarithm in the factor of scores (DeepSeek).
    Multiplier,
    /// Rotated values keep their length (DeepSeek-V4).
    Unscaled,
    /// The ends of the ramp are not rounded (gpt-oss).
    Untruncated,
    /// The factor of angles is divided by that with a multiplier of the logarithm, which a key states (Ministral 3).
    Ratio,
}

/// Mixture of experts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Experts {
    /// No experts.
    None,
    /// Experts in some models, which are then of this `model_type`.
    Some {
        /// `model_type` of the models with experts.
        model_type: &'static str,
    },
    /// Experts in every layer.
    Every {
        /// Field of the number of experts.
        count: &'static str,
        /// Field of an expert's inner width.
        width: &'static str,
        /// True if weights are normalized; `None` if no field states it.
        normalized: Option<bool>,
        /// Field of the width of the shared expert, which has a gate.
        shared: Option<&'static str>,
    },
    /// Experts after dense layers or in every layer, with corrected scores, normalized weights and perhaps shared
    /// experts without a gate.
    Routed {
        /// Field of the number of experts.
        count: &'static str,
        /// Field of the number of experts per token.
        used: &'static str,
        /// Field of an expert's inner width.
        width: &'static str,
        /// Field of the first layer with experts; `None` if every layer has them.
        first: Option<&'static str>,
        /// Field of the number of shared experts.
        shared: Option<&'static str>,
        /// True if scores are sigmoids, else a softmax.
        sigmoid: bool,
        /// True if keys state a factor of the weights, and whether they are normalized.
        scaled: bool,
        /// True if a key states the number of layers from one with experts to the next, which is 1.
        stepped: bool,
    },
    /// Experts in the last of each so many layers, which a key states, with a shared one as wide (Llama 4).
    Interleaved {
        /// Field of the number of experts.
        count: &'static str,
        /// Field of an expert's inner width.
        width: &'static str,
        /// Field of the inner width of the other layers.
        dense: &'static str,
    },
    /// Experts as wide as the MLP, in layers at one place of each period, in some models (Jamba).
    Periodic {
        /// Field of the number of experts.
        count: &'static str,
    },
    /// Experts after dense layers; their mean with the shared ones, if there are any (Cohere 2).
    Averaged {
        /// Field of the number of experts.
        count: &'static str,
        /// Field of an expert's inner width.
        width: &'static str,
        /// Field of the inner width of dense layers.
        dense: &'static str,
        /// Field of the first layer with experts.
        first: &'static str,
        /// Field of the number of shared experts.
        shared: &'static str,
        /// Field of the kind of scores.
        scores: &'static str,
    },
    /// Experts beside the MLP of every layer, which is stored as a shared expert (Granite 4).
    BesideShared {
        /// Field of the number of experts.
        count: &'static str,
        /// Field of the inner width of the MLP.
        shared: &'static str,
    },
    /// Experts in layers that have nothing else, without a gate, routed as in DeepSeek-V3, perhaps through a latent
    /// (Nemotron-H).
    Blocks {
        /// Field of the inner width of the shared expert.
        shared: &'static str,
        /// Field of the width of the latent.
        latent: &'static str,
    },
    /// Experts in every layer, in the first ones chosen by the token, with a shared one and a clamped SwiGLU (DeepSeek-V4).
    Hashed,
    /// Experts beside the MLP of every layer, in some models (Gemma 4).
    Beside {
        /// Field that is true in models with experts.
        enabled: &'static str,
        /// Field of the number of experts.
        count: &'static str,
        /// Field of the number of experts per token.
        used: &'static str,
        /// Field of an expert's inner width.
        width: &'static str,
    },
    /// Experts after dense layers, with shared experts, scaled and grouped (DeepSeek).
    Grouped {
        /// `model_type` of models with softmax scores.
        softmax: &'static str,
    },
}

/// Sizes of a model with parallel streams.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct FixedStreams {
    /// Number of streams.
    pub count: usize,
    /// Inner width of the low-rank path beside attention.
    pub laurel: usize,
    /// Width of a layer's embedding.
    pub inputs: usize,
    /// Layers with keys and values of their own, which come first; the others read those of the last two.
    pub own_keys: usize,
    /// Layers that cut off their gates, which come first.
    pub cut: usize,
    /// Share of a gate's values that they cut off.
    pub share: f64,
    /// Soft cap of the logits.
    pub cap: f32,
}

impl Architecture {
    /// `model_type` of a file that does not state another.
    pub fn model_type(&self) -> &'static str {
        self.model_types.first().copied().unwrap_or("")
    }

    /// Row order in a model with these numbers of heads.
    pub fn row_order(&self, heads: usize, kv_heads: usize) -> RowOrder {
        RowOrder {
            interleaved: (self.rows == Rows::Interleaved).then_some((heads, kv_heads)),
            by_head: (self.rows == Rows::ByHead).then_some(heads),
            delta: None,
        }
    }

    /// Form in which the values of the tensor with this Hugging Face name are stored.
    pub fn stored_as(&self, hf: &str) -> Stored {
        // The norm of a mixer's result has plain weights.
        let raised = hf.ends_with("norm.weight") && !hf.ends_with("linear_attn.norm.weight");
        match self.norms_plus_one && raised {
            true => Stored::PlusOne,
            false if hf.ends_with(".A_log") => Stored::Decay,
            false => Stored::Same,
        }
    }

    /// Returns the key that lists the tensor with this GGUF name, if the file does not have it as a tensor.
    pub fn listed_as(&self, stored: &str) -> Option<&'static str> {
        let (_, name) = stored.strip_prefix("blk.")?.split_once('.')?;
        self.listed.iter().copied().find(|key| *key == name)
    }

    /// Shape in the file of the vector with this Hugging Face name and shape, in a model whose mixers have `groups` groups.
    pub fn stored_shape(&self, hf: &str, shape: &[usize], groups: usize) -> Vec<usize> {
        match *shape {
            [_, 1, _] if self.recurrence.is_some_and(|mixers| mixers.whole_convolutions) => shape.to_vec(),
            [] => vec![1],
            [1, 1, heads, 1] => vec![heads, 1],
            [channels, 1, kernel] => vec![channels, kernel],
            [heads] if self.columns_of_heads && [".A_log", ".D"].iter().any(|end| hf.ends_with(end)) => {
                vec![heads, 1]
            }
            [width]
                if self.columns_of_heads && is_norm_of_mixer(hf) && width.is_multiple_of(groups.max(1)) =>
            {
                vec![groups.max(1), width / groups.max(1)]
            }
            _ => shape.to_vec(),
        }
    }

    /// Key of the epsilon in norms.
    pub fn epsilon_key(&self) -> &'static str {
        if self.layer_norms { "attention.layer_norm_epsilon" } else { "attention.layer_norm_rms_epsilon" }
    }

    /// True if a model of so many layers may have windows.
    pub fn has_windows(&self, layers: usize) -> bool {
        match self.windows {
            Windows::Periodic { only_with, .. } => only_with.is_none_or(|only| only == layers),
            Windows::Listed { .. } => true,
            _ => false,
        }
    }

    /// True if it has this key, which is refused in others.
    pub fn has_key(&self, key: &str) -> bool {
        self.keys.contains(&key) || (key == "expert_count" && self.experts != Experts::None)
    }

    /// True if it has tensors with this end of their names, which are refused in others.
    pub fn has_tensor(&self, suffix: &str) -> bool {
        let expert = ["ffn_gate_inp.weight", "ffn_gate_exps.weight"].contains(&suffix);
        self.tensors.contains(&suffix) || (expert && self.experts != Experts::None)
    }

    /// True if the tensor with this GGUF name is a vector of the model, not the factor of a weight.
    pub fn is_own_scale(&self, stored: &str) -> bool {
        let of_layer = stored.strip_prefix("blk.").and_then(|rest| rest.split_once('.'));
        of_layer.is_some_and(|(_, name)| self.own_scales.contains(&name))
    }

    /// Square of the divisor of attention scores in a model of these sizes.
    pub fn query_scale(&self, layers: usize, hidden: usize, heads: usize, head_dim: usize) -> usize {
        match self.wide_scale {
            _ if self.unscaled => 1,
            Some(wide) if wide == layers => hidden.checked_div(heads).unwrap_or(head_dim),
            _ => head_dim,
        }
    }
}

/// True for the weights of the norm of a recurrent mixer's result.
fn is_norm_of_mixer(hf: &str) -> bool {
    ["mamba.norm.weight", "mixer.norm.weight"].iter().any(|end| hf.ends_with(end))
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
