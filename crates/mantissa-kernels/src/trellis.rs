//! Trellis search over a ring of weights: QTIP (Tseng et al. 2024, arXiv 2406.11235, section 3 and algorithm 4).
//!
//! A ring has no first state. A first search over the weights around the seam, free at both ends, finds the group of
//! states at the seam. A second one goes once around from that group to itself. The paper's first search covers the
//! whole ring, starting opposite the seam. Beyond a few constraint lengths, weights no longer affect the seam, as in
//! decoders of tail-biting convolutional codes.

use crate::{Kernels, TrellisValues};

/// Constraint lengths (16 bits) searched on either side of the seam.
const AROUND: usize = 5;

/// Scratch memory of a search: 2^(16 - k) bytes per weight of the ring.
#[derive(Clone, Debug)]
pub struct TrellisScratch {
    costs: Vec<f32>,
    next: Vec<f32>,
    turned: Vec<f32>,
    from: Vec<u8>,
}

impl TrellisScratch {
    /// For rings of `weights` weights.
    pub fn new(values: &TrellisValues, weights: usize) -> Self {
        let costs = vec![0.0; values.groups()];
        let from = vec![0; values.groups() * weights];
        TrellisScratch { next: costs.clone(), turned: costs.clone(), costs, from }
    }

    /// Size of one in bytes.
    pub fn bytes_needed(bits: u32, weights: usize) -> u64 {
        (12 + weights as u64) << (16 - bits.min(16))
    }
}

impl Kernels {
    /// Writes the states of the ring with values near `targets`, in the sum of squares, to `states`. Each begins with
    /// the last `16 - k` bits of the one before it, cyclically. Equal at every level.
    ///
    /// # Panics
    /// If the lengths differ, or `scratch` is for fewer weights or another rate.
    pub fn trellis_ring(
        &self,
        values: &TrellisValues,
        targets: &[f32],
        scratch: &mut TrellisScratch,
        states: &mut [u16],
    ) {
        let weights = targets.len();
        assert!(states.len() == weights, "trellis_ring: {} states for {weights} weights", states.len());
        if weights == 0 {
            return;
        }
        let around = (AROUND * 16).div_ceil(values.bits() as usize).min(weights / 2);
        let seam: Vec<f32> = targets[weights - around..].iter().chain(&targets[..around]).copied().collect();
        let mut path = vec![0; seam.len()];
        scratch.costs.fill(0.0);
        let end = self.forward(values, &seam, scratch);
        let last = least(end);
        values.back(&scratch.from, last, &mut path);
        // The group between the last weight of the ring and the first.
        let seam = path.get(around).map_or(0, |&state| usize::from(state >> values.bits()));
        scratch.costs.fill(f32::INFINITY);
        scratch.costs[seam] = 0.0;
        self.forward(values, targets, scratch);
        values.back(&scratch.from, seam, states);
    }

    /// Costs of the groups after `targets`, from those in `scratch`.
    fn forward<'s>(
        &self,
        values: &TrellisValues,
        targets: &[f32],
        scratch: &'s mut TrellisScratch,
    ) -> &'s [f32] {
        let TrellisScratch { costs, next, turned, from } = scratch;
        for (&target, from) in targets.iter().zip(from.chunks_exact_mut(values.groups())) {
            self.trellis_step(values, target, costs, turned, next, from);
            std::mem::swap(costs, next);
        }
        costs
    }
}

impl TrellisValues {
    /// The states of the path that ends in group `end`.
    fn back(&self, from: &[u8], end: usize, states: &mut [u16]) {
        let mut group = end;
        let steps = from.chunks_exact(self.groups()).take(states.len());
        for (state, from) in states.iter_mut().zip(steps).rev() {
            *state = self.state(from, group);
            group = usize::from(*state >> self.bits());
        }
    }
}

