//! Frame of a layer's blocks: places of norms, and the form of the residual stream.

use crate::config::{ModelConfig, NormPlaces, Streams};
use crate::hyper::Hyper;
use crate::program::{Buffer, Op, Output, View};
use crate::streams::AltUp;
use mantissa_arch::kinds::{HyperSite, LinearInput, LinearKind, NormKind};

/// What stands around the blocks of a layer.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct Frame {
    /// Width of the residual stream.
    pub(crate) hidden: usize,
    pub(crate) places: NormPlaces,
    /// Parallel streams of states, of which the layer computes the first.
    pub(crate) streams: Option<AltUp>,
    /// Parallel streams of states, which each half of the layer joins and mixes.
    pub(crate) hyper: Option<Hyper>,
}

impl Frame {
    /// Creates the frame of layer `layer`.
    pub(crate) fn new(config: &ModelConfig, layer: usize) -> Self {
        let (first, last) = (layer == 0, layer + 1 == config.num_hidden_layers);
        Frame {
            hidden: config.hidden_size,
            places: config.norm_places,
            streams: config.by_layer.streams.map(|Streams { count, laurel, scales }| AltUp {
                count,
                laurel,
                scales,
                first,
                last,
            }),
            hyper: config.by_layer.hyper.map(|streams| Hyper {
                streams,
                norm_eps: config.rms_norm_eps,
                first,
                last,
            }),
        }
    }

    /// True if attention and MLP run in parallel on the same states.
    pub(crate) fn parallel(&self) -> bool {
        matches!(self.places, NormPlaces::Parallel | NormPlaces::ParallelShared)
    }

    /// True if results are normed before they are added.
    pub(crate) fn norms_results(&self) -> bool {
        matches!(self.places, NormPlaces::After | NormPlaces::Both)
    }

    /// Residual stream.
    pub(crate) fn residual(&self) -> View {
        View::new(Buffer::Residual, self.hidden)
    }

    /// Normed copy of the residual stream, or a result before its norm.
    pub(crate) fn normed(&self) -> View {
        View::new(Buffer::Normed, self.hidden)
    }

    /// Writes the input of one half, normed by `norm`, into [`Buffer::Normed`].
    pub(crate) fn enter(&self, norm: NormKind) -> Op {
        let (x, out) = (self.residual(), self.normed());
        match self.places {
            NormPlaces::After => Op::Copy { x, out },
            _ => Op::Norm { norm, x, out },
        }
    }

    /// Norms the states for an MLP that runs in parallel, before attention changes them.
    pub(crate) fn enter_parallel(&self) -> Option<Op> {
        (self.places == NormPlaces::Parallel).then(|| Op::Norm {
            norm: NormKind::Post,
            x: self.residual(),
            out: self.normed(),
        })
    }

    /// Joins hyper-connected streams into the residual stream before the half at `site`.
    pub(crate) fn join(&self, site: HyperSite) -> Option<Op> {
        self.hyper.map(|_| Op::JoinHyper(site))
    }

    /// Empties a residual stream that streams were joined into: the result of the half comes there.
    pub(crate) fn clear(&self) -> Option<Op> {
        self.hyper.map(|_| Op::Fill { out: self.residual(), value: 0.0 })
    }

    /// Mixes hyper-connected streams after the half at `site`.
    pub(crate) fn mix(&self, site: HyperSite) -> Option<Op> {
        self.hyper.map(|_| Op::MixHyper(site))
    }

    /// Runs an output projection on `x` and adds its result to the residual stream, normed by `norm` first if results are.
    /// `scratch` `[rows, hidden]` holds the normed result.
    pub(crate) fn add_result(
        &self,
        (linear, input): (LinearKind, LinearInput),
        x: View,
        norm: NormKind,
        scratch: View,
        ops: &mut Vec<Op>,
    ) {
        let (residual, normed) = (self.residual(), self.normed());
        if !self.norms_results() {
            let outputs = vec![Output { linear, out: residual, add: true }];
            return ops.push(Op::Matmuls { input, x, outputs });
        }
        let outputs = vec![Output { linear, out: normed, add: false }];
        ops.extend([
            Op::Matmuls { input, x, outputs },
            Op::Norm { norm, x: normed, out: scratch },
            Op::Add { x: scratch, out: residual },
        ]);
    }
}

/// Multiplies `x` by a factor, if there is one that changes it.
pub(crate) fn scaled(factor: Option<f32>, x: View) -> Option<Op> {
    factor.filter(|factor| *factor != 1.0).map(|factor| Op::Scale { x, factor })
}
