//! Delayed scaling (Transformer Engine's `DelayedScaling`): the scale of a tensor comes from the largest amax of the
//! last steps, so that it is known before the tensor is read. amax histories belong to the checkpoint.

use std::sync::atomic::{AtomicU32, Ordering};

/// amax history of one operand, and its largest magnitude in the current step.
#[derive(Debug)]
pub(crate) struct History {
    /// Steps remembered; 0 for an operand without delayed scaling.
    len: usize,
    /// Multiplier of the current step, `max element / amax`.
    multiplier: f32,
    /// Bits of the largest magnitude in this step; for non-negative floats, bit order equals value order.
    seen: AtomicU32,
}

impl History {
    /// Notes the amax of a tensor and returns the multiplier to round it with.
    pub(crate) fn observe(&self, amax: f32) -> f32 {
        self.seen.fetch_max(amax.to_bits() & 0x7fff_ffff, Ordering::Relaxed);
        self.multiplier
    }
}

/// Histories of all operands of a model.
#[derive(Debug, Default)]
pub(crate) struct Histories {
    histories: Vec<History>,
    /// Largest element of each operand's format.
    max: Vec<f32>,
    /// Longest history.
    longest: usize,
    /// amax by operand, then by step modulo the longest history; 0 where nothing was seen.
    pub(crate) values: Vec<f32>,
    /// Multipliers, which outlive a step without a usable amax.
    pub(crate) multipliers: Vec<f32>,
}

impl Histories {
    /// Makes empty histories for operands with these lengths (0: none) and largest elements.
    pub(crate) fn new(operands: &[(usize, f32)]) -> Self {
        let longest = operands.iter().map(|(len, _)| *len).max().unwrap_or(0);
        if longest == 0 {
            return Histories::default();
        }
        let history = |len| History { len, multiplier: 1.0, seen: AtomicU32::new(0) };
        Histories {
            histories: operands.iter().map(|(len, _)| history(*len)).collect(),
            max: operands.iter().map(|(_, max)| *max).collect(),
            longest,
            values: vec![0.0; longest * operands.len()],
            multipliers: vec![1.0; operands.len()],
        }
    }

    /// Returns the history at `slot`, if it has one.
    pub(crate) fn get(&self, slot: usize) -> Option<&History> {
        self.histories.get(slot).filter(|history| history.len > 0)
    }

    /// Forgets what the current step saw.
    pub(crate) fn forget(&mut self) {
        self.histories.iter_mut().for_each(|history| *history.seen.get_mut() = 0);
    }

    /// Returns the bits of the largest magnitudes that the step saw so far, by operand.
    pub(crate) fn seen(&self) -> Vec<u32> {
        self.histories.iter().map(|history| history.seen.load(Ordering::Relaxed)).collect()
    }

    /// Adds what others saw in the step.
    pub(crate) fn see(&mut self, seen: &[u32]) {
        for (history, seen) in self.histories.iter_mut().zip(seen) {
            let own = history.seen.get_mut();
            *own = (*own).max(*seen);
        }
    }

    /// Ends step `step` (from 1): remembers its amax, and computes the multipliers of the next one: `max / amax` of
    /// the largest in the history; unchanged if that is 0 or not finite.
    pub(crate) fn commit(&mut self, step: u64) {
        let longest = self.longest;
        for (i, history) in self.histories.iter_mut().enumerate().filter(|(_, history)| history.len > 0) {
            let values = &mut self.values[i * longest..][..longest];
            values[(step % longest as u64) as usize] = f32::from_bits(*history.seen.get_mut());
            // A shorter history than the longest looks back from this step.
            let recent = (0..history.len as u64).map_while(|back| step.checked_sub(back));
            let amax = recent.map(|step| values[(step % longest as u64) as usize]).fold(0.0, f32::max);
            let multiplier = self.max[i] / amax;
            if amax > 0.0 && amax.is_finite() && multiplier.is_finite() {
                (history.multiplier, self.multipliers[i]) = (multiplier, multiplier);
            }
            *history.seen.get_mut() = 0;
        }
    }

    /// Returns the state by name; nothing without delayed scaling.
    pub(crate) fn arrays(&self) -> impl Iterator<Item = (&'static str, &[f32])> {
        let all = [("policy.amax", &self.values[..]), ("policy.multipliers", &self.multipliers)];
        all.into_iter().filter(|(_, values)| !values.is_empty())
    }

    /// Returns the state by name, to be filled; then [`restored`](Self::restored) takes it over.
    pub(crate) fn arrays_mut(&mut self) -> impl Iterator<Item = (&'static str, &mut [f32])> {
        let all = [("policy.amax", &mut self.values[..]), ("policy.multipliers", &mut self.multipliers)];
        all.into_iter().filter(|(_, values)| !values.is_empty())
    }

    /// Takes over values and multipliers read from a checkpoint.
    pub(crate) fn restored(&mut self) {
        for (history, multiplier) in self.histories.iter_mut().zip(&self.multipliers) {
            history.multiplier = *multiplier;
            *history.seen.get_mut() = 0;
        }
    }

    /// Takes over values and multipliers of the same operands.
    pub(crate) fn copy_from(&mut self, other: &Histories) {
        self.values.clone_from(&other.values);
        self.multipliers.clone_from(&other.multipliers);
        self.restored();
    }

    /// Bytes of histories with these lengths.
    pub(crate) fn bytes(operands: &[(usize, f32)]) -> u64 {
        let longest = operands.iter().map(|(len, _)| *len).max().unwrap_or(0) as u64;
        let each = 4 * longest + 4 + 4 + size_of::<History>() as u64;
        if longest == 0 { 0 } else { each * operands.len() as u64 }
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    /// Experiment E13: after a jump of amax values saturate in one step only; after a drop the scale stays as long
    /// as the history remembers the larger amax.
    #[test]
    fn scales_follow_the_history() {
        let mut all = Histories::new(&[(0, 1.0), (4, 448.0)]);
        assert!(all.get(0).is_none());
        let mut step = 0;
        let mut run = |all: &mut Histories, amax: f32| {
            let multiplier = all.get(1).unwrap().observe(amax);
            step += 1;
            all.commit(step);
            multiplier
        };
        let found: Vec<f32> =
            [2.0, 2.0, 16.0, 16.0, 2.0, 2.0, 2.0, 2.0, 2.0].map(|amax| run(&mut all, amax)).into();
        let (low, high) = (448.0 / 2.0, 448.0 / 16.0);
        assert_eq!(found, [1.0, low, low, high, high, high, high, high, low]);
        // An infinite amax or none at all leaves the scale as it is.
        run(&mut all, f32::INFINITY);
        assert_eq!(all.multipliers[1], low);
        let mut again = Histories::new(&[(0, 1.0), (4, 448.0)]);
        (again.values, again.multipliers) = (all.values.clone(), all.multipliers.clone());
        again.restored();
        assert_eq!(again.get(1).unwrap().observe(1.0), low);
    }
}
