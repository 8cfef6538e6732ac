//! Work that would exceed the memory ceiling: states go to a temporary file, then fewer threads work. Results stay the
//! same.

use mantissa_quant::Plan;
use mantissa_quant::calibrate::Limits;
use mantissa_quant::memory;
use mantissa_store::convention::ModelFiles;

use crate::error::Result;
use crate::host::Host;
use crate::text::bytes;

/// Returns the memory to require for a predicted peak, which is accurate to 10 %.
pub fn with_margin(peak: u64) -> u64 {
    peak + peak / 10
}

/// Lowers the peak of the plan to the ceiling, as far as that is possible, and says how. `verify` is true if the output
/// is read back. Returns the plan, and the least `--memory` that accepts the work.
///
/// # Errors
/// [`OverMemory`](crate::OverMemory) with the least that is accepted.
pub fn fit_plan(plan: Plan, what: &str, verify: bool, host: &Host) -> Result<(Plan, u64)> {
    let smallest = smallest_peak(&plan, verify);
    let (plan, measures) = plan.within_memory(verify, |peak| host.has_memory(with_margin(peak)));
    let peak = with_margin(plan.peak_bytes(verify));
    host.require_least_memory(what, peak)?;
    tell(&measures, peak, host);
    Ok((plan, host.least_memory(smallest)))
}

/// Requires the memory that planning itself takes: a plan reads the tokenizer of its source. The peak of every plan of
/// `source` contains it.
///
/// # Errors
/// [`OverMemory`](crate::OverMemory).
pub fn require_tokenizer(source: &ModelFiles, what: &str, host: &Host) -> Result<()> {
    let what = format!("{what}: tokenizer of {}", source.dir().display());
    Ok(host.require_memory(&what, with_margin(memory::tokenizer_peak(source)))?)
}

/// Returns the memory to require for a plan whose peak is as low as possible.
pub fn smallest_peak(plan: &Plan, verify: bool) -> u64 {
    let (smallest, _) = plan.clone().within_memory(verify, |_| false);
    with_margin(smallest.peak_bytes(verify))
}

/// Returns the limits of a calibration whose memory, `needs`, is within the ceiling.
///
/// # Errors
/// [`OverMemory`](crate::OverMemory) with the least that is accepted.
pub fn fit_calibration(what: &str, host: &Host, needs: impl Fn(Limits) -> u64) -> Result<Limits> {
    let full = Limits::from(host.threads);
    let mut limits = full;
    if !host.has_memory(needs(full)) {
        let fits = |step: &Limits| host.has_memory(needs(*step));
        limits = full.smaller().find(fits).unwrap_or(Limits { threads: 1, states: 0, ..full });
    }
    host.require_least_memory(what, needs(limits))?;
    // Keeps calibration states that are already spilled to disk.
    let in_memory = Limits { states: full.states, ..limits };
    if needs(limits) == needs(in_memory) {
        limits = in_memory;
    }
    tell(&limits.given_up(full), needs(limits), host);
    Ok(limits)
}

/// Returns the largest number of threads up to `most`, by halves, whose memory, `needs`, is within the ceiling; `most` if
/// one thread needs too much.
///
/// # Errors
/// Errors of `needs`.
pub fn fit_threads<E>(most: usize, host: &Host, needs: impl Fn(usize) -> Result<u64, E>) -> Result<usize, E> {
    if host.has_memory(needs(most)?) {
        return Ok(most);
    }
    let full = Limits::from(most);
    for Limits { threads, .. } in full.smaller() {
        let needed = needs(threads)?;
        if host.has_memory(needed) {
            tell(&Limits { threads, ..full }.given_up(full), needed, host);
            return Ok(threads);
        }
    }
    Ok(most)
}

fn tell(measures: &[String], peak: u64, host: &Host) {
    if !measures.is_empty() {
        let (what, peak) = (measures.join(", "), bytes(peak));
        host.note(&format!("memory: {what}; predicted peak {peak}, same output"));
    }
}
