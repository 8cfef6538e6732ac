//! Kimi delta attention (Kimi Team 2025, "Kimi Linear", arXiv 2510.26692, eq. 1): gated DeltaNet with a decay for each
//! channel of the keys.
//!
//! For each head with state `S` `[head_dim, head_dim]`, token by token:
//!
//! - `S ← Diag(α) S + k ⊗ β (v - Sᵀ k)` on the decayed `S`, and `o = Sᵀ q`,
//! - `α = exp(-exp(A_log) · softplus(f + dt_bias))` for each channel, `β = sigmoid(b)`,
//! - q, k and v are each convolved over a few tokens and pass through SiLU; q and k then have unit length, and q is
//!   divided by `sqrt(head_dim)`,
//! - the result is `RMSNorm(o) · sigmoid(g)`, with one weight `[head_dim]` for all heads.
//!
//! Projections: q, k and v `[heads · head_dim, hidden]` each; f and g through latents `[head_dim, hidden]`, and b, one
//! number per head, are small and stay unquantized.

use std::cell::RefCell;

use mantissa_kernels::{for_each, kernels};

use super::convolution::Convolution;
use super::frame::{
    HeadStates, MOST_LINEARS, MixRows, Mixer, MixerLinear, StateShape, for_each_head, for_each_token,
    join_heads, matmuls, side, softplus, split_rows, unit,
};
use super::gguf::{GgufAround, Uncomputed};
use super::halves::all_have_mlp;
use super::rules::{Around, MAX_KERNEL, MixerRules, by_layer_type, check_width, silu};
use crate::fields::{ConfigError, Fields, MAX_WIDTH};
use crate::operators::{Operators, Sequences};
use crate::program::{Op, View};
use mantissa_arch::kinds::{LinearKind, SideInfo, SideKind, VectorKind};

/// Sizes of Kimi delta attention.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct ChannelDelta {
    /// Width of the residual stream.
    pub hidden: usize,
    /// Heads.
    pub heads: usize,
    /// Width of a head of queries, keys and values.
    pub head_dim: usize,
    /// Tokens that the convolutions cover.
    pub kernel: usize,
    /// Epsilon of the norm of the result.
    pub eps: f32,
}

/// Kimi delta attention in layers whose `layer_types` is `linear_attention`, or in the `kda_layers` of
/// `linear_attn_config`, counted from 1; else in all but every fourth layer, which is not the first (Kimi Linear).
pub(crate) const CHANNEL_DELTA: MixerRules<ChannelDelta> = MixerRules {
    mixer,
    halves: |fields, layers| {
        let mixing = by_layer_type(fields, "linear_attention", layers, || match nested(fields)? {
            Some(nested) => {
                let recurrent = nested.tokens("kda_layers")?;
                Ok((1..=layers).map(|layer| recurrent.iter().any(|at| *at as usize == layer)).collect())
            }
            None => Ok((0..layers).map(|layer| layer == 0 || !layer.is_multiple_of(4)).collect()),
        })?;
        Ok(all_have_mlp(mixing))
    },
    layers: None,
};

/// Fields of the published checkpoints.
fn nested<'a>(fields: Fields<'a>) -> Result<Option<Fields<'a>>, ConfigError> {
    fields.object("linear_attn_config")
}

/// Parses the mixer by the fields of transformers, or by those of the published checkpoints.
fn mixer(fields: Fields<'_>, &Around { hidden, eps, .. }: &Around) -> Result<ChannelDelta, ConfigError> {
    let nested = nested(fields)?;
    let size = |own: &str, inner: &str, most, default| match nested {
        Some(nested) => Ok(nested.optional_size(inner, 1..=most)?.unwrap_or(default)),
        None => Ok(fields.optional_size(own, 1..=most)?.unwrap_or(default)),
    };
    let mixer = ChannelDelta {
        hidden,
        heads: size("linear_num_heads", "num_heads", MAX_WIDTH, 32)?,
        head_dim: size("linear_head_dim", "head_dim", MAX_WIDTH, 128)?,
        kernel: size("linear_conv_kernel_dim", "short_conv_kernel_size", MAX_KERNEL, 4)?,
        eps,
    };
    check_width(fields, "linear_num_heads", mixer.head_dim, mixer.heads)?;
    check_width(fields, "linear_head_dim", mixer.head_dim, mixer.head_dim)?;
    silu(fields, "hidden_act")?;
    Ok(mixer)
}

/// Epsilon of the lengths of queries and keys.
const UNIT_EPS: f32 = 1e-6;
/// Rows of a task that norms and gates.
const ROWS: usize = 64;
/// Weights of the convolutions of queries, keys and values.
const CONVOLUTIONS: [VectorKind; 3] =
    [VectorKind::QueryConvolution, VectorKind::KeyConvolution, VectorKind::ValueConvolution];

thread_local! {
    /// State of a head without a cache, and its vectors for one token.
    static HEAD: RefCell<Vec<f32>> = const { RefCell::new(Vec::new()) };
}

