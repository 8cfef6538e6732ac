//! Indexer of sparse attention (DeepSeek-AI 2025, "DeepSeek-V3.2", arXiv 2512.02556, sec. 2.1): a query attends to the
//! tokens with the best scores, among those up to its own.
//!
//! The score of token `s` for the query of token `t` is `Σ_h w[t, h] · max(0, q[t, h] · k[s])` (eq. 1), with queries `q`
//! `[tokens, heads · dim]` from the normed latent of the attention's queries, keys `k` `[tokens, dim]` and weights `w`
//! `[tokens, heads]` from the normed states. Keys pass a LayerNorm; the first values of queries and keys are rotated by
//! position. Constant factors are left out: they change no order. Of equal scores that of the earlier token counts as
//! better. The Hadamard rotation and the FP8 codes of the published inference code are left out too: the rotation changes
//! no product.

mod project;

use std::cell::RefCell;
use std::ops::Range;

use mantissa_kernels::{MatMut, MatRef, for_each, kernels};

use crate::config::{Indexer, ModelConfig};
use crate::operators::{IndexRows, Sequences};
use crate::rope::split_pairs;

/// Queries whose scores are held at a time.
const QUERIES: usize = 16;

/// Keys that are read at a time.
const CHUNK: usize = 128;

thread_local! {
    /// Keys of a chunk, and products with the heads of a query.
    static BUFFERS: RefCell<[Vec<f32>; 2]> = RefCell::default();
}

/// Indexer of a layer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct IndexerFlow {
    heads: usize,
    dim: usize,
    rotated: usize,
    chosen: usize,
    interleaved: bool,
    own: bool,
}

impl IndexerFlow {
    /// Creates the indexer of layer `layer`, if the model has one.
    pub(crate) fn new(config: &ModelConfig, layer: usize) -> Option<Self> {
        let (indexer, latent) = (config.indexer.as_ref()?, config.latent?);
        let Indexer { heads, dim, chosen, interleaved, .. } = *indexer;
        let rotated = if config.rotated_layers[layer] { latent.rotated } else { 0 };
        Some(IndexerFlow { heads, dim, rotated, chosen, interleaved, own: indexer.own[layer] })
    }

    /// Tokens that a query attends to; earlier queries attend to all.
    pub fn chosen(&self) -> usize {
        self.chosen
    }

    /// Width of the keys that the layer caches; 0 if it uses the choice of an earlier layer.
    pub fn key_width(&self) -> usize {
        if self.own { self.dim } else { 0 }
    }

    /// True if a query of the pass sees more tokens than it attends to.
    pub fn chooses(&self, seqs: &Sequences<'_>) -> bool {
        seqs.lens.iter().enumerate().any(|(i, len)| seqs.start(i) + len > self.chosen)
    }

    /// Rotates queries or keys of consecutive tokens, the first at position `start`.
    pub fn rotate(&self, start: usize, x: &mut [f32], cos: &[f32], sin: &[f32], heads: usize) {
        let half = self.rotated / 2;
        if half > 0 && !x.is_empty() {
            let angles = start * half..(start + x.len() / (heads * self.dim)) * half;
            kernels().rope_rotate(x, heads, self.dim, &cos[angles.clone()], &sin[angles]);
        }
    }

    /// Rotates the queries of consecutive tokens, the first at position `start`.
    pub fn rotate_queries(&self, start: usize, queries: &mut [f32], cos: &[f32], sin: &[f32]) {
        self.rotate(start, queries, cos, sin, self.heads);
    }

    /// Rows of the tokens `tokens` in the buffers of a pass: queries, weights, and the places of their choices.
    pub fn rows_of<'r>(
        &self,
        tokens: Range<usize>,
        rows: &'r mut IndexRows<'_>,
    ) -> (&'r mut [f32], &'r [f32], &'r mut [u32]) {
        let part = |width: usize| tokens.start * width..tokens.end * width;
        (
            &mut rows.queries[part(self.heads * self.dim)],
            &rows.weights[part(self.heads)],
            &mut rows.chosen[part(self.chosen)],
        )
    }

    /// Chooses the tokens of consecutive rotated `queries` `[t, heads · dim]`, the first at position `start`, and writes
    /// them to `chosen` `[t, chosen]` in ascending order. Rows of queries that attend to all tokens are left alone.
    /// `keys` fills `[tokens, dim]` with the rotated keys of a range of positions. A choice has the same bits on any number of
    /// threads and in any pass.
    pub fn choose(
        &self,
        start: usize,
        (queries, weights): (&[f32], &[f32]),
        keys: &(dyn Fn(Range<usize>, &mut [f32]) + Sync),
        chosen: &mut [u32],
        threads: usize,
    ) {
        let width = self.heads * self.dim;
        let count = queries.len() / width;
        let mut scores = Vec::new();
        // Queries before see no more tokens than they attend to.
        let mut first = self.chosen.saturating_sub(start).min(count);
        while first < count {
            let rows = first..count.min(first + QUERIES);
            first = rows.end;
            let end = start + rows.end;
            scores.clear();
            scores.resize(end.div_ceil(CHUNK) * rows.len() * CHUNK, 0.0);
            let chunks = scores.chunks_exact_mut(rows.len() * CHUNK).enumerate();
            for_each(threads, chunks, |(chunk, out)| {
                let tokens = chunk * CHUNK..end.min((chunk + 1) * CHUNK);
                BUFFERS.with_borrow_mut(|[held, product]| {
                    let (held, product) = (
                        first_of(held, tokens.len() * self.dim),
                        first_of(product, self.heads * tokens.len()),
                    );
                    keys(tokens.clone(), held);
                    for (row, out) in rows.clone().zip(out.chunks_exact_mut(CHUNK)) {
                        let query = &queries[row * width..][..width];
                        let weights = &weights[row * self.heads..][..self.heads];
                        self.score(query, weights, held, product, &mut out[..tokens.len()]);
                    }
                });
            });
            let (scores, lists) = (&scores, chosen[rows.start * self.chosen..].chunks_exact_mut(self.chosen));
            for_each(threads, rows.clone().zip(lists), |(row, list)| {
                let at = |token: u32| {
                    let (chunk, place) = (token as usize / CHUNK, token as usize % CHUNK);
                    scores[(chunk * rows.len() + row - rows.start) * CHUNK + place]
                };
                best(start + row + 1, &at, list);
            });
        }
    }

    /// Computes the scores `out` of `keys` `[out.len(), dim]` for one query.
    fn score(&self, query: &[f32], weights: &[f32], keys: &[f32], product: &mut [f32], out: &mut [f32]) {
        let n = out.len();
        let (query, keys) = (MatRef::new(query, self.heads, self.dim), MatRef::new(keys, n, self.dim));
        kernels().gemm_nt(query, keys, MatMut::new(product, self.heads, n), false);
        out.fill(0.0);
        for (weight, products) in weights.iter().zip(product.chunks_exact(n)) {
            out.iter_mut().zip(products).for_each(|(score, x)| *score += weight * x.max(0.0));
        }
    }

    /// Brings the rotated pairs of heads half of the rotated part apart.
    fn split(&self, x: &mut [f32]) {
        if !self.interleaved || self.rotated == 0 {
            return;
        }
        let mut pairs = vec![0.0; self.rotated];
        for head in x.chunks_exact_mut(self.dim) {
            pairs.copy_from_slice(&head[..self.rotated]);
            split_pairs(&pairs, &mut head[..self.rotated]);
        }
    }
}

