//! Boundary to the processor that computes: the heavy operations that a second device implements.
//!
//! A [`Device`] keeps weights and f32 values in memory of its own, which only its operations read. [`Cpu`] is the
//! first one: its memory is the host's, so borrowed values are slices and nothing is copied. Calls are resolved at
//! compile time.
//!
//! Matrices of f64 are passed in host memory: factoring takes n³ operations for n² values, so copying them costs
//! little.

use std::fmt::Debug;
use std::ops::Range;

use crate::packed::{
    Activations, FloatActivations, FloatJob, FloatPanels, Grid, LEAST_TO_SPLIT, PanelJob, Panels, multiply,
};
use crate::parallel::for_each;
use crate::xtx::{XTX_ROWS, XTX_ROWS_BF16};
use crate::{Kernels, MatRef, NotPositiveDefinite, kernels};

/// A weight `[rows, cols]` as the host packs it, from which a device makes its own.
#[derive(Debug)]
pub enum PackedWeight {
    /// Integers, which multiply 8-bit activations.
    Integers(Panels),
    /// Floats.
    Floats(FloatPanels),
}

impl PackedWeight {
    /// Bytes of codes and scales.
    pub fn bytes(&self) -> usize {
        match self {
            PackedWeight::Integers(panels) => panels.bytes(),
            PackedWeight::Floats(panels) => panels.bytes(),
        }
    }
}

/// One product of [`Device::products`].
#[derive(Debug)]
pub struct Product<'a, D: Device + ?Sized> {
    /// The weight.
    pub weight: &'a D::Weight,
    /// Index of the input that it reads.
    pub input: usize,
    /// Output, `[tokens, rows]`.
    pub out: D::ViewMut<'a>,
    /// True to add to the output, false to overwrite it.
    pub accumulate: bool,
}

/// Precision of the factors of `XᵀX`; sums are f32.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Factors {
    /// f32.
    F32,
    /// bf16, 0 below 2^-50.
    Bf16,
}

impl Factors {
    /// Number of rows of `XᵀX` that are computed together: calls that split the rows elsewhere would repeat work.
    pub fn rows(self) -> usize {
        match self {
            Factors::F32 => XTX_ROWS,
            Factors::Bf16 => XTX_ROWS_BF16,
        }
    }
}

/// A processor with its memory. An operation may still run when it returns; [`download`](Self::download) waits for
/// those that write what it reads.
pub trait Device: Sync {
    /// f32 values in the device's memory.
    type Buffer;
    /// Values that an operation reads.
    type View<'a>: Copy;
    /// Values that an operation writes.
    type ViewMut<'a>: Debug;
    /// A weight in the device's memory.
    type Weight: Debug + Sync;
    /// Working memory of [`products`](Self::products); grows at the first use of a shape or a number of inputs.
    type Scratch: Default;

    /// Copies values to the device; `None` if its memory does not hold them.
    fn upload(&self, values: &[f32]) -> Option<Self::Buffer>;

    /// Copies values from the device.
    ///
    /// # Panics
    /// If the lengths differ.
    fn download(&self, values: Self::View<'_>, out: &mut [f32]);

    /// Borrows the values from `first` on, `len` of them.
    ///
    /// # Panics
    /// If there are fewer.
    fn view<'a>(&self, buffer: &'a Self::Buffer, first: usize, len: usize) -> Self::View<'a>;

