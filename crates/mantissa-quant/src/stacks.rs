//! Stacked experts: layers that share one tensor.

use std::collections::BTreeSet;

use mantissa_model::{LinearInfo, ModelConfig, StoredAs};
use mantissa_store::TensorSpec;
use mantissa_store::convention::{Stack, StackForm, gpt_oss};

use crate::error::Result;
use crate::plan::{PlannedLinear, model_not_storable};

/// Returns the place of a layer in a stacked tensor.
pub(crate) fn stack_of(info: &LinearInfo) -> Option<&Stack> {
    match &info.stored {
        StoredAs::Stacked(stack) => Some(stack),
        _ => None,
    }
}

/// True if the layer belongs to experts that other engines load only from one tensor (gpt-oss).
pub(crate) fn only_fused(info: &LinearInfo) -> bool {
    stack_of(info).is_some_and(|stack| stack.form == StackForm::Interleaved)
}

/// Requires a model with experts stacked as in gpt-oss.
pub(crate) fn require(config: &ModelConfig) -> Result<()> {
    if config.decoder_linears().any(|info| only_fused(&info)) {
        return Ok(());
    }
    let why = "it holds only stacked experts as in gpt-oss, and the model has none";
    Err(model_not_storable(gpt_oss::CONTAINER, why))
}

/// Leaves all layers but stacked experts unquantized.
pub(crate) fn keep_others(linears: &mut [PlannedLinear]) -> Result<()> {
    for linear in linears.iter_mut().filter(|linear| stack_of(&linear.info).is_none()) {
        linear.scheme = None;
    }
    require_whole(linears)
}

/// Requires that the experts of a stacked tensor are all quantized or all unquantized.
pub(crate) fn require_whole(linears: &[PlannedLinear]) -> Result<()> {
    let tensors = |quantized: bool| -> BTreeSet<&str> {
        let some = linears.iter().filter(move |linear| linear.scheme.is_some() == quantized);
        some.filter_map(|linear| Some(stack_of(&linear.info)?.tensor.as_str())).collect()
    };
    match tensors(true).intersection(&tensors(false)).next() {
        Some(tensor) => {
            let why = format!("{tensor}: expected all or none of its experts to be quantized, got some");
            Err(model_not_storable(gpt_oss::CONTAINER, why))
        }
        None => Ok(()),
    }
}

/// Returns the specs of the stacked tensors: codes and scales of all experts.
pub(crate) fn specs(linears: &[PlannedLinear]) -> Vec<TensorSpec> {
    let first = |linear: &&PlannedLinear| {
        let is_first = stack_of(&linear.info).is_some_and(|stack| (stack.expert, stack.turn) == (0, 0));
        is_first && linear.scheme.is_some()
    };
    let tensors = linears.iter().filter(first).filter_map(|PlannedLinear { info, .. }| {
        let stack = stack_of(info)?;
        Some(gpt_oss::stacked_specs(&stack.tensor, stack.experts, stack.turns * info.rows, info.cols))
    });
    tensors.flatten().collect()
}
