//! The list of mixers.

use mantissa_arch::MixerKind;

use super::rules::MixerRules;
use super::{channel_delta, compressed, delta, selective, short, state_space};

/// Returns the rules of a kind of mixer.
pub(crate) fn rules_of(kind: MixerKind) -> MixerRules {
    match kind {
        MixerKind::JoinedGatedDelta => delta::JOINED_GATED_DELTA,
        MixerKind::GatedDelta => delta::GATED_DELTA,
        MixerKind::ChannelDelta => channel_delta::CHANNEL_DELTA,
        MixerKind::ShortConvolution => short::SHORT_CONVOLUTION,
        MixerKind::SelectiveScan => selective::SELECTIVE_SCAN,
        MixerKind::StateSpace => state_space::STATE_SPACE,
        MixerKind::StateSpaceBlocks => state_space::STATE_SPACE_BLOCKS,
        MixerKind::StateSpaceAlone => state_space::STATE_SPACE_ALONE,
        MixerKind::ParallelStateSpace => state_space::PARALLEL_STATE_SPACE,
        MixerKind::Compressed => compressed::COMPRESSED,
    }
}
