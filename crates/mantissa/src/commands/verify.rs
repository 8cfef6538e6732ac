//! `mantissa verify`: checks a model with a reader that shares no code with the writer.

use std::fmt::Write as _;
use std::io::{self, Write};
use std::ops::ControlFlow;

use anyhow::Result;
use mantissa_quant::verify::{Against, Verification, verify_against, verify_bytes};

use super::execute::Execute;
use super::loaded_models::{self, Use};
use super::model::{self, ModelPath};
use super::signature;
use super::text::TextArgs;
use crate::context::Context;
use crate::error::GateFailed;
use crate::help::Group;
use crate::output::paragraph;
use crate::progress::Unit;
use mantissa_store::Paths;

/// Check a model with an independent reader
///
/// Checks the hashes of the manifest and quality.json, decodes every quantized weight with two decoders, and
/// compares logits; for a GGUF file also the file structure. With --reference, every weight is compared with
/// its source within the error bound of its scheme, and the source's hashes are checked. With the text of the
/// recorded quality figures, these are measured again. Exit code 1 if a check fails.
///
/// A file that differs from the manifest is a fault. A missing manifest, or a file not listed in it, is a
/// note; with --strict both are faults, except for hidden files such as .gitattributes.
#[derive(clap::Args)]
#[command(after_help = "EXAMPLES
  mantissa verify demo-int4 --reference demo
  mantissa verify path/to/quantized --strict
  mantissa verify path/to/quantized --key minisign.pub
  mantissa verify path/to/quantized --reference path/to/model \\
      --text story.txt --json
  mantissa verify path/to/model-q4_0.gguf --reference path/to/model")]
pub struct Args {
    /// Model folder or .gguf file to check
    model: ModelPath,
    /// Unquantized source model
    #[arg(long, value_name = "SOURCE")]
    reference: Option<ModelPath>,
    /// Public key that must have signed quality.json
    ///
    /// A file of minisign, or the key in base64. The signature is quality.json.minisig, as `minisign -Sm quality.json`
    /// makes it. Exit code 1 without a valid one.
    #[arg(long, value_name = "KEY")]
    key: Option<String>,
    #[command(flatten)]
    text: TextArgs,
}

impl Execute for Args {
    const GROUP: Group = Group::Measure;

    fn paths(&self, paths: &mut Paths) -> Result<()> {
        self.model.paths(paths);
        self.text.paths(paths);
        self.key.iter().filter(|key| signature::is_file(key)).for_each(|key| paths.read(key));
        self.reference.iter().for_each(|model| model.paths(paths));
        Ok(())
    }

    /// # Errors
    /// Unreadable input; a text other than that of the recorded figures; [`GateFailed`] if a check fails.
    fn run(&self, context: &Context) -> Result<()> {
        let sequences = self.text.sequences(&self.model, false, context)?;
        if let Some(needs) = needed(self, context) {
            context.require_memory("verify", needs)?;
        }
        if let Some(sequences) = &sequences {
            let models = [Some(&self.model), self.reference.as_ref()].into_iter().flatten();
            let models: Vec<_> = models.map(|model| model.location()).collect();
            loaded_models::require_memory(&models, Use::evaluation(sequences, context.threads), context)?;
        }
        let reference = self.reference.as_ref().map(|model| model.location());
        let against = Against { reference, recorded: true, text: sequences.as_deref() };
        let tokens = sequences.iter().flatten().map(|s| s.tokens.len() as u64).sum();
        let progress = context.progress(tokens, Unit::Items("tokens"));
        let found = verify_against(&self.model, &against, context.threads, &|done| {
            progress.set(done);
            ControlFlow::Continue(())
        })?;
        progress.finish();
        let found = match &self.key {
            Some(key) => signature::checked(found, &self.model, key)?,
            None => found,
        };
        let found = if context.is_strict() { found.strictly() } else { found };
        context.report(&found, |out| human(out, &found))?;
        require(&found)
    }
}

/// Predicts the peak memory; `None` if the models cannot be opened, which the verification reports.
fn needed(args: &Args, context: &Context) -> Option<u64> {
    let files = model::open_quietly(&args.model).ok()?;
    let source = args.reference.as_ref().map(|path| model::open_quietly(path)).transpose().ok()?;
    verify_bytes(&files, source.as_ref(), context.threads).ok()
}

/// Fails if a verification found a fault.
///
/// # Errors
/// [`GateFailed`] with the faults.
pub fn require(found: &Verification) -> Result<()> {
    if found.ok {
        return Ok(());
    }
    Err(GateFailed::new(format!("verify: {}", found.faults.join("; "))).into())
}

/// Prints the result of a verification.
///
/// # Errors
/// As `out`.
pub fn human(out: &mut dyn Write, v: &Verification) -> io::Result<()> {
    let verdict = if v.ok { "verified" } else { "NOT verified" };
    let mut text = format!("{verdict}: {} files by hash, {} weights decoded twice", v.files, v.weights);
    if v.source_files > 0 {
        let _ = write!(text, ", {} source files by hash", v.source_files);
    }
    if v.compared > 0 {
        let _ = write!(text, ", {} tensors compared with the source", v.compared);
    }
    // Only weights that were rounded to nearest keep within that bound; a fault has a line of its own.
    if let Some(ratio) = v.max_error_in_bounds.filter(|ratio| *ratio <= 1.0) {
        let _ = write!(text, " (largest error {ratio:.3} of RTN's bound)");
    }
    match v.max_logit_difference {
        Some(0.0) => text += ", same logits by both readers",
        Some(difference) => {
            let _ = write!(text, ", logits of both readers within {difference:.1e}");
        }
        None => {}
    }
    if let Some(comment) = &v.signed {
        let _ = write!(text, ", quality.json signed ({comment})");
    }
    paragraph(out, 2, &text)?;
    if let Some(figures) = &v.figures {
        writeln!(out, "measured again on {}:", figures.text.name)?;
        super::outcome::human_figures(out, figures)?;
    }
    v.faults.iter().try_for_each(|fault| paragraph(out, 2, &format!("fault: {fault}")))?;
    v.notes.iter().try_for_each(|note| paragraph(out, 2, &format!("note: {note}")))
}