/// Scratch of a pass, `[rows, …]` each.
struct PassScratch<'a> {
    /// Queries, keys and values as projected.
    projected: [&'a mut [f32]; 3],
    /// The same after the convolutions.
    convolved: [&'a mut [f32]; 3],
    /// b, then β; `[rows, heads]`.
    beta: &'a mut [f32],
    /// f.
    decay: &'a mut [f32],
    /// g.
    gate: &'a mut [f32],
    /// Results, `[heads, tokens, head_dim]`.
    heads: &'a mut [f32],
}

/// Inputs of a head.
#[derive(Clone, Copy)]
struct Inputs<'a> {
    /// Queries, keys and values, `[tokens, heads · head_dim]`.
    qkv: [&'a [f32]; 3],
    /// β, `[tokens, heads]`.
    beta: &'a [f32],
    /// f, `[tokens, heads · head_dim]`.
    decay: &'a [f32],
    /// `A_log` `[heads]` and `dt_bias` `[heads · head_dim]`.
    log: &'a [f32],
    bias: &'a [f32],
}

impl ChannelDelta {
    fn inner(&self) -> usize {
        self.heads * self.head_dim
    }

    /// Widths of the [`PassScratch`] of a row.
    fn widths(&self) -> [usize; 12] {
        let (inner, d) = (self.inner(), self.head_dim);
        [inner, inner, inner, inner, inner, inner, self.heads, d, inner, d, inner, inner]
    }

    fn parts<'a>(&self, rows: usize, scratch: &'a mut [f32]) -> PassScratch<'a> {
        let [q, k, v, to_q, to_k, to_v, beta, _, decay, _, gate, heads] =
            split_rows(rows, self.widths(), scratch);
        let (projected, convolved) = ([q, k, v], [to_q, to_k, to_v]);
        PassScratch { projected, convolved, beta, decay, gate, heads }
    }

    /// Runs the recurrence of head `head` over all sequences. `states` are the head's, `[slots, state]`.
    fn head(
        &self,
        head: usize,
        seqs: &Sequences<'_>,
        states: HeadStates<'_>,
        p: Inputs<'_>,
        out: &mut [f32],
    ) {
        let (d, size) = (self.head_dim, self.head_dim * self.head_dim);
        let channels = head * d..(head + 1) * d;
        let bias = p.bias.get(channels.clone()).unwrap_or(&[]);
        let rate = -f64::from(p.log.get(head).copied().unwrap_or(0.0)).exp();
        HEAD.with_borrow_mut(|scratch| {
            scratch.resize(scratch.len().max(size + 3 * d), 0.0);
            let (own, rest) = scratch.split_at_mut(size);
            let (q, rest) = rest.split_at_mut(d);
            let (k, delta) = rest.split_at_mut(d);
            for_each_token(seqs, states, own, |row, state| {
                let at = row * self.inner() + channels.start..row * self.inner() + channels.end;
                let [from_q, from_k, v] = p.qkv.map(|x| &x[at.clone()]);
                unit(from_q, UNIT_EPS, (d as f32).sqrt().recip(), q);
                unit(from_k, UNIT_EPS, 1.0, k);
                for (state, (f, bias)) in state.chunks_exact_mut(d).zip(p.decay[at].iter().zip(bias)) {
                    let decay = (rate * softplus(f64::from(*f) + f64::from(*bias))).exp() as f32;
                    state.iter_mut().for_each(|s| *s *= decay);
                }
                let out = &mut out[row * d..(row + 1) * d];
                let beta = p.beta[row * self.heads + head];
                kernels().delta_rule_step(state, [&*q, &*k, v], 1.0, beta, &mut delta[..d], out);
            });
        });
    }

    /// Norms and gates the results into rows of `out`. `joined` is scratch as large as `out`.
    fn finish(&self, weight: &[f32], p: Finish<'_>, out: &mut [f32], threads: usize) {
        let width = self.inner();
        let tokens = out.len() / width;
        let pieces = out.chunks_mut(ROWS * width).zip(p.joined.chunks_mut(ROWS * width));
        let pieces = pieces.zip(p.gate.chunks(ROWS * width)).enumerate();
        for_each(threads, pieces, |(piece, ((out, joined), gate))| {
            for (row, joined) in (piece * ROWS..).zip(joined.chunks_exact_mut(width)) {
                join_heads(p.heads, tokens, row, self.head_dim, joined);
            }
            kernels().rms_norm(joined, weight, self.eps, out);
            kernels().sigmoid_mul(&gate[..out.len()], out);
        });
    }
}

/// Inputs of [`ChannelDelta::finish`].
struct Finish<'a> {
    heads: &'a [f32],
    gate: &'a [f32],
    joined: &'a mut [f32],
}

