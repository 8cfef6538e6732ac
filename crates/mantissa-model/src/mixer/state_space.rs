//! Mamba-2 (Dao & Gu 2024, "Transformers are SSMs", arXiv 2405.21060, eq. 1 with a scalar decay), as in Granite 4,
//! Nemotron-H and Falcon-H1.
//!
//! For each head with state `S` `[state, head_dim]`, token by token:
//!
//! - `S ← exp(-Δ exp(A_log)) S + B (Δ x)ᵀ`, and `y = Sᵀ C + D x`,
//! - `Δ = softplus(dt + dt_bias)`, within limits,
//! - x, B and C are convolved over a few tokens and pass through SiLU; a group of heads shares B and C,
//! - the result is `RMSNorm(y · SiLU(z))`, normed by group; in Falcon-H1 `RMSNorm(y) · SiLU(z)` or `y · SiLU(z)`.
//!
//! Projection: z `[inner]`, x `[inner]`, B `[groups · state]`, C `[groups · state]` and dt `[heads]` together, with
//! `inner = heads · head_dim`.

use std::cell::RefCell;

use mantissa_kernels::{for_each, kernels};
use mantissa_store::convention::gguf::LayerTypes;

use super::convolution::Convolution;
use super::frame::{
    HeadStates, MOST_LINEARS, MixRows, Mixer, MixerLinear, StateShape, for_each_head, for_each_token,
    join_heads, matmuls, softplus, split_rows, take,
};
use super::gguf::{GgufAround, Uncomputed, check_biases, check_double};
use super::halves::Mixing;
use super::halves::{Block, Halves, all_have_mlp, blocks};
use super::rules::{Around, MAX_KERNEL, MixerRules, by_layer_type, check_width, list, recurs_but_at, silu};
use crate::fields::{ConfigError, Fields, MAX_WIDTH};
use crate::operators::{Operators, Sequences};
use crate::program::{Op, View};
use mantissa_arch::kinds::{LinearKind, SideInfo, VectorKind};
use serde_json::Value;

/// Sizes of a Mamba-2 mixer.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct StateSpace {
    /// Width of the residual stream.
    pub hidden: usize,
    /// Heads.
    pub heads: usize,
    /// Width of a head.
    pub head_dim: usize,
    /// Groups of heads with the same B and C; they divide the heads.
    pub groups: usize,
    /// Rows of a head's state.
    pub state: usize,
    /// Tokens that the convolution covers.
    pub kernel: usize,
    /// True if the convolution has a bias.
    pub convolution_bias: bool,
    /// True if the projections have biases.
    pub bias: bool,
    /// Factors of z, x, B, C and dt (Falcon-H1).
    pub factors: Option<[f32; 5]>,
    /// Norm of the result.
    pub norm: ResultNorm,
    /// Limits of a step Δ.
    pub steps: (f32, f32),
    /// Epsilon of the norm of the result.
    pub eps: f32,
}

/// Norm of the result of a Mamba-2 mixer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ResultNorm {
    /// No norm: the result is only gated.
    None,
    /// Norms the gated result.
    AfterGate,
    /// Gates the normed result.
    BeforeGate,
}

/// Mamba-2 in layers that `layer_types` states, or else in those not in `attn_layer_indices`; every layer has an MLP.
pub(crate) const STATE_SPACE: MixerRules<StateSpace> = MixerRules {
    mixer: |fields, around| state_space(fields, around, &HYBRID),
    halves: |fields, layers| {
        let mixing = by_layer_type(fields, "linear_attention", layers, || {
            recurs_but_at(fields, "attn_layer_indices", layers)
        })?;
        Ok(all_have_mlp(mixing))
    },
    layers: None,
};
/// Mamba-2 where a layer is a mixer, attention, an MLP or experts alone, by `layers_block_type` or `hybrid_override_pattern`
/// (Nemotron-H).
pub(crate) const STATE_SPACE_BLOCKS: MixerRules<StateSpace> = MixerRules {
    mixer: |fields, around| state_space(fields, around, &BLOCKS),
    halves: |fields, _| {
        let mixing: Vec<_> = blocks(fields)?.into_iter().map(Block::mixing).collect();
        let has_mlp = mixing.iter().map(|mixing| *mixing == Mixing::None).collect();
        Ok(Halves { mixing, has_mlp })
    },
    layers: Some(|fields| Ok(blocks(fields)?.len())),
};
/// Mamba-2 in every layer, and nothing else (Mamba-2).
pub(crate) const STATE_SPACE_ALONE: MixerRules<StateSpace> = MixerRules {
    mixer: |fields, around| state_space(fields, around, &ALONE),
    halves: |_, layers| Ok(Halves { mixing: vec![Mixing::Recurrent; layers], has_mlp: vec![false; layers] }),
    layers: None,
};
/// Mamba-2 in every layer, beside attention on the same input (Falcon-H1).
pub(crate) const PARALLEL_STATE_SPACE: MixerRules<StateSpace> = MixerRules {
    mixer: |fields, around| parallel(fields, around),
    halves: |_, layers| Ok(all_have_mlp(vec![Mixing::Both; layers])),
    layers: None,
};

