//! Backward of causal attention of one whole sequence (Dao et al. 2022, "FlashAttention", alg. 4). The weights are
//! recomputed from the scores and the saved log-sum-exp, so nothing of size `[t, t]` is stored.
//!
//! Blocks of queries are stacked as in the forward. Per block and key/value head, with `P` the weights and `D` the
//! sums of `dO ∘ O` along a row: `dV += Pᵀ dO`, `dS = scale · P ∘ (dO Vᵀ - D)`, `dQ = dS K`, `dK += dSᵀ Q`. The
//! blocks add to `dK` and `dV` in order, and heads that share them add within one product.

use crate::attention::{Block, QUERY_BLOCK, check, stack};
use crate::{CausalAttention, Kernels, MatMut, MatRef};

impl CausalAttention {
    /// Number of f32 of scratch that [`Kernels::attention_causal_backward`] needs for a sequence of `t`.
    ///
    /// # Panics
    /// If the number overflows `usize`.
    pub fn backward_scratch_len(&self, t: usize) -> usize {
        let positions = t.min(QUERY_BLOCK);
        let keys = self.seen_by(positions, t);
        let rows = positions.checked_mul(self.heads / self.kv_heads.max(1));
        let per_row = self.head_dim.checked_mul(3).and_then(|d| d.checked_add(keys.checked_mul(2)?));
        let len = rows.zip(per_row).and_then(|(rows, per_row)| rows.checked_mul(per_row));
        assert!(len.is_some(), "attention_causal_backward: the scratch for {t} queries overflows");
        len.unwrap_or(usize::MAX)
    }
}

/// Inputs and results of the forward pass of one sequence, for [`Kernels::attention_causal_backward`].
#[derive(Clone, Copy, Debug)]
pub struct AttentionSaved<'a> {
    /// Queries, `[t, heads * head_dim]`.
    pub q: &'a [f32],
    /// Keys, `[t, kv_heads * head_dim]`.
    pub k: &'a [f32],
    /// Values, like the keys.
    pub v: &'a [f32],
    /// The result, like the queries.
    pub out: &'a [f32],
    /// Log-sum-exp of the scores, `[t, heads]`.
    pub lse: &'a [f32],
}

/// Gradients that [`Kernels::attention_causal_backward`] writes.
#[derive(Debug)]
pub struct AttentionGrads<'a> {
    /// Gradient of the queries.
    pub q: &'a mut [f32],
    /// Gradient of the keys.
    pub k: &'a mut [f32],
    /// Gradient of the values.
    pub v: &'a mut [f32],
}

impl Kernels {
    /// Backward of [`Self::attention_causal_saving`] for a sequence whose queries are all its positions, with
    /// the result's gradient `dout`; `scratch` of at least [`CausalAttention::backward_scratch_len`]. `softcap` is that
    /// of the forward's rules. A sink needs none: it takes part in `lse`, and its own gradient, summed over the
    /// queries of its head, is `-exp(sink - lse) · (dO · O)`.
    ///
    /// # Panics
    /// If the shapes do not agree, there are more keys than queries, or `scratch` is too short.
    pub fn attention_causal_backward(
        &self,
        shape: &CausalAttention,
        softcap: Option<f32>,
        saved: AttentionSaved<'_>,
        dout: &[f32],
        grads: AttentionGrads<'_>,
        scratch: &mut [f32],
    ) {
        let (t, s) = check(shape, saved.q, saved.k, saved.v, saved.out);
        assert!(
            t == s && dout.len() == saved.q.len() && saved.lse.len() == t * shape.heads,
            "attention_causal_backward: queries, keys, lse and gradient are not of one sequence"
        );
        assert!(
            grads.q.len() == saved.q.len()
                && grads.k.len() == saved.k.len()
                && grads.v.len() == saved.v.len(),
            "attention_causal_backward: gradients do not have the shapes of q, k and v"
        );
        let needed = shape.backward_scratch_len(t);
        assert!(
            scratch.len() >= needed,
            "attention_causal_backward: scratch holds {} of {needed}",
            scratch.len()
        );
        let AttentionGrads { q: dq, k: dk, v: dv } = grads;
        dk.fill(0.0);
        dv.fill(0.0);
        let width = shape.heads * shape.head_dim;
        for (b, dq) in dq.chunks_mut(QUERY_BLOCK * width).enumerate() {
            let first = b * QUERY_BLOCK;
            let block = Block::new(shape, first, dq.len() / width);
            let rows = first * width..first * width + dq.len();
            let of_block = AttentionSaved {
                q: &saved.q[rows.clone()],
                out: &saved.out[rows.clone()],
                lse: &saved.lse[first * shape.heads..],
                ..saved
            };
            for kv_head in 0..shape.kv_heads {
                let grads = AttentionGrads { q: &mut *dq, k: &mut *dk, v: &mut *dv };
                let dout = &dout[rows.clone()];
                self.attend_backward(shape, softcap, &block, kv_head, &of_block, dout, grads, scratch);
            }
        }
    }

