//! Rotation of lines: the vectorised kernel where it serves the order, else the reference; both have the same bits.

use mantissa_kernels::kernels;
use mantissa_num::Hadamard;

/// Orders from which on the kernel serves.
const LEAST: usize = 16;

/// Hadamard transform with signs, of every whole run of a line.
#[derive(Clone, Debug)]
pub(super) struct Turn {
    transform: Hadamard,
    signs: Vec<f32>,
    vectorised: bool,
}

impl Turn {
    /// Takes a transform.
    pub(super) fn new(transform: Hadamard) -> Self {
        let signs = transform.signs().iter().map(|sign| f32::from(*sign)).collect();
        let vectorised = transform.base() == 1 && transform.order() >= LEAST;
        Turn { transform, signs, vectorised }
    }

    /// Rotates `line`.
    pub(super) fn forward(&self, line: &mut [f32]) {
        if !self.vectorised {
            return self.transform.forward(line);
        }
        kernels().hadamard(line, self.transform.order(), &self.signs);
    }

    /// Rotates `line` back.
    pub(super) fn transpose(&self, line: &mut [f32]) {
        if !self.vectorised {
            return self.transform.transpose(line);
        }
        let order = self.transform.order();
        kernels().hadamard(line, order, &[]);
        let runs = line.chunks_exact_mut(order);
        runs.for_each(|run| run.iter_mut().zip(&self.signs).for_each(|(x, sign)| *x *= sign));
    }
}
