//! `mantissa report`: writes one self-contained HTML page for a training run, several of them, or a quantized model.

mod artifact;
mod comparison;
mod experts;
mod gemms;
mod health;
mod launch;
mod map;
mod origin;
pub mod texts;
mod training;

use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use anyhow::Result;
use mantissa_jobs::memory::PROCESS;
use mantissa_jobs::run_files::{self, RunState};
use mantissa_quant::{Quality, quality_path};
use mantissa_store::{Output, Paths, writer_of};
use serde::Serialize;

use self::comparison::Comparison;
use self::texts::name;
use self::training::RunPage;
use super::execute::Execute;
use super::model::{self, ModelPath};
use super::next_steps::quoted;
use crate::context::Context;
use crate::error::BadInput;
use crate::help::Group;
use crate::output::labelled;
use crate::report::Page;
use mantissa_jobs::embedded;

/// Write an HTML page for training runs or a quantized model
///
/// The page loads nothing else and works without scripts. For a quantized model it begins with the size before
/// and after and the KL from the source in a plain word, then the same prompt continued by both models (with
/// --reference), the commands that load it, and the error and bits of every layer. For a training run it begins
/// with the outcome and the main curves; those of each tensor are folded away. Several runs are compared on one page: their
/// curves over each other, the settings that differ, final figures. The page of a run in progress loads itself again;
/// --follow keeps it up to date until the run ends.
#[derive(clap::Args)]
#[command(after_help = "EXAMPLES
  mantissa report demo-int4
  mantissa report demo-int4 --prompt 'Once upon a time' --out page.html
  mantissa report runs/first --out first.html
  mantissa report runs/first --follow
  mantissa report runs/bf16 runs/fp8 runs/nvfp4 --out policies.html")]
pub struct Args {
    /// Training runs, or a quantized folder or .gguf file
    #[arg(value_name = "RUN", required = true)]
    runs: Vec<PathBuf>,
    /// HTML file [default: in the run, or beside the model]
    ///
    /// report.html in a run; NAME.report.html next to a quantized model; comparison.report.html next to the first of
    /// several runs. Replaces an earlier page of the same run or model, or of several runs, that was not edited.
    #[arg(long, value_name = "FILE", value_parser = super::parse::page_path())]
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
    #[arg(long, alias = "max-tokens", value_name = "N", default_value_t = 64)]
    new_tokens: u16,
    /// Keep the page of a run in progress up to date
    ///
    /// Writes it every 10 seconds until the run ends, or a signal ends this command.
    #[arg(long)]
    follow: bool,
}

#[derive(Serialize)]
struct Done {
    report: PathBuf,
    kind: &'static str,
    bytes: u64,
    /// State of a training run.
    #[serde(skip_serializing_if = "Option::is_none")]
    state: Option<&'static str>,
    #[serde(flatten, skip_serializing_if = "Option::is_none")]
    comparison: Option<Comparison>,
    /// Labels and texts of the lines that say the result.
    #[serde(skip)]
    lines: Vec<(&'static str, String)>,
}

impl Execute for Args {
    const GROUP: Group = Group::Measure;

    /// # Errors
    /// Several paths that are not all training runs: what they lack comes before what a page may replace.
    fn paths(&self, paths: &mut Paths) -> Result<()> {
        if self.runs.len() > 1 {
            require_runs(&self.runs)?;
        }
        for run in &self.runs {
            if run.is_file() {
                paths.watch(run);
            }
            paths.watch(quality_path(run));
            for name in [run_files::LOG, run_files::TELEMETRY, run_files::RUN, run_files::CONFIG] {
                paths.watch(run.join(name));
            }
        }
        self.reference.iter().for_each(|model| model.paths(paths));
        match self.runs.as_slice() {
            [run] => paths.write_about("--out", place(self), run),
            // As the page of a run, it replaces any earlier one: a run more or less is the same comparison.
            _ => paths.write_about("--out", place(self), "mantissa report of several runs"),
        }
        Ok(())
    }

