//! `mantissa verify`: reopens a model with a reader that shares nothing with the writer.

use std::io::{self, Write};

use anyhow::Result;
use mantissa_quant::verify::{Verification, verify};

use super::model::ModelPath;
use crate::app::Context;
use crate::error::GateFailed;

/// Reopen a model with the independent reader: hashes of the manifest, every quantized weight decoded twice, logits; and,
/// with --reference, every weight against its source within the bound of its scheme. Exit 1 where something does not hold.
/// Of a GGUF file also the container; its manifest lies beside it.
#[derive(clap::Args)]
#[command(after_help = "EXAMPLES
  mantissa verify path/to/quantized
  mantissa verify path/to/quantized --reference path/to/model --json
  mantissa verify path/to/model-q4_0.gguf --reference path/to/model")]
pub struct Args {
    /// The model folder or GGUF file to check
    model: ModelPath,
    /// The dense model that it was made from
    #[arg(long, value_name = "SOURCE")]
    reference: Option<ModelPath>,
}

/// Runs the command.
///
/// # Errors
/// What cannot be read at all; [`GateFailed`] where something does not hold.
pub fn run(args: &Args, context: &Context) -> Result<()> {
    let found = verify(&args.model, args.reference.as_deref(), context.threads)?;
    context.report(&found, |out| human(out, &found))?;
    if found.ok {
        Ok(())
    } else {
        Err(GateFailed::new(format!("verify: {}", found.faults.join("; "))).into())
    }
}

/// What a verification found, for people.
///
/// # Errors
/// As `out`.
pub fn human(out: &mut dyn Write, v: &Verification) -> io::Result<()> {
    let verdict = if v.ok { "verified" } else { "NOT verified" };
    write!(out, "{verdict}: {} files by hash, {} weights decoded twice", v.files, v.weights)?;
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
    v.faults.iter().try_for_each(|fault| writeln!(out, "fault: {fault}"))?;
    v.notes.iter().try_for_each(|note| writeln!(out, "note: {note}"))
}
