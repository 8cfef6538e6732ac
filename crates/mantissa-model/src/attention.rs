//! Causal self-attention with grouped key/value heads (Vaswani et al. 2017, "Attention Is All You Need", eq. 1;
//! Ainslie et al. 2023, "GQA"), RoPE, QK norms (Qwen3) and a norm before the output projection (BitNet). Latent
//! attention is in [`crate::latent`].
//!
//! The layer reads `normed` `[rows, hidden]` and adds its result to `residual` `[rows, hidden]`.

use mantissa_kernels::{CausalAttention, ScoreRules, for_each, kernels};

use crate::config::{HeadNorms, QkvForm};
use crate::error::ForwardError;
use crate::flow::{Activations, Job, LayerFlow, Operators, Sequences};
use crate::graph::{HyperSite, LinearInput, LinearKind, NormKind};
use crate::mixer::Mixing;
use crate::operands::OperandRounding;

/// Sequences of one thread: queries, keys, values, results, and scratch for scores.
struct Group<'a> {
    lens: &'a [usize],
    q: &'a mut [f32],
    k: &'a mut [f32],
    v: &'a mut [f32],
    out: &'a mut [f32],
    lse: Option<&'a mut [f32]>,
    /// Tokens that each query attends to, `[tokens, chosen]`; empty if all queries attend to all.
    chosen: &'a [u32],
    scores: &'a mut [f32],
}

/// Brings the values of each adjacent pair half of `to` apart: the first values of all pairs, then the second ones.
pub(crate) fn split_pairs(pairs: &[f32], to: &mut [f32]) {
    let (first, second) = to.split_at_mut(to.len() / 2);
    for ((pair, first), second) in pairs.chunks_exact(2).zip(first).zip(second) {
        (*first, *second) = (pair[0], pair[1]);
    }
}

impl LayerFlow {
    pub(crate) fn project(
        &self,
        operators: &mut impl Operators,
        seqs: &Sequences<'_>,
        cached: bool,
        a: &mut Activations<'_>,
    ) -> Result<(), ForwardError> {
        if let Some(latent) = self.latent {
            return self.project_latent(latent, operators, seqs, cached, a);
        }
        let (q_width, kv_width) = self.widths();
        let (rows, accumulate) = (seqs.rows, false);
        let x = &a.normed[..rows * self.hidden];
        if self.qkv != QkvForm::Separate {
            let out = &mut a.extra.wide[..rows * (q_width + 2 * kv_width)];
            let mut jobs = [Job { kind: LinearKind::Qkv, out, accumulate }];
            operators.linears(LinearInput::Qkv, x, seqs.tokens(), &mut jobs)?;
            self.split_qkv(rows, a);
            self.finish_qkv(rows, a);
            return Ok(());
        }
        if self.gated {
            let (wide, k) = (&mut a.extra.wide[..rows * 2 * q_width], &mut a.k[..rows * kv_width]);
            let mut jobs = [
                Job { kind: LinearKind::Q, out: &mut *wide, accumulate },
                Job { kind: LinearKind::K, out: k, accumulate },
                Job { kind: LinearKind::V, out: &mut a.v[..rows * kv_width], accumulate },
            ];
            operators.linears(LinearInput::Qkv, x, seqs.tokens(), &mut jobs)?;
            let d = self.attention.head_dim;
            for (head, q) in wide.chunks_exact(2 * d).zip(a.q.chunks_exact_mut(d)) {
                q.copy_from_slice(&head[..d]);
            }
            self.finish_qkv(rows, a);
            return Ok(());
        }
        let (k, v) = (&mut a.k[..rows * kv_width], &mut a.v[..rows * kv_width]);
        let mut jobs = [
            Job { kind: LinearKind::Q, out: &mut a.q[..rows * q_width], accumulate },
            Job { kind: LinearKind::K, out: &mut *k, accumulate },
            Job { kind: LinearKind::V, out: &mut *v, accumulate },
        ];
        let own = if self.keys_are_values { 2 } else { 3 };
        let jobs = &mut jobs[..if self.own_kv { own } else { 1 }];
        operators.linears(LinearInput::Qkv, x, seqs.tokens(), jobs)?;
        if self.own_kv && self.keys_are_values {
            v.copy_from_slice(k);
        }
        self.finish_qkv(rows, a);
        Ok(())
    }

