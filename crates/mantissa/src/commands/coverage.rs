//! Calibration coverage: channels and experts that the calibration never reaches, reported before
//! quantization starts.

use std::collections::BTreeMap;

use anyhow::Result;
use mantissa_quant::{Coverage, InputCoverage};

use crate::context::Context;
use crate::output::{Align, Table, count, counted};

/// Prints the coverage of a calibration on standard error: a table, the distance to an in-domain sample, and a warning for
/// each gap.
///
/// # Errors
/// Under `--strict` the first warning.
pub fn show(coverage: &Coverage, context: &Context) -> Result<()> {
    lines(coverage).iter().for_each(|line| context.note(line));
    context.warn_all(&coverage.warnings())
}

/// Returns the lines of the text report.
fn lines(coverage: &Coverage) -> Vec<String> {
    let Coverage { windows, tokens, tokens_run, inputs, traffic } = coverage;
    let run = if tokens_run < tokens {
        format!(", full coverage after {}", count(*tokens_run))
    } else {
        String::new()
    };
    let mut lines = vec![format!(
        "calibration: {} tokens in {}{run}",
        count(*tokens),
        counted(*windows as u64, "window")
    )];
    let mut written = Vec::new();
    if table(inputs).write(&mut written).is_ok() {
        lines.extend(String::from_utf8_lossy(&written).lines().map(|line| format!("  {line}")));
    }
    if let Some(traffic) = traffic {
        let [one, two, three] = traffic.unseen.map(|share| 100.0 * share);
        let [tokens, pairs] = traffic.distance;
        lines.push(format!(
            "traffic: {} tokens; not in the calibration: {one:.2} % of its tokens, {two:.2} % of its pairs, {three:.2} % of its triples; \
             Jensen-Shannon distance: tokens {tokens:.3}, pairs {pairs:.3}",
            count(traffic.tokens)
        ));
    }
    lines
}

/// Makes a table with one row per kind of layer input.
fn table(inputs: &[InputCoverage]) -> Table {
    let mut table = Table::new([
        ("layer input", Align::Left),
        ("inputs", Align::Right),
        ("channels", Align::Right),
        ("min tokens", Align::Right),
        ("unreached", Align::Right),
        ("silent channels", Align::Right),
    ])
    .optional(["channels", "inputs"]);
    let mut sites: BTreeMap<(usize, &str), Vec<&InputCoverage>> = BTreeMap::new();
    let mut order: Vec<&str> = Vec::new();
    for input in inputs {
        let place = order.iter().position(|site| *site == input.site);
        let place = place.unwrap_or_else(|| {
            order.push(&input.site);
            order.len() - 1
        });
        sites.entry((place, &input.site)).or_default().push(input);
    }
    sites.iter().for_each(|((_, site), inputs)| table.row(cells(site, inputs)));
    table
}

fn cells(site: &str, inputs: &[&InputCoverage]) -> [String; 6] {
    let unreached = inputs.iter().filter(|input| input.tokens == 0).count();
    let silent = inputs.iter().filter(|input| input.tokens > 0).map(|input| input.silent).sum::<usize>();
    [
        site.to_owned(),
        inputs.len().to_string(),
        inputs.iter().map(|input| input.channels).max().unwrap_or(0).to_string(),
        count(inputs.iter().map(|input| input.tokens).min().unwrap_or(0)),
        unreached.to_string(),
        silent.to_string(),
    ]
}
