//! Multi-head latent attention (DeepSeek-V2, sec. 2.1.2 and 2.1.3): queries, keys and values are made of narrow latents,
//! here spread out into ordinary heads, so that masks, caches and kernels are those of any other model.
//!
//! A head of queries and keys is laid out as its rotated part, then the other, then zeros up to the common width of heads;
//! one of values as its values, then zeros. Zeros change no score, and the order of a head's elements none either as long
//! as queries and keys agree; with the rotated part first and its pairs half of it apart the ordinary rotation fits.

use crate::config::Latent;
use crate::error::ForwardError;
use crate::flow::{Activations, Job, LayerFlow, NormKind, Operators, Sequences};
use crate::graph::{LinearInput, LinearKind};

impl Latent {
    /// Values of scratch for each row: latents, their normed copies, and what becomes of them.
    pub(crate) fn scratch(&self, heads: usize) -> usize {
        let q = self.q_rank.unwrap_or(0);
        2 * q + 2 * self.kv_rank + self.rotated + heads * (self.head() + self.unrotated + self.value)
    }

    /// The rotated part of a head, its pairs brought half of it apart.
    fn rotated_part(&self, from: &[f32], to: &mut [f32]) {
        if !self.interleaved {
            return to.copy_from_slice(from);
        }
        let (first, second) = to.split_at_mut(self.rotated / 2);
        for ((pair, first), second) in from.chunks_exact(2).zip(first).zip(second) {
            (*first, *second) = (pair[0], pair[1]);
        }
    }
}

impl LayerFlow {
    /// Queries, keys and values of latent attention, not yet rotated.
    pub(crate) fn project_latent(
        &self,
        latent: Latent,
        operators: &mut impl Operators,
        seqs: &Sequences<'_>,
        a: &mut Activations<'_>,
    ) -> Result<(), ForwardError> {
        let (rows, tokens, heads) = (seqs.rows, seqs.tokens(), self.attention.heads);
        let x = &a.normed[..rows * self.hidden];
        let rank = latent.q_rank.unwrap_or(0);
        let (queries, rest) = a.extra.wide.split_at_mut(rows * heads * latent.head());
        let (spread, rest) = rest.split_at_mut(rows * heads * (latent.unrotated + latent.value));
        let (compressed, rest) = rest.split_at_mut(rows * (latent.kv_rank + latent.rotated));
        let (kv_latent, rest) = rest.split_at_mut(rows * latent.kv_rank);
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
        }
        // The latent is the first part of each compressed row; the rotated part of the keys follows it.
        let stride = latent.kv_rank + latent.rotated;
        for (row, normed) in compressed.chunks_exact(stride).zip(kv_latent.chunks_exact_mut(latent.kv_rank)) {
            operators.norm(NormKind::KvLatent, &row[..latent.kv_rank], normed);
        }
        if let Some(kv) = &self.kv {
            kv.latents(&mut kv_latent[..tokens * latent.kv_rank]);
        }
        let mut jobs = [Job { kind: LinearKind::KvB, out: &mut *spread, accumulate }];
        operators.linears(LinearInput::KvLatent, kv_latent, tokens, &mut jobs)?;
        self.lay_out(&latent, queries, spread, compressed, a.q, a.k, a.v);
        Ok(())
    }

    /// Lays heads out as the module says.
    fn lay_out(
        &self,
        latent: &Latent,
        queries: &[f32],
        spread: &[f32],
        compressed: &[f32],
        q: &mut [f32],
        k: &mut [f32],
        v: &mut [f32],
    ) {
        let (d, heads, whole) = (self.attention.head_dim, self.attention.heads, latent.head());
        for (from, to) in queries.chunks_exact(whole).zip(q.chunks_exact_mut(d)) {
            let (unrotated, rotated) = from.split_at(latent.unrotated);
            latent.rotated_part(rotated, &mut to[..latent.rotated]);
            to[latent.rotated..whole].copy_from_slice(unrotated);
            to[whole..].fill(0.0);
        }
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
