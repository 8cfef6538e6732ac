//! `mantissa report`: writes one self-contained HTML page for a training run or a quantized model.

mod artifact;
mod experts;
mod gemms;
mod health;
mod launch;
mod map;
mod origin;
pub mod texts;
mod training;

use std::path::{Path, PathBuf};

use anyhow::Result;
use mantissa_jobs::memory::PROCESS;
use mantissa_jobs::run_files;
use mantissa_quant::{Quality, quality_path};
use mantissa_store::Paths;
use serde::Serialize;

use self::texts::name;
use super::execute::Execute;
use super::model::{self, ModelPath};
use super::next_steps::quoted;
use crate::context::Context;
use crate::error::BadInput;
use crate::help::Group;
use crate::output::labelled;
use crate::report::Page;
use mantissa_jobs::embedded;

/// Write an HTML page for a training run or a quantized model
///
/// The page loads nothing else and works without scripts. For a quantized model it begins with the size before
/// and after and the KL from the source in a plain word, then the same prompt continued by both models (with
/// --reference), the commands that load it, and the error and bits of every layer. For a training run it begins
/// with the outcome and the main curves; those of each tensor are folded away. It can be made while a run is in
/// progress.
#[derive(clap::Args)]
#[command(after_help = "EXAMPLES
  mantissa report demo-int4
  mantissa report demo-int4 --prompt 'Once upon a time' --out page.html
  mantissa report runs/first --out first.html")]
pub struct Args {
    /// Training run, or quantized folder or .gguf file
    run: PathBuf,
    /// HTML file [default: in the run, or beside the model]
    ///
    /// report.html in a run; NAME.report.html next to a quantized model. Replaces an earlier page of the same run or
    /// model that was not edited.
    #[arg(long, value_name = "FILE")]
    out: Option<PathBuf>,
    /// Source model, to continue the same prompt by both
    ///
    /// Not needed for models made from demo.
    #[arg(long, value_name = "SOURCE")]
    reference: Option<ModelPath>,
    /// Prompt that both models continue (repeatable)
    ///
    /// They continue greedily. [default: Once upon a time]
    #[arg(short, long = "prompt", value_name = "TEXT")]
    prompts: Vec<String>,
    /// New tokens for each prompt
    ///
    /// At most.
    #[arg(long, value_name = "N", default_value_t = 64)]
    new_tokens: u16,
}

#[derive(Serialize)]
struct Done {
    report: PathBuf,
    kind: &'static str,
    bytes: u64,
    /// Labels and texts of the lines that say the result.
    #[serde(skip)]
    lines: Vec<(&'static str, String)>,
}

impl Execute for Args {
    const GROUP: Group = Group::Measure;

    fn paths(&self, paths: &mut Paths) -> Result<()> {
        if self.run.is_file() {
            paths.watch(&self.run);
        }
        paths.watch(quality_path(&self.run));
        for name in [run_files::LOG, run_files::TELEMETRY, run_files::RUN, run_files::CONFIG] {
            paths.watch(self.run.join(name));
        }
        self.reference.iter().for_each(|model| model.paths(paths));
        paths.write_about("--out", place(self), &self.run);
        Ok(())
    }

