//! QTIP (Tseng, Sun, Hou & De Sa 2024, "QTIP: Quantization with Trellises and Incoherence Processing", arXiv
//! 2406.11235).
//!
//! The weight `W[n, k]` is rotated on both sides by randomized Hadamard matrices (incoherence processing: QuIP#,
//! Tseng et al. 2024, arXiv 2402.04396, section 3). Its values are then nearly normal and no input stands out. Each
//! 16 × 16 tile is coded as a path through a trellis, which quantizes a normal source nearly as well as a vector
//! quantizer of hundreds of dimensions. Tiles are coded from the first inputs to the last, and later tiles compensate
//! for the errors of earlier ones (BlockLDLQ, same paper, section 4.1):
//!
//! ```text
//! C = Hₒᵀ diag(v)⁻¹ W diag(u) Hᵢᵀ,   (H' + λI)⁻¹ = Uᵀ U,   H' = Hᵢ diag(u) H diag(u) Hᵢᵀ,   u = ±1
//! for 16 columns B after another:   Q_B = path(C_B),   C_rest -= (C_B - Q_B) U_BB⁻¹ U_B,rest
//! ```
//!
//! With second moments `G[n, n]` of the outputs' gradients the loss is `tr(G (W - Q) H (W - Q)ᵀ)`, so outputs are
//! compensated in blocks of 16 as well, with the factor of `(G' + λI)⁻¹` on the left (YAQA: Tseng, Sun, Hou & De Sa
//! 2025, arXiv 2505.22988, section 3). The Hessian of the whole weight is then `G ⊗ H`, whose factor is the product
//! of both factors.
//!
//! `v`, signs times scales, brings the values to the standard deviation of the code book. After all tiles are coded
//! the scale is refitted to the least output error: `tr(W H Pᵀ) / tr(P H Pᵀ)` for the weight `P` at scale 1.
//!
//! Tiles on the same anti-diagonal are independent and run on any number of threads; the bytes do not depend on the
//! number. A search takes `2^16 · (1 + 160 / (256 · bits))` additions and comparisons per weight: measured in
//! docs/results/weights.md.

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

/// Standard deviation of the coded values by bits, relative to the code book's. At these values the trellis leaves
/// the least share of a normal source's variance (.269, .069, .018, .0046 …). More bits reach further into the tails.
const SPREAD: [f32; 8] = [1.15, 0.97, 0.95, 0.94, 0.91, 0.86, 0.8, 0.75];

/// λ as a fraction of the mean diagonal of the outputs' second moments.
const OUTPUT_DAMP: f64 = 0.1;

/// Quantized weight.
#[derive(Clone, Debug, PartialEq)]
pub struct QtipResult {
    /// Codes, signs and scales.
    pub quantized: Quantized,
    /// Loss `tr((W - Q) H (W - Q)ᵀ)` under the given H.
    pub loss: f64,
    /// Notes for the user, for example increased damping.
    pub notes: Vec<String>,
}

/// Rotation of an input and the factor of its rotated inverse Hessian, shared by all weights that read the input.
#[derive(Clone, Debug)]
pub struct RotatedInput {
    kernels: Kernels,
    hessian: Hessian,
    signs: Vec<f32>,
    factor: InverseFactor,
}

impl RotatedInput {
    /// Prepares the input from its second moments `hessian`; `seed` determines the signs.
    ///
    /// # Errors
    /// [`GptqError`] for an invalid Hessian. On [`GptqError::Singular`] the caller should use [`Self::plain`]
    /// instead.
    pub fn new(hessian: Hessian, damp: f64, seed: u64, threads: usize) -> Result<Self, GptqError> {
        Self::at(*kernels(), hessian, damp, seed, threads)
    }

    /// Prepares an input of `cols` values without statistics: all inputs count alike and are independent.
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

    /// Codes `w` (`[n, k]`, both multiples of 16) by `scheme`, a trellis of whole bits. `outputs` are second moments
    /// `G[n, n]` of the outputs' gradients, up to a factor. `seed` determines the signs of the outputs.
    ///
    /// # Errors
    /// [`GptqError::Scheme`], [`GptqError::Length`], [`GptqError::Memory`], and [`GptqError::Weight`] for non-finite
    /// values.
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

    /// Root mean square of the outputs that share a scale, by output.
    fn scales(&self, trellis: &Trellis, w: &[f32], rows: usize) -> Vec<f32> {
        let cols = self.signs.len();
        let shared = if trellis.channels { 1 } else { order(rows) };
        let block_loss = |block: &[f32]| {
            let square = self.kernels.sum_squares_f64(block) / block.len().max(1) as f64;
            // A block of zeros needs a nonzero scale too.
            if square > 0.0 { square.sqrt() as f32 } else { 1.0 }
        };
        w.chunks(shared * cols).flat_map(|block| std::iter::repeat_n(block_loss(block), shared)).collect()
    }

    /// Rotated weight in units of the code book.
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

    /// Scales with the least output error, per group of outputs that share one; keeps the given scale if the fit is
    /// degenerate.
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

/// Trellis of `scheme` and its bits, if it can code a weight `[rows, cols]`.
///
/// # Errors
/// Names the schemes that it takes.
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

/// Anonymous memory of [`RotatedInput::quantize`] beside the weight `[rows, cols]` and its input, in bytes.
pub fn solve_bytes(bits: u32, rows: usize, cols: usize, threads: usize) -> u64 {
    let (n, weights) = (rows as u64, (rows * cols) as u64);
    let threads = (threads.max(1) as u64).min(rows.min(cols).div_ceil(TILE) as u64);
    // Per state, and again in search order.
    let table = (4 + 4) << 16;
    // Targets and their errors in both directions; then the values between the rotations and the weight made of them.
    let values = (4 + 8 + 8) * weights;
    let outputs = 8 * n * n + (4 + 4) * n * n;
    let codes = u64::from(bits) * weights / 2;
    table + values + outputs + codes + threads * TrellisScratch::bytes_needed(bits, TILE_WEIGHTS)
}

fn signs(n: usize, seed: u64) -> Vec<f32> {
    (0..n as u64).map(|i| if random_u32(seed, i) >> 31 == 1 { -1.0 } else { 1.0 }).collect()
}

/// Factor `Uᵀ[n, n]` of the second moments `outputs` of the outputs' gradients, rotated like the codes; `None` for
/// degenerate moments.
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
        // Gradients are zero or not finite: all errors count alike.
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
    // Clamp to the range of f16.
    let x = x.clamp(-F16.max(), F16.max());
    F16.encode(x, Overflow::Special, Rounding::NearestEven, 0) as u16
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests;
