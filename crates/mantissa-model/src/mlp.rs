//! Gated MLP (Shazeer 2020, "GLU Variants Improve Transformer"): `down(act(gate(x)) · up(x))`, with BitNet's norm
//! before the down projection; and the MLP without a gate, `down(act(up(x)))`.
//!
//! It reads `normed` `[rows, hidden]` and adds its result to `residual` `[rows, hidden]`, some rows at a time.

use std::ops::Range;

use mantissa_kernels::{for_each, kernels};

use crate::config::{Activation, DenseMlp, MlpForm};
use crate::error::ForwardError;
use crate::flow::{Activations, Job, LayerFlow, Operators, scale};
use crate::graph::{LinearInput, LinearKind, NormKind};

/// Least number of values that several threads compute.
const MANY: usize = 1 << 16;

/// Subtracts a threshold from the gate of each token, `[tokens, width]`, and cuts it off at 0: its mean and `cutoff`
/// standard deviations (Gemma 3n).
fn cut_off(width: usize, cutoff: f32, gate: &mut [f32]) {
    for gate in gate.chunks_exact_mut(width) {
        let mean = gate.iter().map(|x| f64::from(*x)).sum::<f64>() / width as f64;
        let variance = gate.iter().map(|x| (f64::from(*x) - mean).powi(2)).sum::<f64>() / width as f64;
        let threshold = (mean + variance.sqrt() * f64::from(cutoff)) as f32;
        gate.iter_mut().for_each(|x| *x = (*x - threshold).max(0.0));
    }
}

impl LayerFlow {
    /// Runs the MLP on `rows`, of which the first `real` are not padding.
    pub(crate) fn mlp_part(
        &self,
        operators: &mut impl Operators,
        rows: Range<usize>,
        real: usize,
        a: &mut Activations<'_>,
    ) -> Result<(), ForwardError> {
        let (d, ffn) = (self.hidden, self.intermediate);
        let len = rows.len() * ffn;
        let first = if a.mlp.keep { rows.start * ffn } else { 0 };
        let rows = rows.start * d..rows.end * d;
        let x = &a.normed[rows.clone()];
        let (gate, up) = (&mut a.gate[first..first + len], &mut a.up[first..first + len]);
        let inner = &mut a.inner[..len];
        self.gate_and_up(operators, x, real, [&mut *gate, &mut *up], a.extra.wide)?;
        if let Some(cutoff) = self.cutoff {
            cut_off(ffn, cutoff, gate);
        }
        let factors = self.multipliers;
        scale(factors.map(|factors| factors.gate), gate);
        self.activate(ffn, gate, up, inner);
        scale(factors.map(|factors| factors.inner), inner);
        let x = if self.sub_norms {
            let normed = if a.mlp.keep { &mut a.extra.wide[..len] } else { gate };
            operators.norm(NormKind::MlpSub, inner, normed);
            &*normed
        } else {
            &*inner
        };
        let residual = &mut a.residual[rows.clone()];
        if !self.norms_results() {
            let mut jobs = [Job { kind: LinearKind::Down, out: residual, accumulate: true }];
            return operators.linears(LinearInput::Down, x, real, &mut jobs);
        }
        let out = &mut a.normed[rows];
        let mut jobs = [Job { kind: LinearKind::Down, out: &mut *out, accumulate: false }];
        operators.linears(LinearInput::Down, x, real, &mut jobs)?;
        if self.experts.as_ref().is_some_and(|experts| experts.dense == DenseMlp::Normed) {
            // The experts add their result before both are normed and added.
            operators.norm(NormKind::AfterDense, out, &mut a.extra.wide[..out.len()]);
            return Ok(());
        }
        Self::add_normed(operators, NormKind::AfterMlp, out, &mut a.extra.wide[..out.len()], residual);
        Ok(())
    }

