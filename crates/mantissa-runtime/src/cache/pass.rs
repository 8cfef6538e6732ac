//! A pass over the caches of its sequences: its rows, and what it reads and appends.

use std::ops::Range;

use mantissa_kernels::{CausalAttention, ScoreRules};
use mantissa_model::ForwardError;

use super::plan::{LayerPlan, SidePlan};
use super::pool::KvPool;
use super::scratch::Span;
use super::sequence::SequenceCache;
use super::side::{Codes, Places, SideView};

/// New tokens of a sequence up to which tiles are read by the fused kernels: a token then has the same bits alone and
/// among others.
pub const FEW: usize = 16;

/// Rows of a pass that belong to one sequence.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RowSpan {
    /// Index of the sequence's cache; each occurs at most once.
    pub sequence: usize,
    /// Its rows.
    pub rows: Range<usize>,
    /// Position of the first of them: the number of cached tokens.
    pub start: usize,
}

/// Everything that tasks of a pass read.
pub(super) struct Pass<'a> {
    pub(super) stored: Stored<'a>,
    pub(super) shape: &'a CausalAttention,
    pub(super) rules: ScoreRules<'a>,
    pub(super) q: &'a [f32],
}

/// Keys and values of one layer: of all sequences, and of the new rows.
pub(super) struct Stored<'a> {
    pub(super) plan: &'a LayerPlan,
    pub(super) rope: Option<(&'a [f32], &'a [f32], usize)>,
    pub(super) k: &'a [f32],
    pub(super) v: &'a [f32],
    pub(super) data: &'a [u8],
    pub(super) block_tokens: usize,
    pub(super) caches: &'a [SequenceCache],
    pub(super) layer: usize,
    /// True if the new rows are among those that are not stored yet.
    pub(super) append: bool,
}

impl<'a> Stored<'a> {
    /// Keys and values of a sequence, with its new rows `rows`.
    pub(super) fn sides(&self, sequence: usize, rows: Range<usize>) -> [SideView<'_>; 2] {
        let plan = self.plan;
        let cache = &self.caches[sequence];
        let places =
            Places { blocks: &cache.blocks, block_bytes: plan.block_bytes, block_tokens: self.block_tokens };
        let held = &cache.layers[self.layer];
        let view = |side: &'a SidePlan, held, x: &'a [f32], rope| {
            let new = &x[rows.start * side.width()..rows.end * side.width()];
            let new = if side.direct || !self.append { &[][..] } else { new };
            SideView { plan, side, data: self.data, places, held, new, rope }
        };
        [view(&plan.keys, &held[0], self.k, self.rope), view(&plan.values, &held[1], self.v, None)]
    }
}

impl Pass<'_> {
    /// Keys and values of a span's sequence.
    pub(super) fn sides(&self, span: &Span) -> [SideView<'_>; 2] {
        self.stored.sides(span.sequence, span.row..span.row + span.rows)
    }

    /// Query heads per key/value head.
    pub(super) fn group(&self) -> usize {
        self.shape.heads / self.shape.kv_heads
    }

    /// Positions that a query at `position` sees.
    pub(super) fn seen(&self, position: usize) -> Range<usize> {
        self.shape.first_visible(position)..position + 1
    }
}

impl KvPool {
    /// Checks that a layer holds keys and values of these heads and widths, and that there is room for `spans` of rows
    /// in `[q, k, v, out]`.
    pub(super) fn check(
        &self,
        layer: usize,
        heads: [(usize, usize); 2],
        q_width: usize,
        spans: &[RowSpan],
        caches: &[SequenceCache],
        rows: [&[f32]; 4],
    ) -> Result<(), ForwardError> {
        let other = Err(ForwardError::OtherModel { what: "KV cache" });
        let Some(plan) = self.plan.layers.get(layer) else { return other };
        let sides = [&plan.keys, &plan.values];
        let divides = q_width.is_multiple_of(plan.keys.width().max(1)) || plan.is_latent;
        if sides.map(|side| (side.heads, side.head_dim)) != heads || !divides {
            return other;
        }
        let widths = [q_width, plan.keys.width(), plan.values.width(), q_width];
        for span in spans {
            let Some(cache) = caches.get(span.sequence) else { return other };
            let Some(held) = cache.layers.get(layer) else { return other };
            let end = span.start + span.rows.len();
            let long = widths.iter().zip(rows).all(|(width, x)| span.rows.end * width <= x.len());
            let holds = held.iter().zip(sides).all(|(held, side)| held.len(side.width()) >= span.start);
            if !long || !holds {
                return other;
            }
            let planned = cache.blocks.len() * self.plan.block_tokens;
            if end > planned {
                return Err(ForwardError::Plan { what: "tokens of the KV cache", needed: end, planned });
            }
        }
        Ok(())
    }
}

/// Appends the new tokens of the sides that a pass sees as stored (`direct`), or of the others.
pub(super) fn push(
    plan: &LayerPlan,
    layer: usize,
    data: &mut [u8],
    block_tokens: usize,
    spans: &[RowSpan],
    caches: &mut [SequenceCache],
    rows: [&[f32]; 2],
    direct: bool,
    codes: &mut Codes,
) -> Result<(), ForwardError> {
    for span in spans {
        let SequenceCache { blocks, layers, .. } = &mut caches[span.sequence];
        let places = Places { blocks, block_bytes: plan.block_bytes, block_tokens };
        let sides = [(&plan.keys, "keys"), (&plan.values, "values")];
        for (((side, what), held), rows) in sides.into_iter().zip(&mut layers[layer]).zip(rows) {
            if side.direct == direct {
                let width = side.width();
                let rows = &rows[span.rows.start * width..span.rows.end * width];
                let pushed = held.push(plan, side, data, places, rows, codes);
                pushed.map_err(|error| ForwardError::Cache { what, error })?;
            }
        }
    }
    Ok(())
}
