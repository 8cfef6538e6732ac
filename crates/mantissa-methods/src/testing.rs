//! Values for tests.

/// Pseudo-random values from -1 to 1.
pub fn values(seed: u64, n: usize) -> Vec<f32> {
    let word = |i: usize| mantissa_num::round::random_u32(seed, i as u64);
    (0..n).map(|i| word(i) as f32 / u32::MAX as f32 * 2.0 - 1.0).collect()
}
