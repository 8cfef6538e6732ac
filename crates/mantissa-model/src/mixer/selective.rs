//! Mamba (Gu & Dao 2023, "Mamba: Linear-Time Sequence Modeling with Selective State Spaces", arXiv 2312.00752,
//! algorithm 2), with the norms of Jamba (Lieber et al. 2024, arXiv 2403.19887, sec. 6.4).
//!
//! For each channel with state `s` `[state]`, token by token:
//!
//! - `s ← exp(-Δ exp(A_log)) · s + B Δ x`, and `y = C·s + D x`,
//! - `(δ, B, C) = x_proj(x)`, each normed, and `Δ = softplus(dt_proj(δ))`,
//! - x is convolved over a few tokens and passes through SiLU; the result is `y · SiLU(z)`.
//!
//! Projections: x and z together `[2 · inner, hidden]`; `x_proj` `[rank + 2 · state, inner]` and `dt_proj`
//! `[inner, rank]` are small and stay unquantized.

use std::cell::RefCell;

use mantissa_kernels::kernels;

use super::convolution::Convolution;
use super::frame::{
    HeadStates, MOST_LINEARS, MixRows, Mixer, MixerLinear, StateShape, for_each_head, for_each_token,
    join_heads, matmuls, split_rows,
};
use super::gguf::{GgufAround, Uncomputed, check_biases, check_double};
use super::halves::{Mixing, all_have_mlp};
use super::rules::{Around, MAX_KERNEL, MixerRules, check_width, silu};
use crate::fields::{ConfigError, Fields, MAX_WIDTH};
use crate::operators::{Operators, Sequences};
use crate::program::{Op, View};
use mantissa_arch::kinds::{LinearKind, SideInfo, SideKind, VectorKind};
use serde_json::Value;

/// Sizes of a Mamba mixer.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct SelectiveScan {
    /// Width of the residual stream.
    pub hidden: usize,
    /// Channels.
    pub inner: usize,
    /// Values of a channel's state.
    pub state: usize,
    /// Width of δ.
    pub rank: usize,
    /// Tokens that the convolution covers.
    pub kernel: usize,
    /// True if the convolution has a bias.
    pub convolution_bias: bool,
    /// True if input and output projections have biases.
    pub bias: bool,
    /// Epsilon of the norms.
    pub eps: f32,
}

/// Mamba in all layers but those at `attn_layer_offset` of each `attn_layer_period` (Jamba).
pub(crate) const SELECTIVE_SCAN: MixerRules<SelectiveScan> = MixerRules {
    mixer,
    halves: |fields, layers| {
        let limits = 1..=u64::from(u32::MAX);
        let period = fields.optional_size("attn_layer_period", limits)?.unwrap_or(8);
        let offset = fields.optional_size("attn_layer_offset", 0..=period as u64 - 1)?.unwrap_or(4);
        let of = |layer| if layer % period == offset { Mixing::Attention } else { Mixing::Recurrent };
        Ok(all_have_mlp((0..layers).map(of).collect()))
    },
    layers: None,
};

fn mixer(fields: Fields<'_>, &Around { hidden, eps, .. }: &Around) -> Result<SelectiveScan, ConfigError> {
    let rank = match fields.get("mamba_dt_rank") {
        Some(Value::String(text)) if text == "auto" => None,
        _ => fields.optional_size("mamba_dt_rank", 1..=MAX_WIDTH)?,
    };
    let mixer = SelectiveScan {
        hidden,
        inner: fields.optional_size("mamba_expand", 1..=64)?.unwrap_or(2) * hidden,
        state: fields.optional_size("mamba_d_state", 1..=MAX_WIDTH)?.unwrap_or(16),
        rank: rank.unwrap_or(hidden.div_ceil(16)),
        kernel: fields.optional_size("mamba_d_conv", 1..=MAX_KERNEL)?.unwrap_or(4),
        convolution_bias: fields.flag("mamba_conv_bias", true)?,
        bias: fields.flag("mamba_proj_bias", false)?,
        eps,
    };
    check_width(fields, "mamba_d_state", mixer.inner, mixer.state)?;
    check_width(fields, "mamba_expand", 1, mixer.inner)?;
    silu(fields, "hidden_act")?;
    Ok(mixer)
}

/// Largest number of channels of a head, which runs as one task.
const CHANNELS: usize = 64;

thread_local! {
    /// State of a head without a cache, its `-exp(A_log)`, and its decays and inputs for one token.
    static HEAD: RefCell<Vec<f32>> = const { RefCell::new(Vec::new()) };
}

