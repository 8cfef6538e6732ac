//! Compressed attention (DeepSeek-AI 2026, "DeepSeek-V4", sec. 2.3; the modules of transformers 5.23): every query attends
//! to the last tokens by a window, and to entries that stand for blocks of earlier tokens.
//!
//! - Queries come from a normed latent, `heads` heads `q` of width `head_dim`, each divided by its root mean square. One
//!   normed head of each token is its key and its value, for all queries. The last part of queries and keys is rotated, its
//!   pairs adjacent; results are rotated back at the position of the query, because keys are values.
//! - An entry of `ratio` tokens is the norm of `Σ_j softmax_j(z_j + b_j) ⊙ c_j` over them (eq. 20 to 23), with `c` and `z`
//!   projected from the states and `b` by place in the block, rotated at its first token. In layers of overlapping entries
//!   `c` and `z` are twice as wide: the first half counts for the entry after a token's own (eq. 9 to 12).
//! - A query at position `t` sees the entries of the first `(t + 1) / ratio` blocks; in layers of overlapping entries
//!   the `chosen` of them with the best `Σ_h w_h · max(0, q_h · k)` (eq. 13 to 17), by heads, weights and compressed keys of
//!   an indexer. Constant factors are left out; of equal scores that of the earlier entry counts as better.
//! - A head has a sink: a score without a value.
//! - Joined heads `[heads · head_dim]` pass a projection for each group of heads, to `group_rank` values each.
//!
//! The state of a sequence is, in this order: keys of the last `window` tokens, and of the tokens of unfinished blocks, `c`
//! and `z` of entries and of the indexer's keys, each at the place of its position modulo their number; then all entries
//! and keys of the indexer, which are never changed.
//!
//! Projections: q through its latent, the keys, and the output from the groups. Those of entries, the indexer's and those
//! of the groups stay unquantized.

use std::cell::RefCell;

use mantissa_kernels::{CausalAttention, ScoreRules, for_each, kernels};

use super::blocks::{Angles, Blocks, History, OfBlocks, keep, rotate_end};
use super::entries::{CompressedIndex, Compression, rotated};
use super::frame::{MOST_LINEARS, MixRows, Mixer, MixerLinear, StateShape, matmuls, side, split_rows, take};
use super::gguf::{GgufAround, Uncomputed};
use super::halves::{Mixing, all_have_mlp};
use super::rules::{Around, MixerRules};
use crate::fields::{ConfigError, Fields, MAX_POSITIONS, MAX_WIDTH};
use crate::operators::Operators;
use crate::program::{Op, Output, View};
use mantissa_arch::kinds::{LinearInput, LinearKind, SideInfo, SideKind, VectorKind};

/// Sizes of compressed attention.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct CompressedAttention {
    /// Width of the residual stream.
    pub hidden: usize,
    /// Query heads.
    pub heads: usize,
    /// Width of a head.
    pub head_dim: usize,
    /// Width of the rotated part of a head, at its end, even.
    pub rotated: usize,
    /// Width of the latent of the queries.
    pub q_rank: usize,
    /// Groups of heads of the output projection.
    pub groups: usize,
    /// Values that each group is projected to.
    pub group_rank: usize,
    /// Last tokens that a query attends to, itself included.
    pub window: usize,
    /// Indexer of layers with overlapping entries.
    pub index: CompressedIndex,
    /// Entries of the layer; `None` if it attends to the window alone.
    pub compression: Option<Compression>,
    /// Epsilon of the norms.
    pub eps: f32,
}

/// Attention to a window and to compressed entries in every layer, by `layer_types`, or else `compress_ratios`
/// (DeepSeek-V4).
pub(crate) const COMPRESSED: MixerRules<CompressedAttention> =
    MixerRules { mixer, halves: |_, layers| Ok(all_have_mlp(vec![Mixing::Recurrent; layers])), layers: None };

