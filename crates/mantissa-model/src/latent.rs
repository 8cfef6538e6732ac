//! Multi-head latent attention (DeepSeek-V2, sec. 2.1.2 and 2.1.3). Queries, keys and values are projected from
//! narrow latents to ordinary heads, so masks and kernels are the same as in any other model. With a cache the
//! latents are not expanded: their projection is applied to the queries and to the weighted latents (sec. 2.1.2,
//! "absorbed"), and attention reads one vector per token, its latent and the rotated part of its keys.
//!
//! A head of queries and keys consists of its rotated part, then the rest, then zeros up to the common width of
//! heads; a head of values of its values, then zeros. Zeros change no score, nor does the order of elements as long
//! as queries and keys agree. With the rotated part first and its pairs half of it apart, the ordinary rotation
//! applies.

mod absorbed;

use mantissa_kernels::kernels;

pub use self::absorbed::AbsorbedHeads;
use crate::attention::split_pairs;
use crate::cache::LatentScratch;
use crate::config::Latent;
use crate::error::ForwardError;
use crate::flow::{Activations, CachedAttention, Job, LatentTokens, LayerFlow, Operators, Sequences};
use crate::graph::{LinearInput, LinearKind, NormKind};

impl Latent {
    /// Scratch values per row: latents, their normed copies, and their projections.
    pub(crate) fn scratch(&self, heads: usize) -> usize {
        let q = self.q_rank.unwrap_or(0);
        2 * q + 2 * self.kv_rank + self.rotated + heads * (self.head() + self.unrotated + self.value)
    }

    /// Copies the rotated part of a head, its pairs brought half of it apart.
    fn rotated_part(&self, from: &[f32], to: &mut [f32]) {
        if !self.interleaved {
            return to.copy_from_slice(from);
        }
        split_pairs(from, to);
    }
}

/// Scratch of a pass: the outputs of its projections.
struct LatentRows<'a> {
    /// `[rows, heads · head]`.
    queries: &'a mut [f32],
    /// Keys and values projected from the latents, `[rows, heads · (unrotated + value)]`.
    spread: &'a mut [f32],
    /// Latents and rotated parts of keys, `[rows, kv_rank + rotated]`.
    compressed: &'a mut [f32],
    /// Normed latents, `[rows, kv_rank]`.
    kv_latent: &'a mut [f32],
    rest: &'a mut [f32],
}

impl<'a> LatentRows<'a> {
    fn of(latent: &Latent, rows: usize, heads: usize, wide: &'a mut [f32]) -> Self {
        let (queries, rest) = wide.split_at_mut(rows * heads * latent.head());
        let (spread, rest) = rest.split_at_mut(rows * heads * (latent.unrotated + latent.value));
        let (compressed, rest) = rest.split_at_mut(rows * (latent.kv_rank + latent.rotated));
        let (kv_latent, rest) = rest.split_at_mut(rows * latent.kv_rank);
        LatentRows { queries, spread, compressed, kv_latent, rest }
    }
}

impl LayerFlow {
    /// Projects queries, keys and values, before RoPE; for `cached` latents, the queries alone.
    pub(crate) fn project_latent(
        &self,
        latent: Latent,
        operators: &mut impl Operators,
        seqs: &Sequences<'_>,
        cached: bool,
        a: &mut Activations<'_>,
    ) -> Result<(), ForwardError> {
        let (rows, tokens, heads) = (seqs.rows, seqs.tokens(), self.attention.heads);
        let x = &a.normed[..rows * self.hidden];
        let rank = latent.q_rank.unwrap_or(0);
        let LatentRows { compressed, kv_latent, queries, spread, rest } =
            LatentRows::of(&latent, rows, heads, a.extra.wide);
        let (q_latent, rest) = rest.split_at_mut(rows * rank);
        let accumulate = false;
        let from_states = match latent.q_rank {
            Some(_) => Job { kind: LinearKind::QA, out: &mut *q_latent, accumulate },
            None => Job { kind: LinearKind::Q, out: &mut *queries, accumulate },
        };
        let mut jobs = [from_states, Job { kind: LinearKind::KvA, out: &mut *compressed, accumulate }];
        operators.linears(LinearInput::Qkv, x, tokens, &mut jobs)?;
        if latent.q_rank.is_some() {
            let normed = &mut rest[..rows * rank];
            operators.norm(NormKind::QLatent, q_latent, normed);
            let mut jobs = [Job { kind: LinearKind::QB, out: &mut *queries, accumulate }];
            operators.linears(LinearInput::QLatent, normed, tokens, &mut jobs)?;
            self.project_index(operators, seqs, cached, (x, normed), &mut a.extra.index);
        }
        // The latent is the first part of each compressed row; the rotated part of the keys follows it.
        let stride = latent.kv_rank + latent.rotated;
        for (row, normed) in compressed.chunks_exact(stride).zip(kv_latent.chunks_exact_mut(latent.kv_rank)) {
            operators.norm(NormKind::KvLatent, &row[..latent.kv_rank], normed);
        }
        self.lay_out_queries(&latent, queries, a.q);
        if cached {
            return Ok(());
        }
        if let Some(kv) = &self.kv {
            kv.latents(&mut kv_latent[..tokens * latent.kv_rank]);
        }
        let mut jobs = [Job { kind: LinearKind::KvB, out: &mut *spread, accumulate }];
        operators.linears(LinearInput::KvLatent, kv_latent, tokens, &mut jobs)?;
        self.lay_out(&latent, spread, compressed, a.k, a.v);
        Ok(())
    }

