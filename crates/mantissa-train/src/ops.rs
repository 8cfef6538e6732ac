//! Operators of a decoder layer, with the places of their parameters.

use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::Arc;

use mantissa_kernels::{kernels, map_reduce_fixed};
use mantissa_model::config::{Experts, MlpForm, NormPlaces, QkvForm};
use mantissa_model::flow::LayerFlow;
use mantissa_model::graph::{NormKind, SideInfo, SideKind, VectorKind};
use mantissa_model::kv::KvQuantizer;
use mantissa_model::{LinearKind, ModelConfig};

use crate::arena::Parameters;
use crate::error::TrainError;
use crate::learned::scales_name;
use crate::linear::LinearOp;
use crate::norm::NormOp;
use crate::policy::LinearPolicy;
use crate::store::Precision;

/// Decoder layer with the ranges of its parameters.
#[derive(Clone, Debug)]
pub(crate) struct LayerOps {
    /// Layer index.
    pub(crate) index: usize,
    pub(crate) flow: LayerFlow,
    pub(crate) places: NormPlaces,
    pub(crate) qkv: QkvForm,
    pub(crate) mlp: MlpForm,
    /// Clipping threshold of q, k and v.
    pub(crate) clip: Option<f32>,
    /// Experts in place of the MLP.
    pub(crate) experts: Option<Experts>,
    /// Operands of its matmuls.
    pub(crate) policy: Arc<LinearPolicy>,
    norms: Vec<(NormKind, NormOp)>,
    linears: BTreeMap<LinearKind, LinearOp>,
    /// Router, and gate of the shared experts, always in f32.
    sides: Vec<(SideKind, LinearOp)>,
    vectors: Vec<(VectorKind, Range<usize>)>,
}

impl LayerOps {
    /// Makes the operators of layer `index` of a model with these parameters, whose weights are kept in `precision`.
    /// `kv` quantizes keys and values. `place` is the number of linear layers before it, which it advances.
    ///
    /// # Errors
    /// [`TrainError::Policy`] for an operand that cannot be had.
    pub(crate) fn new(
        config: &ModelConfig,
        index: usize,
        policy: &LinearPolicy,
        (params, precision): (&Parameters, Precision),
        (kv, threads): (&Option<KvQuantizer>, usize),
        place: &mut usize,
    ) -> Result<Self, TrainError> {
        let find = |name: String| params.place(&name).unwrap_or_default();
        let linear = |module: &str, shape, bias: bool, policy: &LinearPolicy| {
            let bias = params.place(&format!("{module}.bias")).filter(|_| bias);
            LinearOp::new(module, shape, find(format!("{module}.weight")), bias, policy)
        };
        let mut linears = BTreeMap::new();
        for info in config.layer_linears(index) {
            let own = linear(&info.module, (info.rows, info.cols), info.bias, policy)?
                .at_place(*place)
                .with_scales(params.place(&scales_name(&info.module)));
            let own = match params.base() {
                Some(base) => base.tuned(own, config, &info, params.table(), precision)?,
                None => own,
            };
            linears.insert(info.kind, own);
            *place += 1;
        }
        let side = |SideInfo { kind, rows, cols, bias }: SideInfo| {
            let shape = (rows, cols);
            Ok((kind, linear(&config.side_module(index, kind), shape, bias, &LinearPolicy::f32())?))
        };
        let vector = |(kind, _)| (kind, find(config.vector_name(index, kind)));
        let norm = |(kind, width)| {
            let module = config.norm_module(index, kind);
            (kind, NormOp::new(config.norm, &module, width, config.rms_norm_eps, params))
        };
        Ok(LayerOps {
            index,
            flow: LayerFlow::new(config, index, threads).with_kv(kv.clone()),
            places: config.norm_places,
            qkv: config.qkv,
            mlp: config.mlp,
            clip: config.clip_qkv,
            experts: config.experts.clone().filter(|experts| experts.layers[index]),
            policy: Arc::new(policy.clone()),
            norms: config.norms(index).map(norm).collect(),
            linears,
            sides: config.sides(index).into_iter().map(side).collect::<Result<_, TrainError>>()?,
            vectors: config.vectors(index).into_iter().map(vector).collect(),
        })
    }

