//! Rounding of blocks to the elements of a format in place, nearest or stochastic: simulated quantization of matmul
//! operands in training. Steps and scales come from the reference rules of `mantissa-num`; these loops apply them.

use mantissa_num::round::philox4x32_10;

use super::Step;

/// Elements of a format before scaling: evenly spaced between two powers of two, and below the smallest normal one.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct ElementGrid {
    /// Bit pattern of the smallest normal element.
    least: u32,
    /// Mantissa bits, at the position of f32's exponent.
    mantissa: u32,
    low: f32,
    high: f32,
}

impl ElementGrid {
    /// Floats of at most 8 bits: their mantissa bits after the leading one, smallest normal and largest element.
    pub fn float(mantissa_bits: u32, min_normal: f32, max: f32) -> Self {
        ElementGrid { least: min_normal.to_bits(), mantissa: mantissa_bits << 23, low: -max, high: max }
    }

    /// Integers between `low` and `high`, of magnitude up to 255.
    pub fn int(low: f32, high: f32) -> Self {
        // Floats of 7 mantissa bits below 2^8 with subnormals up to 2^7: all have a distance of 1.
        ElementGrid { least: 128f32.to_bits(), mantissa: 7 << 23, low, high }
    }

    /// Nearest element, ties to even.
    #[inline(always)]
    fn nearest(self, x: f32) -> f32 {
        let x = super::clamp(x, self.low, self.high);
        let magnitude = x.abs();
        // Power of two whose f32 step is the distance of elements around `magnitude`.
        let exponent = (magnitude.to_bits() & 0x7f80_0000).max(self.least);
        let magic = f32::from_bits(exponent.wrapping_add((23 << 23) - self.mantissa));
        ((magnitude + magic) - magic).copysign(x)
    }

    /// Lower neighbour in magnitude, or the upper one if `word` is below 2^32 times the distance from the lower.
    #[inline(always)]
    fn stochastic(self, x: f32, word: u32) -> f32 {
        let x = super::clamp(x, self.low, self.high);
        let magnitude = x.abs();
        let exponent = (magnitude.to_bits() & 0x7f80_0000).max(self.least);
        let distance = exponent.wrapping_sub(self.mantissa);
        let units = magnitude * f32::from_bits((254_u32 << 23).wrapping_sub(distance));
        let nearest = (units + 8_388_608.0) - 8_388_608.0;
        let floor = if nearest > units { nearest - 1.0 } else { nearest };
        // Exact: `units` has 24 bits, and the product scales them by a power of two.
        let threshold = ((units - floor) * 4_294_967_296.0) as u32;
        let units = if word < threshold { floor + 1.0 } else { floor };
        (units * f32::from_bits(distance)).copysign(x)
    }
}

#[inline(always)]
pub(crate) fn round_blocks(
    x: &mut [f32],
    group: usize,
    steps: &[Step],
    scales: &[f32],
    grid: ElementGrid,
    random: &[u32],
) {
    assert!(group > 0 && steps.len() == x.len().div_ceil(group), "round_blocks: {} steps", steps.len());
    assert_eq!(scales.len(), steps.len(), "round_blocks: scales and steps differ in length");
    assert!(random.is_empty() || random.len() == x.len(), "round_blocks: {} random words", random.len());
    let blocks = x.chunks_mut(group).zip(steps.iter().zip(scales));
    if random.is_empty() {
        for (x, (&step, &scale)) in blocks {
            match step {
                Step::Divide(by) => {
                    for x in x {
                        *x = grid.nearest(*x / by) * scale;
                    }
                }
                Step::Multiply(by) => {
                    for x in x {
                        *x = grid.nearest(*x * by) * scale;
                    }
                }
            }
        }
        return;
    }
    for ((x, (&step, &scale)), words) in blocks.zip(random.chunks(group)) {
        match step {
            Step::Divide(by) => {
                for (x, &word) in x.iter_mut().zip(words) {
                    *x = grid.stochastic(*x / by, word) * scale;
                }
            }
            Step::Multiply(by) => {
                for (x, &word) in x.iter_mut().zip(words) {
                    *x = grid.stochastic(*x * by, word) * scale;
                }
            }
        }
    }
}

#[inline(always)]
pub(crate) fn round_codes(
    x: &[f32],
    group: usize,
    steps: &[Step],
    grid: ElementGrid,
    random: &[u32],
    codes: &mut [i8],
) {
    assert!(group > 0 && steps.len() == x.len().div_ceil(group), "round_codes: {} steps", steps.len());
    assert_eq!(x.len(), codes.len(), "round_codes: x and codes differ in length");
    assert!(random.is_empty() || random.len() == x.len(), "round_codes: {} random words", random.len());
    let (low, high) = (grid.low, grid.high);
    let nearest = |x: f32| super::round_even_i32(super::clamp(x, low, high)) as i8;
    let stochastic = |x: f32, word: u32| super::round_even_i32(grid.stochastic(x, word)) as i8;
    for (g, (x, codes)) in x.chunks(group).zip(codes.chunks_mut(group)).enumerate() {
        let words = random.get(g * group..).unwrap_or_default();
        match (steps[g], random.is_empty()) {
            (Step::Divide(by), true) => {
                x.iter().zip(codes).for_each(|(x, code)| *code = nearest(*x / by));
            }
            (Step::Multiply(by), true) => {
                x.iter().zip(codes).for_each(|(x, code)| *code = nearest(*x * by));
            }
            (Step::Divide(by), false) => {
                x.iter()
                    .zip(words)
                    .zip(codes)
                    .for_each(|((x, word), code)| *code = stochastic(*x / by, *word));
            }
            (Step::Multiply(by), false) => {
                x.iter()
                    .zip(words)
                    .zip(codes)
                    .for_each(|((x, word), code)| *code = stochastic(*x * by, *word));
            }
        }
    }
}

