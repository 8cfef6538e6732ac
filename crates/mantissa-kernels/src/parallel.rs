//! Splits work over threads; results do not depend on the number of threads.
//!
//! Threads take fixed pieces of the work from shared cursors. Which thread takes a piece varies; the pieces and the
//! order in which their results are combined do not. The calling thread works too, so one thread runs inline. A panic
//! in a piece stops the work and reaches the caller.

use std::ops::Range;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Mutex, PoisonError};

use crate::pool;

/// Calls `f` with every item of `items`, on at most `threads` threads (0 counts as 1).
///
/// The items carry the output that a piece of work may write, for example `out.chunks_mut(64 * d).enumerate()`, so
/// that a crate without `unsafe` can split its output. Taking an item needs a lock, so an item should take at least
/// microseconds.
pub fn for_each<I, F>(threads: usize, items: I, f: F)
where
    I: IntoIterator,
    I::IntoIter: Send,
    F: Fn(I::Item) + Sync,
{
    for_each_with(threads, || (), items, |(), item| f(item));
}

/// Like [`for_each`], with a value of `new` per thread, such as reused buffers. The results must not depend on the
/// state that an earlier item left in it.
pub fn for_each_with<T, N, I, F>(threads: usize, new: N, items: I, f: F)
where
    N: Fn() -> T + Sync,
    I: IntoIterator,
    I::IntoIter: Send,
    F: Fn(&mut T, I::Item) + Sync,
{
    let items = items.into_iter();
    let threads = threads.min(items.size_hint().1.unwrap_or(usize::MAX));
    if threads <= 1 {
        let mut own = new();
        return items.for_each(|item| f(&mut own, item));
    }
    let items = Mutex::new(Some(items.fuse()));
    // The lock is released before `f` runs; an iterator that panicked while locked yields nothing more.
    let take = || items.lock().unwrap_or_else(PoisonError::into_inner).as_mut().and_then(Iterator::next);
    pool::run(threads, &|| {
        let stop = StopOnPanic(|| *items.lock().unwrap_or_else(PoisonError::into_inner) = None);
        let mut own = new();
        while let Some(item) = take() {
            f(&mut own, item);
        }
        std::mem::forget(stop);
    });
}

/// Calls `f` with the consecutive ranges of `grain` indices (the last may be shorter) that make up `0..n`, on
/// at most `threads` threads (0 counts as 1; a `grain` of 0 counts as 1).
///
/// Every thread starts in a part of its own and goes on in order, then helps with the other parts: threads that read
/// memory far apart, each from front to back, read up to half more bytes per second than threads that alternate.
pub fn for_each_range<F>(threads: usize, n: usize, grain: usize, f: F)
where
    F: Fn(Range<usize>) + Sync,
{
    let grain = grain.max(1);
    let pieces = n.div_ceil(grain);
    let piece = |i: usize| i * grain..n.min((i + 1).saturating_mul(grain));
    if threads <= 1 || pieces <= 1 {
        return (0..pieces).for_each(|i| f(piece(i)));
    }
    let parts = threads.min(pieces).min(PARTS);
    let part = |p: usize| p * pieces / parts..(p + 1) * pieces / parts;
    let cursors: [Cursor; PARTS] =
        std::array::from_fn(|p| Cursor(AtomicUsize::new(if p < parts { part(p).start } else { 0 })));
    let entered = AtomicUsize::new(0);
    pool::run(threads.min(pieces), &|| {
        let stop =
            StopOnPanic(|| cursors.iter().for_each(|cursor| cursor.0.store(pieces, Ordering::Relaxed)));
        let own = entered.fetch_add(1, Ordering::Relaxed) % parts;
        for p in (own..parts).chain(0..own) {
            let (cursor, end) = (&cursors[p].0, part(p).end);
            let next = |i: usize| (i < end).then_some(i + 1);
            while let Ok(i) = cursor.fetch_update(Ordering::Relaxed, Ordering::Relaxed, next) {
                f(piece(i));
            }
        }
        std::mem::forget(stop);
    });
}

/// Parts of [`for_each_range`] that have a cursor of their own.
const PARTS: usize = 16;

/// A cursor with a cache line, and its neighbour that the processor prefetches, to itself.
#[repr(align(128))]
struct Cursor(AtomicUsize);

/// Maps the ranges of [`for_each_range`] and folds their results into `init` in the order of the ranges: the
/// same result for every thread count, even where `fold` is not associative (sums of floats).
pub fn map_reduce_fixed<T, A, M, R>(threads: usize, n: usize, grain: usize, map: M, init: A, fold: R) -> A
where
    T: Send,
    M: Fn(Range<usize>) -> T + Sync,
    R: FnMut(A, T) -> A,
{
    let grain = grain.max(1);
    let mut results: Vec<Option<T>> = (0..n.div_ceil(grain)).map(|_| None).collect();
    for_each(threads, results.iter_mut().enumerate(), |(i, slot)| {
        *slot = Some(map(i * grain..n.min((i + 1).saturating_mul(grain))));
    });
    results.into_iter().flatten().fold(init, fold)
}

