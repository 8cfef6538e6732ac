//! `mantissa finetune`: trains adapters or all weights of a model on a JSONL or text file.
//!
//! Writes the settings of a training run and runs it as `mantissa train` does, with its folder, checkpoints and
//! resumption. [`Tuning`] has the options that `mantissa distill` shares.

mod extent;

use std::path::{Path, PathBuf};

use anyhow::Result;
use clap::ValueEnum;
use mantissa_store::{Kind, Paths};
use mantissa_train::config::RunConfig;
use toml::{Table, Value};

use self::extent::{Extent, Validation};
use super::execute::Execute;
use super::model::ModelPath;
use super::train::execute;
use super::train::owned::How;
use crate::context::Context;
use crate::embedded;
use crate::error::BadInput;
use crate::help::Group;

/// Trained parameters.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(super) enum Adapter {
    /// LoRA over the model as it is stored
    Lora,
    /// DoRA: LoRA with trained norms of the weights' rows
    Dora,
    /// LoRA over the model in 4 bits (--base-scheme)
    Qlora,
    /// All weights
    None,
}

/// Fine-tune a model: LoRA, DoRA, QLoRA or all weights
///
/// The data are a text, or a JSONL file with lines of {"text": …}, or of conversations ({"messages": …}) or prompts
/// ({"prompt": …, "completion": …}), rendered with the model's chat template, with the loss on answers only. DIR is the folder of the run: settings,
/// log, checkpoints, and at the end the adapter in PEFT's format (DIR/adapter), the merged model (DIR/model), or both.
/// On SIGINT or SIGTERM the run writes a checkpoint and stops; the same command resumes it bit-exactly.
#[derive(clap::Args)]
#[command(after_help = "EXAMPLES
  mantissa finetune demo --data story.txt --out tuned --lr 2e-3
  mantissa finetune demo --data story.txt --out tuned --lr 2e-3 --resume
  mantissa finetune demo --data story.txt --out both --requantize int4-g32
  mantissa finetune demo --data story.txt --out other --dry-run")]
pub struct Args {
    /// Model folder, dense or quantized, or `demo`
    model: ModelPath,
    /// Weights to train
    #[arg(long, value_enum, default_value = "qlora", help_heading = "Adapter")]
    adapter: Adapter,
    #[command(flatten)]
    tuning: Tuning,
}

/// Options of a run that starts from a model.
#[derive(clap::Args)]
pub struct Tuning {
    /// JSONL or text file to train on (repeatable)
    #[arg(long, value_name = "FILE", required = true)]
    data: Vec<PathBuf>,
    /// Folder of the run
    #[arg(long, value_name = "DIR")]
    out: PathBuf,
    /// Scheme of the frozen linear weights
    ///
    /// Default: nf4-dq for qlora, else as the model stores them.
    #[arg(long, value_name = "SCHEME", help_heading = "Adapter")]
    base_scheme: Option<String>,
    /// Rank of the update
    #[arg(long, default_value_t = 16, help_heading = "Adapter")]
    rank: usize,
    /// Scale of the update times the rank
    #[arg(long, default_value_t = 32.0, help_heading = "Adapter")]
    alpha: f64,
    /// Share of adapter inputs set to 0
    #[arg(long, value_name = "SHARE", default_value_t = 0.0, help_heading = "Adapter")]
    dropout: f64,
    /// Layers with an adapter, as q_proj [default: all]
    ///
    /// The end of a name, or a pattern such as *.mlp.*; repeatable.
    #[arg(long, value_name = "NAME", help_heading = "Adapter")]
    target: Vec<String>,
    /// Other modules that train, such as *norm
    ///
    /// Names or patterns, such as lm_head or *norm; repeatable.
    #[arg(long = "train-module", value_name = "NAME", help_heading = "Adapter")]
    train: Vec<String>,
    /// Scale by alpha / sqrt(rank) (rsLoRA)
    #[arg(long, help_heading = "Adapter")]
    rslora: bool,
    /// LoftQ steps of the initialization
    ///
    /// Needs --base-scheme. The adapter fits only the changed base, which is written to DIR/base.
    #[arg(long, value_name = "STEPS", default_value_t = 0, help_heading = "Adapter")]
    loftq: usize,
    /// Learning rate
    #[arg(long, default_value_t = 2e-4, help_heading = "Training")]
    lr: f64,
    /// Passes over the data
    #[arg(long, default_value_t = 1.0, help_heading = "Training")]
    epochs: f64,
    /// Steps, instead of passes
    #[arg(long, conflicts_with = "epochs", help_heading = "Training")]
    steps: Option<u64>,
    /// Windows per step
    #[arg(long, default_value_t = 8, help_heading = "Training")]
    batch: usize,
    /// Tokens per window [default: at most 512]
    ///
    /// Default: 512, or the model's context or the data if they are shorter.
    #[arg(long, help_heading = "Training")]
    length: Option<usize>,
    /// Held-out share or file [default: by size]
    ///
    /// A share of the documents or conversations, such as 0.1, or a file of its own. Their loss is measured ten times
    /// in a run, and the best checkpoint is exported. Default: 0.05 where that is at least 8 conversations, or 8 windows
    /// of text; else 0.
    #[arg(long, value_name = "SHARE|FILE", help_heading = "Training")]
    validation: Option<String>,
    /// Stop after N validations without gain
    ///
    /// 0 never stops early.
    #[arg(long, value_name = "N", default_value_t = 0, help_heading = "Training")]
    patience: u64,
    /// Optimizer: adamw, sgd …
    #[arg(long, default_value = "adamw", help_heading = "Training")]
    optimizer: String,
    /// Dtype of the moments: f32, 8bit …
    #[arg(long, default_value = "f32", help_heading = "Training")]
    moments: String,
    /// Precision policy
    ///
    /// `mantissa train --show-policy NAME` prints one.
    #[arg(long, default_value = "bf16", help_heading = "Training")]
    policy: String,
    /// Any other setting: section.key=value
    ///
    /// Repeatable; the keys are those of a training run.
    #[arg(long = "set", value_name = "KEY=VALUE", help_heading = "Training")]
    set: Vec<String>,
    /// Also write the merged model, with its KL
    ///
    /// The KL divergence is that of the merged model from the adapter form.
    #[arg(long, help_heading = "Output")]
    merge: bool,
    /// Also write the merged model in this scheme
    ///
    /// With its KL divergence from the adapter form.
    #[arg(long, value_name = "SCHEME", help_heading = "Output")]
    requantize: Option<String>,
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

/// Model to train, and what it learns from.
pub(super) struct Job<'a> {
    /// Name of the command, for messages.
    pub(super) name: &'static str,
    /// Model to train.
    pub(super) model: &'a ModelPath,
    /// Weights to train.
    pub(super) adapter: Adapter,
    /// Options.
    pub(super) tuning: &'a Tuning,
    /// Teacher with the other keys of `[distill]`, if the run has one.
    pub(super) teacher: Option<(&'a ModelPath, Vec<(&'static str, Value)>)>,
    /// Other keys of `[precision]`.
    pub(super) precision: Vec<(&'static str, Value)>,
}