/// Defaults of sizes, and fields that state the rest.
struct Form {
    groups: usize,
    state: usize,
    head_dim: Option<usize>,
    /// True if the width follows from that of the model.
    expands: bool,
    /// True if `time_step_limit` limits the steps, false if `time_step_min` does.
    limited: bool,
    /// Field of the convolution's activation, which may be that of the MLP.
    activation: &'static str,
}

const HYBRID: Form =
    Form { groups: 1, state: 256, head_dim: None, expands: true, limited: true, activation: "hidden_act" };
const ALONE: Form = Form { groups: 8, state: 128, head_dim: Some(64), ..HYBRID };
const BLOCKS: Form = Form { expands: false, limited: false, activation: "mamba_hidden_act", ..ALONE };

fn state_space(
    fields: Fields<'_>,
    &Around { hidden, eps, .. }: &Around,
    form: &Form,
) -> Result<StateSpace, ConfigError> {
    let size = |field, default| Ok(fields.optional_size(field, 1..=MAX_WIDTH)?.unwrap_or(default));
    let heads = size("mamba_n_heads", 128)?;
    let head_dim = match fields.get("mamba_d_head") {
        Some(Value::String(text)) if text == "auto" => None,
        _ => fields.optional_size("mamba_d_head", 1..=MAX_WIDTH)?.or(form.head_dim),
    };
    let expanded = fields.optional_size("mamba_expand", 1..=64)?.unwrap_or(2) * hidden;
    let inner = fields.optional_size("mamba_d_ssm", 1..=MAX_WIDTH)?.unwrap_or(expanded);
    let head_dim = head_dim.unwrap_or(inner / heads);
    if head_dim == 0 || (form.expands && heads.saturating_mul(head_dim) != inner) {
        let allowed = format!("{inner} (mamba_d_ssm, or mamba_expand times hidden_size) / {heads} heads");
        return Err(fields.error("mamba_d_head", allowed));
    }
    let steps = match form.limited {
        true => step_limits(fields)?,
        false => (fields.optional_number("time_step_min")?.unwrap_or(0.001) as f32, f32::INFINITY),
    };
    let mixer = StateSpace {
        hidden,
        heads,
        head_dim,
        groups: size("mamba_n_groups", form.groups)?,
        state: size("mamba_d_state", form.state)?,
        kernel: fields.optional_size("mamba_d_conv", 1..=MAX_KERNEL)?.unwrap_or(4),
        convolution_bias: fields.flag("mamba_conv_bias", true)?,
        bias: fields.flag("mamba_proj_bias", false)?,
        factors: None,
        norm: ResultNorm::AfterGate,
        steps,
        eps,
    };
    if !mixer.heads.is_multiple_of(mixer.groups) {
        return Err(fields.error("mamba_n_groups", format!("a divisor of the {heads} heads")));
    }
    check_width(fields, "mamba_d_head", mixer.heads, mixer.head_dim)?;
    check_width(fields, "mamba_d_state", mixer.groups.max(mixer.head_dim), mixer.state)?;
    silu(fields, form.activation)?;
    Ok(mixer)
}