    /// Multiplies the joined heads by the sigmoid of their gates, which [`project`](Self::project) left beside the
    /// queries.
    pub(crate) fn gate_heads(&self, seqs: &Sequences<'_>, a: &mut Activations<'_>) {
        if !self.gated {
            return;
        }
        let d = self.attention.head_dim;
        let heads = a.attended[..seqs.tokens() * self.widths().0].chunks_exact_mut(d);
        for (head, gate) in heads.zip(a.extra.wide.chunks_exact(2 * d)) {
            kernels().sigmoid_mul(&gate[d..], head);
        }
    }

    /// Clips q, k and v, and brings the rotated pairs of q and k from adjacent places half of the rotated part apart:
    /// scores do not depend on the order of a head's values.
    fn finish_qkv(&self, rows: usize, a: &mut Activations<'_>) {
        self.clip_qkv(rows, a);
        if !self.interleaved {
            return;
        }
        let (q_width, kv_width) = self.widths();
        // `attended` is free until attention runs.
        let pairs = &mut a.attended[..2 * self.half];
        let projected = if self.own_kv { 2 } else { 1 };
        for (x, width) in [(&mut *a.q, q_width), (&mut *a.k, kv_width)].into_iter().take(projected) {
            for head in x[..rows * width].chunks_exact_mut(self.attention.head_dim) {
                let rotated = &mut head[..2 * self.half];
                pairs.copy_from_slice(rotated);
                split_pairs(pairs, rotated);
            }
        }
    }

    /// Joins q, k and v, or their gradients, into rows of the joined projection: the reverse of its split.
    pub fn join_qkv(&self, q: &[f32], k: &[f32], v: &[f32], joined: &mut [f32]) {
        let ((q_width, kv_width), d) = (self.widths(), self.attention.head_dim);
        let rows = q.chunks_exact(q_width).zip(k.chunks_exact(kv_width)).zip(v.chunks_exact(kv_width));
        for (((q, k), v), joined) in rows.zip(joined.chunks_exact_mut(q_width + 2 * kv_width)) {
            match self.qkv {
                QkvForm::ByHead => {
                    let heads = q.chunks_exact(d).zip(k.chunks_exact(d)).zip(v.chunks_exact(d));
                    for (((q, k), v), head) in heads.zip(joined.chunks_exact_mut(3 * d)) {
                        head[..d].copy_from_slice(q);
                        head[d..2 * d].copy_from_slice(k);
                        head[2 * d..].copy_from_slice(v);
                    }
                }
                _ => {
                    joined[..q_width].copy_from_slice(q);
                    joined[q_width..q_width + kv_width].copy_from_slice(k);
                    joined[q_width + kv_width..].copy_from_slice(v);
                }
            }
        }
    }

    /// Splits a joined projection into q, k and v.
    fn split_qkv(&self, rows: usize, a: &mut Activations<'_>) {
        let ((q_width, kv_width), d) = (self.widths(), self.attention.head_dim);
        let q = a.q[..rows * q_width].chunks_exact_mut(q_width);
        let k = a.k[..rows * kv_width].chunks_exact_mut(kv_width);
        let v = a.v[..rows * kv_width].chunks_exact_mut(kv_width);
        let joined = a.extra.wide.chunks_exact(q_width + 2 * kv_width);
        for (((q, k), v), joined) in q.zip(k).zip(v).zip(joined) {
            match self.qkv {
                QkvForm::ByHead => {
                    let heads = q.chunks_exact_mut(d).zip(k.chunks_exact_mut(d)).zip(v.chunks_exact_mut(d));
                    for (((q, k), v), head) in heads.zip(joined.chunks_exact(3 * d)) {
                        q.copy_from_slice(&head[..d]);
                        k.copy_from_slice(&head[d..2 * d]);
                        v.copy_from_slice(&head[2 * d..]);
                    }
                }
                _ => {
                    q.copy_from_slice(&joined[..q_width]);
                    k.copy_from_slice(&joined[q_width..q_width + kv_width]);
                    v.copy_from_slice(&joined[q_width + kv_width..]);
                }
            }
        }
    }

