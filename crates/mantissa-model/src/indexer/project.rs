//! Projections of an indexer, and its choice of tokens for whole sequences.

use std::ops::Range;

use mantissa_kernels::kernels;

use crate::config::Indexer;
use crate::indexer::IndexerFlow;
use crate::operators::{IndexRows, Operators, Sequences};
use mantissa_arch::kinds::{SideKind, VectorKind};

impl IndexerFlow {
    /// Projects the keys, if a cache keeps them or a query chooses, and in the latter case queries and weights, from the
    /// normed states `x` and the normed latent of the queries.
    pub(crate) fn project(
        &self,
        operators: &mut dyn Operators,
        seqs: &Sequences<'_>,
        cached: bool,
        (x, latent): (&[f32], &[f32]),
        index: IndexRows<'_>,
    ) {
        let chooses = self.chooses(seqs);
        if !self.own || !(cached || chooses) {
            return;
        }
        let IndexRows { queries, keys, weights, .. } = index;
        // The place of the queries is free until they are projected.
        let (projected, keys) = (&mut queries[..seqs.rows * self.dim], &mut keys[..seqs.rows * self.dim]);
        operators.side(SideKind::IndexKeys, x, projected);
        let parts = [VectorKind::IndexNorm, VectorKind::IndexNormBias].map(|kind| operators.vector(kind));
        match parts {
            [Some(weight), Some(bias)] => kernels().layer_norm(projected, weight, bias, Indexer::EPS, keys),
            // The program asks only for vectors in the config, and those were loaded.
            _ => keys.copy_from_slice(projected),
        }
        self.split(keys);
        if chooses {
            let queries = &mut queries[..seqs.rows * self.heads * self.dim];
            operators.side(SideKind::IndexQueries, latent, queries);
            self.split(queries);
            operators.side(SideKind::IndexWeights, x, &mut weights[..seqs.rows * self.heads]);
        }
    }

    /// Chooses the tokens of all queries of whole sequences, on up to `threads` threads.
    pub(crate) fn choose_whole(
        &self,
        seqs: &Sequences<'_>,
        index: &mut IndexRows<'_>,
        (cos, sin): (&[f32], &[f32]),
        threads: usize,
    ) {
        if !self.own {
            return;
        }
        let mut first = 0;
        for len in seqs.lens {
            let tokens = first..first + len;
            first = tokens.end;
            if *len <= self.chosen {
                continue;
            }
            let keys = &mut index.keys[tokens.start * self.dim..tokens.end * self.dim];
            self.rotate(0, keys, cos, sin, 1);
            let all = &*keys;
            let read = |range: Range<usize>, out: &mut [f32]| {
                out.copy_from_slice(&all[range.start * self.dim..range.end * self.dim]);
            };
            let part = |width: usize| tokens.start * width..tokens.end * width;
            let queries = &mut index.queries[part(self.heads * self.dim)];
            self.rotate_queries(0, queries, cos, sin);
            let (weights, chosen) = (&index.weights[part(self.heads)], &mut index.chosen[part(self.chosen)]);
            self.choose(0, (queries, weights), &read, chosen, threads);
        }
    }
}
