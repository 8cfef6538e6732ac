//! Names of the units into which workers divide a plan, and their results.

use mantissa_methods::Solved;
use mantissa_methods::method::Work;
use mantissa_model::LinearInfo;

use crate::error::Result;
use crate::plan::Plan;
use crate::solved_bytes;

/// Returns the name of the unit that solves a layer.
pub(crate) fn unit_of(plan: &Plan, info: &LinearInfo) -> String {
    let container = plan.container.name();
    match plan.work_on(info) {
        Some(Work::Layer(_)) => format!("{container}: layer {}", info.layer),
        _ => format!("{container}: {}", info.module),
    }
}

/// Returns the solution of a layer that a worker has put into the folder; `None` if there is none.
///
/// # Errors
/// I/O.
pub(crate) fn solution(plan: &Plan, info: &LinearInfo) -> Result<Option<Solved>> {
    if !plan.options.team.is_shared() {
        return Ok(None);
    }
    let bytes = plan.options.team.result(&unit_of(plan, info))?;
    let scheme = plan.quantized().find(|(one, _)| one.module == info.module).map(|(_, scheme)| scheme);
    let (Some(bytes), Some(scheme)) = (bytes, scheme) else { return Ok(None) };
    Ok(solved_bytes::from_bytes(&bytes, &info.module, (scheme, (info.rows, info.cols))))
}
