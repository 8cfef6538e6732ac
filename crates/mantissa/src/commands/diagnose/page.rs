//! HTML page of a diagnosis: findings first, then plots and tables of what was measured.

use std::collections::BTreeMap;

use mantissa_advise::diagnose::{Compared, InputStats, Report};
use mantissa_eval::stats::with_error;
use mantissa_jobs::DiagnoseReport;

use super::{Args, examined, ignorance, inputs, short};
use crate::output::{Align, Table, bytes, number};
use crate::report::{Axis, Html, LineChart, Page, Point, Scatter, Series, facts, table};

/// Makes the page of a diagnosis.
pub(super) fn page(args: &Args, found: &DiagnoseReport) -> Page {
    let DiagnoseReport { convention, report, .. } = found;
    let mut page = Page::new(&format!("Diagnosis of {}", args.model.named().display()));
    page.push(Html::lead(&verdict(report)));
    let mut about = vec![
        ("format", (*convention).to_owned()),
        ("tokens", report.tokens.to_string()),
        ("examinations", report.examined.len().to_string()),
    ];
    about.extend(args.reference.as_ref().map(|path| ("source", path.named().display().to_string())));
    page.push(facts(about));
    findings(&mut page, report);
    page.push(Html::heading("Examinations"));
    page.push(table("examinations that ran", &examined(report)));
    let skipped = report.skipped.iter().map(|skipped| format!("{}: {}", skipped.name, skipped.lacks));
    let skipped: Vec<String> = skipped.collect();
    if !skipped.is_empty() {
        page.push(Html::details(&format!("Not examined ({})", skipped.len()), [Html::list(&skipped)]));
    }
    page.push(Html::heading("Activations"));
    page.push(Html::grid(activations(report)));
    if let Some(compared) = &report.compared {
        page.push(Html::heading("Against the source"));
        let (kl, se) = (number(Some(compared.kl), 3), number(Some(compared.kl_se), 2));
        page.push(Html::paragraph(&format!(
            "KL {}; {} from the head alone, {} from the layers alone.",
            with_error(&kl, &se, "nats/token", report.windows),
            number(Some(compared.kl_head), 3),
            number(Some(compared.kl_layers), 3)
        )));
        page.push(Html::grid(against(report, compared)));
    }
    precision(&mut page, report);
    page.push(Html::details(
        "Inputs of all linear layers",
        [table("inputs of all linear layers", &inputs(report))],
    ));
    page
}

fn verdict(report: &Report) -> String {
    let tokens = report.tokens;
    match report.findings.as_slice() {
        [] if report.knows_nothing() => {
            format!("Nothing found on {tokens} tokens, but {}.", ignorance(report))
        }
        [] => format!("Nothing found on {tokens} tokens."),
        [one] => format!("1 finding on {tokens} tokens: {} in {}.", one.examination, one.place),
        [first, ..] => {
            let n = report.findings.len();
            format!("{n} findings on {tokens} tokens, the first: {} in {}.", first.examination, first.place)
        }
    }
}

/// Appends every finding with its remedy and command.
fn findings(page: &mut Page, report: &Report) {
    if report.findings.is_empty() {
        return;
    }
    page.push(Html::heading("Findings"));
    for finding in &report.findings {
        page.push(Html::subheading(&format!("{}: {}", finding.examination, finding.place)));
        page.push(Html::paragraph(&finding.found));
        page.push(Html::paragraph(&format!("Remedy: {}.", finding.remedy)));
        page.push(Html::preformatted(&finding.command));
    }
}

/// Makes a chart over the layers.
fn by_layer(title: &'static str, y: Axis, series: Vec<Series>) -> Option<Html> {
    LineChart { title, x: Axis::linear("layer").in_full(), y, series }.html()
}

/// Draws magnitudes, outliers and int8 errors over the layers.
fn activations(report: &Report) -> Vec<Html> {
    let states = report.layers.iter().map(|layer| (layer.layer as f64, f64::from(layer.states.amax)));
    let states = vec![Series::new("states", states.collect())];
    let kurtosis = [
        mean("as stored", report, |input| Some(input.kurtosis)),
        mean("rotated", report, |input| input.kurtosis_rotated),
    ];
    let error = [
        mean("range per token", report, |input| Some(100.0 * input.error_by_token)),
        mean("the same, rotated", report, |input| input.error_rotated.map(|error| 100.0 * error)),
        mean("one range", report, |input| Some(100.0 * input.error_by_tensor)),
        mean("own scheme", report, |input| input.error_own.map(|error| 100.0 * error)),
    ];
    let charts = [
        by_layer("Largest magnitude of the states", Axis::log("amax"), states),
        by_layer(
            "Largest channel over the median channel",
            Axis::log("ratio"),
            by_module(report, |input| f64::from(input.channel_ratio)),
        ),
        by_layer(
            "Largest token over the median token",
            Axis::log("ratio"),
            by_module(report, |input| f64::from(input.token_ratio)),
        ),
        by_layer("Kurtosis of the inputs (3 = normal)", Axis::log("kurtosis"), kurtosis.into()),
        by_layer("Error of products with int8 inputs", Axis::log("%"), error.into()),
    ];
    charts.into_iter().flatten().collect()
}

