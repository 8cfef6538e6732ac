//! Multi-head latent attention (DeepSeek-V2, sec. 2.1.2 and 2.1.3). Queries, keys and values are projected from
//! narrow latents to ordinary heads, so masks and kernels are the same as in any other model. With a cache the
//! latents are not expanded: their projection is applied to the queries and to the weighted latents (sec. 2.1.2,
//! "absorbed"), and attention reads one vector per token, its latent and the rotated part of its keys.
//!
//! A head of queries and keys consists of its rotated part, then the rest, then zeros up to the common width of
//! heads; a head of values of its values, then zeros. Zeros change no score, nor does the order of elements as long
//! as queries and keys agree. With the rotated part first and its pairs half of it apart, the ordinary rotation
//! applies.

mod lower;
mod scratch;

use mantissa_kernels::kernels;

pub(crate) use self::scratch::{LATENT_QUERIES, LatentScratch};
use crate::attention::Attention;
use crate::config::Latent;
use crate::operators::{Activations, LatentTokens, Sequences};
use crate::rope::split_pairs;

impl Latent {
    /// Copies the rotated part of a head, its pairs brought half of it apart.
    fn rotated_part(&self, from: &[f32], to: &mut [f32]) {
        if !self.interleaved {
            return to.copy_from_slice(from);
        }
        split_pairs(from, to);
    }
}

impl Attention {
    /// Takes the tokens of a pass of latent attention, before RoPE, from the outputs of its
    /// [projections](Latent::project), and clears the padding of the joined heads.
    pub(crate) fn latent_tokens<'a>(
        &self,
        latent: &Latent,
        seqs: &Sequences<'_>,
        a: &'a mut Activations<'_>,
    ) -> LatentTokens<'a> {
        let (tokens, q_width) = (seqs.tokens(), self.widths().0);
        let [queries, spread, compressed, _] =
            latent.views(self.shape.heads).map(|view| seqs.rows * view.width);
        // The queries are in `q` by now, so their place is free.
        let (rotated, rest) = a.extra.wide.split_at_mut(queries);
        let rotated = &mut rotated[..tokens * latent.rotated];
        let (compressed, latents) = rest[spread..].split_at_mut(compressed);
        let latents = &mut latents[..tokens * latent.kv_rank];
        let compressed = compressed.chunks_exact(latent.kv_rank + latent.rotated);
        for (row, rotated) in compressed.zip(rotated.chunks_exact_mut(latent.rotated)) {
            latent.rotated_part(&row[latent.kv_rank..], rotated);
        }
        let (attended, padding) = a.attended[..seqs.rows * q_width].split_at_mut(tokens * q_width);
        padding.fill(0.0);
        LatentTokens {
            q: &mut a.q[..tokens * q_width],
            latents,
            rotated,
            attended,
            index: a.extra.index.borrowed(),
            cos: a.cos,
            sin: a.sin,
        }
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
        let (d, heads, rank) = (self.shape.head_dim, self.shape.heads, latent.kv_rank);
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
        let (shape, rules) = (latent.attention(heads, self.shape.scale), self.score_rules(None));
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
}
