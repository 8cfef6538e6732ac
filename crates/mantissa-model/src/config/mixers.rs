//! Token mixing of layers: attention, or a recurrent mixer. A mixer has a file here with its sizes and the fields that state
//! them, and one in [`crate::mixer`] with its computation.

pub(crate) mod blocks;
mod channel_delta;
pub(crate) mod compressed;
mod delta;
mod list;
pub(crate) mod rules;
mod selective;
mod short;
mod state_space;

pub use self::channel_delta::ChannelDelta;
pub use self::compressed::{CompressedAttention, CompressedIndex, Compression};
pub use self::delta::GatedDelta;
pub use self::selective::SelectiveScan;
pub use self::short::ShortConvolution;
pub use self::state_space::{ResultNorm, StateSpace};

pub(crate) use self::list::rules_of;

/// Token mixing of a layer: its first half.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Mixing {
    /// Attention, with keys and values in the cache.
    Attention,
    /// A [`Recurrent`] mixer, with a state of constant size in the cache.
    Recurrent,
    /// Attention and a [`Recurrent`] mixer on the same input, whose results are added.
    Both,
    /// None: the layer is an MLP.
    None,
}

impl Mixing {
    /// True if the layer has attention, and so keys and values.
    pub fn attends(self) -> bool {
        matches!(self, Mixing::Attention | Mixing::Both)
    }

    /// True if the layer has a recurrent mixer, and so a state.
    pub fn recurs(self) -> bool {
        matches!(self, Mixing::Recurrent | Mixing::Both)
    }
}

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
    pub(super) fn with_entries(self, compression: Option<Compression>) -> Self {
        match self {
            Recurrent::CompressedAttention(mixer) => {
                Recurrent::CompressedAttention(CompressedAttention { compression, ..mixer })
            }
            other => other,
        }
    }
}