    /// # Errors
    /// A folder without anything to report, malformed files, I/O; a source model that cannot be run.
    fn run(&self, context: &Context) -> Result<()> {
        context.require_memory("report", needed(&self.run))?;
        let (kind, page, lines) = if is_training(&self.run) {
            only_for_models(self)?;
            let (page, outcome) = training::page(&self.run)?;
            ("training", page, vec![("run", outcome)])
        } else if let Some(quality) = Quality::read(&self.run)? {
            ("artifact", artifact_page(self, &quality, context)?, artifact::lines(&quality))
        } else {
            return Err(nothing_at(&self.run).into());
        };
        let out = place(self);
        page.write(&context.output(&out)?)?;
        let done = Done { report: out, kind, bytes: page.html().len() as u64, lines };
        context.report(&done, |out| {
            done.lines.iter().try_for_each(|(label, text)| labelled(out, label, text))?;
            // Not wrapped, to be copied.
            writeln!(out, "report      {}", done.report.display())
        })
    }
}

/// Makes the error of a path that holds nothing to report.
fn nothing_at(path: &Path) -> BadInput {
    let found = match path.exists() {
        true => format!("neither {} nor {}", run_files::LOG, quality_path(path).display()),
        false => "no such file or folder".to_owned(),
    };
    BadInput::new(path.display().to_string(), found, "the folder of a training run, or a quantized model")
}

/// Refuses options that a training run has no use for.
fn only_for_models(args: &Args) -> Result<()> {
    let given = if args.reference.is_some() {
        "--reference"
    } else if !args.prompts.is_empty() {
        "--prompt"
    } else {
        return Ok(());
    };
    let what = format!("{}: {given}", args.run.display());
    Err(BadInput::new(what, "a training run", "a quantized model; fix: leave out the option").into())
}

/// Makes the page of a quantized model.
fn artifact_page(args: &Args, quality: &Quality, context: &Context) -> Result<Page> {
    let source = match &args.reference {
        Some(reference) => {
            let faults = quality.faults_of_source(&model::open_quietly(reference)?)?;
            if let Some(fault) = faults.first() {
                let named = format!("--reference {}", reference.named().display());
                let expected = format!("the model that {} was quantized from", args.run.display());
                return Err(BadInput::new(named, format!("another one ({fault})"), expected).into());
            }
            Some(reference.to_path_buf())
        }
        None if embedded::is_source(&quality.hashes.source) => Some(embedded::folder()?),
        None => None,
    };
    let texts = match source {
        Some(source) => {
            let prompts = texts::Prompts::new(&args.prompts, args.new_tokens.into());
            Ok(texts::pairs(&source, &args.run, &prompts, context)?)
        }
        None if !args.prompts.is_empty() => {
            let what = format!("{}: --prompt", args.run.display());
            return Err(BadInput::new(what, "no source model", "--reference SOURCE with it").into());
        }
        None => Err(format!("mantissa report {} --reference SOURCE", quoted(&args.run))),
    };
    let extras = artifact::Extras {
        source: origin::source(&args.run, quality, args.reference.as_ref()),
        reference: origin::reference(quality, args.reference.as_ref()),
        launch: launch::Launch::of(&args.run, context),
        written: origin::written(&args.run),
        files: origin::files(&args.run, quality),
        texts,
    };
    Ok(artifact::page(&args.run, quality, &extras))
}

/// True if the folder is a training run.
fn is_training(run: &Path) -> bool {
    run.join(run_files::LOG).is_file()
}

/// Returns the path of the page.
fn place(args: &Args) -> PathBuf {
    match &args.out {
        Some(out) => out.clone(),
        None if is_training(&args.run) => args.run.join("report.html"),
        None => beside(&args.run),
    }
}

/// Bytes of memory per byte of a log: numbers become points of curves, then text.
const OF_LOG: u64 = 6;

/// Bytes of memory per byte of JSON parsed as a tree.
const OF_JSON: u64 = 24;

/// Predicts the peak memory, without models that are run.
fn needed(run: &Path) -> u64 {
    let size = |path: &Path| std::fs::metadata(path).map_or(0, |file| file.len());
    let logs: u64 = [run_files::LOG, run_files::TELEMETRY].iter().map(|name| size(&run.join(name))).sum();
    let json = size(&run.join(run_files::RUN)).saturating_add(size(&quality_path(run)));
    PROCESS.saturating_add(logs.saturating_mul(OF_LOG)).saturating_add(json.saturating_mul(OF_JSON))
}

/// Returns a path next to the model, whose own folder holds only files listed in its manifest.
fn beside(model: &Path) -> PathBuf {
    let path = model.canonicalize().unwrap_or_else(|_| model.to_owned());
    path.with_file_name(format!("{}.report.html", name(model)))
}