impl Execute for Args {
    const GROUP: Group = Group::Train;
    const TRAINS: bool = true;

    fn paths(&self, paths: &mut Paths) -> Result<()> {
        self.model.paths(paths);
        self.tuning.paths(paths);
        Ok(())
    }

    /// # Errors
    /// As `mantissa train`; options that do not fit each other.
    fn run(&self, context: &Context) -> Result<()> {
        let Args { model, adapter, tuning } = self;
        Job { name: "finetune", model, adapter: *adapter, tuning, teacher: None, precision: Vec::new() }
            .run(context)
    }
}

impl Tuning {
    /// Adds the paths that a run reads and writes, without its model.
    pub(super) fn paths(&self, paths: &mut Paths) {
        self.data.iter().for_each(|file| paths.read(file));
        if let Ok(Some(Validation::File(file))) = extent::validation(self) {
            paths.read(file);
        }
        if !self.dry_run {
            paths.write("--out", &self.out, Kind::Run);
        }
    }
}

impl Job<'_> {
    /// Runs the training.
    ///
    /// # Errors
    /// As the command.
    pub(super) fn run(&self, context: &Context) -> Result<()> {
        let tuning = self.tuning;
        if self.adapter == Adapter::None && (tuning.merge || tuning.requantize.is_some()) {
            let error = BadInput::new("--merge", "--adapter none", "an adapter to merge");
            return Err(error.with_fix("leave out --merge: all weights are written to DIR/model").into());
        }
        let settings = self.settings(context)?;
        let settings = RunConfig::parse(self.name, &toml::to_string(&settings)?, &tuning.set)?;
        let how = match (tuning.resume, tuning.restart) {
            (true, _) => How::Resume,
            (_, true) => How::Restart,
            _ => How::New,
        };
        execute(&settings, self.name, &self.base()?, how, tuning.dry_run, context)
    }

    /// True if the model or the teacher is the embedded one.
    fn is_embedded(&self) -> bool {
        let teacher = self.teacher.iter().map(|(teacher, _)| *teacher);
        teacher.chain([self.model]).any(ModelPath::is_embedded)
    }

    /// Returns the folder that paths of the settings are relative to: that of the embedded model, so that the settings
    /// name it without its place. Another process, which unpacks it elsewhere, can then resume the run.
    fn base(&self) -> Result<PathBuf> {
        if !self.is_embedded() {
            return Ok(PathBuf::new());
        }
        Ok(embedded::folder()?.parent().unwrap_or(Path::new("")).to_owned())
    }

    /// Returns the place of a model in the settings.
    fn place(&self, model: &ModelPath) -> Result<Value> {
        if model.is_embedded() { Ok(text(embedded::NAME)) } else { self.absolute(model) }
    }

    /// Returns a path that does not depend on the folder of the settings.
    fn absolute(&self, path: &Path) -> Result<Value> {
        let path = if self.is_embedded() { std::path::absolute(path)? } else { path.to_owned() };
        Ok(Value::String(path.display().to_string()))
    }

    /// Makes the settings of the run.
    fn settings(&self, context: &Context) -> Result<Table> {
        let tuning = self.tuning;
        let extent = Extent::new(self.model, tuning, context)?;
        let (length, steps) = (extent.length, extent.steps);
        let data = tuning.data.iter().map(|file| self.absolute(file)).collect::<Result<Vec<_>>>()?;
        let (batch, window) = (number(tuning.batch as u64), number(length as u64));
        let mut entries = vec![("files", Value::Array(data)), ("length", window), ("batch", batch)];
        entries.extend(extent.is_chat.then_some(("chat", Value::Boolean(true))));
        let precision = [("policy", text(&tuning.policy))].into_iter().chain(self.precision.clone());
        let mut sections = vec![
            ("seed", number(context.seed)),
            ("out", self.absolute(&tuning.out)?),
            ("model", table(vec![("init", self.place(self.model)?)])),
            ("data", table(entries)),
            ("precision", table(precision.collect())),
        ];
        if let Some((teacher, keys)) = &self.teacher {
            let keys = [("teacher", self.place(teacher)?)].into_iter().chain(keys.iter().cloned());
            sections.push(("distill", table(keys.collect())));
        }
        sections.extend(adapter(self.adapter, tuning).map(|adapter| ("adapter", adapter)));
        let mut optimizer = vec![
            ("kind", text(&tuning.optimizer)),
            ("lr", Value::Float(tuning.lr)),
            ("moments", text(&tuning.moments)),
            ("weight_decay", Value::Float(0.0)),
        ];
        if mantissa_train::optimizer_uses(&tuning.optimizer, "beta2") {
            optimizer.push(("beta2", Value::Float(0.999)));
        }
        let schedule = vec![
            ("steps", number(steps)),
            ("kind", text("constant")),
            ("warmup", number(steps.div_ceil(33))),
        ];
        sections.push(("optimizer", table(optimizer)));
        sections.push(("schedule", table(schedule)));
        sections.extend(self.validation(&extent, context)?.map(|validation| ("validation", validation)));
        sections.push(("telemetry", table(vec![("every", number(0))])));
        Ok(sections.into_iter().map(|(key, value)| (key.to_owned(), value)).collect())
    }

    /// Makes the table `[validation]`, measured ten times in the run, and says what is held out.
    fn validation(&self, extent: &Extent, context: &Context) -> Result<Option<Value>> {
        let patience = self.tuning.patience;
        let every = extent.steps.div_ceil(10);
        let mut entries = vec![("every", number(every)), ("patience", number(patience))];
        let what = if extent.is_chat { "conversations" } else { "text" };
        match &extent.validation {
            Some(Validation::Share(share)) if *share > 0.0 => {
                context.note(&format!(
                    "holding out {} % of the {what}: validation every {every} steps (--validation 0: none)",
                    100.0 * share
                ));
                entries.push(("share", Value::Float(*share)));
            }
            Some(Validation::File(file)) => {
                entries.push(("files", Value::Array(vec![self.absolute(file)?])));
            }
            _ if patience > 0 => {
                let error = BadInput::new("--patience", format!("{patience}, without validation"), "0");
                return Err(error.with_fix("--validation 0.1").into());
            }
            _ => return Ok(None),
        }
        Ok(Some(table(entries)))
    }
}

