//! Operators of a layer with prepared weights.

use std::collections::BTreeMap;
use std::ops::Range;

use mantissa_kernels::{for_each, kernels};
use mantissa_model::flow::{self, AbsorbedHeads, Group, LayerFlow, Operators};
use mantissa_model::graph::{NormKind, SideKind, VectorKind};
use mantissa_model::{ForwardError, LayerParts, Linear, LinearInput, LinearKind, Norm};

use crate::prepared::{self, MOST_INPUTS, PreparedLinear, PreparedMatmul, Rows, Scratch};

/// Least number of values that several threads normalize.
const MANY: usize = 1 << 16;

/// A layer whose linear layers are prepared.
#[derive(Debug)]
pub(super) struct FastLayer {
    linears: BTreeMap<LinearKind, PreparedLinear>,
    norms: Vec<(NormKind, Norm)>,
    sides: Vec<(SideKind, Side)>,
    vectors: Vec<(VectorKind, Vec<f32>)>,
    absorbed: Option<AbsorbedHeads>,
    pub(super) flow: LayerFlow,
}

/// A router or gate. In f32, because a different choice of experts changes a result more than any rounding.
#[derive(Debug)]
struct Side {
    /// `[rows, cols]`.
    weight: Vec<f32>,
    rows: usize,
    cols: usize,
    bias: Option<Vec<f32>>,
}

impl FastLayer {
    pub(super) fn new(
        parts: LayerParts<PreparedLinear>,
        absorbed: Option<AbsorbedHeads>,
        threads: usize,
    ) -> Self {
        let LayerParts { linears, norms, sides, vectors, flow } = parts;
        FastLayer {
            linears,
            norms,
            sides: sides.into_iter().map(|(kind, linear)| (kind, Side::new(linear))).collect(),
            vectors,
            absorbed,
            flow: flow.on_threads(threads),
        }
    }

    pub(super) fn linears(&self) -> impl Iterator<Item = &PreparedLinear> {
        self.linears.values()
    }
}

impl Side {
    fn new(linear: Linear) -> Self {
        let linear = linear.folded();
        let (rows, cols) = (linear.rows(), linear.cols());
        let mut weight = vec![0.0; rows * cols];
        weight.chunks_exact_mut(cols.max(1)).enumerate().for_each(|(row, out)| linear.row(row, out));
        Side { weight, rows, cols, bias: linear.bias().map(<[f32]>::to_vec) }
    }

    /// Computes `out = x Wᵀ + b` row by row, so that a row does not depend on the others.
    fn forward(&self, x: &[f32], out: &mut [f32]) {
        for (x, out) in x.chunks_exact(self.cols).zip(out.chunks_exact_mut(self.rows)) {
            kernels().gemv(&self.weight, self.cols, x, out, false);
            if let Some(bias) = &self.bias {
                kernels().axpy(1.0, bias, out);
            }
        }
    }
}

/// Operators of `layer` in one pass.
pub(super) struct Run<'a> {
    pub(super) layer: &'a FastLayer,
    pub(super) scratch: &'a mut Scratch,
    pub(super) threads: usize,
}

impl Operators for Run<'_> {
    fn norm(&mut self, kind: NormKind, x: &[f32], out: &mut [f32]) {
        match self.layer.norms.iter().find(|(of, _)| *of == kind) {
            Some((_, norm)) => normalize(norm, x, out, norm.weight().len(), self.threads),
            // The flow asks only for norms in the config, and those were loaded.
            None => out.copy_from_slice(x),
        }
    }

    fn linears(
        &mut self,
        input: LinearInput,
        x: &[f32],
        tokens: usize,
        jobs: &mut [flow::MatmulJob<'_>],
    ) -> Result<(), ForwardError> {
        self.grouped(&mut [Group { input, x, tokens, jobs }])
    }

    fn grouped(&mut self, groups: &mut [Group<'_, '_>]) -> Result<(), ForwardError> {
        for groups in groups.chunks_mut(MOST_INPUTS) {
            let mut inputs = [Rows::default(); MOST_INPUTS];
            for (rows, Group { x, tokens, .. }) in inputs.iter_mut().zip(&*groups) {
                *rows = Rows { x, tokens: *tokens };
            }
            let (count, layer) = (groups.len(), self.layer);
            let jobs = groups.iter_mut().enumerate().flat_map(|(input, group)| {
                group.jobs.iter_mut().filter_map(move |job| {
                    // The flow asks only for layers in the config, and those were loaded.
                    let linear = layer.linears.get(&job.kind)?;
                    Some(PreparedMatmul { linear, input, out: &mut *job.out, accumulate: job.accumulate })
                })
            });
            prepared::forward(jobs, &inputs[..count], self.scratch, self.threads)?;
        }
        Ok(())
    }

    // A product's bits do not depend on the number of rows.
    fn least_rows(&self) -> usize {
        1
    }

    fn side(&mut self, kind: SideKind, x: &[f32], out: &mut [f32]) {
        if let Some((_, side)) = self.layer.sides.iter().find(|(of, _)| *of == kind) {
            side.forward(x, out);
        }
    }

    fn side_rows(&mut self, kind: SideKind, rows: Range<usize>, x: &[f32], out: &mut [f32]) {
        if let Some((_, side)) = self.layer.sides.iter().find(|(of, _)| *of == kind) {
            let weight = &side.weight[rows.start * side.cols..rows.end * side.cols];
            let tokens = x.chunks_exact(side.cols).zip(out.chunks_exact_mut(rows.len()));
            for_each(self.threads, tokens, |(x, out)| kernels().gemv(weight, side.cols, x, out, false));
        }
    }

    fn absorbed(&self) -> Option<&AbsorbedHeads> {
        self.layer.absorbed.as_ref()
    }

    fn vector(&self, kind: VectorKind) -> Option<&[f32]> {
        self.layer.vectors.iter().find(|(of, _)| *of == kind).map(|(_, values)| values.as_slice())
    }
}

/// Normalizes rows of `width` of `x` into `out`, on up to `threads` threads if there are many.
pub(super) fn normalize(norm: &Norm, x: &[f32], out: &mut [f32], width: usize, threads: usize) {
    if x.len() < MANY || threads <= 1 {
        return norm.forward(x, out);
    }
    let piece = (x.len() / width).div_ceil(4 * threads) * width;
    for_each(threads, x.chunks(piece).zip(out.chunks_mut(piece)), |(x, out)| norm.forward(x, out));
}