    /// Runs [`view`](Self::view) for writing.
    ///
    /// # Panics
    /// As [`view`](Self::view).
    fn view_mut<'a>(&self, buffer: &'a mut Self::Buffer, first: usize, len: usize) -> Self::ViewMut<'a>;

    /// Moves a weight to the device; `None` if its memory does not hold it.
    fn place(&self, weight: PackedWeight) -> Option<Self::Weight>;

    /// True if both weights read the same form of an input, so that one call of [`products`](Self::products) may take
    /// both.
    fn reads_with(&self, a: &Self::Weight, b: &Self::Weight) -> bool;

    /// Dequantizes row `row` of a weight, such as the embedding of a token.
    ///
    /// # Panics
    /// If there is no such row, or the output has another length.
    fn row(&self, weight: &Self::Weight, row: usize, out: Self::ViewMut<'_>);

    /// Computes `out = x Wᵀ`, or adds it to `out`, for at most 16 weights that [read](Self::reads_with) the same form
    /// of an input, each one of `inputs`, `[tokens, cols]`: the layers of one input, or a grouped product, such as
    /// that of a mixture's experts with the tokens routed to each. Weights of integers read 8-bit codes on `grid`; the
    /// sums of products of codes are exact. Bits do not depend on the other products of the call.
    ///
    /// # Panics
    /// If shapes do not agree.
    fn products<'a>(
        &self,
        jobs: impl Iterator<Item = Product<'a, Self>>,
        inputs: &[Self::View<'_>],
        cols: usize,
        grid: Grid,
        scratch: &mut Self::Scratch,
    ) where
        Self: 'a;

    /// Adds the `rows` of `XᵀX` of `x` `[tokens, cols]` to the upper triangle of `sum` `[cols, cols]`; values below the
    /// diagonal are undefined. On one device the bits do not depend on calls that split `x` at multiples of 256 tokens, or
    /// the rows at multiples of [`Factors::rows`].
    ///
    /// # Panics
    /// If shapes do not agree, or `rows` begin or end elsewhere.
    fn add_xtx(
        &self,
        x: Self::View<'_>,
        cols: usize,
        rows: Range<usize>,
        factors: Factors,
        sum: Self::ViewMut<'_>,
    );

    /// Replaces the symmetric `a` `[n, n]` in host memory, of which the lower triangle is read, by its Cholesky factor
    /// `L`, `A = L Lᵀ`, with zeros above the diagonal.
    ///
    /// # Errors
    /// [`NotPositiveDefinite`] with the first pivot that is not a positive finite number; `a` is then undefined.
    ///
    /// # Panics
    /// If `a` is not `[n, n]`.
    fn cholesky(&self, a: &mut [f64], n: usize) -> Result<(), NotPositiveDefinite>;

    /// Replaces the lower triangular `l` `[n, n]` in host memory by its inverse.
    ///
    /// # Panics
    /// If `l` is not `[n, n]`.
    fn invert_lower(&self, l: &mut [f64], n: usize);
}

/// The processor of the host, some threads of it. The number of threads changes no bit of a result.
#[derive(Clone, Copy, Debug)]
pub struct Cpu<'k> {
    kernels: &'k Kernels,
    threads: usize,
}

impl<'k> Cpu<'k> {
    /// Creates the device of up to `threads` threads.
    pub fn new(threads: usize) -> Self {
        Self::at(kernels(), threads)
    }

    /// Runs [`new`](Self::new) with the kernels of a given level for `XᵀX` and factorizations.
    pub fn at(kernels: &'k Kernels, threads: usize) -> Self {
        Cpu { kernels, threads: threads.max(1) }
    }
}

/// Inputs of products in the form that weights read.
#[derive(Debug, Default)]
pub struct CpuScratch {
    integers: Vec<Activations>,
    floats: Vec<FloatActivations>,
}

