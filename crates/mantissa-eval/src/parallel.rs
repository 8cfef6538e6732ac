//! Independent pieces of work on several threads, each thread with buffers of its own.

use std::ops::ControlFlow;
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use mantissa_kernels::map_reduce_fixed;

use crate::error::EvalError;

/// Computes `work(worker, i)` for each `i < count` on `threads` threads, in order of `i` in the result. Workers are
/// made by `make`, at most one per thread, and keep their buffers between pieces. `progress` receives the sum of
/// `size(i)` of the finished pieces and can end the run between two.
///
/// # Errors
/// The first error of `make` or `work`; [`EvalError::Stopped`].
pub(crate) fn each<W: Send, T: Send>(
    threads: usize,
    count: usize,
    make: impl Fn() -> Result<W, EvalError> + Sync,
    work: impl Fn(&mut W, usize) -> Result<T, EvalError> + Sync,
    size: impl Fn(usize) -> u64 + Sync,
    progress: &(dyn Fn(u64) -> ControlFlow<()> + Sync),
) -> Result<Vec<T>, EvalError> {
    let pool: Mutex<Vec<W>> = Mutex::new(Vec::new());
    let (done, stopped) = (AtomicU64::new(0), AtomicBool::new(false));
    let run = |range: std::ops::Range<usize>| {
        let pooled = pool.lock().map_or(None, |mut pool| pool.pop());
        let mut worker = match pooled {
            Some(worker) => worker,
            None => make()?,
        };
        let results: Result<Vec<T>, EvalError> = range
            .map(|i| {
                if stopped.load(Ordering::Relaxed) {
                    return Err(EvalError::Stopped);
                }
                let result = work(&mut worker, i)?;
                if progress(done.fetch_add(size(i), Ordering::Relaxed) + size(i)).is_break() {
                    stopped.store(true, Ordering::Relaxed);
                    return Err(EvalError::Stopped);
                }
                Ok(result)
            })
            .collect();
        if let Ok(mut pool) = pool.lock() {
            pool.push(worker);
        }
        results
    };
    map_reduce_fixed(threads, count, 1, run, Ok(Vec::new()), |all, part| {
        let mut all: Vec<T> = all?;
        all.extend(part?);
        Ok(all)
    })
}