/// Returns the mean of a figure over the inputs of each layer.
fn mean(name: &str, report: &Report, of: fn(&InputStats) -> Option<f64>) -> Series {
    let point = |layer: &mantissa_advise::diagnose::LayerStats| {
        let values: Vec<f64> = layer.inputs.iter().filter_map(of).filter(|x| x.is_finite()).collect();
        (!values.is_empty()).then(|| (layer.layer as f64, values.iter().sum::<f64>() / values.len() as f64))
    };
    Series::new(name, report.layers.iter().filter_map(point).collect())
}

/// Returns a line for each kind of input, by the name of the first module that reads it; of several experts, the largest.
fn by_module(report: &Report, of: fn(&InputStats) -> f64) -> Vec<Series> {
    let mut lines: BTreeMap<&str, BTreeMap<usize, f64>> = BTreeMap::new();
    for layer in &report.layers {
        for input in &layer.inputs {
            let place = lines.entry(short(input)).or_default().entry(layer.layer).or_insert(f64::NAN);
            *place = place.max(of(input));
        }
    }
    let series = lines.into_iter().map(|(name, points)| {
        Series::new(name, points.into_iter().map(|(layer, value)| (layer as f64, value)).collect())
    });
    series.collect()
}

/// Draws the model beside its source: error over depth, KL by position and context, KL of single parts.
fn against(report: &Report, compared: &Compared) -> Vec<Html> {
    let depth = compared.depth.iter().enumerate().map(|(layer, error)| (layer as f64, 100.0 * error));
    let positions = compared.positions.iter().map(|at| (at.from as f64, at.kl));
    let contexts = compared.contexts.iter().map(|at| (at.tokens as f64, at.kl));
    let part = |part: &'static str| {
        let points = report.alone.iter().filter(|alone| alone.part == part);
        Series::new(part, points.map(|alone| (alone.layer as f64, alone.kl)).collect())
    };
    let chart = |title: &'static str, x: &'static str, series: Series| {
        LineChart { title, x: Axis::linear(x).in_full(), y: Axis::from_zero("KL"), series: vec![series] }
            .html()
    };
    let charts = [
        by_layer(
            "Error of the states after each layer",
            Axis::from_zero("%"),
            vec![Series::new("error", depth.collect())],
        ),
        by_layer("KL of each part quantized alone", Axis::log("KL"), vec![part("attention"), part("mlp")]),
        chart("KL by position in the window", "position", Series::new("KL", positions.collect())),
        chart("KL of the same tokens by context", "tokens of context", Series::new("KL", contexts.collect())),
    ];
    charts.into_iter().flatten().collect()
}

/// Appends the ablations, the schemes of the cache and the ladder.
fn precision(page: &mut Page, report: &Report) {
    let kl = |kl: Option<f64>| kl.map_or_else(|| "not finite".to_owned(), |kl| number(Some(kl), 3));
    if !report.ablations.is_empty() {
        let mut rows =
            Table::new([("part", Align::Left), ("precision", Align::Left), ("KL against f32", Align::Right)]);
        for one in &report.ablations {
            rows.row([one.part.to_owned(), one.precision.to_owned(), kl(one.kl)]);
        }
        page.push(Html::heading("Precision outside the weights"));
        page.push(table("KL of parts in other precisions", &rows));
    }
    if !report.cache_schemes.is_empty() {
        let percent = |share: Option<f64>| share.map_or_else(String::new, |x| format!("{:.1} %", 100.0 * x));
        let mut rows = Table::new([
            ("scheme", Align::Left),
            ("bytes per token", Align::Right),
            ("KL", Align::Right),
            ("retrieved", Align::Right),
            ("in f32", Align::Right),
        ]);
        for one in &report.cache_schemes {
            rows.row([
                one.kv.clone(),
                bytes(one.bytes_per_token as u64),
                kl(Some(one.kl)),
                percent(one.retrieved),
                percent(one.retrieved_in_f32),
            ]);
        }
        page.push(Html::heading("Schemes of the KV cache"));
        let point = |one: &mantissa_advise::diagnose::CacheScheme| Point {
            x: one.bytes_per_token,
            y: one.kl,
            label: one.kv.clone(),
            group: 0,
        };
        let points = report.cache_schemes.iter().map(point).collect();
        let (x, y) = (Axis::linear("bytes per token"), Axis::log("KL against f32"));
        let title = "KL against size of the cache";
        let scatter = Scatter { title, x, y, groups: &["scheme"], styles: &[], named: None, points };
        page.push(scatter.html().unwrap_or_default());
        page.push(table("schemes of the KV cache", &rows));
    }
    if report.ladder.len() > 1 {
        let mut rows = Table::new([("relaxed", Align::Left), ("KL", Align::Right)]);
        report.ladder.iter().for_each(|step| rows.row([step.relaxed.to_owned(), kl(Some(step.kl))]));
        page.push(Html::heading("Relaxation under the bound"));
        page.push(table("relaxation, each step with those before", &rows));
    }
}
