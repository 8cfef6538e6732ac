//! `mantissa train`: a run from a TOML file, with checkpoints from which it goes on with the same bits.

use std::collections::BTreeMap;
use std::fs;
use std::io::{self, Write};
use std::path::{Path, PathBuf};
use std::time::Instant;

use anyhow::Result;
use mantissa_model::{Bos, ModelConfig, Tokenizer};
use mantissa_store::convention::ModelFiles;
use mantissa_store::{FileDigest, StagedFile, hash_file, json, write_file_atomic};
use mantissa_train::config::RunConfig;
use mantissa_train::data::{Batches, Cursor, DataError, TokenFile, TokenWriter, documents};
use mantissa_train::{
    AdamW, Options, ParamTable, Parameters, Plan, Policy, StepReport, TrainError, TrainModel, Trainer,
    TrainerOptions,
};
use serde::Serialize;
use serde_json::Value;

use crate::app::Context;
use crate::error::{BadInput, Stopped};
use crate::interrupt;
use crate::output::{Align, Table, bytes};

/// Longest `config.json` read, in bytes.
const MAX_CONFIG: u64 = 16 << 20;

/// Train a model by the settings of a TOML file: data, precision policy, optimizer, schedule, checkpoints.
///
/// A run lies in the folder that the settings name as `out`: the settings with all defaults, the tokens, a log with a JSON line
/// for every step, checkpoints, and at the end the model as a Hugging Face folder. SIGINT and SIGTERM end it with a checkpoint;
/// --resume goes on from the last one, to the same bits. The first checkpoint is written after the first step.
#[derive(clap::Args)]
#[command(after_help = "EXAMPLES
  mantissa train run.toml
  mantissa train run.toml --set precision.policy=bf16 --set optimizer.lr=3e-4
  mantissa train run.toml --resume
  mantissa train run.toml --dry-run")]
pub struct Args {
    /// The settings
    config: PathBuf,
    /// Change a setting: a.b=value; may be given several times
    #[arg(long = "set", value_name = "KEY=VALUE")]
    set: Vec<String>,
    /// Go on from the last checkpoint of the run
    #[arg(long, conflicts_with = "restart")]
    resume: bool,
    /// Begin anew where there is a run already, and remove it
    #[arg(long)]
    restart: bool,
    /// Say what memory the run takes; write nothing
    #[arg(long)]
    dry_run: bool,
}

#[derive(Serialize)]
struct DryRun {
    parameters: u64,
    policy: &'static str,
    /// Bytes by name, predicted.
    memory: BTreeMap<&'static str, u64>,
    predicted_peak_memory: u64,
}

#[derive(Serialize)]
struct Done<'a> {
    run: &'a Path,
    model: PathBuf,
    steps: u64,
    skipped: u64,
    tokens: u64,
    loss: Option<f64>,
    seconds: f64,
}

/// A line of the log.
#[derive(Serialize)]
struct LogLine {
    step: u64,
    loss: f64,
    grad_norm: Option<f64>,
    lr: f64,
    loss_scale: f64,
    skipped: u64,
    tokens: u64,
    tokens_per_s: f64,
}

/// Runs the command.
///
/// # Errors
/// Settings, data or a model that cannot be trained, before anything is written; I/O; [`TrainError::Diverged`].
pub fn run(args: &Args, context: &Context) -> Result<()> {
    let name = args.config.display().to_string();
    let settings = RunConfig::parse(&name, &super::text::read_text(&args.config)?, &args.set)?;
    let base = args.config.parent().unwrap_or(Path::new(""));
    let setup = Setup::new(&settings, base, context)?;
    let needs = setup.memory.iter().map(|(_, bytes)| bytes).sum::<u64>();
    if args.dry_run {
        return dry_run(&setup, needs, context);
    }
    context.require_memory("train", needs + needs / 20)?;
    let run = base.join(&settings.out);
    begin(&run, args)?;
    let resolved = settings.resolved();
    let tokens = tokens(&run, &settings, base, &setup)?;
    let mut trainer = setup.trainer(&settings, tokens)?;
    let checkpoints = Checkpoints { dir: run.join("checkpoints"), keep: settings.checkpoint.keep };
    if args.resume {
        trainer.load(&checkpoints.last()?, &resolved)?;
    } else {
        write_file_atomic(&run.join("config.toml"), resolved.as_bytes())?;
    }
    let start = Instant::now();
    let mut log = Log::open(&run.join("log.jsonl"), trainer.progress().steps)?;
    let work = || steps(&mut trainer, &settings, &resolved, &checkpoints, &mut log, context);
    let loss = interrupt::orderly(work, |error: &anyhow::Error| error.is::<Stopped>())?;
    let model = run.join("model");
    trainer.export(&model, &setup.config_json, &setup.tokenizer_dir)?;
    let progress = trainer.progress();
    let done = Done {
        run: &run,
        model,
        steps: progress.steps,
        skipped: progress.skipped,
        tokens: progress.tokens,
        loss,
        seconds: start.elapsed().as_secs_f64(),
    };
    context.report(&done, |out| human(out, &done))
}

