//! Causal self-attention with grouped key/value heads (Vaswani et al. 2017, "Attention Is All You Need", eq.
//! 1; Ainslie et al. 2023, "GQA"), rotary positions, and the norms that Qwen3 puts on the heads and BitNet
//! before the output projection.
//!
//! Reads `normed` `[rows, hidden]` and adds its result to `residual` `[rows, hidden]`.

use mantissa_kernels::{CausalAttention, kernels};

use crate::buffers::{Buffers, Sequences};
use crate::cache::LayerCache;
use crate::config::ModelConfig;
use crate::error::{ForwardError, LoadError};
use crate::graph::{LinearInput, LinearKind, prefix};
use crate::layer::{Observer, load_linear};
use crate::linear::{Job, Linear, forward_fused};
use crate::norm::RmsNorm;
use crate::source::WeightSource;

/// The attention of one layer.
#[derive(Clone, Debug)]
pub struct Attention {
    /// Queries.
    pub q: Linear,
    /// Keys.
    pub k: Linear,
    /// Values.
    pub v: Linear,
    /// Output.
    pub o: Linear,
    /// Norms over each head of q and of k.
    pub head_norms: Option<(RmsNorm, RmsNorm)>,
    /// Norm of the joined heads before the output projection.
    pub sub_norm: Option<RmsNorm>,
    shape: CausalAttention,
}

impl Attention {
    /// Reads layer `layer`.
    ///
    /// # Errors
    /// As [`WeightSource`]'s.
    pub fn load(source: &dyn WeightSource, config: &ModelConfig, layer: usize) -> Result<Self, LoadError> {
        let linear = |kind| load_linear(source, &config.linear(layer, kind));
        let norm = |name: &str, width| {
            RmsNorm::load(source, &format!("{}self_attn.{name}", prefix(layer)), width, config.rms_norm_eps)
        };
        let head_norms = match config.has_head_norms() {
            true => Some((norm("q_norm", config.head_dim)?, norm("k_norm", config.head_dim)?)),
            false => None,
        };
        let sub_norm = match config.has_sub_norms() {
            true => Some(norm("attn_sub_norm", config.query_width())?),
            false => None,
        };
        Ok(Attention {
            q: linear(LinearKind::Q)?,
            k: linear(LinearKind::K)?,
            v: linear(LinearKind::V)?,
            o: linear(LinearKind::O)?,
            head_norms,
            sub_norm,
            shape: CausalAttention {
                heads: config.num_attention_heads,
                kv_heads: config.num_key_value_heads,
                head_dim: config.head_dim,
                scale: (config.head_dim as f64).powf(-0.5) as f32,
                window: config.windows[layer],
            },
        })
    }

    /// Adds the attention over `seqs` to `b.residual`. With `past`, there is one sequence and it continues
    /// what is cached.
    ///
    /// # Errors
    /// [`ForwardError::Input`].
    pub(crate) fn forward(
        &self,
        seqs: &Sequences<'_>,
        past: Option<&mut LayerCache>,
        mut observer: Option<&mut Observer<'_>>,
        b: &mut Buffers,
    ) -> Result<(), ForwardError> {
        if let Some(observe) = observer.as_deref_mut() {
            observe(LinearInput::Qkv, &b.normed[..seqs.tokens() * self.q.cols()]);
        }
        self.project(seqs.rows, b)?;
        self.norm_heads(seqs.rows, b);
        self.rotate(seqs, b);
        self.attend(seqs, past, b);
        self.output(seqs, observer, b)
    }

    fn project(&self, rows: usize, b: &mut Buffers) -> Result<(), ForwardError> {
        let (q_width, kv_width) = self.widths();
        let jobs = [
            Job { linear: &self.q, out: &mut b.q[..rows * q_width], accumulate: false },
            Job { linear: &self.k, out: &mut b.k[..rows * kv_width], accumulate: false },
            Job { linear: &self.v, out: &mut b.v[..rows * kv_width], accumulate: false },
        ];
        forward_fused(jobs, &b.normed[..rows * self.q.cols()], &mut b.quantized, &mut b.panel)
    }

    fn norm_heads(&self, rows: usize, b: &mut Buffers) {
        let Some((q_norm, k_norm)) = &self.head_norms else { return };
        let (q_width, kv_width) = self.widths();
        // `attended` is free until the heads attend, and at least as wide as the keys.
        for (norm, x, width) in [(q_norm, &mut b.q, q_width), (k_norm, &mut b.k, kv_width)] {
            let (x, normed) = (&mut x[..rows * width], &mut b.attended[..rows * width]);
            norm.forward(x, normed);
            x.copy_from_slice(normed);
        }
    }

    fn rotate(&self, seqs: &Sequences<'_>, b: &mut Buffers) {
        let head_dim = self.shape.head_dim;
        let half = head_dim / 2;
        let (q_width, kv_width) = self.widths();
        let mut first = 0;
        for &len in seqs.lens {
            let angles = seqs.start * half..(seqs.start + len) * half;
            let (cos, sin) = (&b.cos[angles.clone()], &b.sin[angles]);
            for (x, width) in [(&mut b.q, q_width), (&mut b.k, kv_width)] {
                let x = &mut x[first * width..(first + len) * width];
                kernels().rope_rotate(x, width / head_dim, head_dim, cos, sin);
            }
            first += len;
        }
    }

    fn attend(&self, seqs: &Sequences<'_>, mut past: Option<&mut LayerCache>, b: &mut Buffers) {
        let (q_width, kv_width) = self.widths();
        let mut first = 0;
        for &len in seqs.lens {
            let new = first * kv_width..(first + len) * kv_width;
            let (k, v) = (&b.k[new.clone()], &b.v[new]);
            let (k, v) = match &mut past {
                Some(past) => past.append(seqs.start, kv_width, k, v),
                None => (k, v),
            };
            let rows = first * q_width..(first + len) * q_width;
            let (q, out) = (&b.q[rows.clone()], &mut b.attended[rows]);
            kernels().attention_causal(&self.shape, q, k, v, out, &mut b.scores);
            first += len;
        }
        b.attended[first * q_width..seqs.rows * q_width].fill(0.0);
    }

    fn output(
        &self,
        seqs: &Sequences<'_>,
        observer: Option<&mut Observer<'_>>,
        b: &mut Buffers,
    ) -> Result<(), ForwardError> {
        let (rows, width) = (seqs.rows, seqs.rows * self.o.cols());
        let mut x = &b.attended[..width];
        if let Some(norm) = &self.sub_norm {
            norm.forward(x, &mut b.q[..width]);
            x = &b.q[..width];
        }
        if let Some(observe) = observer {
            observe(LinearInput::O, &x[..seqs.tokens() * self.o.cols()]);
        }
        let out = &mut b.residual[..rows * self.o.rows()];
        let job = Job { linear: &self.o, out, accumulate: true };
        forward_fused([job], x, &mut b.quantized, &mut b.panel)
    }

    fn widths(&self) -> (usize, usize) {
        (self.q.rows(), self.k.rows())
    }
}