/// Writes the tokens of the best scores among the first `seen` to `list`, in ascending order.
fn best(seen: usize, score: &dyn Fn(u32) -> f32, list: &mut [u32]) {
    let mut tokens: Vec<u32> = (0..seen as u32).collect();
    let order = |a: &u32, b: &u32| score(*b).total_cmp(&score(*a)).then(a.cmp(b));
    tokens.select_nth_unstable_by(list.len() - 1, order);
    list.copy_from_slice(&tokens[..list.len()]);
    list.sort_unstable();
}

/// Returns the first `len` values of a buffer, which grows if it is shorter.
fn first_of(buffer: &mut Vec<f32>, len: usize) -> &mut [f32] {
    if buffer.len() < len {
        buffer.resize(len, 0.0);
    }
    &mut buffer[..len]
}

#[cfg(test)]
mod tests {
    use super::*;

    const INDEXER: IndexerFlow =
        IndexerFlow { heads: 3, dim: 4, rotated: 2, chosen: 5, interleaved: false, own: true };

    fn wave(n: usize, phase: f32) -> Vec<f32> {
        (0..n).map(|i| (i as f32 * 0.7 + phase).sin()).collect()
    }

    /// Choices of `count` queries from `start` on.
    fn choices(start: usize, count: usize, threads: usize) -> Vec<u32> {
        let keys = wave(400 * 4, 0.3);
        let read = |range: Range<usize>, out: &mut [f32]| {
            out.copy_from_slice(&keys[range.start * 4..range.end * 4]);
        };
        let (queries, weights) = (wave(400 * 12, 1.0), wave(400 * 3, 2.0));
        let (queries, weights) = (&queries[start * 12..][..count * 12], &weights[start * 3..][..count * 3]);
        let mut chosen = vec![u32::MAX; count * 5];
        INDEXER.choose(start, (queries, weights), &read, &mut chosen, threads);
        chosen
    }

    #[test]
    fn choices_follow_the_definition() {
        let (keys, queries, weights) = (wave(400 * 4, 0.3), wave(400 * 12, 1.0), wave(400 * 3, 2.0));
        let found = choices(0, 400, 1);
        assert!(found[..5 * 5].iter().all(|token| *token == u32::MAX), "these attend to all");
        for t in [5, 6, 127, 128, 200, 399] {
            let score = |s: usize| {
                let product = |h: usize| {
                    let pairs = queries[t * 12 + h * 4..][..4].iter().zip(&keys[s * 4..][..4]);
                    pairs.map(|(q, k)| f64::from(*q) * f64::from(*k)).sum::<f64>().max(0.0)
                };
                (0..3).map(|h| f64::from(weights[t * 3 + h]) * product(h)).sum::<f64>()
            };
            let mut all: Vec<usize> = (0..=t).collect();
            all.sort_by(|a, b| score(*b).total_cmp(&score(*a)));
            let mut expected = all[..5].to_vec();
            expected.sort_unstable();
            let expected: Vec<u32> = expected.iter().map(|s| *s as u32).collect();
            assert_eq!(found[t * 5..][..5], expected, "query {t}");
        }
    }

    #[test]
    fn a_choice_does_not_depend_on_the_pass_or_the_threads() {
        let all = choices(0, 400, 1);
        assert_eq!(choices(0, 400, 3), all);
        for (start, count) in [(5, 1), (3, 20), (130, 7), (399, 1)] {
            let skipped = 5usize.saturating_sub(start);
            let found = choices(start, count, 2);
            assert_eq!(found[skipped * 5..], all[(start + skipped) * 5..(start + count) * 5], "{start}");
        }
    }

    #[test]
    fn earlier_tokens_win_among_equal_scores() {
        let mut list = [0; 3];
        best(6, &|token| [1.0, 2.0, 1.0, 1.0, 2.0, 1.0][token as usize], &mut list);
        assert_eq!(list, [0, 1, 4]);
    }
}