    /// Attends to the latents of all tokens, those in `past` and the new ones, which are appended.
    pub(crate) fn attend_latents(
        &self,
        operators: &mut impl Operators,
        seqs: &Sequences<'_>,
        past: &mut dyn CachedAttention,
        a: &mut Activations<'_>,
    ) -> Result<(), ForwardError> {
        let Some(latent) = &self.latent else { return Ok(()) };
        let (tokens, heads, (q_width, _)) = (seqs.tokens(), self.attention.heads, self.widths());
        let parts = LatentRows::of(latent, seqs.rows, heads, a.extra.wide);
        // The queries are in `q` by now, so their place is free.
        let rotated = &mut parts.queries[..tokens * latent.rotated];
        let compressed = parts.compressed.chunks_exact(latent.kv_rank + latent.rotated);
        for (row, rotated) in compressed.zip(rotated.chunks_exact_mut(latent.rotated)) {
            latent.rotated_part(&row[latent.kv_rank..], rotated);
        }
        let (attended, padding) = a.attended[..seqs.rows * q_width].split_at_mut(tokens * q_width);
        padding.fill(0.0);
        let mut rows = LatentTokens {
            q: &mut a.q[..tokens * q_width],
            latents: &mut parts.kv_latent[..tokens * latent.kv_rank],
            rotated,
            attended,
            index: a.extra.index.borrowed(),
            cos: a.cos,
            sin: a.sin,
        };
        past.attend_latents(self, seqs, &mut rows, operators)
    }

    /// Computes the heads of consecutive rotated queries `q` over the first `seen` tokens in `scratch`; the last query
    /// belongs to the last of them. One query may attend to the `chosen` of them alone. `out` has the shape of `q`.
    pub(crate) fn attend_absorbed(
        &self,
        latent: &Latent,
        (seen, chosen): (usize, Option<&[u32]>),
        q: &[f32],
        out: &mut [f32],
        scratch: &mut LatentScratch,
    ) {
        let (d, heads, rank) = (self.attention.head_dim, self.attention.heads, latent.kv_rank);
        let (joined, each) = (rank + latent.rotated, latent.unrotated + latent.value);
        let len = q.len() / d * joined;
        let (queries, weighted) = (&mut scratch.queries[..len], &mut scratch.weighted[..len]);
        let weights = |head: usize| {
            let rows = &scratch.weight[head * each * rank..(head + 1) * each * rank];
            rows.split_at(latent.unrotated * rank)
        };
        for (i, (q, query)) in q.chunks_exact(d).zip(queries.chunks_exact_mut(joined)).enumerate() {
            let (query, rotated) = query.split_at_mut(rank);
            rotated.copy_from_slice(&q[..latent.rotated]);
            query.fill(0.0);
            let of_keys = weights(i % heads).0.chunks_exact(rank);
            q[latent.rotated..].iter().zip(of_keys).for_each(|(x, row)| kernels().axpy(*x, row, query));
        }
        let (shape, rules) = (latent.attention(heads, self.attention.scale), self.score_rules(None));
        let tokens = match chosen {
            None => &scratch.joined[..seen * joined],
            Some(chosen) => {
                let gathered = &mut scratch.gathered[..chosen.len() * joined];
                for (token, to) in chosen.iter().zip(gathered.chunks_exact_mut(joined)) {
                    to.copy_from_slice(&scratch.joined[*token as usize * joined..][..joined]);
                }
                &*gathered
            }
        };
        kernels().attention_causal_with(
            &shape,
            rules,
            queries,
            tokens,
            tokens,
            weighted,
            &mut scratch.scores,
        );
        for (i, (weighted, out)) in weighted.chunks_exact(joined).zip(out.chunks_exact_mut(d)).enumerate() {
            let of_values = weights(i % heads).1.chunks_exact(rank);
            out[latent.value..].fill(0.0);
            out.iter_mut().zip(of_values).for_each(|(x, row)| *x = kernels().dot(row, &weighted[..rank]));
        }
    }

    /// Lays queries out as described in the module.
    fn lay_out_queries(&self, latent: &Latent, queries: &[f32], q: &mut [f32]) {
        let (d, whole) = (self.attention.head_dim, latent.head());
        for (from, to) in queries.chunks_exact(whole).zip(q.chunks_exact_mut(d)) {
            let (unrotated, rotated) = from.split_at(latent.unrotated);
            latent.rotated_part(rotated, &mut to[..latent.rotated]);
            to[latent.rotated..whole].copy_from_slice(unrotated);
            to[whole..].fill(0.0);
        }
    }

    /// Lays keys and values out as described in the module.
    fn lay_out(&self, latent: &Latent, spread: &[f32], compressed: &[f32], k: &mut [f32], v: &mut [f32]) {
        let (d, heads, whole) = (self.attention.head_dim, self.attention.heads, latent.head());
        let each = latent.unrotated + latent.value;
        let rows =
            spread.chunks_exact(heads * each).zip(compressed.chunks_exact(latent.kv_rank + latent.rotated));
        let targets = k.chunks_exact_mut(heads * d).zip(v.chunks_exact_mut(heads * d));
        for ((spread, compressed), (k, v)) in rows.zip(targets) {
            let heads = k.chunks_exact_mut(d).zip(v.chunks_exact_mut(d));
            for (from, (k, v)) in spread.chunks_exact(each).zip(heads) {
                latent.rotated_part(&compressed[latent.kv_rank..], &mut k[..latent.rotated]);
                k[latent.rotated..whole].copy_from_slice(&from[..latent.unrotated]);
                k[whole..].fill(0.0);
                v[..latent.value].copy_from_slice(&from[latent.unrotated..]);
                v[latent.value..].fill(0.0);
            }
        }
    }
}