    /// One key/value head of one block: queries, results, their gradients and `lse` begin at the block's
    /// rows; keys, values and their gradients belong to the whole sequence.
    fn attend_backward(
        &self,
        shape: &CausalAttention,
        softcap: Option<f32>,
        block: &Block,
        kv_head: usize,
        saved: &AttentionSaved<'_>,
        dout: &[f32],
        grads: AttentionGrads<'_>,
        scratch: &mut [f32],
    ) {
        let (d, width, group) = (shape.head_dim, shape.heads * shape.head_dim, shape.heads / shape.kv_heads);
        let keys = block.last_key - block.first_key;
        let rows = block.positions * group;
        let start = kv_head * group * d;
        let (q, scratch) = scratch.split_at_mut(rows * d);
        let (d_out, scratch) = scratch.split_at_mut(rows * d);
        let (dq, scratch) = scratch.split_at_mut(rows * d);
        let (scores, scratch) = scratch.split_at_mut(rows * keys);
        let d_scores = &mut scratch[..rows * keys];
        stack(saved.q, width, start, group * d, q);
        stack(dout, width, start, group * d, d_out);
        let (q, d_out) = (MatRef::new(q, rows, d), MatRef::new(d_out, rows, d));
        let (k, v) = (block.seen(shape, kv_head, saved.k), block.seen(shape, kv_head, saved.v));
        self.gemm_nt(q, k, MatMut::new(scores, rows, keys), false);
        self.gemm_nt(d_out, v, MatMut::new(d_scores, rows, keys), false);
        for r in 0..rows {
            let (low, high) = block.visible(shape, r / group);
            let at = r / group * width + start + r % group * d;
            let delta = self.dot(&saved.out[at..][..d], d_out.row(r));
            let lse = saved.lse[r / group * shape.heads + kv_head * group + r % group];
            let (p, ds) = (&mut scores[r * keys..][..keys], &mut d_scores[r * keys..][..keys]);
            for row in [&mut *p, &mut *ds] {
                row[..low].fill(0.0);
                row[high..].fill(0.0);
            }
            let (p, ds) = (&mut p[low..high], &mut ds[low..high]);
            match softcap {
                None => self.softmax_backward(p, ds, shape.scale, lse, delta),
                Some(cap) => self.softmax_backward_capped(p, ds, shape.scale, cap, lse, delta),
            }
        }
        let (p, ds) = (MatRef::new(scores, rows, keys), MatRef::new(d_scores, rows, keys));
        self.gemm_tn(p, d_out, seen_mut(shape, block, kv_head, grads.v), true);
        self.gemm_tn(ds, q, seen_mut(shape, block, kv_head, grads.k), true);
        self.gemm_nn(ds, k, MatMut::new(dq, rows, d), false);
        for (dq, out) in dq.chunks_exact(group * d).zip(grads.q.chunks_exact_mut(width)) {
            out[start..][..group * d].copy_from_slice(dq);
        }
    }
}

