//! Widely repeated statements that are wrong, with what is right. Figures are computed, so that a test can hold them.

use std::sync::LazyLock;

use serde::Deserialize;

use super::expression::{Expression, Scope};
use super::template::{parse, render};
use super::value::{Fault, Row, Subject, Value};

/// Statement that is wrong; the texts are in `texts/corrections.toml`.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct Correction {
    /// Number.
    pub(super) id: u32,
    /// Statement.
    pub(super) said: String,
    /// Statement that is right.
    pub(super) right: String,
    /// Source.
    pub(super) source: String,
    /// Figures that hold it.
    #[serde(default)]
    pub(super) figures: Vec<Figure>,
}

/// Figure of a correction.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct Figure {
    /// Name with its unit.
    what: String,
    /// Expression that computes it.
    value: String,
    /// Published or measured value.
    #[cfg_attr(not(test), expect(dead_code, reason = "held by a test"))]
    right: f64,
    /// Allowed relative deviation; absolute where `right` is 0.
    #[serde(default)]
    #[cfg_attr(not(test), expect(dead_code, reason = "held by a test"))]
    within: f64,
}

/// Source of the statements.
pub(super) const TEXT: &str = include_str!("texts/corrections.toml");

/// File of corrections.
#[derive(Debug, Default, Deserialize)]
#[serde(deny_unknown_fields)]
struct File {
    correction: Vec<Correction>,
}

/// Every correction; none if the file does not parse, which a test excludes.
static CORRECTIONS: LazyLock<Vec<Correction>> =
    LazyLock::new(|| toml::from_str::<File>(TEXT).unwrap_or_default().correction);

/// Returns every correction.
pub(super) fn corrections() -> &'static [Correction] {
    &CORRECTIONS
}

/// Returns the correction of this number.
pub(super) fn by_id(id: u32) -> Option<&'static Correction> {
    CORRECTIONS.iter().find(|correction| correction.id == id)
}

impl Figure {
    /// Computes the figure; 0 if it is absent, such as a rate that a device has not.
    fn found(&self, scope: &Scope<'_>) -> Result<f64, Fault> {
        match Expression::parse(&self.value)?.evaluate(scope)? {
            Value::Number(found) => Ok(found),
            Value::Absent => Ok(0.0),
            _ => Err(Fault::Syntax(self.value.clone(), "expected a number")),
        }
    }
}

impl Correction {
    /// Returns the expressions of its figures.
    #[cfg(test)]
    pub(super) fn expressions(&self) -> impl Iterator<Item = &str> {
        self.figures.iter().map(|figure| figure.value.as_str())
    }

    /// Says the computed figures; `None` without.
    pub(super) fn computed(&self, subject: &Subject<'_>) -> Result<Option<String>, Fault> {
        let pieces = parse("{$what} {$found:digits}")?;
        let of = |figure: &Figure| {
            let found = figure.found(&Scope { subject, row: &Row::new() })?;
            let row = vec![("what", Value::text(&figure.what)), ("found", Value::Number(found))];
            render(&pieces, &Scope { subject, row: &row })
        };
        let figures = self.figures.iter().map(of).collect::<Result<Vec<_>, Fault>>()?;
        Ok((!figures.is_empty()).then(|| figures.join(", ")))
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;
    use crate::explain::tests::with_subject;

    #[test]
    fn every_statement_is_corrected_with_a_source() {
        let file: File = toml::from_str(TEXT).unwrap();
        assert_eq!(file.correction.iter().map(|c| c.id).collect::<Vec<_>>(), (1..=32).collect::<Vec<_>>());
        assert!(
            file.correction.iter().all(|c| !c.said.is_empty() && !c.right.is_empty() && c.source.len() > 5)
        );
        // Those without figures are held by tests/cli/explain.rs of the binary: it prints the policies that they are about.
        let held: Vec<u32> = file.correction.iter().filter(|c| c.figures.is_empty()).map(|c| c.id).collect();
        assert_eq!(held, [13, 14, 19, 28, 31]);
    }

    #[test]
    fn figures_are_right() {
        with_subject("8B", "h100", |subject| {
            for correction in corrections() {
                for figure in &correction.figures {
                    let found = figure.found(&Scope { subject, row: &Row::new() }).unwrap();
                    let Figure { what, right, within, .. } = figure;
                    let deviation = if *right == 0.0 { found.abs() } else { (found / right - 1.0).abs() };
                    assert!(deviation <= *within, "{}: {what}: {found}, right is {right}", correction.id);
                }
            }
        });
    }
}
