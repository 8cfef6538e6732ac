//! Causal self-attention with grouped key/value heads (Vaswani et al. 2017, "Attention Is All You Need", eq.
//! 1; Ainslie et al. 2023, "GQA"), rotary positions, and the norms that Qwen3 puts on the heads and BitNet
//! before the output projection.
//!
//! The flow reads `normed` `[rows, hidden]` and adds its result to `residual` `[rows, hidden]`.

use mantissa_kernels::{for_each, kernels};

use crate::cache::LayerCache;
use crate::config::ModelConfig;
use crate::error::{ForwardError, LoadError};
use crate::flow::{Activations, Job, LayerFlow, NormKind, Operators, Sequences};
use crate::graph::{LinearInput, LinearKind, prefix};
use crate::layer::load_linear;
use crate::linear::Linear;
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
        })
    }
}

/// The sequences of one thread: their queries, keys, values and results, and where they are rotated and scored.
struct Group<'a> {
    lens: &'a [usize],
    q: &'a mut [f32],
    k: &'a mut [f32],
    v: &'a [f32],
    out: &'a mut [f32],
    lse: Option<&'a mut [f32]>,
    scores: &'a mut [f32],
}

impl LayerFlow {
    pub(crate) fn project(
        &self,
        operators: &mut impl Operators,
        seqs: &Sequences<'_>,
        a: &mut Activations<'_>,
    ) -> Result<(), ForwardError> {
        let (q_width, kv_width) = self.widths();
        let (rows, accumulate) = (seqs.rows, false);
        let mut jobs = [
            Job { kind: LinearKind::Q, out: &mut a.q[..rows * q_width], accumulate },
            Job { kind: LinearKind::K, out: &mut a.k[..rows * kv_width], accumulate },
            Job { kind: LinearKind::V, out: &mut a.v[..rows * kv_width], accumulate },
        ];
        operators.linears(LinearInput::Qkv, &a.normed[..rows * self.hidden], seqs.tokens(), &mut jobs)
    }

    pub(crate) fn norm_heads(&self, operators: &mut impl Operators, rows: usize, a: &mut Activations<'_>) {
        if !self.head_norms {
            return;
        }
        let (q_width, kv_width) = self.widths();
        // `attended` is free until the heads attend, and at least as wide as the keys.
        for (norm, x, width) in [(NormKind::Query, &mut *a.q, q_width), (NormKind::Key, &mut *a.k, kv_width)]
        {
            let (x, normed) = (&mut x[..rows * width], &mut a.attended[..rows * width]);
            operators.norm(norm, x, normed);
            x.copy_from_slice(normed);
        }
    }

    /// Rotates and attends in each of the sequences. A thread takes some consecutive ones.
    pub(crate) fn attend(&self, seqs: &Sequences<'_>, a: &mut Activations<'_>) {
        let (q_width, kv_width) = self.widths();
        let heads = self.attention.heads;
        let tokens = seqs.tokens();
        let (mut out, padding) = a.attended[..seqs.rows * q_width].split_at_mut(tokens * q_width);
        padding.fill(0.0);
        if seqs.lens.is_empty() {
            return;
        }
        let (mut q, mut k) = (&mut a.q[..tokens * q_width], &mut a.k[..tokens * kv_width]);
        let mut v = &a.v[..tokens * kv_width];
        let mut lse = a.lse.as_deref_mut();
        let threads = self.threads.min(seqs.lens.len());
        let scores = a.scores.len() / threads;
        let groups =
            seqs.lens.chunks(seqs.lens.len().div_ceil(threads)).zip(a.scores.chunks_mut(scores.max(1)));
        let groups = groups.map(move |(lens, scores)| {
            let tokens: usize = lens.iter().sum();
            let part_of_v;
            (part_of_v, v) = v.split_at(tokens * kv_width);
            Group {
                lens,
                q: first(&mut q, tokens * q_width),
                k: first(&mut k, tokens * kv_width),
                v: part_of_v,
                out: first(&mut out, tokens * q_width),
                lse: lse.as_mut().map(|lse| first(lse, tokens * heads)),
                scores,
            }
        });
        let (cos, sin) = (a.cos, a.sin);
        for_each(threads, groups, |group| self.attend_group(seqs.start, group, cos, sin));
    }

    fn attend_group(&self, start: usize, group: Group<'_>, cos: &[f32], sin: &[f32]) {
        let Group { lens, mut q, mut k, mut v, mut out, mut lse, scores } = group;
        let (q_width, kv_width) = self.widths();
        for &len in lens {
            let (q, k) = (first(&mut q, len * q_width), first(&mut k, len * kv_width));
            let (this_v, out) = (&v[..len * kv_width], first(&mut out, len * q_width));
            v = &v[len * kv_width..];
            self.rotate(start, q, k, cos, sin);
            match lse.as_mut().map(|lse| first(lse, len * self.attention.heads)) {
                Some(lse) => {
                    kernels().attention_causal_saving(&self.attention, q, k, this_v, out, lse, scores);
                }
                None => kernels().attention_causal(&self.attention, q, k, this_v, out, scores),
            }
        }
    }

    pub(crate) fn attend_cached(&self, seqs: &Sequences<'_>, past: &mut LayerCache, a: &mut Activations<'_>) {
        let (q_width, kv_width) = self.widths();
        let tokens = seqs.tokens();
        let (q, k) = (&mut a.q[..tokens * q_width], &mut a.k[..tokens * kv_width]);
        self.rotate(seqs.start, q, k, a.cos, a.sin);
        let (k, v) = past.append(seqs.start, kv_width, k, &a.v[..tokens * kv_width]);
        let (out, padding) = a.attended[..seqs.rows * q_width].split_at_mut(tokens * q_width);
        kernels().attention_causal(&self.attention, q, k, v, out, a.scores);
        padding.fill(0.0);
    }

    /// Rotates the queries and keys of one sequence that begins at position `start`; keys are then as the cache keeps them.
    fn rotate(&self, start: usize, q: &mut [f32], k: &mut [f32], cos: &[f32], sin: &[f32]) {
        let (q_width, kv_width) = self.widths();
        let (head_dim, half) = (self.attention.head_dim, self.attention.head_dim / 2);
        let angles = start * half..(start + q.len() / q_width) * half;
        let (cos, sin) = (&cos[angles.clone()], &sin[angles]);
        kernels().rope_rotate(q, q_width / head_dim, head_dim, cos, sin);
        kernels().rope_rotate(k, kv_width / head_dim, head_dim, cos, sin);
        if let Some(kv) = &self.kv {
            kv.keys(k);
        }
    }

    pub(crate) fn output(
        &self,
        operators: &mut impl Operators,
        seqs: &Sequences<'_>,
        a: &mut Activations<'_>,
    ) -> Result<(), ForwardError> {
        let len = seqs.rows * self.widths().0;
        let mut x = &a.attended[..len];
        if self.sub_norms {
            operators.norm(NormKind::AttentionSub, x, &mut a.q[..len]);
            x = &a.q[..len];
        }
        let out = &mut a.residual[..seqs.rows * self.hidden];
        let mut jobs = [Job { kind: LinearKind::O, out, accumulate: true }];
        operators.linears(LinearInput::O, x, seqs.tokens(), &mut jobs)
    }

    fn widths(&self) -> (usize, usize) {
        let shape = &self.attention;
        (shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim)
    }
}

/// Takes the first `n` values off `rest`.
fn first<'a>(rest: &mut &'a mut [f32], n: usize) -> &'a mut [f32] {
    let (first, others) = std::mem::take(rest).split_at_mut(n);
    *rest = others;
    first
}