impl Mixer for ChannelDelta {
    fn name(&self) -> &'static str {
        "Kimi delta attention"
    }

    fn linears(&self) -> [Option<MixerLinear>; MOST_LINEARS] {
        let linear = |kind, rows, cols| Some(MixerLinear { kind, rows, cols, bias: false });
        let input = |kind| linear(kind, self.inner(), self.hidden);
        let out = linear(LinearKind::MixOut, self.hidden, self.inner());
        [input(LinearKind::MixQ), input(LinearKind::MixK), input(LinearKind::MixV), out]
    }

    fn sides(&self) -> Vec<SideInfo> {
        let (d, inner) = (self.head_dim, self.inner());
        vec![
            side(SideKind::WriteRate, self.heads, self.hidden),
            side(SideKind::DecayLatent, d, self.hidden),
            side(SideKind::Decay, inner, d),
            side(SideKind::GateLatent, d, self.hidden),
            side(SideKind::Gate, inner, d),
        ]
    }

    fn vectors(&self) -> Vec<(VectorKind, Vec<usize>)> {
        let convolution = |kind| (kind, vec![self.inner(), 1, self.kernel]);
        let others = [
            (VectorKind::StepBias, vec![self.inner()]),
            (VectorKind::DecayLog, vec![1, 1, self.heads, 1]),
            (VectorKind::MixNorm, vec![self.head_dim]),
        ];
        CONVOLUTIONS.map(convolution).into_iter().chain(others).collect()
    }

    fn state(&self, _: usize) -> StateShape {
        StateShape {
            tail: 3 * (self.kernel - 1) * self.inner(),
            grows: 0,
            heads: self.heads,
            head: self.head_dim * self.head_dim,
        }
    }

    fn width(&self) -> usize {
        self.inner()
    }

    fn scratch(&self) -> usize {
        self.widths().iter().sum()
    }

    fn project(&self, x: View, ops: &mut Vec<Op>) {
        let [q, k, v, _, _, _, beta, decay_latent, decay, gate_latent, gate, _] =
            View::scratch(self.widths());
        ops.extend([
            Op::Side { side: SideKind::WriteRate, x, out: beta },
            Op::Side { side: SideKind::DecayLatent, x, out: decay_latent },
            Op::Side { side: SideKind::Decay, x: decay_latent, out: decay },
            Op::Side { side: SideKind::GateLatent, x, out: gate_latent },
            Op::Side { side: SideKind::Gate, x: gate_latent, out: gate },
            matmuls(x, [(LinearKind::MixQ, q), (LinearKind::MixK, k), (LinearKind::MixV, v)]),
        ]);
    }

    fn mix(&self, operators: &mut dyn Operators, rows: MixRows<'_>) {
        let MixRows { seqs, mut states, threads, scratch, out, .. } = rows;
        let (tokens, width) = (seqs.tokens(), self.inner());
        let (out, padding) = out[..seqs.rows * width].split_at_mut(tokens * width);
        padding.fill(0.0);
        if tokens == 0 {
            return;
        }
        let mut p = self.parts(seqs.rows, scratch);
        let vector = |kind| operators.vector(kind).unwrap_or(&[]);
        let all = CONVOLUTIONS.into_iter().zip(&p.projected).zip(&mut p.convolved).enumerate();
        for (i, ((kind, x), to)) in all {
            let part = (i, CONVOLUTIONS.len());
            let convolution = Convolution { weight: vector(kind), bias: None, channels: width, part };
            convolution.run_silu(seqs, states.as_mut(), threads, x, &mut to[..tokens * width]);
        }
        p.beta.iter_mut().for_each(|b| *b = (1.0 / (1.0 + (-f64::from(*b)).exp())) as f32);
        let inputs = Inputs {
            qkv: p.convolved.each_ref().map(|x| &**x),
            beta: p.beta,
            decay: p.decay,
            log: vector(VectorKind::DecayLog),
            bias: vector(VectorKind::StepBias),
        };
        let results = (&mut p.heads[..tokens * width], tokens * self.head_dim);
        for_each_head(threads, (states, self.state(0).head), results, |head, states, out| {
            self.head(head, seqs, states, inputs, out);
        });
        // Read by a convolution, and free since.
        let joined = &mut p.projected[0][..tokens * width];
        let finish = Finish { heads: p.heads, gate: p.gate, joined };
        self.finish(vector(VectorKind::MixNorm), finish, out, threads);
    }

    fn gguf_numbers(&self) -> Vec<(&'static str, usize)> {
        vec![("ssm.conv_kernel", self.kernel), ("kda.head_dim", self.head_dim)]
    }

    fn check_gguf(&self, around: &GgufAround) -> Result<(), Uncomputed> {
        if self.heads != around.heads {
            let allowed = format!("{}, as num_attention_heads: llama.cpp requires it", around.heads);
            return Err(Uncomputed::new("linear_num_heads", self.heads, allowed));
        }
        match around.q_rank {
            Some(rank) => {
                let allowed = "null: llama.cpp projects queries directly in this architecture";
                Err(Uncomputed::new("q_lora_rank", rank, allowed))
            }
            None => Ok(()),
        }
    }

    fn gguf_note(&self, eps: f32) -> Option<String> {
        (eps != UNIT_EPS).then(|| {
            format!("rms_norm_eps: llama.cpp has {eps} for q and k of mixers too, the model {UNIT_EPS}")
        })
    }
}