/// Parses the mixer, without the entries of a layer.
fn mixer(
    fields: Fields<'_>,
    &Around { hidden, heads, head_dim, eps }: &Around,
) -> Result<CompressedAttention, ConfigError> {
    let size = |field, limit: u64, default| {
        Ok::<usize, ConfigError>(fields.optional_size(field, 1..=limit)?.unwrap_or(default))
    };
    let rotated = rotated(fields, head_dim)?;
    let groups = size("o_groups", heads as u64, 8)?;
    if !heads.is_multiple_of(groups) {
        return Err(fields.error("o_groups", format!("a divisor of num_attention_heads, which is {heads}")));
    }
    Ok(CompressedAttention {
        hidden,
        heads,
        head_dim,
        rotated,
        q_rank: size("q_lora_rank", MAX_WIDTH, 1024)?,
        groups,
        group_rank: size("o_lora_rank", MAX_WIDTH / groups as u64, 1024)?,
        window: size("sliding_window", MAX_POSITIONS, 128)?,
        index: CompressedIndex::parse(fields, rotated)?,
        compression: None,
        eps,
    })
}

/// Width of the blocks in which llama.cpp rotates index keys.
const ROTATED_BLOCK: usize = 64;

thread_local! {
    /// Keys that a query attends to, its result, and scratch for scores.
    static BUFFERS: RefCell<Buffers> = RefCell::default();
}

#[derive(Default)]
struct Buffers {
    keys: Vec<f32>,
    result: Vec<f32>,
    scratch: Vec<f32>,
    /// Scores of entries, and entries in the order of their scores.
    scores: Vec<f32>,
    order: Vec<u32>,
}

