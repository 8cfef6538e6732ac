//! HTML page of the demo: the best recipe of each size in a plain word, bits against KL, all figures.

use mantissa_eval::verdict::Verdict;

use super::{Figures, Report, Row};
use crate::commands::report::texts;
use crate::output::{Align, Table, bytes, count, number};
use crate::report::{Axis, Html, Page, Point, Reading, Scatter, gauge, table};
use mantissa_jobs::embedded::DOMAINS;

/// Sizes that are compared among themselves: name and bits per weight, the upper bound excluded.
const SIZES: [(&str, f64, f64); 3] =
    [("8 bits", 6.0, f64::INFINITY), ("4 to 5 bits", 3.8, 6.0), ("2 to 3 bits", 0.0, 3.8)];

/// Panels of the plot: 8-bit recipes would press all others into a corner.
const PANELS: [(&str, f64, f64); 2] = [("2 to 5 bits", 0.0, 6.0), ("8 bits", 6.0, f64::INFINITY)];

/// Makes the page.
pub(super) fn page(report: &Report<'_>) -> Page {
    let mut page = Page::new(&format!(
        "mantissa demo: {} recipes on a model of {} parameters",
        report.recipes.len(),
        count(report.parameters)
    ));
    let best = best_of_sizes(&report.recipes);
    verdict(&mut page, report, &best);
    plots(&mut page, report);
    continuations(&mut page, report, &best);
    page.push(Html::heading("All recipes"));
    page.push(table("KL, top-1 agreement and size of every recipe", &results(report)));
    page.push(Html::paragraph(
        "bits: per weight of the quantized layers, as stored; embeddings and norms stay bf16. size: all tensors. KL: mean of the \
         three kinds of text, nats/token. *: some layers fell back to another scheme or method.",
    ));
    page.push(Html::details(
        "By kind of text: perplexity and KL with standard errors",
        [table("Perplexity and KL by kind of text", &by_domain(report))],
    ));
    page.push(Html::heading("Next: your own model"));
    page.push(Html::preformatted(
        "mantissa quantize MODEL --recipe gptq-int4-g128 --calibration TEXT --text TEXT --out OUT\nmantissa report OUT --reference MODEL",
    ));
    page
}

/// Returns the recipe with the lowest KL of each size.
fn best_of_sizes(rows: &[Row]) -> Vec<(&'static str, &Row)> {
    let best = |(name, low, high): (&'static str, f64, f64)| {
        let within = rows.iter().filter(|row| (low..high).contains(&row.linear_stored_bits_per_weight));
        Some((name, within.min_by(|a, b| kl(a).total_cmp(&kl(b)))?))
    };
    SIZES.into_iter().filter_map(best).collect()
}

/// Appends a line for the best recipe of each size, and the gauge of all.
fn verdict(page: &mut Page, report: &Report<'_>, best: &[(&'static str, &Row)]) {
    for (size, row) in best {
        let change = 100.0 * (1.0 - row.bytes as f64 / report.bytes as f64);
        let (before, after) = (bytes(report.bytes), bytes(row.bytes));
        let content = [
            Html::text(&format!("{size}: {before} → {after}, {change:.0} % smaller, quality loss ")),
            Html::badge(judged(row)),
            Html::text(&format!(" ({}, KL {})", row.recipe, figures(kl(row)))),
        ];
        page.push(Html::element("p", &[("class", "lead")], content));
    }
    let reading =
        |(_, row): &(&str, &Row)| Reading { name: row.recipe.clone(), kl: kl(row), verdict: judged(row) };
    page.push(gauge(&best.iter().map(reading).collect::<Vec<_>>(), 0.0));
    let note = format!(
        "The best recipe of each size on a Llama that this program trained in bf16, on text that neither training nor \
         calibration has seen: stories, prose, code. The source is stored in bf16, so the noise floor is 0. Larger models are \
         reported to lose less at the same bits. Measured on this machine in {:.0} s with {} threads.",
        report.seconds, report.threads
    );
    page.push(Html::element("p", &[("class", "note")], [Html::text(&note)]));
}

/// Appends the plots: all kinds of text, and folded away each by itself.
fn plots(page: &mut Page, report: &Report<'_>) {
    page.push(Html::heading("KL against bits per weight"));
    page.push(Html::paragraph(
        "Lower is better, further left is smaller. Named are the recipes that no other beats in both; hover, tap or tab to a point \
         for its name. KL is the mean of the three kinds of text.",
    ));
    page.push(Html::grid(panels(report, kl)));
    let domains = DOMAINS.iter().enumerate().flat_map(|(i, domain)| {
        let charts = panels(report, |row| row.domains.get(i).map_or(0.0, |f| f.kl));
        [Html::subheading(domain.name), Html::grid(charts)]
    });
    page.push(Html::details("Plots by kind of text", domains));
}

