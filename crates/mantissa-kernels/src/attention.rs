//! Causal attention of one sequence (Vaswani et al. 2017, "Attention Is All You Need", eq. 1) with grouped key/value
//! heads (Ainslie et al. 2023, "GQA") and an optional sliding window (Beltagy et al. 2020, "Longformer", sec. 3.1).
//!
//! Shapes: `q[t, heads * head_dim]`, `k` and `v` `[s, kv_heads * head_dim]`, `out` like `q`. Query `i` is at position
//! `s - t + i`, and query head `h` reads key/value head `h / (heads / kv_heads)`. A query at position `p` sees the
//! keys `j <= p` and, with a window, only those with `p - j < window`.
//!
//! A block of queries of all heads that share a key/value head is stacked into one matrix, so that its keys and
//! values are packed once: one `S = Q Kᵀ` with all keys that any of the queries sees, a softmax per row, and one `P
//! V`. Keys that a row does not see get weight 0. The softmax's division is applied to the rows of the result.

use crate::generic::ln;
use crate::{Element, Kernels, MatMut, MatRef};

/// Positions per score matrix: with the stacked heads, enough rows for the GEMM to run at full speed; few
/// enough to keep the scores in cache.
pub(crate) const QUERY_BLOCK: usize = 64;

/// The shape of an attention layer and its mask.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct CausalAttention {
    /// Number of query heads, a multiple of `kv_heads`.
    pub heads: usize,
    /// Number of key/value heads.
    pub kv_heads: usize,
    /// Elements per head.
    pub head_dim: usize,
    /// Factor of the scores before the softmax, usually `1 / sqrt(head_dim)`.
    pub scale: f32,
    /// Number of keys that a query sees, including itself; `None` for all preceding keys.
    pub window: Option<usize>,
    /// Length of the chunks that positions are cut into: a query sees keys of its own chunk only; `None` for no chunks.
    pub chunk: Option<usize>,
}

/// Change of the scores between scaling and softmax, in some models.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct ScoreRules<'a> {
    /// Scores become `cap * tanh(score / cap)` (Gemma 2).
    pub softcap: Option<f32>,
    /// Sink: one score per query head that takes part in the softmax and has no value (gpt-oss; Xiao et al. 2023).
    pub sinks: Option<&'a [f32]>,
    /// Rounding of the softmax weights before they multiply the values. The weights are `exp(score - max)`, in [0,
    /// 1], and 1 maps to the largest element: one scale for all, as in SageAttention2 (Zhang et al. 2024, arXiv
    /// 2411.10958, sec. 3.3). The sum is of the unrounded weights.
    pub weights: Option<Element>,
}

impl CausalAttention {
    /// Query block size. A sequence may be split between calls at any multiple of it (with `k` and `v` ending at the
    /// last query) without changing a bit of the result, so callers can spread one sequence over threads.
    pub const QUERY_BLOCK: usize = QUERY_BLOCK;

    /// Number of f32 of scratch that [`Kernels::attention_causal`] needs for `t` queries and `s` keys; `usize::MAX`,
    /// which no slice has, on overflow.
    pub fn scratch_len(&self, t: usize, s: usize) -> usize {
        let positions = t.min(QUERY_BLOCK);
        let keys = self.seen_by(positions, s);
        let rows = positions.checked_mul(self.heads / self.kv_heads.max(1));
        let per_row = self.head_dim.checked_mul(2).and_then(|d| d.checked_add(keys)?.checked_add(1));
        rows.zip(per_row).and_then(|(rows, per_row)| rows.checked_mul(per_row)).unwrap_or(usize::MAX)
    }
}

impl CausalAttention {
    /// First key that a query at `position` sees.
    pub fn first_visible(&self, position: usize) -> usize {
        let window_start = self.window.map_or(0, |window| (position + 1).saturating_sub(window));
        let chunk_start = self.chunk.map_or(0, |chunk| position - position % chunk.max(1));
        window_start.max(chunk_start)
    }