/// Scratch of a pass, `[rows, …]` each.
struct PassScratch<'a> {
    /// Queries, then joined heads, `[rows, heads · head_dim]`.
    q: &'a mut [f32],
    projected: &'a mut [f32],
    keys: &'a mut [f32],
    /// `c` and `z` of entries, and of the indexer's keys.
    blocks: [&'a mut [f32]; 2],
    index_blocks: [&'a mut [f32]; 2],
    index_queries: &'a mut [f32],
    index_weights: &'a mut [f32],
    /// Joined heads by group, `[groups, tokens, …]`.
    grouped: &'a mut [f32],
    /// Result of one group.
    group: &'a mut [f32],
    /// Entries and keys of the indexer, of sequences without a cache.
    entries: &'a mut [f32],
    index_entries: &'a mut [f32],
}

/// State of a sequence in one layer.
struct Held<'a> {
    keys: &'a mut [f32],
    blocks: [&'a mut [f32]; 2],
    index_blocks: [&'a mut [f32]; 2],
    entries: &'a mut [f32],
    index_entries: &'a mut [f32],
}

/// What the queries of a sequence attend to.
struct Attended<'a> {
    start: usize,
    keys: History<'a>,
    entries: &'a [f32],
    index_entries: &'a [f32],
    index_queries: &'a [f32],
    index_weights: &'a [f32],
    sinks: Option<&'a [f32]>,
    angles: Angles<'a>,
}

impl CompressedAttention {
    /// Series of the entries.
    fn blocks(&self) -> Option<Blocks> {
        let Compression { ratio, overlaps } = self.compression?;
        Some(Blocks { ratio, overlaps, dim: self.head_dim, rotated: self.rotated, eps: self.eps })
    }

    /// Series of the keys of the indexer.
    fn index_blocks(&self) -> Option<Blocks> {
        let blocks = self.blocks().filter(|blocks| blocks.overlaps)?;
        Some(Blocks { dim: self.index.dim, ..blocks })
    }

    /// Width of the joined heads.
    fn joined(&self) -> usize {
        self.heads * self.head_dim
    }

    /// Widths of the [`PassScratch`] of a row.
    fn widths(&self) -> [usize; 15] {
        let (q, joined, d) = (self.q_rank, self.joined(), self.head_dim);
        let of = |blocks: Option<Blocks>| {
            blocks.map_or((0, 0), |blocks| (blocks.columns(), d_of_row(blocks.dim, blocks.ratio)))
        };
        let ((columns, entry), (index_columns, index_entry)) = (of(self.blocks()), of(self.index_blocks()));
        let index =
            self.index_blocks().map_or((0, 0), |_| (self.index.heads * self.index.dim, self.index.heads));
        [
            q,
            q,
            joined,
            d,
            d,
            columns,
            columns,
            index_columns,
            index_columns,
            index.0,
            index.1,
            joined,
            self.group_rank,
            entry,
            index_entry,
        ]
    }

    fn parts<'a>(&self, rows: usize, scratch: &'a mut [f32]) -> PassScratch<'a> {
        let [
            _,
            _,
            q,
            projected,
            keys,
            values,
            gates,
            index_values,
            index_gates,
            index_queries,
            index_weights,
            grouped,
            group,
            entries,
            index_entries,
        ] = split_rows(rows, self.widths(), scratch);
        PassScratch {
            q,
            projected,
            keys,
            blocks: [values, gates],
            index_blocks: [index_values, index_gates],
            index_queries,
            index_weights,
            grouped,
            group,
            entries,
            index_entries,
        }
    }

    /// Values of the state that are replaced as tokens come: keys of the window, and of unfinished blocks.
    fn replaced(&self) -> usize {
        let of = |blocks: Option<Blocks>| blocks.map_or(0, |blocks| 2 * blocks.kept() * blocks.columns());
        self.window * self.head_dim + of(self.blocks()) + of(self.index_blocks())
    }

    /// Values of an entry and of its key of the indexer.
    fn entry(&self) -> usize {
        [self.blocks(), self.index_blocks()].into_iter().flatten().map(|blocks| blocks.dim).sum()
    }

    /// Splits the state of a sequence.
    fn held<'a>(&self, state: &'a mut [f32]) -> Held<'a> {
        let entries = (state.len() - self.replaced()) / self.entry().max(1);
        let mut rest = state;
        let keys = take(&mut rest, self.window * self.head_dim);
        let mut series = |blocks: Option<Blocks>| {
            let len = blocks.map_or(0, |blocks| blocks.kept() * blocks.columns());
            [take(&mut rest, len), take(&mut rest, len)]
        };
        let (blocks, index_blocks) = (series(self.blocks()), series(self.index_blocks()));
        let of_entries = take(&mut rest, entries * self.blocks().map_or(0, |blocks| blocks.dim));
        Held { keys, blocks, index_blocks, entries: of_entries, index_entries: rest }
    }

    /// Attends with the query `q` `[heads · head_dim]` of token `token` of the pass, and replaces it by its joined heads.
    fn attend(&self, token: usize, q: &mut [f32], to: &Attended<'_>) {
        let (position, d) = (to.start + token, self.head_dim);
        for head in q.chunks_exact_mut(d) {
            let factor = (kernels().dot(head, head) / d as f32 + self.eps).sqrt().recip();
            head.iter_mut().for_each(|x| *x *= factor);
            rotate_end(head, self.rotated, position, to.angles, 1.0);
        }
        let positions = to.angles.cos.len() / (self.rotated / 2);
        let (ratio, overlaps) = self.compression.map_or((usize::MAX, false), |of| (of.ratio, of.overlaps));
        let most = positions / ratio;
        let most_read = if overlaps { most.min(self.index.chosen) } else { most };
        let shape = CausalAttention {
            heads: self.heads,
            kv_heads: 1,
            head_dim: d,
            scale: (d as f32).sqrt().recip(),
            window: None,
            chunk: None,
        };
        BUFFERS.with_borrow_mut(|buffers| {
            // As large as the planned positions ever need, so that later passes allocate nothing.
            let most_keys = self.window.min(positions) + most_read;
            let Buffers { keys, result, scratch, scores, order } = buffers;
            grow(keys, most_keys * d);
            grow(result, q.len());
            grow(scratch, shape.scratch_len(1, most_keys));
            let seen = (position + 1) / ratio;
            let chosen = if overlaps && seen > self.index.chosen {
                grow(scores, most);
                order.clear();
                order.reserve(most);
                self.choose(token, seen, to, scores, order);
                order.as_slice()
            } else {
                order.clear();
                order.reserve(most);
                order.extend(0..seen as u32);
                order.as_slice()
            };
            let of_window = (position + 1).saturating_sub(self.window)..position + 1;
            let count = of_window.len() + chosen.len();
            let entries = chosen.iter().map(|entry| &to.entries[*entry as usize * d..][..d]);
            let read = of_window.map(|token| to.keys.at(token)).chain(entries);
            read.zip(keys.chunks_exact_mut(d)).for_each(|(key, place)| place.copy_from_slice(key));
            let keys = &keys[..count * d];
            let rules = ScoreRules { sinks: to.sinks, ..ScoreRules::default() };
            let result = &mut result[..q.len()];
            kernels().attention_causal_with(&shape, rules, q, keys, keys, result, scratch);
            q.copy_from_slice(result);
        });
        q.chunks_exact_mut(d).for_each(|head| rotate_end(head, self.rotated, position, to.angles, -1.0));
    }

    /// Writes the entries of the best scores among the first `seen` to `order`, in ascending order.
    fn choose(&self, token: usize, seen: usize, to: &Attended<'_>, scores: &mut [f32], order: &mut Vec<u32>) {
        let CompressedIndex { heads, dim, chosen } = self.index;
        let queries = &to.index_queries[token * heads * dim..][..heads * dim];
        let weights = &to.index_weights[token * heads..][..heads];
        for (score, key) in scores[..seen].iter_mut().zip(to.index_entries.chunks_exact(dim)) {
            let parts = queries.chunks_exact(dim).zip(weights);
            *score = parts.map(|(query, weight)| weight * kernels().dot(query, key).max(0.0)).sum();
        }
        order.extend(0..seen as u32);
        let score = |entry: u32| scores[entry as usize];
        order.select_nth_unstable_by(chosen - 1, |a, b| score(*b).total_cmp(&score(*a)).then(a.cmp(b)));
        order.truncate(chosen);
        order.sort_unstable();
    }

    /// Projects the joined heads of each group of `p.q` into `out` `[tokens, groups · group_rank]`.
    fn project_groups(&self, operators: &mut dyn Operators, p: &mut PassScratch<'_>, out: &mut [f32]) {
        let (width, rank) = (self.joined() / self.groups, self.group_rank);
        let tokens = out.len() / (self.groups * rank);
        for group in 0..self.groups {
            let joined = &mut p.grouped[group * tokens * width..][..tokens * width];
            for (row, to) in p.q.chunks_exact(self.joined()).zip(joined.chunks_exact_mut(width)) {
                to.copy_from_slice(&row[group * width..(group + 1) * width]);
            }
            let result = &mut p.group[..tokens * rank];
            operators.side_rows(SideKind::OutputGroups, group * rank..(group + 1) * rank, joined, result);
            for (row, out) in result.chunks_exact(rank).zip(out.chunks_exact_mut(self.groups * rank)) {
                out[group * rank..(group + 1) * rank].copy_from_slice(row);
            }
        }
    }
}

