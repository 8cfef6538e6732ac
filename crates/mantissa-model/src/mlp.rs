//! The gated MLP (Shazeer 2020, "GLU Variants Improve Transformer"): `down(act(gate(x)) · up(x))`, with
//! BitNet's norm before the down projection.
//!
//! Reads `normed` `[rows, hidden]` and adds its result to `residual` `[rows, hidden]`, some rows at a time.

use std::ops::Range;

use mantissa_kernels::kernels;

use crate::buffers::Buffers;
use crate::config::{Activation, ModelConfig};
use crate::error::{ForwardError, LoadError};
use crate::graph::{LinearKind, prefix};
use crate::layer::load_linear;
use crate::linear::{Job, Linear, forward_fused};
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
    activation: Activation,
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
            activation: config.hidden_act,
        })
    }

    /// Adds the MLP of `b.normed` to `b.residual`.
    ///
    /// # Errors
    /// [`ForwardError::Input`].
    pub(crate) fn forward(&self, rows: usize, b: &mut Buffers) -> Result<(), ForwardError> {
        Buffers::mlp_parts(rows).try_for_each(|part| self.forward_part(part, b))
    }

    fn forward_part(&self, rows: Range<usize>, b: &mut Buffers) -> Result<(), ForwardError> {
        let (d, len) = (self.gate.cols(), rows.len() * self.gate.rows());
        let x = &b.normed[rows.start * d..rows.end * d];
        let (gate, up, inner) = (&mut b.gate[..len], &mut b.up[..len], &mut b.inner[..len]);
        let jobs = [
            Job { linear: &self.gate, out: gate, accumulate: false },
            Job { linear: &self.up, out: up, accumulate: false },
        ];
        forward_fused(jobs, x, &mut b.quantized, &mut b.panel)?;

        let (gate, up) = (&mut b.gate[..len], &b.up[..len]);
        match self.activation {
            Activation::Silu => kernels().silu_mul(gate, up, inner),
            Activation::Relu2 => kernels().relu2_mul(gate, up, inner),
            Activation::GeluTanh => kernels().gelu_tanh_mul(gate, up, inner),
        }
        let x = match &self.sub_norm {
            Some(norm) => {
                norm.forward(inner, gate);
                &*gate
            }
            None => &*inner,
        };
        let out = &mut b.residual[rows.start * d..rows.end * d];
        let job = Job { linear: &self.down, out, accumulate: true };
        forward_fused([job], x, &mut b.quantized, &mut b.panel)
    }
}
