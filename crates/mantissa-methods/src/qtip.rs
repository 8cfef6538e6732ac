//! QTIP (Tseng, Sun, Hou & De Sa 2024, "QTIP: Quantization with Trellises and Incoherence Processing", arXiv 2406.11235).
//!
//! A weight `W[n, k]` is rotated on both sides by randomized Hadamard matrices, after which its values are nearly normal whatever they were and
//! no input stands out (incoherence processing: QuIP#, Tseng et al. 2024, arXiv 2402.04396, section 3), and is then coded tile by
//! tile by paths through a trellis, whose values come as near to normal ones as vectors of hundreds of dimensions may. Tiles are taken from
//! the first inputs to the last, and those that follow make up for the error of those before (BlockLDLQ, the same paper, section 4.1):
//!
//! ```text
//! C = Hₒᵀ diag(v)⁻¹ W diag(u) Hᵢᵀ,   (H' + λI)⁻¹ = Uᵀ U,   H' = Hᵢ diag(u) H diag(u) Hᵢᵀ,   u = ±1
//! for 16 columns B after another:   Q_B = path(C_B),   C_rest -= (C_B - Q_B) U_BB⁻¹ U_B,rest
//! ```
//!
//! Where second moments `G[n, n]` of the outputs' gradients say what an error of one output is to the others, the error that counts is
//! `tr(G (W - Q) H (W - Q)ᵀ)`, and outputs are taken 16 after another as well, with the factor of `(G' + λI)⁻¹` on the left (YAQA: Tseng, Sun,
//! Hou & De Sa 2025, arXiv 2505.22988, section 3): the Hessian of a whole weight is `G ⊗ H`, whose factor is that of both factors.
//!
//! `v`, signs times scales, brings the values to the spread of the code book. When all tiles are coded it is fitted once more: the
//! scale under which the output errs least, `tr(W H Pᵀ) / tr(P H Pᵀ)` for the weight `P` of scale 1.
//!
//! Tiles of a diagonal do not meet, so they run on any number of threads, and the bytes do not depend on their number. A search takes
//! 2^16 additions and comparisons for each weight, `1 + 160 / (256 · bits)` times: measured in docs/results/weights.md.

pub mod method;
mod solve;

use mantissa_kernels::{Kernels, TrellisScratch, TrellisValues, kernels};
use mantissa_num::minifloat::{F16, Overflow};
use mantissa_num::round::random_u32;
use mantissa_num::stored::Map;
use mantissa_num::trellis::{TILE, TILE_WEIGHTS, Trellis, order, rotation};
use mantissa_num::{Codes, Format, Quantized, Rounding, Scheme};

use self::solve::Problem;
use crate::gptq::{GptqError, GptqOptions, Hessian, InverseFactor};
use crate::metric::ErrorMetric;

/// Standard deviation of the values that are coded, by bits, that of the code book being 1: of a normal source of this spread the paths
/// through the trellis leave least of its square (.269, .069, .018, .0046 … of it). More bits reach further into the tails.
const SPREAD: [f32; 8] = [1.15, 0.97, 0.95, 0.94, 0.91, 0.86, 0.8, 0.75];

/// The same of the outputs' second moments: what the calibration is indifferent to is not free.
const OUTPUT_DAMP: f64 = 0.1;

/// Options of QTIP.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct QtipOptions {
    /// Metric of errors of a layer's outputs: the outputs' factor of the Fisher information, where the architecture has a
    /// backward, or by their squares, as published.
    pub metric: ErrorMetric,
    /// λ as a fraction of the mean of the Hessian's diagonal; where H is singular all the same, ten times as much is tried, up to 1.
    pub damp: f64,
}

impl Default for QtipOptions {
    fn default() -> Self {
        QtipOptions { metric: ErrorMetric::Fisher, damp: 0.01 }
    }
}

/// A weight as it is coded.
#[derive(Clone, Debug, PartialEq)]
pub struct QtipResult {
    /// Codes, signs and scales.
    pub quantized: Quantized,
    /// `tr((W - Q) H (W - Q)ᵀ)` with the H given.
    pub loss: f64,
    /// Notes for the user: larger damping.
    pub notes: Vec<String>,
}

/// Rotation of an input and the factor of the inverse of its rotated Hessian, which all weights that read the input share.
#[derive(Clone, Debug)]
pub struct RotatedInput {
    kernels: Kernels,
    hessian: Hessian,
    signs: Vec<f32>,
    factor: InverseFactor,
}

impl RotatedInput {
    /// Prepares the input with the second moments `hessian`; signs are those of `seed`.
    ///
    /// # Errors
    /// [`GptqError`], of the Hessian. [`GptqError::Singular`] is the caller's cue to take [`Self::plain`] instead.
    pub fn new(hessian: Hessian, damp: f64, seed: u64, threads: usize) -> Result<Self, GptqError> {
        Self::at(*kernels(), hessian, damp, seed, threads)
    }

