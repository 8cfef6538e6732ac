//! Gated DeltaNet (Yang et al. 2024, "Gated Delta Networks", arXiv 2412.06464, eq. 10), as in Qwen3-Next and Qwen3.5.
//!
//! For each head with state `S` `[key_dim, value_dim]`, token by token:
//!
//! - `S ← α S + k ⊗ β (v - Sᵀ k)` on the decayed `S`, and `o = Sᵀ q`,
//! - `α = exp(-exp(A_log) · softplus(a + dt_bias))`, `β = sigmoid(b)`,
//! - q, k and v are convolved over four tokens and pass through SiLU; q and k then have unit length, and q is divided
//!   by `sqrt(key_dim)`,
//! - the result is `RMSNorm(o) · SiLU(z)`, with one weight `[value_dim]` for all heads.
//!
//! Projections: q, k, v and z together `[2 · key_heads · key_dim + 2 · value_heads · value_dim, hidden]`, and b and a,
//! one number each per value head. A key head serves consecutive value heads.

use std::cell::RefCell;

use mantissa_kernels::{for_each, kernels};
use mantissa_store::convention::gguf::DeltaHeads;

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
use crate::program::{Columns, Op, View};
use mantissa_arch::kinds::{LinearKind, SideInfo, SideKind, VectorKind};

/// Sizes of a gated DeltaNet.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct GatedDelta {
    /// Width of the residual stream.
    pub hidden: usize,
    /// Heads of queries and of keys; they divide the value heads.
    pub key_heads: usize,
    /// Heads of values and states.
    pub value_heads: usize,
    /// Width of a head of queries and keys.
    pub key_dim: usize,
    /// Width of a head of values.
    pub value_dim: usize,
    /// Tokens that the convolution covers.
    pub kernel: usize,
    /// Epsilon of the norm of the result.
    pub eps: f32,
    /// True if q, k, v and z are one projection, ordered by key head, and b and a another (Qwen3-Next).
    pub joined: bool,
}

/// Gated DeltaNet in layers whose `layer_types` is `linear_attention`, or else in all but the last of each
/// `full_attention_interval` (4).
pub(crate) const GATED_DELTA: MixerRules<GatedDelta> = rules(false);
/// [`GATED_DELTA`] with q, k, v and z in one projection, and b and a in another.
pub(crate) const JOINED_GATED_DELTA: MixerRules<GatedDelta> = rules(true);

const fn rules(joined: bool) -> MixerRules<GatedDelta> {
    MixerRules {
        mixer: if joined {
            |fields, around| mixer(fields, around, true)
        } else {
            |fields, around| mixer(fields, around, false)
        },
        halves: |fields, layers| {
            let mixing = by_layer_type(fields, "linear_attention", layers, || {
                let limits = 1..=u64::from(u32::MAX);
                let interval = fields.optional_size("full_attention_interval", limits)?.unwrap_or(4);
                Ok((1..=layers).map(|layer| !layer.is_multiple_of(interval)).collect())
            })?;
            Ok(all_have_mlp(mixing))
        },
        layers: None,
    }
}

fn mixer(
    fields: Fields<'_>,
    &Around { hidden, eps, .. }: &Around,
    joined: bool,
) -> Result<GatedDelta, ConfigError> {
    let size = |field, default| Ok(fields.optional_size(field, 1..=MAX_WIDTH)?.unwrap_or(default));
    let mixer = GatedDelta {
        hidden,
        key_heads: size("linear_num_key_heads", 16)?,
        value_heads: size("linear_num_value_heads", 32)?,
        key_dim: size("linear_key_head_dim", 128)?,
        value_dim: size("linear_value_head_dim", 128)?,
        kernel: fields.optional_size("linear_conv_kernel_dim", 1..=MAX_KERNEL)?.unwrap_or(4),
        eps,
        joined,
    };
    if !mixer.value_heads.is_multiple_of(mixer.key_heads) {
        let allowed = format!("a multiple of linear_num_key_heads, which is {}", mixer.key_heads);
        return Err(fields.error("linear_num_value_heads", allowed));
    }
    check_width(fields, "linear_key_head_dim", mixer.key_heads, mixer.key_dim)?;
    check_width(fields, "linear_value_head_dim", mixer.value_heads, mixer.value_dim)?;
    check_width(fields, "linear_value_head_dim", mixer.key_dim, mixer.value_dim)?;
    // The convolution has the activation of the MLP, the gate of the result always SiLU.
    silu(fields, "hidden_act")?;
    Ok(mixer)
}