/// Makes the table `[adapter]`; `None` if all weights train.
fn adapter(adapter: Adapter, args: &Tuning) -> Option<Value> {
    let list = |names: &[String]| Value::Array(names.iter().map(|name| text(name)).collect());
    let targets = if args.target.is_empty() { vec!["*".to_owned()] } else { args.target.clone() };
    let mut entries = vec![
        ("kind", text(kind(adapter)?)),
        ("rank", number(args.rank as u64)),
        ("alpha", Value::Float(args.alpha)),
        ("dropout", Value::Float(args.dropout)),
        ("rslora", Value::Boolean(args.rslora)),
        ("targets", list(&targets)),
        ("train", list(&args.train)),
        ("loftq", number(args.loftq as u64)),
        ("merge", Value::Boolean(args.merge)),
    ];
    entries.extend(args.base_scheme.as_ref().map(|scheme| ("base", text(scheme))));
    entries.extend(args.requantize.as_ref().map(|scheme| ("requantize", text(scheme))));
    Some(table(entries))
}

/// Makes a text value.
pub(super) fn text(text: &str) -> Value {
    Value::String(text.to_owned())
}

fn number(n: u64) -> Value {
    Value::Integer(i64::try_from(n).unwrap_or(i64::MAX))
}

/// Makes a table.
pub(super) fn table(entries: Vec<(&str, Value)>) -> Value {
    Value::Table(entries.into_iter().map(|(key, value)| (key.to_owned(), value)).collect())
}

fn kind(adapter: Adapter) -> Option<&'static str> {
    match adapter {
        Adapter::Lora => Some("lora"),
        Adapter::Dora => Some("dora"),
        Adapter::Qlora => Some("qlora"),
        Adapter::None => None,
    }
}
