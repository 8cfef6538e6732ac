//! Operands that several matmuls read, rounded once: the input of linear layers (fprop, wgrad) and the
//! gradient of their output (dgrad, wgrad).
//!
//! Inputs can also be quantized as at run time. Gradients pass the rounding unchanged (straight-through
//! estimator; Bengio, Léonard & Courville 2013, arXiv:1308.3432).

use std::ops::Range;

use mantissa_kernels::{for_each, kernels};
use mantissa_model::flow::parts;
use mantissa_model::{InputQuantizer, zeros};
use mantissa_num::Blocks;

use crate::rows::{PART, rows, rows_mut};
use crate::store::{Precision, StoreRef};

/// Rounded copy of an f32 operand: 16-bit values, or the decoded values of a quantizer. Empty if the matmuls
/// share no rounded operand.
#[derive(Debug, Default)]
pub(crate) struct Operand {
    precision: Precision,
    /// 16-bit values; empty if `precision` is f32.
    bits: Vec<u16>,
    /// Quantizer of an operand that stays f32.
    quantizer: Option<InputQuantizer>,
    /// Decoded quantized values; empty without a quantizer.
    values: Vec<f32>,
    /// Derivatives of the loss with respect to rotations of the operand.
    slopes: Option<Slopes>,
}

/// Derivatives of the loss with respect to rotations of an operand quantized with per-block ranges.
#[derive(Debug)]
struct Slopes {
    /// Block size in values; 0 for whole rows.
    block: usize,
    /// Length of the rotated runs.
    order: usize,
    /// Slope matrix, `[order, order]`.
    sum: Vec<f32>,
}

/// Part of an operand, to be rounded by one thread.
pub(crate) struct OperandMut<'a> {
    precision: Precision,
    bits: &'a mut [u16],
    /// Quantizer with the row width.
    quantizer: Option<(&'a InputQuantizer, usize)>,
    values: &'a mut [f32],
}

impl Operand {
    /// Allocates for up to `n` values; `None` if memory is missing.
    pub(crate) fn new(precision: Precision, n: usize) -> Option<Self> {
        let bits = zeros(if precision == Precision::F32 { 0 } else { n })?;
        Some(Operand { precision, bits, ..Operand::default() })
    }

    /// Allocates for up to `n` values to be rounded by `quantizer`; `None` if memory is missing.
    pub(crate) fn quantized(quantizer: InputQuantizer, n: usize) -> Option<Self> {
        Some(Operand { quantizer: Some(quantizer), values: zeros(n)?, ..Operand::default() })
    }

    /// Allocates like [`quantized`](Self::quantized) and keeps slopes for rotations of runs of `order`
    /// values. Keeps none for schemes whose block ranges are not their largest magnitudes.
    pub(crate) fn rotated(quantizer: InputQuantizer, n: usize, order: usize) -> Option<Self> {
        let format = &quantizer.quant().scheme.format;
        let block = match format.blocks() {
            _ if format.scale().is_none() || format.has_zero() => None,
            Blocks::Row => Some(0),
            Blocks::Group(group) => Some(group as usize),
            _ => None,
        };
        let slopes = match block {
            Some(block) => Some(Slopes { block, order, sum: zeros(order.checked_mul(order)?)? }),
            None => None,
        };
        Some(Operand { slopes, ..Self::quantized(quantizer, n)? })
    }

    /// True if the backward reads the f32 values themselves.
    pub(crate) fn needs_values(&self) -> bool {
        !self.is_rounded() || self.slopes.is_some()
    }

    /// Returns the slopes S: if rows turn from x to `x + A x`, run by run, the loss changes by `Σ S[i, j]
    /// A[i, j]`. `None` if not kept.
    pub(crate) fn slopes(&self) -> Option<&[f32]> {
        self.slopes.as_ref().map(|slopes| &slopes.sum[..])
    }

    pub(crate) fn forget_slopes(&mut self) {
        self.slopes.iter_mut().for_each(|slopes| slopes.sum.fill(0.0));
    }

    /// Adds to the slopes. `x` are the values before quantization, in rows of `width`; `g` is the gradient
    /// with respect to the quantized values. Only the change of block [ranges](range_slope) counts; the rest
    /// of the error averages out, being nearly isotropic.
    pub(crate) fn add_slopes(&mut self, x: &[f32], g: &[f32], width: usize) {
        let Some(slopes) = &mut self.slopes else { return };
        let (n, block) = (slopes.order, if slopes.block == 0 { width } else { slopes.block });
        for ((x, q), g) in
            x.chunks_exact(width).zip(self.values.chunks_exact(width)).zip(g.chunks_exact(width))
        {
            for first in (0..width).step_by(block) {
                let span = first..width.min(first + block);
                if let Some((at, factor)) = range_slope(&x[span.clone()], &q[span.clone()], &g[span]) {
                    let m = first + at;
                    let run = &x[m / n * n..][..n];
                    kernels().axpy(factor, run, &mut slopes.sum[m % n * n..][..n]);
                }
            }
        }
    }

