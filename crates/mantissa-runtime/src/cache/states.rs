//! States of recurrent mixers: of every sequence, for each layer that has one, in f32.
//!
//! A state cannot be cut back to fewer tokens, and is overwritten by the next pass. So a sequence begins like another
//! only where that other stands now, by a copy of its states.

use mantissa_model::mixer::{StateShape, States};
use mantissa_model::{LoadError, zeros};

/// States of all sequences, by slot.
#[derive(Debug, Default)]
pub struct StatePool {
    layers: Vec<LayerStates>,
    slots: usize,
}

/// States of one layer.
#[derive(Debug)]
struct LayerStates {
    shape: StateShape,
    /// `[slots, tail]`.
    tails: Vec<f32>,
    /// `[heads, slots, values of a head]`.
    heads: Vec<f32>,
}

impl StatePool {
    /// Allocates the states of `slots` sequences in layers of these shapes.
    ///
    /// # Errors
    /// [`LoadError::Memory`].
    pub fn plan(shapes: &[StateShape], slots: usize) -> Result<Self, LoadError> {
        let bytes = shapes.iter().fold(0u64, |sum, shape| sum.saturating_add(shape.bytes()));
        let memory =
            || LoadError::Memory { what: "recurrent states", bytes: bytes.saturating_mul(slots as u64) };
        let layer = |&shape: &StateShape| {
            let heads = zeros(slots.checked_mul(shape.heads * shape.head)?)?;
            Some(LayerStates { shape, tails: zeros(slots.checked_mul(shape.tail)?)?, heads })
        };
        let layers = shapes.iter().map(layer).collect::<Option<_>>().ok_or_else(memory)?;
        Ok(StatePool { layers, slots })
    }

    /// True if no layer has a state.
    pub fn is_empty(&self) -> bool {
        self.layers.is_empty()
    }

    /// Copies the states of slot `from` to slot `to`.
    pub fn copy(&mut self, from: usize, to: usize) {
        let StatePool { layers, slots } = self;
        for LayerStates { shape, tails, heads } in layers {
            tails.copy_within(from * shape.tail..(from + 1) * shape.tail, to * shape.tail);
            for head in heads.chunks_exact_mut((*slots * shape.head).max(1)) {
                head.copy_within(from * shape.head..(from + 1) * shape.head, to * shape.head);
            }
        }
    }

    /// Returns the states of layer `index` of those with a mixer, for the sequences in the slots `of`.
    pub fn layer<'a>(&'a mut self, index: usize, of: &'a [usize]) -> Option<States<'a>> {
        let LayerStates { tails, heads, .. } = self.layers.get_mut(index)?;
        Some(States { tails, heads, slots: self.slots, of })
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    #[test]
    fn a_copy_has_the_states_of_all_layers_and_heads() {
        let shape = StateShape { tail: 2, grows: 0, heads: 3, head: 4 };
        let mut pool = StatePool::plan(&[shape; 2], 3).unwrap();
        for layer in 0..2 {
            let States { tails, heads, .. } = pool.layer(layer, &[]).unwrap();
            let fill = |x: &mut [f32]| x.iter_mut().enumerate().for_each(|(i, x)| *x = (i + layer) as f32);
            fill(tails);
            fill(heads);
        }
        pool.copy(2, 0);
        for layer in 0..2 {
            let States { tails, heads, .. } = pool.layer(layer, &[]).unwrap();
            assert_eq!(tails[..2], tails[4..]);
            for head in heads.chunks(12) {
                assert!(head[..4] == head[8..] && head[4..8] != head[8..]);
            }
        }
        assert!(pool.layer(2, &[]).is_none() && !pool.is_empty());
    }
}
