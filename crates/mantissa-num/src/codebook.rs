//! Code books: formats whose codes are indices into a table of levels.

/// A named table of levels.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Book {
    /// NormalFloat-4 of QLoRA (Dettmers et al. 2023, appendix E), as bitsandbytes and torchao tabulate it.
    Nf4,
    /// The FP4 map of bitsandbytes (`create_fp4_map`): not E2M1, neither in values nor in code order.
    Fp4Bnb,
}

/// Levels of NF4; index = code. `NF4[7]` is zero.
pub const NF4: [f32; 16] = [
    -1.0,
    -0.6961928009986877,
    -0.5250730514526367,
    -0.39491748809814453,
    -0.28444138169288635,
    -0.18477343022823334,
    -0.09105003625154495,
    0.0,
    0.07958029955625534,
    0.16093020141124725,
    0.24611230194568634,
    0.33791524171829224,
    0.44070982933044434,
    0.5626170039176941,
    0.7229568362236023,
    1.0,
];

/// Levels of bitsandbytes' FP4 in its own bit order (sign | two "exponent" bits | mantissa): 0, 1/192, 2/3, 1, 1/3, 1/2,
/// 1/6, 1/4 and negatives.
pub const FP4_BNB: [f32; 16] = [
    0.0,
    0.005208333333333333,
    0.6666666666666666,
    1.0,
    0.3333333333333333,
    0.5,
    0.16666666666666666,
    0.25,
    0.0,
    -0.005208333333333333,
    -0.6666666666666666,
    -1.0,
    -0.3333333333333333,
    -0.5,
    -0.16666666666666666,
    -0.25,
];

/// Codes in ascending order of their levels.
const NF4_ASCENDING: [u8; 16] = [0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15];
/// Both zeros are kept, positive first: a value just above zero takes code 8, as the bitsandbytes CPU backend does.
const FP4_BNB_ASCENDING: [u8; 16] = [11, 10, 13, 12, 15, 14, 9, 0, 8, 1, 6, 7, 4, 5, 2, 3];

impl Book {
    /// Name in the Scheme grammar.
    pub const fn name(self) -> &'static str {
        match self {
            Book::Nf4 => "nf4",
            Book::Fp4Bnb => "fp4-bnb",
        }
    }

    /// Bits of a code.
    pub const fn bits(self) -> u32 {
        match self {
            Book::Nf4 | Book::Fp4Bnb => 4,
        }
    }

    /// All levels; index = code.
    pub const fn levels(self) -> &'static [f32] {
        match self {
            Book::Nf4 => &NF4,
            Book::Fp4Bnb => &FP4_BNB,
        }
    }

    /// All codes, ascending by level.
    pub const fn ascending(self) -> &'static [u8] {
        match self {
            Book::Nf4 => &NF4_ASCENDING,
            Book::Fp4Bnb => &FP4_BNB_ASCENDING,
        }
    }

    /// Code of the level nearest to `v` in [-1, 1]: with the levels sorted, the number of midpoints strictly below `v`
    /// picks the code, so that a value on a midpoint takes the lower level (bitsandbytes' `dQuantizeNF4`).
    pub fn encode(self, v: f32) -> u32 {
        let (levels, order) = (self.levels(), self.ascending());
        let level = |i: u8| levels[usize::from(i)];
        let below = order.windows(2).filter(|pair| (level(pair[0]) + level(pair[1])) / 2.0 < v).count();
        u32::from(order[below])
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn levels_are_fixed_points_and_ties_go_down() {
        for (code, &level) in NF4.iter().enumerate() {
            assert_eq!(Book::Nf4.encode(level), code as u32);
        }
        for (code, pair) in NF4.windows(2).enumerate() {
            assert_eq!(Book::Nf4.encode((pair[0] + pair[1]) / 2.0), code as u32);
        }
    }
}