    fn clip_qkv(&self, rows: usize, a: &mut Activations<'_>) {
        let Some(clip) = self.clip else { return };
        let (q_width, kv_width) = self.widths();
        let all = [(&mut *a.q, q_width), (&mut *a.k, kv_width), (&mut *a.v, kv_width)];
        for (x, width) in all.into_iter().take(if self.own_kv { 3 } else { 1 }) {
            x[..rows * width].iter_mut().for_each(|x| *x = x.clamp(-clip, clip));
        }
    }

    pub(crate) fn norm_heads(&self, operators: &mut impl Operators, rows: usize, a: &mut Activations<'_>) {
        if self.head_norms == HeadNorms::Absent {
            return;
        }
        let (q_width, kv_width) = self.widths();
        // `attended` is free until attention runs, and at least as wide as the keys.
        let all = [
            (NormKind::Query, &mut *a.q, q_width),
            (NormKind::Key, &mut *a.k, kv_width),
            (NormKind::Value, &mut *a.v, kv_width),
        ];
        let own = if self.value_norm { 3 } else { 2 };
        for (norm, x, width) in all.into_iter().take(if self.own_kv { own } else { 1 }) {
            let (x, normed) = (&mut x[..rows * width], &mut a.attended[..rows * width]);
            operators.norm(norm, x, normed);
            x.copy_from_slice(normed);
        }
    }

    /// Multiplies queries by the factor of their positions. Rotation, which follows, does not change lengths.
    pub(crate) fn grow_queries(&self, seqs: &Sequences<'_>, q: &mut [f32]) {
        let Some(growth) = &self.growth else { return };
        let mut rows = q.chunks_exact_mut(self.widths().0);
        for (i, len) in seqs.lens.iter().enumerate() {
            for (position, row) in (seqs.start(i)..).zip(rows.by_ref().take(*len)) {
                let factor = growth.at(position);
                if factor != 1.0 {
                    row.iter_mut().for_each(|x| *x *= factor);
                }
            }
        }
    }

    /// Rotates and attends in each sequence. A thread takes consecutive ones.
    pub(crate) fn attend(&self, seqs: &Sequences<'_>, sinks: Option<&[f32]>, a: &mut Activations<'_>) {
        let (q_width, kv_width) = self.widths();
        let heads = self.attention.heads;
        let tokens = seqs.tokens();
        let (mut out, padding) = a.attended[..seqs.rows * q_width].split_at_mut(tokens * q_width);
        padding.fill(0.0);
        if seqs.lens.is_empty() {
            return;
        }
        let (mut q, mut k) = (&mut a.q[..tokens * q_width], &mut a.k[..tokens * kv_width]);
        let mut v = &mut a.v[..tokens * kv_width];
        let mut lse = a.lse.as_deref_mut();
        let of_token = self.indexer.filter(|indexer| indexer.chooses(seqs)).map_or(0, |of| of.chosen());
        let mut chosen = &*a.extra.index.chosen;
        let threads = self.threads.min(seqs.lens.len());
        let scores = a.scores.len() / threads;
        let groups =
            seqs.lens.chunks(seqs.lens.len().div_ceil(threads)).zip(a.scores.chunks_mut(scores.max(1)));
        let groups = groups.map(move |(lens, scores)| {
            let tokens: usize = lens.iter().sum();
            let of_group;
            (of_group, chosen) = chosen.split_at(tokens * of_token);
            Group {
                lens,
                q: first(&mut q, tokens * q_width),
                k: first(&mut k, tokens * kv_width),
                v: first(&mut v, tokens * kv_width),
                out: first(&mut out, tokens * q_width),
                lse: lse.as_mut().map(|lse| first(lse, tokens * heads)),
                chosen: of_group,
                scores,
            }
        });
        let (cos, sin) = (a.cos, a.sin);
        let rules = self.score_rules(sinks);
        for_each(threads, groups, |group| self.attend_group(group, rules, cos, sin));
    }

