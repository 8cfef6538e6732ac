//! Causal self-attention with grouped key/value heads (Vaswani et al. 2017, "Attention Is All You Need", eq. 1;
//! Ainslie et al. 2023, "GQA"), RoPE, QK norms (Qwen3) and a norm before the output projection (BitNet). Latent
//! attention is in [`crate::latent`].
//!
//! The block reads `normed` `[rows, hidden]` and leaves the joined heads `[rows, heads · head_dim]` in `attended`, the
//! input of its output projection.

use mantissa_kernels::{CausalAttention, ScoreRules, for_each, kernels};

use crate::config::{HeadNorms, Latent, ModelConfig, QkvForm, QueryGrowth};
use crate::frame::{Frame, scaled};
use crate::indexer::IndexerFlow;
use crate::kv::KvQuantizer;
use crate::operands::OperandRounding;
use crate::operators::{Activations, Sequences};
use crate::program::{Buffer, Columns, Op, Output, View};
use mantissa_arch::kinds::{LinearInput, LinearKind, NormKind};

/// Attention of a layer.
#[derive(Clone, Debug, PartialEq)]
pub struct Attention {
    /// Shape and mask.
    pub(crate) shape: CausalAttention,
    pub(crate) threads: usize,
    head_norms: HeadNorms,
    /// True if the joined heads are normed.
    pub(crate) sub_norms: bool,
    /// Quantization of keys and values as they enter the cache; whole sequences see the same values.
    pub(crate) kv: Option<KvQuantizer>,
    /// Rounding of the operands.
    pub(crate) operands: Option<OperandRounding>,
    qkv: QkvForm,
    softcap: Option<f32>,
    clip: Option<f32>,
    /// True if the layer projects its own keys and values; false if it reads those of an earlier one.
    pub(crate) own_kv: bool,
    /// True if the keys, before their norm, are the values too.
    keys_are_values: bool,
    /// True if each head of the values is normed.
    value_norm: bool,
    /// Factor of the queries by position.
    growth: Option<QueryGrowth>,
    pub(crate) latent: Option<Latent>,
    pub(crate) indexer: Option<IndexerFlow>,
    /// True if the joined heads are gated.
    gated: bool,
    /// Factor of the joined heads.
    factor: Option<f32>,
    /// Half the width of a head that attention rotates; 0 if the layer has no RoPE, or has it before QK norms.
    pub(crate) half: usize,
    /// Half the width of a head that is rotated before QK norms; 0 if attention rotates.
    half_before_norms: usize,
    /// True if the rotated pairs are adjacent in what the projections return.
    interleaved: bool,
}

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

impl Attention {
    /// Creates the attention of layer `layer`, on up to `threads` threads.
    pub(crate) fn new(config: &ModelConfig, layer: usize, threads: usize) -> Self {
        let rotated = config.rotated_layers[layer];
        let half = if rotated { config.rotary_dim_of(layer) / 2 } else { 0 };
        let (half, half_before_norms) = match config.head_norms {
            HeadNorms::Rotated => (0, half),
            _ => (half, 0),
        };
        Attention {
            shape: config.attention_shape(layer),
            threads,
            head_norms: match config.head_norms {
                HeadNorms::Plain if !rotated => HeadNorms::Absent,
                norms => norms,
            },
            sub_norms: config.has_sub_norms(),
            kv: None,
            operands: None,
            qkv: config.qkv,
            softcap: config.attention_softcap,
            clip: config.clip_qkv,
            own_kv: config.has_own_kv(layer),
            keys_are_values: config.keys_are_values(layer),
            value_norm: config.attention.value_norm,
            growth: config.query_growth.filter(|growth| !(growth.unrotated && rotated)),
            latent: config.latent,
            indexer: IndexerFlow::new(config, layer),
            gated: config.attention.gated,
            factor: config.multipliers.map(|multipliers| multipliers.attended),
            half,
            half_before_norms,
            interleaved: config.rope_interleaved && rotated,
        }
    }

    /// Shape and mask.
    pub fn shape(&self) -> &CausalAttention {
        &self.shape
    }

    /// Number of threads.
    pub fn threads(&self) -> usize {
        self.threads
    }

    /// Half the width of a head that attention rotates; 0 without RoPE, or with it before QK norms.
    pub fn half(&self) -> usize {
        self.half
    }

    /// Half the width of a head that is rotated before QK norms; 0 if attention rotates.
    pub fn half_before_norms(&self) -> usize {
        self.half_before_norms
    }

    /// True if attention rotates queries and keys.
    pub fn rotates(&self) -> bool {
        self.half > 0
    }

    /// Soft cap of the scores.
    pub fn softcap(&self) -> Option<f32> {
        self.softcap
    }

