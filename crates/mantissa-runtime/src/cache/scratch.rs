//! Parts of the work of a pass, and the buffers that a pool keeps for them.

use std::ops::Range;

use super::side::Codes;

/// Buffers of a pool for passes, reused.
#[derive(Debug, Default)]
pub(super) struct Scratch {
    pub(super) spans: Vec<Span>,
    pub(super) tasks: Vec<Task>,
    /// Span of each row.
    pub(super) of_row: Vec<usize>,
    pub(super) partials: Vec<f32>,
    pub(super) codes: Codes,
    pub(super) latents: Latents,
}

/// Plan of one sequence's rows.
#[derive(Clone, Debug)]
pub(super) struct Span {
    pub(super) sequence: usize,
    pub(super) row: usize,
    pub(super) rows: usize,
    pub(super) start: usize,
    /// First partial result.
    pub(super) base: usize,
    pub(super) kind: Kind,
}

#[derive(Clone, Copy, Debug)]
pub(super) enum Kind {
    /// Pieces of tiles, by heads.
    Few {
        pieces: usize,
        heads: usize,
    },
    Many,
}

/// Part of the work.
#[derive(Clone, Debug)]
pub(super) struct Task {
    pub(super) span: usize,
    /// Floats of its result.
    pub(super) len: usize,
    pub(super) part: Part,
}

#[derive(Clone, Debug)]
pub(super) enum Part {
    /// Tiles of a piece, for some key/value heads.
    Few { piece: usize, heads: Range<usize> },
    /// Queries of a block of positions, for one key/value head.
    Many { block: usize, head: usize },
}

/// Buffers of a pool for latent attention, reused.
#[derive(Debug, Default)]
pub(super) struct Latents {
    pub(super) units: Vec<Unit>,
    /// Queries of the units, `[heads, rows, kv_rank + rotated]` each.
    pub(super) queries: Vec<f32>,
    /// Partial results, `[pieces, heads, rows, partial]` of each unit.
    pub(super) partials: Vec<f32>,
    /// Heads, `[heads, rows, value]` of each unit.
    pub(super) expanded: Vec<f32>,
    /// Rotated parts and index keys of new tokens, `[rows, rotated + dim]`.
    pub(super) keys: Vec<f32>,
}

/// Consecutive new tokens of a sequence that are computed together.
#[derive(Clone, Debug)]
pub(super) struct Unit {
    pub(super) span: usize,
    /// Rows of the pass.
    pub(super) rows: Range<usize>,
    /// Position of the first.
    pub(super) start: usize,
    /// Pieces of the cache, or of the chosen tokens, that are computed apart.
    pub(super) pieces: usize,
    /// True if its query attends to the chosen tokens.
    pub(super) sparse: bool,
}