/// Mamba-2 of Falcon-H1: an optional norm, and factors of the projected values.
fn parallel(fields: Fields<'_>, around: &Around) -> Result<StateSpace, ConfigError> {
    let mixer = state_space(fields, around, &HYBRID)?;
    let norm = match (fields.flag("mamba_rms_norm", false)?, fields.flag("mamba_norm_before_gate", true)?) {
        (false, _) => ResultNorm::None,
        (true, true) => ResultNorm::BeforeGate,
        (true, false) => ResultNorm::AfterGate,
    };
    let input = fields.optional_number("ssm_in_multiplier")?.unwrap_or(1.0) as f32;
    let factors = Some(list(fields, "ssm_multipliers")?.map(|factor: f32| factor * input));
    Ok(StateSpace { factors, norm, ..mixer })
}

/// Parses `time_step_limit`: two numbers, the second of which may be infinite.
fn step_limits(fields: Fields<'_>) -> Result<(f32, f32), ConfigError> {
    let Some(value) = fields.get("time_step_limit") else { return Ok((0.0, f32::INFINITY)) };
    // Infinity is no number in JSON; transformers writes it as an object or a string.
    let limit = |value: &Value| match value {
        Value::Object(object) => object.get("__float__").and_then(Value::as_str)?.parse::<f32>().ok(),
        Value::String(text) => text.parse::<f32>().ok(),
        value => value.as_f64().map(|limit| limit as f32),
    };
    match value.as_array().map(Vec::as_slice) {
        Some([low, high]) => match (limit(low), limit(high)) {
            (Some(low), Some(high)) if low <= high => Ok((low, high)),
            _ => Err(fields.error("time_step_limit", "two numbers, the smaller first")),
        },
        _ => Err(fields.error("time_step_limit", "two numbers, the smaller first")),
    }
}

/// Least time step of Nemotron-H that llama.cpp, which has no limit, is close enough to.
const LEAST_STEP: f32 = 0.001;
/// Rows of a task that gates and norms.
const ROWS: usize = 64;

thread_local! {
    /// State of a head without a cache, and its input for one token.
    static HEAD: RefCell<Vec<f32>> = const { RefCell::new(Vec::new()) };
}

/// Scratch of a pass, `[rows, …]` each.
struct PassScratch<'a> {
    /// z, x, B, C and dt as projected.
    projected: &'a mut [f32],
    /// x, B and C.
    inputs: &'a mut [f32],
    /// `inputs` after the convolution.
    convolved: &'a mut [f32],
    /// Δ, `[rows, heads]`.
    steps: &'a mut [f32],
    /// Decays, `[rows, heads]`.
    decay: &'a mut [f32],
    /// Results, `[heads, tokens, head_dim]`.
    heads: &'a mut [f32],
}

impl StateSpace {
    fn inner(&self) -> usize {
        self.heads * self.head_dim
    }

    /// Channels of the convolution: x, B and C.
    fn channels(&self) -> usize {
        self.inner() + 2 * self.groups * self.state
    }

    fn projected(&self) -> usize {
        self.inner() + self.channels() + self.heads
    }

    /// Widths of the [`PassScratch`] of a row.
    fn widths(&self) -> [usize; 6] {
        [self.projected(), self.channels(), self.channels(), self.heads, self.heads, self.inner()]
    }

