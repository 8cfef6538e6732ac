//! The one choice among candidates, for `plan` and `quantize --for`.

use crate::precision::Precision;

/// Candidate for a choice.
#[derive(Clone, Copy, Debug)]
pub struct Entry<'a> {
    /// Precision.
    pub precision: &'a Precision,
    /// True if it fits the model, the memory, the device and an engine.
    pub runs: bool,
    /// Predicted seconds of the work; `None` where the device is not known.
    pub seconds: Option<f64>,
    /// True if others come first: its measured loss may understate that of the model, or its kernels are slow here.
    pub doubtful: bool,
}

/// Times within this factor of the fastest count as equal; the smaller loss decides.
const EQUAL: f64 = 1.08;

impl Entry<'_> {
    /// Measured loss; infinite if not measured.
    fn loss(&self) -> f64 {
        self.precision.measured_kl().unwrap_or(f64::INFINITY)
    }

    /// True if others come first.
    fn is_doubtful(&self) -> bool {
        self.doubtful || self.precision.offered.storage
    }

    /// True if it runs within a limit of the measured loss.
    fn is_eligible(&self, max_kl: f64) -> bool {
        self.runs && self.precision.measured_kl().is_some_and(|kl| kl <= max_kl)
    }
}

/// Returns the index of the best candidate within `max_kl` nats/token: of the fastest, those within 8 % counting as equal,
/// the one with the smallest measured loss, doubtful ones last. Variants of one name are as fast as each other. A spare
/// candidate counts only where no other of its bits runs without doubt, within the limit or not.
pub fn best(entries: &[Entry<'_>], max_kl: f64) -> Option<usize> {
    let eligible: Vec<usize> = (0..entries.len()).filter(|&i| entries[i].is_eligible(max_kl)).collect();
    let replaced = |i: usize| {
        let better = |other: &Entry<'_>| {
            other.is_eligible(f64::INFINITY)
                && !other.precision.offered.spare
                && !other.is_doubtful()
                && other.precision.nominal == entries[i].precision.nominal
        };
        entries[i].precision.offered.spare && entries.iter().any(better)
    };
    let rank = |&a: &usize, &b: &usize| {
        let (a, b) = (&entries[a], &entries[b]);
        let spare = |entry: &Entry<'_>| entry.precision.offered.spare;
        a.is_doubtful()
            .cmp(&b.is_doubtful())
            .then(spare(a).cmp(&spare(b)))
            .then(a.loss().total_cmp(&b.loss()))
    };
    let mut variants: Vec<usize> = Vec::new();
    for &i in eligible.iter().filter(|&&i| !replaced(i)) {
        let name = entries[i].precision.name;
        match variants.iter_mut().find(|known| entries[**known].precision.name == name) {
            Some(known) if rank(&i, known).is_lt() => *known = i,
            Some(_) => {}
            None => variants.push(i),
        }
    }
    let seconds = |i: &usize| entries[*i].seconds.unwrap_or(0.0);
    let fastest = variants.iter().map(seconds).min_by(f64::total_cmp)?;
    variants.into_iter().filter(|i| seconds(i) <= EQUAL * fastest).min_by(rank)
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;
    use crate::precision::CANDIDATES;

    fn entries<'a>(asked: &[(&str, bool, Option<f64>, bool)]) -> Vec<Entry<'a>> {
        let entry = |&(recipe, runs, seconds, doubtful): &(&str, bool, Option<f64>, bool)| {
            let precision = CANDIDATES.iter().find(|row| row.recipe == Some(recipe)).unwrap();
            Entry { precision, runs, seconds, doubtful }
        };
        asked.iter().map(entry).collect()
    }

    fn chosen(asked: &[(&'static str, bool, Option<f64>, bool)], max_kl: f64) -> Option<&'static str> {
        best(&entries(asked), max_kl).map(|i| asked[i].0)
    }

    #[test]
    fn loss_decides_among_equal_times() {
        let four = [("q4_k_m", true, Some(1.05), false), ("iq4_xs", true, Some(1.0), false)];
        assert_eq!(chosen(&four, 0.02), Some("q4_k_m"));
        let slow = [("q4_k_m", true, Some(1.2), false), four[1]];
        assert_eq!(chosen(&slow, 0.02), Some("iq4_xs"));
        // Without a device only the loss counts.
        let unknown = [("q4_k_m", true, None, false), ("iq4_xs", true, None, false)];
        assert_eq!(chosen(&unknown, 0.02), Some("q4_k_m"));
        assert_eq!((chosen(&unknown, 1e-4), chosen(&[], 1.0)), (None, None));
    }

    #[test]
    fn spare_and_doubtful_ones_come_last() {
        let all = |doubtful| {
            [
                ("gptaq-int4-g32-asym", true, None, false),
                ("gptaq-int4-g128", true, None, doubtful),
                ("scalesweep-gptaq-nvfp4", true, None, true),
            ]
        };
        assert_eq!(chosen(&all(false), 1.0), Some("gptaq-int4-g128"));
        // What only runs with doubts does not stand before a spare one.
        assert_eq!(chosen(&all(true), 1.0), Some("gptaq-int4-g32-asym"));
        // A limit that others exceed does not let a spare one in.
        assert_eq!(chosen(&all(false), 0.005), None);
        let refused = [("gptaq-int4-g128", false, None, false), ("nf4", true, None, false)];
        assert_eq!(chosen(&refused, 1.0), Some("nf4"));
    }
}
