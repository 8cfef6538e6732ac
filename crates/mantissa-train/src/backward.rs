//! Backward pass of a decoder layer, written by hand. In each half (attention, MLP), the gradient of the
//! residual stream is propagated through the branch and added to itself: `d_residual += (∂ branch / ∂
//! residual)ᵀ d_residual`.
//!
//! Activation gradients are split over threads by tokens. Weight gradients sum over all tokens, so they are
//! computed afterwards, split by output features.

use std::ops::Range;

use mantissa_kernels::{AttentionGrads, AttentionSaved, for_each, kernels};
use mantissa_model::flow::parts;
use mantissa_model::graph::NormKind;
use mantissa_model::{LinearInput, LinearKind};

use crate::arena::Parameters;
use crate::form::{Draws, Forms};
use crate::forward::rms_norm;
use crate::gradients::{Gradients, Wanted};
use crate::health::{Operator, Watch};
use crate::model::{LayerOps, TrainModel};
use crate::operand::Operand;
use crate::plan::{Saved, Scratch, scores_per_thread};
use crate::products::{Input, OutputGradient, Products};
use crate::profile::{Part, Profile};
use crate::rows::{PART, rows, rows_mut, take};

impl TrainModel {
    /// Propagates `d_residual` `[tokens, hidden]` from the output of layer `i` to its input. Overwrites the
    /// saved activations.
    pub(crate) fn layer_backward(&mut self, i: usize, lens: &[usize], wanted: Wanted) {
        self.scratch.forms.adapters.forget();
        let mut layer = LayerBackward {
            layer: &self.layers[i],
            params: &self.params,
            grads: &mut self.grads,
            saved: &mut self.saved[i],
            s: &mut self.scratch,
            tokens: lens.iter().sum(),
            hidden: self.config.hidden_size,
            eps: self.config.rms_norm_eps,
            threads: self.options.threads,
            profile: &self.profile,
            draws: Draws {
                seed: self.options.policy.seed,
                draw: self.draw,
                histories: &self.histories,
                watch: &self.watch,
                threads: self.options.threads,
            },
            look: Look { watch: &self.watch, layer: i },
            wanted,
        };
        layer.mlp();
        layer.attention(lens);
    }
}

/// Linear layers that read the input norm, in backward order.
const QKV: [LinearKind; 3] = [LinearKind::Q, LinearKind::K, LinearKind::V];

/// Backward pass of one layer.
struct LayerBackward<'a> {
    layer: &'a LayerOps,
    params: &'a Parameters,
    grads: &'a mut Gradients,
    saved: &'a mut Saved,
    s: &'a mut Scratch,
    tokens: usize,
    hidden: usize,
    eps: f32,
    threads: usize,
    profile: &'a Profile,
    draws: Draws<'a>,
    look: Look<'a>,
    wanted: Wanted,
}

/// Passes the gradients of operators other than linear layers to the telemetry.
#[derive(Clone, Copy)]
struct Look<'a> {
    watch: &'a Watch,
    layer: usize,
}

impl Look<'_> {
    /// Passes the input gradient of an operator.
    fn gradient(self, at: Operator, values: &[f32]) {
        self.watch.result(at, "gradient", values);
    }
}

