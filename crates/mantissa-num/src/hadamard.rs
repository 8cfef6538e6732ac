//! Hadamard rotations: fast orthogonal transforms that spread outliers over all channels.
//!
//! `H = kron(B, S) / sqrt(n)` with `n = K·2^p`, `S` the Sylvester matrix of order `2^p` and `B` a Hadamard matrix of
//! order `K`. `K` is chosen as in QuaRot (Ashkboos et al. 2024, arXiv 2404.00456, section 3 and its published code):
//! 1 for powers of two, else the first of 172, 156, 140, 108, 60, 52, 36, 28, 40, 20, 12 that leaves a power of two.
//! Vectors `x[n]` are rows: `y = x·Hᵀ`, and `x = y·H` because `H` is orthogonal. The `S` part takes `n·p` additions,
//! the `B` part `n·K`.
//!
//! The order of additions is fixed, so the result depends only on the input.

mod bases;

use crate::round::random_u32;

/// Base orders that are tried, with their matrices as bits, in the order of QuaRot's `get_hadK`.
const BASES: [(usize, &[u32]); 11] = [
    (172, &bases::HAD172),
    (156, &bases::HAD156),
    (140, &bases::HAD140),
    (108, &bases::HAD108),
    (60, &bases::HAD60),
    (52, &bases::HAD52),
    (36, &bases::HAD36),
    (28, &bases::HAD28),
    (40, &bases::HAD40),
    (20, &bases::HAD20),
    (12, &bases::HAD12),
];

/// Largest order of [`BASES`].
const MAX_BASE: usize = 172;

/// The fixed signs of Transformer Engine's 16-point randomized transform for NVFP4 training.
pub const TE_SIGNS16: [i8; 16] = [1, 1, 1, -1, 1, -1, -1, -1, -1, -1, -1, 1, -1, 1, -1, -1];

/// f32 or f64.
pub trait Real: Copy + Default + private::Sealed {
    /// `self + other`, rounded.
    fn plus(self, other: Self) -> Self;
    /// `self - other`, rounded.
    fn minus(self, other: Self) -> Self;
    /// `self · factor`, the factor rounded first.
    fn times(self, factor: f64) -> Self;
}

mod private {
    pub trait Sealed {}
    impl Sealed for f32 {}
    impl Sealed for f64 {}
}

impl Real for f32 {
    fn plus(self, other: Self) -> Self {
        self + other
    }
    fn minus(self, other: Self) -> Self {
        self - other
    }
    fn times(self, factor: f64) -> Self {
        self * factor as f32
    }
}

impl Real for f64 {
    fn plus(self, other: Self) -> Self {
        self + other
    }
    fn minus(self, other: Self) -> Self {
        self - other
    }
    fn times(self, factor: f64) -> Self {
        self * factor
    }
}

/// Hadamard transform of one length, optionally with signs: `y = (x·diag(signs))·Hᵀ`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Hadamard {
    n: usize,
    base: Option<(usize, &'static [u32])>,
    signs: Option<Vec<i8>>,
}

impl Hadamard {
    /// Creates the transform of vectors of `n`. `None` if `n` is 0 or no known base leaves a power of two.
    pub fn new(n: usize) -> Option<Self> {
        let base = match n.is_power_of_two() {
            true => None,
            false => Some(*BASES.iter().find(|(k, _)| n.is_multiple_of(*k) && (n / k).is_power_of_two())?),
        };
        Some(Hadamard { n, base, signs: None })
    }

    /// The same with `signs`, each 1 or -1, applied first. `None` if their number is wrong or one is neither.
    pub fn with_signs(self, signs: &[i8]) -> Option<Self> {
        let fits = signs.len() == self.n && signs.iter().all(|s| s.abs() == 1);
        fits.then(|| Hadamard { signs: Some(signs.to_vec()), ..self })
    }

    /// Randomized transform with signs from `seed`: element `i` is negated if bit 31 of its random word is set.
    pub fn randomized(self, seed: u64) -> Self {
        let sign = |i: u64| if random_u32(seed, i) >> 31 == 1 { -1 } else { 1 };
        let signs = (0..self.n as u64).map(sign).collect();
        Hadamard { signs: Some(signs), ..self }
    }

    /// Length of the vectors.
    pub const fn order(&self) -> usize {
        self.n
    }

    /// Signs that are applied first, each 1 or -1; empty without any.
    pub fn signs(&self) -> &[i8] {
        self.signs.as_deref().unwrap_or_default()
    }

