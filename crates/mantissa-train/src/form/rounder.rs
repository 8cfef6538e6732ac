//! Rounding of an operand's lines to a scheme: steps and scales by the reference rules, values by vectorised loops.
//! Schemes without such loops run [`fake_quantize`]; both give the same values.

use mantissa_kernels::{ElementGrid, Step as KernelStep, kernels};
use mantissa_num::blockwise::{Block, Range, Step};
use mantissa_num::e8m0;
use mantissa_num::{
    Affine, Blocks, Code, Format, Given, Offset, Rounding, Rule, ScaleTree, Scheme, Source, fake_quantize,
};

use super::scales::{Band, ByAmax, Powers, Scales, block_shape};
use crate::health::Sums;
use crate::learned::int_range;
use crate::policy::{OperandPolicy, ScaleChoice};

/// Place of the scales that are taken out of the rounded values and multiply the product instead.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Factors {
    /// One for the tensor.
    Tensor,
    /// One for each line.
    Line,
    /// None but the tensor-wide scale: a block's own scale has few bits, so that its values still fit bf16.
    Block,
    /// None: f32 values.
    None,
}

impl Factors {
    /// Returns the place for a scheme with the fast path; `None` without.
    pub(crate) fn of(scheme: &Scheme) -> Option<Self> {
        let (affine, _) = fast(scheme)?;
        let tree = affine.scale.as_ref()?;
        Some(match affine.blocks {
            Blocks::Tensor => Factors::Tensor,
            Blocks::Row => Factors::Line,
            _ if has_few_bits(tree) => Factors::Block,
            _ => Factors::None,
        })
    }

    /// True if bf16 holds the values without these factors.
    pub(crate) fn fit_bf16(self) -> bool {
        self != Factors::None
    }
}

/// True if the product of element and block scale fits bf16: E8M0, or E4M3 under a scale of the tensor that is
/// multiplied last.
fn has_few_bits(tree: &ScaleTree) -> bool {
    use mantissa_num::Sense;
    match tree.code {
        Code::E8m0 => true,
        Code::Float(float) if float.bits() <= 8 => {
            tree.tensor_wide().is_none_or(|outer| matches!(outer.sense, Sense::Amax { .. }))
        }
        _ => false,
    }
}

/// Returns format and grid of a scheme that the vectorised loops round.
fn fast(scheme: &Scheme) -> Option<(&Affine, ElementGrid)> {
    let Format::Affine(affine) = &scheme.format else { return None };
    let tree = affine.scale.as_ref()?;
    let rounding = scheme.encoder.rounding;
    // Four-over-six weighs the error of its candidates under the rounding itself.
    let drawn = matches!(rounding, Rounding::Stochastic { .. }) && scheme.encoder.rule != Rule::FourOverSix;
    let known = (rounding == Rounding::NearestEven || drawn)
        && affine.offset == Offset::None
        && tree.nested().is_none()
        && !matches!(affine.blocks, Blocks::Flat(_))
        && !matches!(scheme.encoder.rule, Rule::DeepGemm);
    let grid = match affine.code {
        Code::Int(bits) => {
            let (low, high) = int_range(scheme, bits);
            ElementGrid::int(low, high)
        }
        Code::Ternary => ElementGrid::int(-1.0, 1.0),
        Code::Float(float) if float.bits() <= 8 => {
            ElementGrid::float(float.mantissa_bits, float.min_normal(), float.max())
        }
        _ => return None,
    };
    known.then_some((affine, grid))
}

/// Returns the number of values under one scale of a scheme whose elements are integers of at most 8 bits, or floats of
/// at most 8 bits: `None` inside if a line has only one. `None` for other schemes.
pub(super) fn units_of(scheme: &Scheme, integers: bool) -> Option<Option<usize>> {
    let (affine, _) = fast(scheme)?;
    let fits = match affine.code {
        Code::Int(_) | Code::Ternary => integers,
        _ => !integers,
    };
    let unit = match affine.blocks {
        Blocks::Tensor | Blocks::Row => None,
        Blocks::Group(g) => Some(g as usize),
        Blocks::Tile { cols, .. } => Some(cols as usize),
        _ => return None,
    };
    fits.then_some(unit)
}

