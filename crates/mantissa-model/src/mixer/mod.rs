//! Recurrent token mixers: the first half of layers that keep a state instead of keys and values of every token.
//!
//! A mixer lists its parameters, projects the layer's input, and mixes the tokens of each sequence into the input
//! of its output projection. Its state is in f32: the last inputs of a causal convolution and, for most mixers, one matrix
//! per head, all of constant size; or the keys of a window and entries for earlier tokens (`compressed`). Tokens are read in
//! order, so a sequence has the same bits in any split into passes, and heads are independent, so it has the same bits on any
//! number of threads.
//!
//! This file is the list of mixers. A mixer is a file here, with its sizes, the fields of `config.json` that state them, its
//! parameters, its computation, and its keys and limits in GGUF (trait `Mixer`).

mod blocks;
mod channel_delta;
mod compressed;
mod convolution;
mod delta;
pub(crate) mod entries;
mod frame;
mod gguf;
pub(crate) mod halves;
pub(crate) mod rules;
mod selective;
mod short;
mod state_space;
#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests;

use mantissa_store::convention::gguf::DeltaHeads;

pub use self::channel_delta::ChannelDelta;
pub use self::compressed::CompressedAttention;
pub use self::delta::GatedDelta;
pub use self::entries::{CompressedIndex, Compression};
use self::frame::Mixer;
pub(crate) use self::frame::{MixRows, MixerLinear, softplus};
pub use self::frame::{StateShape, States};
pub use self::gguf::{GgufAround, Uncomputed};
use self::halves::Halves;
pub use self::halves::Mixing;
use self::rules::{Around, MixerRules};
pub use self::selective::SelectiveScan;
pub use self::short::ShortConvolution;
pub use self::state_space::{ResultNorm, StateSpace};
use crate::fields::{ConfigError, Fields};

/// Recurrent mixer of a model, the same in all of its recurrent layers but for compressed entries.
#[derive(Clone, Copy, Debug, PartialEq)]
#[non_exhaustive]
pub enum Recurrent {
    /// Gated DeltaNet.
    GatedDelta(GatedDelta),
    /// Kimi delta attention.
    ChannelDelta(ChannelDelta),
    /// Gated short convolution.
    ShortConvolution(ShortConvolution),
    /// Mamba-2.
    StateSpace(StateSpace),
    /// Mamba.
    SelectiveScan(SelectiveScan),
    /// Compressed attention.
    CompressedAttention(CompressedAttention),
}

impl Recurrent {
    /// Returns the mixer of a layer with these compressed entries; other mixers are the same in every layer.
    pub(crate) fn with_entries(self, compression: Option<Compression>) -> Self {
        match self {
            Recurrent::CompressedAttention(mixer) => {
                Recurrent::CompressedAttention(CompressedAttention { compression, ..mixer })
            }
            other => other,
        }
    }
}

impl Recurrent {
    /// Returns the mixer.
    pub(crate) fn mixer(&self) -> &dyn Mixer {
        match self {
            Recurrent::GatedDelta(mixer) => mixer,
            Recurrent::ChannelDelta(mixer) => mixer,
            Recurrent::ShortConvolution(mixer) => mixer,
            Recurrent::StateSpace(mixer) => mixer,
            Recurrent::SelectiveScan(mixer) => mixer,
            Recurrent::CompressedAttention(mixer) => mixer,
        }
    }

    /// Size of the state of one sequence of up to `context` tokens in one layer.
    pub fn state(&self, context: usize) -> StateShape {
        self.mixer().state(context)
    }

    /// Width of the input of the output projection.
    pub fn width(&self) -> usize {
        self.mixer().width()
    }

    /// Keys of a GGUF file after the architecture's name, and their numbers.
    pub fn gguf_numbers(&self) -> Vec<(&'static str, usize)> {
        self.mixer().gguf_numbers()
    }

    /// Checks that llama.cpp computes the mixer.
    ///
    /// # Errors
    /// [`Uncomputed`] for the first value that it does not.
    pub fn check_gguf(&self, around: &GgufAround) -> Result<(), Uncomputed> {
        self.mixer().check_gguf(around)
    }

    /// What llama.cpp computes differently, in a model whose norms have `eps`.
    pub fn gguf_note(&self, eps: f32) -> Option<String> {
        self.mixer().gguf_note(eps)
    }

    /// Heads of gated DeltaNet, whose rows GGUF files may hold in another order.
    pub fn delta_heads(&self) -> Option<DeltaHeads> {
        self.mixer().delta_heads()
    }

    /// Groups of heads, into which GGUF files split the weights of the mixer's norm.
    pub fn groups(&self) -> usize {
        self.mixer().groups()
    }

    /// Epsilon of the mixer's norm, if a GGUF file states it as that of the model.
    pub fn gguf_eps(&self) -> Option<f32> {
        self.mixer().gguf_eps()
    }

    /// Rows of each part of the input projection that constant factors multiply apart; none if one factor is for all.
    pub fn input_parts(&self) -> Vec<usize> {
        self.mixer().input_parts()
    }

    /// Name for messages.
    pub fn name(&self) -> &'static str {
        self.mixer().name()
    }
}

/// Parses a mixer.
type ParseMixer = Box<dyn Fn(Fields<'_>, &Around) -> Result<Recurrent, ConfigError>>;

/// Rules of a mixer of the list.
pub(crate) struct Rules {
    /// Parses the mixer.
    pub(crate) mixer: ParseMixer,
    /// Parses the halves of each of this number of layers.
    pub(crate) halves: fn(Fields<'_>, usize) -> Result<Halves, ConfigError>,
    /// Parses the number of layers, if `num_hidden_layers` does not state it.
    pub(crate) layers: Option<fn(Fields<'_>) -> Result<usize, ConfigError>>,
}

impl Rules {
    fn new<M: 'static>(rules: MixerRules<M>, of: fn(M) -> Recurrent) -> Self {
        let MixerRules { mixer, halves, layers } = rules;
        Rules { mixer: Box::new(move |fields, around| mixer(fields, around).map(of)), halves, layers }
    }

    /// Finds the rules that architectures call by this name.
    pub(crate) fn find(name: &str) -> Option<Self> {
        Some(match name {
            "gated delta" => Self::new(delta::GATED_DELTA, Recurrent::GatedDelta),
            "joined gated delta" => Self::new(delta::JOINED_GATED_DELTA, Recurrent::GatedDelta),
            "channel delta" => Self::new(channel_delta::CHANNEL_DELTA, Recurrent::ChannelDelta),
            "short convolution" => Self::new(short::SHORT_CONVOLUTION, Recurrent::ShortConvolution),
            "selective scan" => Self::new(selective::SELECTIVE_SCAN, Recurrent::SelectiveScan),
            "state space" => Self::new(state_space::STATE_SPACE, Recurrent::StateSpace),
            "state space blocks" => Self::new(state_space::STATE_SPACE_BLOCKS, Recurrent::StateSpace),
            "state space alone" => Self::new(state_space::STATE_SPACE_ALONE, Recurrent::StateSpace),
            "parallel state space" => Self::new(state_space::PARALLEL_STATE_SPACE, Recurrent::StateSpace),
            "compressed attention" => Self::new(compressed::COMPRESSED, Recurrent::CompressedAttention),
            _ => return None,
        })
    }
}