/// Values of a row of scratch for entries of `ratio` rows.
fn d_of_row(dim: usize, ratio: usize) -> usize {
    dim.div_ceil(ratio)
}

/// Lengthens a buffer to at least `len` values.
fn grow(buffer: &mut Vec<f32>, len: usize) {
    if buffer.len() < len {
        buffer.resize(len, 0.0);
    }
}

impl Mixer for CompressedAttention {
    fn name(&self) -> &'static str {
        "compressed attention"
    }

    fn linears(&self) -> [Option<MixerLinear>; MOST_LINEARS] {
        let linear = |kind, rows, cols| Some(MixerLinear { kind, rows, cols, bias: false });
        [
            linear(LinearKind::QA, self.q_rank, self.hidden),
            linear(LinearKind::KvA, self.head_dim, self.hidden),
            linear(LinearKind::QB, self.joined(), self.q_rank),
            linear(LinearKind::MixOut, self.hidden, self.width()),
        ]
    }

    fn sides(&self) -> Vec<SideInfo> {
        let groups = side(SideKind::OutputGroups, self.width(), self.joined() / self.groups);
        let mut sides = vec![groups];
        if let Some(blocks) = self.blocks() {
            let of = |kind| side(kind, blocks.columns(), self.hidden);
            sides.extend([SideKind::BlockValues, SideKind::BlockGate].map(of));
        }
        if let Some(blocks) = self.index_blocks() {
            let of = |kind| side(kind, blocks.columns(), self.hidden);
            sides.extend([SideKind::IndexBlockValues, SideKind::IndexBlockGate].map(of));
            let CompressedIndex { heads, dim, .. } = self.index;
            sides.push(side(SideKind::IndexQueries, heads * dim, self.q_rank));
            sides.push(side(SideKind::IndexWeights, heads, self.hidden));
        }
        sides
    }

    fn vectors(&self) -> Vec<(VectorKind, Vec<usize>)> {
        let mut vectors = vec![
            (VectorKind::Sinks, vec![self.heads]),
            (VectorKind::LatentNorm, vec![self.q_rank]),
            (VectorKind::KeyNorm, vec![self.head_dim]),
        ];
        let series = [
            (self.blocks(), VectorKind::BlockBias, VectorKind::BlockNorm),
            (self.index_blocks(), VectorKind::IndexBlockBias, VectorKind::IndexBlockNorm),
        ];
        for (blocks, bias, norm) in series {
            let of =
                |blocks: Blocks| [(bias, vec![blocks.ratio, blocks.columns()]), (norm, vec![blocks.dim])];
            vectors.extend(blocks.map(of).into_iter().flatten());
        }
        vectors
    }

    fn state(&self, context: usize) -> StateShape {
        let grows = self.compression.map_or(0, |of| (context / of.ratio).saturating_mul(self.entry()));
        StateShape { tail: self.replaced().saturating_add(grows), grows, heads: 0, head: 0 }
    }

    fn width(&self) -> usize {
        self.groups * self.group_rank
    }

    fn scratch(&self) -> usize {
        self.widths().iter().sum()
    }

    fn project(&self, x: View, ops: &mut Vec<Op>) {
        let views = View::scratch(self.widths());
        let [latent, normed, q, projected, _, values, gates, index_values, index_gates, ..] = views;
        let [.., index_queries, index_weights, _, _, _, _] = views;
        let queries = vec![Output { linear: LinearKind::QB, out: q, add: false }];
        ops.extend([
            matmuls(x, [(LinearKind::QA, latent), (LinearKind::KvA, projected)]),
            Op::VectorNorm { weight: VectorKind::LatentNorm, eps: self.eps, x: latent, out: normed },
            Op::Matmuls { input: LinearInput::QLatent, x: normed, outputs: queries },
        ]);
        if self.blocks().is_some() {
            ops.push(Op::Side { side: SideKind::BlockValues, x, out: values });
            ops.push(Op::Side { side: SideKind::BlockGate, x, out: gates });
        }
        if self.index_blocks().is_some() {
            ops.push(Op::Side { side: SideKind::IndexBlockValues, x, out: index_values });
            ops.push(Op::Side { side: SideKind::IndexBlockGate, x, out: index_gates });
            ops.push(Op::Side { side: SideKind::IndexQueries, x: normed, out: index_queries });
            ops.push(Op::Side { side: SideKind::IndexWeights, x, out: index_weights });
        }
    }

    fn mix(&self, operators: &mut dyn Operators, rows: MixRows<'_>) {
        let MixRows { seqs, mut states, threads, scratch, out, cos, sin } = rows;
        let tokens = seqs.tokens();
        let (out, padding) = out[..seqs.rows * self.width()].split_at_mut(tokens * self.width());
        padding.fill(0.0);
        if tokens == 0 {
            return;
        }
        let mut p = self.parts(seqs.rows, scratch);
        let key_norm = operators.vector(VectorKind::KeyNorm);
        norm(
            key_norm,
            self.eps,
            &p.projected[..tokens * self.head_dim],
            &mut p.keys[..tokens * self.head_dim],
        );
        let (mut first, angles) = (0, Angles { cos, sin });
        for (i, &len) in seqs.lens.iter().enumerate() {
            let state = states.as_mut().map(|states| {
                let size = states.tails.len() / states.slots;
                &mut states.tails[states.of[i] * size..][..size]
            });
            self.sequence(operators, &mut p, [seqs.start(i), first, len], state, (angles, threads));
            first += len;
        }
        self.project_groups(operators, &mut p, out);
    }

    fn gguf_numbers(&self) -> Vec<(&'static str, usize)> {
        vec![
            ("attention.q_lora_rank", self.q_rank),
            ("attention.sliding_window", self.window),
            ("attention.output_group_count", self.groups),
            ("attention.output_lora_rank", self.group_rank),
            ("attention.indexer.head_count", self.index.heads),
            ("attention.indexer.key_length", self.index.dim),
            ("attention.indexer.top_k", self.index.chosen),
        ]
    }

    fn check_gguf(&self, _: &GgufAround) -> Result<(), Uncomputed> {
        match self.index.dim.is_multiple_of(ROTATED_BLOCK) {
            true => Ok(()),
            false => {
                let allowed =
                    format!("a multiple of {ROTATED_BLOCK}: llama.cpp rotates index keys in such blocks");
                Err(Uncomputed::new("index_head_dim", self.index.dim, allowed))
            }
        }
    }
}

