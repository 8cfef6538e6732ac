//! Steps and scales of the blocks of a few lines: by the reference rules, or by tables made from them.

use mantissa_kernels::{Step as KernelStep, kernels};
use mantissa_num::blockwise::Range;
use mantissa_num::{Blocks, Rounding, Rule};

use super::rounder::{Fast, Rounder, Shared, kernel_step};
use crate::learned::usable;
use crate::policy::{Factors, ScaleChoice};

/// Scales of some lines: a factor for each, and the scales of their units where the form keeps them.
#[derive(Debug)]
pub(super) struct Scales<'a> {
    pub(super) factors: &'a mut [f32],
    /// `[lines, units]`, or empty.
    pub(super) scales: &'a mut [f32],
}

impl Scales<'_> {
    /// Sets all to 1.
    pub(super) fn clear(&mut self) {
        self.factors.fill(1.0);
        self.scales.fill(1.0);
    }

    pub(super) fn again(&mut self) -> Scales<'_> {
        Scales { factors: self.factors, scales: self.scales }
    }
}

/// Steps and scales of the blocks of a few lines that share them, and memory for one line.
pub(super) struct Band<'a> {
    rounder: &'a Rounder,
    fast: Fast,
    k: usize,
    pub(super) height: usize,
    /// Values of a block along a line.
    pub(super) width: usize,
    pub(super) steps: Vec<KernelStep>,
    pub(super) scales: Vec<f32>,
    /// Largest magnitudes of all blocks, and of the blocks of one line.
    amax: [Vec<f32>; 2],
    /// Random words of a line, if rounding is stochastic.
    pub(super) words: Vec<u32>,
    /// Values of a run before they are rounded, and a factor of 1 for each of its blocks, for corrected scales.
    pub(super) exact: Vec<f32>,
    pub(super) ones: Vec<f32>,
}

/// Lines and values along a line of a block, for lines of `k` values.
pub(super) fn block_shape(fast: Fast, k: usize) -> (usize, usize) {
    match fast.blocks {
        Blocks::Tile { rows, cols } => (rows as usize, (cols as usize).min(k)),
        Blocks::Group(g) => (1, (g as usize).min(k)),
        _ => (1, k),
    }
}

impl<'a> Band<'a> {
    pub(super) fn new(rounder: &'a Rounder, fast: Fast, k: usize) -> Self {
        let (height, width) = block_shape(fast, k);
        let count = k.div_ceil(width);
        let stochastic = matches!(rounder.scheme.encoder.rounding, Rounding::Stochastic { .. });
        let corrected = rounder.choice == ScaleChoice::Eden;
        let run = if corrected { rounder.run } else { 0 };
        Band {
            rounder,
            fast,
            k,
            height,
            width,
            steps: vec![KernelStep::Divide(1.0); count],
            scales: vec![1.0; count],
            amax: [vec![0.0; count], vec![0.0; count]],
            words: vec![0; if stochastic || corrected { k } else { 0 }],
            exact: vec![0.0; run],
            ones: vec![1.0; run / width],
        }
    }

    /// Chooses steps and scales of the blocks of `lines`, which are finite. `first` is the index of the first one in the
    /// tensor.
    pub(super) fn choose(&mut self, lines: &[f32], first: usize, shared: &Shared) {
        let (rounder, k, width) = (self.rounder, self.k, self.width);
        if let Some(learned) = &shared.learned {
            let own = &learned[first * self.steps.len()..];
            for (x, (step, scale)) in own.iter().zip(self.steps.iter_mut().zip(&mut self.scales)) {
                let block = rounder.scheme.block_with_scale(usable(*x));
                *scale = rounder.scheme.format.decoder(block.scale, 0, None).scale();
                *step = kernel_step(block.step());
            }
            return;
        }
        let tensor_step = match (shared.multiplier, shared.block) {
            (Some(multiplier), _) => Some(KernelStep::Multiply(multiplier)),
            (_, Some(block)) => Some(kernel_step(block.step())),
            _ => None,
        };
        if let Some(step) = tensor_step {
            self.steps.fill(step);
            return self.scales.fill(1.0);
        }
        let both = self.steps.iter_mut().zip(&mut self.scales);
        if rounder.scheme.encoder.rule == Rule::AbsMean {
            for (b, (step, scale)) in both.enumerate() {
                let span = b * width..k.min((b + 1) * width);
                let rows = lines.chunks_exact(k).map(|line| rounder.range(&line[span.clone()]));
                let range = rows.fold(Range::EMPTY, Range::union);
                (*step, *scale) = rounder.block(self.fast, &lines[span], range, shared);
            }
            return;
        }
        if rounder.choice == ScaleChoice::Deviation {
            for (x, (step, scale)) in lines.chunks(width).zip(both) {
                *scale = by_deviation(x);
                *step = KernelStep::Divide(*scale * rounder.headroom);
            }
            return;
        }
        let [all, line_amax] = &mut self.amax;
        for (i, line) in lines.chunks_exact(k).enumerate() {
            if i == 0 {
                kernels().group_amax(line, width, all);
            } else {
                kernels().group_amax(line, width, line_amax);
                all.iter_mut().zip(&*line_amax).for_each(|(a, b)| *a = if *b > *a { *b } else { *a });
            }
        }
        if let Some(by_amax) = &shared.by_amax {
            return by_amax.choose(rounder.headroom, all, &mut self.steps, &mut self.scales);
        }
        if let Some(powers) = rounder.powers.as_ref().filter(|_| !rounder.power_up()) {
            return powers.choose(rounder.headroom, all, &mut self.steps, &mut self.scales);
        }
        for ((amax, x), (step, scale)) in all.iter().zip(lines[..k].chunks(width)).zip(both) {
            let range = rounder.range_of(*amax, x.len() * lines.len() / k);
            (*step, *scale) = rounder.block(self.fast, x, range, shared);
        }
    }

    /// Moves scales out of the values where the form keeps them: the scales of the units of `count` lines from band `at` on,
    /// or the factors of the lines.
    pub(super) fn take_scales(&mut self, at: usize, count: usize, factors: &mut [f32], scales: &mut [f32]) {
        let first = at * self.height;
        match (self.fast.factors, scales.is_empty()) {
            (Factors::Line, _) => factors[first] = std::mem::replace(&mut self.scales[0], 1.0),
            (Factors::Block | Factors::None, false) => {
                let units = self.scales.len();
                let lines = scales[first * units..][..count * units].chunks_exact_mut(units);
                lines.for_each(|line| line.copy_from_slice(&self.scales));
                self.scales.fill(1.0);
            }
            _ => {}
        }
    }

    /// Draws the random words of the line of this index.
    pub(super) fn draw(&mut self, seed: u64, line: u64) {
        if !self.words.is_empty() {
            kernels().random_words(seed, line * self.k as u64, &mut self.words);
        }
    }
}

/// Scale of a block by its standard deviation ([`ScaleChoice::Deviation`]); moments in f64, in order.
fn by_deviation(x: &[f32]) -> f32 {
    let n = x.len() as f64;
    let mean = x.iter().map(|x| f64::from(*x)).sum::<f64>() / n;
    let variance = x.iter().map(|x| (f64::from(*x) - mean).powi(2)).sum::<f64>() / n;
    let raw = variance.sqrt() * (2.922_478_56 / 6.0) + 1e-8;
    f32::from_bits((raw as f32).to_bits() & 0x7f80_0000)
}
