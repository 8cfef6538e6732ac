//! Transforms around the codes of a stored linear layer: `Stored = Format + … + [Diag | Hadamard | Perm]… + [Columns
//! | Sparse | LowRank]…`.
//!
//! `y = After(W · Before(x)) + Extras(x)`, with `W` `[rows, cols]` the decoded codes, `x` `[cols]` and `y` `[rows]`.
//! Examples:
//! - GPTQ's act-order (`g_idx`): a permutation before a weight whose columns are sorted by group.
//! - Unfolded scales of AWQ and SmoothQuant: a diagonal.
//! - Rotations of EXL3 and compressed-tensors: Hadamard matrices and signs.
//! - LLM.int8() and SpQR: columns or single weights stored outside the codes.

use crate::hadamard::Hadamard;

/// Linear map of vectors to vectors of the same width.
#[derive(Clone, Debug, PartialEq)]
pub enum Map {
    /// `y[i] = x[p[i]]`.
    Perm(Vec<u32>),
    /// `y[i] = d[i] · x[i]`.
    Diag(Vec<f32>),
    /// [`Hadamard::forward`] of each run of its length.
    Hadamard(Hadamard),
}

/// Term added to the product.
#[derive(Clone, Debug, PartialEq)]
pub enum Extra {
    /// `y += V · x[index]`, `V` `[rows, index.len()]` row-major.
    Columns {
        /// Columns of the input.
        index: Vec<u32>,
        /// Weights of those columns.
        values: Vec<f32>,
    },
    /// `y += U · (D · x)`, `D` `[rank, cols]` and `U` `[rows, rank]` row-major.
    LowRank {
        /// The rank.
        rank: usize,
        /// `D`.
        down: Vec<f32>,
        /// `U`.
        up: Vec<f32>,
    },
    /// `y[r] += Σ values[i] · x[index[i]]` over `i` from `starts[r]` to `starts[r + 1]`: compressed sparse rows.
    Sparse {
        /// Row starts `[rows + 1]`, non-decreasing.
        starts: Vec<u32>,
        /// Columns.
        index: Vec<u32>,
        /// Weights.
        values: Vec<f32>,
    },
}

/// All transforms and terms around the codes.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Transforms {
    /// Maps of the input, in order of application.
    pub before: Vec<Map>,
    /// Maps of the product, in order of application.
    pub after: Vec<Map>,
    /// Terms added to it, computed from the unmapped input.
    pub extras: Vec<Extra>,
}

/// A transform does not match the layer.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{what}: expected {allowed}, got {found}")]
pub struct MisfitError {
    /// Part that does not match.
    pub what: &'static str,
    /// Value of the part.
    pub found: String,
    /// Expected values.
    pub allowed: String,
}

fn misfit(what: &'static str, found: impl ToString, allowed: impl ToString) -> MisfitError {
    MisfitError { what, found: found.to_string(), allowed: allowed.to_string() }
}

fn lengths(what: &'static str, found: usize, expected: usize) -> Result<(), MisfitError> {
    if found == expected { Ok(()) } else { Err(misfit(what, found, format!("{expected} values"))) }
}

fn columns(what: &'static str, index: &[u32], cols: usize) -> Result<(), MisfitError> {
    match index.iter().find(|&&i| i as usize >= cols) {
        None => Ok(()),
        Some(i) => Err(misfit(what, i, format!("columns below {cols}"))),
    }
}

impl Map {
    /// Checks that the map takes vectors of `width` values.
    ///
    /// # Errors
    /// [`MisfitError`]: another length, or not a permutation.
    pub fn check(&self, width: usize) -> Result<(), MisfitError> {
        match self {
            Map::Perm(p) => {
                lengths("permutation", p.len(), width)?;
                let mut seen = vec![false; width];
                for &i in p {
                    match seen.get_mut(i as usize) {
                        Some(seen) if !*seen => *seen = true,
                        _ => return Err(misfit("permutation", i, format!("each of 0 to {width} once"))),
                    }
                }
                Ok(())
            }
            Map::Diag(d) => lengths("diagonal", d.len(), width),
            Map::Hadamard(h) if width.is_multiple_of(h.order()) => Ok(()),
            Map::Hadamard(h) => Err(misfit("Hadamard block", h.order(), format!("divisors of {width}"))),
        }
    }