impl CompressedAttention {
    /// Mixes the tokens of one sequence: `len` rows from row `first` on, the first at position `start`.
    fn sequence(
        &self,
        operators: &dyn Operators,
        p: &mut PassScratch<'_>,
        [start, first, len]: [usize; 3],
        state: Option<&mut [f32]>,
        (angles, threads): (Angles<'_>, usize),
    ) {
        let (d, joined) = (self.head_dim, self.joined());
        for (row, key) in p.keys[first * d..(first + len) * d].chunks_exact_mut(d).enumerate() {
            rotate_end(key, self.rotated, start + row, angles, 1.0);
        }
        let CompressedIndex { heads, dim, .. } = self.index;
        let of_index = heads * dim;
        let index = self.index_blocks().is_some();
        let queries = if index { first * of_index..(first + len) * of_index } else { 0..0 };
        let weights = if index { first * heads..(first + len) * heads } else { 0..0 };
        for (row, query) in p.index_queries[queries.clone()].chunks_exact_mut(of_index).enumerate() {
            query
                .chunks_exact_mut(dim)
                .for_each(|head| rotate_end(head, self.rotated, start + row, angles, 1.0));
        }
        let cached = state.is_some();
        let held = match state {
            Some(state) => self.held(state),
            None => Held {
                keys: &mut [],
                blocks: [&mut [], &mut []],
                index_blocks: [&mut [], &mut []],
                entries: &mut *p.entries,
                index_entries: &mut *p.index_entries,
            },
        };
        let series = [
            (self.blocks(), &p.blocks, &held.blocks, &mut *held.entries, OfBlocks::ATTENTION),
            (
                self.index_blocks(),
                &p.index_blocks,
                &held.index_blocks,
                &mut *held.index_entries,
                OfBlocks::INDEX,
            ),
        ];
        for (blocks, projected, kept, entries, vectors) in series {
            let Some(blocks) = blocks else { continue };
            let history = |i: usize| History {
                rows: &*projected[i],
                kept: &*kept[i],
                width: blocks.columns(),
                start,
                first,
            };
            let source = [history(0), history(1)];
            blocks.finish(start..start + len, source, vectors.of(operators), angles, entries);
        }
        let to = Attended {
            start,
            keys: History { rows: &*p.keys, kept: &*held.keys, width: d, start, first },
            entries: &*held.entries,
            index_entries: &*held.index_entries,
            index_queries: &p.index_queries[queries],
            index_weights: &p.index_weights[weights],
            sinks: operators.vector(VectorKind::Sinks),
            angles,
        };
        let rows = p.q[first * joined..(first + len) * joined].chunks_exact_mut(joined).enumerate();
        for_each(threads, rows, |(token, q)| self.attend(token, q, &to));
        if !cached {
            return;
        }
        let rows = [start, first, len];
        keep(held.keys, d, rows, p.keys);
        for (blocks, projected, kept) in [
            (self.blocks(), &p.blocks, held.blocks),
            (self.index_blocks(), &p.index_blocks, held.index_blocks),
        ] {
            let Some(blocks) = blocks else { continue };
            for (kept, projected) in kept.into_iter().zip(projected) {
                keep(kept, blocks.columns(), rows, projected);
            }
        }
    }
}

/// Norms rows of `x` into `out`.
fn norm(weight: Option<&[f32]>, eps: f32, x: &[f32], out: &mut [f32]) {
    match weight {
        Some(weight) => kernels().rms_norm(x, weight, eps, out),
        // The mixer asks only for vectors in the config, and those were loaded.
        None => out.copy_from_slice(x),
    }
}