/// Scratch of a pass, `[rows, …]` each.
struct PassScratch<'a> {
    /// x and z as projected.
    projected: &'a mut [f32],
    /// x.
    inputs: &'a mut [f32],
    /// x after the convolution.
    convolved: &'a mut [f32],
    /// δ, B and C as projected.
    selected: &'a mut [f32],
    /// δ, normed.
    delta: &'a mut [f32],
    /// B and C, normed: `[rows, 2 · state]`.
    bc: &'a mut [f32],
    /// Δ, `[rows, inner]`.
    steps: &'a mut [f32],
    /// Results, `[heads, tokens, channels of a head]`.
    heads: &'a mut [f32],
}

impl SelectiveScan {
    /// Channels of a head: the most that divide all.
    fn channels(&self) -> usize {
        (1..=CHANNELS.min(self.inner)).rev().find(|n| self.inner.is_multiple_of(*n)).unwrap_or(1)
    }

    /// Width of δ, B and C together.
    fn selected(&self) -> usize {
        self.rank + 2 * self.state
    }

    /// Widths of the [`PassScratch`] of a row.
    fn widths(&self) -> [usize; 8] {
        let inner = self.inner;
        [2 * inner, inner, inner, self.selected(), self.rank, 2 * self.state, inner, inner]
    }

    fn parts<'a>(&self, rows: usize, scratch: &'a mut [f32]) -> PassScratch<'a> {
        let [projected, inputs, convolved, selected, delta, bc, steps, heads] =
            split_rows(rows, self.widths(), scratch);
        PassScratch { projected, inputs, convolved, selected, delta, bc, steps, heads }
    }

    /// Computes Δ, and norms B and C.
    fn select(&self, operators: &mut dyn Operators, p: &mut PassScratch<'_>) {
        operators.side(SideKind::Selection, p.convolved, p.selected);
        let vector = |kind| operators.vector(kind).unwrap_or(&[]);
        let weights = [VectorKind::StepNorm, VectorKind::WriteNorm, VectorKind::ReadNorm].map(vector);
        let rows = p.delta.chunks_exact_mut(self.rank).zip(p.bc.chunks_exact_mut(2 * self.state));
        for (from, (delta, bc)) in p.selected.chunks_exact(self.selected()).zip(rows) {
            let (d, rest) = from.split_at(self.rank);
            let (b, c) = rest.split_at(self.state);
            let (to_b, to_c) = bc.split_at_mut(self.state);
            for ((x, weight), out) in [d, b, c].into_iter().zip(weights).zip([delta, to_b, to_c]) {
                kernels().rms_norm(x, weight, self.eps, out);
            }
        }
        operators.side(SideKind::Step, p.delta, p.steps);
        p.steps.iter_mut().for_each(|x| *x = if *x > 20.0 { *x } else { x.exp().ln_1p() });
    }

    /// Runs the recurrence of head `head` over all sequences. `states` are the head's, `[slots, state · channels]`.
    fn head(
        &self,
        head: usize,
        seqs: &Sequences<'_>,
        states: HeadStates<'_>,
        (p, log, skip): (Inputs<'_>, &[f32], &[f32]),
        out: &mut [f32],
    ) {
        let (width, n) = (self.channels(), self.state);
        let (size, first) = (width * n, head * width);
        HEAD.with_borrow_mut(|scratch| {
            scratch.resize(scratch.len().max(3 * size + width), 0.0);
            let (own, rest) = scratch.split_at_mut(size);
            let (rates, rest) = rest.split_at_mut(size);
            let (decay, input) = rest.split_at_mut(size);
            for (i, rates) in rates.chunks_exact_mut(width).enumerate() {
                let log = log[first * n..].chunks_exact(n);
                rates.iter_mut().zip(log).for_each(|(rate, log)| *rate = -log[i].exp());
            }
            for_each_token(seqs, states, own, |row, state| {
                let at = row * self.inner + first..row * self.inner + first + width;
                let (x, step) = (&p.convolved[at.clone()], &p.steps[at]);
                let out = &mut out[row * width..(row + 1) * width];
                let bc = &p.bc[2 * row * n..2 * (row + 1) * n];
                for (decay, rates) in decay.chunks_exact_mut(width).zip(rates.chunks_exact(width)) {
                    decay.iter_mut().zip(rates).zip(step).for_each(|((d, rate), step)| *d = rate * step);
                }
                kernels().exp_inplace(decay);
                input.iter_mut().zip(x).zip(step).for_each(|((input, x), step)| *input = x * step);
                let skip = skip[first..].iter().zip(x);
                out.iter_mut().zip(skip).for_each(|(out, (skip, x))| *out = skip * x);
                let rows = state.chunks_exact_mut(width).zip(decay.chunks_exact(width));
                for ((state, decay), (b, c)) in rows.zip(bc[..n].iter().zip(&bc[n..])) {
                    let values = state.iter_mut().zip(decay).zip(input.iter().zip(&mut *out));
                    for ((s, decay), (x, out)) in values {
                        *s = *s * decay + b * x;
                        *out += c * *s;
                    }
                }
            });
        });
    }
}

