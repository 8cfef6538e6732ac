//! `mantissa train`: trains a model from a TOML file, with checkpoints from which it resumes bit-exactly.

mod autopsy;
pub(super) mod chat;
mod earlier;
pub mod folder;
mod init;
pub(super) mod owned;
mod results;
mod setup;
mod source;
mod teacher;
mod tokens;
mod train_loop;
mod vocabulary;

use std::collections::BTreeMap;
use std::io::{self, Write};
use std::path::{Path, PathBuf};
use std::time::Instant;

use anyhow::Result;
use mantissa_store::{Kind, Output, Paths, regular, write_file_atomic};
use mantissa_train::config::RunConfig;
use mantissa_train::{GemmHealth, HeldOut, Policy, Trainer, recipes};
use serde::Serialize;

use super::execute::Execute;
use super::next_steps::quoted;
use crate::context::Context;
use crate::error::{BadInput, Stopped, resumes};
use crate::help::Group;
use crate::interrupt;
use crate::output::{Align, Table, bytes, count, labelled};
use earlier::Earlier;
use folder::{Checkpoints, RunFile};
use mantissa_jobs::machine::{Machine, peak_anonymous};
use owned::{How, RunFolder};
use results::Results;
use setup::Setup;
use source::Source;
use train_loop::TrainLoop;

/// Train a model from a TOML file
///
/// The run's folder is the setting `out`. It holds the settings with all defaults, the tokens, a log with one
/// JSON line per step, tensor health for some steps, checkpoints, and at the end the model as a Hugging Face
/// folder. `mantissa report` makes a page of it. On SIGINT or SIGTERM the run writes a checkpoint and stops; the
/// same command resumes it bit-exactly. The first checkpoint is written after the first step. --init prints
/// complete settings to start from.
#[derive(clap::Args)]
#[command(after_help = "EXAMPLES
  mantissa train --init small --data my.txt > run.toml
  mantissa train run.toml
  mantissa train run.toml --set precision.policy=bf16 --set optimizer.lr=3e-4
  mantissa train run.toml --resume
  mantissa train run.toml --dry-run
  mantissa train --show-policy nvfp4
  mantissa train --autopsy runs/first --step 40")]
pub struct Args {
    /// Settings file (TOML)
    #[arg(required_unless_present_any = ["show_policy", "init", "autopsy"])]
    config: Option<PathBuf>,
    /// Print settings with a model of this size
    ///
    /// Text becomes a model in three commands: mantissa train --init small --data my.txt > run.toml; mantissa train
    /// run.toml; mantissa run runs/small/model --chat -p 'Once'. A tokenizer is trained on the data.
    #[arg(long, value_name = "SIZE", value_enum,
        conflicts_with_all = ["config", "set", "resume", "restart", "dry_run", "show_policy"])]
    init: Option<init::Size>,
    /// Text, .jsonl or token file to train on (repeatable)
    #[arg(long, value_name = "FILE", requires = "init")]
    data: Vec<String>,
    /// Time to train for, instead of a number of steps
    #[arg(long, value_name = "N", requires = "init", value_parser = minutes)]
    minutes: Option<f64>,
    /// Print a precision policy as a table of settings and exit
    #[arg(long, value_name = "NAME", conflicts_with_all = ["config", "set", "resume", "restart", "dry_run"])]
    show_policy: Option<String>,
    /// Name the operand at fault in a step of a run
    ///
    /// RUN is the run's folder. The step is replayed bit-exactly from the last checkpoint before it, then in f32 and with
    /// single operands in the run's format. Changes nothing.
    #[arg(long, value_name = "RUN",
        conflicts_with_all = ["config", "set", "resume", "restart", "dry_run", "show_policy", "init"])]
    autopsy: Option<PathBuf>,
    /// Step to examine [default: the one that failed]
    #[arg(long, value_name = "N", requires = "autopsy")]
    step: Option<u64>,
    /// Override a setting: section.key=value (repeatable)
    #[arg(long = "set", value_name = "KEY=VALUE")]
    set: Vec<String>,
    /// Resume from the last sound checkpoint of the run
    #[arg(long, conflicts_with = "restart")]
    resume: bool,
    /// Start over: remove the files of the existing run
    #[arg(long)]
    restart: bool,
    /// Preview memory and weight decay; write nothing
    #[arg(long)]
    dry_run: bool,
}

#[derive(Serialize)]
struct DryRun<'a> {
    parameters: u64,
    policy: &'a str,
    optimizer: &'a str,
    /// Predicted bytes by purpose.
    memory: BTreeMap<&'static str, u64>,
    predicted_peak_memory: u64,
    /// Bytes of optimizer state in a file.
    #[serde(skip_serializing_if = "is_zero")]
    paged: u64,
    /// Names of the tensors with and without weight decay.
    decay: Vec<&'a str>,
    no_decay: Vec<&'a str>,
}

