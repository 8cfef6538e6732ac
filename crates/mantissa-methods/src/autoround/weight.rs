//! Rounding and clipping of one weight as parameters: the pure part of SignRound.
//!
//! W `[n, k]` has groups of `g` columns. With a group's multiplier s and zero point z, `u = w/s + z` lies between two
//! elements `a ≤ u ≤ b` of the format. With `t = (u - a)/(b - a)` and a learned offset `v ∈ [-1/2, 1/2]`, the weight
//! becomes `s·((t + v ≥ 1/2 ? b : a) - z)`. (SignRound, equation 3, where a and b are adjacent integers; here
//! elements of any grid, so that FP4 and code books use the same rule.) s follows from the group's range times
//! learned factors (equation 4).
//!
//! Gradients pass the rounding unchanged (straight-through estimator). An update uses only their signs (equation 5),
//! `v -= η·sign(∂L/∂v)`, so one step size serves all layers: every weight can reach either neighbour in the available
//! steps. Here the sign of the gradient plus its decaying mean is taken.

use std::ops::RangeInclusive;

use mantissa_kernels::for_each;
use mantissa_num::blockwise::{Decoder, Range};
use mantissa_num::{Blocks, Code, Codes, Quantized, ScaleLevel, Scheme, code_unit};

use super::AutoRoundError;
use super::levels::{Levels, Rounded, integer};
use crate::error_stats::ErrorStats;
use crate::solved::Solved;

/// Rows that a thread processes at a time.
const ROWS: usize = 16;

/// Groups that a thread works on at a time.
const GROUPS: usize = 512;

/// Factors of a group's range that are tried before learning.
const CLIPS: RangeInclusive<f32> = 0.70..=1.06;

/// The same for power-of-two scales. The factors must reach every scale that can be best: an E8M0 scale by the OCP
/// rule is up to 1.5 times the exact one.
const CLIPS_OF_POWERS: RangeInclusive<f32> = 0.60..=1.50;

/// Number of factors tried.
const TRIED: usize = 19;

/// Largest change of a factor by learning.
const CLIP_REACH: f32 = 0.5;

/// Decay of the momentum, and its share in the step direction relative to the gradient: β₂ and β₁ of Lion (Chen et
/// al. 2023, "Symbolic Discovery of Optimization Algorithms", arXiv:2302.06675, algorithm 2), which uses signs as
/// well.
const DECAY: f32 = 0.9;
const SHARE: f32 = 0.5;

/// Weight with learned rounding.
#[derive(Clone, Debug)]
pub struct LearnedWeight {
    scheme: Scheme,
    levels: Levels,
    outer: Option<f32>,
    rows: usize,
    cols: usize,
    /// Columns of a group.
    group: usize,
    /// `[rows, cols]`.
    w: Vec<f32>,
    /// v, `[rows, cols]`.
    offsets: Vec<f32>,
    /// Decaying mean of the gradients so far, `[rows, cols]`.
    momentum: Vec<f32>,
    /// `[rows, groups]`.
    groups: Vec<Group>,
}

/// Learned parameters of a group, and the resulting scale.
#[derive(Clone, Copy, Debug)]
struct Group {
    /// Range of its weights, including 0.
    min: f32,
    max: f32,
    /// Factors of min and max. Symmetric formats use one factor for both, whose sign is the multiplier's.
    clip: [f32; 2],
    /// Initial factors.
    start: [f32; 2],
    scale: u32,
    zero: i32,
    decoder: Decoder,
    /// Factor of the elements, combining all levels of scales.
    multiplier: f32,
}

impl Group {
    const BLANK: Group = Group {
        min: 0.0,
        max: 0.0,
        clip: [1.0; 2],
        start: [1.0; 2],
        scale: 0,
        zero: 0,
        decoder: Decoder::scaled(1.0),
        multiplier: 1.0,
    };

    /// A weight in units of the scale.
    #[inline(always)]
    fn unit(&self, w: f32) -> f32 {
        w / self.multiplier + self.zero as f32
    }

    /// Adds the contribution of a weight `u`, in units of the scale, to the gradients of the multiplier and of the zero point,
    /// which only clipped weights notice. `g` is the gradient of the weight's value.
    #[inline(always)]
    fn add_gradients(&self, (by_scale, by_zero): (&mut f64, &mut f64), g: f32, u: f32, rounded: Rounded) {
        let Rounded { level, inside } = rounded;
        *by_scale += f64::from(g * (level - if inside { u } else { self.zero as f32 }));
        *by_zero -= if inside { 0.0 } else { f64::from(g * self.multiplier) };
    }
}

