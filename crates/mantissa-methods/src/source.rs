//! Tensors read a panel at a time. A weight on disk is widened to f32 in the cache of the thread that uses it and is
//! never in memory as a whole.

use std::ops::Range;

use mantissa_kernels::{for_each_with, kernels};
use mantissa_num::TensorError;

/// Elements of a panel: enough to amortize a dispatch, few enough for a core's cache and, at two bytes each, for the
/// allocator to reuse memory instead of asking the system.
pub const PANEL: usize = 1 << 15;

/// Buffers in which a thread reads and widens a panel; reuse saves zeroing and page faults.
#[derive(Debug, Default)]
pub struct Scratch {
    /// Bytes as stored.
    pub bytes: Vec<u8>,
    /// Elements in f32.
    pub values: Vec<f32>,
}

/// Flattened tensor that several threads can read in pieces.
pub trait WeightReader: Sync {
    /// Error of reading or quantizing.
    type Error: From<TensorError> + Send;

    /// Elements `range`; uses `scratch` if they must be read into memory first.
    ///
    /// # Errors
    /// Depends on the implementation.
    fn elements<'a>(
        &'a self,
        range: Range<usize>,
        scratch: &'a mut Scratch,
    ) -> Result<&'a [f32], Self::Error>;
}

impl WeightReader for [f32] {
    type Error = TensorError;

    fn elements<'a>(&'a self, range: Range<usize>, _: &'a mut Scratch) -> Result<&'a [f32], TensorError> {
        Ok(&self[range])
    }
}

/// Source from element `first` on.
pub struct Tail<'a, S: ?Sized> {
    /// Whole source.
    pub source: &'a S,
    /// Index of its first element.
    pub first: usize,
}

impl<S: WeightReader + ?Sized> WeightReader for Tail<'_, S> {
    type Error = S::Error;

    fn elements<'a>(&'a self, range: Range<usize>, scratch: &'a mut Scratch) -> Result<&'a [f32], S::Error> {
        self.source.elements(self.first + range.start..self.first + range.end, scratch)
    }
}

/// Largest magnitude among the `len` elements of `source`; NaN if one is NaN.
///
/// # Errors
/// As [`WeightReader::elements`].
pub fn amax<S: WeightReader + ?Sized>(source: &S, len: usize, threads: usize) -> Result<f32, S::Error> {
    // The bits of positive floats, infinity and NaN have the same order as their values.
    let parts = map_panels(source, len, threads, |x| kernels().amax(x).to_bits())?;
    Ok(f32::from_bits(parts.into_iter().max().unwrap_or(0)))
}

/// Smallest and largest of the `len` elements of `source`; `None` if one is not finite.
///
/// # Errors
/// As [`WeightReader::elements`].
pub(crate) fn min_max<S: WeightReader + ?Sized>(
    source: &S,
    len: usize,
    threads: usize,
) -> Result<Option<(f32, f32)>, S::Error> {
    let parts = map_panels(source, len, threads, |x| kernels().min_max(x))?;
    let finite = parts.iter().all(|(low, high)| low.is_finite() && high.is_finite());
    let start = (f32::INFINITY, f32::NEG_INFINITY);
    Ok(finite.then(|| parts.iter().fold(start, |all, part| (all.0.min(part.0), all.1.max(part.1)))))
}

/// `f` of every panel, in order.
fn map_panels<S: WeightReader + ?Sized, T: Send>(
    source: &S,
    len: usize,
    threads: usize,
    f: impl Fn(&[f32]) -> T + Sync,
) -> Result<Vec<T>, S::Error> {
    let mut parts: Vec<Option<Result<T, S::Error>>> = (0..len.div_ceil(PANEL)).map(|_| None).collect();
    for_each_with(threads, Scratch::default, parts.iter_mut().enumerate(), |scratch, (i, part)| {
        let range = i * PANEL..len.min((i + 1) * PANEL);
        *part = Some(source.elements(range, scratch).map(&f));
    });
    parts.into_iter().flatten().collect()
}
