//! Latent attention over the cache (DeepSeek-V2, arXiv 2405.04434, sec. 2.1.2): a token is its latent and the rotated
//! part of its keys, for all heads together. Queries are mapped to latents, and weighted latents to heads
//! ([`AbsorbedHeads`]), so nothing cached is expanded.
//!
//! All heads of a token share what is decoded, so scores and sums are matrix products over chunks of the cache that
//! are decoded to f32. Up to [`FEW`] new tokens are computed one by one, in pieces of the cache that are combined in
//! order; more of them in blocks. Neither depends on other sequences or threads.
//!
//! In sparse attention an indexer chooses the tokens of each query ([`IndexerFlow`]). Queries that see more than they
//! attend to are computed one by one, from the chosen tokens alone.

use std::cell::RefCell;
use std::ops::Range;

use mantissa_kernels::paged::{Softmax, combine_partials};
use mantissa_kernels::{MatMut, MatRef, for_each, kernels};
use mantissa_model::ForwardError;
use mantissa_model::flow::{AbsorbedHeads, Attention, IndexRows, IndexerFlow, LatentTokens};

use super::pass::{FEW, RowSpan, Stored, push};
use super::pool::KvPool;
use super::prefill::weigh;
use super::scratch::{Latents, Unit};
use super::sequence::{SequenceCache, cut};
use super::side::{Codes, SideView};

/// Tokens of a piece, and of a chunk that is decoded at a time.
const PIECE: usize = 128;

/// New tokens of a block of many.
const BLOCK: usize = AbsorbedHeads::ROWS;

/// Floats of partial results at a time, unless one unit needs more.
const FLOATS: usize = 4 << 20;

/// Inputs and output of one layer's latent attention.
#[derive(Debug)]
pub struct LatentInputs<'a, 'r> {
    /// The layer.
    pub layer: usize,
    /// Its attention.
    pub attention: &'a Attention,
    /// Projection between latents and heads.
    pub heads: &'a AbsorbedHeads,
    /// New tokens; queries and keys are rotated in place.
    pub rows: &'a mut LatentTokens<'r>,
}

/// Everything that tasks of a pass read.
struct Pass<'a> {
    stored: Stored<'a>,
    spans: &'a [RowSpan],
    heads: &'a AbsorbedHeads,
    q: &'a [f32],
    /// Heads, and width of a head of queries.
    shape: (usize, usize),
    scale: (f32, Option<f32>),
    /// Number of tokens that a query attends to at most, and those tokens, `[rows, number]`.
    chosen: (usize, &'a [u32]),
}

/// Buffers of a thread.
#[derive(Default)]
struct Buffers {
    keys: Vec<f32>,
    latents: Vec<f32>,
    scores: Vec<f32>,
    codes: Codes,
}

thread_local! {
    static BUFFERS: RefCell<Buffers> = RefCell::default();
}

