//! Rounding modes and the counter-based random numbers of stochastic rounding.
//!
//! Philox4x32-10: J. Salmon et al., "Parallel Random Numbers: As Easy as 1, 2, 3", SC 2011. The counter is the
//! element's index in its tensor and the key is the seed, so the result depends on neither order nor threads.

/// Rounding of a real value to one of its two adjacent codes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum Rounding {
    /// To the nearest code, ties to the even code (RNE).
    #[default]
    NearestEven,
    /// To the nearest code, ties toward zero (DeepGEMM's FP4).
    NearestDown,
    /// Up (away from zero) with a probability equal to the distance from the lower neighbour.
    Stochastic {
        /// Key of the random stream.
        seed: u64,
    },
    /// [`Rounding::Stochastic`] with this random word for every element, drawn by another generator.
    Drawn {
        /// Random word; rounds up if it is below `2^32` times the distance from the lower neighbour.
        word: u32,
    },
}

impl Rounding {
    /// `value / 2^drop` rounded to an integer. `index` is the element's position: the counter of the random stream.
    pub fn shift_right(self, value: u64, drop: u32, index: u64) -> u64 {
        if drop == 0 {
            return value;
        }
        let whole = value.checked_shr(drop).unwrap_or(0);
        let rest = if drop >= 64 { value } else { value & ((1 << drop) - 1) };
        match self {
            Rounding::NearestEven => whole + u64::from(rounds_up(rest, drop, whole & 1 == 1)),
            Rounding::NearestDown => whole + u64::from(rounds_up(rest, drop, false)),
            Rounding::Stochastic { .. } | Rounding::Drawn { .. } => {
                // rest / 2^drop as a 32-bit fixed-point probability, truncated below 2^-32.
                let probability = (u128::from(rest) << 32).checked_shr(drop).unwrap_or(0) as u64;
                whole + u64::from(u64::from(self.word(index)) < probability)
            }
        }
    }

    /// The random word of element `index`.
    fn word(self, index: u64) -> u32 {
        match self {
            Rounding::Stochastic { seed } => random_u32(seed, index),
            Rounding::Drawn { word } => word,
            Rounding::NearestEven | Rounding::NearestDown => 0,
        }
    }

    /// `x` rounded to an integer value in f32. Non-finite values pass through.
    pub fn integer(self, x: f32, index: u64) -> f32 {
        match self {
            Rounding::NearestEven => x.round_ties_even(),
            Rounding::NearestDown => {
                let floor = x.abs().floor();
                (floor + f32::from(u8::from(x.abs() - floor > 0.5))).copysign(x)
            }
            Rounding::Stochastic { .. } | Rounding::Drawn { .. } => {
                let magnitude = x.abs();
                let floor = magnitude.floor();
                // The fraction is exact in f32, and its product with 2^32 exact in f64; truncated below 2^-32, as in
                // `shift_right`.
                let threshold = (f64::from(magnitude - floor) * 4_294_967_296.0) as u64;
                let up = u64::from(self.word(index)) < threshold;
                (floor + f32::from(u8::from(up))).copysign(x)
            }
        }
    }
}

fn rounds_up(rest: u64, drop: u32, odd: bool) -> bool {
    if drop > 64 {
        return false; // less than a quarter of a unit
    }
    let half = 1u64 << (drop - 1);
    rest > half || (rest == half && odd)
}

/// Word of the stream `seed` for element `index`.
pub fn random_u32(seed: u64, index: u64) -> u32 {
    // One block of four words serves four adjacent elements.
    let block =
        philox4x32_10([(index >> 2) as u32, (index >> 34) as u32, 0, 0], [seed as u32, (seed >> 32) as u32]);
    block[(index & 3) as usize]
}

/// One block of Philox4x32 with ten rounds.
pub fn philox4x32_10(counter: [u32; 4], key: [u32; 2]) -> [u32; 4] {
    // Multipliers and Weyl constants of the paper, table 2 and section 3.3.
    const M0: u64 = 0xD251_1F53;
    const M1: u64 = 0xCD9E_8D57;
    const W0: u32 = 0x9E37_79B9;
    const W1: u32 = 0xBB67_AE85;
    let (mut c, mut k) = (counter, key);
    for round in 0..10 {
        if round > 0 {
            k = [k[0].wrapping_add(W0), k[1].wrapping_add(W1)];
        }
        let p0 = M0 * u64::from(c[0]);
        let p1 = M1 * u64::from(c[2]);
        c = [(p1 >> 32) as u32 ^ c[1] ^ k[0], p1 as u32, (p0 >> 32) as u32 ^ c[3] ^ k[1], p0 as u32];
    }
    c
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn philox_matches_the_published_vectors() {
        // Random123 1.14, tests/kat_vectors, philox4x32 with 10 rounds.
        let cases = [
            ([0; 4], [0; 2], [0x6627_e8d5, 0xe169_c58d, 0xbc57_ac4c, 0x9b00_dbd8]),
            ([u32::MAX; 4], [u32::MAX; 2], [0x408f_276d, 0x41c8_3b0e, 0xa20b_c7c6, 0x6d54_51fd]),
            (
                [0x243f_6a88, 0x85a3_08d3, 0x1319_8a2e, 0x0370_7344],
                [0xa409_3822, 0x299f_31d0],
                [0xd16c_fe09, 0x94fd_cceb, 0x5001_e420, 0x2412_6ea1],
            ),
        ];
        for (counter, key, expected) in cases {
            assert_eq!(philox4x32_10(counter, key), expected);
        }
    }

    #[test]
    fn nearest_shift_ties_to_even() {
        let round = |v, d| Rounding::NearestEven.shift_right(v, d, 0);
        assert_eq!([round(5, 1), round(7, 1), round(6, 2), round(10, 2), round(9, 2)], [2, 4, 2, 2, 2]);
        assert_eq!([round(1 << 23, 24), round((1 << 23) + 1, 24), round(u64::MAX, 65)], [0, 1, 0]);
    }

    #[test]
    fn stochastic_integers_bracket_and_average() {
        let mode = Rounding::Stochastic { seed: 3 };
        let n = 40_000;
        let sum: f64 = (0..n).map(|i| f64::from(mode.integer(-2.25, i))).sum();
        let mean = sum / n as f64;
        assert!((mean + 2.25).abs() < 5.0 * (0.25 * 0.75 / n as f64).sqrt(), "{mean}");
        assert!((0..1000).all(|i| mode.integer(4.0, i) == 4.0));
    }
}
