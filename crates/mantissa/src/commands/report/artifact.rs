//! HTML page of a quantized model: verdict, the same prompt before and after, commands that load it, layers.

use std::path::Path;

use mantissa_eval::stats::with_error;
use mantissa_eval::verdict::Verdict;
use mantissa_jobs::default_text;
use mantissa_quant::{Digests, ErrorReport, Figures, Kept, LayerReport, Quality};

use super::launch::{Launch, Start};
use super::{map, texts};
use crate::commands::next_steps::quoted;
use crate::commands::outcome::{VS_RTN, VS_RTN_MEANS, ranks_by_output};
use crate::commands::quantize::fallback_line;
use crate::commands::tasks;
use crate::output::{Align, Table, bytes, count, number, shape};
use crate::report::{Html, Page, Reading, facts, gauge, pairs, table, tiles};

/// Number of layers in the table of the worst.
const WORST: usize = 10;

/// Parts of the page that are not in the quality report.
pub struct Extras {
    /// Name of the source model, or a description of it.
    pub source: String,
    /// Source model in commands: its path, or the word SOURCE.
    pub reference: String,
    /// Programs that load the model, and commands for the engines among them.
    pub launch: Launch,
    /// Time at which the model was written, as its files have it.
    pub written: Option<String>,
    /// Digests of the model's files, those outside the quality report included.
    pub files: Digests,
    /// Continuations of the same prompts by the source and by the model; or the command that makes them.
    pub texts: Result<Vec<texts::Pair>, String>,
}

/// Makes the page of the model at `path` from its quality report.
pub fn page(path: &Path, quality: &Quality, extras: &Extras) -> Page {
    let mut page = Page::new(&format!("Quantized model {}", texts::name(path)));
    page.push(facts(origin(quality, extras)));
    verdict(&mut page, path, (quality, extras));
    tasks::section(&mut page, &quality.tasks);
    texts::section(&mut page, &extras.texts);
    if !extras.launch.commands.is_empty() {
        page.push(Html::heading("Load it"));
        for Start { engine, ground, command } in &extras.launch.commands {
            page.push(Html::subheading(engine));
            if !ground.is_empty() {
                page.push(Html::element("p", &[("class", "note")], [Html::text(ground)]));
            }
            page.push(Html::preformatted(command));
        }
    }
    layers(&mut page, quality);
    for (heading, lines) in
        [("Fallbacks", &quality.fallbacks), ("Kept unquantized", &kept(quality)), ("Notes", &quality.notes)]
    {
        match lines.len() {
            0 => {}
            1..=5 => {
                page.push(Html::heading(heading));
                page.push(Html::list(lines));
            }
            n => page.push(Html::details(&format!("{heading} ({n})"), [Html::list(lines)])),
        }
    }
    page.push(Html::heading("How it was made"));
    page.push(pairs("Recipe, formats and calibration", summary(quality)));
    page.push(Html::details(
        "Hashes of all files",
        [table("Hashes of all files", &hashes(quality, &extras.files))],
    ));
    page
}

/// Returns what stays unquantized, each with its reason; reports of older versions have names only.
fn kept(quality: &Quality) -> Vec<String> {
    let Some(share) = &quality.share else { return quality.kept.clone() };
    let line = |kept: &Kept| match kept.count {
        1 => format!("{} ({} parameters): {}", kept.modules, count(kept.parameters), kept.why),
        n => format!("{} ({n}, {} parameters): {}", kept.modules, count(kept.parameters), kept.why),
    };
    share.kept.iter().map(line).collect()
}

/// Returns what the model was made from and by, and the programs that load it.
fn origin(quality: &Quality, extras: &Extras) -> Vec<(&'static str, String)> {
    let loads_in = extras.launch.loads_in.join(", ");
    let mut facts = vec![
        ("source", extras.source.clone()),
        ("recipe", quality.recipe.clone()),
        ("method", quality.method.clone()),
        ("format", quality.container.clone()),
        ("parameters", count(quality.parameters)),
    ];
    facts.extend(extras.written.iter().map(|date| ("written", date.clone())));
    facts.extend((!loads_in.is_empty()).then_some(("loads in", loads_in)));
    facts
}

