//! Adam for values that a quantization method learns (Kingma & Ba 2015, arXiv:1412.6980, algorithm 1).
//!
//! A sign moves every value by the whole step, also where successive gradients cancel. Adam divides the mean of the gradients by
//! the root of their mean square, so that a value whose gradients are noise hardly moves.

use crate::{AdamDirection, AdamLength, for_each, kernels};

/// Decay of the mean of the gradients, β₁.
const BETA1: f32 = 0.9;

/// Decay of the mean of their squares, β₂. The paper's .999 is a memory longer than the steps of a layer.
const BETA2: f32 = 0.99;

/// Number of values that a thread takes at a time.
const PART: usize = 4096;

/// State of Adam.
#[derive(Clone, Debug)]
pub struct Adam {
    /// Decaying mean of the gradients.
    mean: Vec<f32>,
    /// Decaying mean of their squares.
    squares: Vec<f32>,
    /// β₁ and β₂ to the power of the number of steps so far.
    decayed: [f32; 2],
}

impl Adam {
    /// Bytes of the state for each value.
    pub const BYTES: u64 = 8;

    /// Returns the state before the first step of `count` values.
    pub fn new(count: usize) -> Self {
        Adam { mean: vec![0.0; count], squares: vec![0.0; count], decayed: [1.0; 2] }
    }

    /// Takes the gradient of a step and replaces it by the direction of each value, of magnitude 1 where all gradients so far
    /// are equal. The bits do not depend on `threads`.
    ///
    /// # Panics
    /// If `gradient` has another length.
    pub fn directions(&mut self, gradient: &mut [f32], threads: usize) {
        assert_eq!(gradient.len(), self.mean.len(), "Adam: a state of {} values", self.mean.len());
        self.decayed = [self.decayed[0] * BETA1, self.decayed[1] * BETA2];
        let rule = AdamDirection {
            beta1: BETA1,
            one_minus_beta1: 1.0 - BETA1,
            beta2: BETA2,
            one_minus_beta2: 1.0 - BETA2,
            square_first: false,
            length: AdamLength::Corrected { corrections: self.decayed.map(|decayed| 1.0 - decayed) },
        };
        let moments = self.mean.chunks_mut(PART).zip(self.squares.chunks_mut(PART));
        for_each(threads, gradient.chunks_mut(PART).zip(moments), |(gradient, (mean, squares))| {
            kernels().adam_direction(&rule, gradient, mean, squares);
        });
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn equal_gradients_give_their_signs_and_noise_gives_less() {
        let mut adam = Adam::new(3);
        let mut last = [0.0; 3];
        for step in 0..200 {
            let noise = if step % 2 == 0 { 1e-3 } else { -1e-3 };
            last = [2.0, noise, 0.0];
            adam.directions(&mut last, 1);
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
            let [mut alone, mut shared] = [gradient.clone(), gradient.clone()];
            one.directions(&mut alone, 1);
            two.directions(&mut shared, 4);
            assert_eq!(alone, shared);
        }
    }

    /// The written-out equations, with the roundings that the methods' outputs were made with.
    #[test]
    fn bits_are_those_of_the_equations() {
        let gradient = |step: usize| -> Vec<f32> {
            (0..57).map(|i| ((i + step * 7) as f32 * 0.61).sin() * 10f32.powi(i as i32 % 9 - 6)).collect()
        };
        let (mut adam, mut mean, mut squares) = (Adam::new(57), [0.0f32; 57], [0.0f32; 57]);
        let mut decayed = (1.0f32, 1.0f32);
        for step in 0..5 {
            let mut directions = gradient(step);
            adam.directions(&mut directions, 1);
            decayed = (decayed.0 * 0.9, decayed.1 * 0.99);
            for (i, g) in gradient(step).into_iter().enumerate() {
                mean[i] = 0.9 * mean[i] + (1.0 - 0.9) * g;
                squares[i] = 0.99 * squares[i] + (1.0 - 0.99) * g * g;
                let length = (squares[i] / (1.0 - decayed.1)).sqrt();
                let expected = if length > 0.0 { mean[i] / (1.0 - decayed.0) / length } else { 0.0 };
                assert_eq!(directions[i].to_bits(), expected.to_bits(), "{step} {i}");
            }
        }
    }
}
