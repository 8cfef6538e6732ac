//! Adapter of one linear layer: its two small matmuls, and their gradients.
//!
//! With `x` `[tokens, in]`, `u = s drop(x) Aᵀ` `[tokens, rank]` and `dY` `[tokens, out]`:
//!
//! ```text
//! Y  += u Bᵀ             dB += dYᵀ u        dU = s dY B
//! dX += drop'(dU A)      dA += dUᵀ drop(x)
//! ```
//!
//! DoRA scales the rows of W and B by `c = m / ‖W + s B A‖`, so that the same formulas hold with `c W` and `c B`;
//! then `dB = c (dYᵀ u)` and `dm = Σ dY ∘ Z / ‖W + s B A‖` with `Z = x Wᵀ + u Bᵀ`.

use std::ops::Range;

use mantissa_kernels::kernels;
use mantissa_model::{LinearInfo, LinearKind, ModelConfig};

use super::work::{AdapterWork, Slot};
use crate::arena::Parameters;
use crate::error::TrainError;
use crate::frozen::Base;
use crate::gradients::Gradients;
use crate::linear::{AdapterOp, LinearOp};
use crate::lora::{A, B, MAGNITUDE, adapter_name};
use crate::param_table::ParamTable;
use crate::policy::LinearPolicy;
use crate::store::{Precision, StoreRef};

impl Base {
    /// Gives a linear layer its packed weight and its adapter, whose tensors are in `table`.
    ///
    /// # Errors
    /// As [`LinearOp::new`].
    pub(crate) fn tuned(
        &self,
        linear: LinearOp,
        config: &ModelConfig,
        info: &LinearInfo,
        table: &ParamTable,
        precision: Precision,
    ) -> Result<LinearOp, TrainError> {
        let LinearInfo { module, rows, cols, .. } = info;
        let mut adapter = None;
        if let Some(index) = self.tuning.adapted(config).position(|other| other.module == *module) {
            let lora = &self.tuning.lora;
            let place = |part: &str| table.place(&adapter_name(module, part));
            let policy = LinearPolicy::plain(precision);
            let part = |part: &str, shape| {
                LinearOp::new(module, shape, place(part).unwrap_or_default(), None, &policy)
            };
            adapter = Some(AdapterOp {
                index,
                a: part(A, (lora.rank, *cols))?,
                b: part(B, (*rows, lora.rank))?,
                magnitude: place(MAGNITUDE),
                scale: lora.scale() as f32,
                dropout: lora.dropout,
            });
        }
        Ok(linear.tuned(self.index(module), adapter))
    }
}

/// Linear layer with an adapter in one step.
#[derive(Clone, Copy)]
pub(crate) struct Adapted<'a> {
    pub(crate) params: &'a Parameters,
    pub(crate) linear: &'a LinearOp,
    pub(crate) op: &'a AdapterOp,
    pub(crate) kind: LinearKind,
    pub(crate) threads: usize,
}

impl<'a> Adapted<'a> {
    /// Returns the linear layer if it has an adapter.
    pub(crate) fn of(
        params: &'a Parameters,
        linear: &'a LinearOp,
        kind: LinearKind,
        threads: usize,
    ) -> Option<Self> {
        Some(Adapted { params, linear, op: linear.adapter()?, kind, threads })
    }

    fn rank(self) -> usize {
        self.op.a.rows()
    }

    /// Adds the adapter's output to `out` `[tokens, out]`, whose base was computed with the weight of
    /// [`AdapterWork::prepare`].
    pub(crate) fn fprop(self, work: &mut AdapterWork, x: StoreRef<'_>, out: &mut [f32]) {
        self.low_rank(work, x);
        let low = StoreRef::F32(&work.low[..x.len() / self.linear.cols() * self.rank()]);
        let b = work.b(self.params, self.linear, Slot::Forward);
        self.op.b.fprop_with(self.params, b, low, out, true, self.threads);
    }

    /// Computes `u`, and under dropout `drop(x)`.
    fn low_rank(self, work: &mut AdapterWork, x: StoreRef<'_>) {
        let AdapterOp { a, scale, dropout, index, .. } = self.op;
        let n = x.len() / self.linear.cols() * self.rank();
        let drops = work.draw.filter(|_| *dropout > 0.0);
        let (low, dropped) = (&mut work.low[..n], &mut work.dropped);
        match drops {
            Some(draw) => {
                let dropped = &mut dropped[..x.len()];
                x.widen(dropped);
                draw.mask(*index, *dropout, 0, dropped);
                a.fprop(self.params, StoreRef::F32(dropped), low, false, self.threads);
            }
            None => a.fprop(self.params, x, low, false, self.threads),
        }
        low.iter_mut().for_each(|v| *v *= scale);
    }

    /// Computes `dU` from the rounded `dy`, unless the slot holds it.
    fn output_gradient(self, work: &mut AdapterWork, dy: StoreRef<'_>) {
        let slot = Slot::of(self.kind);
        if work.d_low_of(slot) == Some(self.op.index) {
            return;
        }
        let n = dy.len() / self.linear.rows() * self.rank();
        let mut d_low = work.take_d_low(slot);
        let b = work.b(self.params, self.linear, slot);
        self.op.b.dgrad_with(b, dy, &mut d_low[..n], false, self.threads);
        d_low[..n].iter_mut().for_each(|v| *v *= self.op.scale);
        work.put_d_low(slot, d_low, self.op.index);
    }

