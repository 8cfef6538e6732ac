//! Pooled hidden states of a prompt.

/// Pooling of the hidden states of a prompt.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Pooling {
    /// Mean over all tokens.
    Mean,
    /// State of the last token.
    Last,
}

/// Sum of hidden states.
#[derive(Clone, Debug, Default)]
pub(super) struct Pooled {
    sum: Vec<f64>,
    /// Tokens of the sum.
    pub(super) tokens: usize,
}

impl Pooled {
    /// Adds the states `[rows, width]` of the tokens from position `start` on; those counted before are left out.
    pub(super) fn add(&mut self, states: &[f32], width: usize, start: usize) {
        self.sum.resize(width, 0.0);
        for state in states.chunks_exact(width).skip(self.tokens.saturating_sub(start)) {
            self.sum.iter_mut().zip(state).for_each(|(sum, x)| *sum += f64::from(*x));
            self.tokens += 1;
        }
    }

    pub(super) fn mean(&self) -> Vec<f32> {
        self.sum.iter().map(|sum| (sum / self.tokens.max(1) as f64) as f32).collect()
    }
}