    /// Order `K` of the base matrix, 1 for a power of two.
    pub const fn base(&self) -> usize {
        match self.base {
            Some((k, _)) => k,
            None => 1,
        }
    }

    /// Computes `x·diag(signs)·Hᵀ` in place, for every whole vector in `x`.
    pub fn forward<T: Real>(&self, x: &mut [T]) {
        for x in x.chunks_exact_mut(self.n) {
            self.flip(x);
            self.transform(x, false);
        }
    }

    /// Computes `x·H·diag(signs)` in place, for every whole vector in `x`: the inverse of [`forward`](Self::forward).
    pub fn transpose<T: Real>(&self, x: &mut [T]) {
        for x in x.chunks_exact_mut(self.n) {
            self.transform(x, true);
            self.flip(x);
        }
    }

    fn flip<T: Real>(&self, x: &mut [T]) {
        for (x, &sign) in x.iter_mut().zip(self.signs.iter().flatten()) {
            if sign < 0 {
                *x = x.times(-1.0);
            }
        }
    }

    fn transform<T: Real>(&self, x: &mut [T], transposed: bool) {
        let segment = self.n / self.base();
        x.chunks_exact_mut(segment).for_each(sylvester);
        if let Some((k, rows)) = self.base {
            (0..segment).for_each(|column| combine(x, segment, column, k, rows, transposed));
        }
        let norm = 1.0 / (self.n as f64).sqrt();
        x.iter_mut().for_each(|x| *x = x.times(norm));
    }
}

/// Walsh-Hadamard butterflies in natural order: unscaled `x·S` for a power of two.
fn sylvester<T: Real>(x: &mut [T]) {
    let mut half = 1;
    while half < x.len() {
        for pair in x.chunks_exact_mut(2 * half) {
            let (low, high) = pair.split_at_mut(half);
            for (a, b) in low.iter_mut().zip(high) {
                (*a, *b) = (a.plus(*b), a.minus(*b));
            }
        }
        half *= 2;
    }
}

/// Multiplies the `k` elements `x[column + i·segment]` by the base matrix or its transpose.
fn combine<T: Real>(x: &mut [T], segment: usize, column: usize, k: usize, rows: &[u32], transposed: bool) {
    let per_row = k.div_ceil(32);
    let negative = |i: usize, j: usize| rows[i * per_row + j / 32] >> (j % 32) & 1 == 1;
    let mut old = [T::default(); MAX_BASE];
    for (i, old) in old.iter_mut().enumerate().take(k) {
        *old = x[column + i * segment];
    }
    for i in 0..k {
        let mut sum = T::default();
        for (j, &v) in old.iter().enumerate().take(k) {
            let minus = if transposed { negative(j, i) } else { negative(i, j) };
            sum = if minus { sum.minus(v) } else { sum.plus(v) };
        }
        x[column + i * segment] = sum;
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    #[test]
    fn every_base_is_orthogonal_and_chosen_for_its_multiples() {
        for (k, rows) in BASES {
            let per_row = k.div_ceil(32);
            let row = |i: usize| &rows[i * per_row..][..per_row];
            for i in 0..k {
                for j in 0..i {
                    let differ: u32 = row(i).iter().zip(row(j)).map(|(a, b)| (a ^ b).count_ones()).sum();
                    assert_eq!(differ as usize, k / 2, "rows {i} and {j} of {k}");
                }
            }
            assert_eq!(rows.len(), k * per_row);
        }
        let base = |n| Hadamard::new(n).map(|h| h.base());
        // 11008 and 14336 are MLP widths of Llama 2 7B and Llama 3 8B.
        assert_eq!(
            [base(11_008), base(14_336), base(4096), base(80)],
            [Some(172), Some(28), Some(1), Some(40)]
        );
        assert_eq!([base(0), base(24 * 7), base(96)], [None, None, Some(12)]);
    }

    #[test]
    fn transposing_inverts_also_with_signs() {
        for n in [1, 2, 12, 40, 64, 344] {
            let transform = Hadamard::new(n).unwrap().randomized(5);
            let x: Vec<f64> = (0..2 * n).map(|i| (i as f64 * 0.7).sin()).collect();
            let mut y = x.clone();
            transform.forward(&mut y);
            transform.transpose(&mut y);
            assert!(x.iter().zip(&y).all(|(a, b)| (a - b).abs() < 1e-13), "{n}");
        }
        assert!(Hadamard::new(4).unwrap().with_signs(&[1, -1, 0, 1]).is_none());
    }
}
