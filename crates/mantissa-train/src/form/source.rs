//! Matrices from which forms are made, read line by line along the contraction axis.

use std::sync::Mutex;

use mantissa_kernels::{for_each, kernels};
use mantissa_num::blockwise::Range;

use super::turn::Turn;
use crate::store::StoreRef;

/// Lines that a thread fills at a time when it transposes.
pub(super) const LINES: usize = 16;

/// Matrix from which a form is made.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Source<'a> {
    pub(crate) values: StoreRef<'a>,
    pub(crate) rows: usize,
    pub(crate) cols: usize,
    /// True if lines are the columns.
    pub(crate) transposed: bool,
}

impl Source<'_> {
    /// True if a value is not 0, and all are finite.
    pub(super) fn has_signal(&self) -> bool {
        let amax = kernels().amax(&self.values.widened());
        amax > 0.0 && amax.is_finite()
    }

    pub(super) fn shape(&self) -> (usize, usize) {
        if self.transposed { (self.cols, self.rows) } else { (self.rows, self.cols) }
    }

    /// Copies lines `first..` into `to`, as many as it holds.
    pub(super) fn lines(&self, first: usize, to: &mut [f32]) {
        let (_, k) = self.shape();
        if !self.transposed {
            return self.values.slice(first * k..first * k + to.len()).widen(to);
        }
        if let StoreRef::F32(values) = self.values {
            return kernels().transpose_columns(values, self.cols, first, self.rows, to);
        }
        let n = to.len() / k.max(1);
        let mut wide = [0.0; LINES];
        for (i, row) in (0..self.rows).map(|row| row * self.cols + first).enumerate() {
            let wide = &mut wide[..n];
            self.values.slice(row..row + n).widen(wide);
            for (line, value) in wide.iter().enumerate() {
                to[line * k + i] = *value;
            }
        }
    }

    /// Values at `range` in storage order.
    pub(super) fn range(&self, range: std::ops::Range<usize>) -> std::borrow::Cow<'_, [f32]> {
        self.values.slice(range).widened()
    }
}

/// Row-major matrix from which forms are made.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Matrix<'a> {
    pub(crate) values: StoreRef<'a>,
    pub(crate) rows: usize,
    pub(crate) cols: usize,
}

impl<'a> Matrix<'a> {
    /// Takes values of rows of `cols`.
    pub(crate) fn new(values: StoreRef<'a>, cols: usize) -> Self {
        Matrix { values, rows: values.len() / cols.max(1), cols }
    }

    pub(crate) fn lines(self) -> Source<'a> {
        Source { values: self.values, rows: self.rows, cols: self.cols, transposed: false }
    }

    pub(crate) fn columns(self) -> Source<'a> {
        Source { transposed: true, ..self.lines() }
    }
}

/// Returns the function that writes lines of `source`, of `k` values, from a given one on, rotated.
pub(super) fn filler<'a>(
    source: Source<'a>,
    k: usize,
    hadamard: &'a Option<Turn>,
) -> impl Fn(usize, &mut [f32]) + Sync + 'a {
    move |first, lines| {
        for (i, lines) in lines.chunks_mut(LINES * k).enumerate() {
            source.lines(first + i * LINES, lines);
        }
        if let Some(hadamard) = hadamard {
            lines.chunks_exact_mut(k).for_each(|line| hadamard.forward(line));
        }
    }
}

thread_local! {
    /// Lines in work.
    static BAND: std::cell::RefCell<Vec<f32>> = const { std::cell::RefCell::new(Vec::new()) };
}

/// Passes `n` values of scratch memory to `work`.
pub(super) fn with_band<T>(n: usize, work: impl FnOnce(&mut [f32]) -> T) -> T {
    let mut band = BAND.take();
    if band.len() < n {
        band.resize(n, 0.0);
    }
    let result = work(&mut band[..n]);
    BAND.set(band);
    result
}

/// Computes the union of ranges of parts.
pub(super) fn union<P: Send>(
    threads: usize,
    parts: impl Iterator<Item = P> + Send,
    range: impl Fn(P) -> Range + Sync,
) -> Range {
    let all = Mutex::new(Vec::new());
    for_each(threads, parts.enumerate(), |(i, part)| {
        let range = range(part);
        all.lock().unwrap_or_else(std::sync::PoisonError::into_inner).push((i, range));
    });
    let mut all = all.into_inner().unwrap_or_else(std::sync::PoisonError::into_inner);
    // In order, because a mean is a sum.
    all.sort_by_key(|(i, _)| *i);
    all.into_iter().fold(Range::EMPTY, |sum, (_, range)| sum.union(range))
}
