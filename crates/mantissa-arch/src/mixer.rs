//! Kinds of recurrent mixers.

/// Kind of a recurrent mixer, with the way in which its config states sizes and layers.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum MixerKind {
    /// Gated DeltaNet with one projection to queries, keys, values and gate, and one to the rates (Qwen3-Next).
    JoinedGatedDelta,
    /// Gated DeltaNet with projections of their own for the gate and each rate (Qwen3.5).
    GatedDelta,
    /// Kimi delta attention, with a decay for each channel.
    ChannelDelta,
    /// Gated short convolution (LFM2).
    ShortConvolution,
    /// Mamba.
    SelectiveScan,
    /// Mamba-2 in the layers that a list of types names.
    StateSpace,
    /// Mamba-2 in some of the blocks of a list, each of which has one half of a layer (Nemotron-H).
    StateSpaceBlocks,
    /// Mamba-2 as the whole of every layer (Mamba-2).
    StateSpaceAlone,
    /// Mamba-2 beside attention in every layer (Falcon-H1).
    ParallelStateSpace,
    /// Attention to a window and to compressed entries (DeepSeek-V4).
    Compressed,
}
