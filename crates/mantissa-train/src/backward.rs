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
use crate::form::{Draws, Forms, Gemm, Matrix, Side, slot_of};
use crate::forward::rms_norm;
use crate::gradients::Gradients;
use crate::gradients::Wanted;
use crate::health::{OperandKind, Operator, Watch};
use crate::model::{LayerOps, TrainModel};
use crate::operand::Operand;
use crate::plan::{Saved, Scratch, scores_per_thread};
use crate::profile::{Part, Profile};
use crate::rows::{PART, rows, rows_mut, take};
use crate::store::StoreRef;

impl TrainModel {
    /// Propagates `d_residual` `[tokens, hidden]` from the output of layer `i` to its input. Overwrites the
    /// saved activations.
    pub(crate) fn layer_backward(&mut self, i: usize, lens: &[usize], wanted: Wanted) {
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
            look: Look { watch: &self.watch, layer: &self.layers[i] },
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

/// Matmuls of a layer's backward, with plain or quantized operands.
#[derive(Clone, Copy)]
struct Products<'a> {
    layer: &'a LayerOps,
    params: &'a Parameters,
    draws: Draws<'a>,
    profile: &'a Profile,
}

/// Output gradient of a linear layer `[tokens, rows]`, with its rounded copy.
type OutputGradient<'a> = (&'a [f32], &'a Operand);

impl Products<'_> {
    /// Makes the quantized operands of dgrad.
    fn prepare(self, forms: &mut Forms, kind: LinearKind, dy: &[f32]) {
        let (linear, index, slot) = (self.layer.linear(kind), self.layer.index, slot_of(kind));
        let Some(rules) = linear.rules() else { return };
        let making = |gemm, side| self.draws.making(index, kind, gemm, side);
        self.profile.time(Part::Rounding, || {
            let dy = Matrix::new(StoreRef::F32(dy), linear.rows());
            forms.dgrad_dy(slot, &rules.dgrad[0], dy, making(Gemm::Dgrad, Side::Left));
            let weight = Matrix::weight(self.params, linear);
            let forward = (&rules.fprop[1], making(Gemm::Fprop, Side::Right));
            forms.dgrad_w(slot, &rules.dgrad[1], weight, making(Gemm::Dgrad, Side::Right), forward);
        });
    }

    /// Computes the input gradient of the tokens `part`, on this thread.
    fn dgrad(
        self,
        forms: &Forms,
        kind: LinearKind,
        (dy, rounded): OutputGradient<'_>,
        part: Range<usize>,
        dx: &mut [f32],
        accumulate: bool,
    ) {
        let linear = self.layer.linear(kind);
        if linear.rules().is_some() {
            let [dy, weight] = forms.of_dgrad(slot_of(kind));
            return linear.dgrad_of([dy.all().slice(part), weight.all()], dx, accumulate, 1);
        }
        let dy = rounded.of(dy).slice(part.start * linear.rows()..part.end * linear.rows());
        linear.dgrad(self.params, dy, dx, accumulate, 1);
    }

    /// Adds to the gradients of weights and biases of linear layers that read `x` `[tokens, cols]`.
    fn wgrad(
        self,
        forms: &mut Forms,
        (x, rounded_x): (&[f32], &Operand),
        all: &[(LinearKind, OutputGradient<'_>)],
        grads: &mut Gradients,
    ) {
        let threads = self.draws.threads;
        for (i, (kind, (dy, rounded))) in all.iter().enumerate() {
            let linear = self.layer.linear(*kind);
            let Some(rules) = linear.rules() else {
                self.profile.time(Part::Wgrad, || {
                    linear.gradients((dy, rounded), rounded_x.of(x), grads, threads);
                });
                continue;
            };
            let making = |kind, gemm, side| self.draws.making(self.layer.index, kind, gemm, side);
            self.profile.time(Part::Rounding, || {
                if i == 0 {
                    // The place of the forward's operand: the first linear layer that reads the input.
                    let first = match kind {
                        LinearKind::Up => LinearKind::Gate,
                        LinearKind::K | LinearKind::V => LinearKind::Q,
                        kind => *kind,
                    };
                    let x = Matrix::new(StoreRef::F32(x), linear.cols());
                    let forward = (&rules.fprop[0], making(first, Gemm::Fprop, Side::Left));
                    forms.wgrad_x(&rules.wgrad[1], x, making(first, Gemm::Wgrad, Side::Right), forward);
                }
                let dy = Matrix::new(StoreRef::F32(dy), linear.rows());
                forms.wgrad_dy(&rules.wgrad[0], dy, making(*kind, Gemm::Wgrad, Side::Left));
            });
            self.profile.time(Part::Wgrad, || {
                linear.wgrad_of(forms.of_wgrad().map(|form| form.all()), grads, threads);
                linear.bias_grad(dy, grads);
            });
        }
    }
}

/// Passes tensors of a layer to the numerics watch.
#[derive(Clone, Copy)]
struct Look<'a> {
    watch: &'a Watch,
    layer: &'a LayerOps,
}

impl Look<'_> {
    /// Passes the output gradient of a linear layer.
    fn dy(self, kind: LinearKind, dy: &[f32]) {
        self.watch.operand(Operator::Linear(self.layer.index, kind), OperandKind::Dy, &self.layer.policy, dy);
    }

