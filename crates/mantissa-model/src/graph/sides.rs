//! Small parameters of decoder layers: projections that are never quantized, and vectors.

use crate::config::{DenseMlp, ModelConfig};
use mantissa_arch::kinds::{HyperPart, HyperSite, SideInfo, SideKind, VectorKind};

impl ModelConfig {
    /// Lists the small projections of a layer: rates of a recurrent mixer, router, gate of shared experts.
    pub fn sides(&self, layer: usize) -> Vec<SideInfo> {
        let mut sides = self.recurrent_in(layer).map_or_else(Vec::new, |of| of.mixer().sides());
        sides.extend(self.stream_sides(layer));
        sides.extend(self.index_sides(layer));
        if let Some(experts) = self.experts.as_ref().filter(|experts| experts.layers[layer]) {
            let (rows, cols, bias) = (usize::from(experts.count), self.hidden_size, experts.routing.bias);
            sides.push(SideInfo { kind: SideKind::Router, rows, cols, bias });
            if let Some(latent) = experts.latent {
                let bias = self.biases.mlp;
                sides.push(SideInfo { kind: SideKind::ToExperts, rows: latent, cols, bias });
                sides.push(SideInfo { kind: SideKind::FromExperts, rows: cols, cols: latent, bias });
            }
            let gated = experts.shared.is_some_and(|shared| shared.gated);
            sides.extend(gated.then_some(SideInfo {
                kind: SideKind::SharedGate,
                rows: 1,
                cols,
                bias: false,
            }));
        }
        sides
    }

    /// Lists the small projections of parallel streams of states: those of the layer, in the first layer those from the
    /// embedding, in the last one those to the final states.
    fn stream_sides(&self, layer: usize) -> Vec<SideInfo> {
        let Some(streams) = self.by_layer.streams else { return Vec::new() };
        let (n, d, rank) = (streams.count, self.hidden_size, streams.laurel);
        let side = |kind, rows, cols| SideInfo { kind, rows, cols, bias: false };
        let mut sides = vec![
            side(SideKind::Modalities, n, d),
            side(SideKind::Prediction, n * n, n),
            side(SideKind::Correction, n, n),
            side(SideKind::LaurelLeft, rank, d),
            side(SideKind::LaurelRight, d, rank),
        ];
        let others = || (1..n).filter_map(|i| u16::try_from(i).ok());
        if layer == 0 {
            sides.extend(others().map(|i| side(SideKind::EnterStream(i), d, d)));
        }
        if layer + 1 == self.num_hidden_layers {
            sides.extend(others().map(|i| side(SideKind::LeaveStream(i), d, d)));
        }
        sides
    }

    /// Lists what joins and mixes parallel streams in a layer, in the last layer also what joins them at the end.
    fn hyper_vectors(&self, layer: usize) -> impl Iterator<Item = (VectorKind, Vec<usize>)> {
        let last = layer + 1 == self.num_hidden_layers;
        let sites = [HyperSite::Attention, HyperSite::Mlp, HyperSite::Head];
        let sites = sites.into_iter().filter(move |site| last || *site != HyperSite::Head);
        let all = self.by_layer.hyper.map(|hyper| {
            let width = hyper.count * self.hidden_size;
            sites.flat_map(move |site| {
                let (weights, scales) = match site {
                    HyperSite::Head => (hyper.count, 1),
                    HyperSite::Attention | HyperSite::Mlp => (hyper.weights(), 3),
                };
                [
                    (VectorKind::Hyper(site, HyperPart::Weight), vec![weights, width]),
                    (VectorKind::Hyper(site, HyperPart::Base), vec![weights]),
                    (VectorKind::Hyper(site, HyperPart::Scale), vec![scales]),
                ]
            })
        });
        all.into_iter().flatten()
    }

    /// Lists the projections of a layer's indexer, if it has one of its own.
    fn index_sides(&self, layer: usize) -> impl Iterator<Item = SideInfo> {
        let own = self.indexer.as_ref().is_some_and(|indexer| indexer.own[layer]);
        self.indexer_sides().filter(|_| own).into_iter().flatten()
    }

    /// Returns the projections of an indexer, the same in every layer that has one.
    pub(crate) fn indexer_sides(&self) -> Option<[SideInfo; 3]> {
        let indexer = self.indexer.as_ref()?;
        let rank = self.latent.and_then(|latent| latent.q_rank).unwrap_or(0);
        let side = |kind, rows, cols| SideInfo { kind, rows, cols, bias: false };
        Some([
            side(SideKind::IndexQueries, indexer.heads * indexer.dim, rank),
            side(SideKind::IndexKeys, indexer.dim, self.hidden_size),
            side(SideKind::IndexWeights, indexer.heads, self.hidden_size),
        ])
    }

    /// Lists the vectors of a layer and their shapes in a checkpoint.
    pub fn vectors(&self, layer: usize) -> Vec<(VectorKind, Vec<usize>)> {
        let mut vectors = self.recurrent_in(layer).map_or_else(Vec::new, |of| of.mixer().vectors());
        vectors.extend(self.hyper_vectors(layer));
        if self.attention.sinks && self.attends(layer) {
            vectors.push((VectorKind::Sinks, vec![self.num_attention_heads]));
        }
        if let Some(indexer) = self.indexer.as_ref().filter(|indexer| indexer.own[layer]) {
            vectors.extend(
                [VectorKind::IndexNorm, VectorKind::IndexNormBias].map(|kind| (kind, vec![indexer.dim])),
            );
        }
        let experts = self.experts.as_ref().filter(|experts| experts.layers[layer]);
        if let Some(experts) = experts.filter(|experts| experts.routing.correction && !experts.hashed[layer])
        {
            let row = self.architecture.experts.as_ref().is_some_and(|rules| rules.correction_row);
            let count = usize::from(experts.count);
            vectors.push((VectorKind::Correction, if row { vec![1, count] } else { vec![count] }));
        }
        if let Some(experts) = experts.filter(|experts| experts.hashed[layer]) {
            vectors.push((VectorKind::TokenExperts, vec![self.vocab_size, experts.per_token]));
        }
        let parameters = self.hidden_act.parameters().iter().filter(|_| self.has_mlp[layer]);
        vectors.extend(parameters.map(|one| (VectorKind::Activation(one.name), one.shape())));
        vectors.extend(self.by_layer.scales.then(|| (VectorKind::Scale, vec![1])));
        vectors.extend(self.by_layer.streams.map(|_| (VectorKind::StreamScale, vec![self.hidden_size])));
        if let Some(experts) = experts.filter(|experts| experts.dense == DenseMlp::Normed) {
            vectors.push((VectorKind::RouterScale, vec![self.hidden_size]));
            vectors.push((VectorKind::ExpertScales, vec![usize::from(experts.count)]));
        }
        vectors
    }
}
