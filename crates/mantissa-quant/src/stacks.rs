//! Layers that are stored stacked: experts of one tensor.

use std::collections::BTreeSet;

use mantissa_model::{LinearInfo, ModelConfig, StoredAs};
use mantissa_store::TensorSpec;
use mantissa_store::convention::{Stack, gpt_oss};

use crate::error::Result;
use crate::plan::{PlannedLinear, model_not_storable};

/// Place of a layer in a stacked tensor.
pub(crate) fn stack_of(info: &LinearInfo) -> Option<&Stack> {
    match &info.stored {
        StoredAs::Stacked(stack) => Some(stack),
        _ => None,
    }
}

/// Requires a model that has experts stacked.
pub(crate) fn require(config: &ModelConfig) -> Result<()> {
    if config.decoder_linears().any(|info| stack_of(&info).is_some()) {
        return Ok(());
    }
    let why = "it holds experts stacked as in gpt-oss, and the model has none: --format compressed-tensors";
    Err(model_not_storable(gpt_oss::CONTAINER, why))
}

/// Leaves all but stacked experts as they are, of which a tensor has all or none.
pub(crate) fn keep_others(linears: &mut [PlannedLinear]) -> Result<()> {
    for linear in linears.iter_mut().filter(|linear| stack_of(&linear.info).is_none()) {
        linear.scheme = None;
    }
    require_whole(linears)
}

/// Requires of every stacked tensor that all of its experts are quantized, or none.
pub(crate) fn require_whole(linears: &[PlannedLinear]) -> Result<()> {
    let tensors = |quantized: bool| -> BTreeSet<&str> {
        let some = linears.iter().filter(move |linear| linear.scheme.is_some() == quantized);
        some.filter_map(|linear| Some(stack_of(&linear.info)?.tensor.as_str())).collect()
    };
    match tensors(true).intersection(&tensors(false)).next() {
        Some(tensor) => {
            let why = format!("{tensor}: some of its experts are quantized and others not");
            Err(model_not_storable(gpt_oss::CONTAINER, why))
        }
        None => Ok(()),
    }
}

/// The tensors of stacked layers: codes and scales of all experts.
pub(crate) fn specs(linears: &[PlannedLinear]) -> Vec<TensorSpec> {
    let first = |linear: &&PlannedLinear| {
        let of_first = stack_of(&linear.info).is_some_and(|stack| (stack.expert, stack.turn) == (0, 0));
        of_first && linear.scheme.is_some()
    };
    let tensors = linears.iter().filter(first).filter_map(|PlannedLinear { info, .. }| {
        let stack = stack_of(info)?;
        Some(gpt_oss::stacked_specs(&stack.tensor, stack.experts, stack.turns * info.rows, info.cols))
    });
    tensors.flatten().collect()
}
