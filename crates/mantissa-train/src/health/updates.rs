//! Counts over the weights of a parameter in an update: range, changes, and updates that change nothing.

use std::collections::BTreeMap;
use std::sync::Mutex;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};

use super::{WeightHealth, finite, lock};

/// Share of unchanged weights at which a parameter's updates count as lost. A learning rate of 1e-6 leaves weights of a standard
/// deviation of 0.02 in bf16 as they were, but for one in fifty.
const LOST_UPDATES: f64 = 0.9;

/// Counts over the weights of a parameter in an update, shared by threads.
#[derive(Debug, Default)]
pub(crate) struct WeightCounts {
    /// Bits of the largest magnitude; for non-negative floats, bit order equals value order.
    amax: AtomicU32,
    underflowed: AtomicU64,
    saturated: AtomicU64,
    changed: AtomicU64,
    /// Weights with an update, and those of them whose working copy it did not change.
    updated: AtomicU64,
    kept: AtomicU64,
    /// Sums of squares of updates and weights, by the first index of their piece: threads finish in any order.
    squares: Mutex<BTreeMap<u64, (f64, f64)>>,
}

impl WeightCounts {
    /// Counts some weights, given their f32 values and the working copy before and after the update.
    pub(crate) fn add(&self, exact: &[f32], before: &[f32], after: &[f32]) {
        let (mut amax, mut under, mut over, mut changed) = (0f32, 0, 0, 0);
        let (mut updated, mut kept) = (0, 0);
        for ((exact, before), after) in exact.iter().zip(before).zip(after) {
            amax = amax.max(exact.abs());
            updated += u64::from(exact != before);
            kept += u64::from(exact != before && before == after);
            under += u64::from(*exact != 0.0 && *after == 0.0);
            over += u64::from(exact.is_finite() && after.is_infinite());
            changed += u64::from(before.to_bits() != after.to_bits());
        }
        self.amax.fetch_max(amax.to_bits(), Ordering::Relaxed);
        self.underflowed.fetch_add(under, Ordering::Relaxed);
        self.saturated.fetch_add(over, Ordering::Relaxed);
        self.changed.fetch_add(changed, Ordering::Relaxed);
        self.updated.fetch_add(updated, Ordering::Relaxed);
        self.kept.fetch_add(kept, Ordering::Relaxed);
    }

    /// True if next to none of the weights with an update changed. Without a master copy these updates are lost.
    pub(crate) fn loses_updates(&self) -> bool {
        let [updated, kept] = [&self.updated, &self.kept].map(|count| count.load(Ordering::Relaxed) as f64);
        updated > 0.0 && kept >= LOST_UPDATES * updated
    }

    /// True if every update is 0.
    pub(crate) fn is_still(&self) -> bool {
        self.squares().0 == 0.0
    }

    /// Adds the sums of squares of the updates and of the weights before them of the piece from index `first` on.
    pub(crate) fn add_squares(&self, first: u64, updates: f64, weights: f64) {
        lock(&self.squares).insert(first, (updates, weights));
    }

    /// Sums of squares of the update and of the weights before it.
    pub(crate) fn squares(&self) -> (f64, f64) {
        lock(&self.squares).values().fold((0.0, 0.0), |sum, of| (sum.0 + of.0, sum.1 + of.1))
    }

    /// Returns all counts: magnitudes and counts, then the index and sums of every piece.
    pub(crate) fn to_words(&self) -> (Vec<u64>, Vec<(u64, f64, f64)>) {
        let counts = [&self.underflowed, &self.saturated, &self.changed, &self.updated, &self.kept];
        let counts = counts.map(|count| count.load(Ordering::Relaxed));
        let words = [u64::from(self.amax.load(Ordering::Relaxed))].into_iter().chain(counts).collect();
        (words, lock(&self.squares).iter().map(|(first, of)| (*first, of.0, of.1)).collect())
    }

    /// Adds the counts of other weights of the parameter, as [`to_words`](Self::to_words) returns them.
    pub(crate) fn add_words(&self, words: &[u64], squares: &[(u64, f64, f64)]) {
        let [amax, counts @ ..] = words else { return };
        self.amax.fetch_max(*amax as u32, Ordering::Relaxed);
        let own = [&self.underflowed, &self.saturated, &self.changed, &self.updated, &self.kept];
        own.into_iter().zip(counts).for_each(|(own, count)| {
            own.fetch_add(*count, Ordering::Relaxed);
        });
        squares.iter().for_each(|(first, updates, weights)| self.add_squares(*first, *updates, *weights));
    }

    /// Returns the health of parameter `tensor` with `n` weights; `grad_amax` and `grad_norm` are of its gradient.
    pub(crate) fn health(&self, tensor: &str, n: usize, (grad_amax, grad_norm): (f32, f64)) -> WeightHealth {
        let share = |count: &AtomicU64| count.load(Ordering::Relaxed) as f64 / n.max(1) as f64;
        let (updates, weights) = self.squares();
        WeightHealth {
            tensor: tensor.to_owned(),
            amax: finite(f32::from_bits(self.amax.load(Ordering::Relaxed))),
            grad_amax: finite(grad_amax),
            grad_norm: Some(grad_norm).filter(|norm| norm.is_finite()),
            update_ratio: Some((updates / weights).sqrt()).filter(|ratio| ratio.is_finite()),
            underflowed: share(&self.underflowed),
            saturated: share(&self.saturated),
            changed: share(&self.changed),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn updates_that_change_next_to_nothing_are_lost() {
        let found = |exact: &[f32], before: &[f32], after: &[f32]| {
            let counts = WeightCounts::default();
            counts.add(exact, before, after);
            counts.loses_updates()
        };
        let (before, exact) = ([1.0; 10], [1.001; 10]);
        let changed =
            |n: usize| std::array::from_fn::<f32, 10, _>(|i| if i < n { 1.0 + 2f32.powi(-7) } else { 1.0 });
        assert!(found(&exact, &before, &changed(0)) && found(&exact, &before, &changed(1)));
        assert!(!found(&exact, &before, &changed(2)));
        // Weights without an update, as of rows that a step does not see, do not count.
        assert!(!found(&before, &before, &before));
        let one = std::array::from_fn::<f32, 10, _>(|i| if i == 9 { 1.001 } else { 1.0 });
        assert!(found(&one, &before, &before));
    }
}
