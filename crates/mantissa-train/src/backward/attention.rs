//! Backward of attention: output projection, softmax attention with RoPE, QK norms, clipping, and the projections of
//! queries, keys and values.

use mantissa_kernels::{AttentionGrads, AttentionSaved, for_each, kernels};
use mantissa_model::config::QkvForm;
use mantissa_model::graph::{NormKind, VectorKind};
use mantissa_model::{LinearInput, LinearKind};

use super::LayerBackward;
use crate::health::Operator;
use crate::ops::LayerOps;
use crate::plan::{Saved, Scratch, scores_per_thread};
use crate::products::Input;
use crate::profile::StepPart;
use crate::rows::{rows, take};

/// Linear layers that read the input norm.
const QKV: [LinearKind; 3] = [LinearKind::Q, LinearKind::K, LinearKind::V];

impl LayerBackward<'_> {
    pub(super) fn attention(&mut self, lens: &[usize]) {
        let d_out = self.branch(NormKind::AfterAttention);
        self.output_projection(&d_out);
        self.give_back(d_out);
        self.sinks();
        let (profile, threads) = (self.profile, self.threads);
        profile.time(StepPart::AttentionBackward, || {
            attend_backward(self.layer, lens, self.saved, self.s, threads);
        });
        self.head_norms();
        self.rotate_back(lens);
        self.clip();
        self.qkv();
    }

    /// Widths of queries, and of keys and values.
    fn widths(&self) -> (usize, usize) {
        let shape = self.layer.flow.attention_shape();
        (shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim)
    }

    /// Propagates from the gradient `d_out` `[tokens, hidden]` of the result to the attention output.
    fn output_projection(&mut self, d_out: &[f32]) {
        let (n, tokens, products) = (self.tokens * self.hidden, self.tokens, self.products());
        let query = self.layer.linear(LinearKind::O).cols();
        let norm = self.layer.norm(NormKind::AttentionSub);
        let (saved, s) = (&mut *self.saved, &mut *self.s);
        let attended = &saved.attended[..tokens * query];
        let d_attended = &mut s.d_attended[..tokens * query];
        let output = [products.output(LinearKind::O, &d_out[..n], &mut s.rounded[0])];
        products.prepare_dgrad(&mut s.forms, &output);
        products.dgrad(&s.forms, &output, 0..tokens, d_attended, false, self.threads);
        let read = &mut saved.inputs[LinearInput::O.index()];
        let x = match norm {
            None => attended,
            Some(norm) => {
                let normed = &mut s.wide[..tokens * query];
                norm.run(self.params, attended, normed, &mut Default::default(), self.threads);
                &*normed
            }
        };
        read.add_slopes(x, d_attended, query);
        if self.wanted.weights() {
            products.wgrad(&mut s.forms, Input::new(x, read), &output, self.grads);
        }
        if let Some(norm) = norm {
            // The gradient of the queries is not made yet, so its buffer is free.
            let dx = &mut s.dq[..tokens * query];
            dx.fill(0.0);
            let pair = (attended, &*d_attended);
            norm.backward(self.params, query, pair, dx, &mut s.partials, self.grads, self.threads);
            std::mem::swap(&mut s.dq, &mut s.d_attended);
        }
    }

    /// Adds the gradients of the attention sinks: a sink's weight `p = exp(sink - lse)` has no value, so
    /// `d sink = -Σ p (dO · O)` over the tokens.
    fn sinks(&mut self) {
        let Some(range) = self.layer.vector(VectorKind::Sinks) else { return };
        let shape = self.layer.flow.attention_shape();
        let (sinks, width) = (self.params.f32(range), self.widths().0);
        let (saved, s, tokens) = (&*self.saved, &*self.s, self.tokens);
        let (mut sum, mut weights) = (vec![0.0f64; shape.heads], vec![0.0; shape.heads]);
        for t in 0..tokens {
            let lse = rows(&saved.lse, shape.heads, t..t + 1);
            weights.iter_mut().zip(sinks.iter().zip(lse)).for_each(|(w, (sink, lse))| *w = sink - lse);
            kernels().exp_inplace(&mut weights);
            let heads = rows(&saved.attended, width, t..t + 1).chunks_exact(shape.head_dim);
            let heads = heads.zip(rows(&s.d_attended, width, t..t + 1).chunks_exact(shape.head_dim));
            for ((sum, weight), (out, d_out)) in sum.iter_mut().zip(&weights).zip(heads) {
                *sum -= f64::from(*weight) * f64::from(kernels().dot(out, d_out));
            }
        }
        self.grads.add(range.clone(), |grad| {
            grad.iter_mut().zip(sum).for_each(|(grad, sum)| *grad += sum as f32);
        });
    }

    /// Propagates from normed queries and keys to the inputs of their norms.
    fn head_norms(&mut self) {
        let (query, key) = self.widths();
        for (which, kind, width) in [(0, NormKind::Query, query), (1, NormKind::Key, key)] {
            let Some(norm) = self.layer.norm(kind) else { return };
            let n = self.tokens * width;
            let s = &mut *self.s;
            let dy = if which == 0 { &mut s.dq[..n] } else { &mut s.dk[..n] };
            // The gradient of the attention output is no longer needed, so its buffer is reused.
            let (dx, raw) = (&mut s.d_attended[..n], &self.saved.raw[which][..n]);
            self.profile.time(StepPart::NormBackward, || {
                dx.fill(0.0);
                let pair = (raw, &*dy);
                norm.backward(self.params, width, pair, dx, &mut s.partials, self.grads, self.threads);
                dy.copy_from_slice(dx);
            });
            self.watch.result(Operator::Norm(self.layer.index, kind), "gradient", dy);
        }
    }

    /// Propagates through RoPE before QK norms, if the layer has it there.
    fn rotate_back(&mut self, lens: &[usize]) {
        let half = self.layer.flow.attention().half_before_norms();
        if half == 0 {
            return;
        }
        let (shape, s) = (self.layer.flow.attention_shape(), &mut *self.s);
        let [cos, sin] = if self.layer.flow.has_local_rope() { &s.local_angles } else { &s.angles };
        for (mut dx, heads) in [(&mut s.dq[..], shape.heads), (&mut s.dk[..], shape.kv_heads)] {
            for &len in lens {
                let rows = take(&mut dx, len * heads * shape.head_dim);
                kernels().rope_rotate_back(
                    rows,
                    heads,
                    shape.head_dim,
                    &cos[..len * half],
                    &sin[..len * half],
                );
            }
        }
    }

    /// Clears the gradients of clipped queries, keys and values.
    fn clip(&mut self) {
        let Some(clip) = self.layer.clip else { return };
        let ((query, key), tokens) = (self.widths(), self.tokens);
        let (saved, s) = (&*self.saved, &mut *self.s);
        let clear = |x: &[f32], dx: &mut [f32], clipped: &dyn Fn(f32) -> bool| {
            dx.iter_mut().zip(x).filter(|(_, x)| clipped(x.abs())).for_each(|(dx, _)| *dx = 0.0);
        };
        clear(&saved.raw[0][..tokens * query], &mut s.dq[..tokens * query], &|x| x > clip);
        clear(&saved.raw[1][..tokens * key], &mut s.dk[..tokens * key], &|x| x > clip);
        // Values are saved as clipped.
        clear(&saved.v[..tokens * key], &mut s.dv[..tokens * key], &|x| x >= clip);
    }

    /// Propagates from queries, keys and values to the residual stream, through their projections and the input norm.
    fn qkv(&mut self) {
        let (d, tokens, products) = (self.hidden, self.tokens, self.products());
        let (query, key) = self.widths();
        self.remake(NormKind::Input);
        // Moved out of the scratch, because the rest of it is borrowed mutably below.
        let all = [&mut self.s.dq, &mut self.s.dk, &mut self.s.dv].map(std::mem::take);
        let mut rounded = std::mem::take(&mut self.s.rounded);
        let (mut forms, mut wide) = (std::mem::take(&mut self.s.forms), std::mem::take(&mut self.s.wide));
        let gradients = [&all[0][..tokens * query], &all[1][..tokens * key], &all[2][..tokens * key]];
        gradients.iter().for_each(|dy| self.look(Operator::Attention(self.layer.index), dy));
        let outputs = if self.layer.qkv == QkvForm::Separate {
            let each = QKV.into_iter().zip(gradients).zip(&mut rounded);
            each.map(|((kind, dy), rounded)| products.output(kind, dy, rounded)).collect()
        } else {
            let joined = &mut wide[..tokens * (query + 2 * key)];
            let [dq, dk, dv] = gradients;
            self.layer.flow.attention().join_qkv(dq, dk, dv, joined);
            vec![products.output(LinearKind::Qkv, joined, &mut rounded[0])]
        };
        if self.wanted.weights() {
            let normed = &self.saved.inputs[LinearInput::Qkv.index()];
            let x = Input::new(&self.s.normed[..tokens * d], normed);
            products.wgrad(&mut forms, x, &outputs, self.grads);
        }
        if self.wanted.input() {
            products.prepare_dgrad(&mut forms, &outputs);
            self.enter_backward(NormKind::Input, &forms, &outputs);
        }
        let [dq, dk, dv] = all;
        (self.s.dq, self.s.dk, self.s.dv) = (dq, dk, dv);
        (self.s.rounded, self.s.forms, self.s.wide) = (rounded, forms, wide);
    }
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
    let (shape, half) = (layer.flow.attention_shape(), layer.flow.attention().half());
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
    let [cos, sin] = if layer.flow.has_local_rope() { &s.local_angles } else { &s.angles };
    let d_attended = &s.d_attended;
    for_each(threads, groups, |group| {
        let Group { lens, mut first, mut dq, mut dk, mut dv, scores } = group;
        for &len in lens {
            let span = first..first + len;
            let sequence_saved = AttentionSaved {
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
                layer.flow.attention().softcap(),
                sequence_saved,
                dout,
                grads,
                scores,
            );
            if half > 0 {
                let angles = ..len * half;
                for (x, heads) in [(q, shape.heads), (k, shape.kv_heads)] {
                    kernels().rope_rotate_back(x, heads, shape.head_dim, &cos[angles], &sin[angles]);
                }
            }
            first += len;
        }
    });
}
