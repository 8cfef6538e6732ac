//! Rounding of an operand's lines to a scheme: steps and scales by the reference rules, values by vectorised loops.
//! Schemes without such loops run [`fake_quantize`]; both give the same values.

use mantissa_kernels::{Step as KernelStep, kernels};
use mantissa_num::{Format, Given, Rounding, fake_quantize};

use super::rounder::{Rounder, Shared, limit, step_of};
use super::scales::{Band, Scales, block_shape};
use crate::health::Sums;
use crate::policy::ScaleChoice;

impl Rounder {
    /// Rounds `lines` (`[n, k]`, n a multiple of [`height`](Self::height) but for the last lines), the first of which has
    /// index `first` in the tensor. `to` receives the factors of the lines, and if it holds scales of units, those too,
    /// which are then taken out of the values. Returns the number of values beyond the largest element if `count`, else
    /// 0.
    pub(super) fn round(
        &self,
        lines: &mut [f32],
        k: usize,
        first: usize,
        shared: &Shared,
        to: Scales<'_>,
        count: bool,
    ) -> u64 {
        let Some(fast) = self.fast else { return 0 };
        let mut band = Band::new(self, fast, k);
        let mut saturated = 0;
        for (at, lines) in lines.chunks_mut(band.height * k).enumerate() {
            band.choose(lines, first + at * band.height, shared);
            band.take_scales(at, lines.len() / k, to.factors, to.scales);
            for (i, line) in lines.chunks_exact_mut(k).enumerate() {
                band.draw(shared.seed, (first + at * band.height + i) as u64);
                if count {
                    let blocks = line.chunks(band.width).zip(&band.steps);
                    saturated += blocks.map(|(x, step)| beyond(x, *step, fast.limit)).sum::<u64>();
                }
                if self.choice == ScaleChoice::Eden {
                    let at = (first + at * band.height + i) * band.scales.len();
                    band.round_eden(line, fast.grid, shared.factor, (shared.seed, at as u64));
                } else {
                    kernels().round_blocks(
                        line,
                        band.width,
                        &band.steps,
                        &band.scales,
                        fast.grid,
                        &band.words,
                    );
                }
            }
        }
        saturated
    }

    /// Writes the codes of `lines` as [`round`](Self::round) does their values; the scheme's elements are integers. A
    /// line that is not finite gets the factor NaN.
    pub(super) fn encode(
        &self,
        lines: &[f32],
        k: usize,
        first: usize,
        shared: &Shared,
        to: Scales<'_>,
        codes: &mut [i8],
    ) {
        let Some(fast) = self.fast else { return };
        let mut band = Band::new(self, fast, k);
        let size = band.height * k;
        for (at, (lines, codes)) in lines.chunks(size).zip(codes.chunks_mut(size)).enumerate() {
            if !kernels().amax(lines).is_finite() {
                to.factors[at * band.height..][..lines.len() / k].fill(f32::NAN);
                codes.fill(0);
                continue;
            }
            band.choose(lines, first + at * band.height, shared);
            band.take_scales(at, lines.len() / k, to.factors, to.scales);
            for (i, (line, codes)) in lines.chunks_exact(k).zip(codes.chunks_exact_mut(k)).enumerate() {
                band.draw(shared.seed, (first + at * band.height + i) as u64);
                kernels().round_codes(line, band.width, &band.steps, fast.grid, &band.words, codes);
            }
        }
    }

    /// Writes one bit for each value of `lines` that is not clipped: whose magnitude under its step is below the largest
    /// element. Lines begin at whole bytes.
    pub(super) fn unclipped(&self, lines: &[f32], k: usize, shared: &Shared, out: &mut [u8]) {
        let Some(fast) = self.fast else { return };
        let (mut band, bytes) = (Band::new(self, fast, k), k.div_ceil(8));
        for (lines, out) in lines.chunks(band.height * k).zip(out.chunks_mut(band.height * bytes)) {
            if !kernels().amax(lines).is_finite() {
                out.fill(0xff);
                continue;
            }
            // Learned scales have a mask of their own.
            band.choose(lines, 0, shared);
            for (line, out) in lines.chunks_exact(k).zip(out.chunks_exact_mut(bytes)) {
                out.fill(0);
                for (b, (x, step)) in line.chunks(band.width).zip(&band.steps).enumerate() {
                    for (i, x) in (b * band.width..).zip(x) {
                        let below = step_of(*step, *x).abs() < self.max();
                        out[i / 8] |= u8::from(below) << (i % 8);
                    }
                }
            }
        }
    }

    /// Counts over lines `exact` that [`round`](Self::round) rounded to `rounded`, `saturated` of them from beyond the
    /// largest element.
    pub(crate) fn sums(
        &self,
        (exact, rounded): (&[f32], &[f32]),
        k: usize,
        shared: &Shared,
        to: &Scales<'_>,
        saturated: u64,
    ) -> Sums {
        let mut all = Sums::saturated(saturated);
        let mut values = vec![0.0; k];
        let units = to.scales.len() / to.factors.len().max(1);
        let lines = exact.chunks_exact(k).zip(rounded.chunks_exact(k)).zip(&*to.factors);
        for (i, ((exact, rounded), line_factor)) in lines.enumerate() {
            let factor = line_factor * shared.factor;
            values.iter_mut().zip(rounded).for_each(|(value, q)| *value = q * factor);
            let width = self.fast.map_or(k, |fast| block_shape(fast, k).1);
            if units == k.div_ceil(width) {
                let blocks = values.chunks_mut(width).zip(&to.scales[i * units..][..units]);
                blocks.for_each(|(values, scale)| values.iter_mut().for_each(|value| *value *= scale));
            }
            all.join(&Sums::of_rounding(exact, &values));
        }
        all
    }

    /// Number of finite values that a scheme without scales clips; 0 for other schemes.
    pub(crate) fn clipped(&self, x: &[f32]) -> u64 {
        match &self.scheme.format {
            Format::Affine(affine) if affine.scale.is_none() => {
                beyond(x, KernelStep::Multiply(1.0), limit(affine.code))
            }
            _ => 0,
        }
    }

    /// Rounds the whole matrix `[lines, k]` by the reference, under the global scale of `amax` if it is given. A matrix
    /// with NaN or infinity stays as it is.
    pub(crate) fn reference(&self, x: &mut [f32], k: usize, amax: Option<f32>, seed: u64) {
        let mut scheme = self.scheme.clone();
        if let Rounding::Stochastic { seed: scheme_seed } = &mut scheme.encoder.rounding {
            *scheme_seed = seed;
        }
        // The only possible failures are non-finite values, which show in the product, and shapes, which were
        // checked when the operand was made.
        let given = Given {
            outer: amax.and_then(|amax| scheme.outer_scale(amax)),
            first_index: 0,
            ..Given::default()
        };
        let _ = fake_quantize(&scheme, x, x.len() / k.max(1), k, given);
    }
}

/// Number of finite values beyond `limit` under `step`.
fn beyond(x: &[f32], step: KernelStep, limit: f32) -> u64 {
    x.iter().filter(|x| x.is_finite() && step_of(step, **x).abs() >= limit).count() as u64
}