impl<'a> LayerBackward<'a> {
    fn products(&self) -> Products<'a> {
        Products { layer: self.layer, params: self.params, draws: self.draws, profile: self.profile }
    }

    fn mlp(&mut self) {
        let ffn = self.layer.linear(LinearKind::Gate).rows();
        let (d, tokens, products) = (self.hidden, self.tokens, self.products());
        // Moved out of the scratch, the rest of which is borrowed mutably below.
        let [mut of_residual, mut of_gate, mut of_up] = std::mem::take(&mut self.s.rounded);
        let (mut forms, d_residual) =
            (std::mem::take(&mut self.s.forms), std::mem::take(&mut self.s.d_residual));
        let down = [products.output(LinearKind::Down, &d_residual[..tokens * d], &mut of_residual)];
        products.prepare_dgrad(&mut forms, &down);
        self.mlp_inner(&forms, &down, [&mut of_gate, &mut of_up]);
        let (params, saved, s) = (self.params, &*self.saved, &mut *self.s);
        let [_, _, normed, inner] = &saved.inputs;
        let normed = Input::new(&s.normed[..tokens * d], normed);
        let inner = Input::new(&s.inner[..tokens * ffn], inner);
        let both = [
            products.rounded_output(LinearKind::Gate, &saved.gate[..tokens * ffn], &of_gate),
            products.rounded_output(LinearKind::Up, &saved.up[..tokens * ffn], &of_up),
        ];
        if self.wanted.weights() {
            products.wgrad(&mut forms, inner, &down, self.grads);
            products.wgrad(&mut forms, normed, &both, self.grads);
        }
        products.prepare_dgrad(&mut forms, &both);
        let through =
            |part: Range<usize>, d_normed: &mut [f32]| products.dgrad(&forms, &both, part, d_normed, 1);
        s.d_residual = d_residual;
        let norm = NormBackward { x: &saved.middle, weight: &self.layer.post_norm, params, eps: self.eps };
        norm.run(tokens, s, self.grads, self.threads, self.profile, through);
        self.look.gradient(Operator::Norm(self.layer.index, NormKind::Post), &s.d_residual[..tokens * d]);
        (s.rounded, s.forms) = ([of_residual, of_gate, of_up], forms);
        let read = &mut self.saved.inputs[LinearInput::GateUp.index()];
        read.add_slopes(&s.normed[..tokens * d], &s.d_normed[..tokens * d], d);
    }

    /// Propagates from the down projection to gate and up, whose gradients overwrite their activations.
    /// Recomputes the MLP activation if it was not saved.
    fn mlp_inner(&mut self, forms: &Forms, down: &[OutputGradient<'_>], rounded: [&mut Operand; 2]) {
        let (ffn, products) = (self.layer.linear(LinearKind::Gate).rows(), self.products());
        let (d, profile, eps, look) = (self.hidden, self.profile, self.eps, self.look);
        let norm = self.params.f32(&self.layer.post_norm);
        let (saved, s) = (&mut *self.saved, &mut *self.s);
        let cut = parts(self.tokens, PART);
        let made = saved.inputs[LinearInput::GateUp.index()].needs_values();
        let pieces = cut.clone().zip(rows_mut(&mut saved.gate, ffn, cut.clone()));
        let pieces = pieces.zip(rows_mut(&mut saved.up, ffn, cut.clone()));
        let pieces = pieces.zip(rows_mut(&mut s.inner, ffn, cut.clone()));
        let pieces = pieces.zip(rows_mut(&mut s.normed, d, cut.clone()));
        let [of_gate, of_up] = rounded;
        let rounded = of_gate.parts(ffn, cut.clone()).zip(of_up.parts(ffn, cut));
        let middle = &saved.middle;
        for_each(self.threads, pieces.zip(rounded), |(((((part, gate), up), inner), normed), rounded)| {
            products.dgrad(forms, down, part.clone(), inner, 1);
            profile.time(Part::GateBackward, || kernels().silu_mul_backward(gate, up, inner));
            look.gradient(Operator::Gate(look.layer), gate);
            look.gradient(Operator::Gate(look.layer), up);
            profile.time(Part::Rounding, || {
                rounded.0.round(gate);
                rounded.1.round(up);
            });
            if made {
                profile.time(Part::Norm, || kernels().rms_norm(rows(middle, d, part), &norm, eps, normed));
            }
        });
    }

    fn attention(&mut self, lens: &[usize]) {
        self.output_projection();
        let (profile, threads) = (self.profile, self.threads);
        profile.time(Part::AttentionBackward, || {
            attend_backward(self.layer, lens, self.saved, self.s, threads);
        });
        self.head_norms();
        self.qkv();
    }

    /// Propagates from the residual stream to the attention output, through the output projection.
    fn output_projection(&mut self) {
        let (d, tokens, products) = (self.hidden, self.tokens, self.products());
        let (saved, s) = (&mut *self.saved, &mut *self.s);
        let query = self.layer.linear(LinearKind::O).cols();
        let (attended, d_attended) = (&saved.attended[..tokens * query], &mut s.d_attended[..tokens * query]);
        let output = [products.output(LinearKind::O, &s.d_residual[..tokens * d], &mut s.rounded[0])];
        products.prepare_dgrad(&mut s.forms, &output);
        products.dgrad(&s.forms, &output, 0..tokens, d_attended, self.threads);
        let read = &mut saved.inputs[LinearInput::O.index()];
        read.add_slopes(attended, d_attended, query);
        if self.wanted.weights() {
            products.wgrad(&mut s.forms, Input::new(attended, read), &output, self.grads);
        }
    }

    /// Propagates from queries, keys and values to the residual stream, through their projections and the input norm.
    fn qkv(&mut self) {
        let (d, tokens, params, products) = (self.hidden, self.tokens, self.params, self.products());
        let (profile, threads, index) = (self.profile, self.threads, self.layer.index);
        let (saved, s) = (&mut *self.saved, &mut *self.s);
        let normed = &mut saved.inputs[LinearInput::Qkv.index()];
        // The normed input is recomputed if it was not saved; wgrad of q, k and v needs it.
        if normed.needs_values() {
            let (x, to) = (&saved.residual[..tokens * d], &mut s.normed[..tokens * d]);
            let weight = params.f32(&self.layer.input_norm);
            profile.time(Part::Norm, || rms_norm(x, &weight, self.eps, to, normed, threads));
        }
        // Moved out of `s`, because the norm's backward below borrows the rest of it mutably.
        let all = [&mut s.dq, &mut s.dk, &mut s.dv].map(std::mem::take);
        let (mut rounded, mut forms) = (std::mem::take(&mut s.rounded), std::mem::take(&mut s.forms));
        let [of_q, of_k, of_v] = &mut rounded;
        let output = |i: usize, rounded| {
            let dy = &all[i][..tokens * self.layer.linear(QKV[i]).rows()];
            self.look.gradient(Operator::Attention(index), dy);
            products.output(QKV[i], dy, rounded)
        };
        let outputs = [output(0, of_q), output(1, of_k), output(2, of_v)];
        if self.wanted.weights() {
            let x = Input::new(&s.normed[..tokens * d], normed);
            products.wgrad(&mut forms, x, &outputs, self.grads);
        }
        if self.wanted.input() {
            products.prepare_dgrad(&mut forms, &outputs);
            let through = |part: Range<usize>, d_normed: &mut [f32]| {
                products.dgrad(&forms, &outputs, part, d_normed, 1)
            };
            let norm =
                NormBackward { x: &saved.residual, weight: &self.layer.input_norm, params, eps: self.eps };
            norm.run(tokens, s, self.grads, threads, profile, through);
            self.look.gradient(Operator::Norm(index, NormKind::Input), &s.d_residual[..tokens * d]);
            let read = &mut saved.inputs[LinearInput::Qkv.index()];
            read.add_slopes(&s.normed[..tokens * d], &s.d_normed[..tokens * d], d);
        }
        let [dq, dk, dv] = all;
        (s.dq, s.dk, s.dv, s.rounded, s.forms) = (dq, dk, dv, rounded, forms);
    }
}

