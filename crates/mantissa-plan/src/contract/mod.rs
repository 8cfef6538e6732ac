//! Serving contract: what each engine requires of a quantized model, and which requirements a model breaks.
//!
//! An [`Engine`] is a row with its rules. A [`Rule`] is data: the requirement, its source and the fix. [`lint`] evaluates
//! all rules of a [`EngineTarget`] on a [`Subject`], which describes a written or a planned model. Rules that
//! cannot be decided from the given information are listed in [`Report::unchecked`].

#[cfg(test)]
#[allow(clippy::unwrap_used, clippy::panic)]
mod case;
mod check;
mod engine;
mod engines;
mod loads;
mod rule;
mod rules;
mod schemes;
mod sources;
mod subject;
mod target;

use std::fmt;

use serde::Serialize;

pub use engine::Engine;
pub use engines::{ENGINES, every_rule};
pub use loads::{Cell, Evidence, LOADS, Load, READERS, Reader, cells, installs, loads_in};
pub use rule::{Check, Rule, Severity};
pub use schemes::{Accepted, Inputs, Scales};
pub use subject::{
    FormatClass, Input, Linear, Observation, Observed, Shape, Split, Stored, Subject, split_of,
};
pub use target::{EngineTarget, TargetError};

/// Broken rule with its location.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Finding {
    /// Identifier of the rule.
    pub rule: &'static str,
    /// Consequence.
    pub severity: Severity,
    /// Tensor, layer or config field.
    pub tensor: String,
    /// Value found.
    pub found: String,
    /// Requirement of the engine.
    pub requires: &'static str,
    /// Fix: a command, or an edit.
    #[serde(rename = "cure")]
    pub fix: String,
    /// Source of the requirement.
    pub source: &'static str,
    /// True if another recipe, format or number of GPUs fixes it.
    #[serde(skip)]
    pub by_recipe: bool,
}

/// Result of [`lint`].
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Report {
    /// Target, as `SERVER[:tp=N][,gpu=NAME]`.
    pub target: String,
    /// Number of rules evaluated.
    pub rules: usize,
    /// Broken rules, most severe first.
    pub findings: Vec<Finding>,
    /// Rules that could not be decided.
    pub unchecked: Vec<Unchecked>,
}

/// Rule that could not be decided; as JSON one text, `RULE: REASON; fix: FIX`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Unchecked {
    /// Identifier of the rule.
    pub rule: &'static str,
    /// Reason.
    pub why: String,
    /// Command that decides it.
    pub fix: Option<String>,
}

impl fmt::Display for Unchecked {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: {}", self.rule, self.why)?;
        self.fix.iter().try_for_each(|fix| write!(f, "; fix: {fix}"))
    }
}

impl Serialize for Unchecked {
    fn serialize<S: serde::Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(self)
    }
}

impl Report {
    /// True if the engine would not load the model or would compute wrong results.
    pub fn fails(&self) -> bool {
        self.findings.iter().any(|finding| finding.severity.fails())
    }
}

/// Evaluates every rule that applies to `target` on `subject`.
pub fn lint(subject: &Subject, target: &EngineTarget) -> Report {
    let mut report =
        Report { target: target.to_string(), rules: 0, findings: Vec::new(), unchecked: Vec::new() };
    let bound =
        |rule: &&Rule| rule.conventions.is_empty() || rule.conventions.contains(&subject.convention.as_str());
    for rule in target.engine.all_rules().filter(bound) {
        if let Some((why, fix)) = check::undecidable(rule, subject, target) {
            report.unchecked.push(Unchecked { rule: rule.id, why, fix });
            continue;
        }
        report.rules += 1;
        let finding = |(tensor, found)| Finding {
            rule: rule.id,
            severity: rule.severity,
            tensor,
            found,
            requires: rule.requires,
            fix: rule.fix.to_owned(),
            source: rule.source,
            by_recipe: rule.check.is_of_schemes(),
        };
        report.findings.extend(check::violations(rule.check, subject, target).into_iter().map(finding));
    }
    report.unchecked.dedup();
    // Stable sort: findings of one rule keep layer order.
    report.findings.sort_by_key(|finding| std::cmp::Reverse(finding.severity));
    report
}

#[cfg(test)]
#[allow(clippy::unwrap_used, clippy::panic)]
mod tests;