    /// Adds the layer's own input `e`, gated by the states: `residual += norm(P (act(G residual) · e))`, on `rows`, of
    /// which the first `real` are not padding (Gemma 4).
    pub(crate) fn add_input(
        &self,
        width: usize,
        operators: &mut impl Operators,
        rows: Range<usize>,
        real: usize,
        a: &mut Activations<'_>,
    ) -> Result<(), ForwardError> {
        let (d, n) = (self.hidden, rows.len() * width);
        let at = rows.start * d..rows.end * d;
        let (gate, inner) = (&mut a.gate[..n], &mut a.inner[..n]);
        let mut jobs = [Job { kind: LinearKind::InputGate, out: &mut *gate, accumulate: false }];
        // Of parallel streams, the corrected states with their factors.
        let states = if self.streams.is_some() { &a.normed[at.clone()] } else { &a.residual[at.clone()] };
        operators.linears(LinearInput::States, states, real, &mut jobs)?;
        self.activate(width, gate, &a.layer_input[rows.start * width..rows.end * width], inner);
        let out = &mut a.normed[at.clone()];
        let mut jobs = [Job { kind: LinearKind::InputProjection, out: &mut *out, accumulate: false }];
        operators.linears(LinearInput::Gated, inner, real, &mut jobs)?;
        let normed = &mut a.extra.wide[..out.len()];
        let Some(streams) = &self.streams else {
            Self::add_normed(operators, NormKind::AfterInput, out, normed, &mut a.residual[at]);
            return Ok(());
        };
        // To every stream but the first.
        operators.norm(NormKind::AfterInput, out, normed);
        for stream in a.streams.chunks_exact_mut(a.streams.len() / streams.count).skip(1) {
            kernels().axpy(1.0, normed, &mut stream[at.clone()]);
        }
        Ok(())
    }

    /// Projects `x` to gate and up, `[rows, intermediate]`. Without a gate, `gate` receives the up projection and
    /// `up` ones.
    fn gate_and_up(
        &self,
        operators: &mut impl Operators,
        x: &[f32],
        real: usize,
        [gate, up]: [&mut [f32]; 2],
        wide: &mut [f32],
    ) -> Result<(), ForwardError> {
        let accumulate = false;
        match self.mlp {
            MlpForm::Gated => {
                let mut jobs = [
                    Job { kind: LinearKind::Gate, out: gate, accumulate },
                    Job { kind: LinearKind::Up, out: up, accumulate },
                ];
                operators.linears(LinearInput::GateUp, x, real, &mut jobs)
            }
            MlpForm::GatedJoined => {
                let (ffn, joined) = (self.intermediate, &mut wide[..2 * gate.len()]);
                let mut jobs = [Job { kind: LinearKind::GateUp, out: &mut *joined, accumulate }];
                operators.linears(LinearInput::GateUp, x, real, &mut jobs)?;
                let parts = gate.chunks_exact_mut(ffn).zip(up.chunks_exact_mut(ffn));
                for (joined, (gate, up)) in joined.chunks_exact(2 * ffn).zip(parts) {
                    gate.copy_from_slice(&joined[..ffn]);
                    up.copy_from_slice(&joined[ffn..]);
                }
                Ok(())
            }
            MlpForm::Plain => {
                up.fill(1.0);
                let mut jobs = [Job { kind: LinearKind::Up, out: gate, accumulate }];
                operators.linears(LinearInput::GateUp, x, real, &mut jobs)
            }
        }
    }

    /// Computes `inner = act(gate) · up`, all `[rows, width]`.
    pub fn activate(&self, width: usize, gate: &[f32], up: &[f32], inner: &mut [f32]) {
        let threads = if inner.len() < MANY { 1 } else { self.threads };
        let piece = ((inner.len() / width).div_ceil(threads) * width).max(1);
        let limited = self.experts.as_ref().and_then(|experts| experts.limited);
        let pieces = gate.chunks(piece).zip(up.chunks(piece)).zip(inner.chunks_mut(piece));
        for_each(threads, pieces, |((gate, up), inner)| match (limited, self.activation) {
            (Some(l), _) => kernels().limited_swiglu_mul([l.alpha, l.limit, l.offset], gate, up, inner),
            (None, Activation::Silu) => kernels().silu_mul(gate, up, inner),
            (None, Activation::Relu2) => kernels().relu2_mul(gate, up, inner),
            (None, Activation::GeluTanh) => kernels().gelu_tanh_mul(gate, up, inner),
            (None, Activation::Gelu) => kernels().gelu_mul(gate, up, inner),
        });
    }

    /// Backward of [`activate`](Self::activate) on this thread: `gate` and `up` become their gradients, and `inner`,
    /// which holds its gradient, becomes the activation again. Clamped SwiGLU has none, and must not be asked for.
    pub fn activate_backward(&self, gate: &mut [f32], up: &mut [f32], inner: &mut [f32]) {
        match self.activation {
            Activation::Silu => kernels().silu_mul_backward(gate, up, inner),
            Activation::Relu2 => kernels().relu2_mul_backward(gate, up, inner),
            Activation::GeluTanh => kernels().gelu_tanh_mul_backward(gate, up, inner),
            Activation::Gelu => kernels().gelu_mul_backward(gate, up, inner),
        }
    }
}
