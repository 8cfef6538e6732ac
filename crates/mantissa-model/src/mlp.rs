//! The gated MLP (Shazeer 2020, "GLU Variants Improve Transformer"): `down(act(gate(x)) · up(x))`, with
//! BitNet's norm before the down projection.
//!
//! The flow reads `normed` `[rows, hidden]` and adds its result to `residual` `[rows, hidden]`, some rows at a time.

use std::ops::Range;

use mantissa_kernels::{for_each, kernels};

use crate::config::{Activation, ModelConfig};
use crate::error::{ForwardError, LoadError};
use crate::flow::{Activations, Job, LayerFlow, NormKind, Operators};
use crate::graph::{LinearInput, LinearKind, prefix};
use crate::layer::load_linear;
use crate::linear::Linear;
use crate::norm::RmsNorm;
use crate::source::WeightSource;

/// The MLP of one layer.
#[derive(Clone, Debug)]
pub struct Mlp {
    /// Gate.
    pub gate: Linear,
    /// The other input projection.
    pub up: Linear,
    /// Output.
    pub down: Linear,
    /// Norm before the output projection.
    pub sub_norm: Option<RmsNorm>,
}

impl Mlp {
    /// Reads layer `layer`.
    ///
    /// # Errors
    /// As [`WeightSource`]'s.
    pub fn load(source: &dyn WeightSource, config: &ModelConfig, layer: usize) -> Result<Self, LoadError> {
        let linear = |kind| load_linear(source, &config.linear(layer, kind));
        let sub_norm = match config.has_sub_norms() {
            true => {
                let module = format!("{}mlp.ffn_sub_norm", prefix(layer));
                Some(RmsNorm::load(source, &module, config.intermediate_size, config.rms_norm_eps)?)
            }
            false => None,
        };
        Ok(Mlp {
            gate: linear(LinearKind::Gate)?,
            up: linear(LinearKind::Up)?,
            down: linear(LinearKind::Down)?,
            sub_norm,
        })
    }
}

impl LayerFlow {
    /// The `rows`, of which the first `real` are no padding.
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
        let x = &a.normed[rows.start * d..rows.end * d];
        let (gate, up) = (&mut a.gate[first..first + len], &mut a.up[first..first + len]);
        let inner = &mut a.inner[..len];
        let mut jobs = [
            Job { kind: LinearKind::Gate, out: &mut *gate, accumulate: false },
            Job { kind: LinearKind::Up, out: &mut *up, accumulate: false },
        ];
        operators.linears(LinearInput::GateUp, x, real, &mut jobs)?;
        self.activate(gate, up, inner);
        let x = if self.sub_norms {
            operators.norm(NormKind::MlpSub, inner, gate);
            &*gate
        } else {
            &*inner
        };
        let out = &mut a.residual[rows.start * d..rows.end * d];
        let mut jobs = [Job { kind: LinearKind::Down, out, accumulate: true }];
        operators.linears(LinearInput::Down, x, real, &mut jobs)
    }

    fn activate(&self, gate: &[f32], up: &[f32], inner: &mut [f32]) {
        let piece = (inner.len() / self.intermediate).div_ceil(self.threads) * self.intermediate;
        let pieces =
            gate.chunks(piece.max(1)).zip(up.chunks(piece.max(1))).zip(inner.chunks_mut(piece.max(1)));
        for_each(self.threads, pieces, |((gate, up), inner)| match self.activation {
            Activation::Silu => kernels().silu_mul(gate, up, inner),
            Activation::Relu2 => kernels().relu2_mul(gate, up, inner),
            Activation::GeluTanh => kernels().gelu_tanh_mul(gate, up, inner),
        });
    }
}