    fn attend_group(&self, group: Group<'_>, rules: ScoreRules<'_>, cos: &[f32], sin: &[f32]) {
        let Group { lens, mut q, mut k, mut v, mut out, mut lse, mut chosen, scores } = group;
        let of_token = if chosen.is_empty() { 0 } else { chosen.len() / lens.iter().sum::<usize>() };
        let (q_width, kv_width) = self.widths();
        for &len in lens {
            let (q, k) = (first(&mut q, len * q_width), first(&mut k, len * kv_width));
            let (this_v, out) = (first(&mut v, len * kv_width), first(&mut out, len * q_width));
            self.rotate(0, q, self.attention.heads, cos, sin);
            // Shared keys and values are as the layer that projects them has left them.
            if self.own_kv {
                self.rotate_and_store(0, k, this_v, cos, sin);
            }
            if let Some(operands) = &self.operands {
                operands.queries(q);
                if self.own_kv {
                    operands.keys_and_values(k, this_v);
                }
            }
            let of_sequence;
            (of_sequence, chosen) = chosen.split_at(len * of_token);
            match lse.as_mut().map(|lse| first(lse, len * self.attention.heads)) {
                Some(lse) => {
                    kernels().attention_causal_saving(&self.attention, rules, q, k, this_v, out, lse, scores);
                }
                None if of_token > 0 && len > of_token => {
                    self.attend_chosen(rules, [q, k, this_v], of_sequence, out, scores);
                }
                None => {
                    kernels().attention_causal_with(&self.attention, rules, q, k, this_v, out, scores);
                }
            }
        }
    }

    /// Attends in one sequence to the tokens in `chosen` `[tokens, n]`; the first n queries attend to all before them. Every
    /// head has keys and values of its own. `scores` holds 2 · n heads more than the kernel needs.
    fn attend_chosen(
        &self,
        rules: ScoreRules<'_>,
        [q, k, v]: [&[f32]; 3],
        chosen: &[u32],
        out: &mut [f32],
        scores: &mut [f32],
    ) {
        let (d, width) = (self.attention.head_dim, self.widths().0);
        let n = chosen.len() * width / q.len();
        let all = n * width;
        let (of_all, of_chosen) = out.split_at_mut(all);
        kernels().attention_causal_with(
            &self.attention,
            rules,
            &q[..all],
            &k[..all],
            &v[..all],
            of_all,
            scores,
        );
        let shape = CausalAttention { heads: 1, kv_heads: 1, ..self.attention };
        let (keys, rest) = scores.split_at_mut(n * d);
        let (values, scores) = rest.split_at_mut(n * d);
        // Head by head: keys and values of one are reused by all queries.
        for head in (0..width).step_by(d) {
            let rows = q[all..].chunks_exact(width).zip(of_chosen.chunks_exact_mut(width));
            for ((q, out), chosen) in rows.zip(chosen[n * n..].chunks_exact(n)) {
                let gathered = keys.chunks_exact_mut(d).zip(values.chunks_exact_mut(d));
                for (token, (key, value)) in chosen.iter().zip(gathered) {
                    let at = *token as usize * width + head;
                    key.copy_from_slice(&k[at..at + d]);
                    value.copy_from_slice(&v[at..at + d]);
                }
                let (q, out) = (&q[head..head + d], &mut out[head..head + d]);
                kernels().attention_causal_with(&shape, rules, q, keys, values, out, scores);
            }
        }
    }

