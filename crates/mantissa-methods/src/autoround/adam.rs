//! Directions of steps by Adam (Kingma & Ba 2015, arXiv:1412.6980, algorithm 1).
//!
//! A sign moves every weight by the whole step, also where successive gradients cancel. Adam divides the mean of the gradients by
//! the root of their mean square, so that a weight whose gradients are noise hardly moves.

use mantissa_kernels::for_each;

/// Decay of the mean of the gradients, β₁.
const MEAN: f32 = 0.9;

/// Decay of the mean of their squares, β₂. The paper's .999 is a memory longer than the steps of a layer.
const SQUARES: f32 = 0.99;

/// Number of values that a thread takes at a time.
const PART: usize = 4096;

/// State of Adam for one weight.
#[derive(Clone, Debug)]
pub(crate) struct Adam {
    /// Decaying mean of the gradients.
    mean: Vec<f32>,
    /// Decaying mean of their squares.
    squares: Vec<f32>,
    /// β₁ and β₂ to the power of the number of steps so far.
    decayed: (f32, f32),
}

impl Adam {
    /// Bytes for each weight: two means and a direction.
    pub(crate) const BYTES: u64 = 12;

    /// State before the first step of `count` values.
    pub(crate) fn new(count: usize) -> Self {
        Adam { mean: vec![0.0; count], squares: vec![0.0; count], decayed: (1.0, 1.0) }
    }

    /// Takes the gradient of a step; returns the direction of each value, of magnitude 1 where all gradients so far are equal.
    /// The bits do not depend on `threads`.
    ///
    /// # Panics
    /// If `gradient` has another length.
    pub(crate) fn directions(&mut self, gradient: &[f32], threads: usize) -> Vec<f32> {
        assert_eq!(gradient.len(), self.mean.len(), "a weight of {} values", self.mean.len());
        self.decayed = (self.decayed.0 * MEAN, self.decayed.1 * SQUARES);
        let (of_mean, of_squares) = (1.0 - self.decayed.0, 1.0 - self.decayed.1);
        let mut directions = gradient.to_vec();
        let means = self.mean.chunks_mut(PART).zip(self.squares.chunks_mut(PART));
        for_each(threads, directions.chunks_mut(PART).zip(means), |(directions, (mean, squares))| {
            for ((direction, mean), squares) in directions.iter_mut().zip(mean).zip(squares) {
                let g = *direction;
                *mean = MEAN * *mean + (1.0 - MEAN) * g;
                *squares = SQUARES * *squares + (1.0 - SQUARES) * g * g;
                let length = (*squares / of_squares).sqrt();
                *direction = if length > 0.0 { *mean / of_mean / length } else { 0.0 };
            }
        });
        directions
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn equal_gradients_give_their_signs_and_noise_gives_less() {
        let mut adam = Adam::new(3);
        let mut last = Vec::new();
        for step in 0..200 {
            let noise = if step % 2 == 0 { 1e-3 } else { -1e-3 };
            last = adam.directions(&[2.0, noise, 0.0], 1);
            assert!((last[0] - 1.0).abs() < 1e-4, "{step}: {}", last[0]);
        }
        assert!(last[1].abs() < 0.1, "{}", last[1]);
        assert_eq!(last[2], 0.0);
    }

    #[test]
    fn directions_do_not_depend_on_threads() {
        let gradient: Vec<f32> = (0..3 * PART + 5).map(|i| (i as f32 * 0.37).sin()).collect();
        let [mut one, mut two] = [Adam::new(gradient.len()), Adam::new(gradient.len())];
        for _ in 0..3 {
            assert_eq!(one.directions(&gradient, 1), two.directions(&gradient, 4));
        }
    }
}
