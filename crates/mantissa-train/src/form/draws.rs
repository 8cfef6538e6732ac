//! Values that the operands of one step share: random numbers by seed, step and place, and amax histories.

use mantissa_model::LinearKind;
use mantissa_num::round::philox4x32_10;

use super::history::{Histories, History};
use crate::health::{LostSignals, OperandPlace, Watch};
use crate::policy::{Gemm, Side};
use crate::store::StoreRef;

/// Step and batch of which operands are made.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Draw {
    /// Step number.
    pub(crate) step: u64,
    /// Batch within the step (gradient accumulation).
    pub(crate) batch: u32,
}

/// Random numbers and amax histories of a step.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Draws<'a> {
    pub(crate) seed: u64,
    pub(crate) draw: Draw,
    pub(crate) histories: &'a Histories,
    pub(crate) watch: &'a Watch,
    pub(crate) lost: &'a LostSignals,
    pub(crate) threads: usize,
}

/// Inputs of a form from the run: seed of its random numbers, threads, history of its amax.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Making<'a> {
    pub(crate) seed: u64,
    /// Seed of the signs of the matmul's rotation.
    pub(crate) signs: u64,
    pub(crate) history: Option<&'a History>,
    /// Learned scales of the blocks, `[lines, blocks]`.
    pub(crate) scales: Option<StoreRef<'a>>,
    /// amax that a global scale follows from, in place of the operand's own: the amax of all fused layers.
    pub(crate) amax: Option<f32>,
    pub(crate) threads: usize,
    /// Watch of the roundings, with the operand's place.
    pub(crate) watch: Option<(&'a Watch, OperandPlace)>,
    /// Notes operands that become 0, by the operand's place.
    pub(crate) lost: Option<(&'a LostSignals, OperandPlace)>,
}

/// Linear layer among the decoder's.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct LinearPlace {
    pub(crate) layer: usize,
    pub(crate) kind: LinearKind,
    /// Number of linear layers of the decoder before it.
    pub(crate) index: usize,
}

/// Position of an operand among all.
fn slot(place: usize, gemm: Gemm, side: Side) -> usize {
    place * 6 + gemm as usize * 2 + side as usize
}

impl<'a> Draws<'a> {
    /// Returns what making an operand needs. Inputs that several linear layers share take the first one's place.
    pub(crate) fn making(&self, place: LinearPlace, gemm: Gemm, side: Side) -> Making<'a> {
        let LinearPlace { layer, kind, index } = place;
        let slot = slot(index, gemm, side);
        Making {
            seed: self.random(slot as u32),
            // The same for both operands and for all linear layers that share an input.
            signs: self.random(u32::MAX - (layer * 3 + gemm as usize) as u32),
            history: self.histories.get(slot),
            scales: None,
            amax: None,
            threads: self.threads,
            watch: (!self.watch.is_off()).then_some((self.watch, (layer, kind, gemm, side))),
            lost: Some((self.lost, (layer, kind, gemm, side))),
        }
    }

    /// Returns a seed for `place` in this step.
    fn random(&self, place: u32) -> u64 {
        let Draw { step, batch } = self.draw;
        // Steps beyond 2^32 repeat their seeds.
        let words =
            philox4x32_10([step as u32, batch, place, 1], [self.seed as u32, (self.seed >> 32) as u32]);
        u64::from(words[0]) << 32 | u64::from(words[1])
    }
}
