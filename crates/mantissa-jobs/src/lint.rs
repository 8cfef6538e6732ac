//! Checks by the rules of engines: of a plan before any work, and of a model as a job.

use std::path::{Path, PathBuf};

use mantissa_advise::remedy::{self, Remedy};
use mantissa_advise::subject;
use mantissa_plan::contract::{ENGINES, EngineTarget, Finding, Report, Subject, lint};
use mantissa_quant::{Options, Plan, QuantError, Recipe};
use mantissa_store::convention::ModelFiles;
use serde::{Deserialize, Serialize};

use crate::error::{GateFailed, Result};
use crate::host::Host;
use crate::job::{Job, JobOutput};
use crate::memory::PROCESS;
use crate::model::{ModelPath, open, open_quietly};
use crate::names::TargetName;

/// Words the fixes of a report as a user of the caller would follow them: a command line, a call.
pub trait Remedies {
    /// Replaces the fixes in the `report` of `plan`.
    fn of_plan(&self, report: &mut Report, target: &EngineTarget, plan: &Plan, source: &ModelFiles);

    /// Replaces the fixes in the `report` of `artifact`.
    fn of_artifact(&self, report: &mut Report, target: &EngineTarget, artifact: &Artifact<'_>);
}

/// Model that was checked.
pub struct Artifact<'a> {
    /// Place as a user types it.
    pub place: &'a Path,
    /// Its files.
    pub files: &'a ModelFiles,
    /// Subject of the rules.
    pub subject: &'a Subject,
    /// Place and files of the unquantized model that it was made from, if known.
    pub source: Option<(&'a Path, &'a ModelFiles)>,
}

/// Keeps the fixes of the rules.
#[derive(Clone, Copy, Debug, Default)]
pub struct AsStated;

impl Remedies for AsStated {
    fn of_plan(&self, _: &mut Report, _: &EngineTarget, _: &Plan, _: &ModelFiles) {}

    fn of_artifact(&self, _: &mut Report, _: &EngineTarget, _: &Artifact<'_>) {}
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

/// Describes the engines that load the output of `whole` but not that of `plan`, which leaves more layers unquantized;
/// `None` if none is lost.
pub(crate) fn lost(
    plan: &Plan,
    whole: &Plan,
    source: &ModelFiles,
    remedies: &dyn Remedies,
) -> Option<String> {
    let (subject, before) = (subject::of_plan(plan, source), subject::of_plan(whole, source));
    let target = |engine| EngineTarget { engine, tp: 1, gpu: None };
    let is_lost = |target: &EngineTarget| !lint(&before, target).fails() && lint(&subject, target).fails();
    let lost: Vec<EngineTarget> = ENGINES.into_iter().map(target).filter(is_lost).collect();
    let first = lost.first()?;
    let mut report = lint(&subject, first);
    remedies.of_plan(&mut report, first, plan, source);
    let finding = report.findings.first()?;
    let titles: Vec<_> = lost.iter().map(|target| target.engine.title).collect();
    let verb = if titles.len() == 1 { "does" } else { "do" };
    Some(format!("--keep: {} {verb} not load the output: {}", titles.join(", "), line(finding)))
}

/// True if every target would run the output of `plan`.
pub(crate) fn loads<'a>(
    plan: &Plan,
    source: &ModelFiles,
    mut targets: impl Iterator<Item = &'a EngineTarget>,
) -> bool {
    let subject = subject::of_plan(plan, source);
    targets.all(|target| !lint(&subject, target).fails())
}

/// Adds a recipe that the first target loads to the error of a plan that no other option makes fit into its format.
pub(crate) fn advised<'a>(
    error: QuantError,
    source: &ModelFiles,
    (recipe, options): (Recipe, Options),
    mut targets: impl Iterator<Item = &'a EngineTarget>,
) -> QuantError {
    let Some(target) = targets.next() else { return error };
    match error {
        QuantError::NotStorable { what, container, list, fix: None } if !list.contains("fix: ") => {
            let fix = match remedy::of_recipe(source, recipe, options, target) {
                Some(Remedy::Quantize { recipe, default: true, .. }) => Some(format!("--recipe {recipe}")),
                Some(Remedy::Quantize { recipe, format, .. }) => {
                    Some(format!("--recipe {recipe} --format {format}"))
                }
                _ => None,
            };
            QuantError::NotStorable { what, container, list, fix }
        }
        error => error,
    }
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

/// Checks that a model will load and compute correctly in engines. Reads the weights but runs nothing.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Lint {
    /// Model folder or .gguf file.
    pub model: ModelPath,
    /// Engines; empty for every engine that reads the format and its schemes.
    pub targets: Vec<TargetName>,
    /// Source model, for checks that compare with it.
    pub reference: Option<ModelPath>,
}

