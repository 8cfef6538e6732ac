//! Text output of `lint`.

use std::io::{self, Write};

use mantissa_plan::contract::{Finding, Report, Severity, Unchecked};

use crate::output::{command, paragraph};

/// Layers listed per finding in the text output; the JSON lists all.
const LISTED: usize = 4;

/// Columns before the text of an entry, and those of its label.
const INDENT: usize = 14;
const LABEL: usize = 10;

/// Returns the verdict of an engine.
fn verdict(report: &Report) -> String {
    let Report { target, rules, findings, unchecked } = report;
    let count = |severity| findings.iter().filter(|f| f.severity == severity).count();
    let open =
        if unchecked.is_empty() { String::new() } else { format!(", {} not checked", unchecked.len()) };
    match (findings.len(), report.fails()) {
        // mantissa reads every format that it writes.
        (0, _) if *rules == 0 => format!("{target}: ok"),
        (0, _) => format!("{target}: ok ({rules} rules{open})"),
        (_, true) => format!(
            "{target}: FAIL (does not load: {}, wrong results: {}, warnings: {})",
            count(Severity::Refused),
            count(Severity::Wrong),
            count(Severity::Warning)
        ),
        (1, false) => format!("{target}: 1 warning"),
        (n, false) => format!("{target}: {n} warnings"),
    }
}

/// Prints the verdict of an engine with the names of the broken rules, without the findings.
///
/// # Errors
/// As `out`.
pub(super) fn overview(out: &mut dyn Write, report: &Report) -> io::Result<()> {
    let mut rules: Vec<_> = report.findings.iter().map(|finding| finding.rule).collect();
    rules.dedup();
    let named = if rules.is_empty() { String::new() } else { format!(": {}", rules.join(", ")) };
    paragraph(out, 2, &(verdict(report) + &named))
}

/// Prints the verdict of an engine with its findings, wrapped to the terminal.
///
/// # Errors
/// As `out`.
pub(super) fn report(out: &mut dyn Write, report: &Report) -> io::Result<()> {
    writeln!(out, "{}", verdict(report))?;
    for of_rule in report.findings.chunk_by(|a, b| a.rule == b.rule) {
        findings(out, of_rule)?;
    }
    let mut left: Vec<&Unchecked> = report.unchecked.iter().collect();
    while let Some(first) = left.first().copied() {
        let (same, others) =
            left.into_iter().partition::<Vec<_>, _>(|one| (&one.why, &one.fix) == (&first.why, &first.fix));
        let rules: Vec<_> = same.iter().map(|one| one.rule).collect();
        write!(out, "  not checked ")?;
        paragraph(out, INDENT, &format!("{}: {}", rules.join(", "), first.why))?;
        first.fix.iter().try_for_each(|text| fix(out, text))?;
        left = others;
    }
    Ok(())
}

/// Prints the findings of one rule.
fn findings(out: &mut dyn Write, findings: &[Finding]) -> io::Result<()> {
    let first = &findings[0];
    writeln!(out, "  {} ({})", first.rule, first.severity.text())?;
    entry(out, "expected", first.requires)?;
    for finding in findings.iter().take(LISTED) {
        entry(out, "got", &format!("{}: {}", finding.tensor, finding.found))?;
    }
    if findings.len() > LISTED {
        entry(out, "got", &format!("… and {} more", findings.len() - LISTED))?;
    }
    fix(out, &first.fix)?;
    entry(out, "source", first.source)
}

fn entry(out: &mut dyn Write, label: &str, text: &str) -> io::Result<()> {
    write!(out, "    {label:<LABEL$}")?;
    paragraph(out, INDENT, text)
}

/// Prints a fix; a command stays one for the shell.
fn fix(out: &mut dyn Write, text: &str) -> io::Result<()> {
    let is_command = ["mantissa ", "vllm ", "python ", "lmdeploy ", "trtllm-serve "];
    if !is_command.iter().any(|program| text.starts_with(program)) {
        return entry(out, "fix", text);
    }
    let (line, comment) =
        text.split_once(" # ").map_or((text, None), |(line, comment)| (line, Some(comment)));
    write!(out, "    {:<LABEL$}", "fix")?;
    command(out, INDENT, line)?;
    comment.map_or(Ok(()), |comment| entry(out, "note", comment))
}
