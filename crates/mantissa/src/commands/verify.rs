//! `mantissa verify`: checks a model with a reader that shares no code with the writer.

use std::fmt::Write as _;
use std::io::{self, Write};

use anyhow::Result;
use mantissa_jobs::{Job, Verify, require_verified};
use mantissa_quant::verify::Verification;
use mantissa_store::Paths;

use super::execute::Execute;
use super::model::ModelPath;
use super::text::TextArgs;
use crate::context::Context;
use crate::help::Group;
use crate::output::{counted, paragraph};

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

impl Args {
    /// Returns the job.
    fn job(&self) -> Verify {
        Verify {
            model: self.model.job_path().clone(),
            reference: self.reference.as_ref().map(|model| model.job_path().clone()),
            key: self.key.clone(),
            text: self.text.value(),
        }
    }
}

impl Execute for Args {
    const GROUP: Group = Group::Measure;

    fn paths(&self, paths: &mut Paths) -> Result<()> {
        *paths = self.job().paths();
        Ok(())
    }

    /// # Errors
    /// Unreadable input; a text other than that of the recorded figures; [`GateFailed`](crate::error::GateFailed) if a
    /// check fails.
    fn run(&self, context: &Context) -> Result<()> {
        let found = self.job().run(context)?;
        context.report(&found, |out| human(out, &found))?;
        Ok(require_verified(&found)?)
    }
}

/// Prints the result of a verification.
///
/// # Errors
/// As `out`.
pub fn human(out: &mut dyn Write, v: &Verification) -> io::Result<()> {
    let verdict = if v.ok { "verified" } else { "NOT verified" };
    let counted = |n: usize, of: &str| counted(n as u64, of);
    let (files, weights) = (counted(v.files, "file"), counted(v.weights, "weight"));
    let mut text = format!("{verdict}: {files} by hash, {weights} decoded twice");
    if v.source_files > 0 {
        let _ = write!(text, ", {} by hash", counted(v.source_files, "source file"));
    }
    if v.compared > 0 {
        let _ = write!(text, ", {} compared with the source", counted(v.compared, "tensor"));
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
