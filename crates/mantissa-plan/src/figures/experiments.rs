//! Figures of our experiments that `explain` states, with what was published of them. A test finds each on its page.

use std::sync::LazyLock;

use mantissa_num::page_command;

/// Result of an experiment.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Experiment {
    /// Name.
    pub id: &'static str,
    /// Our figure, as the page has it.
    pub ours: &'static str,
    /// Figure of others, which was to be reproduced.
    pub published: Option<&'static str>,
    /// Model.
    pub model: &'static str,
    /// Day of the measurement.
    pub date: &'static str,
    /// Path of its page.
    page: &'static str,
}

/// Rows of the table.
pub static EXPERIMENTS: LazyLock<Vec<Experiment>> =
    LazyLock::new(|| include_str!("experiments.tsv").lines().skip(1).filter_map(parse).collect());

/// Parses a row; `None` if it is malformed, which a test excludes.
fn parse(line: &'static str) -> Option<Experiment> {
    let mut cells = line.split('\t');
    let mut cell = || cells.next().filter(|cell| !cell.is_empty());
    Some(Experiment {
        id: cell()?,
        ours: cell()?,
        published: cell(),
        model: cell()?,
        date: cell()?,
        page: cell()?,
    })
}

/// Finds a figure by its name; "not measured" stands for one that is not there, which a test excludes.
pub(crate) fn experiment(id: &str) -> Experiment {
    let none = Experiment {
        id: "",
        ours: "not measured",
        published: None,
        model: "no model",
        date: "",
        page: "docs/results/README.md",
    };
    EXPERIMENTS.iter().copied().find(|row| row.id == id).unwrap_or(none)
}

impl Experiment {
    /// Says our figure, and what was published: `10.6 % (published: 9.0 %)`.
    pub fn figure(&self) -> String {
        let published = self.published.map_or_else(String::new, |figure| format!(" (published: {figure})"));
        format!("{}{published}", self.ours)
    }

    /// Says what was measured, when, and where it is written.
    pub fn source(&self) -> String {
        format!("{}, {}, {}", self.model, self.date, page_command(self.page))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Every figure stands on its page, ours and the published one in the same line.
    #[test]
    fn figures_are_those_of_their_pages() {
        let lines = include_str!("experiments.tsv").lines().count() - 1;
        assert_eq!(EXPERIMENTS.len(), lines);
        for row in EXPERIMENTS.iter() {
            let page = match row.page {
                "docs/results/training.md" => include_str!("../../../../docs/results/training.md"),
                "docs/results/arithmetic.md" => include_str!("../../../../docs/results/arithmetic.md"),
                "docs/results/kv-cache.md" => include_str!("../../../../docs/results/kv-cache.md"),
                "docs/results/outliers.md" => include_str!("../../../../docs/results/outliers.md"),
                "docs/results/weights.md" => include_str!("../../../../docs/results/weights.md"),
                _ => "",
            };
            let has = |line: &str| {
                line.contains(row.ours) && row.published.is_none_or(|figure| line.contains(figure))
            };
            assert!(page.lines().any(has), "{row:?} is not on its page");
            assert_eq!(experiment(row.id), *row);
        }
    }
}
