//! Text of a plan for inference.

use std::io::{self, Write};

use mantissa_eval::verdict::Verdict;
use mantissa_num::page_command;
use mantissa_plan::figures::PAGE;
use mantissa_plan::recommend::{Answer, Load, Refusal, Row, rate};
use mantissa_quant::Recipe;

use super::asked::{Asked, measures};
use super::at_hand::AtHand;
use crate::output::{Align, Table, bytes, labelled, paragraph};

/// Returns the table of candidates.
pub fn table(answer: &Answer) -> Table {
    let right = Align::Right;
    let mut table = Table::new([
        ("precision", Align::Left),
        ("fits", Align::Left),
        ("weights", right),
        ("total", right),
        ("KV", Align::Left),
        ("decode tok/s", right),
        ("prefill tok/s", right),
        ("waits for", Align::Left),
        ("loss", Align::Left),
    ])
    .optional(["waits for", "weights"]);
    for row in &answer.rows {
        let runs = if row.fits { "yes" } else { "no" };
        let fits = row.refusal_kind().map_or(runs, Refusal::words);
        table.row([
            row.precision.name.to_owned(),
            fits.to_owned(),
            bytes(row.bytes.weights() as u64),
            bytes(row.bytes.total() as u64),
            row.kv.name.to_owned(),
            interval(row.decode.tokens_per_s),
            interval(row.prefill.tokens_per_s),
            row.decode.bound.words().to_owned(),
            loss(row),
        ]);
    }
    table
}

/// Describes the table of splits with the host.
pub fn offload_words(load: &Load) -> String {
    let host = &load.host;
    let assumed = match host.assumed {
        true => ", two channels of DDR5-5600 assumed; --host FIGURES gives others",
        false => "",
    };
    let memory = host.memory.map_or_else(String::new, |memory| format!("{} of ", bytes(memory as u64)));
    format!(
        "What does not fit, split as llama.cpp offloads layers (-ngl, the output layer included) to the GPU, the rest on the host ({memory}{:.1} GB/s{assumed}):",
        host.bandwidth / 1e9
    )
}

/// Returns the table of splits with the host, if there are any.
pub fn offload_table(answer: &Answer) -> Option<Table> {
    let right = Align::Right;
    let mut table = Table::new([
        ("precision", Align::Left),
        ("-ngl", right),
        ("layers", right),
        ("on the GPU", right),
        ("on the host", right),
        ("decode tok/s", right),
        ("host", Align::Left),
    ]);
    for row in &answer.rows {
        let Some(split) = row.offload else { continue };
        table.row([
            row.precision.name.to_owned(),
            split.gpu_layers.to_string(),
            split.layers.to_string(),
            bytes(split.gpu_bytes as u64),
            bytes(split.host_bytes as u64),
            interval(split.tokens_per_s),
            if split.fits { "fits" } else { "too small" }.to_owned(),
        ]);
    }
    (!table.rows().is_empty()).then_some(table)
}

/// Formats an interval of tokens/s by its ends: `21–37`.
pub fn interval([low, _, high]: [f64; 3]) -> String {
    format!("{}–{}", rate(low), rate(high))
}

/// Names the class of the measured loss.
pub fn loss(row: &Row) -> String {
    match row.precision.measured_kl() {
        Some(0.0) => "none".to_owned(),
        Some(kl) => {
            let at_most = if row.precision.is_bounded(None) { "≤ " } else { "" };
            format!("{} ({at_most}{kl:.4})", Verdict::new((kl, 0.0), (0.0, 0.0)).word())
        }
        None => "not measured".to_owned(),
    }
}

/// Writes the plan.
///
/// # Errors
/// As `out`.
pub(super) fn inference(
    asked: &Asked<'_>,
    load: &Load,
    (answer, at_hand): (&Answer, Option<&AtHand>),
    out: &mut dyn Write,
) -> io::Result<()> {
    paragraph(out, 0, &asked.title())?;
    if let (Some(at_hand), Some(place)) = (at_hand, asked.args.subject.model()) {
        labelled(out, "at hand", &at_hand.words(place))?;
    }
    let tokens =
        if load.batch == 1 { "one sequence".to_owned() } else { format!("{} sequences", load.batch) };
    let text = format!(
        "{tokens} of {} tokens: prompts of {}, answers of {}; decoding at {} tokens. All bytes and speeds are predicted; loss: KL in nats/token measured on our models ({}).",
        load.context,
        load.prefill,
        load.decode,
        load.depth(),
        page_command(PAGE)
    );
    paragraph(out, 0, &text)?;
    writeln!(out)?;
    table(answer).write(out)?;
    writeln!(out)?;
    refusals(answer, out)?;
    if let Some(table) = offload_table(answer) {
        paragraph(out, 0, &offload_words(load))?;
        table.write(out)?;
        writeln!(out)?;
    }
    let choice = &answer.recommendation;
    labelled(out, "choose", &headline(answer))?;
    choice.reasons.iter().try_for_each(|reason| labelled(out, "because", reason))?;
    choice.changes.iter().try_for_each(|change| labelled(out, "changes", change))?;
    make(asked, (answer, at_hand), out)?;
    labelled(out, "measure", &measures(asked.args.subject.model()))?;
    match &asked.args.html {
        // Not wrapped, to be copied.
        Some(file) => writeln!(out, "page        {}", file.display()),
        None => Ok(()),
    }
}

