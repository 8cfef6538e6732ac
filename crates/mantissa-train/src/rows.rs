//! Splits matrices by rows for threads.

use std::ops::Range;

/// Rows that pass through a chain of operators at a time, so that they stay in cache, also with one thread.
/// Norm weight gradients are summed per part, so this number affects results.
pub(crate) const PART: usize = 512;

/// Splits `x` (`width` values per row) into the row ranges `parts`, consecutive from 0.
pub(crate) fn rows_mut<T>(
    x: &mut [T],
    width: usize,
    parts: impl Iterator<Item = Range<usize>>,
) -> impl Iterator<Item = &mut [T]> {
    let mut rest = x;
    parts.map(move |part| take(&mut rest, part.len() * width))
}

/// Splits the first `n` values off `rest`.
pub(crate) fn take<'a, T>(rest: &mut &'a mut [T], n: usize) -> &'a mut [T] {
    let (first, others) = std::mem::take(rest).split_at_mut(n);
    *rest = others;
    first
}

/// Returns the rows `part` of `x`.
pub(crate) fn rows(x: &[f32], width: usize, part: Range<usize>) -> &[f32] {
    &x[part.start * width..part.end * width]
}