    /// Maps each row of `x` (`[_, width]`), which must pass [`check`](Self::check).
    pub fn apply(&self, x: &mut [f32], width: usize) {
        self.each(x, width, false);
    }

    /// Maps each row by the transpose.
    pub fn apply_transposed(&self, x: &mut [f32], width: usize) {
        self.each(x, width, true);
    }

    fn each(&self, x: &mut [f32], width: usize, transposed: bool) {
        let mut old = Vec::new();
        for row in x.chunks_exact_mut(width.max(1)) {
            match self {
                Map::Perm(p) => {
                    old.clear();
                    old.extend_from_slice(row);
                    for (i, &from) in p.iter().enumerate() {
                        let (to, from) = if transposed { (from as usize, i) } else { (i, from as usize) };
                        row[to] = old[from];
                    }
                }
                Map::Diag(d) => row.iter_mut().zip(d).for_each(|(x, d)| *x *= d),
                Map::Hadamard(h) if transposed => h.transpose(row),
                Map::Hadamard(h) => h.forward(row),
            }
        }
    }
}

impl Extra {
    /// Checks that the term matches a layer `[rows, cols]`.
    ///
    /// # Errors
    /// [`MisfitError`].
    pub fn check(&self, rows: usize, cols: usize) -> Result<(), MisfitError> {
        match self {
            Extra::Columns { index, values } => {
                columns("kept columns", index, cols)?;
                lengths("kept columns", values.len(), rows.saturating_mul(index.len()))
            }
            Extra::LowRank { rank, down, up } => {
                lengths("low-rank part, down", down.len(), rank.saturating_mul(cols))?;
                lengths("low-rank part, up", up.len(), rank.saturating_mul(rows))
            }
            Extra::Sparse { starts, index, values } => {
                lengths("row starts of the sparse part", starts.len(), rows.saturating_add(1))?;
                if !starts.is_sorted() || starts.first() != Some(&0) {
                    return Err(misfit("row starts of the sparse part", "another order", "0 and rising"));
                }
                lengths("sparse part", index.len(), starts.last().map_or(0, |&n| n as usize))?;
                lengths("sparse part", values.len(), index.len())?;
                columns("sparse part", index, cols)
            }
        }
    }

    /// Multiplies the term's output `i` by `factors[i]`, for a term that matches a layer of `factors.len()` rows.
    pub fn scale_rows(&mut self, factors: &[f32]) {
        let by_row = |values: &mut [f32], width: usize| {
            let rows = values.chunks_exact_mut(width.max(1)).zip(factors);
            rows.for_each(|(row, factor)| row.iter_mut().for_each(|w| *w *= factor));
        };
        match self {
            Extra::Columns { index, values } => by_row(values, index.len()),
            Extra::LowRank { rank, up, .. } => by_row(up, *rank),
            Extra::Sparse { starts, values, .. } => {
                for (span, factor) in starts.windows(2).zip(factors) {
                    values[span[0] as usize..span[1] as usize].iter_mut().for_each(|w| *w *= factor);
                }
            }
        }
    }

    /// Adds its term to the product: `y` `[t, rows]`, `x` `[t, cols]`.
    pub fn add(&self, x: &[f32], y: &mut [f32], rows: usize, cols: usize) {
        let tokens = x.chunks_exact(cols.max(1)).zip(y.chunks_exact_mut(rows.max(1)));
        let mut hidden = Vec::new();
        for (x, y) in tokens {
            match self {
                Extra::Columns { index, .. } if index.is_empty() => {}
                Extra::Columns { index, values } => {
                    for (y, row) in y.iter_mut().zip(values.chunks_exact(index.len())) {
                        *y += row.iter().zip(index).map(|(w, &i)| w * x[i as usize]).sum::<f32>();
                    }
                }
                Extra::LowRank { rank, .. } if *rank == 0 => {}
                Extra::LowRank { rank, down, up } => {
                    hidden.clear();
                    hidden.extend(down.chunks_exact(cols.max(1)).map(|row| dot(row, x)));
                    y.iter_mut().zip(up.chunks_exact(*rank)).for_each(|(y, row)| *y += dot(row, &hidden));
                }
                Extra::Sparse { starts, index, values } => {
                    for (y, span) in y.iter_mut().zip(starts.windows(2)) {
                        let span = span[0] as usize..span[1] as usize;
                        let terms = index[span.clone()].iter().zip(&values[span]);
                        *y += terms.map(|(&i, w)| w * x[i as usize]).sum::<f32>();
                    }
                }
            }
        }
    }