const NO_TABLE: &str = "its elements are not a table of at most 256 values with a scale";

fn refused(scheme: &Scheme, why: &'static str) -> AutoRoundError {
    AutoRoundError::Scheme { scheme: scheme.to_string(), why }
}

/// Checks that the rounding of a weight `[rows, cols]` can be learned under `scheme`.
///
/// # Errors
/// [`AutoRoundError::Scheme`].
pub fn check_scheme(scheme: &Scheme, rows: usize, cols: usize) -> Result<(), AutoRoundError> {
    levels_and_group(scheme, rows, cols).map(drop)
}

/// Elements of `scheme`, and columns of a group.
fn levels_and_group(scheme: &Scheme, rows: usize, cols: usize) -> Result<(Levels, usize), AutoRoundError> {
    let levels = Levels::of(scheme).ok_or_else(|| refused(scheme, NO_TABLE))?;
    if scheme.format.scale().is_some_and(|tree| tree.nested().is_some()) {
        return Err(refused(scheme, "its scales are quantized together after the weight"));
    }
    match scheme.format.blocks() {
        Blocks::Row => Ok((levels, cols.max(1))),
        Blocks::Group(group) => Ok((levels, (group as usize).min(cols).max(1))),
        Blocks::Flat(block) if cols.is_multiple_of(block as usize) => Ok((levels, block as usize)),
        Blocks::Tensor if rows == 1 => Ok((levels, cols.max(1))),
        _ => Err(refused(scheme, "its blocks are not groups within a row")),
    }
}

impl LearnedWeight {
    /// Rounds `w` `[rows, cols]` to nearest in the groups of `scheme`, with each group's range reduced to the least
    /// `Σ h (w - q)²`. `h` is the mean square of each column's input, `[cols]`. `outer` is the global scale if the
    /// scheme has one. With `signed`, multipliers may be negative if the format can store that: the side of a group
    /// that reaches further then gets the extra code.
    ///
    /// # Errors
    /// [`AutoRoundError::Scheme`] for formats whose elements are not a table of at most 256 values in groups within
    /// rows, and [`AutoRoundError::Length`].
    pub fn new(
        scheme: &Scheme,
        w: &[f32],
        cols: usize,
        h: &[f32],
        outer: Option<f32>,
        signed: bool,
        threads: usize,
    ) -> Result<Self, AutoRoundError> {
        let rows = w.len() / cols.max(1);
        for (what, found, expected) in [("values", w.len(), rows * cols), ("column weights", h.len(), cols)] {
            if found != expected {
                return Err(AutoRoundError::Length { what, found, expected });
            }
        }
        let (levels, group) = levels_and_group(scheme, rows, cols)?;
        let narrow =
            matches!(scheme.format.scale().map(|tree| tree.code), Some(Code::Float(f)) if f.bits() <= 8);
        let per_row = cols.div_ceil(group);
        let mut all = LearnedWeight {
            scheme: scheme.clone(),
            levels,
            outer,
            rows,
            cols,
            group,
            w: w.to_vec(),
            offsets: vec![0.0; w.len()],
            momentum: vec![0.0; w.len()],
            groups: vec![Group::BLANK; rows * per_row],
        };
        // Only integers have an element on one side without a counterpart.
        let signed =
            signed && all.levels.integers && !narrow && !all.has_powers() && !scheme.format.has_zero();
        let mut groups = std::mem::take(&mut all.groups);
        let per = ROWS * per_row.max(1);
        for_each(threads, groups.chunks_mut(per).zip(w.chunks(ROWS * cols.max(1))), |(groups, w)| {
            for (groups, w) in groups.chunks_mut(per_row).zip(w.chunks(cols)) {
                for ((to, w), h) in groups.iter_mut().zip(w.chunks(group)).zip(h.chunks(group)) {
                    *to = all.first(w, h, signed);
                }
            }
        });
        all.groups = groups;
        Ok(all)
    }

