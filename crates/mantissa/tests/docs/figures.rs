//! Tables of measured figures, from the one table that the program reads.

use std::fmt::Write;

use mantissa_plan::figures::{FIGURES, Figure, MODELS, figure};
use mantissa_plan::precision::{CANDIDATES, Precision};

/// Writes a number without its leading zero, as the results pages do.
fn short(value: f64, digits: usize) -> String {
    let text = format!("{:.digits$}", value.abs());
    let text = text.strip_prefix('0').unwrap_or(&text);
    if value < 0.0 { format!("-{text}") } else { text.to_owned() }
}

/// Writes a KL with its standard error, if known.
fn kl(figure: Option<&Figure>) -> String {
    let Some(figure) = figure else { return String::new() };
    let error = figure.kl_error.map(|error| format!(" ± {}", short(error, 5)));
    short(figure.kl, 5) + &error.unwrap_or_default()
}

/// Writes an optional number.
fn cell(value: Option<f64>, digits: usize) -> String {
    value.map_or_else(String::new, |value| format!("{value:.digits$}"))
}

/// Processor seconds, with a decimal below one.
fn seconds(value: Option<f64>) -> String {
    value.map_or_else(String::new, |value| format!("{value}"))
}

/// The recipes that `plan` and `quantize --for` choose from, one line for each recipe and figure.
pub fn offers() -> String {
    let mut table = "| `--bits` | recipe | format | bits/weight | KL, ref-8m | KL, ref-32m | top-1, % | CPU-s |\n|---|---|---|---|---|---|---|---|\n".to_owned();
    let measured: Vec<&Precision> =
        CANDIDATES.iter().filter(|row| !row.is_dense() && row.measured_kl().is_some()).collect();
    let same = |a: &Precision, b: &Precision| {
        a.recipe == b.recipe
            && a.nominal == b.nominal
            && MODELS.iter().all(|model| of(model, a) == of(model, b))
    };
    for (at, row) in measured.iter().enumerate() {
        if measured[..at].iter().any(|earlier| same(earlier, row)) {
            continue;
        }
        let formats: Vec<_> =
            measured[at..].iter().filter(|other| same(other, row)).map(|other| other.convention).collect();
        let only = match (row.offered.spare, row.offered.least_sm, row.inputs) {
            (true, ..) => ", where no other fits".to_owned(),
            (_, Some(sm), None) => format!(", after others below SM {}.{}", sm / 10, sm % 10),
            (_, Some(sm), Some(_)) => format!(", with a GPU of SM {}.{} or later", sm / 10, sm % 10),
            _ => String::new(),
        };
        let [small, large] = MODELS.map(|model| of(model, row));
        writeln!(
            table,
            "| {} | `{}`{only} | {} | {} | {} | {} | {} | {} |",
            row.nominal,
            row.recipe.unwrap_or_default(),
            formats.join(", "),
            cell(small.and_then(|figure| figure.bits), 3),
            kl(small),
            kl(large),
            cell(small.and_then(|figure| figure.top1), 2),
            seconds(small.and_then(|figure| figure.seconds)),
        )
        .unwrap();
    }
    table
}

fn of(model: &str, row: &Precision) -> Option<&'static Figure> {
    // The page has its own figures; those of its bound only where it has none at all.
    let own = MODELS.iter().find_map(|model| figure(model, row.recipe?, Some(row.convention)));
    let recipe = own.map(|_| row.recipe).unwrap_or(row.offered.bound.or(row.recipe));
    figure(model, recipe?, Some(row.convention))
}

/// Every recipe measured on `model`, beside the other model.
pub fn of_model(model: &str) -> String {
    let other = MODELS.into_iter().find(|other| *other != model).unwrap();
    let mut table = format!(
        "| recipe | MB | KL | top-1, % | ΔNLL | {other}: KL | CPU-s |\n|---|--:|---|---|---|---|--:|\n"
    );
    for row in FIGURES.iter().filter(|row| row.model == model) {
        let delta = row.delta_nll.map_or_else(String::new, |delta| {
            let sign = if delta < 0.0 { "" } else { "+" };
            let error = row.delta_nll_error.map(|error| format!(" ± {}", short(error, 5)));
            format!("{sign}{}{}", short(delta, 5), error.unwrap_or_default())
        });
        let elsewhere = figure(other, row.recipe, row.format).map(|figure| short(figure.kl, 5));
        writeln!(
            table,
            "| `{}` | {} | {} | {} | {delta} | {} | {} |",
            row.recipe,
            cell(row.megabytes, 2),
            kl(Some(row)),
            cell(row.top1, 2),
            elsewhere.unwrap_or_default(),
            seconds(row.seconds),
        )
        .unwrap();
    }
    table
}
