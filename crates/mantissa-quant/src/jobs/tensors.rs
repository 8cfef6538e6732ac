//! Tensors of the quantized layers of an output.

use mantissa_num::Scheme;
use mantissa_store::TensorSpec;
use mantissa_store::convention::{Container, Experts};

use crate::error::Result;
use crate::plan::{Job, PlannedLinear, layer_plan, not_storable};
use crate::stacks;

/// Note for formats that have no stacked experts.
pub(crate) const EXPERTS_APART: &str = "experts that the source stores stacked are stored one by one, which mantissa reads; other servers expect them stacked";

/// Declares the tensors of the quantized layers. `input` is the scheme of their inputs.
///
/// # Errors
/// [`QuantError::NotStorable`](crate::QuantError::NotStorable) with the layers that the format cannot hold.
pub(crate) fn output_of_linears(
    job: &Job,
    input: Option<&Scheme>,
    container: Container,
    linears: &[PlannedLinear],
    by_group: bool,
) -> Result<Vec<TensorSpec>> {
    let (mut specs, mut faults) = (Vec::new(), Vec::new());
    for PlannedLinear { info, scheme } in linears {
        let Some(scheme) = scheme else { continue };
        match container.specs(&layer_plan(job, input, info, scheme, by_group)) {
            // A graph names the weights of a model as its dense checkpoint does.
            Ok(_) if container.facts().experts == Experts::AsInSource && stacks::stack_of(info).is_some() => {
                faults
                    .push(format!("{}: the source stores its experts stacked, as ONNX cannot", info.module));
            }
            Ok(all) => specs.extend(all),
            Err(fault) => faults.push(fault.to_string()),
        }
    }
    match faults.is_empty() {
        true if container.facts().experts == Experts::Stacked => Ok(stacks::specs(linears)),
        true => Ok(specs),
        false => Err(not_storable(container, linears.len(), faults)),
    }
}