    /// Chooses a group's clip with the least error.
    fn first(&self, w: &[f32], h: &[f32], signed: bool) -> Group {
        let range = Range::of(w);
        let (min, max) = (range.min.min(0.0), range.max.max(0.0));
        let mut best: Option<(f64, Group)> = None;
        let clips = if self.has_powers() { CLIPS_OF_POWERS } else { CLIPS };
        for i in 0..TRIED {
            let factor = clips.start() + (clips.end() - clips.start()) * i as f32 / (TRIED - 1) as f32;
            for sign in [1.0f32, -1.0] {
                if sign < 0.0 && !signed {
                    continue;
                }
                let clip = [sign * factor; 2];
                let group = self.derived(Group { min, max, clip, start: clip, ..Group::BLANK });
                let error = w.iter().zip(h).fold(0.0, |error, (&w, &h)| {
                    let q = group.decoder.value(self.levels.round(group.unit(w), 0.0).level);
                    error + f64::from(h) * f64::from(q - w) * f64::from(q - w)
                });
                if best.as_ref().is_none_or(|(least, _)| error < *least) {
                    best = Some((error, group));
                }
            }
        }
        best.map_or(Group::BLANK, |(_, group)| group)
    }

    /// True if scales are powers of two.
    fn has_powers(&self) -> bool {
        self.scheme.format.scale().is_some_and(|tree| tree.code == Code::E8m0)
    }

    /// Scale and zero point for the clips, as stored.
    fn derived(&self, group: Group) -> Group {
        let Group { min, max, clip, .. } = group;
        let format = &self.scheme.format;
        let (low, high) = self.levels.ends();
        let wanted = if format.has_zero() {
            (max * clip[1] - min * clip[0]) / (high - low)
        } else {
            max.max(-min) * clip[0] / self.levels.reach
        };
        let scale = format.nearest_scale(wanted, self.outer).unwrap_or(0);
        let (_, inner, tail) = format.decoder(scale, 0, self.outer).parts();
        let multiplier = inner * tail.unwrap_or(1.0);
        let zero = if format.has_zero() {
            (low - min * clip[0] / multiplier).clamp(low, high).round_ties_even() as i32
        } else {
            0
        };
        Group { scale, zero, decoder: format.decoder(scale, zero, self.outer), multiplier, ..group }
    }

    /// Rows of the weight.
    pub fn rows(&self) -> usize {
        self.rows
    }

    /// Columns of the weight.
    pub fn cols(&self) -> usize {
        self.cols
    }

    /// Original weight `[rows, cols]`.
    pub fn weight(&self) -> &[f32] {
        &self.w
    }

    /// Resets offsets and ranges to those chosen by [`new`](Self::new).
    pub fn reset(&mut self) {
        self.offsets.fill(0.0);
        let mut groups = std::mem::take(&mut self.groups);
        groups.iter_mut().for_each(|group| *group = self.derived(Group { clip: group.start, ..*group }));
        self.groups = groups;
    }

    /// Fixes the rounding of every weight between two elements: up if `up` of its index is true.
    pub(crate) fn choose(&mut self, up: impl Fn(usize) -> bool) {
        self.offsets.iter_mut().enumerate().for_each(|(i, offset)| *offset = if up(i) { 0.5 } else { -0.5 });
    }

