//! Calibration coverage: channels and experts that the calibration never reaches, reported before
//! quantization starts.

use std::collections::BTreeMap;
use std::ops::ControlFlow;
use std::path::Path;

use anyhow::Result;
use mantissa_eval::whole;
use mantissa_model::Bos;
use mantissa_quant::{Coverage, InputCoverage, Plan, QuantError};
use mantissa_store::TextFile;
use mantissa_store::convention::ModelFiles;

use super::model::load_tokenizer;
use crate::context::Context;
use crate::error::BadInput;
use crate::interrupt;
use crate::output::{Align, Table, count};
use crate::progress::Unit;

/// Measures the coverage of `plan`'s calibration (if any) on `source` and prints it on standard error: a
/// table, the distance to `traffic` (an in-domain sample), and a warning for each gap.
///
/// # Errors
/// An unreadable text; errors of running the model; under `--strict` the first warning.
pub fn find(
    plan: &Plan,
    source: &ModelFiles,
    traffic: Option<&Path>,
    context: &Context,
) -> Result<Option<Coverage>> {
    let progress = context.progress(0, Unit::Items("steps"));
    let mut done = 0;
    let tick = &mut || {
        done += 1;
        progress.message("calibration coverage");
        progress.set(done);
        if interrupt::received().is_some() { ControlFlow::Break(()) } else { ControlFlow::Continue(()) }
    };
    let found = interrupt::orderly(|| Coverage::find(plan, source, tick), QuantError::is_interruption);
    progress.finish();
    let Some(mut coverage) = found? else { return Ok(None) };
    if let Some(path) = traffic {
        coverage.compare(plan, &[sample(path, source, context)?]);
    }
    lines(&coverage).iter().for_each(|line| context.note(line));
    context.warn_all(&coverage.warnings())?;
    Ok(Some(coverage))
}

/// Tokenizes the in-domain sample at `path`.
fn sample(path: &Path, source: &ModelFiles, context: &Context) -> Result<Vec<u32>> {
    let name = path.display().to_string();
    let tokens = context.reading_texts(|| {
        let tokenizer = load_tokenizer(source, context)?;
        let text = whole(TextFile::open(path)?, &name, &tokenizer, context.memory_left())?;
        Ok(tokenizer.encode(&text, Bos::Never)?)
    })?;
    if tokens.is_empty() {
        return Err(BadInput::new(name, "no token", "an in-domain text sample").into());
    }
    Ok(tokens)
}

/// Returns the lines of the text report.
fn lines(coverage: &Coverage) -> Vec<String> {
    let Coverage { windows, tokens, tokens_run, inputs, traffic } = coverage;
    let run = if tokens_run < tokens {
        format!(", full coverage after {}", count(*tokens_run))
    } else {
        String::new()
    };
    let mut lines = vec![format!("calibration: {} tokens in {windows} windows{run}", count(*tokens))];
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
