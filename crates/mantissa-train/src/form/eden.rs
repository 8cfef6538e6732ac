//! MS-EDEN (Panferov et al. 2026, "Quartet II", arXiv 2601.22813): NVFP4 of rotated values that is unbiased over rotations
//! although elements are rounded to nearest.
//!
//! For a run of rotated values x under one correction (the Hadamard order, 128), with block scales s of 16 values and
//! elements q = E2M1(x / s), `c = <x, x> / <x, s q>`, and the stored scales are E4M3 codes of `c s`, rounded
//! stochastically. Randomness is in the scales alone, so the error is less than half of stochastic elements'. The tensor's
//! amax has the scale 256, so that corrected scales stay below 448.

use mantissa_kernels::{ElementGrid, kernels};
use mantissa_num::Rounding;
use mantissa_num::minifloat::{E4M3, Overflow};

use super::scales::Band;

impl Band<'_> {
    /// Rounds `line`, whose steps and scales are chosen. `outer` is the tensor's scale; the line's scales are drawn at the
    /// places from `first` on. Values after the last whole run are not rotated: their elements are rounded
    /// stochastically.
    pub(super) fn round_eden(
        &mut self,
        line: &mut [f32],
        grid: ElementGrid,
        outer: f32,
        (seed, first): (u64, u64),
    ) {
        let (width, run) = (self.width, self.exact.len());
        let whole = line.len() / run * run;
        let (line, tail) = line.split_at_mut(whole);
        let blocks = run / width;
        let (steps, rest) = self.steps.split_at(whole / width);
        for (i, x) in line.chunks_exact_mut(run).enumerate() {
            let scales = &mut self.scales[i * blocks..][..blocks];
            self.exact.copy_from_slice(x);
            kernels().round_blocks(x, width, &steps[i * blocks..][..blocks], &self.ones, grid, &[]);
            let correction = correction(&self.exact, x, scales, width, outer);
            for (b, (scale, q)) in scales.iter_mut().zip(x.chunks_exact_mut(width)).enumerate() {
                *scale =
                    drawn((f64::from(*scale) * correction) as f32, seed, first + (i * blocks + b) as u64);
                q.iter_mut().for_each(|q| *q *= *scale);
            }
        }
        if !tail.is_empty() {
            let words = &mut self.words[..tail.len()];
            kernels().random_words(seed ^ 1 << 63, first * width as u64 + whole as u64, words);
            kernels().round_blocks(tail, width, rest, &self.scales[whole / width..], grid, words);
        }
    }
}

/// Returns `<x, x> / <x, q s>`, or 1 for a run that rounds to zeros.
fn correction(x: &[f32], q: &[f32], scales: &[f32], width: usize, outer: f32) -> f64 {
    let square: f64 = x.iter().map(|x| f64::from(*x) * f64::from(*x)).sum();
    let blocks = x.chunks_exact(width).zip(q.chunks_exact(width)).zip(scales);
    let product = |(x, q): (&f32, &f32)| f64::from(*x) * f64::from(*q);
    let block_products = blocks.map(|((x, q), s)| f64::from(*s) * x.iter().zip(q).map(product).sum::<f64>());
    let both = block_products.sum::<f64>() * f64::from(outer);
    if both > 0.0 { square / both } else { 1.0 }
}

/// One of the two E4M3 values around `scale`, `scale` in the mean.
fn drawn(scale: f32, seed: u64, index: u64) -> f32 {
    E4M3.decode(E4M3.encode(scale, Overflow::Saturate, Rounding::Stochastic { seed }, index))
}