    /// Most keys, of `s`, that any of `positions` consecutive queries sees.
    pub(crate) fn seen_by(&self, positions: usize, s: usize) -> usize {
        let limits = [self.window, self.chunk].into_iter().flatten();
        limits.fold(s, |keys, limit| keys.min(limit.saturating_add(positions)))
    }
}

impl Kernels {
    /// Causal attention of one sequence; shapes and mask as in [`CausalAttention`], `scratch` of at least
    /// [`CausalAttention::scratch_len`].
    ///
    /// The result depends only on this sequence, not on the rest of a batch.
    ///
    /// # Panics
    /// If `heads` is not a multiple of `kv_heads`, a size is 0, a slice is not whole rows, `k`, `v`, `q` and `out`
    /// disagree, there are more queries than keys, or `scratch` is too short.
    pub fn attention_causal(
        &self,
        shape: &CausalAttention,
        q: &[f32],
        k: &[f32],
        v: &[f32],
        out: &mut [f32],
        scratch: &mut [f32],
    ) {
        self.attention(shape, ScoreRules::default(), q, k, v, out, None, scratch);
    }

    /// [`Self::attention_causal`] with scores modified by `rules`.
    ///
    /// # Panics
    /// As there, and if the number of sinks is not the number of query heads.
    pub fn attention_causal_with(
        &self,
        shape: &CausalAttention,
        rules: ScoreRules<'_>,
        q: &[f32],
        k: &[f32],
        v: &[f32],
        out: &mut [f32],
        scratch: &mut [f32],
    ) {
        check_sinks(shape, rules);
        self.attention(shape, rules, q, k, v, out, None, scratch);
    }

    /// [`Self::attention_causal_with`] with the same bits, which also writes `lse[t, heads]`: the logarithm of the sum
    /// of `exp(scale * score)` over the visible keys, capped and with the sink as `rules` say.
    /// [`Self::attention_causal_backward`] recomputes the weights from it.
    ///
    /// # Panics
    /// As there, and if `lse` has another length.
    pub fn attention_causal_saving(
        &self,
        shape: &CausalAttention,
        rules: ScoreRules<'_>,
        q: &[f32],
        k: &[f32],
        v: &[f32],
        out: &mut [f32],
        lse: &mut [f32],
        scratch: &mut [f32],
    ) {
        check_sinks(shape, rules);
        self.attention(shape, rules, q, k, v, out, Some(lse), scratch);
    }

    fn attention(
        &self,
        shape: &CausalAttention,
        rules: ScoreRules<'_>,
        q: &[f32],
        k: &[f32],
        v: &[f32],
        out: &mut [f32],
        mut lse: Option<&mut [f32]>,
        scratch: &mut [f32],
    ) {
        let (t, s) = check(shape, q, k, v, out);
        if let Some(lse) = &lse {
            assert_eq!(
                lse.len(),
                t * shape.heads,
                "attention_causal: lse is not {t} rows of {}",
                shape.heads
            );
        }
        let needed = shape.scratch_len(t, s);
        assert!(scratch.len() >= needed, "attention_causal: scratch holds {} of {needed}", scratch.len());
        let q_width = shape.heads * shape.head_dim;
        let blocks = q.chunks(QUERY_BLOCK * q_width).zip(out.chunks_mut(QUERY_BLOCK * q_width));
        for (b, (q, out)) in blocks.enumerate() {
            let block = Block::new(shape, s - t + b * QUERY_BLOCK, q.len() / q_width);
            let first = b * QUERY_BLOCK * shape.heads;
            for kv_head in 0..shape.kv_heads {
                let lse = lse.as_deref_mut().map(|lse| &mut lse[first..]);
                self.attend(shape, rules, &block, kv_head, q, k, v, out, lse, scratch);
            }
        }
    }

