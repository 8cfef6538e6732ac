//! The rounding and clipping of one weight as parameters: the pure part of SignRound.
//!
//! W `[n, k]` in groups of `g` columns. With a group's multiplier s and zero point z, `u = w/s + z` lies between two elements
//! `a ≤ u ≤ b` of the format, `t = (u - a)/(b - a)`, and the weight becomes `s·((t + v ≥ 1/2 ? b : a) - z)` with a learned
//! offset `v ∈ [-1/2, 1/2]` (SignRound, equation 3, where a and b are neighbouring integers; here of any grid, so that FP4 and
//! code books are rounded by the same rule). s follows from the group's range times learned factors (equation 4).
//!
//! Gradients pass the rounding straight through. An update takes only their signs (equation 5), `v -= η·sign(∂L/∂v)`, which
//! is what makes one step size serve all layers: every weight can reach either neighbour in the time there is.

use std::ops::RangeInclusive;

use mantissa_kernels::for_each;
use mantissa_num::blockwise::{Decoder, Range};
use mantissa_num::{Blocks, Code, Codes, Format, Quantized, Rule, Scheme, code_unit};

use super::AutoRoundError;

/// Rows that a thread works on at a time.
const ROWS: usize = 16;

/// Factors of a group's range that are tried before learning begins.
const CLIPS: RangeInclusive<f32> = 0.70..=1.06;

/// The same where scales are powers of two, of which they are to reach every one that may be the best: an E8M0 scale by the OCP
/// rule is up to half as large again as the range asks for.
const CLIPS_OF_POWERS: RangeInclusive<f32> = 0.60..=1.50;

/// How many are tried.
const TRIED: usize = 19;

/// How far learning may take a factor from where it began.
const CLIP_REACH: f32 = 0.5;

/// A weight whose rounding is learned.
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
    /// `[rows, groups]`.
    groups: Vec<Group>,
}

/// The elements of a format in ascending order, with their codes.
#[derive(Clone, Debug)]
struct Levels {
    values: Vec<f32>,
    codes: Vec<u32>,
    /// The elements are consecutive integers.
    integers: bool,
    /// Largest magnitude.
    reach: f32,
}

/// What is learned of a group, and what follows from it.
#[derive(Clone, Copy, Debug)]
struct Group {
    /// Range of its weights, 0 included.
    min: f32,
    max: f32,
    /// Factors of min and max; of symmetric formats both are one, whose sign is the multiplier's.
    clip: [f32; 2],
    /// Where they began.
    start: [f32; 2],
    scale: u32,
    zero: i32,
    decoder: Decoder,
    /// What elements are multiplied by, all levels of scales together.
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
}

/// Where a weight lies between two elements.
#[derive(Clone, Copy)]
struct Place {
    /// `w/s + z`.
    u: f32,
    /// Index of the lower element.
    below: usize,
    /// Share of the way to the next; NaN beyond the ends.
    t: f32,
}

impl Levels {
    /// `None` for a format that has no such table: codecs, plain casts, and elements wider than 8 bits.
    fn of(scheme: &Scheme) -> Option<Self> {
        let format = &scheme.format;
        let wide = match format {
            Format::Affine(affine) => affine.code.bits() > 8,
            Format::Table(_) => false,
            _ => true,
        };
        if wide || format.scale().is_none() || format.has_bias() {
            return None;
        }
        let low = match format {
            // One code less under the restricted range.
            Format::Affine(affine) if scheme.encoder.rule == Rule::Restricted => affine.code.bits(),
            _ => 0,
        };
        let allowed = |value: f32| low == 0 || value > -((1u32 << (low - 1)) as f32);
        let mut all: Vec<(f32, u32)> = (0..1u32 << format.code_bits())
            .map(|code| sign_extended(format, code))
            .map(|code| (format.element(code), code))
            .filter(|(value, _)| value.is_finite() && allowed(*value))
            .collect();
        // Of two codes of one value (-0 and 0) the smaller is written.
        all.sort_by(|a, b| a.0.total_cmp(&(b.0 + 0.0)).then(a.1.cmp(&b.1)));
        all.dedup_by(|b, a| {
            a.0 == b.0 && {
                a.1 = a.1.min(b.1);
                true
            }
        });
        let (values, codes): (Vec<f32>, Vec<u32>) = all.into_iter().unzip();
        let integers = values.windows(2).all(|pair| pair[1] - pair[0] == 1.0);
        let reach = values.iter().fold(0f32, |reach, value| reach.max(value.abs()));
        (values.len() > 1).then_some(Levels { values, codes, integers, reach })
    }

    fn place(&self, u: f32) -> Place {
        let last = self.values.len() - 1;
        let (low, high) = (self.values[0], self.values[last]);
        if u.is_nan() || u <= low {
            return Place { u, below: 0, t: if u == low { 0.0 } else { f32::NAN } };
        }
        if u >= high {
            return Place { u, below: last, t: f32::NAN };
        }
        let below = if self.integers {
            ((u - low) as usize).min(last - 1)
        } else {
            self.values.partition_point(|level| *level <= u).clamp(1, last) - 1
        };
        let (a, b) = (self.values[below], self.values[below + 1]);
        Place { u, below, t: (u - a) / (b - a) }
    }