/// Epsilon of the lengths of queries and keys.
const UNIT_EPS: f32 = 1e-6;
/// Rows of a task that norms and gates.
const ROWS: usize = 64;

thread_local! {
    /// State of a head without a cache, and its vectors for one token.
    static HEAD: RefCell<Vec<f32>> = const { RefCell::new(Vec::new()) };
}

/// Scratch of a pass, `[rows, …]` each.
struct PassScratch<'a> {
    /// All queries, all keys, all values.
    qkv: &'a mut [f32],
    /// Gate of the result.
    z: &'a mut [f32],
    /// `qkv` after the convolution.
    convolved: &'a mut [f32],
    /// b, then β; `[rows, value_heads]`.
    beta: &'a mut [f32],
    /// a, then α; `[rows, value_heads]`.
    decay: &'a mut [f32],
    /// Results, `[value_heads, tokens, value_dim]`.
    heads: &'a mut [f32],
}

impl GatedDelta {
    fn key_width(&self) -> usize {
        self.key_heads * self.key_dim
    }

    fn value_width(&self) -> usize {
        self.value_heads * self.value_dim
    }

    /// Width of q, k and v together, the channels of the convolution.
    fn channels(&self) -> usize {
        2 * self.key_width() + self.value_width()
    }

    /// Value heads of a key head.
    fn group(&self) -> usize {
        self.value_heads / self.key_heads
    }

    /// Widths of a row: q, k, v and z as projected, if joined; q, k and v; z; the former after the convolution; β; α; b
    /// and a as projected, if joined; results.
    fn widths(&self) -> [usize; 8] {
        let (channels, values, heads) = (self.channels(), self.value_width(), self.value_heads);
        let joined = |width: usize| if self.joined { width } else { 0 };
        [joined(channels + values), channels, values, channels, heads, heads, joined(2 * heads), values]
    }