    /// One key/value head of one block of queries: `q`, `out` and `lse` begin at the block's rows, `k` and `v`
    /// belong to the whole sequence.
    fn attend(
        &self,
        shape: &CausalAttention,
        rules: ScoreRules<'_>,
        block: &Block,
        kv_head: usize,
        q: &[f32],
        k: &[f32],
        v: &[f32],
        out: &mut [f32],
        mut lse: Option<&mut [f32]>,
        scratch: &mut [f32],
    ) {
        let (d, q_width, group) =
            (shape.head_dim, shape.heads * shape.head_dim, shape.heads / shape.kv_heads);
        let keys = block.last_key - block.first_key;
        let rows = block.positions * group;
        let (stacked, scratch) = scratch.split_at_mut(rows * d);
        let (weighted, scratch) = scratch.split_at_mut(rows * d);
        let (sums, scratch) = scratch.split_at_mut(rows);
        let scores = &mut scratch[..rows * keys];
        let start = kv_head * group * d;
        stack(q, q_width, start, group * d, stacked);
        let q = MatRef::new(stacked, rows, d);
        self.gemm_nt(q, block.seen(shape, kv_head, k), MatMut::new(scores, rows, keys), false);
        for (r, (row, sum)) in scores.chunks_exact_mut(keys).zip(sums.iter_mut()).enumerate() {
            let (low, high) = block.visible(shape, r / group);
            row[..low].fill(0.0);
            row[high..].fill(0.0);
            let row = &mut row[low..high];
            let max;
            (*sum, max) = match rules.softcap {
                None => self.softmax_numerators_max(row, shape.scale),
                Some(cap) => {
                    self.softcap(row, shape.scale, cap);
                    self.softmax_numerators_max(row, 1.0)
                }
            };
            if let Some(sinks) = rules.sinks {
                // If this is infinite, the sink is so much larger that the values' weights are correctly 0.
                let mut sink = [sinks[kv_head * group + r % group] - max];
                self.exp_inplace(&mut sink);
                *sum += sink[0];
            }
            if let Some(element) = rules.weights {
                element.round_scaled(row, 1.0 / element.max());
            }
            if let Some(lse) = &mut lse {
                let at = r / group * shape.heads + kv_head * group + r % group;
                lse[at] = (f64::from(max) + ln(f64::from(*sum))) as f32;
            }
        }
        let scores = MatRef::new(scores, rows, keys);
        self.gemm_nn(scores, block.seen(shape, kv_head, v), MatMut::new(weighted, rows, d), false);
        for (r, (weighted, sum)) in weighted.chunks_exact(d).zip(sums.iter()).enumerate() {
            let at = r / group * q_width + start + r % group * d;
            out[at..][..d].iter_mut().zip(weighted).for_each(|(o, w)| *o = w / sum);
        }
    }
}

/// Copies the heads that share a key/value head, `width` values from `start` of every row: row `i * group + g`
/// of the stack is query `i` of the group's head `g`, its neighbour in `rows`.
pub(crate) fn stack(rows: &[f32], row: usize, start: usize, width: usize, stacked: &mut [f32]) {
    for (stacked, row) in stacked.chunks_exact_mut(width).zip(rows.chunks_exact(row)) {
        stacked.copy_from_slice(&row[start..][..width]);
    }
}

/// Some consecutive queries and the keys that any of them sees.
pub(crate) struct Block {
    /// Position of the first query.
    position: usize,
    pub(crate) positions: usize,
    pub(crate) first_key: usize,
    /// One past the last key.
    pub(crate) last_key: usize,
}

impl Block {
    pub(crate) fn new(shape: &CausalAttention, position: usize, positions: usize) -> Self {
        Self { position, positions, first_key: shape.first_visible(position), last_key: position + positions }
    }

    /// The rows of one key/value head, in `k` or `v`, that the block sees.
    pub(crate) fn seen<'a>(&self, shape: &CausalAttention, kv_head: usize, kv: &'a [f32]) -> MatRef<'a> {
        let width = shape.kv_heads * shape.head_dim;
        let start = self.first_key * width + kv_head * shape.head_dim;
        MatRef::with_stride(&kv[start..], self.last_key - self.first_key, shape.head_dim, width)
    }

    /// The keys that query `i` of the block sees, counted from `first_key`.
    pub(crate) fn visible(&self, shape: &CausalAttention, i: usize) -> (usize, usize) {
        let position = self.position + i;
        (shape.first_visible(position) - self.first_key, position + 1 - self.first_key)
    }
}