/// Writes how the choice is made, and the split with the host.
fn make(
    asked: &Asked<'_>,
    (answer, at_hand): (&Answer, Option<&AtHand>),
    out: &mut dyn Write,
) -> io::Result<()> {
    let choice = &answer.recommendation;
    let model = match (asked.args.subject.model(), at_hand) {
        (_, Some(_)) => SOURCE.to_owned(),
        (Some(model), None) => super::super::next_steps::quoted(model.typed()),
        (None, None) => "MODEL".to_owned(),
    };
    let mut made = |precision: Option<&str>, command: String| match at_hand {
        Some(at_hand) => labelled(out, "make", &at_hand.makes(precision, &command)),
        None => labelled(out, "make", &command),
    };
    if let Some(recipe) = choice.recipe {
        match answer.chosen().and_then(|row| row.loads.elsewhere) {
            Some(other) => {
                let why = format!(
                    "with {}: mantissa does not write what {} loads here ({})",
                    other.tool, other.engine, other.source
                );
                made(None, why)?;
            }
            None => made(choice.precision, makes(&model, recipe, choice.format))?,
        }
    }
    if let Some((row, _)) = answer.split()
        && let Some(recipe) = row.precision.recipe
    {
        made(Some(row.precision.name), makes(&model, recipe, None))?;
    }
    Ok(())
}

/// Stands for the unquantized model in a command.
const SOURCE: &str = "SOURCE";

/// Returns the command that makes the choice. The recipe finds its format, unless several hold it.
fn makes(model: &str, recipe: &str, format: Option<&str>) -> String {
    let named = format.filter(|format| !["compressed-tensors", "gguf", "bitsandbytes"].contains(format));
    let format = named.map_or_else(String::new, |format| format!(" --format {format}"));
    let calibrated = Recipe::load(recipe).is_ok_and(|recipe| recipe.needs_calibration());
    let text = if calibrated { " --calibration default" } else { "" };
    format!("mantissa quantize {model} --recipe {recipe}{format}{text}")
}

/// Names the choice with its engines and the precision of each phase.
pub fn headline(answer: &Answer) -> String {
    let choice = &answer.recommendation;
    let Some(name) = choice.precision else {
        let split = answer.split().map_or_else(String::new, |(row, split)| {
            let (name, layers) = (row.precision.name, split.gpu_layers);
            format!(" the GPU alone; split with the host: {name}, -ngl {layers}")
        });
        return format!("nothing fits{split}");
    };
    let kv = choice.kv.unwrap_or("f16");
    let engines =
        answer.chosen().map(|row| row.loads.engines.join(", ")).filter(|engines| !engines.is_empty());
    let engines = engines.map_or_else(String::new, |engines| format!("; loads in {engines}"));
    let phases = match (choice.prefill, choice.decode) {
        (Some(prefill), Some(decode)) if prefill != decode => {
            format!("; by phase: prompts {prefill}, decoding {decode}")
        }
        _ => String::new(),
    };
    format!("{name}, KV cache in {kv}{engines}{phases}")
}

/// Names what is not run as named, each reason once with its precisions.
fn refusals(answer: &Answer, out: &mut dyn Write) -> io::Result<()> {
    let mut lines: Vec<(Refusal, String, Vec<&str>)> = Vec::new();
    for row in &answer.rows {
        let (Some(kind), Some(why)) = (row.refusal_kind(), row.refusal()) else { continue };
        match lines.iter_mut().find(|(known, words, _)| *known == kind && *words == why) {
            Some((.., names)) => names.push(row.precision.name),
            None => lines.push((kind, why, vec![row.precision.name])),
        }
    }
    lines.iter().try_for_each(|(kind, why, names)| {
        labelled(out, "not offered", &format!("{} ({}): {why}", names.join(", "), kind.words()))
    })
}
