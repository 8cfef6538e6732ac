//! Recurrent mixers of an architecture of GGUF as data: which layers have them, and what a file has for the fields of
//! `config.json`. The mixer states what is written (`Mixer::gguf_numbers` of `mantissa-model`).

use super::architecture::Fixed;

/// Recurrent mixers of an architecture.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Recurrence {
    /// Keys or tensors of a file that state the layers that have them.
    pub layers: MixerLayers,
    /// Fields of `config.json` that state these layers.
    pub types: LayerTypes,
    /// Fields of `config.json` under the names of [`crate::Architecture`], and what a file has for them.
    pub fields: &'static [&'static [(&'static str, Stated)]],
    /// True if value heads of gated DeltaNet are in ggml's order ([`super::RowOrder`]); `None` for other mixers.
    pub tiled: Option<bool>,
    /// True if llama.cpp requires a mixer twice as wide as the states.
    pub doubled: bool,
    /// True if the weights of convolutions keep their middle dimension of 1.
    pub whole_convolutions: bool,
    /// True if the mixer attends, with windows and a rotary base of its own.
    pub attends: bool,
}

impl Recurrence {
    /// Mixers in layers for which `attention.head_count_kv` lists 0, or `layer_types` says `linear_attention`.
    pub const PLAIN: Self = Recurrence {
        layers: MixerLayers::WithoutKeys,
        types: LayerTypes::Named("linear_attention"),
        fields: &[],
        tiled: None,
        doubled: false,
        whole_convolutions: false,
        attends: false,
    };
}

/// Source of the layers with a mixer in a file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum MixerLayers {
    /// `attention.head_count_kv` lists 0 for them.
    WithoutKeys,
    /// `full_attention_interval` is the period of the others, or `attention.recurrent_layers` lists them.
    Interval,
    /// Every layer has one.
    Every,
}

/// Source of the layers with a mixer in `config.json`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LayerTypes {
    /// `layer_types`, with this name.
    Named(&'static str),
    /// Fields of the period of the other layers, and of the place in it.
    Period([&'static str; 2]),
    /// `layers_block_type`: a layer for which `feed_forward_length` lists another number than 0 is an MLP alone, and no other
    /// layer has one.
    Blocks,
    /// Nothing: every layer has one.
    None,
}

/// Value of a file for a field of `config.json`; keys are those after the architecture's name.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Stated {
    /// The size in a key.
    Size(&'static str),
    /// The number in a key.
    Number(&'static str),
    /// The sizes that a key lists for the layers.
    Sizes(&'static str),
    /// The quotient of the sizes in two keys.
    Quotient([&'static str; 2]),
    /// The quotient of the sizes in two keys, if it is whole; else the first, as another field.
    Multiple([&'static str; 2], &'static str),
    /// One of two names: the first if the flag in a key is true, or absent.
    Switched(&'static str, [&'static str; 2]),
    /// True if there are tensors with this end of their names.
    Tensor(&'static str),
    /// Nothing: llama.cpp fixes it.
    Fixed(Fixed),
    /// Nothing, unless other keys state it: this is its default.
    Default(Fixed),
    /// A number that means that there is none, so the field is left out.
    Removed,
}
