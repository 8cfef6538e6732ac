//! An output that threads write at different places.

use std::marker::PhantomData;

use super::ROWS;
use crate::parallel::for_each_range;

/// A slice of f32 that several threads write, each its own elements.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Shared<'a> {
    start: *mut f32,
    len: usize,
    borrow: PhantomData<&'a mut [f32]>,
}

// SAFETY: elements are written through `put_lanes` only, whose contract keeps threads apart.
unsafe impl Send for Shared<'_> {}
// SAFETY: as above.
unsafe impl Sync for Shared<'_> {}

impl<'a> Shared<'a> {
    pub(crate) fn new(out: &'a mut [f32]) -> Self {
        Shared { start: out.as_mut_ptr(), len: out.len(), borrow: PhantomData }
    }

    /// Writes the elements from `at` on, or adds to them.
    ///
    /// # Safety
    /// No other thread uses these elements during the borrow.
    #[inline]
    pub(crate) unsafe fn put_lanes(&self, at: usize, values: &[f32], accumulate: bool) {
        assert!(at + values.len() <= self.len, "output: element {at} of {}", self.len);
        // SAFETY: in range, as asserted; the slice is borrowed mutably for as long as `self` lives, and the caller
        // promises that no other thread uses these elements.
        let out = unsafe { std::slice::from_raw_parts_mut(self.start.add(at), values.len()) };
        // A whole panel is a few instructions; a copy of unknown length is a call.
        match (out.as_chunks_mut::<ROWS>().0, values.as_chunks::<ROWS>().0) {
            ([out], [values]) => put(out, values, accumulate),
            _ => put(out, values, accumulate),
        }
    }
}

/// Writes values, or adds them.
#[inline(always)]
fn put<'a>(
    out: impl IntoIterator<Item = &'a mut f32>,
    values: impl IntoIterator<Item = &'a f32>,
    accumulate: bool,
) {
    let lanes = out.into_iter().zip(values);
    match accumulate {
        true => lanes.for_each(|(out, value)| *out += value),
        false => lanes.for_each(|(out, value)| *out = *value),
    }
}

/// The factors of a product and its output.
#[derive(Clone, Copy)]
pub(crate) struct Target<'a, F> {
    pub(crate) factors: F,
    pub(crate) accumulate: bool,
    pub(crate) out: Shared<'a>,
}

/// Largest number of products of one call.
const MOST: usize = 16;

/// Returns the panels that a thread takes at a time for few tokens: enough that every thread has several turns, and so
/// many that the cost of a turn does not count. Reading restarts at every turn.
pub(crate) fn panels_per_piece(panels: usize, panel_bytes: usize, threads: usize) -> usize {
    const LEAST: usize = 64 << 10;
    const MOST: usize = 512 << 10;
    let bytes = (panels.saturating_mul(panel_bytes) / (8 * threads.max(1))).clamp(LEAST, MOST);
    (bytes / panel_bytes.max(1)).max(1)
}

/// Splits several products into pieces (`count` of each), and calls `f` with every piece of every product once, on up
/// to `threads` threads. Nothing is allocated.
///
/// # Panics
/// If there are more than 16 products.
pub(crate) fn split<'a, F: Copy + Sync + 'a>(
    jobs: impl Iterator<Item = (F, bool, &'a mut [f32])>,
    threads: usize,
    count: impl Fn(F) -> usize,
    f: impl Fn(&Target<'a, F>, usize) + Sync,
) {
    let mut targets: [Option<(Target<'a, F>, usize)>; MOST] = std::array::from_fn(|_| None);
    let mut end = 0;
    let mut jobs = jobs;
    for slot in &mut targets {
        let Some((factors, accumulate, out)) = jobs.next() else { break };
        end += count(factors);
        *slot = Some((Target { factors, accumulate, out: Shared::new(out) }, end));
    }
    assert!(jobs.next().is_none(), "packed product: more than {MOST} in a call");
    for_each_range(threads, end, 1, |taken| {
        for piece in taken {
            let mut start = 0;
            for (target, end) in targets.iter().flatten() {
                if piece < *end {
                    f(target, piece - start);
                    break;
                }
                start = *end;
            }
        }
    });
}
