//! Work that would exceed the memory ceiling: states go to a temporary file, then fewer threads work. Results stay the
//! same.

use anyhow::Result;
use mantissa_quant::Plan;
use mantissa_quant::calibrate::Limits;

use crate::context::Context;
use crate::output::bytes;

/// Returns the memory to require for a predicted peak, which is accurate to 10 %.
pub fn with_margin(peak: u64) -> u64 {
    peak + peak / 10
}

/// Lowers the peak of the plan to the ceiling, as far as that is possible, and says how. `verify` is true if the output
/// is read back. Returns the least `--memory` that accepts the work.
///
/// # Errors
/// [`OverMemory`](crate::error::OverMemory) with the least that is accepted.
pub fn fit_plan(plan: &mut Plan, what: &str, verify: bool, context: &Context) -> Result<u64> {
    let mut smallest = plan.clone();
    smallest.adapt_memory(verify, |_| false);
    let measures = plan.adapt_memory(verify, |peak| context.has_memory(with_margin(peak)));
    let peak = with_margin(plan.peak_bytes(verify));
    context.require_least_memory(what, peak)?;
    tell(&measures, peak, context);
    Ok(context.least_memory(with_margin(smallest.peak_bytes(verify))))
}

/// Returns the limits of a calibration whose memory, `needs`, is within the ceiling.
///
/// # Errors
/// [`OverMemory`](crate::error::OverMemory) with the least that is accepted.
pub fn fit_calibration(what: &str, context: &Context, needs: impl Fn(Limits) -> u64) -> Result<Limits> {
    let full = Limits::from(context.threads);
    let mut limits = full;
    if !context.has_memory(needs(full)) {
        let fits = |step: &Limits| context.has_memory(needs(*step));
        limits = full.smaller().find(fits).unwrap_or(Limits { threads: 1, states: 0, ..full });
    }
    context.require_least_memory(what, needs(limits))?;
    // States so many that they are in a file anyway are not given up.
    let in_memory = Limits { states: full.states, ..limits };
    if needs(limits) == needs(in_memory) {
        limits = in_memory;
    }
    tell(&limits.given_up(full), needs(limits), context);
    Ok(limits)
}

/// Returns the largest number of threads up to `most`, by halves, whose memory, `needs`, is within the ceiling; `most` if
/// one thread needs too much.
///
/// # Errors
/// Errors of `needs`.
pub fn fit_threads(most: usize, context: &Context, needs: impl Fn(usize) -> Result<u64>) -> Result<usize> {
    if context.has_memory(needs(most)?) {
        return Ok(most);
    }
    let full = Limits::from(most);
    for Limits { threads, .. } in full.smaller() {
        let needed = needs(threads)?;
        if context.has_memory(needed) {
            tell(&Limits { threads, ..full }.given_up(full), needed, context);
            return Ok(threads);
        }
    }
    Ok(most)
}

fn tell(measures: &[String], peak: u64, context: &Context) {
    if !measures.is_empty() {
        let (what, peak) = (measures.join(", "), bytes(peak));
        context.note(&format!("memory: {what}; predicted peak {peak}, same output"));
    }
}