fn check_sinks(shape: &CausalAttention, rules: ScoreRules<'_>) {
    assert!(
        rules.sinks.is_none_or(|sinks| sinks.len() == shape.heads),
        "attention_causal: sinks are not one for each of {} heads",
        shape.heads
    );
}

/// Checks the contract and returns (queries, keys).
pub(crate) fn check(shape: &CausalAttention, q: &[f32], k: &[f32], v: &[f32], out: &[f32]) -> (usize, usize) {
    let CausalAttention { heads, kv_heads, head_dim, .. } = *shape;
    assert!(kv_heads > 0 && head_dim > 0 && heads > 0, "attention_causal: a size is 0");
    assert!(
        heads.is_multiple_of(kv_heads),
        "attention_causal: {heads} heads over {kv_heads} key/value heads"
    );
    let hides = shape.window == Some(0) || shape.chunk == Some(0);
    assert!(!hides, "attention_causal: a window or chunk of 0 hides every key");
    let (q_width, kv_width) = (heads * head_dim, kv_heads * head_dim);
    assert!(q.len().is_multiple_of(q_width), "attention_causal: q is not rows of {q_width}");
    assert!(k.len().is_multiple_of(kv_width), "attention_causal: k is not rows of {kv_width}");
    assert_eq!(k.len(), v.len(), "attention_causal: k and v differ in length");
    assert_eq!(q.len(), out.len(), "attention_causal: q and out differ in length");
    let (t, s) = (q.len() / q_width, k.len() / kv_width);
    assert!(t <= s, "attention_causal: {t} queries but only {s} keys");
    (t, s)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::kernels;

    fn wave(len: usize, phase: f32) -> Vec<f32> {
        (0..len).map(|i| (i as f32 * 0.731 + phase).sin() * 2.0).collect()
    }

    fn run(shape: &CausalAttention, q: &[f32], k: &[f32], v: &[f32]) -> Vec<f32> {
        let (q_width, kv_width) = (shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim);
        let mut out = vec![f32::NAN; q.len()];
        let mut scratch = vec![f32::NAN; shape.scratch_len(q.len() / q_width, k.len() / kv_width)];
        kernels().attention_causal(shape, q, k, v, &mut out, &mut scratch);
        out
    }

    /// The definition, in f64.
    fn naive(shape: &CausalAttention, q: &[f32], k: &[f32], v: &[f32]) -> Vec<f64> {
        let d = shape.head_dim;
        let (q_width, kv_width) = (shape.heads * d, shape.kv_heads * d);
        let (t, s) = (q.len() / q_width, k.len() / kv_width);
        let mut out = vec![0.0; q.len()];
        for i in 0..t {
            let p = s - t + i;
            for h in 0..shape.heads {
                let g = h / (shape.heads / shape.kv_heads);
                let visible: Vec<usize> = (shape.first_visible(p)..=p).collect();
                let score = |j: usize| -> f64 {
                    let terms = (0..d).map(|e| {
                        f64::from(q[i * q_width + h * d + e]) * f64::from(k[j * kv_width + g * d + e])
                    });
                    terms.sum::<f64>() * f64::from(shape.scale)
                };
                let weights: Vec<f64> = visible.iter().map(|&j| score(j).exp()).collect();
                let sum: f64 = weights.iter().sum();
                for e in 0..d {
                    let terms =
                        visible.iter().zip(&weights).map(|(j, w)| w * f64::from(v[j * kv_width + g * d + e]));
                    out[i * q_width + h * d + e] = terms.sum::<f64>() / sum;
                }
            }
        }
        out
    }

    /// Soft caps and sinks against the definition, one query with all keys in reach.
    #[test]
    fn rules_of_scores_follow_their_definition() {
        let shape =
            CausalAttention { heads: 4, kv_heads: 2, head_dim: 8, scale: 0.3, window: None, chunk: None };
        let (q, k, v) = (wave(32, 0.0), wave(16 * 9, 1.0), wave(16 * 9, 2.0));
        let sinks = [0.5, -1.0, 2.0, 100.0];
        let (mut out, mut scratch) = (vec![0.0; 32], vec![0.0; shape.scratch_len(1, 9)]);
        for (softcap, sinks) in [(Some(1.5), None), (None, Some(&sinks[..])), (Some(1.5), Some(&sinks[..]))] {
            let rules = ScoreRules { softcap, sinks, weights: None };
            kernels().attention_causal_with(&shape, rules, &q, &k, &v, &mut out, &mut scratch);
            for h in 0..4 {
                let at = |kv: &[f32], j: usize, i: usize| f64::from(kv[j * 16 + h / 2 * 8 + i]);
                let score = |j: usize| {
                    let s = 0.3 * (0..8).map(|i| f64::from(q[h * 8 + i]) * at(&k, j, i)).sum::<f64>();
                    softcap.map_or(s, |cap| f64::from(cap) * (s / f64::from(cap)).tanh()).exp()
                };
                let sink = sinks.map_or(0.0, |sinks| f64::from(sinks[h]).exp());
                let sum: f64 = (0..9).map(score).sum::<f64>() + sink;
                for i in 0..8 {
                    let exact = (0..9).map(|j| score(j) * at(&v, j, i)).sum::<f64>() / sum;
                    assert!((f64::from(out[h * 8 + i]) - exact).abs() < 1e-5, "head {h}, element {i}");
                }
            }
        }
    }

    #[test]
    fn matches_the_definition() {
        for (heads, kv_heads, head_dim) in [(4, 2, 8), (3, 1, 16), (2, 2, 5)] {
            for (t, s) in [(1, 1), (1, 70), (5, 5), (3, 40), (64, 64), (65, 130), (130, 130)] {
                let windows = [None, Some(1), Some(7), Some(64), Some(1000)].map(|window| (window, None));
                let chunks = [Some(1), Some(9), Some(64), Some(1000)].map(|chunk| (None, chunk));
                for (window, chunk) in windows.into_iter().chain(chunks) {
                    let shape = CausalAttention { heads, kv_heads, head_dim, scale: 0.3, window, chunk };
                    let q = wave(t * heads * head_dim, 0.0);
                    let (k, v) = (wave(s * kv_heads * head_dim, 1.0), wave(s * kv_heads * head_dim, 2.0));
                    let exact = naive(&shape, &q, &k, &v);
                    for (got, exact) in run(&shape, &q, &k, &v).iter().zip(&exact) {
                        assert!(
                            (f64::from(*got) - exact).abs() < 1e-5,
                            "{shape:?} t {t} s {s}: {got} for {exact}"
                        );
                    }
                }
            }
        }
    }

    #[test]
    fn cutting_at_a_block_changes_no_bit() {
        for window in [None, Some(50)] {
            let shape =
                CausalAttention { heads: 4, kv_heads: 2, head_dim: 16, scale: 0.25, window, chunk: None };
            let (t, q_width, kv_width) = (200, 64, 32);
            let (q, k, v) = (wave(t * q_width, 0.0), wave(t * kv_width, 1.0), wave(t * kv_width, 2.0));
            let whole = run(&shape, &q, &k, &v);
            let mut pieces = Vec::new();
            for start in (0..t).step_by(CausalAttention::QUERY_BLOCK) {
                let end = t.min(start + CausalAttention::QUERY_BLOCK);
                pieces.extend(run(
                    &shape,
                    &q[start * q_width..end * q_width],
                    &k[..end * kv_width],
                    &v[..end * kv_width],
                ));
            }
            assert!(whole.iter().zip(&pieces).all(|(a, b)| a.to_bits() == b.to_bits()));
        }
    }

    #[test]
    fn no_queries_is_no_work() {
        let shape =
            CausalAttention { heads: 2, kv_heads: 1, head_dim: 4, scale: 0.5, window: None, chunk: None };
        assert!(run(&shape, &[], &[0.0; 8], &[0.0; 8]).is_empty());
    }
}