impl LayerBackward<'_> {
    /// Propagates from normed queries and keys to the inputs of their head norms.
    fn head_norms(&mut self) {
        let Some(norms) = &self.layer.head_norms else { return };
        let (tokens, eps, threads, s) = (self.tokens, self.eps, self.threads, &mut *self.s);
        let kinds = [NormKind::Query, NormKind::Key];
        let raw = self.saved.raw.iter().zip([LinearKind::Q, LinearKind::K]);
        for (((raw, linear), dy), (range, kind)) in
            raw.zip([&mut s.dq, &mut s.dk]).zip(norms.iter().zip(kinds))
        {
            let (width, weight) = (self.layer.linear(linear).rows(), self.params.f32(range));
            let cut = parts(tokens, PART);
            // The gradient of the attention output is no longer needed, so its buffer is reused.
            let pieces = cut.clone().zip(rows_mut(&mut s.d_attended, width, cut.clone()));
            let pieces = pieces.zip(rows_mut(&mut s.partials, weight.len(), cut.clone().map(|_| 0..1)));
            let pieces = pieces.zip(rows_mut(dy, width, cut));
            self.profile.time(Part::NormBackward, || {
                for_each(threads, pieces, |(((part, dx), partial), dy)| {
                    dx.fill(0.0);
                    norm_backward_part(rows(raw, width, part), &weight, eps, dy, dx, partial);
                    dy.copy_from_slice(dx);
                });
            });
            self.grads.add(range.clone(), |grad| add_partials(&s.partials, tokens, grad));
            self.look.gradient(Operator::Norm(self.layer.index, kind), &dy[..tokens * width]);
        }
    }
}

/// Last step of each half: propagates from the norm's output to the residual stream.
struct NormBackward<'a> {
    /// Input of the norm, `[rows, hidden]`.
    x: &'a [f32],
    /// Range of the norm's weight.
    weight: &'a Range<usize>,
    params: &'a Parameters,
    eps: f32,
}