/// First minimum.
fn least(costs: &[f32]) -> usize {
    let first = (0, f32::INFINITY);
    costs.iter().enumerate().fold(first, |best, (i, &cost)| if cost < best.1 { (i, cost) } else { best }).0
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use mantissa_num::round::random_u32;
    use mantissa_num::trellis::TrellisBook;

    use super::*;
    use crate::kernels;

    fn values(bits: u32) -> (TrellisValues, Vec<f32>) {
        let f16 = mantissa_num::minifloat::F16;
        let table: Vec<f32> = TrellisBook::Mcg.table().into_iter().map(|v| f16.decode(v.into())).collect();
        (TrellisValues::new(bits, &table).unwrap(), table)
    }

    /// Sums of twelve uniform values: nearly normal.
    fn normal(seed: u64, n: usize) -> Vec<f32> {
        let one = |i: usize| {
            let uniform = |j: usize| f64::from(random_u32(seed, (12 * i + j) as u64)) / f64::from(u32::MAX);
            ((0..12).map(uniform).sum::<f64>() - 6.0) as f32
        };
        (0..n).map(one).collect()
    }

    fn error(table: &[f32], targets: &[f32], states: &[u16]) -> f64 {
        let square = |(t, s): (&f32, &u16)| f64::from(t - table[usize::from(*s)]).powi(2);
        targets.iter().zip(states).map(square).sum()
    }

    fn is_ring(states: &[u16], bits: u32) -> bool {
        let mask = (1u32 << (16 - bits)) - 1;
        let pairs = states.iter().zip(states.iter().cycle().skip(1));
        pairs.into_iter().all(|(a, b)| u32::from(*a) & mask == u32::from(*b >> bits))
    }

    #[test]
    fn short_rings_are_the_best_of_their_seam() {
        // Rings short enough to try all: the states of a ring of 16 bits are its rotations.
        for (bits, weights) in [(8, 2usize), (4, 4), (2, 8), (1, 16)] {
            let (values, table) = values(bits);
            let mut scratch = TrellisScratch::new(&values, weights);
            for seed in 0..12 {
                let targets = normal(seed, weights);
                let mut states = vec![0; weights];
                kernels().trellis_ring(&values, &targets, &mut scratch, &mut states);
                assert!(is_ring(&states, bits));
                let ring = |word: u16| -> Vec<u16> {
                    (0..weights).map(|i| word.rotate_left(bits * (i as u32 + 1))).collect()
                };
                // The group that the last state ends with and the first begins with.
                let seam = |states: &[u16]| states[0] >> bits;
                let rings = (0..=u16::MAX).map(ring).filter(|other| seam(other) == seam(&states));
                let best = rings.map(|ring| error(&table, &targets, &ring)).fold(f64::INFINITY, f64::min);
                let found = error(&table, &targets, &states);
                assert!((found - best).abs() < 1e-4, "{bits} bits: {found} for {best}");
            }
        }
    }

    #[test]
    fn a_path_is_the_best_from_its_seam() {
        // All paths of three weights of 6 bits from one group to any.
        let (values, table) = values(6);
        let targets = normal(5, 3);
        let mut scratch = TrellisScratch::new(&values, 3);
        scratch.costs.fill(f32::INFINITY);
        let seam = 0b10_1101_0011;
        scratch.costs[seam] = 0.0;
        let costs = kernels().forward(&values, &targets, &mut scratch).to_vec();
        let mut best = vec![f64::INFINITY; values.groups()];
        for word in 0..1u32 << 18 {
            let ring = (seam as u32) << 18 | word;
            let states = [12, 6, 0].map(|shift| (ring >> shift) as u16);
            let group = states[2] as usize & (values.groups() - 1);
            best[group] = best[group].min(error(&table, &targets, &states));
        }
        for (group, (cost, best)) in costs.iter().zip(&best).enumerate() {
            assert!((f64::from(*cost) - best).abs() < 1e-4 * best.max(1.0), "{group}: {cost} for {best}");
        }
        let mut states = [0; 3];
        let end = least(&costs);
        values.back(&scratch.from, end, &mut states);
        assert!((error(&table, &targets, &states) - best[end]).abs() < 1e-4);
    }

    #[test]
    fn rings_come_near_the_rate() {
        // Shannon's bound on the mean square error of a unit normal is 2^(-2k); QTIP has .069 at 2 bits (table 1).
        for (bits, most) in [(1, 0.31), (2, 0.078), (3, 0.021), (4, 0.0060), (5, 0.0018), (8, 0.0003)] {
            let (values, table) = values(bits);
            let mut scratch = TrellisScratch::new(&values, 256);
            let (mut sum, mut states) = (0.0, vec![0; 256]);
            // The book's standard deviation is 1.24.
            let spread = 1.24;
            for seed in 0..3 {
                let targets: Vec<f32> = normal(100 + seed, 256).iter().map(|t| t * spread).collect();
                kernels().trellis_ring(&values, &targets, &mut scratch, &mut states);
                assert!(is_ring(&states, bits));
                sum += error(&table, &targets, &states) / f64::from(spread * spread) / (3.0 * 256.0);
            }
            assert!(sum < most, "{bits} bits: {sum}");
        }
    }
}