/// Draws a panel for each range of bits that has recipes.
fn panels(report: &Report<'_>, kl: impl Fn(&Row) -> f64) -> Vec<Html> {
    // Recipes group by method; those that also quantize activations are the last group.
    let mut groups: Vec<&str> = Vec::new();
    for row in report.recipes.iter().filter(|row| row.activations.is_none()) {
        if !groups.contains(&row.method) {
            groups.push(row.method);
        }
    }
    groups.push("with activations");
    let last = groups.len() - 1;
    let method = |row: &Row| groups.iter().position(|name| *name == row.method);
    let group = |row: &Row| method(row).filter(|_| row.activations.is_none()).unwrap_or(last);
    let panel = |(title, low, high): (&'static str, f64, f64)| {
        let within =
            report.recipes.iter().filter(|row| (low..high).contains(&row.linear_stored_bits_per_weight));
        let points = within.map(|row| Point {
            x: row.linear_stored_bits_per_weight,
            y: kl(row),
            label: row.recipe.clone(),
            group: group(row),
        });
        let (x, y) = (Axis::linear("bits per weight"), Axis::log("KL (nats/token)"));
        let points = points.collect();
        Scatter { title, x, y, groups: &groups, styles: &[], named: None, points }.html()
    };
    PANELS.into_iter().filter_map(panel).collect()
}

/// Appends the continuation of one prompt by the source and the best recipe of each size.
fn continuations(page: &mut Page, report: &Report<'_>, best: &[(&'static str, &Row)]) {
    if best.is_empty() {
        return;
    }
    page.push(Html::heading("Same prompt, before and after"));
    let others: Vec<_> = best.iter().map(|(_, row)| (row.recipe.clone(), &row.sample)).collect();
    page.push(texts::shown(texts::PROMPT, ("bf16", &report.sample), &others));
}

/// Mean KL over the kinds of text.
fn kl(row: &Row) -> f64 {
    mean(row, |f| f.kl)
}

/// Mean top-1 agreement over the kinds of text.
fn top1(row: &Row) -> f64 {
    mean(row, |f| f.top1)
}

fn mean(row: &Row, get: fn(&Figures) -> f64) -> f64 {
    row.domains.iter().map(get).sum::<f64>() / row.domains.len().max(1) as f64
}

/// Judges the mean KL; the standard error of the mean of independent texts.
fn judged(row: &Row) -> Verdict {
    let squares: f64 = row.domains.iter().map(|f| f.kl_se * f.kl_se).sum();
    Verdict::new((kl(row), squares.sqrt() / row.domains.len().max(1) as f64), (0.0, 0.0))
}

fn figures(value: f64) -> String {
    number(Some(value), 2)
}

/// Name of a recipe, marked if layers fell back.
fn named(row: &Row) -> String {
    if row.fallbacks > 0 { format!("{} *", row.recipe) } else { row.recipe.clone() }
}

/// Makes the table of all recipes, the smallest loss first; a phone cuts the last columns.
fn results(report: &Report<'_>) -> Table {
    let mut table = Table::new([
        ("recipe", Align::Left),
        ("loss", Align::Left),
        ("KL", Align::Right),
        ("bits", Align::Right),
        ("size", Align::Right),
        ("top-1", Align::Right),
    ]);
    let mut rows: Vec<_> = report.recipes.iter().collect();
    rows.sort_by(|a, b| kl(a).total_cmp(&kl(b)));
    for row in rows {
        table.row([
            named(row),
            judged(row).word().to_owned(),
            figures(kl(row)),
            format!("{:.2}", row.linear_stored_bits_per_weight),
            bytes(row.bytes),
            format!("{:.1} %", 100.0 * top1(row)),
        ]);
    }
    table
}

/// Makes the table of perplexity and KL by kind of text: one row for the unquantized model, one per recipe.
fn by_domain(report: &Report<'_>) -> Table {
    let mut columns = vec![("recipe", Align::Left)];
    columns.extend(DOMAINS.iter().flat_map(|domain| [(domain.name, Align::Right), ("KL", Align::Right)]));
    let mut table = Table::new(columns);
    let rows = report.recipes.iter().map(|row| (named(row), &row.domains, true));
    for (name, domains, compared) in [("(bf16)".to_owned(), &report.dense, false)].into_iter().chain(rows) {
        let kl =
            |f: &Figures| if compared { format!("{:.5} ± {:.5}", f.kl, f.kl_se) } else { String::new() };
        let cells = domains.iter().flat_map(|f| [format!("{:.3}", f.ppl), kl(f)]);
        table.row([name].into_iter().chain(cells));
    }
    table
}
