//! Attention over the cache of one sequence: all of its tokens are decoded to f32 first.

use mantissa_kernels::{ScoreRules, kernels};

use super::{LATENT_QUERIES, Past};
use crate::error::ForwardError;
use crate::flow::{Activations, CachedAttention, LatentTokens, LayerFlow, Operators, Sequences};
use crate::graph::LinearKind;
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
        flow: &LayerFlow,
        seqs: &Sequences<'_>,
        rules: ScoreRules<'_>,
        a: &mut Activations<'_>,
    ) -> Result<(), ForwardError> {
        let (q_width, kv_width) = flow.widths();
        let (tokens, start) = (seqs.tokens(), seqs.start(0));
        let (q, k) = (&mut a.q[..tokens * q_width], &mut a.k[..tokens * kv_width]);
        let v = &mut a.v[..tokens * kv_width];
        flow.rotate(start, q, flow.attention.heads, a.cos, a.sin);
        let kv_heads = flow.attention.kv_heads;
        let (start, k, v) = match flow.own_kv {
            true => (start, k, v),
            // All tokens are in the cache: the layer that projects them has appended the new ones.
            false => (start + tokens, &mut [][..], &mut [][..]),
        };
        let before_rope = flow.kv.as_ref().is_some_and(|kv| kv.parts().before_rope);
        match &flow.kv {
            _ if before_rope || !flow.own_kv => {}
            Some(kv) if kv.parts().as_written => flow.rotate_and_store(start, k, v, a.cos, a.sin),
            _ => flow.rotate(start, k, kv_heads, a.cos, a.sin),
        }
        let (k, v) = self.append(start, kv_width, k, v)?;
        if before_rope {
            flow.rotate(0, k, kv_heads, a.cos, a.sin);
        }
        // Cached keys and values stay unrounded.
        let mut rounded = None;
        if let Some(operands) = &flow.operands {
            operands.queries(q);
            if operands.rounds_past() {
                let (k, v) = rounded.insert((k.to_vec(), v.to_vec()));
                operands.keys_and_values(k, v);
            }
        }
        let (k, v) = rounded.as_ref().map_or((&*k, &*v), |(k, v)| (k, v));
        let (out, padding) = a.attended[..seqs.rows * q_width].split_at_mut(tokens * q_width);
        kernels().attention_causal_with(&flow.attention, rules, q, k, v, out, a.scores);
        padding.fill(0.0);
        Ok(())
    }

    fn attend_latents(
        &mut self,
        flow: &LayerFlow,
        seqs: &Sequences<'_>,
        rows: &mut LatentTokens<'_>,
        operators: &mut dyn Operators,
    ) -> Result<(), ForwardError> {
        let Some(latent) = &flow.latent else { return Ok(()) };
        let (tokens, start, q_width) = (seqs.tokens(), seqs.start(0), flow.widths().0);
        let angles = start * flow.half..(start + tokens) * flow.half;
        if flow.rotates() {
            let (cos, sin) = (&rows.cos[angles.clone()], &rows.sin[angles]);
            kernels().rope_rotate(rows.rotated, 1, latent.rotated, cos, sin);
        }
        let scratch = self.append_latents(rows.latents, rows.rotated)?;
        let all = start + tokens;
        operators.apart(
            LinearKind::KvB,
            &mut scratch.latents[..all * latent.kv_rank],
            &mut scratch.weight,
        )?;
        scratch.join(latent, all);
        flow.rotate(start, rows.q, flow.attention.heads, rows.cos, rows.sin);
        let queries = LATENT_QUERIES * q_width;
        let mut seen = start;
        for (q, out) in rows.q.chunks(queries).zip(rows.attended.chunks_mut(queries)) {
            seen += q.len() / q_width;
            flow.attend_absorbed(latent, seen, q, out, scratch);
        }
        Ok(())
    }
}