    fn parts<'a>(&self, rows: usize, scratch: &'a mut [f32]) -> PassScratch<'a> {
        let [_, qkv, z, convolved, beta, decay, _, heads] = split_rows(rows, self.widths(), scratch);
        PassScratch { qkv, z, convolved, beta, decay, heads }
    }

    /// Splits joined projections: for each key head its query, its key, its values and their gates; then b and a of
    /// its value heads.
    fn split(
        &self,
        projected: View,
        [qkv, z]: [View; 2],
        ops: &mut Vec<Op>,
        (rates, of_rates): (View, [View; 2]),
    ) {
        let (dk, values, groups) = (self.key_dim, self.group() * self.value_dim, self.key_heads);
        let (keys, stride) = (self.key_width(), 2 * (dk + values));
        let part = |from, out, to, count| {
            Op::CopyColumns(Columns::new(projected, (from, stride), out, (to, count), [groups, count]))
        };
        ops.extend([
            part(0, qkv, 0, dk),
            part(dk, qkv, keys, dk),
            part(2 * dk, qkv, 2 * keys, values),
            part(2 * dk + values, z, 0, values),
        ]);
        let group = self.group();
        ops.extend(of_rates.into_iter().enumerate().map(|(i, out)| {
            let columns = (i * group, 2 * group);
            Op::CopyColumns(Columns::new(rates, columns, out, (0, group), [groups, group]))
        }));
    }

    /// Turns b into β and a into α.
    fn rates(&self, operators: &dyn Operators, p: &mut PassScratch<'_>) {
        let vector = |kind| operators.vector(kind).unwrap_or(&[]);
        let (log, bias) = (vector(VectorKind::DecayLog), vector(VectorKind::StepBias));
        let rows = p.beta.chunks_exact_mut(self.value_heads).zip(p.decay.chunks_exact_mut(self.value_heads));
        for (beta, decay) in rows {
            beta.iter_mut().for_each(|b| *b = (1.0 / (1.0 + (-f64::from(*b)).exp())) as f32);
            for (a, (log, bias)) in decay.iter_mut().zip(log.iter().zip(bias)) {
                let step = softplus(f64::from(*a) + f64::from(*bias));
                *a = (-f64::from(*log).exp() * step).exp() as f32;
            }
        }
    }

    /// Runs the recurrence of value head `head` over all sequences. `states` are the head's, `[slots, state]`.
    fn head(
        &self,
        head: usize,
        seqs: &Sequences<'_>,
        states: HeadStates<'_>,
        (convolved, beta, decay): (&[f32], &[f32], &[f32]),
        out: &mut [f32],
    ) {
        let (dk, dv, key) = (self.key_dim, self.value_dim, head / self.group() * self.key_dim);
        let (keys, size) = (self.key_width(), self.key_dim * self.value_dim);
        let (k_at, v_at) = (keys + key, 2 * keys + head * dv);
        HEAD.with_borrow_mut(|scratch| {
            scratch.resize(scratch.len().max(size + 2 * dk + dv), 0.0);
            let (own, rest) = scratch.split_at_mut(size);
            let (q, rest) = rest.split_at_mut(dk);
            let (k, rest) = rest.split_at_mut(dk);
            for_each_token(seqs, states, own, |row, state| {
                let x = &convolved[row * self.channels()..(row + 1) * self.channels()];
                unit(&x[key..key + dk], UNIT_EPS, (dk as f32).sqrt().recip(), q);
                unit(&x[k_at..k_at + dk], UNIT_EPS, 1.0, k);
                let at = row * self.value_heads + head;
                let (qkv, out) = ([&*q, &*k, &x[v_at..v_at + dv]], &mut out[row * dv..(row + 1) * dv]);
                kernels().delta_rule_step(state, qkv, decay[at], beta[at], &mut rest[..dv], out);
            });
        });
    }

    /// Norms and gates the results into rows of `out`. `normed` is scratch as large as `out`.
    fn finish(&self, weight: &[f32], p: Finish<'_>, out: &mut [f32], threads: usize) {
        let (dv, width) = (self.value_dim, self.value_width());
        let tokens = out.len() / width;
        let pieces = out.chunks_mut(ROWS * width).zip(p.normed.chunks_mut(ROWS * width));
        let pieces = pieces.zip(p.z.chunks(ROWS * width)).enumerate();
        for_each(threads, pieces, |(piece, ((out, normed), z))| {
            for (row, out) in (piece * ROWS..).zip(out.chunks_exact_mut(width)) {
                join_heads(p.heads, tokens, row, dv, out);
            }
            let normed = &mut normed[..out.len()];
            kernels().rms_norm(out, weight, self.eps, normed);
            kernels().silu_mul(&z[..out.len()], normed, out);
        });
    }
}

/// Inputs of [`GatedDelta::finish`].
struct Finish<'a> {
    heads: &'a [f32],
    z: &'a [f32],
    normed: &'a mut [f32],
}

