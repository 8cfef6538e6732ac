//! HTML page of the demo: its table, and bits against KL.

use mantissa_quant::registry;

use super::{Figures, Report, Row};
use crate::embedded::DOMAINS;
use crate::report::{Axis, Html, Page, Point, Scatter, table};

/// Makes the page.
pub(super) fn page(report: &Report<'_>) -> Page {
    let mut page = Page::new("mantissa demo");
    page.push(Html::paragraph(&format!(
        "A Llama of {} parameters, trained by this program in bf16, quantized by {} recipes and measured on text that neither \
         training nor calibration has seen. Measured on this machine in {:.1} s with {} threads.",
        report.parameters,
        report.recipes.len(),
        report.seconds,
        report.threads
    )));
    page.push(Html::heading("KL against bits per weight"));
    page.push(Html::paragraph(
        "KL divergence from the bf16 model (nats/token), mean over the three domains. Lower is better; further left is smaller.",
    ));
    page.push(plot("All domains", report, |row| mean(&row.domains)));
    page.push(Html::grid(
        DOMAINS
            .iter()
            .enumerate()
            .map(|(i, domain)| plot(domain.name, report, |row| row.domains.get(i).map_or(0.0, |f| f.kl))),
    ));
    page.push(Html::heading("All results"));
    page.push(table(&super::table(report)));
    page.push(Html::paragraph(
        "bits: per weight of the quantized layers, as stored; embeddings and norms stay bf16. size: all tensors. KL: \
         nats/token to the bf16 model, ± standard error over windows. ppl: perplexity, not comparable between domains. \
         *: some layers fell back to another scheme or method.",
    ));
    page
}

fn mean(figures: &[Figures]) -> f64 {
    figures.iter().map(|f| f.kl).sum::<f64>() / figures.len().max(1) as f64
}

fn plot(title: &str, report: &Report<'_>, kl: impl Fn(&Row) -> f64) -> Html {
    let groups: Vec<&str> = registry::names().chain(["with activations"]).collect();
    // Recipes group by method; those that also quantize activations are the last group.
    let method = |row: &Row| registry::names().position(|name| name == row.method);
    let last = groups.len() - 1;
    let group = |row: &Row| method(row).filter(|_| row.activations.is_none()).unwrap_or(last);
    let point = |row: &Row| Point {
        x: row.linear_stored_bits_per_weight,
        y: kl(row),
        label: row.recipe.clone(),
        group: group(row),
    };
    let scatter = Scatter {
        title,
        x: Axis::linear("bits per weight"),
        y: Axis::log("KL (nats/token)"),
        groups: &groups,
        points: report.recipes.iter().map(point).collect(),
    };
    scatter.html()
}