/// Result of the checks.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct LintReport {
    /// Model.
    pub model: PathBuf,
    /// Checkpoint format.
    pub convention: &'static str,
    /// True if no engine refuses the model or computes wrong results.
    pub ok: bool,
    /// Reports of the engines.
    pub reports: Vec<Report>,
}

impl Lint {
    fn files(&self, host: &Host) -> Result<(ModelFiles, Option<ModelFiles>)> {
        let files = open(&self.model, host)?;
        Ok((files, self.reference.as_ref().map(|path| open_quietly(path)).transpose()?))
    }

    /// Checks the model, with fixes in the words of `remedies`. Broken rules are left to [`LintReport::require_ok`].
    ///
    /// # Errors
    /// Unreadable files; too little memory.
    pub fn check(&self, remedies: &dyn Remedies, host: &Host) -> Result<LintReport> {
        let (files, reference) = self.files(host)?;
        host.require_memory("lint", needed(&files, reference.as_ref())?)?;
        let subject = subject::of_artifact(&files, reference.as_ref())?;
        let source = self.reference.as_ref().map(ModelPath::typed).zip(reference.as_ref());
        let source = source.filter(|(_, files)| !files.is_quantized() && files.gguf().is_none());
        let artifact = Artifact { place: self.model.typed(), files: &files, subject: &subject, source };
        let targets = match self.targets.is_empty() {
            true => readers(&subject),
            false => self.targets.iter().map(|target| target.0).collect(),
        };
        let checked = |target: &EngineTarget| {
            let mut report = lint(&subject, target);
            remedies.of_artifact(&mut report, target, &artifact);
            report
        };
        let reports: Vec<_> = targets.iter().map(checked).collect();
        Ok(LintReport {
            model: self.model.shown().to_owned(),
            convention: files.convention_name(),
            ok: !reports.iter().any(Report::fails),
            reports,
        })
    }
}

impl LintReport {
    /// Returns the findings that break nothing, one line each.
    pub fn warnings(&self) -> Vec<String> {
        let findings = self.reports.iter().flat_map(|report| &report.findings);
        findings.filter(|finding| !finding.severity.fails()).map(line).collect()
    }

    /// Fails with the names of the broken rules, if any; `model` is the place as a user types it.
    ///
    /// # Errors
    /// [`GateFailed`] with the rules of every engine.
    pub fn require_ok(&self, model: &Path) -> Result<(), GateFailed> {
        let broken = |report: &Report| {
            let failing = report.findings.iter().filter(|finding| finding.severity.fails());
            let mut rules: Vec<_> = failing.map(|finding| finding.rule).collect();
            rules.dedup();
            let noun = if rules.len() == 1 { "rule" } else { "rules" };
            format!("{} {noun} broken for {}: {}", rules.len(), report.target, rules.join(", "))
        };
        let broken: Vec<_> = self.reports.iter().filter(|report| report.fails()).map(broken).collect();
        match broken.is_empty() {
            true => Ok(()),
            false => Err(GateFailed::new(format!("{}: {}", model.display(), broken.join("; ")))),
        }
    }
}

/// Predicts the peak memory in bytes.
fn needed(files: &ModelFiles, reference: Option<&ModelFiles>) -> Result<u64> {
    Ok(PROCESS.saturating_add(subject::bytes_of_artifact(files, reference)?))
}

/// Returns the engines that read the format and the schemes of a model, each on one GPU.
fn readers(subject: &Subject) -> Vec<EngineTarget> {
    // What was observed in the files decides whether they are sound, not which engines read their kind.
    let bare = Subject { planned: true, examined: Vec::new(), observations: Vec::new(), ..subject.clone() };
    let targets = ENGINES.into_iter().map(|engine| EngineTarget { engine, tp: 1, gpu: None });
    targets.filter(|target| !lint(&bare, target).fails()).collect()
}

impl Job for Lint {
    const NAME: &'static str = "lint";
    const VERSION: u32 = 1;
    type Report = LintReport;

    fn inputs(&self) -> Vec<PathBuf> {
        self.model.inputs().into_iter().chain(self.reference.iter().flat_map(ModelPath::inputs)).collect()
    }

    fn outputs(&self) -> Vec<JobOutput> {
        Vec::new()
    }

    fn memory(&self, host: &Host) -> Result<u64> {
        let (files, reference) = self.files(host)?;
        needed(&files, reference.as_ref())
    }

    fn run(&self, host: &Host) -> Result<LintReport> {
        self.check(&AsStated, host)
    }
}
