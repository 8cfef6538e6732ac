//! Attention of a pass over the caches of its sequences.
//!
//! Work is cut into tasks whose bounds depend on positions alone: for few new tokens pieces of 512 cached tokens, whose
//! partial results are combined in order; for many, blocks of queries ([`super::prefill`]). So the bits of a result do
//! not depend on the number of threads.

use std::cell::RefCell;
use std::ops::Range;

use mantissa_kernels::paged::{
    Queries, Softmax, TILE_TOKENS, Tile, TileFormat, TileRow, Visible, combine_partials,
};
use mantissa_kernels::{CausalAttention, ScoreRules, for_each, kernels};
use mantissa_model::ForwardError;

use super::pass::{FEW, Pass, RowSpan, Stored, push};
use super::pool::KvPool;
use super::prefill::{self, Prefill};
use super::scratch::{Kind, Part, Scratch, Span, Task};
use super::sequence::{SequenceCache, cut};
use super::side::{Codes, SideView};

/// Tiles of a piece.
const PIECE: usize = 8;

/// Inputs and output of one layer's attention.
#[derive(Debug)]
pub struct AttendInputs<'a> {
    /// Place of the layer among those with keys and values of their own.
    pub layer: usize,
    /// True to append keys and values; false if another layer of the pass has appended them for all rows.
    pub append: bool,
    /// Shape and mask.
    pub shape: &'a CausalAttention,
    /// Changes of scores; rounding of weights is ignored.
    pub rules: ScoreRules<'a>,
    /// Half the rotated width of a head; 0 without RoPE.
    pub half: usize,
    /// `[positions, half]`.
    pub cos: &'a [f32],
    /// `[positions, half]`.
    pub sin: &'a [f32],
    /// Queries before RoPE, `[rows, heads * head_dim]`; rotated in place.
    pub q: &'a mut [f32],
    /// Keys before RoPE, `[rows, kv_heads * head_dim]`; rotated in place unless they are stored before RoPE.
    pub k: &'a mut [f32],
    /// Values, `[rows, kv_heads * head_dim]`.
    pub v: &'a [f32],
    /// Result, like `q`.
    pub out: &'a mut [f32],
    /// Most threads to run on.
    pub threads: usize,
}

/// Buffers of a thread.
#[derive(Default)]
struct Buffers {
    heads: Vec<(Queries, Softmax)>,
    visible: Vec<Visible>,
    /// Tokens of a tile that are not read in place, and a tile of them for each side.
    rows: [Vec<f32>; 2],
    tiles: [Vec<u8>; 2],
    codes: Codes,
    prefill: Prefill,
}

thread_local! {
    static BUFFERS: RefCell<Buffers> = RefCell::default();
}