    /// Returns a linear layer of the model's [list](ModelConfig::layer_linears).
    pub(crate) fn linear(&self, kind: LinearKind) -> &LinearOp {
        &self.linears[&kind]
    }

    /// Returns the largest magnitude of the weights that are fused with the weight of `kind`, its own included; `None` if it is
    /// not fused, or a frozen weight.
    pub(crate) fn fused_amax(&self, params: &Parameters, kind: LinearKind, threads: usize) -> Option<f32> {
        let group = kind.fused()?;
        let fused = self.linears().filter(|(other, _)| other.fused() == Some(group));
        let amax = |linear: &LinearOp| {
            let weight = linear.weight();
            let of = |part: Range<usize>| {
                let part = weight.start + part.start..weight.start + part.end;
                kernels().amax(&params.get(part).widened())
            };
            let found = map_reduce_fixed(threads, weight.len(), 1 << 16, of, 0.0, f32::max);
            (!weight.is_empty()).then_some(found)
        };
        fused.map(|(_, linear)| amax(linear)).try_fold(0.0f32, |all, amax| Some(all.max(amax?)))
    }

    pub(crate) fn linear_mut(&mut self, kind: LinearKind) -> Option<&mut LinearOp> {
        self.linears.get_mut(&kind)
    }

    /// Iterates over the linear layers.
    pub(crate) fn linears(&self) -> impl Iterator<Item = (LinearKind, &LinearOp)> {
        self.linears.iter().map(|(kind, linear)| (*kind, linear))
    }

    /// Returns a norm, if the layer has it.
    pub(crate) fn norm(&self, kind: NormKind) -> Option<&NormOp> {
        self.norms.iter().find(|(of, _)| *of == kind).map(|(_, norm)| norm)
    }

    /// Returns the router or a gate, if the layer has it.
    pub(crate) fn side(&self, kind: SideKind) -> Option<&LinearOp> {
        self.sides.iter().find(|(of, _)| *of == kind).map(|(_, side)| side)
    }

    /// Returns the place of a vector, if the layer has it.
    pub(crate) fn vector(&self, kind: VectorKind) -> Option<&Range<usize>> {
        self.vectors.iter().find(|(of, _)| *of == kind).map(|(_, range)| range)
    }

    /// Iterates over the vectors with their places.
    pub(crate) fn vectors(&self) -> impl Iterator<Item = (VectorKind, &Range<usize>)> {
        self.vectors.iter().map(|(kind, range)| (*kind, range))
    }

    /// Returns the numbers of the activation.
    pub(crate) fn activation_numbers(&self, params: &Parameters) -> [f32; 4] {
        self.flow.activation_numbers(|kind| params.f32(self.vector(kind)?).first().copied())
    }

    /// True if a linear layer's weight is made for all tokens together: frozen in a scheme, or with an adapter.
    pub(crate) fn is_tuned(&self) -> bool {
        self.linears.values().any(|linear| linear.packed().is_some() || linear.adapter().is_some())
    }

    /// True if its matmuls have quantized operands.
    pub(crate) fn is_quantized(&self) -> bool {
        self.linears.values().any(|linear| linear.rules().is_some())
    }

    /// True if the results of attention and MLP are normed before they are added.
    pub(crate) fn norms_results(&self) -> bool {
        matches!(self.places, NormPlaces::After | NormPlaces::Both)
    }

    /// True if attention and MLP read the same states.
    pub(crate) fn is_parallel(&self) -> bool {
        matches!(self.places, NormPlaces::Parallel | NormPlaces::ParallelShared)
    }
}