/// Runs its closure when dropped; the regular path forgets it, so that only unwinding drops it.
struct StopOnPanic<F: Fn()>(F);

impl<F: Fn()> Drop for StopOnPanic<F> {
    fn drop(&mut self) {
        (self.0)();
    }
}

/// Splits `rows` into nearly equal parts of at most `most`. The parts of a large pass are all large, so that none
/// uses the path for few rows.
pub fn parts(rows: usize, most: usize) -> impl Iterator<Item = Range<usize>> + Clone {
    let parts = rows.div_ceil(most.max(1));
    (0..parts).map(move |i| i * rows / parts..(i + 1) * rows / parts)
}

#[cfg(test)]
#[allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]
mod tests {
    use super::*;
    use std::panic::{AssertUnwindSafe, catch_unwind};

    #[test]
    fn ranges_cover_everything_once() {
        for threads in [0, 1, 2, 3, 8] {
            for (n, grain) in [(0, 1), (1, 4), (10, 3), (100, 1), (7, 0), (5, usize::MAX)] {
                let seen: Vec<AtomicUsize> = (0..n).map(|_| AtomicUsize::new(0)).collect();
                for_each_range(threads, n, grain, |range| {
                    assert!(!range.is_empty() && range.len() <= grain.max(1));
                    for i in range {
                        seen[i].fetch_add(1, Ordering::Relaxed);
                    }
                });
                assert!(
                    seen.iter().all(|c| c.load(Ordering::Relaxed) == 1),
                    "threads {threads} n {n} grain {grain}"
                );
            }
        }
    }

    #[test]
    fn a_float_sum_does_not_depend_on_the_thread_count() {
        let x: Vec<f32> = (0..10_007_u16).map(|i| f32::from(i).sin() * 1e3).collect();
        let sum = |threads| {
            let partial = |range: Range<usize>| x[range].iter().sum::<f32>();
            map_reduce_fixed(threads, x.len(), 64, partial, 0.0_f32, |a, b| a + b)
        };
        let one = sum(1);
        for threads in 2..6 {
            assert_eq!(sum(threads).to_bits(), one.to_bits());
        }
    }

    #[test]
    fn for_each_writes_disjoint_pieces() {
        let mut out = vec![0_usize; 1003];
        for_each(3, out.chunks_mut(10).enumerate(), |(i, chunk)| chunk.fill(i + 1));
        assert!(out.iter().enumerate().all(|(i, &v)| v == i / 10 + 1));
    }

    #[test]
    fn thread_state_is_not_shared() {
        for threads in [1, 2, 4] {
            let made = AtomicUsize::new(0);
            let mut out = vec![0_usize; 500];
            let new = || {
                made.fetch_add(1, Ordering::Relaxed);
                Vec::new()
            };
            for_each_with(threads, new, out.iter_mut().enumerate(), |seen: &mut Vec<usize>, (i, out)| {
                assert!(seen.last().is_none_or(|last| *last < i));
                seen.push(i);
                *out = i;
            });
            assert!(out.iter().enumerate().all(|(i, &v)| v == i));
            assert!((1..=threads).contains(&made.load(Ordering::Relaxed)));
        }
    }

    #[test]
    fn a_panic_reaches_the_caller_and_stops_the_hand_out() {
        for threads in [1, 2, 4] {
            let done = AtomicUsize::new(0);
            let run = || {
                for_each_range(threads, 1_000_000, 1, |range| {
                    assert!(range.start != 5, "piece five");
                    done.fetch_add(1, Ordering::Relaxed);
                });
            };
            let payload = catch_unwind(AssertUnwindSafe(run)).unwrap_err();
            assert_eq!(payload.downcast_ref::<&str>(), Some(&"piece five"));
            assert!(done.load(Ordering::Relaxed) < 1_000_000);

            let items = || for_each(threads, 0..100, |i| assert!(i != 7, "item seven"));
            let payload = catch_unwind(AssertUnwindSafe(items)).unwrap_err();
            assert_eq!(payload.downcast_ref::<&str>(), Some(&"item seven"));
        }
    }

    #[test]
    fn parts_cover_all_rows_and_are_never_tiny() {
        for rows in [1, 2, 3, 511, 512, 513, 1024, 1025, 1537, 100_000] {
            let cut: Vec<_> = parts(rows, 512).collect();
            assert_eq!(cut.iter().map(ExactSizeIterator::len).sum::<usize>(), rows);
            assert!(cut.windows(2).all(|w| w[0].end == w[1].start));
            assert!(cut.iter().all(|p| p.len() <= 512 && p.len() >= rows.min(256)));
        }
        assert_eq!(parts(0, 512).count(), 0);
    }
}