    /// True if the layer projects its own keys and values; false if it reads those of an earlier one.
    pub fn has_own_kv(&self) -> bool {
        self.own_kv
    }

    /// Quantizer of keys and values; `None` if they are cached in f32.
    pub fn kv(&self) -> Option<&KvQuantizer> {
        self.kv.as_ref()
    }

    /// Indexer of sparse attention.
    pub fn indexer(&self) -> Option<&IndexerFlow> {
        self.indexer.as_ref()
    }

    /// Widths of queries and of keys.
    pub(crate) fn widths(&self) -> (usize, usize) {
        let shape = &self.shape;
        (shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim)
    }

    /// Rules for the scores before the softmax and for the weights after it.
    pub(crate) fn score_rules<'s>(&self, sinks: Option<&'s [f32]>) -> ScoreRules<'s> {
        let weights = self.operands.as_ref().and_then(OperandRounding::weights);
        ScoreRules { softcap: self.softcap, sinks, weights }
    }

    /// Joins q, k and v, or their gradients, into rows of the joined projection: the reverse of its split.
    pub fn join_qkv(&self, q: &[f32], k: &[f32], v: &[f32], joined: &mut [f32]) {
        let ((q_width, kv_width), d) = (self.widths(), self.shape.head_dim);
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

    /// Rotates and attends in each sequence. A thread takes consecutive ones.
    pub(crate) fn attend(&self, seqs: &Sequences<'_>, sinks: Option<&[f32]>, a: &mut Activations<'_>) {
        let (q_width, kv_width) = self.widths();
        let heads = self.shape.heads;
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
            self.rotate(0, q, self.shape.heads, cos, sin);
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
            match lse.as_mut().map(|lse| first(lse, len * self.shape.heads)) {
                Some(lse) => {
                    kernels().attention_causal_saving(&self.shape, rules, q, k, this_v, out, lse, scores);
                }
                None if of_token > 0 && len > of_token => {
                    self.attend_chosen(rules, [q, k, this_v], of_sequence, out, scores);
                }
                None => {
                    kernels().attention_causal_with(&self.shape, rules, q, k, this_v, out, scores);
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
        let (d, width) = (self.shape.head_dim, self.widths().0);
        let n = chosen.len() * width / q.len();
        let all = n * width;
        let (of_all, of_chosen) = out.split_at_mut(all);
        kernels().attention_causal_with(&self.shape, rules, &q[..all], &k[..all], &v[..all], of_all, scores);
        let shape = CausalAttention { heads: 1, kv_heads: 1, ..self.shape };
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

    /// Rotates heads of consecutive tokens, `[tokens, heads · head_dim]`; the first is at position `start`.
    pub fn rotate(&self, start: usize, x: &mut [f32], heads: usize, cos: &[f32], sin: &[f32]) {
        let (head_dim, half) = (self.shape.head_dim, self.half);
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
        let heads = self.shape.kv_heads;
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
}

/// Splits the first `n` values off `rest`.
fn first<'a>(rest: &mut &'a mut [f32], n: usize) -> &'a mut [f32] {
    let (first, others) = std::mem::take(rest).split_at_mut(n);
    *rest = others;
    first
}

/// Operations.
impl Attention {
    fn queries(&self) -> View {
        View::new(Buffer::Queries, self.widths().0)
    }

    fn keys(&self) -> View {
        View::new(Buffer::Keys, self.widths().1)
    }

    fn values(&self) -> View {
        View::new(Buffer::Values, self.widths().1)
    }

    /// Joined heads, with padding.
    pub(crate) fn joined(&self) -> View {
        View::new(Buffer::Attended, self.widths().0)
    }

    /// Projects queries, keys and values, before norms and RoPE; the queries alone where a cache holds latents.
    pub(crate) fn project(&self, frame: &Frame, cached: bool, ops: &mut Vec<Op>) {
        let x = frame.normed();
        if let Some(latent) = &self.latent {
            return latent.project(&self.shape, x, cached, ops);
        }
        match self.qkv {
            QkvForm::Separate if self.gated => self.project_gated(x, ops),
            QkvForm::Separate => self.project_separate(x, ops),
            _ => self.project_joined(x, ops),
        }
        let all = [self.queries(), self.keys(), self.values()];
        if let Some(limit) = self.clip {
            let own = if self.own_kv { 3 } else { 1 };
            ops.extend(all.into_iter().take(own).map(|x| Op::Clip { x, limit }));
        }
        if self.interleaved {
            // Scores do not depend on the order of a head's values. `attended` is free until attention runs.
            let (head, rotated) = (self.shape.head_dim, 2 * (self.half + self.half_before_norms));
            let scratch = View::new(Buffer::Attended, rotated);
            let own = if self.own_kv { 2 } else { 1 };
            ops.extend(all.into_iter().take(own).map(|x| Op::SplitPairs { x, head, rotated, scratch }));
        }
    }

    fn project_separate(&self, x: View, ops: &mut Vec<Op>) {
        let own = match (self.own_kv, self.keys_are_values) {
            (false, _) => 1,
            (true, true) => 2,
            (true, false) => 3,
        };
        let all =
            [(LinearKind::Q, self.queries()), (LinearKind::K, self.keys()), (LinearKind::V, self.values())];
        let outputs = all.into_iter().take(own).map(|(linear, out)| Output { linear, out, add: false });
        ops.push(Op::Matmuls { input: LinearInput::Qkv, x, outputs: outputs.collect() });
        if own == 2 {
            ops.push(Op::Copy { x: self.keys(), out: self.values() });
        }
    }

    /// Projects each query together with the gate of its head.
    fn project_gated(&self, x: View, ops: &mut Vec<Op>) {
        let (heads, d) = (self.shape.heads, self.shape.head_dim);
        let gates = self.gates();
        let all = [(LinearKind::Q, gates), (LinearKind::K, self.keys()), (LinearKind::V, self.values())];
        let outputs = all.map(|(linear, out)| Output { linear, out, add: false }).to_vec();
        ops.push(Op::Matmuls { input: LinearInput::Qkv, x, outputs });
        ops.push(Op::CopyColumns(Columns::new(gates, (0, 2 * d), self.queries(), (0, d), [heads, d])));
    }

    /// Queries and gates of the heads.
    fn gates(&self) -> View {
        View::new(Buffer::Wide, 2 * self.widths().0)
    }

    /// Projects queries, keys and values by one matrix, for all heads or head by head.
    fn project_joined(&self, x: View, ops: &mut Vec<Op>) {
        let (q_width, kv_width) = self.widths();
        let joined = View::new(Buffer::Wide, q_width + 2 * kv_width);
        let outputs = vec![Output { linear: LinearKind::Qkv, out: joined, add: false }];
        ops.push(Op::Matmuls { input: LinearInput::Qkv, x, outputs });
        let groups = if self.qkv == QkvForm::ByHead { self.shape.heads } else { 1 };
        let mut from = 0;
        for out in [self.queries(), self.keys(), self.values()] {
            let count = out.width / groups;
            let stride = joined.width / groups;
            ops.push(Op::CopyColumns(Columns::new(joined, (from, stride), out, (0, count), [groups, count])));
            from += count;
        }
    }

    /// Norms queries, keys and values, attends, and gates the heads.
    pub(crate) fn heads(&self, cached: bool, ops: &mut Vec<Op>) {
        if self.half_before_norms > 0 {
            let (head, half) = (self.shape.head_dim, self.half_before_norms);
            let own = if self.own_kv { 2 } else { 1 };
            ops.extend([self.queries(), self.keys()].into_iter().take(own).map(|x| Op::Rotate {
                x,
                head,
                half,
            }));
        }
        if self.head_norms != HeadNorms::Absent {
            let all = [
                (NormKind::Query, self.queries()),
                (NormKind::Key, self.keys()),
                (NormKind::Value, self.values()),
            ];
            let own = if self.value_norm { 3 } else { 2 };
            for (norm, x) in all.into_iter().take(if self.own_kv { own } else { 1 }) {
                // `attended` is free until attention runs, and at least as wide as the keys.
                let out = View::new(Buffer::Attended, x.width);
                ops.extend([Op::Norm { norm, x, out }, Op::Copy { x: out, out: x }]);
            }
        }
        ops.extend(self.growth.map(|growth| Op::Grow { x: self.queries(), growth }));
        ops.push(if cached { Op::AttendLatents } else { Op::Attend });
        if self.gated {
            ops.push(Op::GateHeads { gates: self.gates(), x: self.joined(), head: self.shape.head_dim });
        }
        ops.extend(scaled(self.factor, self.joined()));
    }

    /// Projects the joined heads and adds the result to the residual stream.
    pub(crate) fn output(&self, frame: &Frame, ops: &mut Vec<Op>) {
        let mut x = self.joined();
        if self.sub_norms {
            let out = View::new(Buffer::NormedHeads, x.width);
            ops.push(Op::Norm { norm: NormKind::AttentionSub, x, out });
            x = out;
        } else if let Some(latent) = &self.latent {
            // Drops the padding of the values.
            let (heads, d, count) = (self.shape.heads, self.shape.head_dim, latent.value);
            let out = View::new(Buffer::Queries, heads * count);
            ops.push(Op::CopyColumns(Columns::new(x, (0, d), out, (0, count), [heads, count])));
            x = out;
        }
        let scratch = View::new(Buffer::Wide, frame.hidden);
        frame.add_result((LinearKind::O, LinearInput::O), x, NormKind::AfterAttention, scratch, ops);
    }
}
