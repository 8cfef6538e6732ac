//! Initial values of adapters.

use mantissa_kernels::kernels;
use mantissa_model::LoadError;
use mantissa_num::Quantized;
use mantissa_num::round::{philox4x32_10, random_u32};

use super::svd;
use crate::lora::Lora;

/// Initial tensors of an adapter.
#[derive(Clone, Debug, Default, PartialEq)]
pub(crate) struct Factors {
    /// A, `[rank, cols]`.
    pub(crate) a: Vec<f32>,
    /// B, `[rows, rank]`.
    pub(crate) b: Vec<f32>,
    /// DoRA's magnitudes, `[rows]`; empty for LoRA.
    pub(crate) magnitude: Vec<f32>,
}

/// Returns the seed of random stream `index` of a run.
pub(crate) fn stream(seed: u64, index: u64) -> u64 {
    let words = philox4x32_10([index as u32, (index >> 32) as u32, 0, 2], [seed as u32, (seed >> 32) as u32]);
    u64::from(words[0]) << 32 | u64::from(words[1])
}

/// Initializes A uniformly within `1 / √cols` and B with zeros, as PEFT does (Kaiming's bound with slope √5).
pub(crate) fn zero(lora: &Lora, (rows, cols): (usize, usize), seed: u64) -> Factors {
    let bound = 1.0 / (cols.max(1) as f64).sqrt();
    let value = |i: usize| {
        let unit = f64::from(random_u32(seed, i as u64)) / 4_294_967_296.0;
        ((2.0 * unit - 1.0) * bound) as f32
    };
    let a = (0..lora.rank * cols).map(value).collect();
    Factors { a, b: vec![0.0; rows * lora.rank], magnitude: Vec::new() }
}

/// Alternates between quantizing `W - s B A` and approximating the error `W - Q` by `s B A` of the adapter's rank
/// (LoftQ, algorithm 1). Keeps the step with the least error of the sum: it need not fall with every step.
///
/// # Errors
/// As `quantize`.
pub(crate) fn loftq(
    lora: &Lora,
    weight: &[f32],
    (rows, cols): (usize, usize),
    steps: usize,
    seed: u64,
    quantize: impl Fn(&[f32]) -> Result<Quantized, LoadError>,
) -> Result<(Quantized, Factors), LoadError> {
    let mut q = quantize(weight)?;
    let mut rest = vec![0.0; weight.len()];
    let (scale, split) = (lora.scale() as f32, (1.0 / lora.scale().sqrt()) as f32);
    let mut best: Option<(f64, Quantized, Factors)> = None;
    for _ in 0..steps {
        q.dequantize_rows(0..rows, &mut rest);
        rest.iter_mut().zip(weight).for_each(|(q, w)| *q = w - *q);
        let (mut b, mut a) = svd::halves(&rest, (rows, cols), lora.rank, seed);
        a.iter_mut().chain(&mut b).for_each(|v| *v *= split);
        let factors = Factors { a, b, magnitude: Vec::new() };
        add_product(&mut rest, &factors, -scale, cols);
        let error = kernels().sum_squares_f64(&rest);
        rest.copy_from_slice(weight);
        add_product(&mut rest, &factors, -scale, cols);
        let next = quantize(&rest)?;
        let made = std::mem::replace(&mut q, next);
        if best.as_ref().is_none_or(|(least, ..)| error < *least) {
            best = Some((error, made, factors));
        }
    }
    Ok(best.map_or_else(|| (q, zero(lora, (rows, cols), seed)), |(_, q, factors)| (q, factors)))
}

/// Adds `s B A` to `weight` `[rows, cols]`.
pub(crate) fn add_product(weight: &mut [f32], factors: &Factors, s: f32, cols: usize) {
    let rank = factors.a.len() / cols.max(1);
    let lines = weight.chunks_exact_mut(cols.max(1)).zip(factors.b.chunks_exact(rank.max(1)));
    for (line, b) in lines {
        b.iter().zip(factors.a.chunks_exact(cols)).for_each(|(b, a)| kernels().axpy(s * b, a, line));
    }
}

/// Returns the norms of the rows of `W + s B A`: DoRA's initial magnitudes.
pub(crate) fn row_norms(weight: &[f32], factors: &Factors, s: f32, cols: usize) -> Vec<f32> {
    let mut sum = weight.to_vec();
    add_product(&mut sum, factors, s, cols);
    sum.chunks_exact(cols.max(1)).map(|row| kernels().sum_squares_f64(row).sqrt() as f32).collect()
}