impl KvPool {
    /// Rotates queries and keys by position, appends keys and values to the caches of their sequences, and attends,
    /// for all `spans` of a pass. Rows outside them are left alone. The caches must have room
    /// ([`SequenceCache::reserve`]) and hold the tokens before each span; what they hold beyond, of a pass that
    /// failed, is removed. Call [`SequenceCache::commit`] after the last layer.
    ///
    /// # Errors
    /// [`ForwardError::Cache`] if a value has no code, [`ForwardError::Plan`] without room for the rows,
    /// [`ForwardError::OtherModel`] if shapes or lengths disagree with the pool or the caches.
    pub fn attend(
        &mut self,
        inputs: AttendInputs<'_>,
        spans: &[RowSpan],
        caches: &mut [SequenceCache],
    ) -> Result<(), ForwardError> {
        let AttendInputs { layer, append, shape, rules, half, cos, sin, q, k, v, out, threads } = inputs;
        let heads = (shape.kv_heads, shape.head_dim);
        self.check(layer, [heads; 2], shape.heads * shape.head_dim, spans, caches, [&*q, &*k, v, &*out])?;
        let mut scratch = std::mem::take(&mut self.scratch);
        let block_tokens = self.plan.block_tokens;
        let plan = &self.plan.layers[layer];
        let data = &mut self.layers[layer];
        let widths = (shape.heads * shape.head_dim, plan.keys.width());
        for span in spans {
            let cache = &mut caches[span.sequence];
            if append {
                cut(plan, data.bytes(), &cache.blocks, &mut cache.layers[layer], span.start, block_tokens);
            }
            let angles = span.start * half..(span.start + span.rows.len()) * half;
            if half > 0 && !span.rows.is_empty() {
                let (cos, sin) = (&cos[angles.clone()], &sin[angles]);
                let q = &mut q[span.rows.start * widths.0..span.rows.end * widths.0];
                kernels().rope_rotate(q, shape.heads, shape.head_dim, cos, sin);
                if append && !plan.before_rope {
                    let k = &mut k[span.rows.start * widths.1..span.rows.end * widths.1];
                    kernels().rope_rotate(k, shape.kv_heads, shape.head_dim, cos, sin);
                }
            }
        }
        let new = if append { spans } else { &[] };
        let result =
            push(plan, layer, data.bytes_mut(), block_tokens, new, caches, [k, v], true, &mut scratch.codes);
        if result.is_ok() {
            let rope = plan.before_rope.then_some((cos, sin, half));
            let (data, caches) = (data.bytes(), &*caches);
            let stored = Stored { plan, rope, k, v, data, block_tokens, caches, layer, append };
            let pass = Pass { stored, shape, rules, q };
            scratch.run(&pass, spans, out, threads);
        }
        let result = result.and_then(|()| {
            let data = data.bytes_mut();
            push(plan, layer, data, block_tokens, new, caches, [k, v], false, &mut scratch.codes)
        });
        self.scratch = scratch;
        result
    }
}

impl Scratch {
    /// Plans the tasks, runs them, and joins their results.
    fn run(&mut self, pass: &Pass<'_>, spans: &[RowSpan], out: &mut [f32], threads: usize) {
        let floats = self.plan(pass, spans, threads);
        if self.partials.len() < floats {
            self.partials.resize(floats, 0.0);
        }
        let Scratch { spans, tasks, of_row, partials, .. } = self;
        let spans = &*spans;
        let mut rest = &mut partials[..floats];
        let work = tasks.iter().map(move |task| {
            let (part, others) = std::mem::take(&mut rest).split_at_mut(task.len);
            rest = others;
            (task, part)
        });
        for_each(threads, work, |(task, out)| {
            BUFFERS.with_borrow_mut(|buffers| match &task.part {
                Part::Few { piece, heads } => {
                    pass.attend_piece(&spans[task.span], *piece, heads.clone(), buffers, out);
                }
                Part::Many { block, head } => {
                    let Buffers { codes, prefill, .. } = buffers;
                    prefill::attend_block(pass, &spans[task.span], *block, *head, (codes, prefill), out);
                }
            });
        });
        let q_width = pass.shape.heads * pass.shape.head_dim;
        let partials = &*partials;
        let rows = out.chunks_exact_mut(q_width).enumerate().zip(&*of_row);
        let rows = rows.filter_map(|((row, out), &span)| Some((row, out, spans.get(span)?)));
        for_each(if of_row.len() > 1 { threads } else { 1 }, rows, |(row, out, span)| {
            pass.join(span, row - span.row, &partials[span.base..], out);
        });
    }