/// Rounds the lines of one operand.
#[derive(Clone, Debug)]
pub(crate) struct Rounder {
    pub(super) scheme: Scheme,
    pub(super) headroom: f32,
    pub(super) choice: ScaleChoice,
    /// Length of the rotation's runs, 0 without one.
    pub(super) run: usize,
    fast: Option<Fast>,
    /// Scales by amax, where they are powers of two.
    pub(super) powers: Option<Powers>,
}

#[derive(Clone, Copy, Debug)]
pub(super) struct Fast {
    pub(super) grid: ElementGrid,
    pub(super) blocks: Blocks,
    pub(super) factors: Factors,
    /// Magnitude from which on values do not round to the largest element but are clipped to it.
    limit: f32,
}

/// Values that all lines of a tensor share.
#[derive(Clone, Debug, Default)]
pub(crate) struct Shared {
    /// Tensor-wide scale as stored, above block scales.
    outer: Option<f32>,
    /// The only block of a scheme with one scale per tensor.
    pub(super) block: Option<Block>,
    /// Fixed multiplier of delayed scaling.
    pub(super) multiplier: Option<f32>,
    /// Factor of the product.
    pub(crate) factor: f32,
    /// Learned scales of all blocks, in the order of the lines.
    pub(super) learned: Option<Vec<f32>>,
    /// Seed of stochastic rounding.
    seed: u64,
    /// Scales by amax, where they are E4M3.
    pub(super) by_amax: Option<ByAmax>,
}

impl Rounder {
    pub(crate) fn new(policy: &OperandPolicy, run: usize) -> Self {
        let mut scheme = policy.scheme.clone();
        if policy.scales == ScaleChoice::Eden {
            // The correction takes the place of the choice between 4 and 6.
            scheme.encoder.rule = Rule::Te;
        }
        let fast = fast(&scheme).zip(Factors::of(&scheme)).map(|((affine, grid), factors)| Fast {
            grid,
            blocks: affine.blocks,
            factors,
            limit: limit(affine.code),
        });
        let powers = fast.and_then(|_| Powers::of(&scheme));
        Rounder { scheme, headroom: policy.headroom, choice: policy.scales, run, fast, powers }
    }

    pub(super) fn power_up(&self) -> bool {
        self.choice == ScaleChoice::PowerOfTwo
    }

    /// True if lines cannot be rounded before the whole tensor was seen.
    pub(crate) fn needs_range(&self) -> bool {
        self.fast.is_none_or(|fast| fast.blocks == Blocks::Tensor || self.scheme.has_outer_scale())
    }

    /// Length of the amax history of delayed scaling.
    pub(crate) fn history(&self) -> Option<u32> {
        match self.scheme.source {
            Source::Delayed { len } => Some(len),
            _ => None,
        }
    }

    /// Largest element, which an amax maps to.
    pub(crate) fn max(&self) -> f32 {
        match &self.scheme.format {
            Format::Affine(affine) => affine.code.max(),
            _ => 1.0,
        }
    }

    /// Lines that are rounded together: the height of a tile, or one.
    pub(crate) fn height(&self) -> usize {
        match self.fast.map(|fast| fast.blocks) {
            Some(Blocks::Tile { rows, .. }) => rows as usize,
            _ => 1,
        }
    }

    /// True if lines carry a factor each.
    pub(crate) fn has_line_factors(&self) -> bool {
        self.fast.is_some_and(|fast| fast.factors == Factors::Line)
    }

    /// True if the whole matrix goes through the reference at once.
    pub(crate) fn is_reference(&self) -> bool {
        self.fast.is_none()
    }

    fn power_of_two(&self) -> bool {
        self.scheme.format.scale().is_some_and(|tree| tree.code == Code::E8m0)
    }

    /// Range of `x` as far as the rule needs it.
    pub(crate) fn range(&self, x: &[f32]) -> Range {
        if self.scheme.encoder.rule == Rule::AbsMean {
            return Range::of(x);
        }
        self.range_of(kernels().amax(x), x.len())
    }

    /// Range of `count` values of this largest magnitude.
    pub(super) fn range_of(&self, amax: f32, count: usize) -> Range {
        let amax = if self.power_of_two() { amax } else { amax * self.headroom };
        Range { min: -amax, max: amax, count: count as u64, ..Range::EMPTY }
    }

