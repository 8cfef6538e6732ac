//! Adam for a short vector of parameters (Kingma & Ba 2015, arXiv:1412.6980, algorithm 1).

/// Decay of the mean of the gradients, β₁.
const MEAN: f32 = 0.9;

/// Decay of the mean of their squares, β₂.
const SQUARES: f32 = 0.99;

/// State of Adam.
#[derive(Clone, Debug)]
pub(super) struct Adam {
    mean: Vec<f32>,
    squares: Vec<f32>,
    /// β₁ and β₂ to the power of the number of steps so far.
    decayed: (f32, f32),
}

impl Adam {
    /// Bytes for each parameter.
    pub(super) const BYTES: u64 = 8;

    /// State before the first step of `count` parameters.
    pub(super) fn new(count: usize) -> Self {
        Adam { mean: vec![0.0; count], squares: vec![0.0; count], decayed: (1.0, 1.0) }
    }

    /// Moves `x` by a step of length `rate` against `gradient`.
    pub(super) fn step(&mut self, x: &mut [f32], gradient: &[f32], rate: f32) {
        self.decayed = (self.decayed.0 * MEAN, self.decayed.1 * SQUARES);
        let (of_mean, of_squares) = (1.0 - self.decayed.0, 1.0 - self.decayed.1);
        let state = self.mean.iter_mut().zip(&mut self.squares);
        for ((x, g), (mean, squares)) in x.iter_mut().zip(gradient).zip(state) {
            *mean = MEAN * *mean + (1.0 - MEAN) * g;
            *squares = SQUARES * *squares + (1.0 - SQUARES) * g * g;
            let length = (*squares / of_squares).sqrt();
            if length > 0.0 {
                *x -= rate * (*mean / of_mean / length);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn equal_gradients_move_by_the_rate() {
        let (mut adam, mut x) = (Adam::new(2), [1.0, 5.0]);
        for _ in 0..10 {
            adam.step(&mut x, &[3.0, 0.0], 0.01);
        }
        assert!((x[0] - 0.9).abs() < 1e-5 && x[1] == 5.0, "{x:?}");
    }
}