/// Calls `f` with the input and the form of it of each of `inputs`, which grow to their number, and with the threads
/// for it: a single input is split over the threads, several are handed out.
fn each_form<'x, A: Default + Send>(
    forms: &mut Vec<A>,
    inputs: &[&'x [f32]],
    threads: usize,
    f: impl Fn(&mut A, &'x [f32], usize) + Sync,
) {
    if forms.len() < inputs.len() {
        forms.resize_with(inputs.len(), A::default);
    }
    let single = inputs.iter().filter(|x| !x.is_empty()).count() == 1;
    let each = if single { threads } else { 1 };
    let small = inputs.iter().map(|x| x.len()).sum::<usize>() <= LEAST_TO_SPLIT;
    let pieces = forms.iter_mut().zip(inputs);
    for_each(if small { 1 } else { threads }, pieces, |(form, x)| f(form, x, each));
}

impl Device for Cpu<'_> {
    type Buffer = Vec<f32>;
    type View<'a> = &'a [f32];
    type ViewMut<'a> = &'a mut [f32];
    type Weight = PackedWeight;
    type Scratch = CpuScratch;

    fn upload(&self, values: &[f32]) -> Option<Vec<f32>> {
        let mut buffer = Vec::new();
        buffer.try_reserve_exact(values.len()).ok()?;
        buffer.extend_from_slice(values);
        Some(buffer)
    }

    fn download(&self, values: &[f32], out: &mut [f32]) {
        out.copy_from_slice(values);
    }

    fn view<'a>(&self, buffer: &'a Vec<f32>, first: usize, len: usize) -> &'a [f32] {
        &buffer[first..][..len]
    }

    fn view_mut<'a>(&self, buffer: &'a mut Vec<f32>, first: usize, len: usize) -> &'a mut [f32] {
        &mut buffer[first..][..len]
    }

    fn place(&self, weight: PackedWeight) -> Option<PackedWeight> {
        Some(weight)
    }

    fn reads_with(&self, a: &PackedWeight, b: &PackedWeight) -> bool {
        match (a, b) {
            (PackedWeight::Integers(a), PackedWeight::Integers(b)) => a.format().unit == b.format().unit,
            (PackedWeight::Floats(a), PackedWeight::Floats(b)) => a.in_bf16() == b.in_bf16(),
            _ => false,
        }
    }

    fn row(&self, weight: &PackedWeight, row: usize, out: &mut [f32]) {
        match weight {
            PackedWeight::Integers(panels) => panels.row(row, out),
            PackedWeight::Floats(panels) => panels.row(row, out),
        }
    }

    fn products<'a>(
        &self,
        jobs: impl Iterator<Item = Product<'a, Self>>,
        inputs: &[&[f32]],
        cols: usize,
        grid: Grid,
        scratch: &mut CpuScratch,
    ) {
        let mut jobs = jobs.peekable();
        let CpuScratch { integers, floats } = scratch;
        match jobs.peek().map(|job| job.weight) {
            Some(PackedWeight::Integers(panels)) => {
                each_form(integers, inputs, self.threads, |form, x, threads| {
                    form.quantize(x, cols, grid, panels.format().unit, threads);
                });
                let jobs = jobs.filter_map(|Product { weight, input, out, accumulate }| match weight {
                    PackedWeight::Integers(panels) => {
                        Some(PanelJob { panels, x: &integers[input], out, accumulate })
                    }
                    PackedWeight::Floats(_) => None,
                });
                multiply(jobs, self.threads);
            }
            Some(PackedWeight::Floats(panels)) => {
                each_form(floats, inputs, self.threads, |form, x, threads| form.arrange(x, panels, threads));
                let jobs = jobs.filter_map(|Product { weight, input, out, accumulate }| match weight {
                    PackedWeight::Floats(weight) => {
                        Some(FloatJob { weight, x: &floats[input], out, accumulate })
                    }
                    PackedWeight::Integers(_) => None,
                });
                FloatPanels::multiply(jobs, self.threads);
            }
            None => {}
        }
    }

    fn add_xtx(&self, x: &[f32], cols: usize, rows: Range<usize>, factors: Factors, sum: &mut [f32]) {
        let tokens = x.len() / cols.max(1);
        match factors {
            Factors::F32 => {
                self.kernels.accumulate_xtx(MatRef::new(x, tokens, cols), rows, sum, self.threads);
            }
            Factors::Bf16 => {
                let (kernels, mut bits) = (self.kernels.in_common_order(), vec![0; x.len()]);
                kernels.f32_to_bf16_factors(x, &mut bits);
                kernels.accumulate_xtx_bf16(MatRef::new(&bits, tokens, cols), rows, sum, self.threads);
            }
        }
    }

    fn cholesky(&self, a: &mut [f64], n: usize) -> Result<(), NotPositiveDefinite> {
        self.kernels.cholesky_f64(a, n, self.threads)
    }

    fn invert_lower(&self, l: &mut [f64], n: usize) {
        self.kernels.invert_lower_f64(l, n, self.threads);
    }
}