/// The steps that are left; gives the last loss.
fn steps(
    trainer: &mut Trainer,
    settings: &RunConfig,
    resolved: &str,
    checkpoints: &Checkpoints,
    log: &mut Log,
    context: &Context,
) -> Result<Option<f64>> {
    let total = settings.schedule.steps;
    let progress = context.progress(total, crate::progress::Unit::Items("steps"));
    let (mut last, mut smooth) = (None, None);
    while trainer.progress().steps < total {
        let begin = Instant::now();
        let report = trainer.step()?;
        let line = log_line(&report, trainer, begin);
        smooth = Some(smooth.map_or(report.loss, |s: f64| 0.9 * s + 0.1 * report.loss));
        progress.message(status(&line, smooth.unwrap_or(report.loss)));
        progress.set(report.step);
        log.write(&line)?;
        last = Some(report.loss);
        let stopped = interrupt::received().is_some();
        if report.step == 1
            || report.step.is_multiple_of(settings.checkpoint.every)
            || stopped
            || report.step == total
        {
            // A line that a checkpoint counts on must not be lost before it.
            log.sync()?;
            checkpoints.write(trainer, resolved)?;
        }
        if stopped {
            progress.finish();
            return Err(Stopped { steps: report.step, run: settings.out.clone() }.into());
        }
    }
    progress.finish();
    Ok(last)
}

fn log_line(report: &StepReport, trainer: &Trainer, begin: Instant) -> LogLine {
    let seconds = begin.elapsed().as_secs_f64().max(1e-9);
    LogLine {
        step: report.step,
        loss: report.loss,
        grad_norm: report.norm,
        lr: report.lr,
        loss_scale: report.loss_scale,
        skipped: trainer.progress().skipped,
        tokens: trainer.progress().tokens,
        tokens_per_s: report.tokens as f64 / seconds,
    }
}

fn status(line: &LogLine, smooth: f64) -> String {
    let norm = line.grad_norm.map_or_else(|| "overflow".to_owned(), |norm| format!("{norm:.3}"));
    let scale = if line.loss_scale == 1.0 { String::new() } else { format!(", scale {:e}", line.loss_scale) };
    let skipped = if line.skipped == 0 { String::new() } else { format!(", {} skipped", line.skipped) };
    format!(
        "loss {:.4} (smoothed {smooth:.4}), gradient {norm}, lr {:.2e}, {:.0} tokens/s{scale}{skipped}",
        line.loss, line.lr, line.tokens_per_s
    )
}

/// What settings mean: model, tokenizer, memory.
struct Setup {
    config: ModelConfig,
    config_json: Value,
    tokenizer: Tokenizer,
    tokenizer_dir: PathBuf,
    init: Option<ModelFiles>,
    options: Options,
    policy: Policy,
    memory: Vec<(&'static str, u64)>,
}

impl Setup {
    fn new(settings: &RunConfig, base: &Path, context: &Context) -> Result<Self> {
        let path = base.join(&settings.model.config);
        let config_json = json::read_strict(&path, MAX_CONFIG, "a model's config.json")?;
        let config = ModelConfig::from_json(&config_json, &path.display().to_string())
            .map_err(mantissa_model::LoadError::from)?;
        let (needed, allowed) = (settings.data.length, config.max_position_embeddings);
        if needed > allowed {
            return Err(mantissa_model::LoadError::Context { needed, allowed }.into());
        }
        let tokenizer_dir = base.join(&settings.model.tokenizer);
        let tokenizer = Tokenizer::load(&tokenizer_dir)?;
        let init = settings.model.init.as_ref().map(|dir| ModelFiles::open(&base.join(dir))).transpose()?;
        // Both were checked with the settings.
        let policy = settings.policy().unwrap_or_default();
        let options = Options {
            max_tokens: settings.data.batch.saturating_mul(settings.data.length),
            max_len: settings.data.length,
            threads: context.threads,
            policy: policy.clone(),
        };
        let mut memory = Plan::new(&config, &options).entries;
        let table = ParamTable::new(&config);
        memory.push(("optimizer state", AdamW::bytes(&table, &policy, settings.adamw().moments)));
        Ok(Setup { config, config_json, tokenizer, tokenizer_dir, init, options, policy, memory })
    }

