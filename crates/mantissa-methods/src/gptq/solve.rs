//! GPTQ's loop over columns, for some rows of the weight at a time.

use std::ops::Range as Span;

use mantissa_kernels::map_reduce_fixed;
use mantissa_num::blockwise::{Block, Decoder, Range};
use mantissa_num::format::Affine;
use mantissa_num::minifloat::{F16, Overflow};
use mantissa_num::{Code, Codes, Format, Quantized, Rounding, ScaleLevel, Scheme, code_unit};

use super::{Fixed, GptqOptions, GroupOrder, GroupRange, InverseFactor, OF_ROUNDING};
use crate::rtn::append;

/// Nearest f16 value, clamped to the largest finite one.
pub(crate) fn as_f16(x: f32) -> f32 {
    F16.decode(F16.encode(x.clamp(-F16.max(), F16.max()), Overflow::Special, Rounding::NearestEven, 0))
}

/// Most rows solved together; they share one read of U.
pub(super) const PANEL_ROWS: usize = 128;

/// Number of shares of a group's range that are tried.
pub(super) const SHARES: usize = 24;

/// Largest share tried and the step between shares: for integers, and for other elements. Others need larger shares,
/// because their largest gaps are next to the largest element and their scales may be powers of two.
const OF_INTEGERS: (f32, f32) = (1.05, 0.025);
const OF_OTHERS: (f32, f32) = (1.5, 0.04);

/// Data that the rows share.
pub(super) struct Problem<'a> {
    pub(super) factor: &'a InverseFactor,
    pub(super) scheme: &'a Scheme,
    pub(super) outer: Option<f32>,
    pub(super) fixed: Fixed<'a>,
    /// `[rows, cols]`.
    pub(super) w: &'a [f32],
    pub(super) rows: usize,
    pub(super) cols: usize,
    /// Columns of a group.
    pub(super) group: usize,
}

/// Scale and zero point of a group.
#[derive(Clone, Copy)]
pub(super) struct Group {
    block: Block,
    decoder: Decoder,
}

/// State of one row while its columns are quantized.
struct Row<'a> {
    index: usize,
    /// Weights by position, updated as columns are quantized.
    w: &'a mut [f64],
    groups: &'a mut [Group],
    codes: &'a mut [u32],
    /// Differences of the outliers from their codes, by column; empty without outliers.
    residuals: &'a mut [f32],
    /// Sums of e² and of (w - q)² over live columns.
    loss: &'a mut (f64, f64),
}

/// Results of some rows.
struct Panel {
    codes: Codes,
    scales: Codes,
    zeros: Vec<i32>,
    /// Differences of the outliers, row by row.
    residuals: Vec<f32>,
    /// By row.
    losses: Vec<f64>,
}