/// Inputs of [`SelectiveScan::head`].
#[derive(Clone, Copy)]
struct Inputs<'a> {
    convolved: &'a [f32],
    steps: &'a [f32],
    bc: &'a [f32],
}

impl Mixer for SelectiveScan {
    fn name(&self) -> &'static str {
        "Mamba"
    }

    fn linears(&self) -> [Option<MixerLinear>; MOST_LINEARS] {
        let linear = |kind, rows, cols| Some(MixerLinear { kind, rows, cols, bias: self.bias });
        [
            linear(LinearKind::MixIn, 2 * self.inner, self.hidden),
            None,
            None,
            linear(LinearKind::MixOut, self.hidden, self.inner),
        ]
    }

    fn sides(&self) -> Vec<SideInfo> {
        vec![
            SideInfo { kind: SideKind::Selection, rows: self.selected(), cols: self.inner, bias: false },
            SideInfo { kind: SideKind::Step, rows: self.inner, cols: self.rank, bias: true },
        ]
    }

    fn vectors(&self) -> Vec<(VectorKind, Vec<usize>)> {
        let bias = (VectorKind::ConvolutionBias, vec![self.inner]);
        let mut all = vec![(VectorKind::Convolution, vec![self.inner, 1, self.kernel])];
        all.extend(self.convolution_bias.then_some(bias));
        all.extend([
            (VectorKind::DecayLog, vec![self.inner, self.state]),
            (VectorKind::Skip, vec![self.inner]),
            (VectorKind::StepNorm, vec![self.rank]),
            (VectorKind::WriteNorm, vec![self.state]),
            (VectorKind::ReadNorm, vec![self.state]),
        ]);
        all
    }

    fn state(&self, _: usize) -> StateShape {
        let width = self.channels();
        let heads = self.inner / width;
        StateShape { tail: (self.kernel - 1) * self.inner, grows: 0, heads, head: width * self.state }
    }

    fn width(&self) -> usize {
        self.inner
    }

    fn scratch(&self) -> usize {
        self.widths().iter().sum()
    }

    fn project(&self, x: View, ops: &mut Vec<Op>) {
        let [projected, ..] = View::scratch(self.widths());
        ops.push(matmuls(x, [(LinearKind::MixIn, projected)]));
    }

    fn mix(&self, operators: &mut dyn Operators, rows: MixRows<'_>) {
        let MixRows { seqs, mut states, threads, scratch, out, .. } = rows;
        let (tokens, inner) = (seqs.tokens(), self.inner);
        let (out, padding) = out[..seqs.rows * inner].split_at_mut(tokens * inner);
        padding.fill(0.0);
        if tokens == 0 {
            return;
        }
        let mut p = self.parts(seqs.rows, scratch);
        for (from, to) in p.projected.chunks_exact(2 * inner).zip(p.inputs.chunks_exact_mut(inner)) {
            to.copy_from_slice(&from[..inner]);
        }
        let convolution = Convolution::of(operators, inner);
        let (convolved, rest) = p.convolved.split_at_mut(tokens * inner);
        convolution.run_silu(seqs, states.as_mut(), threads, p.inputs, convolved);
        // Products of padded rows have the bits of those of any other number of rows.
        rest.fill(0.0);
        self.select(operators, &mut p);
        let inputs = Inputs { convolved: p.convolved, steps: p.steps, bc: p.bc };
        let vector = |kind| operators.vector(kind).unwrap_or(&[]);
        let (log, skip) = (vector(VectorKind::DecayLog), vector(VectorKind::Skip));
        let width = self.channels();
        let results = (&mut p.heads[..tokens * inner], tokens * width);
        for_each_head(threads, (states, self.state(0).head), results, |head, states, out| {
            self.head(head, seqs, states, (inputs, log, skip), out);
        });
        // Read by the convolution, and free since.
        let y = &mut p.inputs[..inner];
        for (row, out) in out.chunks_exact_mut(inner).enumerate() {
            join_heads(p.heads, tokens, row, width, y);
            kernels().silu_mul(&p.projected[(2 * row + 1) * inner..2 * (row + 1) * inner], y, out);
        }
    }

    fn gguf_numbers(&self) -> Vec<(&'static str, usize)> {
        vec![
            ("ssm.conv_kernel", self.kernel),
            ("ssm.state_size", self.state),
            ("ssm.inner_size", self.inner),
            ("ssm.time_step_rank", self.rank),
        ]
    }

    fn check_gguf(&self, around: &GgufAround) -> Result<(), Uncomputed> {
        check_double(self.inner, around.hidden)?;
        check_biases(("mamba_proj_bias", self.bias), ("mamba_conv_bias", self.convolution_bias))
    }
}