    /// Adds to `weight` (`[rows, cols]`) the matrix whose product [`add`](Self::add) adds.
    pub fn fold(&self, weight: &mut [f32], rows: usize, cols: usize) {
        let of_row = weight.chunks_exact_mut(cols.max(1)).take(rows);
        match self {
            Extra::Columns { index, .. } if index.is_empty() => {}
            Extra::Columns { index, values } => {
                for (row, kept) in of_row.zip(values.chunks_exact(index.len())) {
                    index.iter().zip(kept).for_each(|(&i, w)| row[i as usize] += w);
                }
            }
            Extra::LowRank { rank, .. } if *rank == 0 => {}
            Extra::LowRank { rank, down, up } => {
                for (row, up) in of_row.zip(up.chunks_exact(*rank)) {
                    for (u, down) in up.iter().zip(down.chunks_exact(cols.max(1))) {
                        row.iter_mut().zip(down).for_each(|(w, d)| *w += u * d);
                    }
                }
            }
            Extra::Sparse { starts, index, values } => {
                for (row, span) in of_row.zip(starts.windows(2)) {
                    let span = span[0] as usize..span[1] as usize;
                    let kept = index[span.clone()].iter().zip(&values[span]);
                    kept.for_each(|(&i, w)| row[i as usize] += w);
                }
            }
        }
    }
}

fn dot(a: &[f32], b: &[f32]) -> f32 {
    a.iter().zip(b).map(|(a, b)| a * b).sum()
}

impl Transforms {
    /// True if there are no transforms and no terms.
    pub fn is_empty(&self) -> bool {
        self.before.is_empty() && self.after.is_empty() && self.extras.is_empty()
    }

    /// Checks that all transforms match a layer `[rows, cols]`.
    ///
    /// # Errors
    /// [`MisfitError`] names the first mismatch.
    pub fn check(&self, rows: usize, cols: usize) -> Result<(), MisfitError> {
        self.before.iter().try_for_each(|map| map.check(cols))?;
        self.after.iter().try_for_each(|map| map.check(rows))?;
        self.extras.iter().try_for_each(|extra| extra.check(rows, cols))
    }

    /// Replaces the decoded codes `weight` (`[rows, cols]`) by the effective weight of the whole layer.
    pub fn fold(&self, weight: &mut [f32], rows: usize, cols: usize) {
        if rows == 0 || cols == 0 {
            return;
        }
        // W · Bₙ ⋯ B₁: the last input map is next to the weight.
        self.before.iter().rev().for_each(|map| map.apply_transposed(weight, cols));
        if !self.after.is_empty() {
            let mut column = vec![0.0; rows];
            for c in 0..cols {
                column.iter_mut().enumerate().for_each(|(r, y)| *y = weight[r * cols + c]);
                self.after.iter().for_each(|map| map.apply(&mut column, rows));
                column.iter().enumerate().for_each(|(r, y)| weight[r * cols + c] = *y);
            }
        }
        self.extras.iter().for_each(|extra| extra.fold(weight, rows, cols));
    }
}