    fn trainer(&self, settings: &RunConfig, tokens: TokenFile) -> Result<Trainer, TrainError> {
        let params = match &self.init {
            Some(files) => Parameters::load(files, &self.config)?,
            None => Parameters::random(&self.config, settings.model.std as f32, settings.seed)?,
        };
        let optimizer = AdamW::new(&params, &self.policy, settings.adamw())?;
        let model = TrainModel::new(self.config.clone(), params, self.options.clone())?;
        let batches = Batches::new(tokens, settings.data.length, settings.seed, Cursor::default())?;
        let options = TrainerOptions {
            batch: settings.data.batch,
            accumulate: settings.data.accumulate,
            schedule: settings.schedule(),
        };
        Trainer::new(model, optimizer, batches, options)
    }
}

/// Makes the folder of the run; refuses to touch one that is there unless that is asked for.
fn begin(run: &Path, args: &Args) -> Result<()> {
    let io = |operation: &'static str| {
        let path = run.to_owned();
        move |error| mantissa_store::Error::Io { path, operation, error }
    };
    let checkpoints = Checkpoints { dir: run.join("checkpoints"), keep: 1 };
    let there = checkpoints.dir.exists() && !checkpoints.all()?.is_empty();
    match (there, args.resume, args.restart) {
        (true, false, false) => {
            let found = "a run that is begun already";
            return Err(BadInput::new(run.display().to_string(), found, "--resume or --restart").into());
        }
        (false, true, _) => {
            return Err(
                BadInput::new(run.display().to_string(), "no checkpoint", "a run to go on with").into()
            );
        }
        (_, false, true) => {
            for name in ["checkpoints", "model"] {
                let dir = run.join(name);
                if dir.exists() {
                    fs::remove_dir_all(dir).map_err(io("remove the old run"))?;
                }
            }
            for name in ["log.jsonl", "tokens.safetensors"] {
                let _ = fs::remove_file(run.join(name));
            }
        }
        _ => {}
    }
    fs::create_dir_all(run.join("checkpoints")).map_err(io("create"))?;
    Ok(())
}

/// The run's tokens, made once from its data and its tokenizer.
fn tokens(run: &Path, settings: &RunConfig, base: &Path, setup: &Setup) -> Result<TokenFile> {
    let path = run.join("tokens.safetensors");
    let made_from = made_from(settings, base, &setup.tokenizer_dir)?;
    if path.exists() {
        let file = TokenFile::open(&path)?;
        if file.about().get("made_from") == Some(&made_from) {
            return Ok(file);
        }
    }
    let mut writer = TokenWriter::new(setup.config.vocab_size);
    let mut count = 0;
    for file in &settings.data.files {
        let file = base.join(file);
        count += documents(&file, &settings.format_of(&file), |document| {
            let mut ids = setup.tokenizer.encode(document, Bos::Auto).map_err(DataError::from)?;
            ids.extend(setup.config.eos_token_ids.first());
            writer.push(&ids)
        })?;
    }
    let about = [("made_from".to_owned(), made_from), ("documents".to_owned(), count.to_string())];
    writer.finish(&path, about.into())?;
    Ok(TokenFile::open(&path)?)
}

/// Hash of what tokens follow from: the files, the tokenizer, and how the files are cut.
fn made_from(settings: &RunConfig, base: &Path, tokenizer: &Path) -> Result<String> {
    let mut text = format!("{:?} {}", settings.data.split, settings.data.field);
    let files = settings.data.files.iter().map(|file| base.join(file));
    for file in files.chain([tokenizer.join("tokenizer.json")]) {
        if !file.is_file() {
            return Err(BadInput::new(file.display().to_string(), "no such file", "a file").into());
        }
        text += &format!(" {}", hash_file(&file)?.hex());
    }
    Ok(FileDigest::of(text.as_bytes()).hex())
}