impl NormBackward<'_> {
    /// Runs the norm's backward; `through` computes the gradient of the norm's output for a part of the
    /// tokens.
    fn run(
        &self,
        tokens: usize,
        s: &mut Scratch,
        grads: &mut Gradients,
        threads: usize,
        profile: &Profile,
        through: impl Fn(Range<usize>, &mut [f32]) + Sync,
    ) {
        let weight = self.params.f32(self.weight);
        let d = weight.len();
        let cut = parts(tokens, PART);
        let pieces = cut.clone().zip(rows_mut(&mut s.d_normed, d, cut.clone()));
        let pieces = pieces.zip(rows_mut(&mut s.partials, d, cut.clone().map(|_| 0..1)));
        let pieces = pieces.zip(rows_mut(&mut s.d_residual, d, cut));
        for_each(threads, pieces, |(((part, d_normed), partial), dx)| {
            through(part.clone(), d_normed);
            profile.time(Part::NormBackward, || {
                norm_backward_part(rows(self.x, d, part), &weight, self.eps, d_normed, dx, partial);
            });
        });
        grads.add(self.weight.clone(), |grad| add_partials(&s.partials, tokens, grad));
    }
}

/// Computes the backward of a norm for some tokens: adds to `dx`, and writes the weight gradient to
/// `partial`.
pub(crate) fn norm_backward_part(
    x: &[f32],
    weight: &[f32],
    eps: f32,
    dy: &[f32],
    dx: &mut [f32],
    partial: &mut [f32],
) {
    partial.fill(0.0);
    kernels().rms_norm_backward(x, weight, eps, dy, dx, partial);
}

/// Adds the partial weight gradients of a norm in fixed order.
pub(crate) fn add_partials(partials: &[f32], tokens: usize, grad: &mut [f32]) {
    let parts = parts(tokens, PART).count();
    partials.chunks_exact(grad.len()).take(parts).for_each(|partial| kernels().axpy(1.0, partial, grad));
}

/// Sequences of one thread.
struct Group<'a> {
    lens: &'a [usize],
    /// Row of the first token.
    first: usize,
    dq: &'a mut [f32],
    dk: &'a mut [f32],
    dv: &'a mut [f32],
    scores: &'a mut [f32],
}

/// Propagates `d_attended` to queries, keys and values before RoPE. Each thread takes a run of consecutive
/// sequences.
fn attend_backward(layer: &LayerOps, lens: &[usize], saved: &Saved, s: &mut Scratch, threads: usize) {
    if lens.is_empty() {
        return;
    }
    let (shape, rotates) = (layer.flow.attention_shape(), layer.flow.rotates());
    let (query, key) = (shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim);
    let (mut dq, mut dk, mut dv) = (&mut s.dq[..], &mut s.dk[..], &mut s.dv[..]);
    let scores = scores_per_thread(&s.scores, threads);
    let mut first = 0;
    let groups = lens.chunks(lens.len().div_ceil(threads)).zip(s.scores.chunks_mut(scores));
    let groups = groups.map(move |(lens, scores)| {
        let tokens: usize = lens.iter().sum();
        first += tokens;
        Group {
            lens,
            first: first - tokens,
            dq: take(&mut dq, tokens * query),
            dk: take(&mut dk, tokens * key),
            dv: take(&mut dv, tokens * key),
            scores,
        }
    });
    let (d_attended, cos, sin) = (&s.d_attended, &s.cos, &s.sin);
    for_each(threads, groups, |group| {
        let Group { lens, mut first, mut dq, mut dk, mut dv, scores } = group;
        for &len in lens {
            let span = first..first + len;
            let of_sequence = AttentionSaved {
                q: rows(&saved.q, query, span.clone()),
                k: rows(&saved.k, key, span.clone()),
                v: rows(&saved.v, key, span.clone()),
                out: rows(&saved.attended, query, span.clone()),
                lse: rows(&saved.lse, shape.heads, span.clone()),
            };
            let (q, k) = (take(&mut dq, len * query), take(&mut dk, len * key));
            let grads = AttentionGrads { q: &mut *q, k: &mut *k, v: take(&mut dv, len * key) };
            let dout = rows(d_attended, query, span);
            kernels().attention_causal_backward(
                shape,
                layer.flow.softcap(),
                of_sequence,
                dout,
                grads,
                scores,
            );
            if rotates {
                let angles = ..len * (shape.head_dim / 2);
                for (x, heads) in [(q, shape.heads), (k, shape.kv_heads)] {
                    kernels().rope_rotate_back(x, heads, shape.head_dim, &cos[angles], &sin[angles]);
                }
            }
            first += len;
        }
    });
}