    /// # Errors
    /// A folder without anything to report, malformed files, I/O; a source model that cannot be run.
    fn run(&self, context: &Context) -> Result<()> {
        let needs = self.runs.iter().map(|run| needed(run)).fold(0, u64::saturating_add);
        context.require_memory("report", needs)?;
        let [run] = self.runs.as_slice() else { return compare(self, context) };
        let out = place(self);
        let (kind, page, lines, state) = if is_training(run) {
            only_for_models(self)?;
            let mut found = training::page(run)?;
            if self.follow {
                found = follow(run, found, &context.output(&out)?, context)?;
            }
            ("training", found.page, vec![("run", found.outcome)], Some(found.state.word()))
        } else if self.follow {
            return Err(
                BadInput::new("--follow", run.display().to_string(), "the folder of a training run").into()
            );
        } else if let Some(quality) = Quality::read(run)? {
            ("artifact", artifact_page(self, run, &quality, context)?, artifact::lines(&quality), None)
        } else {
            return Err(nothing_at(run).into());
        };
        page.write(&context.output(&out)?)?;
        let bytes = page.html().len() as u64;
        let done = Done { report: out, kind, bytes, state, comparison: None, lines };
        context.report(&done, |out| {
            done.lines.iter().try_for_each(|(label, text)| labelled(out, label, text))?;
            // Not wrapped, to be copied.
            writeln!(out, "report      {}", done.report.display())
        })
    }
}

/// Time between two looks for a signal while a run is followed.
const LOOK: Duration = Duration::from_millis(500);

/// Writes the page of a run again and again until the run ends or the command is to stop; returns the last one.
fn follow(run: &Path, first: RunPage, output: &Output, context: &Context) -> Result<RunPage> {
    context.until_stopped(|stops| {
        let mut found = first;
        while matches!(found.state, RunState::Living(_)) && !stops() {
            found.page.write(output)?;
            let until = Instant::now() + Duration::from_secs(training::RELOAD.into());
            while Instant::now() < until && !stops() && writer_of(run)?.is_some() {
                std::thread::sleep(LOOK);
            }
            found = training::page(run)?;
        }
        Ok(found)
    })
}

/// Compares several runs.
fn compare(args: &Args, context: &Context) -> Result<()> {
    only_for_models(args)?;
    if args.follow {
        return Err(BadInput::new("--follow", format!("{} runs", args.runs.len()), "one run").into());
    }
    let (found, page) = comparison::compare(&args.runs)?;
    let out = place(args);
    page.write(&context.output(&out)?)?;
    let bytes = page.html().len() as u64;
    let done = Done {
        report: out,
        kind: "comparison",
        bytes,
        state: None,
        comparison: Some(found),
        lines: Vec::new(),
    };
    context.report(&done, |out| {
        let Some(found) = &done.comparison else { return Ok(()) };
        comparison::figures(found).write(out)?;
        writeln!(out)?;
        if let Some(settings) = comparison::settings(found) {
            settings.write(out)?;
            writeln!(out)?;
        }
        found.summary.iter().try_for_each(|line| labelled(out, "compared", line))?;
        writeln!(out, "report      {}", done.report.display())
    })
}

/// Refuses what cannot be compared.
///
/// # Errors
/// Too many runs; a path that is no training run.
fn require_runs(runs: &[PathBuf]) -> Result<()> {
    if runs.len() > comparison::MOST {
        let found = format!("{} runs", runs.len());
        return Err(BadInput::new("RUN", found, format!("at most {} to compare", comparison::MOST)).into());
    }
    let Some(other) = runs.iter().find(|run| !is_training(run)) else { return Ok(()) };
    if let [first, ..] = runs
        && runs.iter().all(|run| quality_path(run).is_file())
    {
        let found = format!("{} quantized models", runs.len());
        let error = BadInput::new(first.display().to_string(), found, "training runs, or one model");
        return Err(error.with_fix(comparison_of(runs)).into());
    }
    let found = match other.exists() {
        true => format!("no {}", run_files::LOG),
        false => "no such folder".to_owned(),
    };
    let expected = "the folder of a training run, beside other runs";
    let error = BadInput::new(other.display().to_string(), found, expected);
    Err(match runs.iter().all(|run| is_model(run)) {
        true => error.with_fix(comparison_of(runs)),
        false => error,
    }
    .into())
}

/// Returns the command that compares `models` on a page.
fn comparison_of(models: &[PathBuf]) -> String {
    let models: Vec<String> = models.iter().map(|model| quoted(model)).collect();
    format!("mantissa compare SOURCE {} --html candidates.html", models.join(" "))
}

/// True if the path is a model.
fn is_model(path: &Path) -> bool {
    let gguf = path.extension().is_some_and(|extension| extension.eq_ignore_ascii_case("gguf"));
    (gguf && path.is_file()) || path.join("config.json").is_file()
}

/// Makes the error of a path that holds nothing to report.
fn nothing_at(path: &Path) -> BadInput {
    let inside = runs_inside(path);
    if !inside.is_empty() {
        let found = format!("a folder with {} of them", inside.len());
        let named: Vec<String> = inside.iter().take(comparison::MOST).map(|run| quoted(run)).collect();
        return BadInput::new(path.display().to_string(), found, "the folder of a training run")
            .with_fix(format!("mantissa report {}", named.join(" ")));
    }
    let found = match path.exists() {
        true => format!("neither {} nor {}", run_files::LOG, quality_path(path).display()),
        false => "no such file or folder".to_owned(),
    };
    let expected = "the folder of a training run, or a quantized model";
    let error = BadInput::new(path.display().to_string(), found, expected);
    let is_json = path.extension().is_some_and(|extension| extension.eq_ignore_ascii_case("json"));
    match (path.exists(), is_json, is_model(path)) {
        (true, true, _) => error.with_fix("--html page.html with the command that wrote the JSON"),
        (true, _, true) => error.with_fix(comparison_of(&[path.to_owned()])),
        _ => error,
    }
}

/// Returns the training runs in the folder at `path`, in the order of their names.
fn runs_inside(path: &Path) -> Vec<PathBuf> {
    let entries = std::fs::read_dir(path).into_iter().flatten().flatten();
    let mut runs: Vec<PathBuf> = entries.map(|entry| entry.path()).filter(|run| is_training(run)).collect();
    runs.sort();
    runs
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
    let run = args.runs.first().map(|run| run.display().to_string()).unwrap_or_default();
    let what = format!("{run}: {given}");
    Err(BadInput::new(what, "a training run", "a quantized model; fix: leave out the option").into())
}

/// Makes the page of a quantized model.
fn artifact_page(args: &Args, run: &Path, quality: &Quality, context: &Context) -> Result<Page> {
    let source = match &args.reference {
        Some(reference) => {
            let faults = quality.faults_of_source(&model::open_quietly(reference)?)?;
            if let Some(fault) = faults.first() {
                let named = format!("--reference {}", reference.named().display());
                let expected = format!("the model that {} was quantized from", run.display());
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
            Ok(texts::pairs(&source, run, &prompts, context)?)
        }
        None if !args.prompts.is_empty() => {
            let what = format!("{}: --prompt", run.display());
            return Err(BadInput::new(what, "no source model", "--reference SOURCE with it").into());
        }
        None => Err(format!("mantissa report {} --reference SOURCE", quoted(run))),
    };
    let extras = artifact::Extras {
        source: origin::source(run, quality, args.reference.as_ref()),
        reference: origin::reference(quality, args.reference.as_ref()),
        launch: launch::Launch::of(run, context),
        written: origin::written(run),
        files: origin::files(run, quality),
        texts,
    };
    Ok(artifact::page(run, quality, &extras))
}

/// True if the folder is a training run.
fn is_training(run: &Path) -> bool {
    run.join(run_files::LOG).is_file()
}

/// Returns the path of the page.
fn place(args: &Args) -> PathBuf {
    match (&args.out, args.runs.as_slice()) {
        (Some(out), _) => out.clone(),
        (None, [run]) if is_training(run) => run.join("report.html"),
        (None, [run]) => beside(run),
        (None, runs) => {
            let first = runs.first().map_or(Path::new(""), PathBuf::as_path);
            let path = first.canonicalize().unwrap_or_else(|_| first.to_owned());
            path.with_file_name("comparison.report.html")
        }
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