impl Mixer for GatedDelta {
    fn name(&self) -> &'static str {
        "gated DeltaNet"
    }

    fn linears(&self) -> [Option<MixerLinear>; MOST_LINEARS] {
        let (channels, values) = (self.channels(), self.value_width());
        let linear = |kind, rows, cols| MixerLinear { kind, rows, cols, bias: false };
        let gate = linear(LinearKind::MixGate, values, self.hidden);
        let first = if self.joined { channels + values } else { channels };
        [
            Some(linear(LinearKind::MixIn, first, self.hidden)),
            (!self.joined).then_some(gate),
            None,
            Some(linear(LinearKind::MixOut, self.hidden, values)),
        ]
    }

    fn sides(&self) -> Vec<SideInfo> {
        let one = |kind| side(kind, self.value_heads, self.hidden);
        match self.joined {
            true => vec![side(SideKind::Rates, 2 * self.value_heads, self.hidden)],
            false => vec![one(SideKind::WriteRate), one(SideKind::DecayRate)],
        }
    }

    fn vectors(&self) -> Vec<(VectorKind, Vec<usize>)> {
        vec![
            (VectorKind::Convolution, vec![self.channels(), 1, self.kernel]),
            (VectorKind::StepBias, vec![self.value_heads]),
            (VectorKind::DecayLog, vec![self.value_heads]),
            (VectorKind::MixNorm, vec![self.value_dim]),
        ]
    }

    fn state(&self, _: usize) -> StateShape {
        StateShape {
            tail: (self.kernel - 1) * self.channels(),
            grows: 0,
            heads: self.value_heads,
            head: self.key_dim * self.value_dim,
        }
    }

    fn width(&self) -> usize {
        self.value_width()
    }

    fn scratch(&self) -> usize {
        self.widths().iter().sum()
    }

    fn project(&self, x: View, ops: &mut Vec<Op>) {
        let [projected, qkv, z, _, beta, decay, rates, _] = View::scratch(self.widths());
        if self.joined {
            ops.push(Op::Side { side: SideKind::Rates, x, out: rates });
            ops.push(matmuls(x, [(LinearKind::MixIn, projected)]));
            return self.split(projected, [qkv, z], ops, (rates, [beta, decay]));
        }
        ops.push(Op::Side { side: SideKind::WriteRate, x, out: beta });
        ops.push(Op::Side { side: SideKind::DecayRate, x, out: decay });
        ops.push(matmuls(x, [(LinearKind::MixIn, qkv), (LinearKind::MixGate, z)]));
    }

    fn mix(&self, operators: &mut dyn Operators, rows: MixRows<'_>) {
        let MixRows { seqs, mut states, threads, scratch, out, .. } = rows;
        let (tokens, width) = (seqs.tokens(), self.value_width());
        let (out, padding) = out[..seqs.rows * width].split_at_mut(tokens * width);
        padding.fill(0.0);
        if tokens == 0 {
            return;
        }
        let mut p = self.parts(seqs.rows, scratch);
        let vector = |kind| operators.vector(kind).unwrap_or(&[]);
        let convolution = Convolution::of(operators, self.channels());
        let convolved = &mut p.convolved[..tokens * self.channels()];
        convolution.run_silu(seqs, states.as_mut(), threads, p.qkv, convolved);
        self.rates(operators, &mut p);
        let inputs = (&*p.convolved, &*p.beta, &*p.decay);
        let results = (&mut p.heads[..tokens * width], tokens * self.value_dim);
        for_each_head(threads, (states, self.state(0).head), results, |head, states, out| {
            self.head(head, seqs, states, inputs, out);
        });
        // Read by the convolution, and free since.
        let normed = &mut p.qkv[..tokens * width];
        let finish = Finish { heads: p.heads, z: p.z, normed };
        self.finish(vector(VectorKind::MixNorm), finish, out, threads);
    }

    fn gguf_numbers(&self) -> Vec<(&'static str, usize)> {
        vec![
            ("ssm.conv_kernel", self.kernel),
            ("ssm.state_size", self.key_dim),
            ("ssm.group_count", self.key_heads),
            ("ssm.time_step_rank", self.value_heads),
            ("ssm.inner_size", self.value_width()),
        ]
    }

    fn check_gguf(&self, _: &GgufAround) -> Result<(), Uncomputed> {
        if self.key_dim != self.value_dim {
            let allowed = format!("linear_key_head_dim, {}: llama.cpp has one width", self.key_dim);
            return Err(Uncomputed::new("linear_value_head_dim", self.value_dim, allowed));
        }
        if self.eps != UNIT_EPS {
            let allowed = "1e-6, the epsilon of q and k in the mixer: llama.cpp has one for all";
            return Err(Uncomputed::new("rms_norm_eps", self.eps, allowed));
        }
        Ok(())
    }

    fn delta_heads(&self) -> Option<DeltaHeads> {
        Some(DeltaHeads {
            keys: self.key_heads,
            values: self.value_heads,
            key_dim: self.key_dim,
            value_dim: self.value_dim,
            tiled: false,
        })
    }
}
