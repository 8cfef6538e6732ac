//! Code books: formats with codes that index a table of levels.

/// A named table of levels.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Book {
    /// NormalFloat-4 of QLoRA (Dettmers et al. 2023, appendix E), with bitsandbytes' table (torchao rounds to four
    /// digits).
    Nf4,
    /// FP4 map of bitsandbytes (`create_fp4_map`): differs from E2M1 in values and code order.
    Fp4Bnb,
    /// The signed dynamic map of 8-bit optimizers (Dettmers et al. 2022, section 2.1, `create_dynamic_map`): decimal
    /// exponents of unary length, each with twice the fractions of the one below, so that 0 and ±1 are exact.
    Dyn8,
    /// The unsigned dynamic map of 8 bits, for second moments.
    Dyn8Unsigned,
    /// The signed dynamic map of 4 bits (torchao's `create_dynamic_map(True, 3, 4)`).
    Dyn4,
    /// Signed linear map of 8 bits (`create_linear_map` of bitsandbytes): 255 even levels over [-1, 1], and zero.
    Lin8,
    /// Unsigned linear map of 8 bits: 256 even levels over [0, 1]. Values below 1/510 of their block's amax become 0.
    Lin8Unsigned,
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

/// Levels of the signed dynamic map of 8 bits; index = code.
pub static DYN8: [f32; 256] = dynamic_map(true);
/// Levels of the unsigned dynamic map of 8 bits; index = code.
pub static DYN8_UNSIGNED: [f32; 256] = dynamic_map(false);
/// Levels of the signed dynamic map of 4 bits; index = code.
pub static DYN4: [f32; 16] = dynamic_map(true);
/// Levels of the signed linear map of 8 bits; index = code.
pub static LIN8: [f32; 256] = linear_map(true);
/// Levels of the unsigned linear map of 8 bits; index = code.
pub static LIN8_UNSIGNED: [f32; 256] = linear_map(false);

impl Book {
    /// Every book.
    pub const ALL: [Book; 7] =
        [Book::Nf4, Book::Fp4Bnb, Book::Dyn8, Book::Dyn8Unsigned, Book::Dyn4, Book::Lin8, Book::Lin8Unsigned];

    /// Name in the Scheme grammar.
    pub const fn name(self) -> &'static str {
        match self {
            Book::Nf4 => "nf4",
            Book::Fp4Bnb => "fp4-bnb",
            Book::Dyn8 => "dyn8",
            Book::Dyn8Unsigned => "dyn8-unsigned",
            Book::Dyn4 => "dyn4",
            Book::Lin8 => "lin8",
            Book::Lin8Unsigned => "lin8-unsigned",
        }
    }

    /// Bits of a code.
    pub const fn bits(self) -> u32 {
        match self {
            Book::Nf4 | Book::Fp4Bnb | Book::Dyn4 => 4,
            Book::Dyn8 | Book::Dyn8Unsigned | Book::Lin8 | Book::Lin8Unsigned => 8,
        }
    }

    /// Default block size in elements: 64 for the weight formats, as in bitsandbytes, and 256 for the maps of
    /// optimizer state.
    pub const fn default_block(self) -> u32 {
        if self.is_state_map() { 256 } else { 64 }
    }

    /// True for the maps of optimizer state, which bitsandbytes' CPU code quantizes through a table of 65 536 entries
    /// ([`encode_by_table`](Self::encode_by_table)).
    pub const fn is_state_map(self) -> bool {
        !matches!(self, Book::Nf4 | Book::Fp4Bnb)
    }

    /// Map for magnitudes, such as second moments, that corresponds to a signed one.
    pub const fn unsigned(self) -> Option<Book> {
        match self {
            Book::Dyn8 => Some(Book::Dyn8Unsigned),
            Book::Lin8 => Some(Book::Lin8Unsigned),
            _ => None,
        }
    }

    /// All levels; index = code.
    pub fn levels(self) -> &'static [f32] {
        match self {
            Book::Nf4 => &NF4,
            Book::Fp4Bnb => &FP4_BNB,
            Book::Dyn8 => &DYN8,
            Book::Dyn8Unsigned => &DYN8_UNSIGNED,
            Book::Dyn4 => &DYN4,
            Book::Lin8 => &LIN8,
            Book::Lin8Unsigned => &LIN8_UNSIGNED,
        }
    }

    /// The level of `code`; NaN past the last.
    pub fn level(self, code: u32) -> f32 {
        self.levels().get(code as usize).copied().unwrap_or(f32::NAN)
    }

    /// All codes, ascending by level.
    pub fn ascending(self) -> &'static [u8] {
        match self {
            Book::Fp4Bnb => &FP4_BNB_ASCENDING,
            _ => &IDENTITY[..self.levels().len()],
        }
    }

    /// Code of the level nearest to `v` in [-1, 1]. The number of midpoints strictly below `v` selects the sorted
    /// level, so a value on a midpoint takes the lower one. Midpoints are f32, as in bitsandbytes.
    pub fn encode(self, v: f32) -> u32 {
        let (levels, order) = (self.levels(), self.ascending());
        let level = |i: usize| levels[usize::from(order[i])];
        let below = |i: usize| (level(i) + level(i + 1)) / 2.0 < v;
        let (mut low, mut high) = (0, order.len() - 1);
        while low < high {
            let middle = (low + high) / 2;
            if below(middle) { low = middle + 1 } else { high = middle }
        }
        u32::from(order[low])
    }

    /// Code by bitsandbytes' CPU backend: the nearest code to the nearest of 65 536 points over [-1, 1], all in f32.
    pub fn encode_by_table(self, v: f32) -> u32 {
        let point = ((v.clamp(-1.0, 1.0) + 1.0) * 0.5 * 65535.0 + 0.5).trunc();
        self.encode(-1.0 + 2.0 * point / 65535.0)
    }
}

