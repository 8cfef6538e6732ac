//! Needs of the methods of a plan beyond the statistics of an input.

use mantissa_model::{LinearInfo, LinearInput};

use crate::plan::Plan;

/// True if some method needs the drift of inputs.
pub(crate) fn needs_drift(plan: &Plan) -> bool {
    plan.job.needs(|needs| needs.drift)
}

/// True if the method of a layer needs the drift of its input. Experts are left out: a token may be routed to other experts in
/// the two models.
pub(crate) fn uses_drift(plan: &Plan, info: &LinearInfo) -> bool {
    let routed = matches!(info.kind.input(), LinearInput::Expert(_) | LinearInput::ExpertDown(_));
    !routed && plan.needs_of(info).drift
}

/// True if no later weight to be quantized by the same method reads the same input.
pub(crate) fn reads_last(plan: &Plan, info: &LinearInfo) -> bool {
    let id = plan.method_id(info);
    let same = |other: &LinearInfo| {
        other.layer == info.layer && other.kind.input() == info.kind.input() && plan.method_id(other) == id
    };
    let last = plan.quantized().map(|(other, _)| other).filter(|other| same(other)).last();
    last.is_some_and(|last| last.module == info.module)
}