    /// Index of the element that a weight becomes.
    fn round(&self, place: Place, offset: f32) -> usize {
        place.below + usize::from(place.t + offset >= 0.5)
    }
}

const NO_TABLE: &str = "its elements are no table of at most 256 values with a scale";

fn refused(scheme: &Scheme, why: &'static str) -> AutoRoundError {
    AutoRoundError::Scheme { scheme: scheme.to_string(), why }
}

/// Whether the rounding of a weight `[rows, cols]` can be learned under `scheme`; gives the columns of a group.
///
/// # Errors
/// [`AutoRoundError::Scheme`].
pub fn check_scheme(scheme: &Scheme, rows: usize, cols: usize) -> Result<usize, AutoRoundError> {
    if Levels::of(scheme).is_none() {
        return Err(refused(scheme, NO_TABLE));
    }
    if scheme.format.scale().is_some_and(|tree| tree.nested().is_some()) {
        return Err(refused(scheme, "its scales are quantized together after the weight"));
    }
    match scheme.format.blocks() {
        Blocks::Row => Ok(cols.max(1)),
        Blocks::Group(group) => Ok((group as usize).min(cols).max(1)),
        Blocks::Flat(block) if cols.is_multiple_of(block as usize) => Ok(block as usize),
        Blocks::Tensor if rows == 1 => Ok(cols.max(1)),
        _ => Err(refused(scheme, "its blocks are not groups within a row")),
    }
}

/// Two's complement integers narrower than 8 bits are stored in 8.
fn sign_extended(format: &Format, code: u32) -> u32 {
    match format {
        Format::Affine(affine) => match affine.code {
            Code::Int(bits) => u32::from((((code << (32 - bits)) as i32) >> (32 - bits)) as i8 as u8),
            _ => code,
        },
        _ => code,
    }
}