    /// Prepares the rounding of a tensor of range `whole` (needed only if [`needs_range`](Self::needs_range)).
    /// `multiplier` is that of delayed scaling.
    pub(crate) fn shared(&self, whole: Range, multiplier: Option<f32>, seed: u64) -> Shared {
        let headroom = if self.power_of_two() { self.headroom } else { 1.0 };
        let none = Shared { factor: headroom, seed, ..Shared::default() };
        let Some(fast) = self.fast else { return none };
        if let (Some(multiplier), Blocks::Tensor) = (multiplier, fast.blocks) {
            return Shared { multiplier: Some(multiplier), factor: 1.0 / multiplier, ..none };
        }
        let outer = self.scheme.outer_scale(whole.amax());
        let block = (fast.blocks == Blocks::Tensor).then(|| self.scheme.block(whole, false, outer));
        if let Some(block) = block.filter(|_| self.power_up()) {
            let scale = power_up(self.scheme.format.decoder(block.scale, 0, outer).scale());
            return Shared { multiplier: Some(1.0 / scale), factor: scale, ..none };
        }
        let factor = match block {
            Some(block) => self.scheme.format.decoder(block.scale, 0, outer).scale(),
            None => self.scheme.format.decoder(0, 0, outer).parts().2.unwrap_or(1.0),
        };
        let by_amax = if self.power_up() { None } else { ByAmax::of(&self.scheme, outer) };
        Shared { outer, block, factor: factor * headroom, by_amax, ..none }
    }

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

    /// Step and scale of a block with values of this range; `x` are those of its first line.
    pub(super) fn block(&self, fast: Fast, x: &[f32], range: Range, shared: &Shared) -> (KernelStep, f32) {
        let block = match self.scheme.candidates(range, shared.outer) {
            Some(candidates) => closer(candidates, x, fast.grid),
            None => self.scheme.block(range, false, shared.outer),
        };
        let (_, inner, _) = self.scheme.format.decoder(block.scale, 0, shared.outer).parts();
        if self.power_up() {
            let scale = power_up(inner);
            return (KernelStep::Divide(scale), scale);
        }
        if self.power_of_two() && self.headroom != 1.0 {
            // The product's factor makes up for it, so that the scale itself stays a power of two.
            return (KernelStep::Divide(inner * self.headroom), inner);
        }
        (kernel_step(block.step()), inner)
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
        for (i, ((exact, rounded), of_line)) in lines.enumerate() {
            let factor = of_line * shared.factor;
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
        if let Rounding::Stochastic { seed: of_step } = &mut scheme.encoder.rounding {
            *of_step = seed;
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

/// Returns the candidate of four-over-six with the smaller squared error.
fn closer(candidates: [(Block, f32); 2], x: &[f32], grid: ElementGrid) -> Block {
    let mut rounded = [0.0; 16];
    let errors = candidates.map(|(block, scale)| {
        let rounded = &mut rounded[..x.len()];
        rounded.copy_from_slice(x);
        kernels().round_blocks(rounded, x.len(), &[kernel_step(block.step())], &[scale], grid, &[]);
        rounded.iter().zip(x).map(|(q, v)| q - v).fold(0.0, |sum: f32, e| sum + e * e)
    });
    candidates[usize::from(errors[1] < errors[0])].0
}

/// Smallest power of two from `scale` on.
fn power_up(scale: f32) -> f32 {
    e8m0::decode(e8m0::ceil_of_abs(scale))
}

/// Half a step above the largest element.
fn limit(code: Code) -> f32 {
    match code {
        Code::Float(float) => float.max() + (float.max() - float.decode(float.max_code() - 1)) / 2.0,
        code => code.max() + 0.5,
    }
}

/// Number of finite values beyond `limit` under `step`.
fn beyond(x: &[f32], step: KernelStep, limit: f32) -> u64 {
    x.iter().filter(|x| x.is_finite() && step_of(step, **x).abs() >= limit).count() as u64
}

fn step_of(step: KernelStep, x: f32) -> f32 {
    match step {
        KernelStep::Divide(by) => x / by,
        KernelStep::Multiply(by) => x * by,
    }
}

pub(super) fn kernel_step(step: Step) -> KernelStep {
    match step {
        Step::Divide(by) => KernelStep::Divide(by),
        Step::Multiply(by) => KernelStep::Multiply(by),
        Step::Unit | Step::Constant(_) => KernelStep::Divide(1.0),
    }
}
