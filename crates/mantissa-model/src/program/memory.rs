//! Slices of the views of an operation.

use std::ops::Range;

use super::view::{Buffer, Rows, View};
use crate::operators::{Activations, IndexRows};

/// Rows that an operation runs on.
#[derive(Clone, Debug)]
pub(crate) struct Scope {
    /// Rows of the part.
    pub(crate) rows: Range<usize>,
    /// How many of them are not padding.
    pub(crate) tokens: usize,
    /// Rows of the pass.
    pub(crate) all: usize,
}

/// Memory of a pass by buffer, and what no view lies in.
pub(crate) struct Memory<'m> {
    buffers: [&'m mut [f32]; Buffer::BOUND],
    keeps_heads: bool,
    keeps_inner: bool,
    /// Rows of an indexer.
    pub(crate) index: IndexRows<'m>,
    /// The layer's own input.
    pub(crate) layer_input: &'m [f32],
}

/// Borrows the memory of a pass.
pub(crate) fn memory<'m>(a: &'m mut Activations<'_>) -> Memory<'m> {
    Memory {
        keeps_heads: a.lse.is_some(),
        keeps_inner: a.mlp.keep,
        // In the order of `Buffer`.
        buffers: [
            a.residual,
            a.normed,
            a.q,
            a.k,
            a.v,
            a.attended,
            a.gate,
            a.up,
            a.inner,
            a.extra.wide,
            a.extra.logits,
            a.extra.result,
            a.extra.sum,
            a.streams,
        ],
        index: a.extra.index.borrowed(),
        layer_input: a.layer_input,
    }
}

impl<'m> Memory<'m> {
    /// Buffer that holds a view, and its range there.
    fn place(&self, view: &View, scope: &Scope) -> (Buffer, Range<usize>) {
        let View { buffer, rows, width } = *view;
        let (buffer, rows) = match buffer {
            Buffer::NormedHeads if self.keeps_heads => (Buffer::Wide, rows),
            Buffer::NormedHeads => (Buffer::Queries, rows),
            Buffer::NormedInner if self.keeps_inner => (Buffer::Wide, Rows::Part { after: 0 }),
            Buffer::NormedInner => (Buffer::Gate, rows),
            bound => (bound, rows),
        };
        let len = scope.rows.len() * width;
        let start = match rows {
            _ if width == 0 => 0,
            Rows::Pass { after } => after * scope.all + scope.rows.start * width,
            Rows::Part { after } => after * scope.rows.len(),
            Rows::Kept if self.keeps_inner => scope.rows.start * width,
            Rows::Kept => 0,
            Rows::Stream { index, of } => {
                index * (self.buffers[buffer as usize].len() / of) + scope.rows.start * width
            }
        };
        (buffer, start..start + len)
    }

    /// Returns the slices of views that do not overlap.
    ///
    /// # Panics
    /// If they overlap, or a buffer is too short.
    pub(crate) fn views<const N: usize>(self, scope: &Scope, views: [View; N]) -> [&'m mut [f32]; N] {
        let places = views.map(|view| self.place(&view, scope));
        let mut order: [usize; N] = std::array::from_fn(|i| i);
        // Empty views first, which may lie where another begins.
        order.sort_unstable_by_key(|i| (places[*i].0, places[*i].1.start, places[*i].1.end));
        let mut found: [&mut [f32]; N] = std::array::from_fn(|_| Default::default());
        let mut next = order.into_iter().peekable();
        for (buffer, mut rest) in self.buffers.into_iter().enumerate() {
            let mut at = 0;
            while let Some(i) = next.next_if(|i| places[*i].0 as usize == buffer) {
                let Range { start, end } = places[i].1.clone();
                let (slice, others) = rest.split_at_mut(start - at).1.split_at_mut(end - start);
                (found[i], rest, at) = (slice, others, end);
            }
        }
        found
    }

    /// Returns the slices of views outside of the parallel streams, and all streams.
    pub(crate) fn with_streams<const N: usize>(
        self,
        scope: &Scope,
        views: [View; N],
    ) -> ([&'m mut [f32]; N], &'m mut [f32]) {
        let (views, [streams]) = self.with_buffers(scope, views, [Buffer::Streams]);
        (views, streams)
    }

    /// Returns the slices of views, and whole buffers that no view lies in.
    pub(crate) fn with_buffers<const N: usize, const M: usize>(
        mut self,
        scope: &Scope,
        views: [View; N],
        buffers: [Buffer; M],
    ) -> ([&'m mut [f32]; N], [&'m mut [f32]; M]) {
        let whole = buffers.map(|buffer| std::mem::take(&mut self.buffers[buffer as usize]));
        (self.views(scope, views), whole)
    }

    /// Returns the slices of two views and the rows of an indexer.
    pub(crate) fn with_index(
        mut self,
        scope: &Scope,
        views: [View; 2],
    ) -> ([&'m mut [f32]; 2], IndexRows<'m>) {
        let index = std::mem::take(&mut self.index);
        (self.views(scope, views), index)
    }
}