/// Side of the squares that are transposed at a time: a cache line of f32.
const SIDE: usize = 16;

#[inline(always)]
pub(crate) fn transpose_columns(x: &[f32], cols: usize, first: usize, rows: usize, out: &mut [f32]) {
    let n = out.len() / rows.max(1);
    assert!(out.len() == n * rows && first + n <= cols && x.len() >= rows * cols, "transpose_columns: {n}");
    let whole = rows / SIDE * SIDE;
    for j in (0..n).step_by(SIDE) {
        let width = SIDE.min(n - j);
        for i in (0..whole).step_by(SIDE) {
            let mut square = [[0.0; SIDE]; SIDE];
            if width == SIDE {
                for (row, to) in square.iter_mut().enumerate() {
                    to.copy_from_slice(&x[(i + row) * cols + first + j..][..SIDE]);
                }
            } else {
                for (row, to) in square.iter_mut().enumerate() {
                    to[..width].copy_from_slice(&x[(i + row) * cols + first + j..][..width]);
                }
            }
            for line in 0..width {
                let mut column = [0.0; SIDE];
                for (row, to) in column.iter_mut().enumerate() {
                    *to = square[row][line];
                }
                out[(j + line) * rows + i..][..SIDE].copy_from_slice(&column);
            }
        }
        for i in whole..rows {
            for line in 0..width {
                out[(j + line) * rows + i] = x[i * cols + first + j + line];
            }
        }
    }
}

/// Blocks of four words computed side by side.
const LANES: usize = 16;

#[inline(always)]
pub(crate) fn random_words(seed: u64, first: u64, out: &mut [u32]) {
    let mut index = first;
    let mut rest = out;
    // Up to the next whole block.
    let lead = ((4 - (first & 3)) & 3).min(rest.len() as u64) as usize;
    let (head, tail) = std::mem::take(&mut rest).split_at_mut(lead);
    for (i, word) in head.iter_mut().enumerate() {
        *word = mantissa_num::round::random_u32(seed, first + i as u64);
    }
    index += lead as u64;
    rest = tail;
    let mut chunks = rest.chunks_exact_mut(4 * LANES);
    for words in &mut chunks {
        philox(seed, index >> 2, words);
        index += 4 * LANES as u64;
    }
    let tail = chunks.into_remainder();
    for words in tail.chunks_mut(4) {
        let counter = [(index >> 2) as u32, (index >> 34) as u32, 0, 0];
        let block = philox4x32_10(counter, [seed as u32, (seed >> 32) as u32]);
        words.copy_from_slice(&block[..words.len()]);
        index += 4;
    }
}

/// Philox4x32-10 (Salmon et al. 2011) of [`LANES`] consecutive counters from `first` on.
#[inline(always)]
fn philox(seed: u64, first: u64, words: &mut [u32]) {
    const M0: u64 = 0xD251_1F53;
    const M1: u64 = 0xCD9E_8D57;
    let mut c0 = [0u32; LANES];
    let mut c1 = [0u32; LANES];
    for i in 0..LANES {
        let counter = first.wrapping_add(i as u64);
        (c0[i], c1[i]) = (counter as u32, (counter >> 32) as u32);
    }
    let (mut c2, mut c3) = ([0u32; LANES], [0u32; LANES]);
    let (mut k0, mut k1) = (seed as u32, (seed >> 32) as u32);
    for _ in 0..10 {
        for i in 0..LANES {
            let (p0, p1) = (M0 * u64::from(c0[i]), M1 * u64::from(c2[i]));
            let (a, b) = ((p1 >> 32) as u32 ^ c1[i] ^ k0, (p0 >> 32) as u32 ^ c3[i] ^ k1);
            (c0[i], c1[i], c2[i], c3[i]) = (a, p1 as u32, b, p0 as u32);
        }
        k0 = k0.wrapping_add(0x9E37_79B9);
        k1 = k1.wrapping_add(0xBB67_AE85);
    }
    for (i, words) in words.chunks_exact_mut(4).enumerate() {
        words.copy_from_slice(&[c0[i], c1[i], c2[i], c3[i]]);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn columns_become_rows() {
        for (rows, cols, first, n) in
            [(35, 50, 3, 33), (16, 16, 0, 16), (5, 7, 2, 4), (48, 20, 4, 16), (0, 3, 0, 0)]
        {
            let x: Vec<f32> = (0..rows * cols).map(|i| i as f32).collect();
            let mut out = vec![-1.0; rows * n];
            transpose_columns(&x, cols, first, rows, &mut out);
            for (at, value) in out.iter().enumerate() {
                assert_eq!(*value, x[at % rows * cols + first + at / rows], "{rows} {cols} {at}");
            }
        }
    }

    #[test]
    fn random_words_are_those_of_the_reference() {
        for (seed, first, n) in [(7, 0, 300), (u64::MAX - 3, 5, 130), (1, (1 << 34) - 70, 200), (3, 2, 1)] {
            let mut words = vec![0; n];
            random_words(seed, first, &mut words);
            for (i, word) in words.iter().enumerate() {
                assert_eq!(
                    *word,
                    mantissa_num::round::random_u32(seed, first + i as u64),
                    "{seed} {first} {i}"
                );
            }
        }
    }
}