    /// Rules for the scores before the softmax and for the weights after it.
    pub(crate) fn score_rules<'s>(&self, sinks: Option<&'s [f32]>) -> ScoreRules<'s> {
        let weights = self.operands.as_ref().and_then(OperandRounding::weights);
        ScoreRules { softcap: self.softcap, sinks, weights }
    }

    /// Rotates heads of consecutive tokens, `[tokens, heads · head_dim]`; the first is at position `start`.
    pub fn rotate(&self, start: usize, x: &mut [f32], heads: usize, cos: &[f32], sin: &[f32]) {
        let (head_dim, half) = (self.attention.head_dim, self.half);
        if half > 0 {
            let angles = start * half..(start + x.len() / (heads * head_dim)) * half;
            kernels().rope_rotate(x, heads, head_dim, &cos[angles.clone()], &sin[angles]);
        }
    }

    /// Rotates the keys of one sequence, and replaces keys and values by what the cache would return.
    pub(crate) fn rotate_and_store(
        &self,
        start: usize,
        k: &mut [f32],
        v: &mut [f32],
        cos: &[f32],
        sin: &[f32],
    ) {
        let heads = self.attention.kv_heads;
        let Some(kv) = &self.kv else { return self.rotate(start, k, heads, cos, sin) };
        if kv.parts().before_rope {
            kv.keys(k);
            self.rotate(start, k, heads, cos, sin);
        } else {
            self.rotate(start, k, heads, cos, sin);
            kv.keys(k);
        }
        kv.values(v);
    }

    pub(crate) fn output(
        &self,
        operators: &mut impl Operators,
        seqs: &Sequences<'_>,
        a: &mut Activations<'_>,
    ) -> Result<(), ForwardError> {
        self.add_output(operators, seqs, a)?;
        self.mix_streams(&*operators, HyperSite::Attention, seqs.rows, a);
        Ok(())
    }

    /// Projects the joined heads and a mixer's result, and adds both to the residual stream.
    fn add_output(
        &self,
        operators: &mut impl Operators,
        seqs: &Sequences<'_>,
        a: &mut Activations<'_>,
    ) -> Result<(), ForwardError> {
        if self.mixing == Mixing::None {
            return Ok(());
        }
        if let Some(recurrent) = &self.recurrent {
            let from = seqs.rows * self.mixed_from();
            let x = &a.attended[from..from + seqs.rows * recurrent.width()];
            let result = (&mut *a.residual, &mut *a.normed, &mut *a.extra.wide);
            self.add_result(operators, seqs, (LinearKind::MixOut, LinearInput::Mixed), x, result)?;
        }
        if !self.attends() {
            return Ok(());
        }
        self.add_laurel(operators, seqs.rows, a);
        let len = seqs.rows * self.widths().0;
        let (kind, input) = (LinearKind::O, LinearInput::O);
        let x = if self.sub_norms {
            // A backward pass reads the queries.
            let normed = if a.lse.is_some() { &mut a.extra.wide[..len] } else { &mut a.q[..len] };
            operators.norm(NormKind::AttentionSub, &a.attended[..len], normed);
            &*normed
        } else if let Some(latent) = &self.latent {
            // Drops the padding of the values.
            let width = self.attention.heads * latent.value;
            let packed = a.q[..seqs.rows * width].chunks_exact_mut(latent.value);
            let heads = a.attended[..len].chunks_exact(self.attention.head_dim).zip(packed);
            heads.for_each(|(padded, head)| head.copy_from_slice(&padded[..latent.value]));
            &a.q[..seqs.rows * width]
        } else {
            &a.attended[..len]
        };
        let len = seqs.rows * self.hidden;
        let residual = &mut a.residual[..len];
        if !self.norms_results() {
            let mut jobs = [Job { kind, out: residual, accumulate: true }];
            return operators.linears(input, x, seqs.tokens(), &mut jobs);
        }
        let out = &mut a.normed[..len];
        let mut jobs = [Job { kind, out: &mut *out, accumulate: false }];
        operators.linears(input, x, seqs.tokens(), &mut jobs)?;
        Self::add_normed(operators, NormKind::AfterAttention, out, &mut a.extra.wide[..len], residual);
        if self.streams.is_some() {
            residual.iter_mut().for_each(|x| *x *= std::f32::consts::FRAC_1_SQRT_2);
        }
        Ok(())
    }

    /// Projects a mixer's result and adds it to the residual stream.
    fn add_result(
        &self,
        operators: &mut impl Operators,
        seqs: &Sequences<'_>,
        (kind, input): (LinearKind, LinearInput),
        x: &[f32],
        (residual, normed, wide): (&mut [f32], &mut [f32], &mut [f32]),
    ) -> Result<(), ForwardError> {
        let len = seqs.rows * self.hidden;
        let residual = &mut residual[..len];
        if !self.norms_results() {
            let mut jobs = [Job { kind, out: residual, accumulate: true }];
            return operators.linears(input, x, seqs.tokens(), &mut jobs);
        }
        let out = &mut normed[..len];
        let mut jobs = [Job { kind, out: &mut *out, accumulate: false }];
        operators.linears(input, x, seqs.tokens(), &mut jobs)?;
        Self::add_normed(operators, NormKind::AfterAttention, out, &mut wide[..len], residual);
        Ok(())
    }

    pub(crate) fn widths(&self) -> (usize, usize) {
        let shape = &self.attention;
        (shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim)
    }
}

/// Splits the first `n` values off `rest`.
fn first<'a>(rest: &mut &'a mut [f32], n: usize) -> &'a mut [f32] {
    let (first, others) = std::mem::take(rest).split_at_mut(n);
    *rest = others;
    first
}