    /// Bytes for up to `n` values.
    pub(crate) fn bytes(precision: Precision, n: usize) -> u64 {
        if precision == Precision::F32 { 0 } else { precision.bytes().saturating_mul(n as u64) }
    }

    /// Bytes allocated.
    #[cfg(test)]
    pub(crate) fn capacity(&self) -> u64 {
        2 * self.bits.capacity() as u64 + 4 * self.values.capacity() as u64
    }

    /// True if matmuls read the rounded copy.
    pub(crate) fn is_rounded(&self) -> bool {
        self.precision != Precision::F32 || self.quantizer.is_some()
    }

    /// Returns the operand for rows from `first` on (`width` values each), which were rounded from `values`;
    /// `values` themselves if the matmuls read f32 or round by themselves.
    pub(crate) fn at_row<'a>(&'a self, first: usize, width: usize, values: &'a [f32]) -> StoreRef<'a> {
        let bits = || &self.bits[first * width..][..values.len()];
        match self.precision {
            Precision::F32 if self.quantizer.is_some() => {
                StoreRef::F32(&self.values[first * width..][..values.len()])
            }
            Precision::F32 => StoreRef::F32(values),
            Precision::Bf16 => StoreRef::Bf16(bits()),
            Precision::F16 => StoreRef::F16(bits()),
        }
    }

    /// Returns the operand for all rows, rounded from `values`.
    pub(crate) fn of<'a>(&'a self, values: &'a [f32]) -> StoreRef<'a> {
        self.at_row(0, 0, values)
    }

    /// Rounds `values`, rows of `width` values, into the rows from `first` on.
    pub(crate) fn round(&mut self, first: usize, width: usize, values: &[f32], threads: usize) {
        if !self.is_rounded() {
            return;
        }
        let cut = parts(values.len() / width, PART);
        for_each(threads, cut.clone().zip(self.parts_from(first, width, cut)), |(part, to)| {
            to.round(rows(values, width, part));
        });
    }

    /// Splits the operand into the row ranges `cut` (consecutive from 0, `width` values per row) for rounding
    /// by threads.
    pub(crate) fn parts(
        &mut self,
        width: usize,
        cut: impl Iterator<Item = Range<usize>> + Clone,
    ) -> impl Iterator<Item = OperandMut<'_>> {
        self.parts_from(0, width, cut)
    }

    /// Splits like [`parts`](Self::parts), from row `first` on.
    fn parts_from(
        &mut self,
        first: usize,
        width: usize,
        cut: impl Iterator<Item = Range<usize>> + Clone,
    ) -> impl Iterator<Item = OperandMut<'_>> {
        let precision = self.precision;
        let quantizer = self.quantizer.as_ref().map(|quantizer| (quantizer, width));
        let of = |used: bool| if used { width } else { 0 };
        let (narrow, wide) = (of(precision != Precision::F32), of(quantizer.is_some()));
        let bits = rows_mut(&mut self.bits[first * narrow..], narrow, cut.clone());
        let values = rows_mut(&mut self.values[first * wide..], wide, cut);
        bits.zip(values).map(move |(bits, values)| OperandMut { precision, bits, quantizer, values })
    }
}

impl OperandMut<'_> {
    /// Rounds `values` to nearest.
    pub(crate) fn round(self, values: &[f32]) {
        if let Some((quantizer, width)) = self.quantizer {
            self.values.copy_from_slice(values);
            // NaN and infinity have no code; they stay as they are and show up in the results.
            let _ = quantizer.apply(self.values, width);
            return;
        }
        match self.precision {
            Precision::F32 => {}
            Precision::Bf16 => kernels().f32_to_bf16(values, self.bits),
            Precision::F16 => kernels().f32_to_f16(values, self.bits),
        }
    }
}