impl LearnedWeight {
    /// `w` `[rows, cols]` in the groups of `scheme`, rounded to nearest, each group's range reduced to what loses least in
    /// `Σ h (w - q)²`; `h` is the mean square of each column's input, `[cols]`. `outer` is the tensor-wide scale where the
    /// scheme has one. With `signed`, multipliers may be negative where the format holds that: the side of a group that
    /// reaches further then has the code that the other has not.
    ///
    /// # Errors
    /// [`AutoRoundError::Scheme`] for formats whose elements are no table of at most 256 values in groups within rows, and
    /// [`AutoRoundError::Length`].
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
        let (levels, group) = check_scheme(scheme, rows, cols).map(|group| (Levels::of(scheme), group))?;
        let Some(levels) = levels else { return Err(refused(scheme, NO_TABLE)) };
        let narrow =
            matches!(scheme.format.scale().map(|tree| tree.code), Some(Code::Float(f)) if f.bits() <= 8);
        let power = matches!(scheme.format.scale().map(|tree| tree.code), Some(Code::E8m0));
        // Only integers have an element on one side that the other lacks.
        let signed = signed && levels.integers && !narrow && !power && !scheme.format.has_zero();
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
            groups: vec![Group::BLANK; rows * per_row],
        };
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

    /// The clip of a group that loses least.
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
                    let place = self.levels.place(self.unit(w, &group));
                    let q = group.decoder.value(self.levels.values[self.levels.round(place, 0.0)]);
                    error + f64::from(h) * f64::from(q - w) * f64::from(q - w)
                });
                if best.as_ref().is_none_or(|(least, _)| error < *least) {
                    best = Some((error, group));
                }
            }
        }
        best.map_or(Group::BLANK, |(_, group)| group)
    }

    /// Whether scales are powers of two.
    fn has_powers(&self) -> bool {
        self.scheme.format.scale().is_some_and(|tree| tree.code == Code::E8m0)
    }

    fn unit(&self, w: f32, group: &Group) -> f32 {
        w / group.multiplier + group.zero as f32
    }

    /// Scale and zero point of the clips, as they are stored.
    fn derived(&self, group: Group) -> Group {
        let Group { min, max, clip, .. } = group;
        let format = &self.scheme.format;
        let (low, high) = (self.levels.values[0], self.levels.values[self.levels.values.len() - 1]);
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

    /// The weight as it was, `[rows, cols]`.
    pub fn weight(&self) -> &[f32] {
        &self.w
    }

    /// The values that the weight now has, `[rows, cols]`.
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
                for (i, group) in groups.iter().enumerate() {
                    let span = i * self.group..((i + 1) * self.group).min(cols);
                    let values = out[span.clone()].iter_mut().zip(&w[span.clone()]).zip(&offsets[span]);
                    for ((out, &w), &offset) in values {
                        let level = self.levels.round(self.levels.place(self.unit(w, group)), offset);
                        *out = group.decoder.value(self.levels.values[level]);
                    }
                }
            }
        });
    }

    /// One step of sign descent. `gradient` `[rows, cols]` is that of the loss with respect to the values of
    /// [`fake_quantize`](Self::fake_quantize); `rate` and `clip_rate` are the lengths of the step for offsets and for clips.
    ///
    /// # Panics
    /// If `gradient` has another length.
    pub fn step(&mut self, gradient: &[f32], rate: f32, clip_rate: f32, threads: usize) {
        assert_eq!(gradient.len(), self.w.len(), "a weight of {} values", self.w.len());
        let (cols, per_row) = (self.cols.max(1), self.cols.div_ceil(self.group));
        let (mut offsets, mut groups) = (std::mem::take(&mut self.offsets), std::mem::take(&mut self.groups));
        let this = &*self;
        let pieces = offsets.chunks_mut(ROWS * cols).zip(groups.chunks_mut(ROWS * per_row.max(1)));
        let pieces = pieces.zip(this.w.chunks(ROWS * cols)).zip(gradient.chunks(ROWS * cols));
        for_each(threads, pieces, |(((offsets, groups), w), gradient)| {
            let rows = offsets.chunks_mut(cols).zip(groups.chunks_mut(per_row));
            for (((offsets, groups), w), gradient) in rows.zip(w.chunks(cols)).zip(gradient.chunks(cols)) {
                for (i, group) in groups.iter_mut().enumerate() {
                    let span = i * this.group..((i + 1) * this.group).min(cols);
                    *group = this.step_group(
                        *group,
                        &mut offsets[span.clone()],
                        &w[span.clone()],
                        &gradient[span],
                        (rate, clip_rate),
                    );
                }
            }
        });
        (self.offsets, self.groups) = (offsets, groups);
    }

    /// The group after a step; the step of `offsets` is taken.
    fn step_group(
        &self,
        group: Group,
        offsets: &mut [f32],
        w: &[f32],
        gradient: &[f32],
        (rate, clip_rate): (f32, f32),
    ) -> Group {
        let (zero, sign) = (group.zero as f32, group.multiplier.signum());
        // Of the multiplier, and of the zero point, which only clipped weights notice.
        let (mut by_scale, mut by_zero) = (0.0f64, 0.0f64);
        for ((offset, &w), &g) in offsets.iter_mut().zip(w).zip(gradient) {
            let place = self.levels.place(self.unit(w, &group));
            let level = self.levels.values[self.levels.round(place, *offset)];
            if place.t.is_nan() {
                by_scale += f64::from(g * (level - zero));
                by_zero -= f64::from(g * group.multiplier);
            } else {
                by_scale += f64::from(g * (level - place.u));
                if g != 0.0 {
                    *offset = (*offset - rate * sign * g.signum()).clamp(-0.5, 0.5);
                }
            }
        }
        // A power of two that moves at all doubles or halves: it stays where the search has put it.
        if self.has_powers() {
            return group;
        }
        let gradients = self.of_clips(&group, by_scale, by_zero);
        let mut clip = group.clip;
        for ((clip, start), gradient) in clip.iter_mut().zip(group.start).zip(gradients) {
            if gradient != 0.0 {
                let (low, high) = (start - CLIP_REACH * start.abs(), start + CLIP_REACH * start.abs());
                *clip = (*clip - clip_rate * gradient.signum() as f32).clamp(low, high);
            }
        }
        self.derived(Group { clip, ..group })
    }

    /// Gradients of the two clips.
    fn of_clips(&self, group: &Group, by_scale: f64, by_zero: f64) -> [f64; 2] {
        let (min, max) = (f64::from(group.min), f64::from(group.max));
        if !self.scheme.format.has_zero() {
            let gradient = by_scale * max.max(-min);
            return [gradient; 2];
        }
        let last = self.levels.values.len() - 1;
        let span = f64::from(self.levels.values[last] - self.levels.values[0]);
        let multiplier = f64::from(group.multiplier);
        let clipped_min = min * f64::from(group.clip[0]);
        // z = low - min·β/s, so that s moves it as well.
        let through = by_scale + by_zero * clipped_min / (multiplier * multiplier);
        [through * -min / span - by_zero * min / multiplier, through * max / span]
    }

    /// Codes, scales and zero points as they now are.
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
                let place = self.levels.place(self.unit(self.w[i], group));
                codes.push(self.levels.codes[self.levels.round(place, self.offsets[i])]);
            }
        }
        self.groups.iter().for_each(|group| scales.push(group.scale));
        let zeros =
            if format.has_zero() { self.groups.iter().map(|group| group.zero).collect() } else { Vec::new() };
        let outer = self.outer.filter(|_| self.scheme.has_outer_scale());
        Quantized { codes, scales, zeros, outer, ..Quantized::empty(format.clone(), self.rows, self.cols) }
    }

    /// Bytes that a learned weight takes beside the weight: f32 weight and offset, and a group's state.
    pub fn bytes_needed(rows: usize, cols: usize, group: usize) -> u64 {
        let groups = rows as u64 * cols.div_ceil(group.max(1)) as u64;
        8 * (rows * cols) as u64 + size_of::<Group>() as u64 * groups
    }
}