    /// Factors of the ranges of the groups, `[rows, groups]`: for the least weight and for the greatest; symmetric formats have
    /// one factor for both.
    pub(crate) fn clips(&self) -> impl Iterator<Item = [f32; 2]> + '_ {
        self.groups.iter().map(|group| group.clip)
    }

    /// Sets the factors of the ranges, `[rows, groups]`.
    pub(crate) fn set_clips(&mut self, clips: &[[f32; 2]], threads: usize) {
        let mut groups = std::mem::take(&mut self.groups);
        let pieces = groups.chunks_mut(GROUPS).zip(clips.chunks(GROUPS));
        for_each(threads, pieces, |(groups, clips)| {
            for (group, &clip) in groups.iter_mut().zip(clips) {
                *group = self.derived(Group { clip, ..*group });
            }
        });
        self.groups = groups;
    }

    /// Gradients of the factors of the ranges, `[rows, groups]`, from the `gradient` `[rows, cols]` of the values of
    /// [`fake_quantize`](Self::fake_quantize). They pass the rounding of weights, scales and zero points straight through.
    pub(crate) fn clip_gradients(&self, gradient: &[f32], threads: usize) -> Vec<[f64; 2]> {
        let per_row = self.cols.div_ceil(self.group).max(1);
        let mut found = vec![[0.0; 2]; self.groups.len()];
        for_each(threads, found.chunks_mut(GROUPS).enumerate(), |(piece, found)| {
            for (i, to) in (piece * GROUPS..).zip(found) {
                let (row, column) = (i / per_row, i % per_row * self.group);
                let span = row * self.cols + column..row * self.cols + (column + self.group).min(self.cols);
                let group = &self.groups[i];
                let (mut by_scale, mut by_zero) = (0.0, 0.0);
                for at in span {
                    let u = group.unit(self.w[at]);
                    let rounded = self.levels.round(u, self.offsets[at]);
                    group.add_gradients((&mut by_scale, &mut by_zero), gradient[at], u, rounded);
                }
                *to = self.clip_gradient(group, by_scale, by_zero);
            }
        });
        found
    }

    /// Gradients of the weights, from the `gradient` `[rows, cols]` of the values of
    /// [`fake_quantize`](Self::fake_quantize): they pass the rounding, but not the clipping.
    pub(crate) fn weight_gradients(&self, gradient: &[f32], threads: usize) -> Vec<f32> {
        let mut found = gradient.to_vec();
        self.each_row(&mut found, threads, |group, at, found| {
            if !self.levels.round(group.unit(self.w[at]), self.offsets[at]).inside {
                *found = 0.0;
            }
        });
        found
    }

    /// Moves every weight against its entry of `directions` `[rows, cols]` by `rate` times its group's scale.
    pub(crate) fn move_weights(&mut self, directions: &[f32], rate: f32, threads: usize) {
        let mut w = std::mem::take(&mut self.w);
        self.each_row(&mut w, threads, |group, at, w| *w -= rate * group.multiplier.abs() * directions[at]);
        self.w = w;
    }

    /// Replaces the weights.
    pub(crate) fn set_weights(&mut self, w: &[f32]) {
        self.w.copy_from_slice(w);
    }

    /// Passes every entry of `values` `[rows, cols]` to `change`, with its group and index.
    fn each_row(&self, values: &mut [f32], threads: usize, change: impl Fn(&Group, usize, &mut f32) + Sync) {
        let (cols, per_row) = (self.cols.max(1), self.cols.div_ceil(self.group));
        for_each(threads, values.chunks_mut(cols).enumerate(), |(row, values)| {
            for (col, value) in values.iter_mut().enumerate() {
                change(&self.groups[row * per_row + col / self.group], row * cols + col, value);
            }
        });
    }

    /// Writes the current values of the weight, `[rows, cols]`.
    ///
    /// # Panics
    /// If `out` has another length.
    pub fn fake_quantize(&self, out: &mut [f32], threads: usize) {
        assert_eq!(out.len(), self.w.len(), "a weight of {} values", self.w.len());
        let (cols, per_row) = (self.cols.max(1), self.cols.div_ceil(self.group));
        let pieces = out.chunks_mut(ROWS * cols).zip(self.w.chunks(ROWS * cols));
        let pieces =
            pieces.zip(self.offsets.chunks(ROWS * cols)).zip(self.groups.chunks(ROWS * per_row.max(1)));
        for_each(threads, pieces, |(((out, w), offsets), groups)| {
            let rows = out.chunks_mut(cols).zip(w.chunks(cols)).zip(offsets.chunks(cols));
            for (((out, w), offsets), groups) in rows.zip(groups.chunks(per_row)) {
                let spans =
                    out.chunks_mut(self.group).zip(w.chunks(self.group)).zip(offsets.chunks(self.group));
                for (((out, w), offsets), group) in spans.zip(groups) {
                    self.values_of(group, w, offsets, out);
                }
            }
        });
    }

    /// Values of a group's weights.
    fn values_of(&self, group: &Group, w: &[f32], offsets: &[f32], out: &mut [f32]) {
        let (zero, inner, tail) = group.decoder.parts();
        // A factor of 1 changes no bit.
        let tail = tail.unwrap_or(1.0);
        let values = out.iter_mut().zip(w).zip(offsets);
        if self.levels.integers {
            let ends = self.levels.ends();
            for ((out, &w), &offset) in values {
                *out = (integer(ends, group.unit(w), offset).level - zero) * inner * tail;
            }
        } else {
            for ((out, &w), &offset) in values {
                *out = (self.levels.round(group.unit(w), offset).level - zero) * inner * tail;
            }
        }
    }

    /// Takes one step of sign descent. `gradient` `[rows, cols]` is ∂loss/∂values, where the values are what
    /// [`fake_quantize`](Self::fake_quantize) returns; `rate` and `clip_rate` are the step lengths for offsets and clips.
    ///
    /// # Panics
    /// If `gradient` has another length.
    pub fn step(&mut self, gradient: &[f32], rate: f32, clip_rate: f32, threads: usize) {
        assert_eq!(gradient.len(), self.w.len(), "a weight of {} values", self.w.len());
        let (cols, per_row) = (self.cols.max(1), self.cols.div_ceil(self.group));
        let (mut offsets, mut groups) = (std::mem::take(&mut self.offsets), std::mem::take(&mut self.groups));
        let mut momentum = std::mem::take(&mut self.momentum);
        let this = &*self;
        let pieces = offsets.chunks_mut(ROWS * cols).zip(momentum.chunks_mut(ROWS * cols));
        let pieces = pieces.zip(groups.chunks_mut(ROWS * per_row.max(1)));
        let pieces = pieces.zip(this.w.chunks(ROWS * cols)).zip(gradient.chunks(ROWS * cols));
        for_each(threads, pieces, |((((offsets, momentum), groups), w), gradient)| {
            let rows =
                offsets.chunks_mut(cols).zip(momentum.chunks_mut(cols)).zip(groups.chunks_mut(per_row));
            let rows = rows.zip(w.chunks(cols)).zip(gradient.chunks(cols));
            for ((((offsets, momentum), groups), w), gradient) in rows {
                let spans = offsets.chunks_mut(this.group).zip(momentum.chunks_mut(this.group));
                let spans = spans.zip(w.chunks(this.group)).zip(gradient.chunks(this.group));
                for ((((offsets, momentum), w), gradient), group) in spans.zip(groups) {
                    *group = this.step_group(*group, (offsets, momentum), w, gradient, (rate, clip_rate));
                }
            }
        });
        (self.offsets, self.groups, self.momentum) = (offsets, groups, momentum);
    }

    /// One step along `directions` `[rows, cols]` of length `rate`, in place of the gradient's signs; clips take theirs by the signs
    /// of `gradient`, as in [`step`](Self::step).
    ///
    /// # Panics
    /// If `gradient` or `directions` have another length.
    pub fn step_along(
        &mut self,
        gradient: &[f32],
        directions: &[f32],
        rate: f32,
        clip_rate: f32,
        threads: usize,
    ) {
        assert_eq!(directions.len(), self.w.len(), "a weight of {} values", self.w.len());
        let (cols, per_row) = (self.cols.max(1), self.cols.div_ceil(self.group));
        let mut offsets = std::mem::take(&mut self.offsets);
        let this = &*self;
        let pieces = offsets.chunks_mut(cols).zip(this.w.chunks(cols)).zip(directions.chunks(cols));
        let pieces = pieces.zip(this.groups.chunks(per_row.max(1)));
        for_each(threads, pieces, |(((offsets, w), directions), groups)| {
            let values = offsets.iter_mut().zip(w).zip(directions).enumerate();
            for (column, ((offset, &w), direction)) in values {
                let group = &groups[column / this.group];
                if this.levels.round(group.unit(w), *offset).inside {
                    *offset = (*offset - rate * group.multiplier.signum() * direction).clamp(-0.5, 0.5);
                }
            }
        });
        self.offsets = offsets;
        // Offsets stay: this step moves only the clips.
        if !self.has_powers() {
            self.step(gradient, 0.0, clip_rate, threads);
        }
    }

    /// The group after a step; the step of its offsets is taken.
    fn step_group(
        &self,
        group: Group,
        learned: (&mut [f32], &mut [f32]),
        w: &[f32],
        gradient: &[f32],
        (rate, clip_rate): (f32, f32),
    ) -> Group {
        let (by_scale, by_zero) = if self.levels.integers {
            let ends = self.levels.ends();
            step_offsets(&group, learned, w, gradient, rate, |u, offset| integer(ends, u, offset))
        } else {
            step_offsets(&group, learned, w, gradient, rate, |u, offset| self.levels.round(u, offset))
        };
        // A power of two can only double or halve, so it stays where the search put it.
        if self.has_powers() {
            return group;
        }
        let gradients = self.clip_gradient(&group, by_scale, by_zero);
        let mut clip = group.clip;
        for ((clip, start), gradient) in clip.iter_mut().zip(group.start).zip(gradients) {
            if gradient != 0.0 {
                let (low, high) = (start - CLIP_REACH * start.abs(), start + CLIP_REACH * start.abs());
                *clip = (*clip - clip_rate * gradient.signum() as f32).clamp(low, high);
            }
        }
        self.derived(Group { clip, ..group })
    }

    /// Gradients of both clips.
    fn clip_gradient(&self, group: &Group, by_scale: f64, by_zero: f64) -> [f64; 2] {
        let (min, max) = (f64::from(group.min), f64::from(group.max));
        if !self.scheme.format.has_zero() {
            let gradient = by_scale * max.max(-min);
            return [gradient; 2];
        }
        let (low, high) = self.levels.ends();
        let span = f64::from(high - low);
        let multiplier = f64::from(group.multiplier);
        let clipped_min = min * f64::from(group.clip[0]);
        // z = low - min·β/s, so s changes it too.
        let through = by_scale + by_zero * clipped_min / (multiplier * multiplier);
        [through * -min / span - by_zero * min / multiplier, through * max / span]
    }

    /// Current weight with its error, as a method returns it.
    pub(crate) fn solved(&self) -> Solved {
        let quantized = self.quantized();
        let stats = ErrorStats::of(self.weight(), &quantized);
        Solved::rounded((quantized, stats))
    }

    /// Current codes, scales and zero points.
    pub fn quantized(&self) -> Quantized {
        let format = &self.scheme.format;
        let mut codes = Codes::with_capacity(code_unit(format), self.w.len());
        let unit = format.scale().map_or(1, |tree| tree.code.unit_bytes());
        let mut scales = Codes::with_capacity(unit, self.groups.len());
        let per_row = self.cols.div_ceil(self.group);
        for row in 0..self.rows {
            for column in 0..self.cols {
                let (i, group) =
                    (row * self.cols + column, &self.groups[row * per_row + column / self.group]);
                let rounded = self.levels.round(group.unit(self.w[i]), self.offsets[i]);
                codes.push(self.levels.code(rounded.level));
            }
        }
        self.groups.iter().for_each(|group| scales.push(group.scale));
        let zeros =
            if format.has_zero() { self.groups.iter().map(|group| group.zero).collect() } else { Vec::new() };
        let outer = self.outer.filter(|_| self.scheme.has_outer_scale());
        Quantized {
            codes,
            scales: ScaleLevel::from(scales).with_zeros(zeros).with_outer(outer),
            ..Quantized::empty(format.clone(), self.rows, self.cols)
        }
    }

    /// Memory of a learned weight in bytes: weight, offset and momentum in f32, and the groups' states.
    pub fn bytes_needed(rows: usize, cols: usize, group: usize) -> u64 {
        let groups = rows as u64 * cols.div_ceil(group.max(1)) as u64;
        12 * (rows * cols) as u64 + size_of::<Group>() as u64 * groups
    }
}

/// Steps a group's offsets and their momentum; returns the gradients of its multiplier and of its zero point, to
/// which only clipped weights contribute.
#[inline(always)]
fn step_offsets(
    group: &Group,
    (offsets, momentum): (&mut [f32], &mut [f32]),
    w: &[f32],
    gradient: &[f32],
    rate: f32,
    round: impl Fn(f32, f32) -> Rounded,
) -> (f64, f64) {
    let step = rate * group.multiplier.signum();
    let (mut by_scale, mut by_zero) = (0.0f64, 0.0f64);
    for (((offset, momentum), &w), &gradient) in offsets.iter_mut().zip(momentum).zip(w).zip(gradient) {
        let g = SHARE * *momentum + (1.0 - SHARE) * gradient;
        *momentum = DECAY * *momentum + (1.0 - DECAY) * gradient;
        let u = group.unit(w);
        let rounded = round(u, *offset);
        group.add_gradients((&mut by_scale, &mut by_zero), g, u, rounded);
        let moved = if rounded.inside && g != 0.0 { step * g.signum() } else { 0.0 };
        *offset = (*offset - moved).clamp(-0.5, 0.5);
    }
    (by_scale, by_zero)
}