impl KvPool {
    /// Rotates queries and keys by position, appends latents and rotated keys to the caches of their sequences, and
    /// attends, as [`attend`](Self::attend).
    ///
    /// # Errors
    /// As [`attend`](Self::attend), and [`ForwardError::Input`] if a latent cannot be quantized.
    pub fn attend_latents(
        &mut self,
        inputs: LatentInputs<'_, '_>,
        spans: &[RowSpan],
        caches: &mut [SequenceCache],
    ) -> Result<(), ForwardError> {
        let LatentInputs { layer, attention, heads, rows } = inputs;
        let LatentTokens { q, latents, rotated, attended, index, cos, sin } = rows;
        let (latent, shape) = (*heads.latent(), attention.shape());
        let q_width = shape.heads * shape.head_dim;
        let of_index = attention.indexer().map_or(0, IndexerFlow::key_width);
        let width = latent.rotated + of_index;
        let mut scratch = std::mem::take(&mut self.scratch);
        let mut keys = std::mem::take(&mut scratch.latents.keys);
        keys.clear();
        keys.resize(rotated.len() / latent.rotated * width, 0.0);
        let widths = [(1, width), (1, latent.kv_rank)];
        self.check(layer, widths, q_width, spans, caches, [&**q, &keys, &**latents, &**attended])?;
        heads.enter(latents)?;
        let block_tokens = self.plan.block_tokens;
        let (plan, data) = (&self.plan.layers[layer], &mut self.layers[layer]);
        for span in spans {
            let cache = &mut caches[span.sequence];
            cut(plan, data.bytes(), &cache.blocks, &mut cache.layers[layer], span.start, block_tokens);
            let Range { start, end } = span.rows;
            attention.rotate(span.start, &mut q[start * q_width..end * q_width], shape.heads, cos, sin);
            let angles = span.start * attention.half()..(span.start + span.rows.len()) * attention.half();
            if !angles.is_empty() {
                let keys = &mut rotated[start * latent.rotated..end * latent.rotated];
                kernels().rope_rotate(keys, 1, latent.rotated, &cos[angles.clone()], &sin[angles]);
            }
            if let Some(indexer) = attention.indexer() {
                let keys = &mut index.keys[start * of_index..end * of_index];
                indexer.rotate(span.start, keys, cos, sin, 1);
            }
        }
        for (row, key) in keys.chunks_exact_mut(width).enumerate() {
            let (of_rotated, of_indexer) = key.split_at_mut(latent.rotated);
            of_rotated.copy_from_slice(&rotated[row * latent.rotated..][..latent.rotated]);
            of_indexer.copy_from_slice(&index.keys[row * of_index..][..of_index]);
        }
        let (k, v): (&[f32], &[f32]) = (&keys, latents);
        let codes = &mut scratch.codes;
        let mut done = push(plan, layer, data.bytes_mut(), block_tokens, spans, caches, [k, v], true, codes);
        if done.is_ok() {
            let (data, caches) = (data.bytes(), &*caches);
            let stored = Stored { plan, rope: None, k, v, data, block_tokens, caches, layer, append: true };
            if let Some(indexer) = attention.indexer() {
                choose(indexer, &stored, spans, index, (cos, sin), (latent.rotated, attention.threads()));
            }
            let scale = (shape.scale, attention.softcap());
            let chosen = (attention.indexer().map_or(usize::MAX, IndexerFlow::chosen), &*index.chosen);
            let pass = Pass { stored, spans, heads, q, shape: (shape.heads, shape.head_dim), scale, chosen };
            scratch.latents.run(&pass, attended, attention.threads());
        }
        if done.is_ok() {
            let (data, codes) = (data.bytes_mut(), &mut scratch.codes);
            done = push(plan, layer, data, block_tokens, spans, caches, [k, v], false, codes);
        }
        scratch.latents.keys = keys;
        self.scratch = scratch;
        done
    }
}

/// Chooses the tokens of the queries of a layer with an indexer of its own, whose keys follow `rotated` values of each
/// cached key.
fn choose(
    indexer: &IndexerFlow,
    stored: &Stored<'_>,
    spans: &[RowSpan],
    index: &mut IndexRows<'_>,
    (cos, sin): (&[f32], &[f32]),
    (rotated, threads): (usize, usize),
) {
    let dim = indexer.key_width();
    for span in spans {
        if dim == 0 || span.start + span.rows.len() <= indexer.chosen() {
            continue;
        }
        let (queries, weights, chosen) = indexer.rows_of(span.rows.clone(), index);
        indexer.rotate_queries(span.start, queries, cos, sin);
        let [keys, _] = stored.sides(span.sequence, span.rows.clone());
        let read = |tokens: Range<usize>, out: &mut [f32]| {
            BUFFERS.with_borrow_mut(|Buffers { keys: held, codes, .. }| {
                let held = first(held, tokens.len() * (rotated + dim));
                keys.read(tokens.clone(), 0..1, held, codes);
                for (key, out) in held.chunks_exact(rotated + dim).zip(out.chunks_exact_mut(dim)) {
                    out.copy_from_slice(&key[rotated..]);
                }
            });
        };
        indexer.choose(span.start, (queries, weights), &read, chosen, threads);
    }
}

impl Latents {
    /// Computes all rows, as many units at a time as the buffers hold.
    fn run(&mut self, pass: &Pass<'_>, out: &mut [f32], threads: usize) {
        let mut units = std::mem::take(&mut self.units);
        units.clear();
        for (index, span) in pass.spans.iter().enumerate() {
            let few = span.rows.len() <= FEW;
            let to_all = pass.chosen.0.saturating_sub(span.start).min(span.rows.len());
            let mut unit = |first: usize, len: usize, pieces: usize, sparse: bool| {
                let (row, start) = (span.rows.start + first, span.start + first);
                units.push(Unit { span: index, rows: row..row + len, start, pieces, sparse });
            };
            for first in (0..to_all).step_by(if few { 1 } else { BLOCK }) {
                let len = if few { 1 } else { BLOCK.min(to_all - first) };
                unit(first, len, if few { (span.start + first + len).div_ceil(PIECE) } else { 1 }, false);
            }
            (to_all..span.rows.len()).for_each(|row| unit(row, 1, pass.chosen.0.div_ceil(PIECE), true));
        }
        let mut rest = &units[..];
        while let Some(first) = rest.first() {
            let mut floats = 0;
            let more = rest[1..].iter().take_while(|unit| {
                floats += pass.partial_len(unit) * unit.pieces;
                floats + pass.partial_len(first) * first.pieces <= FLOATS
            });
            let (now, later) = rest.split_at(1 + more.count());
            self.run_units(pass, now, out, threads);
            rest = later;
        }
        self.units = units;
    }