    fn parts<'a>(&self, rows: usize, scratch: &'a mut [f32]) -> PassScratch<'a> {
        let [projected, inputs, convolved, steps, decay, heads] = split_rows(rows, self.widths(), scratch);
        PassScratch { projected, inputs, convolved, steps, decay, heads }
    }

    /// Multiplies the projected values by their factors.
    fn scale(&self, projected: &mut [f32]) {
        let Some(factors) = self.factors else { return };
        let states = self.groups * self.state;
        let widths = [self.inner(), self.inner(), states, states, self.heads];
        for mut row in projected.chunks_exact_mut(self.projected()) {
            for (width, factor) in widths.into_iter().zip(factors) {
                take(&mut row, width).iter_mut().for_each(|x| *x *= factor);
            }
        }
    }

    /// Separates the inputs of the convolution, and computes steps and decays.
    fn split(&self, operators: &dyn Operators, p: &mut PassScratch<'_>) {
        let vector = |kind| operators.vector(kind).unwrap_or(&[]);
        let (log, bias) = (vector(VectorKind::DecayLog), vector(VectorKind::StepBias));
        let (first, last) = (self.inner(), self.inner() + self.channels());
        self.scale(p.projected);
        let rates = p.steps.chunks_exact_mut(self.heads).zip(p.decay.chunks_exact_mut(self.heads));
        let rows = p.inputs.chunks_exact_mut(self.channels()).zip(rates);
        for (from, (inputs, (steps, decay))) in p.projected.chunks_exact(self.projected()).zip(rows) {
            inputs.copy_from_slice(&from[first..last]);
            let heads = from[last..].iter().zip(log.iter().zip(bias)).zip(steps.iter_mut().zip(decay));
            for ((dt, (log, bias)), (step, decay)) in heads {
                let value = softplus(f64::from(*dt) + f64::from(*bias)) as f32;
                // Keeps NaN.
                *step = value.clamp(self.steps.0, self.steps.1);
                *decay = (-f64::from(*log).exp() * f64::from(*step)).exp() as f32;
            }
        }
    }

    /// Runs the recurrence of head `head` over all sequences. `states` are the head's, `[slots, state · head_dim]`.
    fn head(
        &self,
        head: usize,
        seqs: &Sequences<'_>,
        states: HeadStates<'_>,
        (convolved, steps, decay, skip): (&[f32], &[f32], &[f32], f32),
        out: &mut [f32],
    ) {
        let (width, n, size) = (self.head_dim, self.state, self.state * self.head_dim);
        let b_at = self.inner() + head / (self.heads / self.groups) * n;
        let c_at = b_at + self.groups * n;
        HEAD.with_borrow_mut(|scratch| {
            scratch.resize(scratch.len().max(size + width), 0.0);
            let (own, input) = scratch.split_at_mut(size);
            let input = &mut input[..width];
            for_each_token(seqs, states, own, |row, state| {
                let from = &convolved[row * self.channels()..(row + 1) * self.channels()];
                let (at, x) = (row * self.heads + head, &from[head * width..(head + 1) * width]);
                input.iter_mut().zip(x).for_each(|(input, x)| *input = steps[at] * x);
                let out = &mut out[row * width..(row + 1) * width];
                let bc = [&from[b_at..b_at + n], &from[c_at..c_at + n]];
                kernels().state_space_step(state, bc, input, decay[at], out);
                kernels().axpy(skip, x, out);
            });
        });
    }

    /// Norms each group of a row of results.
    fn norm_groups(&self, weight: &[f32], x: &[f32], out: &mut [f32]) {
        let group = self.inner() / self.groups;
        let groups = x.chunks_exact(group).zip(weight.chunks_exact(group));
        for ((x, weight), out) in groups.zip(out.chunks_exact_mut(group)) {
            kernels().rms_norm(x, weight, self.eps, out);
        }
    }

    /// Gates and norms the results into rows of `out`. `gated` is scratch as large as `out`.
    fn finish(&self, weight: &[f32], p: Finish<'_>, out: &mut [f32], threads: usize) {
        let width = self.inner();
        let tokens = out.len() / width;
        let pieces = out.chunks_mut(ROWS * width).zip(p.gated.chunks_mut(ROWS * width)).enumerate();
        for_each(threads, pieces, |(piece, (out, gated))| {
            let rows = out.chunks_exact_mut(width).zip(gated.chunks_exact_mut(width));
            for (row, (out, gated)) in (piece * ROWS..).zip(rows) {
                join_heads(p.heads, tokens, row, self.head_dim, out);
                let z = &p.projected[row * self.projected()..][..width];
                match self.norm {
                    ResultNorm::None => {
                        gated.copy_from_slice(out);
                        kernels().silu_mul(z, gated, out);
                    }
                    ResultNorm::AfterGate => {
                        kernels().silu_mul(z, out, gated);
                        self.norm_groups(weight, gated, out);
                    }
                    ResultNorm::BeforeGate => {
                        self.norm_groups(weight, out, gated);
                        kernels().silu_mul(z, gated, out);
                    }
                }
            }
        });
    }
}

/// Inputs of [`StateSpace::finish`].
struct Finish<'a> {
    heads: &'a [f32],
    projected: &'a [f32],
    gated: &'a mut [f32],
}