    /// Fills the lists of spans and tasks; returns the number of floats of all results.
    fn plan(&mut self, pass: &Pass<'_>, spans: &[RowSpan], threads: usize) -> usize {
        let Scratch { spans: plans, tasks, of_row, .. } = self;
        plans.clear();
        tasks.clear();
        of_row.clear();
        let (shape, group) = (pass.shape, pass.shape.heads / pass.shape.kv_heads);
        let pieces_of = |span: &RowSpan| {
            let first = shape.first_visible(span.start);
            let last = (span.start + span.rows.len()).saturating_sub(1);
            pass.stored.plan.tile_of(first) / PIECE..pass.stored.plan.tile_of(last) / PIECE + 1
        };
        let few = |span: &&RowSpan| span.rows.len() <= FEW;
        let pieces: usize = spans.iter().filter(few).map(|span| pieces_of(span).len()).sum();
        // Fewer heads per task until every thread has some; this changes no bit.
        let mut heads = shape.kv_heads;
        while heads.is_multiple_of(2) && pieces * (shape.kv_heads / heads) < 4 * threads && threads > 1 {
            heads /= 2;
        }
        let mut base = 0;
        for span in spans.iter().filter(|span| !span.rows.is_empty()) {
            let rows = span.rows.len();
            let index = plans.len();
            of_row.resize(of_row.len().max(span.rows.end), usize::MAX);
            of_row[span.rows.clone()].fill(index);
            let begin = base;
            let kind = if rows <= FEW {
                let pieces = pieces_of(span);
                let len = heads * group * rows * Softmax::partial_len(shape.head_dim);
                for piece in pieces.clone() {
                    for head in (0..shape.kv_heads).step_by(heads) {
                        let part = Part::Few { piece, heads: head..head + heads };
                        tasks.push(Task { span: index, len, part });
                        base += len;
                    }
                }
                Kind::Few { pieces: pieces.len(), heads }
            } else {
                for block in 0..rows.div_ceil(prefill::POSITIONS) {
                    let positions = (rows - block * prefill::POSITIONS).min(prefill::POSITIONS);
                    let len = positions * group * shape.head_dim;
                    for head in 0..shape.kv_heads {
                        tasks.push(Task { span: index, len, part: Part::Many { block, head } });
                        base += len;
                    }
                }
                Kind::Many
            };
            let (sequence, row, start) = (span.sequence, span.rows.start, span.start);
            plans.push(Span { sequence, row, rows, start, base: begin, kind });
        }
        base
    }
}