impl Problem<'_> {
    /// Quantizes all rows. Returns the weight, the residuals of outliers and the loss.
    pub(super) fn solve(&self, threads: usize) -> (Quantized, Vec<f32>, f64) {
        let format = &self.scheme.format;
        let grain = self.rows.div_ceil(threads.max(1)).next_multiple_of(8).min(PANEL_ROWS);
        let start = self.panel(0..0, &[]);
        let cuts = self.cuts();
        let panel = |rows: Span<usize>| self.panel(rows, &cuts);
        let all = map_reduce_fixed(threads, self.rows, grain, panel, start, |mut all, part| {
            append(&mut all.codes, part.codes);
            append(&mut all.scales, part.scales);
            all.zeros.extend(part.zeros);
            all.residuals.extend(part.residuals);
            all.losses.extend(part.losses);
            all
        });
        let Panel { codes, scales, zeros, residuals, losses } = all;
        let (rows, cols, outer) = (self.rows, self.cols, self.outer);
        let quantized = Quantized {
            codes,
            scales: ScaleLevel::from(scales).with_zeros(zeros).with_outer(outer),
            ..Quantized::empty(format.clone(), rows, cols)
        };
        // Concatenate in row order, independent of the panels.
        (quantized, residuals, losses.into_iter().sum())
    }

    /// Weights that the groups' scales are taken from.
    fn groups(&self) -> GroupOrder {
        if self.fixed.scales.is_some() { GroupOrder::Static } else { self.factor.options.groups }
    }

    /// Positions that are quantized before the rest of the row is updated. A group that needs every update begins a
    /// block or lies within one.
    fn cuts(&self) -> Vec<Span<usize>> {
        let GptqOptions { block, .. } = self.factor.options;
        let groups = self.groups();
        let (group, block, mut cuts, mut start) = (self.group, block.min(self.cols), Vec::new(), 0);
        while start < self.cols {
            let end = match groups {
                GroupOrder::Current if group <= block => start + block / group * group,
                GroupOrder::Current => (start + block).min((start / group + 1) * group),
                _ => start + block,
            };
            cuts.push(start..end.min(self.cols));
            start = end;
        }
        cuts
    }

    fn panel(&self, rows: Span<usize>, cuts: &[Span<usize>]) -> Panel {
        let (factor, n, k) = (self.factor, rows.len(), self.cols);
        let (per_row, widest) = (k.div_ceil(self.group), cuts.iter().map(Span::len).max().unwrap_or(0));
        let mut w = vec![0.0; n * k];
        let mut groups = vec![self.covering(Range::EMPTY); n * per_row];
        let mut codes = vec![0; n * k];
        let beside = if self.fixed.kept.is_some() { k } else { 0 };
        let mut residuals = vec![0.0; n * beside];
        let mut losses = vec![(0.0, 0.0); n];
        let mut errors = vec![0.0; n * widest];
        for (row, w) in rows.clone().zip(w.chunks_exact_mut(k.max(1))) {
            factor.order.iter().zip(w).for_each(|(&column, w)| *w = f64::from(self.weight(row, column)));
        }
        if self.groups() == GroupOrder::Static {
            for (row, groups) in rows.clone().zip(groups.chunks_exact_mut(per_row.max(1))) {
                self.static_groups(row, groups);
            }
        }
        for cut in cuts {
            let width = cut.len();
            for i in 0..n {
                let mut row = Row {
                    index: rows.start + i,
                    w: &mut w[i * k..(i + 1) * k],
                    groups: &mut groups[i * per_row..(i + 1) * per_row],
                    codes: &mut codes[i * k..(i + 1) * k],
                    residuals: &mut residuals[i * beside..(i + 1) * beside],
                    loss: &mut losses[i],
                };
                self.quantize_columns(&mut row, cut.clone(), &mut errors[i * width..(i + 1) * width]);
            }
            if cut.end < k {
                let (shape, right) = ((n, k - cut.end, width), &factor.upper[cut.start * k + cut.end..]);
                factor.kernels.gemm_sub_f64(shape, &errors, width, right, k, &mut w[cut.end..], k);
            }
        }
        let losses = losses.into_iter().map(|(damped, squares)| (damped - factor.lambda * squares).max(0.0));
        let kept = self.kept_of(rows);
        let residuals = kept.iter().zip(&residuals).filter(|(kept, _)| **kept).map(|(_, r)| *r).collect();
        Panel { residuals, ..self.finish(&codes, &groups, losses.collect()) }
    }

    /// Quantizes the positions `cut` of one row, writing `e` of each, and updates the row up to `cut.end`.
    fn quantize_columns(&self, row: &mut Row<'_>, cut: Span<usize>, errors: &mut [f64]) {
        let factor = self.factor;
        let InverseFactor { kernels, order, dead, upper, .. } = factor;
        let groups = self.groups();
        let (k, is_static) = (self.cols, groups == GroupOrder::Static);
        // Groups in the original order take their range from values before this block's own updates.
        let lazy = if groups == GroupOrder::Original { row.w[cut.clone()].to_vec() } else { Vec::new() };
        for position in cut.clone() {
            let column = order[position];
            let group = if is_static { column } else { position } / self.group;
            if !is_static && position % self.group == 0 {
                let values = group_values(row.w, &lazy, position, self.group, &cut);
                let beside = |column: usize| self.is_kept(row.index, column);
                let values = values.zip(&order[position..]).filter(|(_, column)| !beside(**column));
                let weighed = values.map(|(w, &column)| (w, factor.diagonal[column]));
                row.groups[group] = self.parameters(&weighed.collect::<Vec<_>>()).1;
            }
            // FOEM's first-order term. Without it these two lines change no bit.
            let (share, original) = (factor.options.first_order, f64::from(self.weight(row.index, column)));
            row.w[position] -= share * (row.w[position] - original);
            let index = (row.index * k + column) as u64;
            let (code, mut value) = self.value(row.w[position] as f32, &row.groups[group], index);
            if self.is_kept(row.index, column) {
                row.residuals[column] = as_f16((row.w[position] - f64::from(value)) as f32);
                value += row.residuals[column];
            }
            let value = f64::from(value);
            let upper = &upper[position * k..][position..cut.end];
            let error = (row.w[position] - value - share * (row.w[position] - original)) / upper[0];
            row.codes[column] = code;
            errors[position - cut.start] = error;
            if !dead[column] {
                let change = f64::from(self.weight(row.index, column)) - value;
                row.loss.0 += error * error;
                row.loss.1 += change * change;
            }
            kernels.sub_axpy_f64(error, &upper[1..], &mut row.w[position + 1..cut.end]);
        }
    }

    fn static_groups(&self, row: usize, groups: &mut [Group]) {
        if let (Some(scales), Some(tree)) = (self.fixed.scales, self.scheme.format.scale()) {
            let first = row * groups.len();
            for (g, group) in groups.iter_mut().enumerate() {
                let block = self.scheme.block_with_scale(tree.code.decode(scales.get(first + g)));
                *group = Group { block, decoder: self.scheme.format.decoder(block.scale, 0, None) };
            }
            return;
        }
        for (g, group) in groups.iter_mut().enumerate() {
            let columns = g * self.group..((g + 1) * self.group).min(self.cols);
            let live = columns.filter(|&column| !self.is_kept(row, column));
            let values = live.map(|column| (self.weight(row, column), self.factor.diagonal[column]));
            *group = self.parameters(&values.collect::<Vec<_>>()).1;
        }
    }

    /// Chooses the scale and zero point of a group, given its weights and the loss of a unit squared error of each.
    /// Returns them with the total loss under RTN.
    pub(super) fn parameters(&self, values: &[(f32, f64)]) -> (f64, Group) {
        let whole = values.iter().fold(Range::EMPTY, |range, (w, _)| range.with(*w));
        let searched = self.factor.options.range == GroupRange::Mse && self.scheme.format.scale().is_some();
        let all = self.covering(whole);
        if !searched || values.is_empty() {
            return (values.iter().map(|&value| self.lost(value, &all, whole)).sum(), all);
        }
        let mut best = (f64::INFINITY, all);
        let (largest, step) = if self.has_integers() { OF_INTEGERS } else { OF_OTHERS };
        for i in 0..SHARES {
            let share = largest - i as f32 * step;
            let group = self.covering(Range { min: whole.min * share, max: whole.max * share, ..whole });
            let ends = self.ends(&group, whole);
            let error = values.iter().fold(0.0, |sum, &value| sum + self.lost(value, &group, ends));
            if error < best.0 {
                best = (error, group);
            }
        }
        best
    }

    /// Quantized values of the smallest and the largest weight.
    pub(super) fn ends(&self, group: &Group, whole: Range) -> Range {
        let [min, max] = [whole.min, whole.max].map(|w| self.value(w, group, 0).1);
        Range { min, max, ..whole }
    }

    /// Loss of a weight's RTN error in a group whose values end at `ends`.
    pub(super) fn lost(&self, (w, weighs): (f32, f64), group: &Group, ends: Range) -> f64 {
        let error = f64::from(w) - f64::from(self.value(w, group, 0).1);
        let counts = if ends.min <= w && w <= ends.max { OF_ROUNDING } else { 1.0 };
        counts * weighs * error * error
    }

    fn has_integers(&self) -> bool {
        matches!(&self.scheme.format, Format::Affine(Affine { code: Code::Int(_), .. }))
    }

    /// Code and value of a weight.
    fn value(&self, w: f32, group: &Group, index: u64) -> (u32, f32) {
        let code = self.scheme.encode(w, &group.block, index);
        (code, group.decoder.value(self.scheme.format.element(code)))
    }

    fn covering(&self, range: Range) -> Group {
        let block = self.scheme.block(range, false, self.outer);
        Group { block, decoder: self.scheme.format.decoder(block.scale, block.zero, self.outer) }
    }

    /// True if a weight is an outlier, stored outside the codes.
    fn is_kept(&self, row: usize, column: usize) -> bool {
        self.fixed.kept.is_some_and(|kept| kept[row * self.cols + column])
    }

    /// Outlier marks of `rows`; empty without outliers.
    fn kept_of(&self, rows: Span<usize>) -> &[bool] {
        self.fixed.kept.map_or(&[], |kept| &kept[rows.start * self.cols..rows.end * self.cols])
    }

    pub(super) fn weight(&self, row: usize, column: usize) -> f32 {
        if self.factor.dead[column] { 0.0 } else { self.w[row * self.cols + column] }
    }

    fn finish(&self, codes: &[u32], groups: &[Group], losses: Vec<f64>) -> Panel {
        let format = &self.scheme.format;
        let mut panel = Panel {
            codes: Codes::with_capacity(code_unit(format), codes.len()),
            scales: Codes::with_capacity(format.scale().map_or(1, |s| s.code.unit_bytes()), groups.len()),
            zeros: Vec::new(),
            residuals: Vec::new(),
            losses,
        };
        codes.iter().for_each(|&code| panel.codes.push(code));
        if format.scale().is_some() {
            groups.iter().for_each(|group| panel.scales.push(group.block.scale));
        }
        if format.has_zero() {
            panel.zeros.extend(groups.iter().map(|group| group.block.zero));
        }
        panel
    }
}

/// Weights of the group that begins at `position`, taken from `lazy` (the block before its updates) if given.
fn group_values<'a>(
    w: &'a [f64],
    lazy: &'a [f64],
    position: usize,
    group: usize,
    cut: &Span<usize>,
) -> impl Iterator<Item = f32> + 'a {
    let end = (position + group).min(w.len());
    let split = if lazy.is_empty() { position } else { end.min(cut.end) };
    let early = lazy.get(position - cut.start..split - cut.start).unwrap_or(&[]);
    early.iter().chain(&w[split..end]).map(|&w| w as f32)
}