    /// Prepares [`dgrad`](Self::dgrad): `dU`, and under dropout the gradient of all tokens' inputs.
    pub(crate) fn prepare_dgrad(self, work: &mut AdapterWork, dy: StoreRef<'_>) {
        self.output_gradient(work, dy);
        let AdapterOp { a, dropout, index, .. } = self.op;
        let Some(draw) = work.draw.filter(|_| *dropout > 0.0) else { return };
        let (slot, tokens) = (Slot::of(self.kind), dy.len() / self.linear.rows());
        let mut d_dropped = work.take_d_dropped(slot);
        let dx = &mut d_dropped[..tokens * self.linear.cols()];
        let d_low = StoreRef::F32(&work.d_low(slot)[..tokens * self.rank()]);
        a.dgrad(self.params, d_low, dx, false, self.threads);
        draw.mask(*index, *dropout, 0, dx);
        work.put_d_dropped(slot, d_dropped);
    }

    /// Adds to the input gradient `dx` `[part, in]` of the tokens `part`.
    pub(crate) fn dgrad(self, work: &AdapterWork, part: Range<usize>, dx: &mut [f32], threads: usize) {
        let (slot, rank, cols) = (Slot::of(self.kind), self.rank(), self.linear.cols());
        if work.draw.is_some() && self.op.dropout > 0.0 {
            kernels().axpy(1.0, &work.d_dropped(slot)[part.start * cols..part.end * cols], dx);
            return;
        }
        let d_low = StoreRef::F32(&work.d_low(slot)[part.start * rank..part.end * rank]);
        self.op.a.dgrad(self.params, d_low, dx, true, threads);
    }

    /// Adds to the gradients of A, B and DoRA's magnitudes. `dy` comes with its rounded form.
    pub(crate) fn wgrad(
        self,
        work: &mut AdapterWork,
        x: StoreRef<'_>,
        (dy, rounded): (&[f32], StoreRef<'_>),
        grads: &mut Gradients,
    ) {
        work.prepare_columns(self.params, self.linear, Slot::of(self.kind));
        self.low_rank(work, x);
        self.output_gradient(work, rounded);
        let AdapterOp { a, b, dropout, .. } = self.op;
        let (rank, tokens) = (self.rank(), x.len() / self.linear.cols());
        let low = StoreRef::F32(&work.low[..tokens * rank]);
        match &self.op.magnitude {
            None => b.wgrad(rounded, low, grads, self.threads),
            Some(magnitude) => {
                let mut db = std::mem::take(&mut work.d_b);
                let own = &mut db[..self.linear.rows() * rank];
                own.fill(0.0);
                b.wgrad_into(rounded, low, own, self.threads);
                let columns = work.columns(Slot::of(self.kind));
                grads.add(b.weight(), |to| {
                    let lines = to.chunks_exact_mut(rank).zip(own.chunks_exact(rank)).zip(columns);
                    lines.for_each(|((to, own), c)| kernels().axpy(*c, own, to));
                });
                work.d_b = db;
                self.magnitude_gradient(work, x, dy, magnitude, grads);
            }
        }
        let d_low = StoreRef::F32(&work.d_low(Slot::of(self.kind))[..tokens * rank]);
        let drops = work.draw.is_some() && *dropout > 0.0;
        let x = if drops { StoreRef::F32(&work.dropped[..x.len()]) } else { x };
        a.wgrad(d_low, x, grads, self.threads);
    }

    /// Adds to the gradient of DoRA's magnitudes. Recomputes the output before its rows were scaled.
    fn magnitude_gradient(
        self,
        work: &mut AdapterWork,
        x: StoreRef<'_>,
        dy: &[f32],
        magnitude: &Range<usize>,
        grads: &mut Gradients,
    ) {
        let (rows, rank) = (self.linear.rows(), self.rank());
        let tokens = x.len() / self.linear.cols();
        work.prepare_unscaled(self.params, self.linear, self.threads);
        let mut z = std::mem::take(&mut work.z);
        let own = &mut z[..tokens * rows];
        let weight = work.unscaled(self.params, self.linear);
        self.linear
            .without_bias(|linear| linear.fprop_with(self.params, weight, x, own, false, self.threads));
        let low = StoreRef::F32(&work.low[..tokens * rank]);
        self.op.b.fprop(self.params, low, own, true, self.threads);
        let norms = &work.norms[self.op.index];
        grads.add(magnitude.clone(), |dm| {
            // Token by token, so that sums have one order.
            let mut sums = vec![0.0f64; rows];
            for (dy, z) in dy.chunks_exact(rows).zip(own.chunks_exact(rows)) {
                let each = sums.iter_mut().zip(dy.iter().zip(z));
                each.for_each(|(sum, (dy, z))| *sum += f64::from(*dy) * f64::from(*z));
            }
            for ((dm, sum), norm) in dm.iter_mut().zip(sums).zip(norms) {
                *dm += if *norm > 0.0 { (sum / f64::from(*norm)) as f32 } else { 0.0 };
            }
        });
        work.z = z;
    }
}