/// Both zeros are kept, the positive one first: a value just above zero takes code 8, as in bitsandbytes' CPU
/// backend.
const FP4_BNB_ASCENDING: [u8; 16] = [11, 10, 13, 12, 15, 14, 9, 0, 8, 1, 6, 7, 4, 5, 2, 3];

static IDENTITY: [u8; 256] = {
    let mut all = [0; 256];
    let mut i = 0;
    while i < 256 {
        all[i] = i as u8;
        i += 1;
    }
    all
};

/// `create_dynamic_map` of bitsandbytes for `N` codes, ascending. It holds 0 and 1, and for each decade from the
/// lowest up `2^i` (signed) or `2^(i+1)` levels of either sign: the means of neighbours on an even grid over [0.1,
/// 1], in f32.
const fn dynamic_map<const N: usize>(signed: bool) -> [f32; N] {
    const DECADES: [f32; 7] = [1.0, 1e-1, 1e-2, 1e-3, 1e-4, 1e-5, 1e-6];
    let decades = N.ilog2() as usize - 1;
    let zero = if signed { N / 2 - 1 } else { 0 };
    let mut map = [0.0; N];
    map[N - 1] = 1.0;
    let (mut decade, mut next) = (0, 1);
    while decade < decades {
        let levels = if signed { 1 << decade } else { 2 << decade };
        let mut j = 0;
        while j < levels {
            let mean = (grid_point(j, levels) + grid_point(j + 1, levels)) / 2.0;
            let level = DECADES[decades - 1 - decade] * mean;
            map[zero + next] = level;
            if signed {
                map[zero - next] = -level;
            }
            next += 1;
            j += 1;
        }
        decade += 1;
    }
    map
}

/// `create_linear_map` of bitsandbytes for 8 bits, ascending: `torch.linspace(-1, 1, 255)` with a zero before its middle, or `torch.linspace(0, 1, 256)`; the upper half counts down from the end.
const fn linear_map(signed: bool) -> [f32; 256] {
    let (start, points) = if signed { (-1.0f32, 255) } else { (0.0, 256) };
    let step = (1.0 - start) / (points - 1) as f32;
    let mut map = [0.0; 256];
    let mut i = 0;
    while i < points {
        let low = (start as f64 + step as f64 * i as f64) as f32;
        let high = (1.0 - step as f64 * (points - 1 - i) as f64) as f32;
        let level = if i < points / 2 { low } else { high };
        // The signed map inserts zero as code 127; the middle of the grid, 3.7e-9 by the rounded step, follows it.
        map[if signed && i >= 127 { i + 1 } else { i }] = level;
        i += 1;
    }
    map
}

/// Point `i` of `torch.linspace(0.1, 1, n + 1)`: the step is an f32, product and sum are rounded once (a fused
/// multiply-add), and the upper half counts down from the end.
const fn grid_point(i: usize, n: usize) -> f32 {
    let step = ((1.0f32 - 0.1) / n as f32) as f64;
    let low = 0.1f32 as f64 + step * i as f64;
    (if i < n.div_ceil(2) { low } else { 1.0 - step * (n - i) as f64 }) as f32
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
