//! `mantissa rebuild`: makes the weights of an artifact again from its source and its `quality.json`.

use std::io::{self, Write};
use std::path::{Path, PathBuf};
use std::sync::OnceLock;

use anyhow::Result;
use mantissa_jobs::{Job, Rebuild, RebuildArguments, RebuiltFile};
use mantissa_store::Paths;
use serde::Serialize;

use super::execute::Execute;
use super::model::ModelPath;
use crate::context::Context;
use crate::help::Group;
use crate::output::labelled;

/// Make the weights of an artifact again from its source
///
/// Runs the command that quality.json records, on --source, and compares the weight files with the recorded SHA-256.
/// Files that the command read, such as a calibration text, are taken from --file, the folder of quality.json or the
/// working folder, by their names; built-in texts and recipes are in the program, and recipe files in quality.json.
/// Exit code 1 if a file differs; the output is kept.
#[derive(clap::Args)]
#[command(after_help = "EXAMPLES
  mantissa rebuild demo-int4/quality.json --source demo --out demo-again
  mantissa rebuild model-gptq --source path/to/model --out model-again \\
      --file calibration.txt=texts/calibration.txt")]
pub struct Args {
    /// quality.json, or the artifact that has it
    quality: PathBuf,
    /// Model that was quantized
    ///
    /// Its files must have the recorded SHA-256.
    #[arg(long, value_name = "MODEL", help_heading = "Input")]
    source: ModelPath,
    /// Output folder or .gguf file
    #[arg(long, value_name = "PATH", help_heading = "Output")]
    out: PathBuf,
    /// Where a recorded file is, such as c.txt=path/c.txt
    #[arg(long, value_name = "NAME=PATH", value_parser = named_file, help_heading = "Input")]
    file: Vec<(String, PathBuf)>,
    /// Job, once the record is read and its files are found.
    #[arg(skip)]
    resolved: OnceLock<Rebuild>,
}

/// Parses `NAME=PATH`.
fn named_file(text: &str) -> Result<(String, PathBuf), String> {
    let parts = text.split_once('=').filter(|(name, path)| !name.is_empty() && !path.is_empty());
    let (name, path) = parts.ok_or_else(|| format!("expected NAME=PATH, got \"{text}\""))?;
    Ok((name.to_owned(), PathBuf::from(path)))
}

impl Args {
    /// Reads the record and finds its files; returns what an earlier call found.
    fn resolved(&self) -> Result<&Rebuild> {
        if let Some(found) = self.resolved.get() {
            return Ok(found);
        }
        let arguments = RebuildArguments {
            quality: self.quality.clone(),
            source: self.source.job_path().clone(),
            out: self.out.clone(),
            files: self.file.clone(),
        };
        let made = arguments.resolve()?;
        Ok(self.resolved.get_or_init(|| made))
    }
}

impl Execute for Args {
    const GROUP: Group = Group::Quantize;

    /// # Errors
    /// No record; a file of the command that is not found.
    fn paths(&self, paths: &mut Paths) -> Result<()> {
        *paths = self.resolved()?.paths();
        Ok(())
    }

    /// # Errors
    /// A source with other files than the recorded ones; errors of the recorded command;
    /// [`GateFailed`](crate::error::GateFailed) if a weight file differs.
    fn run(&self, context: &Context) -> Result<()> {
        let found = self.resolved()?.run(context)?;
        let report = Report {
            quality: &self.quality,
            source: self.source.named(),
            output: &self.out,
            identical: found.is_identical(),
            files: &found.files,
        };
        context.report(&report, |out| human(out, &report))?;
        Ok(found.require_identical()?)
    }
}

#[derive(Serialize)]
struct Report<'a> {
    quality: &'a Path,
    source: &'a Path,
    output: &'a Path,
    /// True if all weight files are the recorded ones.
    identical: bool,
    files: &'a [RebuiltFile],
}

fn human(out: &mut dyn Write, report: &Report<'_>) -> io::Result<()> {
    for file in report.files {
        let same = if file.is_identical() { "identical" } else { "differs" };
        let digest = file.got.as_deref().unwrap_or("missing");
        labelled(out, same, &format!("{}  {digest}", file.file))?;
    }
    labelled(out, "output", &report.output.display().to_string())?;
    let verdict = if report.identical { "The bytes are the recorded ones." } else { "The bytes differ." };
    writeln!(out, "{verdict}")
}
