//! Attention over the cache of one sequence: all of its tokens are decoded to f32 first.

use std::ops::Range;

use mantissa_kernels::{ScoreRules, kernels};

use super::Past;
use crate::error::ForwardError;
use crate::flow::{Activations, Attention, CachedAttention, LatentTokens, Operators, Sequences};
use crate::graph::LinearKind;
use crate::latent::LATENT_QUERIES;
use crate::mixer::States;

impl CachedAttention for Past<'_> {
    fn holds_latents(&self) -> bool {
        true
    }

    fn states(&mut self) -> Result<States<'_>, ForwardError> {
        match &mut self.state {
            Some(state) => Ok(state.states()),
            None => Err(ForwardError::OtherModel { what: "KV cache" }),
        }
    }

    fn attend(
        &mut self,
        attention: &Attention,
        seqs: &Sequences<'_>,
        rules: ScoreRules<'_>,
        a: &mut Activations<'_>,
    ) -> Result<(), ForwardError> {
        let (q_width, kv_width) = attention.widths();
        let (tokens, start) = (seqs.tokens(), seqs.start(0));
        let (q, k) = (&mut a.q[..tokens * q_width], &mut a.k[..tokens * kv_width]);
        let v = &mut a.v[..tokens * kv_width];
        attention.rotate(start, q, attention.shape.heads, a.cos, a.sin);
        let kv_heads = attention.shape.kv_heads;
        let (start, k, v) = match attention.own_kv {
            true => (start, k, v),
            // All tokens are in the cache: the layer that projects them has appended the new ones.
            false => (start + tokens, &mut [][..], &mut [][..]),
        };
        let before_rope = attention.kv.as_ref().is_some_and(|kv| kv.parts().before_rope);
        match &attention.kv {
            _ if before_rope || !attention.own_kv => {}
            Some(kv) if kv.parts().as_written => attention.rotate_and_store(start, k, v, a.cos, a.sin),
            _ => attention.rotate(start, k, kv_heads, a.cos, a.sin),
        }
        let (k, v) = self.append(start, kv_width, k, v)?;
        if before_rope {
            attention.rotate(0, k, kv_heads, a.cos, a.sin);
        }
        // Cached keys and values stay unrounded.
        let mut rounded = None;
        if let Some(operands) = &attention.operands {
            operands.queries(q);
            if operands.rounds_past() {
                let (k, v) = rounded.insert((k.to_vec(), v.to_vec()));
                operands.keys_and_values(k, v);
            }
        }
        let (k, v) = rounded.as_ref().map_or((&*k, &*v), |(k, v)| (k, v));
        let (out, padding) = a.attended[..seqs.rows * q_width].split_at_mut(tokens * q_width);
        kernels().attention_causal_with(&attention.shape, rules, q, k, v, out, a.scores);
        padding.fill(0.0);
        Ok(())
    }

    fn attend_latents(
        &mut self,
        attention: &Attention,
        seqs: &Sequences<'_>,
        rows: &mut LatentTokens<'_>,
        operators: &mut dyn Operators,
    ) -> Result<(), ForwardError> {
        let Some(latent) = &attention.latent else { return Ok(()) };
        let (tokens, start, q_width) = (seqs.tokens(), seqs.start(0), attention.widths().0);
        let angles = start * attention.half..(start + tokens) * attention.half;
        if attention.rotates() {
            let (cos, sin) = (&rows.cos[angles.clone()], &rows.sin[angles]);
            kernels().rope_rotate(rows.rotated, 1, latent.rotated, cos, sin);
        }
        let index_keys = attention.indexer.map_or(0, |indexer| tokens * indexer.key_width());
        let index_keys = &mut rows.index.keys[..index_keys];
        if let Some(indexer) = &attention.indexer {
            indexer.rotate(start, index_keys, rows.cos, rows.sin, 1);
        }
        let scratch = self.append_latents(rows.latents, rows.rotated, index_keys)?;
        let all = start + tokens;
        operators.apart(
            LinearKind::KvB,
            &mut scratch.latents[..all * latent.kv_rank],
            &mut scratch.weight,
        )?;
        scratch.join(latent, all);
        attention.rotate(start, rows.q, attention.shape.heads, rows.cos, rows.sin);
        let chosen = attention.indexer.map_or(usize::MAX, |indexer| indexer.chosen());
        if let Some(indexer) = attention.indexer.filter(|of| all > chosen && of.key_width() > 0) {
            let (queries, weights, lists) = indexer.rows_of(0..tokens, &mut rows.index);
            indexer.rotate_queries(start, queries, rows.cos, rows.sin);
            let (keys, width) = (&scratch.index, indexer.key_width());
            let read = |range: Range<usize>, out: &mut [f32]| {
                out.copy_from_slice(&keys[range.start * width..range.end * width]);
            };
            indexer.choose(start, (queries, weights), &read, lists, attention.threads);
        }
        // The first queries attend to all tokens before them.
        let to_all = chosen.saturating_sub(start).min(tokens) * q_width;
        let (q, q_of_chosen) = rows.q.split_at(to_all);
        let (out, out_of_chosen) = rows.attended.split_at_mut(to_all);
        let queries = LATENT_QUERIES * q_width;
        let mut seen = start;
        for (q, out) in q.chunks(queries).zip(out.chunks_mut(queries)) {
            seen += q.len() / q_width;
            attention.attend_absorbed(latent, (seen, None), q, out, scratch);
        }
        let others = q_of_chosen.chunks_exact(q_width).zip(out_of_chosen.chunks_exact_mut(q_width));
        let lists = rows.index.chosen.chunks_exact(chosen).skip(to_all / q_width);
        for ((q, out), list) in others.zip(lists) {
            attention.attend_absorbed(latent, (chosen, Some(list)), q, out, scratch);
        }
        Ok(())
    }
}
