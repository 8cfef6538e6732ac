//! Entries that stand for blocks of tokens, of compressed attention and of its indexer (DeepSeek-V4, sec. 2.3.1, eq. 9 to
//! 12, and 2.3.2, eq. 20 to 23): [`super::compressed`] describes them.

use std::cell::RefCell;
use std::ops::Range;

use mantissa_kernels::kernels;

use crate::operators::Operators;
use mantissa_arch::kinds::VectorKind;

thread_local! {
    /// Weights of the values of an entry, their largest ones and sums, and the entry before its norm.
    static ENTRY: RefCell<Vec<f32>> = const { RefCell::new(Vec::new()) };
}

/// Series of entries.
#[derive(Clone, Copy)]
pub(super) struct Blocks {
    /// Tokens of a block.
    pub(super) ratio: usize,
    /// True if an entry is of two blocks, the second of which is its own.
    pub(super) overlaps: bool,
    /// Width of an entry.
    pub(super) dim: usize,
    /// Width of its rotated part.
    pub(super) rotated: usize,
    pub(super) eps: f32,
}

/// Cosines and sines by position, `[positions, rotated / 2]`.
#[derive(Clone, Copy)]
pub(super) struct Angles<'a> {
    pub(super) cos: &'a [f32],
    pub(super) sin: &'a [f32],
}

/// Values of the tokens of a sequence: those of a pass, and the last ones before it.
#[derive(Clone, Copy)]
pub(super) struct History<'a> {
    /// `[rows, width]`.
    pub(super) rows: &'a [f32],
    /// At the place of their positions modulo their number, `[kept, width]`.
    pub(super) kept: &'a [f32],
    pub(super) width: usize,
    /// Position of the first token of the pass, and its row.
    pub(super) start: usize,
    pub(super) first: usize,
}

impl<'a> History<'a> {
    /// Values of the token at a position.
    pub(super) fn at(&self, position: usize) -> &'a [f32] {
        let (from, place) = match position.checked_sub(self.start) {
            Some(token) => (self.rows, self.first + token),
            None => (self.kept, position % (self.kept.len() / self.width)),
        };
        &from[place * self.width..(place + 1) * self.width]
    }
}

/// Copies the last values of `len` rows from row `first` on, of tokens from position `start` on, to their places in `kept`.
pub(super) fn keep(kept: &mut [f32], width: usize, [start, first, len]: [usize; 3], rows: &[f32]) {
    let count = kept.len() / width;
    for token in len.saturating_sub(count)..len {
        let place = (start + token) % count * width;
        kept[place..place + width].copy_from_slice(&rows[(first + token) * width..][..width]);
    }
}

/// Rotates the last `rotated` values of a head, pairs of adjacent ones, by the angles of a position times `direction`.
pub(super) fn rotate_end(
    head: &mut [f32],
    rotated: usize,
    position: usize,
    angles: Angles<'_>,
    direction: f32,
) {
    let (half, unrotated) = (rotated / 2, head.len() - rotated);
    let at = position * half..(position + 1) * half;
    let angles = angles.cos[at.clone()].iter().zip(&angles.sin[at]);
    for (pair, (cos, sin)) in head[unrotated..].chunks_exact_mut(2).zip(angles) {
        let (a, b, sin) = (pair[0], pair[1], sin * direction);
        (pair[0], pair[1]) = (a * cos - b * sin, b * cos + a * sin);
    }
}

/// Vectors of a series of entries.
#[derive(Clone, Copy)]
pub(super) struct OfBlocks {
    bias: VectorKind,
    norm: VectorKind,
}

impl OfBlocks {
    pub(super) const ATTENTION: Self = OfBlocks { bias: VectorKind::BlockBias, norm: VectorKind::BlockNorm };
    pub(super) const INDEX: Self =
        OfBlocks { bias: VectorKind::IndexBlockBias, norm: VectorKind::IndexBlockNorm };

    /// Numbers that are added to the weights, and the weight of the norm.
    pub(super) fn of(self, operators: &dyn Operators) -> [&[f32]; 2] {
        // The mixer asks only for vectors in the config, and those were loaded.
        [self.bias, self.norm].map(|kind| operators.vector(kind).unwrap_or(&[]))
    }
}

impl Blocks {
    /// Values of a token.
    pub(super) fn columns(&self) -> usize {
        self.dim * if self.overlaps { 2 } else { 1 }
    }

    /// Tokens before a pass that later entries may be of.
    pub(super) fn kept(&self) -> usize {
        self.ratio * if self.overlaps { 2 } else { 1 }
    }

    /// Computes the entries of the blocks that end at `positions`, at their places in `entries` `[entries, dim]`.
    pub(super) fn finish(
        &self,
        positions: Range<usize>,
        source: [History<'_>; 2],
        vectors: [&[f32]; 2],
        angles: Angles<'_>,
        entries: &mut [f32],
    ) {
        for block in positions.start / self.ratio..positions.end / self.ratio {
            let entry = &mut entries[block * self.dim..(block + 1) * self.dim];
            self.entry(block, source, vectors, entry);
            rotate_end(entry, self.rotated, block * self.ratio, angles, 1.0);
        }
    }

    /// Computes one entry, before its rotation, from the values and weights of its tokens.
    fn entry(
        &self,
        block: usize,
        [values, gates]: [History<'_>; 2],
        [bias, norm]: [&[f32]; 2],
        out: &mut [f32],
    ) {
        let (d, ratio) = (self.dim, self.ratio);
        let own = block * ratio;
        let first = if self.overlaps { own.saturating_sub(ratio) } else { own };
        let count = own + ratio - first;
        // The last half of a token's columns counts for its own block.
        let columns = |token: usize| {
            let from = if self.overlaps && token >= own { d } else { 0 };
            from..from + d
        };
        ENTRY.with_borrow_mut(|scratch| {
            let needed = (self.kept() + 3) * d;
            scratch.resize(scratch.len().max(needed), 0.0);
            let (weights, rest) = scratch.split_at_mut(self.kept() * d);
            let (largest, rest) = rest.split_at_mut(d);
            let (sums, result) = rest.split_at_mut(d);
            let (weights, result) = (&mut weights[..count * d], &mut result[..d]);
            largest.fill(f32::NEG_INFINITY);
            for (token, weights) in (first..).zip(weights.chunks_exact_mut(d)) {
                let gate = &gates.at(token)[columns(token)];
                let bias = &bias[token % ratio * self.columns()..][columns(token)];
                for (((weight, gate), bias), largest) in
                    weights.iter_mut().zip(gate).zip(bias).zip(&mut *largest)
                {
                    *weight = gate + bias;
                    *largest = largest.max(*weight);
                }
            }
            for weights in weights.chunks_exact_mut(d) {
                weights.iter_mut().zip(&*largest).for_each(|(weight, largest)| *weight -= largest);
            }
            kernels().exp_inplace(weights);
            sums.fill(0.0);
            result.fill(0.0);
            for (token, weights) in (first..).zip(weights.chunks_exact(d)) {
                let values = &values.at(token)[columns(token)];
                for (((weight, value), sum), result) in
                    weights.iter().zip(values).zip(&mut *sums).zip(&mut *result)
                {
                    *sum += weight;
                    *result += weight * value;
                }
            }
            result.iter_mut().zip(&*sums).for_each(|(result, sum)| *result /= sum);
            kernels().rms_norm(result, norm, self.eps, out);
        });
    }
}
