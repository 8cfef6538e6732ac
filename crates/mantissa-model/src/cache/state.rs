//! State of a layer with a recurrent mixer, for one sequence, in f32.

use crate::memory::zeros;
use crate::mixer::{StateShape, States};

/// State of one layer, and a copy of it from before the last pass.
#[derive(Debug)]
pub(super) struct StateCache {
    tail: Vec<f32>,
    heads: Vec<f32>,
    /// Part of the tail that passes change, then heads.
    saved: Vec<f32>,
    /// Values of that part.
    changed: usize,
}

impl StateCache {
    /// Allocates a state; `None` if there is not enough memory.
    pub(super) fn plan(shape: StateShape) -> Option<Self> {
        let heads = zeros(shape.heads * shape.head)?;
        let changed = shape.tail - shape.grows;
        Some(StateCache { tail: zeros(shape.tail)?, heads, saved: zeros(shape.changed())?, changed })
    }

    /// Bytes that [`plan`](Self::plan) allocates.
    pub(super) fn bytes_needed(shape: StateShape) -> u64 {
        shape.bytes().saturating_add(4 * shape.changed() as u64)
    }

    /// Copies the state, for [`restore`](Self::restore).
    pub(super) fn save(&mut self) {
        let (tail, heads) = self.saved.split_at_mut(self.changed);
        tail.copy_from_slice(&self.tail[..self.changed]);
        heads.copy_from_slice(&self.heads);
    }

    /// Brings back the state of the last [`save`](Self::save).
    pub(super) fn restore(&mut self) {
        let (tail, heads) = self.saved.split_at(self.changed);
        self.tail[..self.changed].copy_from_slice(tail);
        self.heads.copy_from_slice(heads);
    }

    /// The state, for a pass.
    pub(super) fn states(&mut self) -> States<'_> {
        States { tails: &mut self.tail, heads: &mut self.heads, slots: 1, of: &[0] }
    }
}