#[expect(clippy::trivially_copy_pass_by_ref, reason = "serde passes a reference")]
fn is_zero(n: &u64) -> bool {
    *n == 0
}

#[derive(Serialize)]
struct ShownPolicy<'a> {
    policy: &'a str,
    about: &'static str,
    /// TOML of the settings.
    toml: String,
}

#[derive(Serialize)]
struct Done<'a> {
    run: &'a Path,
    #[serde(flatten)]
    results: Results,
    steps: u64,
    skipped: u64,
    tokens: u64,
    loss: Option<f64>,
    /// Least loss on held-out text.
    validation_loss: Option<f64>,
    /// Step of the exported weights.
    exported_step: u64,
    seconds: f64,
    predicted_peak_memory: u64,
    /// Peak anonymous memory of this process in bytes.
    measured_peak_memory: Option<u64>,
    /// Matmuls with the lowest SQNR of their results in the last step with telemetry.
    worst_gemms: &'a [GemmHealth],
}

impl Execute for Args {
    const GROUP: Group = Group::Train;
    const TRAINS: bool = true;

    /// # Errors
    /// Settings that cannot be read.
    fn paths(&self, paths: &mut Paths) -> Result<()> {
        if let Some(run) = &self.autopsy {
            autopsy::paths(run, paths);
        }
        let Some(config) = &self.config else { return Ok(()) };
        let name = config.display().to_string();
        let settings = RunConfig::parse(&name, &super::text::read_settings(config)?, &self.set)?;
        let base = config.parent().unwrap_or(Path::new(""));
        paths.read(config);
        if settings.model.architecture.is_none() {
            paths.read(settings.model_config(base));
        }
        if let Some(tokenizer) = &settings.model.tokenizer {
            for file in ["tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "config.json"]
            {
                paths.read(base.join(tokenizer).join(file));
            }
        }
        let teacher = settings.distill.as_ref().and_then(|distill| distill.teacher.as_ref());
        for init in settings.model.init.iter().chain(teacher).map(|model| base.join(model)) {
            // Each file is listed too: it may be a link into the run's folder.
            let files = std::fs::read_dir(&init).into_iter().flatten().flatten();
            files.for_each(|file| paths.read(file.path()));
            paths.read(init);
        }
        settings
            .data
            .files
            .iter()
            .chain(&settings.validation.files)
            .for_each(|file| paths.read(base.join(file)));
        if !self.dry_run {
            paths.write("out", base.join(&settings.out), Kind::Run);
        }
        Ok(())
    }

    /// # Errors
    /// Settings, data or a model that cannot be trained, before anything is written; I/O;
    /// [`TrainError::Diverged`](mantissa_train::TrainError::Diverged).
    fn run(&self, context: &Context) -> Result<()> {
        if let Some(run) = &self.autopsy {
            return autopsy::run(run, self.step, context);
        }
        if let Some(size) = self.init {
            return init::run(size, &self.data, self.minutes, context);
        }
        let config = match (&self.config, &self.show_policy) {
            (Some(config), _) => config,
            (None, name) => return show_policy(name.as_deref().unwrap_or_default(), context),
        };
        let name = config.display().to_string();
        let settings = RunConfig::parse(&name, &super::text::read_settings(config)?, &self.set)?;
        let base = config.parent().unwrap_or(Path::new(""));
        execute(&settings, &name, base, self.how(), self.dry_run, context)
    }
}

impl Args {
    fn how(&self) -> How {
        match (self.resume, self.restart) {
            (true, _) => How::Resume,
            (_, true) => How::Restart,
            _ => How::New,
        }
    }
}

/// Runs the training that `settings` of the file `name` describe; their paths are relative to `base`.
///
/// # Errors
/// As the command.
pub(super) fn execute(
    settings: &RunConfig,
    name: &str,
    base: &Path,
    how: How,
    preview: bool,
    context: &Context,
) -> Result<()> {
    let run = base.join(&settings.out);
    let earlier = || Earlier::read(&run, &settings.resolved());
    let how = earlier().how(how);
    // Until a step is done, --restart loses nothing.
    let left = interrupt::leaving(format!("{}: {}", settings.out, resumes(false)));
    let setup = Setup::new(settings, name, base, how, context)?;
    let needs = setup.memory.iter().map(|(_, bytes)| bytes).sum::<u64>();
    if preview {
        drop(left);
        return dry_run(&setup, settings, needs, context);
    }
    let explain = |error| earlier().explain(error);
    let folder = RunFolder::open(&run, how).map_err(explain)?;
    context.require_memory("train", needs + needs / 20)?;
    let begun = Begun::new(folder, &setup, settings, base, context).map_err(explain)?;
    let mut about = about(&setup, settings, needs, context);
    let start = Instant::now();
    let mut train_loop = TrainLoop::new(begun, settings, &setup)?;
    about.write(&run)?;
    left.change(format!("{}: {}", settings.out, resumes(how == How::Restart)));
    let outcome =
        interrupt::saving(|| train_loop.run(context), |error: &anyhow::Error| error.is::<Stopped>());
    let progress = train_loop.trainer.progress();
    let outcome = outcome.and_then(|loss| {
        train_loop.take_best()?.iter().for_each(|warning| context.warn(warning));
        let folder = &train_loop.checkpoints.folder;
        Ok((loss, results::write(&mut train_loop.trainer, &setup, settings, folder, context)?))
    });
    about.measured_peak_memory = peak_anonymous();
    if settings.schedule.steps == 0 {
        about.steps = progress.steps;
    }
    let (loss, results) = match outcome {
        Ok(found) => found,
        Err(error) => {
            about.outcome = crate::terminal::line(&format!("{error:#}"));
            // The first error matters more.
            let _ = about.write(&run);
            return Err(error);
        }
    };
    folder::DONE.clone_into(&mut about.outcome);
    // A stop tells to resume the run if and only if it is not done.
    let written = || {
        let written = about.write(&run);
        drop(left);
        written
    };
    interrupt::orderly(written, |_| false)?;
    let trainer = &train_loop.trainer;
    let done = Done {
        run: &run,
        results,
        steps: progress.steps,
        skipped: progress.skipped,
        tokens: progress.tokens,
        loss,
        validation_loss: train_loop.best().map(|(_, loss)| loss),
        exported_step: trainer.progress().steps,
        seconds: start.elapsed().as_secs_f64(),
        predicted_peak_memory: needs,
        measured_peak_memory: peak_anonymous(),
        worst_gemms: &train_loop.worst_gemms,
    };
    context.report(&done, |out| human(out, &done))
}

/// Parses a number of minutes.
fn minutes(text: &str) -> Result<f64, String> {
    let found = text.parse().ok().filter(|minutes| (1e-3..=1e6).contains(minutes));
    found.ok_or_else(|| "expected minutes from 0.001 to 1000000".to_owned())
}

/// Prints a policy.
fn show_policy(name: &str, context: &Context) -> Result<()> {
    let Some(policy) = Policy::by_name(name, 0) else {
        let names: Vec<&str> = Policy::names().collect();
        return Err(BadInput::new("--show-policy", name, names.join(", ")).into());
    };
    let about = recipes().iter().find(|recipe| recipe.name == name).map_or("", |recipe| recipe.about);
    let shown = ShownPolicy { policy: name, about, toml: policy.to_toml() };
    context.report(&shown, |out| {
        if !about.is_empty() {
            writeln!(out, "# {about}")?;
        }
        write!(out, "{}", shown.toml)
    })
}

/// Describes the run at its start.
fn about(setup: &Setup, settings: &RunConfig, needs: u64, context: &Context) -> RunFile {
    RunFile {
        tool: concat!("mantissa ", env!("CARGO_PKG_VERSION")).to_owned(),
        machine: Machine::this(),
        threads: context.threads,
        parameters: setup.config.parameters(),
        policy: setup.policy.name.clone().into_owned(),
        memory: setup.memory.iter().map(|(name, bytes)| ((*name).to_owned(), *bytes)).collect(),
        predicted_peak_memory: needs,
        measured_peak_memory: None,
        steps: settings.schedule.steps,
        outcome: "running".to_owned(),
    }
}

/// Run that is ready for its next step.
struct Begun {
    trainer: Trainer,
    held_out: Option<HeldOut>,
    resolved: String,
    checkpoints: Checkpoints,
}

impl Begun {
    /// Reads everything the run needs; only then removes an old run or writes anything.
    fn new(
        mut folder: RunFolder,
        setup: &Setup,
        settings: &RunConfig,
        base: &Path,
        context: &Context,
    ) -> Result<Self> {
        let source = Source::prepare(&folder, settings, base, setup, context)?;
        let model = setup.model(settings)?;
        if let Some(path) = folder.rebuilt() {
            context.warn(&format!("{}: is damaged; made again from the files of the run", path.display()));
        }
        let others = folder.begin(source.made_from())?;
        if folder.how() == How::Restart && !others.is_empty() {
            let run = folder.dir().display();
            context.warn(&format!("{run}: kept what this run did not write: {}", others.join(", ")));
        }
        setup.vocabulary.keep(folder.dir())?;
        let (data, held_out) = source.write(settings, setup.config.vocab_size)?;
        let mut trainer = Setup::trainer(model, settings, data)?;
        if let Some(teacher) = setup.teacher()? {
            trainer.set_teacher(teacher)?;
        }
        let resolved = settings.resolved();
        trainer.open_pages(folder.dir())?;
        let checkpoints = Checkpoints { folder, keep: settings.checkpoint.keep, best: None };
        if checkpoints.folder.how().resumes() {
            let damaged = checkpoints.load_last(&mut trainer, &resolved)?;
            damaged.iter().for_each(|warning| context.warn(warning));
        }
        let config = checkpoints.folder.dir().join(folder::CONFIG);
        let before = regular::read(&config, folder::MAX_FILE, "the settings of a run");
        if !before.is_ok_and(|text| text == resolved.as_bytes()) {
            write_file_atomic(&Output::owned(config), resolved.as_bytes())?;
        }
        trainer.set_stop(|| interrupt::received().is_some());
        Ok(Begun { trainer, held_out, resolved, checkpoints })
    }
}

fn dry_run(setup: &Setup, settings: &RunConfig, needs: u64, context: &Context) -> Result<()> {
    let names = |decays: bool| {
        let chosen = setup.decays.iter().filter(move |(_, flag)| *flag == decays);
        chosen.map(|(param, _)| param.tensor.name.as_str()).collect::<Vec<_>>()
    };
    let report = DryRun {
        parameters: setup.config.parameters(),
        policy: &setup.policy.name,
        optimizer: &settings.optimizer.kind,
        memory: setup.memory.iter().copied().collect(),
        predicted_peak_memory: needs,
        paged: setup.paged,
        decay: names(true),
        no_decay: names(false),
    };
    context.report(&report, |out| {
        let mut table = Table::new([("memory", Align::Left), ("predicted", Align::Right)]);
        for (name, n) in &setup.memory {
            table.row([(*name).to_owned(), bytes(*n)]);
        }
        table.row(["total".to_owned(), bytes(needs)]);
        table.write(out)?;
        if setup.paged > 0 {
            writeln!(out, "optimizer state in a file of the run's folder: {}", bytes(setup.paged))?;
        }
        writeln!(out)?;
        decay_table(setup, settings.optimizer.weight_decay).write(out)?;
        let DryRun { parameters, policy, optimizer, .. } = report;
        writeln!(out, "\n{parameters} parameters, policy {policy}, optimizer {optimizer}")
    })
}

/// Makes a table of tensors, layers merged, with their weight decay.
fn decay_table(setup: &Setup, weight_decay: f64) -> Table {
    let mut rows: Vec<(String, bool, usize, usize)> = Vec::new();
    for (param, decays) in &setup.decays {
        let parts =
            param.tensor.name.split('.').map(|part| if part.parse::<u32>().is_ok() { "*" } else { part });
        let name = parts.collect::<Vec<_>>().join(".");
        let n = param.range.len();
        match rows.iter_mut().find(|row| (&row.0, row.1) == (&name, *decays)) {
            Some(row) => (row.2, row.3) = (row.2 + 1, row.3 + n),
            None => rows.push((name, *decays, 1, n)),
        }
    }
    let mut table = Table::new([
        ("tensor", Align::Left),
        ("tensors", Align::Right),
        ("parameters", Align::Right),
        ("weight decay", Align::Right),
    ]);
    for (name, decays, number, weights) in rows {
        let decay = if decays { weight_decay.to_string() } else { "-".to_owned() };
        table.row([name, number.to_string(), count(weights as u64), decay]);
    }
    table
}

fn human(out: &mut dyn Write, done: &Done<'_>) -> io::Result<()> {
    let loss = done.loss.map_or_else(|| "no step left".to_owned(), |loss| format!("last loss {loss:.4}"));
    let Done { steps, skipped, tokens, seconds, .. } = done;
    let all = format!("{steps} steps ({skipped} skipped), {tokens} tokens, {loss}, {seconds:.1} s");
    labelled(out, "trained", &all)?;
    if let Some(best) = done.validation_loss {
        labelled(
            out,
            "validation",
            &format!("loss {best:.4} at best; the model is that of step {}", done.exported_step),
        )?;
    }
    done.results.write(out)?;
    if !done.worst_gemms.is_empty() {
        let columns =
            [("lowest SQNR, last telemetry", Align::Left), ("matmul", Align::Left), ("dB", Align::Right)];
        let mut table = Table::new(columns);
        for gemm in done.worst_gemms {
            let sqnr = gemm.sqnr_db.unwrap_or(f64::NAN);
            table.row([gemm.linear.clone(), gemm.gemm.to_owned(), format!("{sqnr:.1}")]);
        }
        table.write(out)?;
    }
    if let Some(run) = &done.results.run {
        writeln!(out, "run         {run}")?;
    }
    writeln!(out, "next        mantissa report {}", quoted(done.run))
}