    /// Prepares an input of `cols` values of which nothing is known: each counts alike, and none depends on another.
    ///
    /// # Errors
    /// [`GptqError::Memory`].
    pub fn plain(cols: usize, seed: u64, threads: usize) -> Result<Self, GptqError> {
        Self::new(Hessian::identity(cols)?, 0.0, seed, threads)
    }

    fn at(
        kernels: Kernels,
        hessian: Hessian,
        damp: f64,
        seed: u64,
        threads: usize,
    ) -> Result<Self, GptqError> {
        let signs = signs(hessian.cols(), seed);
        let rotated = hessian.mapped(&input_maps(&signs))?;
        let options = GptqOptions { damp, act_order: false, ..GptqOptions::default() };
        let factor = InverseFactor::new(&rotated, options, threads)?;
        Ok(RotatedInput { kernels, hessian, signs, factor })
    }

    /// Codes `w` (`[n, k]`, both multiples of 16) by `scheme`, a trellis of whole bits; `outputs` `G[n, n]` says what errors of the outputs
    /// cost, up to a factor, and the signs of the outputs are those of `seed`.
    ///
    /// # Errors
    /// [`GptqError::Scheme`], [`GptqError::Length`], [`GptqError::Memory`], and [`GptqError::Weight`] of values that are no numbers.
    pub fn quantize(
        &self,
        scheme: &Scheme,
        w: &[f32],
        outputs: Option<&Hessian>,
        seed: u64,
        threads: usize,
    ) -> Result<QtipResult, GptqError> {
        let cols = self.signs.len();
        let rows = crate::gptq::check_weight(w, cols)?;
        let refused = |why| GptqError::Scheme { scheme: scheme.to_string(), why };
        let (trellis, bits) = check_scheme(scheme, rows, cols).map_err(refused)?;
        let table: Vec<f32> = trellis.book.table().into_iter().map(|v| F16.decode(v.into())).collect();
        let values = TrellisValues::new(bits, &table).ok_or_else(|| refused("1 to 8 bits"))?;
        let deviation = (self.kernels.sum_squares_f64(&table) / table.len() as f64).sqrt() as f32;
        let spread = SPREAD[bits as usize - 1] * deviation;
        let signs = self::signs(rows, seed);
        let scales: Vec<f32> = self.scales(&trellis, w, rows).into_iter().map(|rms| rms / spread).collect();
        let targets = self.targets(w, &signs, &scales);
        let lower = outputs.map(|outputs| lower(outputs, &signs, &scales, threads)).transpose()?.flatten();
        let problem = Problem {
            kernels: &self.kernels,
            values: &values,
            table: &table,
            targets: &targets,
            rows,
            cols,
            inputs: self.factor.upper(),
            outputs: lower.as_deref(),
        };
        let codes = problem.solve(threads);
        let mut q =
            Quantized { codes: Codes::Packed(codes), ..Quantized::empty(scheme.format.clone(), rows, cols) };
        q.scales.codes = Codes::U16(self.stored(&signs, &vec![1.0; rows]));
        let unit = q.dequantize()?;
        let fitted = self.fitted(&trellis, w, &unit, rows, scales);
        q.scales.codes = Codes::U16(self.stored(&signs, &fitted));
        let loss = self.hessian.loss(w, &q.dequantize()?);
        Ok(QtipResult { quantized: q, loss, notes: self.factor.notes() })
    }

    /// Root mean squares of the outputs that share a scale, by output.
    fn scales(&self, trellis: &Trellis, w: &[f32], rows: usize) -> Vec<f32> {
        let cols = self.signs.len();
        let shared = if trellis.channels { 1 } else { order(rows) };
        let of_block = |block: &[f32]| {
            let square = self.kernels.sum_squares_f64(block) / block.len().max(1) as f64;
            // A block of zeros has a scale all the same.
            if square > 0.0 { square.sqrt() as f32 } else { 1.0 }
        };
        w.chunks(shared * cols).flat_map(|block| std::iter::repeat_n(of_block(block), shared)).collect()
    }

    /// The weight between its rotations, in units of the code book.
    fn targets(&self, w: &[f32], signs: &[f32], scales: &[f32]) -> Vec<f32> {
        let (rows, cols) = (signs.len(), self.signs.len());
        let mut targets = w.to_vec();
        input_maps(&self.signs).iter().for_each(|map| map.apply(&mut targets, cols));
        let Some(rotation) = rotation(rows) else { return targets };
        let mut column = vec![0.0; rows];
        for c in 0..cols {
            for (r, value) in column.iter_mut().enumerate() {
                *value = targets[r * cols + c] * signs[r] / scales[r];
            }
            rotation.transpose(&mut column);
            column.iter().enumerate().for_each(|(r, value)| targets[r * cols + c] = *value);
        }
        targets
    }