/// The checkpoints of a run.
struct Checkpoints {
    dir: PathBuf,
    keep: usize,
}

impl Checkpoints {
    /// All of them, the oldest first.
    fn all(&self) -> Result<Vec<PathBuf>> {
        let io =
            |error| mantissa_store::Error::Io { path: self.dir.clone(), operation: "list folder", error };
        let entries = fs::read_dir(&self.dir).map_err(io)?;
        let paths = entries.map(|entry| Ok(entry.map_err(io)?.path())).collect::<Result<Vec<_>>>()?;
        let name =
            |path: &PathBuf| path.file_name().map(|n| n.to_string_lossy().into_owned()).unwrap_or_default();
        let ours = |path: &PathBuf| name(path).starts_with("step-") && name(path).ends_with(".safetensors");
        let mut all: Vec<_> = paths.into_iter().filter(ours).collect();
        all.sort();
        Ok(all)
    }

    fn last(&self) -> Result<PathBuf> {
        let none = || BadInput::new(self.dir.display().to_string(), "no checkpoint", "at least one");
        Ok(self.all()?.pop().ok_or_else(none)?)
    }

    /// Writes one, and removes those that are too many once it is in place.
    fn write(&self, trainer: &Trainer, resolved: &str) -> Result<()> {
        let path = self.dir.join(format!("step-{:010}.safetensors", trainer.progress().steps));
        trainer.save(&path, resolved)?;
        let all = self.all()?;
        for old in &all[..all.len().saturating_sub(self.keep)] {
            let io = |error| mantissa_store::Error::Io { path: old.clone(), operation: "remove", error };
            fs::remove_file(old).map_err(io)?;
        }
        Ok(())
    }
}

/// The log, a JSON object on each line.
struct Log {
    path: PathBuf,
    file: fs::File,
}

impl Log {
    /// Opens it behind the line of step `steps`: what was done after the last checkpoint is done again.
    fn open(path: &Path, steps: u64) -> Result<Self> {
        let io = |operation: &'static str| {
            let path = path.to_owned();
            move |error| mantissa_store::Error::Io { path, operation, error }
        };
        let kept: String = match fs::read_to_string(path) {
            Ok(text) => {
                text.split_inclusive('\n').take(usize::try_from(steps).unwrap_or(usize::MAX)).collect()
            }
            Err(error) if error.kind() == io::ErrorKind::NotFound => String::new(),
            Err(error) => return Err(io("read")(error).into()),
        };
        let staged = StagedFile::begin(path)?;
        staged.write(kept.as_bytes())?;
        staged.commit()?;
        let file = fs::OpenOptions::new().append(true).open(path).map_err(io("open"))?;
        Ok(Log { path: path.to_owned(), file })
    }

    fn write(&mut self, line: &LogLine) -> Result<()> {
        let text = serde_json::to_string(line)? + "\n";
        Ok(self.file.write_all(text.as_bytes()).map_err(|error| self.error("write", error))?)
    }

    fn sync(&self) -> Result<()> {
        Ok(self.file.sync_data().map_err(|error| self.error("fsync", error))?)
    }

    fn error(&self, operation: &'static str, error: io::Error) -> mantissa_store::Error {
        mantissa_store::Error::Io { path: self.path.clone(), operation, error }
    }
}

fn dry_run(setup: &Setup, needs: u64, context: &Context) -> Result<()> {
    let report = DryRun {
        parameters: setup.config.parameters(),
        policy: setup.policy.name,
        memory: setup.memory.iter().copied().collect(),
        predicted_peak_memory: needs,
    };
    context.report(&report, |out| {
        let mut table = Table::new([("memory", Align::Left), ("predicted", Align::Right)]);
        for (name, n) in &setup.memory {
            table.row([(*name).to_owned(), bytes(*n)]);
        }
        table.row(["sum".to_owned(), bytes(needs)]);
        table.write(out)?;
        writeln!(out, "\n{} parameters, policy {}", report.parameters, report.policy)
    })
}

fn human(out: &mut dyn Write, done: &Done<'_>) -> io::Result<()> {
    let loss = done.loss.map_or_else(|| "no step was left".to_owned(), |loss| format!("last loss {loss:.4}"));
    writeln!(
        out,
        "{} steps ({} skipped), {} tokens, {loss}, {:.1} s\nmodel in {}",
        done.steps,
        done.skipped,
        done.tokens,
        done.seconds,
        done.model.display()
    )
}
