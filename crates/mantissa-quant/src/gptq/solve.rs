//! The columns of GPTQ's algorithm, for some rows of the weight at a time.

use std::ops::Range as Span;

use mantissa_kernels::map_reduce_fixed;
use mantissa_num::blockwise::{Block, Decoder, Range};
use mantissa_num::{Codes, Quantized, Scheme, code_unit};

use super::{GptqOptions, GroupOrder, InverseFactor};
use crate::rtn::append;

/// Most rows that are solved together: they share one reading of U.
pub(super) const PANEL_ROWS: usize = 128;

/// Everything that the rows share.
pub(super) struct Problem<'a> {
    pub(super) factor: &'a InverseFactor,
    pub(super) scheme: &'a Scheme,
    pub(super) outer: Option<f32>,
    /// `[rows, cols]`.
    pub(super) w: &'a [f32],
    pub(super) rows: usize,
    pub(super) cols: usize,
    /// Columns of a group.
    pub(super) group: usize,
}

/// The parameters of a group.
#[derive(Clone, Copy)]
struct Group {
    block: Block,
    decoder: Decoder,
}

/// One row on its way through the columns.
struct Row<'a> {
    index: usize,
    /// Weights by position, updated as columns are quantized.
    w: &'a mut [f64],
    groups: &'a mut [Group],
    codes: &'a mut [u32],
    /// Sums of e² and of (w - q)² over live columns.
    loss: &'a mut (f64, f64),
}

/// What is known of some rows when they are done.
struct Panel {
    codes: Codes,
    scales: Codes,
    zeros: Vec<i32>,
    /// By row.
    losses: Vec<f64>,
}

impl Problem<'_> {
    /// The quantized weight and its loss.
    pub(super) fn solve(&self, threads: usize) -> (Quantized, f64) {
        let format = &self.scheme.format;
        let grain = self.rows.div_ceil(threads.max(1)).next_multiple_of(8).min(PANEL_ROWS);
        let start = self.panel(0..0, &[]);
        let cuts = self.cuts();
        let panel = |rows: Span<usize>| self.panel(rows, &cuts);
        let all = map_reduce_fixed(threads, self.rows, grain, panel, start, |mut all, part| {
            append(&mut all.codes, part.codes);
            append(&mut all.scales, part.scales);
            all.zeros.extend(part.zeros);
            all.losses.extend(part.losses);
            all
        });
        let Panel { codes, scales, zeros, losses } = all;
        let (rows, cols, outer) = (self.rows, self.cols, self.outer);
        let quantized =
            Quantized { codes, scales, outer, zeros, ..Quantized::empty(format.clone(), rows, cols) };
        // Row by row in their order, whatever the panels were.
        (quantized, losses.into_iter().sum())
    }

    /// Positions that are quantized before the rest of the row is updated. A group whose parameters need every update begins
    /// a block or lies within one.
    fn cuts(&self) -> Vec<Span<usize>> {
        let GptqOptions { groups, block, .. } = self.factor.options;
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
        let mut groups = vec![self.parameters(Range::EMPTY); n * per_row];
        let mut codes = vec![0; n * k];
        let mut losses = vec![(0.0, 0.0); n];
        let mut errors = vec![0.0; n * widest];
        for (row, w) in rows.clone().zip(w.chunks_exact_mut(k.max(1))) {
            factor.order.iter().zip(w).for_each(|(&column, w)| *w = f64::from(self.weight(row, column)));
        }
        if factor.options.groups == GroupOrder::Static {
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
        self.finish(&codes, &groups, losses.collect())
    }

    /// Quantizes the positions `cut` of one row, writing `e` of each, and updates the row up to `cut.end`.
    fn quantize_columns(&self, row: &mut Row<'_>, cut: Span<usize>, errors: &mut [f64]) {
        let InverseFactor { kernels, options: GptqOptions { groups, .. }, order, dead, upper, .. } =
            self.factor;
        let (k, format, is_static) = (self.cols, &self.scheme.format, *groups == GroupOrder::Static);
        // Before this block's own updates: what the published code takes a group's range from.
        let lazy = if *groups == GroupOrder::Original { row.w[cut.clone()].to_vec() } else { Vec::new() };
        for position in cut.clone() {
            let column = order[position];
            let group = if is_static { column } else { position } / self.group;
            if !is_static && position % self.group == 0 {
                row.groups[group] = self.parameters(group_range(row.w, &lazy, position, self.group, &cut));
            }
            let Group { block, decoder } = row.groups[group];
            let index = (row.index * k + column) as u64;
            let code = self.scheme.encode(row.w[position] as f32, &block, index);
            let value = f64::from(decoder.value(format.element(code)));
            let upper = &upper[position * k..][position..cut.end];
            let error = (row.w[position] - value) / upper[0];
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
        for (g, group) in groups.iter_mut().enumerate() {
            let columns = g * self.group..((g + 1) * self.group).min(self.cols);
            let range = columns.fold(Range::EMPTY, |range, column| range.with(self.weight(row, column)));
            *group = self.parameters(range);
        }
    }

    fn parameters(&self, range: Range) -> Group {
        let block = self.scheme.block(range, false, self.outer);
        Group { block, decoder: self.scheme.format.decoder(block.scale, block.zero, self.outer) }
    }

    fn weight(&self, row: usize, column: usize) -> f32 {
        if self.factor.dead[column] { 0.0 } else { self.w[row * self.cols + column] }
    }

    fn finish(&self, codes: &[u32], groups: &[Group], losses: Vec<f64>) -> Panel {
        let format = &self.scheme.format;
        let mut panel = Panel {
            codes: Codes::with_capacity(code_unit(format), codes.len()),
            scales: Codes::with_capacity(format.scale().map_or(1, |s| s.code.unit_bytes()), groups.len()),
            zeros: Vec::new(),
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

/// Range of the group that begins at `position`: from `lazy`, the block as it was, where there is one.
fn group_range(w: &[f64], lazy: &[f64], position: usize, group: usize, cut: &Span<usize>) -> Range {
    let end = (position + group).min(w.len());
    let split = if lazy.is_empty() { position } else { end.min(cut.end) };
    let early = lazy.get(position - cut.start..split - cut.start).unwrap_or(&[]);
    let values = early.iter().chain(&w[split..end]);
    values.fold(Range::EMPTY, |range, &w| range.with(w as f32))
}