    /// The scales under which the output errs least, of outputs that share one; those given where they say nothing.
    fn fitted(&self, trellis: &Trellis, w: &[f32], unit: &[f32], rows: usize, given: Vec<f32>) -> Vec<f32> {
        let shared = if trellis.channels { 1 } else { order(rows) };
        let (with, own) = (self.hessian.inner(w, unit), self.hessian.inner(unit, unit));
        let blocks = with.chunks(shared).zip(own.chunks(shared)).zip(given.chunks(shared));
        let fit = |((with, own), given): ((&[f64], &[f64]), &[f32])| {
            let (with, own) = (with.iter().sum::<f64>(), own.iter().sum::<f64>());
            let fitted = (with / own) as f32;
            let scale = if fitted.is_finite() && fitted > 0.0 { fitted } else { given[0] };
            std::iter::repeat_n(scale, given.len())
        };
        blocks.flat_map(fit).collect()
    }

    /// Signs of the inputs, and signs times scales of the outputs, as f16 patterns.
    fn stored(&self, signs: &[f32], scales: &[f32]) -> Vec<u16> {
        let outputs = signs.iter().zip(scales).map(|(sign, scale)| sign * scale);
        self.signs.iter().copied().chain(outputs).map(f16).collect()
    }
}

/// The trellis of `scheme` and its bits, where a weight `[rows, cols]` can be coded by it.
///
/// # Errors
/// The schemes that it takes.
pub fn check_scheme(scheme: &Scheme, rows: usize, cols: usize) -> Result<(Trellis, u32), &'static str> {
    let Format::Trellis(trellis) = scheme.format else {
        return Err("trellis1 to trellis8, whose paths it codes");
    };
    match trellis.whole_bits() {
        _ if !Trellis::fits(rows, cols) => {
            Err("weights whose widths are multiples of 16, the side of a tile")
        }
        Some(bits) => Ok((trellis, bits)),
        None => Err("codes of whole bits"),
    }
}

/// Anonymous memory that [`RotatedInput::quantize`] takes beside the weight `[rows, cols]` and its input.
pub fn solve_bytes(bits: u32, rows: usize, cols: usize, threads: usize) -> u64 {
    let (n, weights) = (rows as u64, (rows * cols) as u64);
    let threads = (threads.max(1) as u64).min(rows.min(cols).div_ceil(TILE) as u64);
    // Of every state, and once more in the order of the search.
    let table = (4 + 4) << 16;
    // Targets and what their errors leave to both sides; then the values between the rotations and the weight that they make.
    let values = (4 + 8 + 8) * weights;
    let outputs = 8 * n * n + (4 + 4) * n * n;
    let codes = u64::from(bits) * weights / 2;
    table + values + outputs + codes + threads * TrellisScratch::bytes_needed(bits, TILE_WEIGHTS)
}

fn signs(n: usize, seed: u64) -> Vec<f32> {
    (0..n as u64).map(|i| if random_u32(seed, i) >> 31 == 1 { -1.0 } else { 1.0 }).collect()
}

/// `Uᵀ[n, n]` for the second moments `outputs` of gradients of the outputs, rotated as the codes are; `None` of moments that say nothing.
fn lower(
    outputs: &Hessian,
    signs: &[f32],
    scales: &[f32],
    threads: usize,
) -> Result<Option<Vec<f64>>, GptqError> {
    let n = signs.len();
    if outputs.cols() != n {
        return Err(GptqError::Length { what: "outputs", found: outputs.cols(), expected: n });
    }
    let diagonal: Vec<f32> = signs.iter().zip(scales).map(|(sign, scale)| sign * scale).collect();
    let maps: Vec<Map> = std::iter::once(Map::Diag(diagonal)).chain(rotation(n).map(Map::Hadamard)).collect();
    let options = GptqOptions { damp: OUTPUT_DAMP, act_order: false, ..GptqOptions::default() };
    match InverseFactor::new(&outputs.mapped(&maps)?, options, threads) {
        // Gradients that are no numbers, or none: errors count alike.
        Err(GptqError::Singular { .. } | GptqError::Value { .. } | GptqError::NoTokens) => Ok(None),
        Err(error) => Err(error),
        Ok(factor) if factor.dead_columns() > 0 => Ok(None),
        Ok(factor) => {
            let upper = factor.upper();
            Ok(Some((0..n * n).map(|at| upper[at % n * n + at / n]).collect()))
        }
    }
}

fn input_maps(signs: &[f32]) -> Vec<Map> {
    std::iter::once(Map::Diag(signs.to_vec())).chain(rotation(signs.len()).map(Map::Hadamard)).collect()
}

fn f16(x: f32) -> u16 {
    // Beyond f16 the largest or the smallest of it.
    let x = x.clamp(-F16.max(), F16.max());
    F16.encode(x, Overflow::Special, Rounding::NearestEven, 0) as u16
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests;