    /// Maps queries to latents, attends, and maps the results to heads.
    fn run_units(&mut self, pass: &Pass<'_>, units: &[Unit], out: &mut [f32], threads: usize) {
        let Latents { queries, partials, expanded, .. } = self;
        let ((heads, head_dim), latent) = (pass.shape, pass.heads.latent());
        let (joined, partial) = (latent.kv_rank + latent.rotated, Softmax::partial_len(latent.kv_rank));
        let rows: usize = units.iter().map(|unit| unit.rows.len()).sum();
        let queries = first(queries, rows * heads * joined);
        let by_head = units.iter().flat_map(|unit| (0..heads).map(move |head| (unit, head)));
        let work =
            by_head.clone().zip(pieces(queries, by_head.clone().map(|(unit, _)| unit.rows.len() * joined)));
        for_each(threads, work, |((unit, head), out)| pass.map_queries(unit, head, out));

        let floats = units.iter().map(|unit| pass.partial_len(unit) * unit.pieces).sum();
        let partials = first(partials, floats);
        let mut at = 0;
        let tasks = units.iter().flat_map(|unit| {
            let begin = at;
            at += unit.rows.len() * heads * joined;
            (0..unit.pieces).map(move |piece| (unit, piece, begin..begin + unit.rows.len() * heads * joined))
        });
        let lens = units.iter().flat_map(|unit| (0..unit.pieces).map(|_| pass.partial_len(unit)));
        let queries = &*queries;
        for_each(threads, tasks.zip(pieces(partials, lens)), |((unit, piece, at), out)| {
            BUFFERS.with_borrow_mut(|buffers| pass.attend(unit, piece, &queries[at], buffers, out));
        });

        let expanded = first(expanded, rows * heads * latent.value);
        let partials = &*partials;
        let mut at = 0;
        let work = units.iter().flat_map(|unit| {
            let begin = at;
            at += pass.partial_len(unit) * unit.pieces;
            (0..heads).map(move |head| (unit, head, begin))
        });
        let lens = by_head.map(|(unit, _)| unit.rows.len() * latent.value);
        for_each(threads, work.zip(pieces(expanded, lens)), |((unit, head, at), out)| {
            let results = &partials[at..at + pass.partial_len(unit) * unit.pieces];
            BUFFERS.with_borrow_mut(|buffers| pass.expand(unit, head, results, partial, buffers, out));
        });

        let mut rest = &*expanded;
        for unit in units {
            for head in 0..heads {
                for row in unit.rows.clone() {
                    let (values, others) = rest.split_at(latent.value);
                    rest = others;
                    let out = &mut out[(row * heads + head) * head_dim..][..head_dim];
                    out[..latent.value].copy_from_slice(values);
                    out[latent.value..].fill(0.0);
                }
            }
        }
    }
}

