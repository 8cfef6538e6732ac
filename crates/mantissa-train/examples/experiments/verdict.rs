//! Checks of the arms' figures.

use serde_json::{Value, json};

use crate::arms::Outcomes;
use crate::spec::{Check, Experiment};

/// Result of an experiment.
#[derive(Debug)]
pub struct Report<'a> {
    name: &'a str,
    experiment: &'a Experiment,
    outcomes: &'a Outcomes,
    /// Value of each check per seed.
    values: Vec<Vec<f64>>,
}

/// Computes the value of every check.
///
/// # Errors
/// A figure that a check names and no arm has.
pub fn judge<'a>(
    name: &'a str,
    experiment: &'a Experiment,
    outcomes: &'a Outcomes,
) -> Result<Report<'a>, String> {
    let values = experiment.checks.iter().map(|check| {
        let figure = |i: usize, key: &str| {
            let (arm, figure) = key.rsplit_once('.').unwrap_or((key, ""));
            let found = outcomes[i].get(arm).and_then(|figures| figures.get(figure));
            found.copied().ok_or_else(|| format!("{name}: \"{}\": no figure {key}", check.says))
        };
        let seed = |i: usize| {
            let mut value = figure(i, &check.of)?;
            if let Some(minus) = &check.minus {
                value -= figure(i, minus)?;
            }
            if let Some(over) = &check.over {
                value /= figure(i, over)?;
            }
            Ok::<_, String>(if check.abs { value.abs() } else { value })
        };
        (0..outcomes.len()).map(seed).collect()
    });
    Ok(Report { name, experiment, outcomes, values: values.collect::<Result<_, _>>()? })
}

fn mean(values: &[f64]) -> f64 {
    values.iter().sum::<f64>() / values.len() as f64
}

fn holds(check: &Check, value: f64) -> bool {
    // NaN is in no interval.
    check.min.is_none_or(|min| value >= min) && check.max.is_none_or(|max| value <= max) && !value.is_nan()
}

fn number(value: f64) -> String {
    if value == 0.0 || (1e-4..1e5).contains(&value.abs()) {
        let digits = if value.abs() >= 10.0 { 1 } else { 4 };
        return format!("{value:.digits$}");
    }
    if value.is_infinite() { "diverged".to_owned() } else { format!("{value:.2e}") }
}

impl Report<'_> {
    /// True if every check holds.
    pub fn holds(&self) -> bool {
        self.experiment.checks.iter().zip(&self.values).all(|(check, values)| holds(check, mean(values)))
    }

    /// Formats checks and figures as Markdown.
    pub fn table(&self) -> String {
        let mut out = "| check | ours | published | allowed | verdict |\n|---|---|---|---|---|\n".to_owned();
        for (check, values) in self.experiment.checks.iter().zip(&self.values) {
            let (least, most) =
                values.iter().fold((f64::INFINITY, f64::NEG_INFINITY), |(a, b), v| (a.min(*v), b.max(*v)));
            let spread = match values.len() {
                1 => String::new(),
                _ => format!(" ({} to {})", number(least), number(most)),
            };
            let allowed = match (check.min, check.max) {
                (Some(min), Some(max)) => format!("{min} to {max}"),
                (Some(min), None) => format!("at least {min}"),
                (None, Some(max)) => format!("at most {max}"),
                (None, None) => "anything".to_owned(),
            };
            let verdict = if holds(check, mean(values)) { "holds" } else { "FAILS" };
            let (says, ours) = (&check.says, number(mean(values)));
            out += &format!("| {says} | {ours}{spread} | {} | {allowed} | {verdict} |\n", check.published);
        }
        out += "\n| arm | figures, mean of seeds |\n|---|---|\n";
        for arm in &self.experiment.arms {
            let named = |figure: &String| {
                let all: Vec<f64> = self.outcomes.iter().map(|seed| seed[arm.name()][figure]).collect();
                format!("{figure} {}", number(mean(&all)))
            };
            let figures: Vec<_> = self.outcomes[0][arm.name()].keys().map(named).collect();
            out += &format!("| {} | {} |\n", arm.name(), figures.join(", "));
        }
        out
    }

    /// Returns all figures; non-finite ones are null.
    pub fn json(&self) -> Value {
        let checks = self.experiment.checks.iter().zip(&self.values).map(|(check, values)| {
            json!({
                "says": check.says,
                "values": values,
                "mean": mean(values),
                "min": check.min,
                "max": check.max,
                "published": check.published,
                "holds": holds(check, mean(values)),
            })
        });
        let seeds = self.experiment.seeds.iter().zip(self.outcomes);
        json!({
            "experiment": self.name,
            "title": self.experiment.title,
            "checks": checks.collect::<Vec<_>>(),
            "runs": seeds.map(|(seed, arms)| json!({ "seed": seed, "arms": arms })).collect::<Vec<_>>(),
        })
    }
}
