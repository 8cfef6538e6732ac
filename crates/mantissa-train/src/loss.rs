//! Targets of a batch, and its loss.

use mantissa_model::Batch;

/// Target of a token without a loss.
pub const IGNORE_TARGET: u32 = u32::MAX;

/// Returns next-token targets: the tokens shifted by one, [`IGNORE_TARGET`] for the last token of each
/// sequence.
pub fn next_token_targets(batch: &Batch<'_>) -> Vec<u32> {
    let mut targets: Vec<u32> = batch.tokens.iter().skip(1).copied().chain([IGNORE_TARGET]).collect();
    targets.truncate(batch.tokens.len());
    let mut end = 0;
    for &len in batch.lens {
        end += len;
        if let Some(last) = end.checked_sub(1).and_then(|last| targets.get_mut(last)) {
            *last = IGNORE_TARGET;
        }
    }
    targets
}

/// Loss of a batch.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Loss {
    /// Sum of negative log-likelihoods, nats.
    pub nll: f64,
    /// Number of targets.
    pub targets: usize,
}

impl Loss {
    /// Mean loss, nats per target; NaN without targets.
    pub fn mean(&self) -> f64 {
        self.nll / self.targets as f64
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn targets_end_with_each_sequence() {
        let batch = Batch { tokens: &[5, 6, 7, 8, 9], lens: &[3, 0, 2] };
        assert_eq!(next_token_targets(&batch), [6, 7, IGNORE_TARGET, 9, IGNORE_TARGET]);
        assert!(next_token_targets(&Batch { tokens: &[], lens: &[0] }).is_empty());
    }
}