impl Pass<'_> {
    /// Floats of the partial result of a piece.
    fn partial_len(&self, unit: &Unit) -> usize {
        unit.rows.len() * self.shape.0 * Softmax::partial_len(self.heads.latent().kv_rank)
    }

    /// Maps the queries of one head to `out` `[rows, kv_rank + rotated]`.
    fn map_queries(&self, unit: &Unit, head: usize, out: &mut [f32]) {
        let ((heads, d), latent) = (self.shape, self.heads.latent());
        let (rows, joined) = (unit.rows.len(), latent.kv_rank + latent.rotated);
        let q = &self.q[(unit.rows.start * heads + head) * d..];
        let unrotated = MatRef::with_stride(&q[latent.rotated..], rows, latent.unrotated, heads * d);
        self.heads.queries(head, unrotated, MatMut::with_stride(&mut *out, rows, latent.kv_rank, joined));
        for (q, out) in q.chunks(heads * d).zip(out.chunks_exact_mut(joined)) {
            out[latent.kv_rank..].copy_from_slice(&q[..latent.rotated]);
        }
    }

    /// Attends with all heads of a unit to one piece of the cache, or to all of it; writes partial results.
    fn attend(&self, unit: &Unit, piece: usize, queries: &[f32], buffers: &mut Buffers, out: &mut [f32]) {
        let latent = self.heads.latent();
        let (rank, joined) = (latent.kv_rank, latent.kv_rank + latent.rotated);
        let (each, count) = (Softmax::partial_len(rank), queries.len() / joined);
        let span = &self.spans[unit.span];
        let [keys, values] = self.stored.sides(span.sequence, span.rows.clone());
        for out in out.chunks_exact_mut(each) {
            out.fill(0.0);
            out[rank] = f32::NEG_INFINITY;
        }
        let width = keys.side.width();
        let chosen = unit.sparse.then(|| &self.chosen.1[unit.rows.start * self.chosen.0..][..self.chosen.0]);
        let end = chosen.map_or(unit.start + unit.rows.len(), <[u32]>::len);
        let tokens = match unit.pieces {
            1 => 0..end,
            _ => piece * PIECE..end.min((piece + 1) * PIECE),
        };
        let Buffers { keys: held, latents, scores, codes } = buffers;
        let of_latents = MatRef::with_stride(queries, count, rank, joined);
        let of_rotated = MatRef::with_stride(&queries[rank..], count, latent.rotated, joined);
        for first_token in tokens.clone().step_by(PIECE) {
            let part = first_token..tokens.end.min(first_token + PIECE);
            let n = part.len();
            let (held, latents) = (first(held, n * width), first(latents, n * rank));
            for (side, out) in [(&keys, &mut *held), (&values, &mut *latents)] {
                match chosen {
                    None => side.read(part.clone(), 0..1, out, codes),
                    Some(chosen) => read_chosen(side, &chosen[part.clone()], out, codes),
                }
            }
            let scores = first(scores, count * n);
            let rotated = MatRef::with_stride(held, n, latent.rotated, width);
            let latents = MatRef::new(latents, n, rank);
            kernels().gemm_nt(of_latents, latents, MatMut::new(scores, count, n), false);
            kernels().gemm_nt(of_rotated, rotated, MatMut::new(scores, count, n), true);
            for (i, (scores, out)) in scores.chunks_exact_mut(n).zip(out.chunks_exact_mut(each)).enumerate() {
                // Chosen tokens are all before the query, or its own.
                let seen = chosen.map_or(unit.start + i % unit.rows.len() + 1, <[u32]>::len);
                let visible = 0..seen.clamp(part.start, part.end) - part.start;
                let (acc, state) = out.split_at_mut(rank);
                if let [max, sum] = state {
                    weigh(self.scale, scores, visible, max, sum, acc);
                }
            }
            let scores = MatRef::new(scores, count, n);
            kernels().gemm_nn(scores, latents, MatMut::with_stride(&mut *out, count, rank, each), true);
        }
    }

    /// Combines the pieces of one head and maps the weighted latents to `out` `[rows, value]`.
    fn expand(
        &self,
        unit: &Unit,
        head: usize,
        results: &[f32],
        each: usize,
        buffers: &mut Buffers,
        out: &mut [f32],
    ) {
        let (latent, rows) = (self.heads.latent(), unit.rows.len());
        let weighted = first(&mut buffers.latents, rows * latent.kv_rank);
        for (i, weighted) in weighted.chunks_exact_mut(latent.kv_rank).enumerate() {
            let pieces = results.chunks_exact(self.partial_len(unit));
            let pieces = pieces.map(|piece| &piece[(head * rows + i) * each..][..each]);
            combine_partials(pieces, None, weighted);
        }
        let weighted = MatRef::new(weighted, rows, latent.kv_rank);
        self.heads.values(head, weighted, MatMut::new(out, rows, latent.value));
    }
}

/// Reads the tokens at these ascending positions into `out` `[positions, width]`, consecutive ones together.
fn read_chosen(side: &SideView<'_>, positions: &[u32], out: &mut [f32], codes: &mut Codes) {
    let width = out.len() / positions.len().max(1);
    let mut at = 0;
    while let Some(&first) = positions.get(at) {
        let run = (first..).zip(&positions[at..]).take_while(|(next, position)| next == *position).count();
        let first = first as usize;
        side.read(first..first + run, 0..1, &mut out[at * width..(at + run) * width], codes);
        at += run;
    }
}

/// Returns the first `len` values of a buffer, which grows if it is shorter.
fn first(buffer: &mut Vec<f32>, len: usize) -> &mut [f32] {
    if buffer.len() < len {
        buffer.resize(len, 0.0);
    }
    &mut buffer[..len]
}

/// Splits a slice into consecutive pieces of these lengths.
fn pieces(mut rest: &mut [f32], lens: impl Iterator<Item = usize>) -> impl Iterator<Item = &mut [f32]> {
    lens.map(move |len| {
        let (piece, others) = std::mem::take(&mut rest).split_at_mut(len);
        rest = others;
        piece
    })
}