impl Pass<'_> {
    /// Prepares the queries of one key/value head of a span.
    fn prepare(&self, span: &Span, head: usize, keys: &SideView<'_>, q: &mut Queries) {
        let (d, group) = (self.shape.head_dim, self.group());
        let width = self.shape.heads * d;
        let row = |i: usize| &self.q[(span.row + i / group) * width + (head * group + i % group) * d..][..d];
        q.prepare((0..span.rows * group).map(row), d, self.shape.scale, keys.format());
    }

    /// Attends with some heads of a span's queries to the tiles of one piece; writes their partial results.
    fn attend_piece(
        &self,
        span: &Span,
        piece: usize,
        heads: Range<usize>,
        buffers: &mut Buffers,
        out: &mut [f32],
    ) {
        let (d, sides) = (self.shape.head_dim, self.sides(span));
        let Buffers { heads: states, visible, rows, tiles, codes, .. } = buffers;
        states.resize_with(states.len().max(heads.len()), Default::default);
        let states = &mut states[..heads.len()];
        for ((q, state), head) in states.iter_mut().zip(heads.clone()) {
            self.prepare(span, head, &sides[0], q);
            state.begin(q);
        }
        let end = span.start + span.rows;
        let first = self.stored.plan.tile_of(self.seen(span.start).start).max(piece * PIECE);
        let last = self.stored.plan.tile_of(end - 1).min((piece + 1) * PIECE - 1);
        let positions_of = |tile| {
            let positions = self.stored.plan.tile(tile);
            positions.start..positions.end.min(end)
        };
        for tile in first..=last {
            let positions = positions_of(tile);
            self.visible(span, &positions, visible);
            for (side, rows) in sides.iter().zip(&mut *rows) {
                if side.tile(&positions, heads.start).is_none() {
                    rows.resize(rows.len().max(positions.len() * heads.len() * d), 0.0);
                    side.read(positions.clone(), heads.clone(), rows, codes);
                }
            }
            for (i, (q, state)) in states.iter_mut().enumerate() {
                let [key_tile, value_tile] = &mut *tiles;
                let head = heads.start + i;
                let laid = |side: usize| (&rows[side][..], heads.len() * d, i * d, positions.len());
                let keys =
                    sides[0].tile(&positions, head).unwrap_or_else(|| lay_out(key_tile, laid(0), d, true));
                let values =
                    sides[1].tile(&positions, head).unwrap_or_else(|| lay_out(value_tile, laid(1), d, false));
                let (next, next_head) = match i + 1 < heads.len() {
                    true => (positions.clone(), head + 1),
                    false => (positions_of(tile + 1), heads.start),
                };
                let ahead = |side: usize| match tile < last || next_head > head {
                    true => sides[side].tile(&next, next_head).map_or(&[][..], |tile| tile.bytes),
                    false => &[],
                };
                let ahead = [ahead(0), ahead(1)];
                kernels().attend_tile(q, keys, values, visible, self.rules.softcap, ahead, state);
            }
        }
        let len = self.group() * span.rows * Softmax::partial_len(d);
        states.iter().zip(out.chunks_exact_mut(len)).for_each(|((_, state), out)| state.write_partial(out));
    }

    /// Tokens of a tile that each query of a span sees.
    fn visible(&self, span: &Span, positions: &Range<usize>, visible: &mut Vec<Visible>) {
        visible.clear();
        let clip = |at: usize| (at.clamp(positions.start, positions.end) - positions.start) as u8;
        for position in span.start..span.start + span.rows {
            let seen = self.seen(position);
            let range = Visible { from: clip(seen.start), to: clip(seen.end) };
            visible.extend(std::iter::repeat_n(range, self.group()));
        }
    }

    /// Writes the result of row `row` of a span, `[heads, head_dim]`, from the results of its tasks.
    fn join(&self, span: &Span, row: usize, results: &[f32], out: &mut [f32]) {
        let (d, group) = (self.shape.head_dim, self.group());
        for (head, out) in out.chunks_exact_mut(d).enumerate() {
            let (kv_head, member) = (head / group, head % group);
            match span.kind {
                Kind::Few { pieces, heads } => {
                    let each = Softmax::partial_len(d);
                    let task = heads * group * span.rows * each;
                    let at = (kv_head % heads * span.rows + row) * group + member;
                    let tasks = self.shape.kv_heads / heads;
                    let piece = |piece: usize| {
                        &results[(piece * tasks + kv_head / heads) * task + at * each..][..each]
                    };
                    combine_partials((0..pieces).map(piece), self.rules.sinks.map(|sinks| sinks[head]), out);
                }
                Kind::Many => {
                    let block = row / prefill::POSITIONS;
                    let positions = (span.rows - block * prefill::POSITIONS).min(prefill::POSITIONS);
                    let row = row % prefill::POSITIONS;
                    let before = block * prefill::POSITIONS * self.shape.heads;
                    let at = before + (kv_head * positions + row) * group + member;
                    out.copy_from_slice(&results[at * d..][..d]);
                }
            }
        }
    }
}

/// Lays tokens out as a tile of f32: `rows` with a stride, from a column on, so many tokens.
fn lay_out<'t>(
    tile: &'t mut Vec<u8>,
    (rows, stride, column, tokens): (&[f32], usize, usize, usize),
    d: usize,
    key: bool,
) -> Tile<'t> {
    let format = TileFormat::F32;
    tile.resize(format.tile_bytes(d), 0);
    for (slot, row) in rows.chunks_exact(stride).enumerate().take(tokens.min(TILE_TOKENS)) {
        let row = TileRow::Floats(&row[column..column + d]);
        match key {
            true => format.write_key(tile, slot, row),
            false => format.write_value(tile, slot, row),
        }
    }
    Tile { format, bytes: tile }
}