/// Permutation that sorts columns by group, stable within a group, for [`Map::Perm`]; and the sorted groups. `None`
/// if they are sorted already.
pub fn by_group(groups: &[u32]) -> Option<(Vec<u32>, Vec<u32>)> {
    if groups.is_sorted() {
        return None;
    }
    let mut order: Vec<u32> = (0..groups.len() as u32).collect();
    order.sort_by_key(|&i| groups[i as usize]);
    let sorted = order.iter().map(|&i| groups[i as usize]).collect();
    Some((order, sorted))
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    fn wave(n: usize, phase: f32) -> Vec<f32> {
        (0..n).map(|i| (i as f32 * 0.731 + phase).sin()).collect()
    }

    fn product(w: &[f32], x: &[f32], rows: usize) -> Vec<f32> {
        (0..rows).map(|r| dot(&w[r * x.len()..(r + 1) * x.len()], x)).collect()
    }

    #[test]
    fn folded_it_multiplies_as_piece_by_piece() {
        let (rows, cols) = (8, 12);
        let transforms = Transforms {
            before: vec![
                Map::Perm(vec![3, 1, 0, 2, 7, 6, 5, 4, 11, 10, 8, 9]),
                Map::Diag(wave(cols, 0.3)),
                Map::Hadamard(Hadamard::new(4).unwrap().randomized(7)),
            ],
            after: vec![
                Map::Hadamard(Hadamard::new(8).unwrap()),
                Map::Diag(wave(rows, 1.0)),
                Map::Perm(vec![7, 6, 5, 4, 0, 1, 2, 3]),
            ],
            extras: vec![
                Extra::Columns { index: vec![2, 9], values: wave(rows * 2, 2.0) },
                Extra::LowRank { rank: 3, down: wave(3 * cols, 3.0), up: wave(3 * rows, 4.0) },
                Extra::Sparse {
                    starts: vec![0, 1, 1, 1, 3, 3, 3, 3, 3],
                    index: vec![4, 0, 11],
                    values: wave(3, 5.0),
                },
            ],
        };
        transforms.check(rows, cols).unwrap();
        let (w, x) = (wave(rows * cols, 6.0), wave(cols, 7.0));
        let mut mapped = x.clone();
        transforms.before.iter().for_each(|map| map.apply(&mut mapped, cols));
        let mut y = product(&w, &mapped, rows);
        transforms.after.iter().for_each(|map| map.apply(&mut y, rows));
        transforms.extras.iter().for_each(|extra| extra.add(&x, &mut y, rows, cols));
        let mut folded = w;
        transforms.fold(&mut folded, rows, cols);
        for (a, b) in product(&folded, &x, rows).iter().zip(&y) {
            assert!((a - b).abs() < 1e-5, "{a} {b}");
        }
    }

    #[test]
    fn rows_of_every_term_are_scaled() {
        let (rows, cols) = (4, 6);
        let factors = [2.0, -1.0, 0.0, 0.5];
        for extra in [
            Extra::Columns { index: vec![1, 4], values: wave(rows * 2, 0.0) },
            Extra::LowRank { rank: 3, down: wave(3 * cols, 1.0), up: wave(3 * rows, 2.0) },
            Extra::Sparse { starts: vec![0, 1, 1, 3, 4], index: vec![4, 0, 5, 2], values: wave(4, 3.0) },
        ] {
            let mut scaled = extra.clone();
            scaled.scale_rows(&factors);
            let (x, mut y, mut expected) = (wave(cols, 4.0), vec![0.0; rows], vec![0.0; rows]);
            scaled.add(&x, &mut y, rows, cols);
            extra.add(&x, &mut expected, rows, cols);
            for ((y, expected), factor) in y.iter().zip(&expected).zip(factors) {
                assert!((y - expected * factor).abs() < 1e-6, "{extra:?}");
            }
        }
    }

    #[test]
    fn what_does_not_fit_is_refused() {
        for (map, part) in [
            (Map::Perm(vec![0, 1, 1, 3]), "permutation: expected each of 0 to 4 once, got 1"),
            (Map::Perm(vec![0, 1, 2, 9]), "permutation: expected each of 0 to 4 once, got 9"),
            (Map::Perm(vec![0]), "permutation: expected 4 values, got 1"),
            (Map::Diag(vec![1.0]), "diagonal"),
            (Map::Hadamard(Hadamard::new(8).unwrap()), "Hadamard block: expected divisors of 4, got 8"),
        ] {
            let message = map.check(4).unwrap_err().to_string();
            assert!(message.contains(part), "{message}");
        }
        for extra in [
            Extra::Columns { index: vec![4], values: vec![0.0; 2] },
            Extra::Columns { index: vec![0], values: vec![0.0] },
            Extra::LowRank { rank: 1, down: vec![0.0; 4], up: vec![0.0] },
            Extra::Sparse { starts: vec![0, 2, 1], index: vec![0], values: vec![0.0] },
            Extra::Sparse { starts: vec![0, 0, 1], index: vec![7], values: vec![0.0] },
        ] {
            assert!(extra.check(2, 4).is_err(), "{extra:?}");
        }
    }

    #[test]
    fn groups_become_a_stable_order() {
        assert_eq!(by_group(&[0, 0, 1, 1]), None);
        let (order, sorted) = by_group(&[1, 0, 2, 0, 1]).unwrap();
        assert_eq!((order, sorted), (vec![1, 3, 0, 4, 2], vec![0, 0, 1, 1, 2]));
    }
}
