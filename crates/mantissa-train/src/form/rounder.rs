//! Rounder of one operand: its scheme, and the steps and scales of blocks by the reference rules.

use mantissa_kernels::{ElementGrid, Step as KernelStep, kernels};
use mantissa_num::blockwise::{Block, Range, Step};
use mantissa_num::e8m0;
use mantissa_num::{Blocks, Code, Format, Rule, Scheme, Source};

use super::scale_tables::{ByAmax, Powers};
use crate::policy::{Factors, OperandPolicy, ScaleChoice, fast_path};

/// Rounds the lines of one operand.
#[derive(Clone, Debug)]
pub(crate) struct Rounder {
    pub(super) scheme: Scheme,
    pub(super) headroom: f32,
    pub(super) choice: ScaleChoice,
    /// Length of the rotation's runs, 0 without one.
    pub(super) run: usize,
    pub(super) fast: Option<Fast>,
    /// Scales by amax, where they are powers of two.
    pub(super) powers: Option<Powers>,
}

#[derive(Clone, Copy, Debug)]
pub(super) struct Fast {
    pub(super) grid: ElementGrid,
    pub(super) blocks: Blocks,
    pub(super) factors: Factors,
    /// Magnitude from which on values do not round to the largest element but are clipped to it.
    pub(super) limit: f32,
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
    pub(super) seed: u64,
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
        let fast = fast_path(&scheme).zip(Factors::of(&scheme)).map(|((affine, grid), factors)| Fast {
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
    /// `multiplier` comes from delayed scaling.
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

    /// Step and scale of a block with values of this range; `x` are the values of its first line.
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
pub(super) fn limit(code: Code) -> f32 {
    match code {
        Code::Float(float) => float.max() + (float.max() - float.decode(float.max_code() - 1)) / 2.0,
        code => code.max() + 0.5,
    }
}

pub(super) fn step_of(step: KernelStep, x: f32) -> f32 {
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
