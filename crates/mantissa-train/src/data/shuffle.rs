//! Random-access permutation of `0..n`: needs no list in memory, and only the seed is stored.
//!
//! A balanced Feistel network over the smallest even number of bits that holds `n`, with Philox4x32-10 as the
//! round function (Luby & Rackoff 1988), restricted to the range by cycle walking (Black & Rogaway 2002,
//! "Ciphers with Arbitrary Finite Domains").

use mantissa_num::round::philox4x32_10;

/// Rounds of the network. Four give a pseudorandom permutation (Luby & Rackoff); six cost little more.
const ROUNDS: u32 = 6;

/// Permutation of `0..n`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Shuffle {
    n: u64,
    seed: u64,
    epoch: u64,
    /// Bits per half.
    half: u32,
}

impl Shuffle {
    /// Makes the permutation of `0..n` for `seed` and `epoch`.
    pub fn new(n: u64, seed: u64, epoch: u64) -> Self {
        let bits = u64::BITS - n.saturating_sub(1).leading_zeros();
        Shuffle { n, seed, epoch, half: bits.div_ceil(2).max(1) }
    }

    /// Returns the element at `place`, both in `0..n`.
    ///
    /// # Panics
    /// If `place` is not below `n`.
    pub fn at(&self, place: u64) -> u64 {
        assert!(place < self.n, "Shuffle::at: {place} of {}", self.n);
        // Cycle walking: the network permutes fewer than 4 n numbers, so a few steps lead back into the
        // range.
        let mut x = self.permute(place);
        while x >= self.n {
            x = self.permute(x);
        }
        x
    }

    fn permute(&self, x: u64) -> u64 {
        let mask = (1u64 << self.half) - 1;
        let (mut left, mut right) = (x >> self.half, x & mask);
        for round in 0..ROUNDS {
            (left, right) = (right, left ^ (self.round(round, right) & mask));
        }
        left << self.half | right
    }

    fn round(&self, round: u32, x: u64) -> u64 {
        let epoch = self.epoch as u32 ^ ((self.epoch >> 32) as u32).rotate_left(16);
        let counter = [x as u32, (x >> 32) as u32, round, epoch];
        let [a, b, ..] = philox4x32_10(counter, [self.seed as u32, (self.seed >> 32) as u32]);
        u64::from(a) | u64::from(b) << 32
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_place_once() {
        for n in [1u64, 2, 3, 4, 5, 63, 64, 65, 1000, 4097] {
            for (seed, epoch) in [(0, 0), (1, 0), (0, 1), (u64::MAX, 7)] {
                let shuffle = Shuffle::new(n, seed, epoch);
                let mut seen: Vec<_> = (0..n).map(|place| shuffle.at(place)).collect();
                seen.sort_unstable();
                assert!(seen.into_iter().eq(0..n), "{n} {seed} {epoch}");
            }
        }
    }

    #[test]
    fn seeds_and_epochs_give_other_orders_that_look_random() {
        let n = 1000;
        let order = |seed, epoch| (0..n).map(|i| Shuffle::new(n, seed, epoch).at(i)).collect::<Vec<_>>();
        let orders = [order(1, 0), order(1, 1), order(2, 0)];
        for (i, a) in orders.iter().enumerate() {
            let fixed = a.iter().enumerate().filter(|(place, x)| *place as u64 == **x).count();
            assert!(fixed < 8, "{fixed} stay");
            let rising = a.windows(2).filter(|w| w[0] < w[1]).count();
            // Half of 999, within five standard deviations of 9.1.
            assert!(rising.abs_diff(500) < 46, "{rising} rise");
            for b in &orders[..i] {
                assert!(a.iter().zip(b).filter(|(a, b)| a == b).count() < 8);
            }
        }
    }
}