/// [`Block::seen`], mutable.
fn seen_mut<'a>(shape: &CausalAttention, block: &Block, kv_head: usize, kv: &'a mut [f32]) -> MatMut<'a> {
    let width = shape.kv_heads * shape.head_dim;
    let start = block.first_key * width + kv_head * shape.head_dim;
    MatMut::with_stride(&mut kv[start..], block.last_key - block.first_key, shape.head_dim, width)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{ScoreRules, kernels};

    fn wave(len: usize, phase: f64) -> Vec<f64> {
        (0..len).map(|i| f64::from((i as f64 * 0.731 + phase).sin() as f32)).collect()
    }

    fn narrow(x: &[f64]) -> Vec<f32> {
        x.iter().map(|&v| v as f32).collect()
    }

    /// The loss `Σ dout ∘ attention(q, k, v)` by the definition, in f64.
    fn loss(shape: &CausalAttention, rules: ScoreRules<'_>, [q, k, v]: [&[f64]; 3], dout: &[f64]) -> f64 {
        let d = shape.head_dim;
        let (width, kv_width) = (shape.heads * d, shape.kv_heads * d);
        let mut loss = 0.0;
        for i in 0..q.len() / width {
            for h in 0..shape.heads {
                let g = h / (shape.heads / shape.kv_heads);
                let seen: Vec<usize> = (0..=i).filter(|j| shape.window.is_none_or(|w| i - j < w)).collect();
                let dot = |a: &[f64], b: &[f64]| a.iter().zip(b).map(|(a, b)| a * b).sum::<f64>();
                let head =
                    |x: &[f64], row: usize, width: usize, h: usize| x[row * width + h * d..][..d].to_vec();
                let query = head(q, i, width, h);
                let weights: Vec<f64> = seen
                    .iter()
                    .map(|&j| {
                        let score = dot(&query, &head(k, j, kv_width, g)) * f64::from(shape.scale);
                        rules.softcap.map(f64::from).map_or(score, |cap| cap * (score / cap).tanh()).exp()
                    })
                    .collect();
                let sink = rules.sinks.map_or(0.0, |sinks| f64::from(sinks[h]).exp());
                let sum: f64 = weights.iter().sum::<f64>() + sink;
                for (j, w) in seen.iter().zip(&weights) {
                    loss += w / sum * dot(&head(v, *j, kv_width, g), &head(dout, i, width, h));
                }
            }
        }
        loss
    }

    struct Run {
        out: Vec<f32>,
        grads: [Vec<f32>; 3],
    }

    fn run(shape: &CausalAttention, rules: ScoreRules<'_>, [q, k, v]: [&[f64]; 3], dout: &[f64]) -> Run {
        let t = q.len() / (shape.heads * shape.head_dim);
        let [q, k, v, dout] = [q, k, v, dout].map(narrow);
        let (mut out, mut lse) = (vec![f32::NAN; q.len()], vec![f32::NAN; t * shape.heads]);
        let mut scratch = vec![f32::NAN; shape.scratch_len(t, t)];
        kernels().attention_causal_saving(shape, rules, &q, &k, &v, &mut out, &mut lse, &mut scratch);
        let mut plain = vec![f32::NAN; q.len()];
        kernels().attention_causal_with(shape, rules, &q, &k, &v, &mut plain, &mut scratch);
        assert!(plain == out, "saving changes no bit");
        let mut grads = [&q, &k, &v].map(|x| vec![f32::NAN; x.len()]);
        let mut scratch = vec![f32::NAN; shape.backward_scratch_len(t)];
        let saved = AttentionSaved { q: &q, k: &k, v: &v, out: &out, lse: &lse };
        let [dq, dk, dv] = &mut grads;
        let into = AttentionGrads { q: dq, k: dk, v: dv };
        kernels().attention_causal_backward(shape, rules.softcap, saved, &dout, into, &mut scratch);
        Run { out, grads }
    }

    #[test]
    fn gradients_match_central_differences() {
        let sinks = [0.5, -1.0, 2.0, 0.0];
        for (heads, kv_heads, head_dim, softcap) in
            [(4, 2, 8, None), (3, 1, 6, None), (2, 2, 5, None), (4, 2, 8, Some(1.5))]
        {
            for (t, window) in [(1, None), (5, None), (40, Some(7)), (70, None), (70, Some(20))] {
                let sinks = (head_dim == 6 || softcap.is_some()).then_some(&sinks[..heads]);
                let rules = ScoreRules { softcap, sinks, weights: None };
                let shape = CausalAttention { heads, kv_heads, head_dim, scale: 0.3, window, chunk: None };
                let x = [
                    wave(t * heads * head_dim, 0.0),
                    wave(t * kv_heads * head_dim, 1.0),
                    wave(t * kv_heads * head_dim, 2.0),
                ];
                let dout = wave(t * heads * head_dim, 3.0);
                let got = run(&shape, rules, [&x[0], &x[1], &x[2]], &dout);
                assert!(got.out.iter().all(|v| v.is_finite()));
                for which in 0..3 {
                    // Every element of short sequences, some of long ones.
                    for at in (0..x[which].len()).step_by(1 + x[which].len() / 37) {
                        let value = |h: f64| {
                            let mut x = x.clone();
                            x[which][at] += h;
                            loss(&shape, rules, [&x[0], &x[1], &x[2]], &dout)
                        };
                        let slope = (value(1e-4) - value(-1e-4)) / 2e-4;
                        let grad = f64::from(got.grads[which][at]);
                        let bound = 2e-5 * (1.0 + slope.abs());
                        assert!(
                            (grad - slope).abs() < bound,
                            "{shape:?} {t} [{which}][{at}]: {grad} for {slope}"
                        );
                    }
                }
            }
        }
    }

    #[test]
    fn no_queries_is_no_work() {
        let shape =
            CausalAttention { heads: 2, kv_heads: 1, head_dim: 4, scale: 0.5, window: None, chunk: None };
        assert!(run(&shape, ScoreRules::default(), [&[]; 3], &[]).out.is_empty());
    }
}