/// Returns the index m of a block's largest magnitude and the derivative of the loss with respect to `x[m]`
/// through the quantization range alone; `None` if there is none, for example in a block of zeros.
///
/// `x` are the values, `q` their quantized values, `g` the gradient with respect to `q`. With `q = s round(x
/// / s)`, s proportional to `|x[m]|`, and codes held fixed, a change of `x[m]` changes `q` by `(q - x) /
/// x[m]` per unit (Esser et al. 2020, "Learned Step Size Quantization", arXiv:1902.08153, section 2.1).
pub fn range_slope(x: &[f32], q: &[f32], g: &[f32]) -> Option<(usize, f32)> {
    let greatest = |m: usize, i: usize| if x[i].abs() > x[m].abs() { i } else { m };
    let m = (0..x.len()).reduce(greatest)?;
    let error = x.iter().zip(q).zip(g).map(|((x, q), g)| f64::from(*g) * (f64::from(*q) - f64::from(*x)));
    let slope = (error.sum::<f64>() / f64::from(x[m])) as f32;
    slope.is_finite().then_some((m, slope))
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use mantissa_num::parse_activation;
    use mantissa_store::convention::ActivationQuant;

    use super::*;

    #[test]
    fn a_quantizer_rounds_each_row_by_itself() {
        let quant = ActivationQuant::new(parse_activation("int4-token").unwrap(), None);
        let quantizer = InputQuantizer::new("m", &quant).unwrap();
        let values: Vec<f32> = (0..3 * 700).map(|i| (i as f32 * 0.517).sin() * (1 + i / 3) as f32).collect();
        let mut expected = values.clone();
        quantizer.apply(&mut expected, 3).unwrap();
        let mut operand = Operand::quantized(quantizer, 3 * 702).unwrap();
        operand.round(2, 3, &values, 2);
        assert_eq!(*operand.at_row(2, 3, &values).widened(), *expected);
        assert!(operand.is_rounded() && operand.capacity() == 4 * 3 * 702);
        let cut = parts(700, PART);
        operand.parts(3, cut.clone()).zip(cut).for_each(|(to, part)| to.round(rows(&values, 3, part)));
        assert_eq!(*operand.of(&values).widened(), *expected);
    }

    #[test]
    fn shared_operands_are_rounded_and_others_are_not() {
        let values: Vec<f32> = (0..3 * 700).map(|i| (i as f32 * 0.517).sin()).collect();
        for precision in [Precision::F32, Precision::Bf16, Precision::F16] {
            let mut operand = Operand::new(precision, 3 * 702).unwrap();
            operand.round(2, 3, &values, 2);
            let mut expected = values.clone();
            crate::store::round(precision, &mut expected);
            assert_eq!(*operand.at_row(2, 3, &values).widened(), *expected);
            assert_eq!(operand.is_rounded(), precision != Precision::F32);
            assert_eq!(operand.capacity(), Operand::bytes(precision, 3 * 702));

            let cut = parts(700, PART);
            for (to, part) in operand.parts(3, cut.clone()).zip(cut) {
                to.round(rows(&values, 3, part));
            }
            assert_eq!(*operand.of(&values).widened(), *expected);
        }
    }

    /// With codes held fixed, a rotation changes the loss through the block ranges only.
    #[test]
    fn slopes_match_the_ranges() {
        for (scheme, block, order) in [("int4-token", 24, 8), ("int4-token", 24, 24), ("int4-g8", 8, 24)] {
            let quant = ActivationQuant::new(parse_activation(scheme).unwrap(), None);
            let quantizer = InputQuantizer::new("m", &quant).unwrap();
            let wave =
                |phase: f32| -> Vec<f32> { (0..5 * 24).map(|i| (i as f32 * 0.7 + phase).sin()).collect() };
            let (x, g) = (wave(0.3), wave(2.0));
            let mut operand = Operand::rotated(quantizer, 5 * 24, order).unwrap();
            operand.round(0, 24, &x, 1);
            operand.add_slopes(&x, &g, 24);
            let q = operand.at_row(0, 24, &x).widened().into_owned();
            let amax = |x: &[f64]| x.iter().fold(0f64, |most, v| most.max(v.abs()));
            let wide: Vec<f64> = x.iter().map(|v| f64::from(*v)).collect();
            let slopes = operand.slopes().unwrap();
            let mut counted = 0;
            for (i, j) in (0..8).flat_map(|i| (0..i).map(move |j| (i, j))) {
                let (step, mut turned) = (1e-7, wide.clone());
                for run in turned.chunks_exact_mut(order) {
                    (run[i], run[j]) = (run[i] + step * run[j], run[j] - step * run[i]);
                }
                let errors =
                    q.iter().zip(&wide).zip(&g).map(|((q, x), g)| f64::from(*g) * (f64::from(*q) - x));
                let errors: Vec<f64> = errors.collect();
                let blocks = wide.chunks(block).zip(turned.chunks(block)).zip(errors.chunks(block));
                let change =
                    blocks.map(|((x, turned), e)| e.iter().sum::<f64>() * (amax(turned) / amax(x) - 1.0));
                let (expected, found) =
                    (change.sum::<f64>() / step, f64::from(slopes[i * order + j] - slopes[j * order + i]));
                assert!((found - expected).abs() < 1e-4, "{scheme} {order}: {found} {expected}");
                counted += usize::from(expected.abs() > 1e-2);
            }
            assert!(counted > 3, "{scheme} {order}: {counted}");
            operand.forget_slopes();
            assert!(operand.slopes().unwrap().iter().all(|v| *v == 0.0) && operand.needs_values());
        }
    }
}
