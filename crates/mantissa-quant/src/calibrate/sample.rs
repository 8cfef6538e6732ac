//! Sampled tokens of an input, and statistics of its columns over all tokens.

/// Statistics and sampled tokens of an input.
#[derive(Clone, Debug)]
pub(crate) struct Sample {
    /// Tokens seen.
    pub(crate) tokens: usize,
    /// Sampled tokens, `[_, width]`.
    pub(crate) x: Vec<f32>,
    /// Sum of the magnitudes of each column.
    sums: Vec<f64>,
    /// Largest magnitude of each column.
    pub(crate) peaks: Vec<f32>,
}

impl Sample {
    pub(super) fn new(width: usize) -> Self {
        Sample { tokens: 0, x: Vec::new(), sums: vec![0.0; width], peaks: vec![0.0; width] }
    }

    pub(super) fn add(&mut self, x: &[f32], every: usize) {
        for row in x.chunks_exact(self.sums.len().max(1)) {
            if self.tokens.is_multiple_of(every) {
                self.x.extend_from_slice(row);
            }
            self.tokens += 1;
            for ((sum, peak), v) in self.sums.iter_mut().zip(&mut self.peaks).zip(row) {
                *sum += f64::from(v.abs());
                *peak = peak.max(v.abs());
            }
        }
    }

    /// Returns the number of sampled tokens.
    pub(crate) fn rows(&self) -> usize {
        self.x.len() / self.peaks.len().max(1)
    }

    /// Returns the mean magnitude of each column.
    pub(crate) fn means(&self) -> Vec<f32> {
        self.sums.iter().map(|sum| (sum / self.tokens.max(1) as f64) as f32).collect()
    }
}