    /// Passes the input gradient of a linear layer.
    fn dx(self, kind: LinearKind, dx: &[f32]) {
        self.watch.result(Operator::Linear(self.layer.index, kind), "dgrad dx", dx);
    }

    /// Passes weight gradients.
    fn dw(self, kinds: &[LinearKind], grads: &Gradients) {
        if !self.watch.is_off() {
            for &kind in kinds {
                let dw = grads.get(self.layer.linear(kind).weight());
                self.watch.result(Operator::Linear(self.layer.index, kind), "wgrad dw", &dw.widened());
            }
        }
    }

    /// Passes the input gradient of another operator.
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
        let (d, tokens, threads, products) = (self.hidden, self.tokens, self.threads, self.products());
        let look = self.look;
        look.dy(LinearKind::Down, &self.s.d_residual[..tokens * d]);
        self.mlp_inner();
        let (params, profile, saved, s) = (self.params, self.profile, &*self.saved, &mut *self.s);
        let [of_residual, of_gate, of_up] = std::mem::take(&mut s.rounded);
        let mut forms = std::mem::take(&mut s.forms);
        let [_, _, normed, inner] = &saved.inputs;
        let (d_residual, normed) = (&s.d_residual[..tokens * d], (&s.normed[..tokens * d], normed));
        let (d_gate, d_up) = (&saved.gate[..tokens * ffn], &saved.up[..tokens * ffn]);
        look.dy(LinearKind::Gate, d_gate);
        look.dy(LinearKind::Up, d_up);
        let inner = (&s.inner[..tokens * ffn], inner);
        let both = [(LinearKind::Gate, (d_gate, &of_gate)), (LinearKind::Up, (d_up, &of_up))];
        if self.wanted.weights() {
            let down = [(LinearKind::Down, (d_residual, &of_residual))];
            products.wgrad(&mut forms, inner, &down, self.grads);
            products.wgrad(&mut forms, normed, &both, self.grads);
            look.dw(&[LinearKind::Down, LinearKind::Gate, LinearKind::Up], self.grads);
        }
        both.iter().for_each(|(kind, (dy, _))| products.prepare(&mut forms, *kind, dy));
        let through = |part: Range<usize>, d_normed: &mut [f32]| {
            for (i, (kind, dy)) in both.iter().enumerate() {
                products.dgrad(&forms, *kind, *dy, part.clone(), d_normed, i > 0);
                look.dx(*kind, d_normed);
            }
        };
        let norm = NormBackward { x: &saved.middle, weight: &self.layer.post_norm, params, eps: self.eps };
        norm.run(tokens, s, self.grads, threads, profile, through);
        look.gradient(Operator::Norm(self.layer.index, NormKind::Post), &s.d_residual[..tokens * d]);
        (s.rounded, s.forms) = ([of_residual, of_gate, of_up], forms);
        let read = &mut self.saved.inputs[LinearInput::GateUp.index()];
        read.add_slopes(&s.normed[..tokens * d], &s.d_normed[..tokens * d], d);
    }

    /// Propagates from the down projection to gate and up, whose gradients overwrite their activations.
    /// Recomputes the MLP activation if it was not saved.
    fn mlp_inner(&mut self) {
        let (ffn, products) = (self.layer.linear(LinearKind::Gate).rows(), self.products());
        let (d, params, profile, eps, look) = (self.hidden, self.params, self.profile, self.eps, self.look);
        let norm = params.f32(&self.layer.post_norm);
        let (saved, s) = (&mut *self.saved, &mut *self.s);
        let cut = parts(self.tokens, PART);
        let [of_residual, of_gate, of_up] = &mut s.rounded;
        let d_residual = &s.d_residual[..self.tokens * d];
        profile.time(Part::Rounding, || of_residual.round(0, d, d_residual, self.threads));
        let made = saved.inputs[LinearInput::GateUp.index()].needs_values();
        products.prepare(&mut s.forms, LinearKind::Down, d_residual);
        let (dy, forms) = ((d_residual, &*of_residual), &s.forms);
        let pieces = cut.clone().zip(rows_mut(&mut saved.gate, ffn, cut.clone()));
        let pieces = pieces.zip(rows_mut(&mut saved.up, ffn, cut.clone()));
        let pieces = pieces.zip(rows_mut(&mut s.inner, ffn, cut.clone()));
        let pieces = pieces.zip(rows_mut(&mut s.normed, d, cut.clone()));
        let rounded = of_gate.parts(ffn, cut.clone()).zip(of_up.parts(ffn, cut));
        let middle = &saved.middle;
        for_each(self.threads, pieces.zip(rounded), |(((((part, gate), up), inner), normed), rounded)| {
            let span = part.clone();
            profile.time(Part::Dgrad, || products.dgrad(forms, LinearKind::Down, dy, span, inner, false));
            look.dx(LinearKind::Down, inner);
            profile.time(Part::GateBackward, || kernels().silu_mul_backward(gate, up, inner));
            look.gradient(Operator::Gate(look.layer.index), gate);
            look.gradient(Operator::Gate(look.layer.index), up);
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
        let (o, products) = (self.layer.linear(LinearKind::O), self.products());
        let (d, tokens, threads, params) = (self.hidden, self.tokens, self.threads, self.params);
        let (look, query) = (self.look, o.cols());
        let (forms, [of_residual, _, _]) = (&mut self.s.forms, &mut self.s.rounded);
        let d_residual = &self.s.d_residual[..tokens * d];
        look.dy(LinearKind::O, d_residual);
        self.profile.time(Part::Rounding, || of_residual.round(0, d, d_residual, threads));
        let (of_residual, d_attended) = (&*of_residual, &mut self.s.d_attended[..tokens * query]);
        products.prepare(forms, LinearKind::O, d_residual);
        self.profile.time(Part::Dgrad, || match o.rules() {
            Some(_) => o.dgrad_of(forms.of_dgrad(0).map(|form| form.all()), d_attended, false, threads),
            None => o.dgrad(params, of_residual.of(d_residual), d_attended, false, threads),
        });
        look.dx(LinearKind::O, d_attended);
        let read = &mut self.saved.inputs[LinearInput::O.index()];
        read.add_slopes(&self.saved.attended[..tokens * query], d_attended, query);
        let attended = (&self.saved.attended[..tokens * query], &self.saved.inputs[LinearInput::O.index()]);
        if self.wanted.weights() {
            products.wgrad(forms, attended, &[(LinearKind::O, (d_residual, of_residual))], self.grads);
            look.dw(&[LinearKind::O], self.grads);
        }
    }

    /// Propagates from queries, keys and values to the residual stream, through their projections and the input norm.
    fn qkv(&mut self) {
        let [q, k, v] = QKV.map(|kind| self.layer.linear(kind));
        let (d, tokens, threads, params) = (self.hidden, self.tokens, self.threads, self.params);
        let (query, key, products) = (q.rows(), k.rows(), self.products());
        let (look, index) = (self.look, self.layer.index);
        let (profile, saved, s) = (self.profile, &mut *self.saved, &mut *self.s);
        let normed = &mut saved.inputs[LinearInput::Qkv.index()];
        // The normed input is recomputed if it was not saved; wgrad of q, k and v needs it.
        if normed.needs_values() {
            let (x, to) = (&saved.residual[..tokens * d], &mut s.normed[..tokens * d]);
            let weight = params.f32(&self.layer.input_norm);
            profile.time(Part::Norm, || rms_norm(x, &weight, self.eps, to, normed, threads));
        }
        // Moved out of `s`, because the norm's backward below borrows the rest of it mutably.
        let [dq, dk, dv] = [&mut s.dq, &mut s.dk, &mut s.dv].map(std::mem::take);
        let (mut rounded, mut forms) = (std::mem::take(&mut s.rounded), std::mem::take(&mut s.forms));
        let all = [(q, &dq[..tokens * query]), (k, &dk[..tokens * key]), (v, &dv[..tokens * key])];
        for (((linear, dy), rounded), kind) in all.iter().zip(&mut rounded).zip(QKV) {
            look.gradient(Operator::Attention(index), dy);
            look.dy(kind, dy);
            profile.time(Part::Rounding, || rounded.round(0, linear.rows(), dy, threads));
        }
        let gradients = [0, 1, 2].map(|i| (QKV[i], (all[i].1, &rounded[i])));
        if self.wanted.weights() {
            products.wgrad(&mut forms, (&s.normed[..tokens * d], normed), &gradients, self.grads);
            look.dw(&QKV, self.grads);
        }
        if self.wanted.input() {
            gradients.iter().for_each(|(kind, (dy, _))| products.prepare(&mut forms, *kind, dy));
            let through = |part: Range<usize>, d_normed: &mut [f32]| {
                for (i, (kind, dy)) in gradients.iter().enumerate() {
                    products.dgrad(&forms, *kind, *dy, part.clone(), d_normed, i > 0);
                    look.dx(*kind, d_normed);
                }
            };
            let norm =
                NormBackward { x: &saved.residual, weight: &self.layer.input_norm, params, eps: self.eps };
            norm.run(tokens, s, self.grads, threads, profile, through);
            look.gradient(Operator::Norm(index, NormKind::Input), &s.d_residual[..tokens * d]);
            let read = &mut saved.inputs[LinearInput::Qkv.index()];
            read.add_slopes(&s.normed[..tokens * d], &s.d_normed[..tokens * d], d);
        }
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
            profile.time(Part::Dgrad, || through(part.clone(), d_normed));
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
            kernels().attention_causal_backward(shape, of_sequence, dout, grads, scores);
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
