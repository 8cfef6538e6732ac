//! HTML page of a fit: measured loss, Pareto front, table of units.

use std::path::Path;

use mantissa_eval::stats::with_error;
use mantissa_jobs::{FitCandidate, FitUnit};

use super::done::{Done, unit_columns};
use crate::commands::tasks;
use crate::output::{bytes, number};
use crate::report::{Axis, Bar, Html, Page, Point, Scatter, bars, facts, table, tiles};

/// Units whose bars are shown at once; those of more are folded away.
const MANY: usize = 48;

/// Makes the page of the fit of `model`.
pub(super) fn page(model: &Path, done: &Done<'_>) -> Page {
    let quality = done.quality;
    let mut page = Page::new(&format!("Fit of {}", model.display()));
    page.push(Html::lead(&verdict(done)));
    page.push(facts([
        ("output", done.output.display().to_string()),
        ("method", done.method.clone()),
        ("format", quality.container.clone()),
        ("windows of the choice", done.windows.to_string()),
    ]));
    page.push(tiles(figures(done)));
    tasks::section(&mut page, &quality.tasks);
    let chosen = chosen_point(done);
    if let Some(plot) = plot(done, chosen.as_ref()) {
        page.push(Html::heading("Predicted loss by size"));
        let scaled =
            if done.scaled { " and scaled per method and scheme to the KL of the whole model" } else { "" };
        page.push(Html::paragraph(&format!(
            "The predicted KL of a choice is the sum over the units, each measured alone{scaled}. The front holds the \
             best choice of each size; \"one scheme\" gives all units the same one."
        )));
        page.push(plot);
    }
    page.push(Html::heading("Units"));
    let charts = Html::grid(by_unit(done.units));
    page.push(if done.units.len() > MANY { Html::details("Bars of all units", [charts]) } else { charts });
    let all = unit_columns(done.units.iter());
    page.push(table("chosen scheme, method and KL of each unit", &all));
    if !done.apart.is_empty() {
        page.push(Html::heading("Methods that are not mixed"));
        page.push(Html::list(done.apart));
    }
    if !done.left_out.is_empty() {
        page.push(Html::heading("Left out"));
        page.push(Html::list(done.left_out));
    }
    page
}

/// Says the loss and the size.
fn verdict(done: &Done<'_>) -> String {
    let bits = number(Some(done.quality.linear_bits_per_weight), 4);
    match &done.quality.evaluation {
        Some(found) => {
            let word = found.verdict.as_ref().map_or_else(String::new, |word| format!(", {word}"));
            let (kl, se) = (number(Some(found.kl), 3), number(Some(found.kl_se), 2));
            let kl = with_error(&kl, &se, "nats/token", found.text.windows);
            format!("KL {kl} on held-out windows{word}, at {bits} bits per weight.")
        }
        None => {
            let kl = number(Some(done.predicted_kl), 3);
            format!("KL {kl} nats/token predicted, not measured, at {bits} bits per weight.")
        }
    }
}

fn figures(done: &Done<'_>) -> Vec<(&'static str, String, String)> {
    let quality = done.quality;
    let of_all = format!("{} with embeddings and head", number(Some(quality.bits_per_weight), 4));
    let bound = format!("at least {} within the budget", number(Some(done.predicted_kl_bound), 3));
    let mut all = vec![
        ("size", bytes(quality.bytes), String::new()),
        ("bits per weight", number(Some(quality.linear_bits_per_weight), 4), of_all),
        ("predicted KL", number(Some(done.predicted_kl), 3), bound),
    ];
    if let Some(found) = &quality.evaluation {
        let top1 = format!("{} %", number(Some(100.0 * found.top1), 3));
        all.push(("measured KL", number(Some(found.kl), 3), "held-out windows".to_owned()));
        all.push(("top-1 agreement", top1, "same most probable token".to_owned()));
    }
    all
}

/// Groups of the points of the chart.
const GROUPS: [&str; 3] = ["chosen", "front", "one scheme"];

/// Draws the predicted KL against bits: the front, uniform schemes and the choice.
fn plot(done: &Done<'_>, chosen: Option<&Point>) -> Option<Html> {
    let front = done.front.iter().map(|point| Point {
        x: point.bits_per_weight,
        y: point.predicted_kl,
        label: String::new(),
        group: 1,
    });
    let front = front.filter(|point| chosen.is_none_or(|chosen| (chosen.x, chosen.y) != (point.x, point.y)));
    let points: Vec<Point> = front.chain(uniform(done.units)).chain(chosen.cloned()).collect();
    let (x, y) = (Axis::linear("bits per weight"), Axis::log("KL, predicted"));
    let title = "Predicted KL against bits per weight";
    Scatter { title, x, y, groups: &GROUPS, styles: &[], named: Some(0), points }.html()
}

/// Returns the point of the choice.
fn chosen_point(done: &Done<'_>) -> Option<Point> {
    let x = bits_per_weight(done.units, chosen)?;
    Some(Point { x, y: done.predicted_kl, label: "chosen".to_owned(), group: 0 })
}

/// Returns a point for each recipe that every unit has: all of them under it.
fn uniform(units: &[FitUnit]) -> Vec<Point> {
    let Some(first) = units.first() else { return Vec::new() };
    let point = |at: usize| {
        let of = |row: &FitUnit| row.candidates.get(at).cloned();
        let x = bits_per_weight(units, of)?;
        let y = units.iter().filter_map(of).map(|c| c.kl).sum();
        Some(Point { x, y, label: first.named(&first.candidates[at]), group: 2 })
    };
    (0..first.candidates.len()).filter_map(point).collect()
}

/// Returns the bits per weight if every unit takes the candidate that `pick` gives; `None` if one has none.
fn bits_per_weight(units: &[FitUnit], pick: impl Fn(&FitUnit) -> Option<FitCandidate>) -> Option<f64> {
    let (mut bits, mut weights) = (0.0, 0.0);
    for row in units {
        let own = chosen(row)?;
        bits += pick(row)?.bits as f64;
        weights += own.bits as f64 / row.bits_per_weight;
    }
    Some(bits / weights).filter(|bits| bits.is_finite())
}

/// Returns the chosen candidate of a unit.
fn chosen(row: &FitUnit) -> Option<FitCandidate> {
    row.candidates.get(row.chosen).cloned()
}

/// Draws bits and KL of the units in the order of the model.
fn by_unit(units: &[FitUnit]) -> Vec<Html> {
    let bar = |row: &FitUnit, value: f64, shown: String| Bar { name: row.unit.clone(), value, shown };
    let bits =
        |row: &FitUnit| bar(row, row.bits_per_weight, format!("{:.2} {}", row.bits_per_weight, row.scheme));
    let kl = |row: &FitUnit| {
        let kl = chosen(row).map_or(f64::NAN, |chosen| chosen.kl);
        bar(row, kl, number(Some(kl), 2))
    };
    let charts = [
        bars("Bits per weight of each unit", &units.iter().map(bits).collect::<Vec<_>>()),
        bars("KL of each unit alone (nats/token)", &units.iter().map(kl).collect::<Vec<_>>()),
    ];
    charts.into_iter().flatten().collect()
}
