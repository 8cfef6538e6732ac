//! `mantissa finetune`: trains adapters or all weights of a model on a JSONL or text file.
//!
//! Writes the settings of a training run and runs it as `mantissa train` does, with its folder, checkpoints and
//! resumption.

use std::path::{Path, PathBuf};

use anyhow::Result;
use clap::ValueEnum;
use mantissa_model::{Bos, Tokenizer};
use mantissa_store::convention::ModelFiles;
use mantissa_store::{Kind, Paths};
use mantissa_train::config::RunConfig;
use mantissa_train::data::chat::ChatBatches;
use mantissa_train::data::{Cursor, TextFormat, documents_within};
use toml::{Table, Value};

use super::conversations::is_of_lines;
use super::model::{ModelPath, context_length, load_tokenizer, open_quietly};
use super::train::chat::conversations;
use super::train::execute;
use super::train::owned::How;
use crate::context::Context;
use crate::embedded;
use crate::error::BadInput;

/// Name of the settings in messages.
const NAME: &str = "finetune";

/// Bytes read of a file to see the kind of its first line.
const FIRST_LINE: u64 = 1 << 16;

/// Trained parameters.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum Adapter {
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
/// On SIGINT or SIGTERM the run writes a checkpoint and stops; --resume continues bit-exactly.
#[derive(clap::Args)]
#[command(after_help = "EXAMPLES
  mantissa finetune demo --data story.txt --out tuned --lr 2e-3
  mantissa finetune demo --data story.txt --out tuned --lr 2e-3 --resume
  mantissa finetune demo --data story.txt --out both --requantize int4-g32
  mantissa finetune demo --data story.txt --out other --dry-run")]