impl Mixer for StateSpace {
    fn name(&self) -> &'static str {
        "Mamba-2"
    }

    fn linears(&self) -> [Option<MixerLinear>; MOST_LINEARS] {
        let linear = |kind, rows, cols| Some(MixerLinear { kind, rows, cols, bias: self.bias });
        [
            linear(LinearKind::MixIn, self.projected(), self.hidden),
            None,
            None,
            linear(LinearKind::MixOut, self.hidden, self.inner()),
        ]
    }

    fn sides(&self) -> Vec<SideInfo> {
        Vec::new()
    }

    fn vectors(&self) -> Vec<(VectorKind, Vec<usize>)> {
        let bias = (VectorKind::ConvolutionBias, vec![self.channels()]);
        let mut all = vec![(VectorKind::Convolution, vec![self.channels(), 1, self.kernel])];
        all.extend(self.convolution_bias.then_some(bias));
        all.extend([
            (VectorKind::StepBias, vec![self.heads]),
            (VectorKind::DecayLog, vec![self.heads]),
            (VectorKind::Skip, vec![self.heads]),
        ]);
        let norm = (VectorKind::MixNorm, vec![self.inner()]);
        all.extend((self.norm != ResultNorm::None).then_some(norm));
        all
    }

    fn state(&self, _: usize) -> StateShape {
        StateShape {
            tail: (self.kernel - 1) * self.channels(),
            grows: 0,
            heads: self.heads,
            head: self.state * self.head_dim,
        }
    }

    fn width(&self) -> usize {
        self.inner()
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
        let (tokens, width) = (seqs.tokens(), self.inner());
        let (out, padding) = out[..seqs.rows * width].split_at_mut(tokens * width);
        padding.fill(0.0);
        if tokens == 0 {
            return;
        }
        let mut p = self.parts(seqs.rows, scratch);
        self.split(operators, &mut p);
        let vector = |kind| operators.vector(kind).unwrap_or(&[]);
        let convolution = Convolution::of(operators, self.channels());
        let convolved = &mut p.convolved[..tokens * self.channels()];
        convolution.run_silu(seqs, states.as_mut(), threads, p.inputs, convolved);
        let (convolved, steps, decay) = (&*p.convolved, &*p.steps, &*p.decay);
        let skip = vector(VectorKind::Skip);
        let results = (&mut p.heads[..tokens * width], tokens * self.head_dim);
        for_each_head(threads, (states, self.state(0).head), results, |head, states, out| {
            let skip = skip.get(head).copied().unwrap_or(0.0);
            self.head(head, seqs, states, (convolved, steps, decay, skip), out);
        });
        // Read by the convolution, and free since.
        let gated = &mut p.inputs[..tokens * width];
        let finish = Finish { heads: p.heads, projected: p.projected, gated };
        self.finish(vector(VectorKind::MixNorm), finish, out, threads);
    }

    fn gguf_numbers(&self) -> Vec<(&'static str, usize)> {
        vec![
            ("ssm.conv_kernel", self.kernel),
            ("ssm.state_size", self.state),
            ("ssm.group_count", self.groups),
            ("ssm.inner_size", self.inner()),
            ("ssm.time_step_rank", self.heads),
        ]
    }

    fn check_gguf(&self, around: &GgufAround) -> Result<(), Uncomputed> {
        let blocks = around.recurrence.types == LayerTypes::Blocks;
        if self.norm == ResultNorm::BeforeGate {
            let allowed = "false: llama.cpp norms after the gate";
            return Err(Uncomputed::new("mamba_norm_before_gate", true, allowed));
        }
        if around.recurrence.doubled {
            check_double(self.inner(), around.hidden)?;
        }
        let ((least, most), allowed) = (self.steps, if blocks { LEAST_STEP } else { 0.0 });
        if most != f32::INFINITY || least > allowed {
            let field = if blocks { "time_step_min" } else { "time_step_limit" };
            let found = format!("{least} to {most}");
            return Err(Uncomputed::new(field, found, "no limits: llama.cpp has none"));
        }
        let [bias, of_convolution] =
            ["mamba_proj_bias", "mamba_conv_bias"].map(|field| around.own_field(field));
        check_biases((bias, self.bias), (of_convolution, self.convolution_bias))
    }

    fn gguf_note(&self, _: f32) -> Option<String> {
        let least = self.steps.0;
        (least > 0.0).then(|| format!("time_step_min: llama.cpp has no least step, the model {least}"))
    }

    fn groups(&self) -> usize {
        self.groups
    }

    fn gguf_eps(&self) -> Option<f32> {
        Some(self.eps)
    }

    fn input_parts(&self) -> Vec<usize> {
        let state = self.groups * self.state;
        vec![self.inner(), self.inner(), state, state, self.heads]
    }
}
