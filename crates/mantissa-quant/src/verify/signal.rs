//! Power of a weight in the source against the power of what an artifact holds of it.
//!
//! A bound in steps does not show a weight that is lost: where a scale has become zero, a step is as large as the values.

use mantissa_kernels::kernels;

use crate::error_stats::ErrorStats;
use crate::quality::Verification;
use crate::range::LOST;

/// Least bits per weight at which rounding always keeps more than [`LOST`] of a signal.
const TELLING_BITS: f64 = 3.0;

/// Least share of the source's power that any format keeps.
const LEAST_POWER: f64 = 0.01;

/// Sums over the rows of a weight; merging parts in a fixed order gives the same bits every time.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Signal {
    pub(super) error: ErrorStats,
    decoded: f64,
    rows: usize,
    /// Rows of zeros that are none in the source, and their largest magnitude there.
    zeroed: usize,
    largest: f32,
}

impl Signal {
    /// Adds a row of the source and of the artifact.
    pub(super) fn add(&mut self, source: &[f32], decoded: &[f32]) {
        let error = ErrorStats::of_values(source, decoded);
        let power: f64 = decoded.iter().map(|&v| f64::from(v) * f64::from(v)).sum();
        self.error.merge(&error);
        self.decoded += power;
        self.rows += 1;
        if power == 0.0 && error.power() > 0.0 {
            self.zeroed += 1;
            self.largest = self.largest.max(kernels().amax(source));
        }
    }

    /// Adds the sums of another part.
    pub(super) fn merge(&mut self, other: &Signal) {
        self.error.merge(&other.error);
        self.decoded += other.decoded;
        self.rows += other.rows;
        self.zeroed += other.zeroed;
        self.largest = self.largest.max(other.largest);
    }

    /// Reports a weight of `bits` per weight whose signal is lost as a fault, and rows that have become zeros as a note.
    pub(super) fn judge(&self, name: &str, bits: f64, found: &mut Verification) {
        let sqnr = self.error.report().sqnr_db;
        let source = self.error.power();
        let kept = self.decoded / source;
        let drowned = bits >= TELLING_BITS && sqnr.is_some_and(|db| db < LOST);
        if source > 0.0 && (kept < LEAST_POWER || drowned) {
            let sqnr = sqnr.map_or("none".to_owned(), |db| format!("{db:.1} dB"));
            found.faults.push(format!(
                "{name}: the source's signal is lost: expected an SQNR of at least {LOST} dB, got {sqnr}, with {:.1}% of the source's power; fix: keep this tensor or store it as bf16 or f32",
                100.0 * kept
            ));
        } else if self.zeroed > 0 {
            found.notes.push(format!(
                "{name}: {} of {} rows hold zeros alone where the source has magnitudes up to {:e}",
                self.zeroed, self.rows, self.largest
            ));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn judged(bits: f64, rows: &[([f32; 2], [f32; 2])]) -> (usize, usize) {
        let (mut signal, mut found) = (Signal::default(), Verification::default());
        rows.iter().for_each(|(source, decoded)| signal.add(source, decoded));
        signal.judge("w", bits, &mut found);
        (found.faults.len(), found.notes.len())
    }

    #[test]
    fn a_lost_signal_is_a_fault_and_a_lost_row_a_note() {
        assert_eq!(judged(8.0, &[([1e-9, -1e-9], [0.0, 0.0])]), (1, 0));
        assert_eq!(judged(1.7, &[([1e-9, -1e-9], [0.0, 0.0])]), (1, 0));
        assert_eq!(judged(4.5, &[([1.0, -1.0], [2.0, -2.0])]), (1, 0));
        assert_eq!(judged(1.7, &[([1.0, -1.0], [2.0, 0.0])]), (0, 0));
        assert_eq!(judged(8.0, &[([1.0, -1.0], [1.0, -1.0]), ([1e-9, 0.0], [0.0, 0.0])]), (0, 1));
        assert_eq!(judged(8.0, &[([0.0, 0.0], [0.0, 0.0])]), (0, 0));
    }
}