/// Returns the result for the terminal: verdict, size and fallbacks, each with its label.
pub fn lines(quality: &Quality) -> Vec<(&'static str, String)> {
    let verdict = match &quality.evaluation {
        None => "quality loss not measured".to_owned(),
        Some(figures) => {
            let (word, kl) = (judged(figures).word(), measured_kl(figures));
            format!("{word}: KL {kl} on {}", default_text::shown(&figures.text.name))
        }
    };
    let fallbacks = fallback_line(quality).map(|line| ("fallbacks", line));
    let tasks = quality.tasks.iter().map(|task| ("task", tasks::line(task)));
    [("verdict", verdict)]
        .into_iter()
        .chain(tasks)
        .chain([("size", size(quality))])
        .chain(fallbacks)
        .collect()
}

/// Judges the measured KL against its noise floor.
fn judged(figures: &Figures) -> Verdict {
    let floor = (figures.noise_floor_kl, figures.noise_floor_kl_se);
    Verdict::new((figures.kl, figures.kl_se), floor)
}

/// Appends the verdict: size before and after, the KL against its thresholds, and the main figures.
fn verdict(page: &mut Page, path: &Path, (quality, extras): (&Quality, &Extras)) {
    let size = size(quality);
    let Some(figures) = &quality.evaluation else {
        page.push(Html::lead(&format!("Quality loss not measured. Size {size}.")));
        page.push(Html::paragraph(
            "Measure it against the source on the built-in text, or on a text of yours:",
        ));
        let command =
            format!("mantissa eval {} --reference {} --text default", quoted(path), extras.reference);
        page.push(Html::preformatted(&command));
        fallbacks(page, quality);
        page.push(tiles(size_tiles(quality)));
        return;
    };
    let verdict = judged(figures);
    let rest = Html::text(&format!(" at KL {}. Size {size}.", measured_kl(figures)));
    let lead = [Html::text("Quality loss "), Html::badge(verdict), rest];
    page.push(Html::element("p", &[("class", "lead")], lead));
    fallbacks(page, quality);
    page.push(gauge(&[Reading { name: "KL".to_owned(), kl: figures.kl, verdict }], figures.noise_floor_kl));
    page.push(Html::element("p", &[("class", "note")], [Html::text(&meaning(figures))]));
    page.push(tiles(size_tiles(quality).into_iter().chain(quality_tiles(figures))));
    page.push(Html::details("All quality figures", [table("Quality figures", &evaluation(figures))]));
}

/// Appends how many layers are not as the recipe asks, and why.
fn fallbacks(page: &mut Page, quality: &Quality) {
    if let Some(line) = fallback_line(quality) {
        page.push(Html::caution(&format!("Fallbacks from the recipe: {line}")));
    }
}

/// Says what the KL means, and what the noise floor is.
fn meaning(figures: &Figures) -> String {
    let (kl, floor) = (figures.kl, figures.noise_floor_kl);
    let moved = 100.0 * (kl / 2.0).sqrt().min(1.0);
    let floor = if floor > 0.0 {
        format!("storing the source in bf16 alone costs {} (the noise floor)", number(Some(floor), 3))
    } else {
        "the source is stored in bf16, so the noise floor is 0".to_owned()
    };
    format!(
        "On average at most {} % of the probability of the next token moves (Pinsker's inequality); {floor}. Text: {}, \
         {} predicted tokens.",
        number(Some(moved), 2),
        default_text::shown(&figures.text.name),
        figures.predicted
    )
}

/// Formats the mean KL with its standard error.
fn measured_kl(figures: &Figures) -> String {
    let (value, error) = (number(Some(figures.kl), 3), figures.kl_se);
    match error.is_finite() {
        true => with_error(&value, &number(Some(error), 2), "nats/token", figures.text.windows),
        false => format!("{value} nats/token"),
    }
}

/// Returns the bytes of the weight files of source and output: files are compared with files, since the size of the source's
/// tensors is not recorded. `None` if a report of another version lacks them.
fn file_bytes(quality: &Quality) -> Option<(u64, u64)> {
    let of = |files: &Digests| {
        let weights = files.iter().filter(|(name, _)| !name.ends_with(".json"));
        weights.map(|(_, digest)| digest.len).sum()
    };
    let (before, after) = (of(&quality.hashes.source), of(&quality.hashes.weights));
    (before > 0 && after > 0).then_some((before, after))
}

/// Returns the size of the weight files before and after in words.
fn size(quality: &Quality) -> String {
    let Some((before, after)) = file_bytes(quality) else { return bytes(quality.bytes) };
    let change = 100.0 * (1.0 - after as f64 / before as f64);
    let word = if change >= 0.0 { "smaller" } else { "larger" };
    format!("{} → {}, {:.0} % {word}", bytes(before), bytes(after), change.abs())
}

