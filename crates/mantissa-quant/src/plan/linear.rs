//! Linear layer of a plan: its scheme, and its storage.

use mantissa_model::{LinearInfo, ModelConfig};
use mantissa_num::{Blocks, Scheme};
use mantissa_store::TensorSpec;
use mantissa_store::convention::LinearPlan;

use super::job::WeightJob;
use super::options::Options;
use crate::recipe::{Recipe, TensorRole, chosen};

/// A linear layer and its scheme.
#[derive(Clone, Debug)]
pub struct PlannedLinear {
    /// Layer.
    pub info: LinearInfo,
    /// Scheme as stored; `None` leaves the layer unquantized.
    pub scheme: Option<Scheme>,
}

/// Returns the scheme of a layer. A rule of the recipe overrides its file type.
pub(crate) fn scheme_of(
    recipe: &Recipe,
    config: &ModelConfig,
    options: &Options,
    info: &LinearInfo,
) -> Option<Scheme> {
    let type_scheme = recipe.file_type.filter(|_| recipe.rule_of(&info.module).is_none()).map(|ty| {
        let part = TensorRole::Linear { kind: info.kind, layer: info.layer };
        Scheme::codec(chosen(ty, config, part, options.has_importance()))
    });
    type_scheme.or_else(|| recipe.weights_of(&info.module).cloned())
}

/// Plans the storage of a layer. Groups of whole rows have no column order.
pub(crate) fn layer_plan<'a>(
    job: &WeightJob,
    input: Option<&'a Scheme>,
    info: &'a LinearInfo,
    scheme: &'a Scheme,
    by_group: bool,
) -> LinearPlan<'a> {
    let by_group = by_group && matches!(scheme.format.blocks(), Blocks::Group(_));
    let outliers = job.outliers(&info.module, info.rows, info.cols);
    LinearPlan { by_group, outliers, ..LinearPlan::new(&info.module, scheme, input, (info.rows, info.cols)) }
}

/// Plans the storage of embedding or head, whose inputs stay unquantized.
pub(crate) fn table_plan<'a>(info: &'a LinearInfo, scheme: &'a Scheme) -> LinearPlan<'a> {
    LinearPlan::new(&info.module, scheme, None, (info.rows, info.cols))
}

/// True if `info` is embedding or head.
pub(crate) fn is_table(info: &LinearInfo) -> bool {
    info.kind.is_table()
}

/// Returns a layer's share of the progress, in bytes read ([`Plan::work_bytes`](super::Plan::work_bytes)).
pub(crate) fn work_of(info: &LinearInfo) -> u64 {
    (info.rows * info.cols) as u64 * 2
}

/// Returns the bytes of a tensor.
pub(crate) fn spec_bytes(spec: &TensorSpec) -> u64 {
    spec.shape.iter().map(|&n| n as u64).product::<u64>() * spec.dtype.bits() / 8
}
