//! Splitting matrices by rows, for threads.

use std::ops::Range;

/// Rows that a thread takes at a time through a chain of operators, also where there is one thread: what one
/// writes the next finds in the cache. The sums that are cut (norm weights) are cut here, so that the number is
/// part of the result.
pub(crate) const PART: usize = 512;

/// The rows of `x` (`width` values each) that `parts`, consecutive from 0, cut out.
pub(crate) fn rows_mut<T>(
    x: &mut [T],
    width: usize,
    parts: impl Iterator<Item = Range<usize>>,
) -> impl Iterator<Item = &mut [T]> {
    let mut rest = x;
    parts.map(move |part| take(&mut rest, part.len() * width))
}

/// Takes the first `n` values off `rest`.
pub(crate) fn take<'a, T>(rest: &mut &'a mut [T], n: usize) -> &'a mut [T] {
    let (first, others) = std::mem::take(rest).split_at_mut(n);
    *rest = others;
    first
}

/// The rows `part` of `x`.
pub(crate) fn rows(x: &[f32], width: usize, part: Range<usize>) -> &[f32] {
    &x[part.start * width..part.end * width]
}