fn size_tiles(quality: &Quality) -> Vec<(&'static str, String, String)> {
    let linear = quality.linear_stored_bits_per_weight.unwrap_or(quality.linear_bits_per_weight);
    let all = format!("{} with embeddings and head", number(Some(quality.bits_per_weight), 4));
    vec![
        match file_bytes(quality) {
            Some((before, after)) => ("size", bytes(after), format!("source {}", bytes(before))),
            None => ("size", bytes(quality.bytes), String::new()),
        },
        ("bits per weight", number(Some(linear), 4), all),
    ]
}

fn quality_tiles(figures: &Figures) -> Vec<(&'static str, String, String)> {
    let source = (figures.nll - figures.delta_nll).exp();
    let percent = |share: f64| number(Some(100.0 * share), 3);
    vec![
        ("perplexity", number(Some(figures.ppl), 4), format!("source {}", number(Some(source), 4))),
        ("top-1 agreement", format!("{} %", percent(figures.top1)), "same most probable token".to_owned()),
        (
            "KL, 99th percentile",
            number(Some(figures.kl_p99.into()), 3),
            "nats, worst 1 % of tokens".to_owned(),
        ),
    ]
}

/// Appends the sections of the layers: error, bits, and the full tables folded away.
fn layers(page: &mut Page, quality: &Quality) {
    if let Some(errors) = map::errors(&quality.layers) {
        page.push(Html::heading("Error by layer and module"));
        let by_output = ranks_by_output(quality);
        let largest = worst(&quality.layers, false).next().map_or_else(String::new, |layer| {
            let percent = number(Some(100.0 * layer.error.relative_error), 3);
            format!(" The largest: {percent} % in {}.", layer.module)
        });
        page.push(Html::paragraph(&format!(
            "Error of each weight in percent of its norm, ‖W − Q‖ / ‖W‖. Darker is larger, within the range shown; of several \
             experts, the worst.{largest}"
        )));
        page.push(errors);
        if by_output {
            let method = &quality.method;
            page.push(Html::paragraph(&format!(
                "{method} lowers the error of the outputs and may raise that of the weights, so the map does not compare it \
                 with other methods. {VS_RTN_MEANS}."
            )));
        }
        let by = if by_output { VS_RTN } else { "error" };
        let title = format!("Layers with the largest {by} ({})", WORST.min(quality.layers.len()));
        let rows = layer_table(worst(&quality.layers, by_output), by_output);
        page.push(Html::details(&title, [table(&title, &rows)]));
    }
    page.push(Html::heading("Bits per layer"));
    match map::bits(&quality.layers) {
        Some(bits) => page.push(bits),
        None => page.push(Html::paragraph(&same_bits(&quality.layers))),
    }
    page.push(Html::details(
        &format!("All quantized layers ({})", quality.layers.len()),
        [table("All quantized layers", &layer_table(quality.layers.iter(), ranks_by_output(quality)))],
    ));
    page.push(Html::details(
        &format!("All other tensors ({})", quality.tensors.len()),
        [table("All other tensors", &tensors(quality))],
    ));
}

fn same_bits(layers: &[LayerReport]) -> String {
    let (Some(first), Some((least, most))) = (layers.first(), map::bits_range(layers)) else {
        return "No layer is quantized.".to_owned();
    };
    let [least, most] = [least, most].map(|bits| number(Some(bits), 4));
    let bits = if least == most { least } else { format!("{least} to {most}") };
    format!("All {} quantized layers have {bits} bits per weight ({}).", layers.len(), first.scheme)
}

/// Returns the layers with the largest error of weights, or of outputs relative to RTN's, the worst first.
fn worst(layers: &[LayerReport], by_output: bool) -> impl Iterator<Item = &LayerReport> {
    let mut sorted: Vec<_> = layers.iter().collect();
    sorted.sort_by(|a, b| b.ranked_error(by_output).total_cmp(&a.ranked_error(by_output)));
    sorted.into_iter().take(WORST)
}

