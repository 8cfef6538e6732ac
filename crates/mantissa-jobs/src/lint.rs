//! Check of a plan by the rules of the engines that it is for, before any work.

use mantissa_advise::subject;
use mantissa_plan::contract::{EngineTarget, Finding, Report, lint};
use mantissa_quant::Plan;
use mantissa_store::convention::ModelFiles;

use crate::error::{GateFailed, Result};
use crate::host::Host;

/// Words the fixes of a report as a user of the caller would follow them: a command line, a call.
pub trait Remedies {
    /// Replaces the fixes in the `report` of `plan`.
    fn of_plan(&self, report: &mut Report, target: &EngineTarget, plan: &Plan, source: &ModelFiles);
}

/// Keeps the fixes of the rules.
#[derive(Clone, Copy, Debug, Default)]
pub struct AsStated;

impl Remedies for AsStated {
    fn of_plan(&self, _: &mut Report, _: &EngineTarget, _: &Plan, _: &ModelFiles) {}
}

/// Refuses a plan whose output an engine would not run, before any work; warns about slow paths.
///
/// # Errors
/// [`GateFailed`] with the most severe finding.
pub fn check_plan<'a>(
    plan: &Plan,
    source: &ModelFiles,
    targets: impl IntoIterator<Item = &'a EngineTarget>,
    remedies: &dyn Remedies,
    host: &Host,
) -> Result<()> {
    let subject = subject::of_plan(plan, source);
    let reports: Vec<_> = targets
        .into_iter()
        .map(|target| {
            let mut report = lint(&subject, target);
            remedies.of_plan(&mut report, target, plan, source);
            report
        })
        .collect();
    let warnings = reports.iter().flat_map(|report| &report.findings).filter(|f| !f.severity.fails());
    host.warn_all(&warnings.map(line).collect::<Vec<_>>())?;
    refuse(&reports)
}

/// Fails with the most severe finding of a plan's `reports`, if any.
fn refuse(reports: &[Report]) -> Result<()> {
    let failing: Vec<_> = reports.iter().filter(|report| report.fails()).collect();
    let Some(report) = failing.first() else { return Ok(()) };
    let all: usize = failing.iter().map(|r| r.findings.iter().filter(|f| f.severity.fails()).count()).sum();
    let more = if all > 1 { format!(" (and {} more)", all - 1) } else { String::new() };
    // The fix comes last, so that it can be copied to the end of the line.
    let first =
        report.findings.first().map(|f| format!("{}{more}; fix: {}", said(f), f.fix)).unwrap_or_default();
    Err(GateFailed::new(format!("lint for {}: {first}", report.target)).into())
}

/// Describes a finding with its fix on one line.
pub fn line(finding: &Finding) -> String {
    format!("{}; fix: {}", said(finding), finding.fix)
}

fn said(finding: &Finding) -> String {
    let Finding { rule, tensor, found, requires, .. } = finding;
    format!("{tensor}: expected {requires}, got {found} [{rule}]")
}
