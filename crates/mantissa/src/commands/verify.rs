//! `mantissa verify`: reopens a model with a reader that shares nothing with the writer.

use std::io::{self, Write};
use std::ops::ControlFlow;

use anyhow::Result;
use mantissa_quant::verify::{Against, Verification, verify_against};

use super::model::{self, ModelPath, Use};
use super::text::TextArgs;
use crate::app::Context;
use crate::error::GateFailed;
use crate::progress::Unit;
use mantissa_store::Paths;

/// Reopen a model with the independent reader: hashes of the manifest and of quality.json, every quantized weight decoded
/// twice, logits; with --reference every weight against its source within the bound of its scheme, and the source's hashes;
/// with the text that the recorded figures were measured on, the figures. Exit 1 where something does not hold. Of a GGUF
/// file also the container; its manifest and quality.json lie beside it.
#[derive(clap::Args)]
#[command(after_help = "EXAMPLES
  mantissa verify demo-int4 --reference demo
  mantissa verify path/to/quantized
  mantissa verify path/to/quantized --reference path/to/model --json
  mantissa verify path/to/quantized --reference path/to/model --text story.txt
  mantissa verify path/to/model-q4_0.gguf --reference path/to/model")]
pub struct Args {
    /// The model folder or GGUF file to check
    model: ModelPath,
    /// The dense model that it was made from
    #[arg(long, value_name = "SOURCE")]
    reference: Option<ModelPath>,
    #[command(flatten)]
    text: TextArgs,
}

/// Adds what the command reads and writes.
pub fn paths(args: &Args, paths: &mut Paths) {
    args.model.paths(paths);
    args.text.paths(paths);
    args.reference.iter().for_each(|model| model.paths(paths));
}

/// Runs the command.
///
/// # Errors
/// What cannot be read at all, and a text that is not the one of the recorded figures; [`GateFailed`] where something does
/// not hold.
pub fn run(args: &Args, context: &Context) -> Result<()> {
    context.warn_all(&model::interrupted(&args.model).into_iter().collect::<Vec<_>>())?;
    let sequences = args.text.sequences(&args.model, false)?;
    if let Some(sequences) = &sequences {
        let models: Vec<_> = [Some(&*args.model), args.reference.as_deref()].into_iter().flatten().collect();
        model::require_memory(&models, Use::evaluation(sequences, context.threads), context)?;
    }
    let reference = args.reference.as_deref();
    let against = Against { reference, recorded: true, text: sequences.as_deref() };
    let tokens = sequences.iter().flatten().map(|s| s.tokens.len() as u64).sum();
    let progress = context.progress(tokens, Unit::Items("tokens"));
    let found = verify_against(&args.model, &against, context.threads, &|done| {
        progress.set(done);
        ControlFlow::Continue(())
    })?;
    progress.finish();
    context.report(&found, |out| human(out, &found))?;
    require(&found)
}

/// Fails where a verification has found a fault.
///
/// # Errors
/// [`GateFailed`] with the faults.
pub fn require(found: &Verification) -> Result<()> {
    if found.ok {
        return Ok(());
    }
    Err(GateFailed::new(format!("verify: {}", found.faults.join("; "))).into())
}

/// What a verification found, for people.
///
/// # Errors
/// As `out`.
pub fn human(out: &mut dyn Write, v: &Verification) -> io::Result<()> {
    let verdict = if v.ok { "verified" } else { "NOT verified" };
    write!(out, "{verdict}: {} files by hash, {} weights decoded twice", v.files, v.weights)?;
    if v.source_files > 0 {
        write!(out, ", {} files of the source by hash", v.source_files)?;
    }
    if v.compared > 0 {
        write!(out, ", {} tensors against the source", v.compared)?;
    }
    if let Some(ratio) = v.max_error_in_bounds {
        write!(out, " (largest error {ratio:.3} of the bound)")?;
    }
    if let Some(difference) = v.max_logit_difference {
        write!(out, ", logits within {difference:.1e}")?;
    }
    writeln!(out)?;
    if let Some(figures) = &v.figures {
        writeln!(out, "measured again on {}:", figures.text.name)?;
        super::outcome::human_figures(out, figures)?;
    }
    v.faults.iter().try_for_each(|fault| writeln!(out, "fault: {fault}"))?;
    v.notes.iter().try_for_each(|note| writeln!(out, "note: {note}"))
}