fn summary(quality: &Quality) -> Vec<(&'static str, String)> {
    let mut rows = vec![
        ("recipe", quality.recipe.clone()),
        ("method", quality.method.clone()),
        ("weights", quality.weights.clone()),
        ("activations", quality.activations.clone().unwrap_or_else(|| "unquantized".to_owned())),
        ("format", quality.container.clone()),
        ("bits per weight by scheme", number(Some(quality.linear_bits_per_weight), 4)),
        ("parameters", count(quality.parameters)),
    ];
    rows.extend(quality.kv.iter().map(|kv| ("KV cache", kv.clone())));
    rows.extend(quality.calibration.iter().map(|set| {
        let text = default_text::shown(&set.name);
        ("calibration", format!("{text}: {} windows, {} tokens", set.windows, set.tokens))
    }));
    rows.push(("tool", quality.tool.clone()));
    rows
}

fn evaluation(figures: &Figures) -> Table {
    let mut table =
        Table::new([("figure", Align::Left), ("value", Align::Right), ("standard error", Align::Right)]);
    for (name, value, error) in [
        ("perplexity", figures.ppl, None),
        ("loss (nats/token)", figures.nll, Some(figures.nll_se)),
        ("KL (nats/token)", figures.kl, Some(figures.kl_se)),
        ("KL, 99th percentile", figures.kl_p99.into(), None),
        ("top-1 agreement", figures.top1, Some(figures.top1_se)),
        ("Δ loss (nats/token)", figures.delta_nll, Some(figures.delta_nll_se)),
        ("KL of the source in bf16 (nats/token)", figures.noise_floor_kl, Some(figures.noise_floor_kl_se)),
    ] {
        let error = match error {
            Some(_) if figures.text.windows == 1 => "one window".to_owned(),
            error => number(error, 2),
        };
        table.row([name.to_owned(), number(Some(value), 5), error]);
    }
    table.row(["predicted tokens".to_owned(), figures.predicted.to_string(), number(None, 2)]);
    table
}

fn error_cells(error: &ErrorReport) -> [String; 3] {
    [number(error.sqnr_db, 4), number(Some(error.relative_error), 3), number(Some(error.max_abs_error), 3)]
}

/// Column of the notes of layers.
const NOTES: usize = 8;

/// Makes the table of `layers`, with the error of their outputs where methods compared it with RTN's.
fn layer_table<'a>(layers: impl Iterator<Item = &'a LayerReport>, by_output: bool) -> Table {
    let mut columns = vec![
        ("layer", Align::Left),
        ("scheme", Align::Left),
        ("method", Align::Left),
        ("shape", Align::Right),
        ("bits", Align::Right),
        ("SQNR, dB", Align::Right),
        ("relative error", Align::Right),
        ("max error", Align::Right),
        ("notes", Align::Left),
    ];
    if by_output {
        columns.insert(NOTES, (VS_RTN, Align::Right));
    }
    let mut table = Table::new(columns);
    for layer in layers {
        let [sqnr, relative, largest] = error_cells(&layer.error);
        let remarks = layer.fallback.iter().chain(&layer.notes).cloned().collect::<Vec<_>>().join("; ");
        let (shape, bits) = (shape(&layer.shape), number(Some(map::bits_of(layer)), 4));
        let (module, scheme, method) = (layer.module.clone(), layer.scheme.clone(), layer.method.clone());
        let mut cells = vec![module, scheme, method, shape, bits, sqnr, relative, largest, remarks];
        if by_output {
            cells.insert(NOTES, number(layer.error_vs_rtn(), 3));
        }
        table.row(cells);
    }
    table
}

fn tensors(quality: &Quality) -> Table {
    let mut table = Table::new([
        ("tensor", Align::Left),
        ("stored as", Align::Left),
        ("shape", Align::Right),
        ("SQNR, dB", Align::Right),
        ("relative error", Align::Right),
        ("max error", Align::Right),
    ]);
    for tensor in &quality.tensors {
        let [sqnr, relative, largest] = match &tensor.error {
            Some(error) => error_cells(error),
            None => ["exact", "0", "0"].map(str::to_owned),
        };
        table.row([
            tensor.tensor.clone(),
            tensor.scheme.clone(),
            shape(&tensor.shape),
            sqnr,
            relative,
            largest,
        ]);
    }
    table
}

fn hashes(quality: &Quality, files: &Digests) -> Table {
    let mut table = Table::new([("file", Align::Left), ("bytes", Align::Right), ("SHA-256", Align::Left)]);
    for (of, digests) in [("source", &quality.hashes.source), ("output", files)] {
        for (name, digest) in digests {
            table.row([format!("{of}: {name}"), digest.len.to_string(), digest.hex()]);
        }
    }
    table
}