pub struct Args {
    /// Model folder, dense or quantized, or `demo`
    model: ModelPath,
    /// JSONL or text file to train on (repeatable)
    #[arg(long, value_name = "FILE", required = true)]
    data: Vec<PathBuf>,
    /// Folder of the run
    #[arg(long, value_name = "DIR")]
    out: PathBuf,
    /// Weights to train
    #[arg(long, value_enum, default_value = "qlora", help_heading = "Adapter")]
    adapter: Adapter,
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
    /// Needs --base-scheme.
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

/// Adds the paths that the command reads and writes.
pub fn paths(args: &Args, paths: &mut Paths) {
    args.model.paths(paths);
    args.data.iter().for_each(|file| paths.read(file));
    if !args.dry_run {
        paths.write("--out", &args.out, Kind::Run);
    }
}

/// Runs the command.
///
/// # Errors
/// As `mantissa train`; options that do not fit each other.
pub fn run(args: &Args, context: &Context) -> Result<()> {
    if args.adapter == Adapter::None && (args.merge || args.requantize.is_some()) {
        let error = BadInput::new("--merge", "--adapter none", "an adapter to merge");
        return Err(error.with_fix("leave out --merge: all weights are written to DIR/model").into());
    }
    let (base, model) = place(&args.model)?;
    let settings = settings(args, &model, context)?;
    let settings = RunConfig::parse(NAME, &toml::to_string(&settings)?, &args.set)?;
    let how = match (args.resume, args.restart) {
        (true, _) => How::Resume,
        (_, true) => How::Restart,
        _ => How::New,
    };
    execute(&settings, NAME, &base, how, args.dry_run, context)
}

/// Returns the folder that paths of the settings are relative to, and the model there. The embedded model keeps its name,
/// so that a run can be resumed by another process, which unpacks it elsewhere.
fn place(model: &ModelPath) -> Result<(PathBuf, String)> {
    if !model.is_embedded() {
        return Ok((PathBuf::new(), model.display().to_string()));
    }
    let folder = embedded::folder()?;
    Ok((folder.parent().unwrap_or(Path::new("")).to_owned(), embedded::NAME.to_owned()))
}

/// Returns a path that does not depend on the folder of the settings.
fn absolute(args: &Args, path: &Path) -> Result<Value> {
    let path = if args.model.is_embedded() { std::path::absolute(path)? } else { path.to_owned() };
    Ok(Value::String(path.display().to_string()))
}

/// Makes the settings of the run.
fn settings(args: &Args, model: &str, context: &Context) -> Result<Table> {
    let (length, steps) = size(args, context)?;
    let data = args.data.iter().map(|file| absolute(args, file)).collect::<Result<Vec<_>>>()?;
    let (batch, window) = (number(args.batch as u64), number(length as u64));
    let mut entries = vec![("files", Value::Array(data)), ("length", window), ("batch", batch)];
    entries.extend(is_chat(args)?.then_some(("chat", Value::Boolean(true))));
    let mut sections = vec![
        ("seed", number(context.seed)),
        ("out", absolute(args, &args.out)?),
        ("model", table(vec![("init", text(model))])),
        ("data", table(entries)),
        ("precision", table(vec![("policy", text(&args.policy))])),
    ];
    sections.extend(adapter(args).map(|adapter| ("adapter", adapter)));
    let mut optimizer = vec![
        ("kind", text(&args.optimizer)),
        ("lr", Value::Float(args.lr)),
        ("moments", text(&args.moments)),
        ("weight_decay", Value::Float(0.0)),
    ];
    if mantissa_train::optimizer_uses(&args.optimizer, "beta2") {
        optimizer.push(("beta2", Value::Float(0.999)));
    }
    let schedule =
        vec![("steps", number(steps)), ("kind", text("constant")), ("warmup", number(steps.div_ceil(33)))];
    sections.push(("optimizer", table(optimizer)));
    sections.push(("schedule", table(schedule)));
    sections.push(("telemetry", table(vec![("every", number(0))])));
    Ok(sections.into_iter().map(|(key, value)| (key.to_owned(), value)).collect())
}

/// Returns the tokens of a window and the number of steps.
fn size(args: &Args, context: &Context) -> Result<(usize, u64)> {
    if let (Some(length), Some(steps)) = (args.length, args.steps) {
        return Ok((length, steps));
    }
    let files = open_quietly(&args.model)?;
    if is_chat(args)? {
        let length = args.length.unwrap_or(context_length(&files)?.min(512));
        return Ok((length, args.steps.map_or_else(|| turns(args, &files, length, context), Ok)?));
    }
    let tokens = tokens(args, &load_tokenizer(&files, context)?, context)?;
    // Little data still make one window.
    let most = usize::try_from(tokens).unwrap_or(usize::MAX).saturating_sub(1).max(1);
    let longest = context_length(&files)?.min(512).min(most);
    let length = args.length.unwrap_or(longest);
    Ok((length, args.steps.map_or_else(|| passes(args, tokens, length), Ok)?))
}

/// Makes the table `[adapter]`; `None` if all weights train.
fn adapter(args: &Args) -> Option<Value> {
    let list = |names: &[String]| Value::Array(names.iter().map(|name| text(name)).collect());
    let targets = if args.target.is_empty() { vec!["*".to_owned()] } else { args.target.clone() };
    let mut entries = vec![
        ("kind", text(kind(args.adapter)?)),
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

fn text(text: &str) -> Value {
    Value::String(text.to_owned())
}

fn number(n: u64) -> Value {
    Value::Integer(i64::try_from(n).unwrap_or(i64::MAX))
}

fn table(entries: Vec<(&str, Value)>) -> Value {
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

/// Returns the number of steps of [`Args::epochs`] over `tokens` tokens.
fn passes(args: &Args, tokens: u64, length: usize) -> Result<u64> {
    if !(args.epochs.is_finite() && args.epochs > 0.0) {
        return Err(BadInput::new("--epochs", args.epochs.to_string(), "a number above 0").into());
    }
    let windows = tokens.saturating_sub(1) / length.max(1) as u64;
    let steps = (windows as f64 * args.epochs / args.batch.max(1) as f64).ceil();
    Ok((steps as u64).max(1))
}

/// True if the first line of the first file is a conversation or a prompt with its answer.
fn is_chat(args: &Args) -> Result<bool> {
    let Some(file) = args.data.first().filter(|file| is_of_lines(file)) else { return Ok(false) };
    let fault =
        |operation, error| mantissa_store::Error::opening(file, "a file of training data", operation, error);
    let mut start = Vec::new();
    let opened = std::fs::File::open(file).map_err(|error| fault("open", error))?;
    let mut limited = std::io::Read::take(opened, FIRST_LINE);
    std::io::Read::read_to_end(&mut limited, &mut start).map_err(|error| fault("read", error))?;
    let start = String::from_utf8_lossy(&start);
    let line = start.lines().find(|line| !line.trim().is_empty()).unwrap_or_default();
    let keys = ["messages", "prompt", "completion"];
    Ok(match serde_json::from_str::<serde_json::Value>(line) {
        Ok(value) => keys.iter().any(|key| value.get(key).is_some()),
        // Longer than what was read: the key is among the first of the line, or it is a text.
        Err(_) => {
            keys.iter().any(|key| line.trim_start().starts_with('{') && line.contains(&format!("\"{key}\":")))
        }
    })
}

/// Returns the number of steps of [`Args::epochs`] over packed conversations.
fn turns(args: &Args, files: &ModelFiles, length: usize, context: &Context) -> Result<u64> {
    let Some(file) = args.data.first() else { return Ok(1) };
    let tokenizer = load_tokenizer(files, context)?;
    let lines = conversations(file, files.dir(), &tokenizer, length, context)?;
    let windows = ChatBatches::new(lines, usize::MAX, length, context.seed, Cursor::default())?.windows();
    passes(args, windows * length as u64 + 1, length)
}

/// Counts the tokens of the data, with one between two documents.
fn tokens(args: &Args, tokenizer: &Tokenizer, context: &Context) -> Result<u64> {
    let mut tokens = 0u64;
    for file in &args.data {
        let format = match is_of_lines(file) {
            true => TextFormat::JsonLines { field: "text".to_owned() },
            false => TextFormat::Text { split: None },
        };
        documents_within(file, &format, context.memory_left(), |document| {
            tokens += 1 + tokenizer.encode(document, Bos::Auto)?.len() as u64;
            Ok(())
        })?;
    }
    Ok(tokens)
}
