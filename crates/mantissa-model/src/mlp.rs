//! The gated MLP (Shazeer 2020, "GLU Variants Improve Transformer"): `down(act(gate(x)) · up(x))`, with
//! BitNet's norm before the down projection.
//!
//! Reads `normed` `[rows, hidden]` and adds its result to `residual` `[rows, hidden]`, some rows at a time.

use std::ops::Range;

use mantissa_kernels::kernels;

use crate::buffers::{Buffers, Sequences};
use crate::config::{Activation, ModelConfig};
use crate::error::{ForwardError, LoadError};
use crate::graph::{LinearInput, LinearKind, prefix};
use crate::layer::{Observer, load_linear};
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
    pub(crate) fn forward(
        &self,
        seqs: &Sequences<'_>,
        mut observer: Option<&mut Observer<'_>>,
        b: &mut Buffers,
    ) -> Result<(), ForwardError> {
        let tokens = seqs.tokens();
        Buffers::mlp_parts(seqs.rows).try_for_each(|part| {
            let real = part.end.min(tokens).saturating_sub(part.start);
            self.forward_part(part, real, observer.as_deref_mut(), b)
        })
    }

    /// The `rows`, of which the first `real` are no padding.
    fn forward_part(
        &self,
        rows: Range<usize>,
        real: usize,
        mut observer: Option<&mut Observer<'_>>,
        b: &mut Buffers,
    ) -> Result<(), ForwardError> {
        let (d, len) = (self.gate.cols(), rows.len() * self.gate.rows());
        let x = &b.normed[rows.start * d..rows.end * d];
        if let Some(observe) = observer.as_deref_mut() {
            observe(LinearInput::GateUp, &x[..real * d]);
        }
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
        if let Some(observe) = observer {
            observe(LinearInput::Down, &x[..real * self.down.cols()]);
        }
        let out = &mut b.residual[rows.start * d..rows.end * d];
        let job = Job { linear: &self.down, out, accumulate: true };
        forward_fused([job], x, &mut b.quantized, &mut b.panel)
    }
}
