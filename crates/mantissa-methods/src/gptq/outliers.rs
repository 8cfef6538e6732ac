//! Selection of the outliers: the weights with the largest loss, stored outside the codes.

use std::ops::Range as Span;

use mantissa_kernels::map_reduce_fixed;
use mantissa_num::blockwise::Range;
use mantissa_num::stored::Extra;

use super::solve::Problem;

/// Number of rounds in which outliers are chosen. Each round sees the group ranges without the outliers of the rounds
/// before.
const PARTS: usize = 4;

/// Gain of a chosen weight; real gains are at least 0.
const CHOSEN: f32 = -1.0;

/// Gain of a weight whose group has changed since; must be recomputed.
const UNKNOWN: f32 = f32::NAN;

impl Problem<'_> {
    /// Marks the `count` weights to store as outliers, `[rows, cols]`.
    ///
    /// The gain of a weight is the reduction of its group's loss if the weight is removed and the scale is chosen
    /// from the rest (SpQR, Dettmers et al. 2023, section 4.2). It is computed so for the smallest and the largest of
    /// a group, which determine the scale. The gain of any other weight is its own error. Errors are weighted by
    /// their loss after compensation by later columns.
    pub(super) fn outliers(&self, count: usize, threads: usize) -> Vec<bool> {
        let (rows, cols) = (self.rows, self.cols);
        let costs = self.factor.costs();
        let mut gains = vec![UNKNOWN; rows * cols];
        let mut kept = vec![false; rows * cols];
        let grain = rows.div_ceil(threads.max(1)).min(super::solve::PANEL_ROWS);
        let mut chosen = 0;
        for part in 1..=PARTS {
            let row_gains = |rows: Span<usize>| self.gains(rows, &costs, &gains);
            gains = map_reduce_fixed(threads, rows, grain, row_gains, Vec::new(), |mut all, part| {
                all.extend(part);
                all
            });
            let quota = count.min(rows * cols) * part / PARTS;
            let found = largest(&gains, quota - chosen);
            chosen = quota;
            self.take(&found, &mut gains, &mut kept);
        }
        kept
    }

    /// Marks the weights `found` as chosen, and the rest of their groups as unknown.
    fn take(&self, found: &[bool], gains: &mut [f32], kept: &mut [bool]) {
        let cols = self.cols.max(1);
        for (at, _) in found.iter().enumerate().filter(|(_, found)| **found) {
            kept[at] = true;
            let (row, first) = (at / cols * cols, at % cols / self.group * self.group);
            let group = row + first..row + (first + self.group).min(cols);
            gains[group].iter_mut().filter(|gain| **gain != CHOSEN).for_each(|gain| *gain = UNKNOWN);
            gains[at] = CHOSEN;
        }
    }

    /// Gains of `rows`; recomputes unknown ones.
    fn gains(&self, rows: Span<usize>, costs: &[f64], known: &[f32]) -> Vec<f32> {
        let cols = self.cols;
        let mut gains = known[rows.start * cols..rows.end * cols].to_vec();
        for (row, gains) in rows.zip(gains.chunks_exact_mut(cols.max(1))) {
            for (g, gains) in gains.chunks_mut(self.group).enumerate() {
                if gains.iter().any(|gain| gain.is_nan()) {
                    self.group_gains(row, g * self.group, costs, gains);
                }
            }
        }
        gains
    }

    /// Gains of the group of `row` that begins at column `first`.
    fn group_gains(&self, row: usize, first: usize, costs: &[f64], gains: &mut [f32]) {
        let live: Vec<usize> = (0..gains.len()).filter(|&i| gains[i] != CHOSEN).collect();
        let value = |&i: &usize| (self.weight(row, first + i), costs[first + i]);
        let values: Vec<(f32, f64)> = live.iter().map(value).collect();
        let (lost, group) = self.parameters(&values);
        let whole = values.iter().fold(Range::EMPTY, |range, (w, _)| range.with(*w));
        let ends = self.ends(&group, whole);
        for (&i, &value) in live.iter().zip(&values) {
            gains[i] = self.lost(value, &group, ends) as f32;
        }
        let extreme = |least: bool| {
            let of = |i: &usize| if least { -values[*i].0 } else { values[*i].0 };
            (0..values.len()).max_by(|a, b| of(a).total_cmp(&of(b)).then(b.cmp(a)))
        };
        for at in [extreme(true), extreme(false)].into_iter().flatten() {
            let mut others = values.clone();
            others.remove(at);
            let gain = (lost - self.parameters(&others).0).max(0.0);
            gains[live[at]] = gain as f32;
        }
    }
}

/// Number of outliers in a weight `[rows, cols]` for a given `share`.
pub(crate) fn count(share: f64, rows: usize, cols: usize) -> usize {
    (share * rows as f64 * cols as f64).round() as usize
}

/// Marks the `count` largest of `scores`, the first among equals, and none below 0.
pub(crate) fn largest(scores: &[f32], count: usize) -> Vec<bool> {
    let mut found = vec![false; scores.len()];
    if count == 0 {
        return found;
    }
    let mut sorted: Vec<f32> = scores.iter().copied().filter(|&score| score >= 0.0).collect();
    let last = count.min(sorted.len());
    let Some(at) = last.checked_sub(1) else { return found };
    let (_, &mut threshold, _) = sorted.select_nth_unstable_by(at, |a, b| b.total_cmp(a));
    let above = scores.iter().filter(|&&score| score > threshold).count();
    let mut equal = last - above;
    for (found, &score) in found.iter_mut().zip(scores) {
        *found = score > threshold || (score == threshold && equal > 0);
        equal -= usize::from(score == threshold && *found);
    }
    found
}

/// Outliers of a weight `[rows, cols]`, marked by `kept`, with their `values` row by row.
pub(crate) fn sparse(kept: &[bool], cols: usize, values: Vec<f32>) -> Extra {
    let (mut starts, mut index) = (vec![0], Vec::with_capacity(values.len()));
    for row in kept.chunks_exact(cols.max(1)) {
        index.extend((0..).zip(row).filter(|(_, kept)| **kept).map(|(column, _): (u32, _)| column));
        starts.push(index.len() as u32);
    }
    Extra::Sparse { starts, index, values }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_requested_number_of_largest_is_chosen() {
        let scores = [1.0, 3.0, CHOSEN, 2.0, 3.0, 2.0, 0.0];
        let of = |count| {
            let found = largest(&scores, count);
            (0..scores.len()).filter(|&i| found[i]).collect::<Vec<_>>()
        };
        assert_eq!(of(0), [0usize; 0]);
        assert_eq!(of(1), [1]);
        assert_eq!(of(3), [1, 3, 4], "the first of equal ones");
        assert_eq!(of(9), [0, 1, 3, 4, 5, 6], "all but what is below 0");
    }

    #[test]
    fn rows_are_compressed() {
        let kept = [false, true, true, false, false, false, false, false, true];
        let extra = sparse(&kept, 3, vec![1.0, 2.0, 3.0]);
        let expected =
            Extra::Sparse { starts: vec![0, 2, 2, 3], index: vec![1, 2, 2], values: vec![1.0, 2.0, 3.0] };
        assert_eq!(extra, expected);
    }
}
