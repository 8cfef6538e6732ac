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
        let spilled = Limits { states: 0, ..full };
        let halves = halves(full.threads).map(|threads| Limits { threads, ..spilled });
        let mut steps = std::iter::once(spilled).chain(halves);
        let smallest = Limits { threads: 1, ..spilled };
        limits = steps.find(|step| context.has_memory(needs(*step))).unwrap_or(smallest);
    }
    context.require_least_memory(what, needs(limits))?;
    let mut measures = Vec::new();
    if limits.states < full.states && needs(limits) < needs(Limits { states: full.states, ..limits }) {
        measures.push("calibration states in a temporary file".to_owned());
    }
    measures.extend(fewer(limits.threads, full.threads));
    tell(&measures, needs(limits), context);
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
    for threads in halves(most) {
        let needed = needs(threads)?;
        if context.has_memory(needed) {
            tell(&fewer(threads, most).into_iter().collect::<Vec<_>>(), needed, context);
            return Ok(threads);
        }
    }
    Ok(most)
}

/// Halves `threads` down to one.
fn halves(threads: usize) -> impl Iterator<Item = usize> {
    std::iter::successors(Some(threads / 2), |n| Some(n / 2)).take_while(|n| *n > 0)
}

fn fewer(threads: usize, of: usize) -> Option<String> {
    (threads < of).then(|| format!("{threads} of {of} threads"))
}

fn tell(measures: &[String], peak: u64, context: &Context) {
    if !measures.is_empty() {
        let (what, peak) = (measures.join(", "), bytes(peak));
        context.note(&format!("memory: {what}; predicted peak {peak}, same output"));
    }
}
