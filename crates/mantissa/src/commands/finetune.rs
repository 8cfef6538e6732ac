//! `mantissa finetune`: trains adapters or all weights of a model on a JSONL or text file.
//!
//! The job makes the settings of a training run, which runs as that of `mantissa train` does, with its folder,
//! checkpoints and resumption. [`Tuning`] has the options that `mantissa distill` shares.

use std::path::PathBuf;

use anyhow::Result;
use clap::ValueEnum;
use mantissa_jobs::finetune::{Finetune, FinetuneArguments, HeldOutData, TrainedWeights, TuningArguments};
use mantissa_jobs::train::events_folder;
use mantissa_store::{Kind, Paths};
use mantissa_train::Lora;

use super::execute::Execute;
use super::model::ModelPath;
use super::train::{execute, start_mode};
use crate::context::Context;
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
    #[value(alias = "full")]
    None,
}

/// Fine-tune a model: LoRA, DoRA, QLoRA or all weights
///
/// The data are a text, or JSON Lines or a JSON list of {"text": …}, of conversations ({"messages": …}; ShareGPT's
/// {"conversations": …}; Alpaca's {"instruction": …, "output": …}) or of prompts ({"prompt": …, "completion": …}). Conversations
/// are rendered with the model's chat template, with the loss on answers only. DIR is the folder of the run: settings,
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
    #[arg(long, default_value_t = Lora::default().rank, help_heading = "Adapter")]
    rank: usize,
    /// Scale of the update times the rank
    #[arg(long, default_value_t = Lora::default().alpha, help_heading = "Adapter")]
    alpha: f64,
    /// Share of adapter inputs set to 0
    #[arg(long, value_name = "SHARE", default_value_t = Lora::default().dropout, help_heading = "Adapter")]
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
    /// Windows of a batch [default: at most 8]
    ///
    /// Default: 8, or all windows of the data if they are fewer.
    #[arg(long, value_name = "N", help_heading = "Training")]
    batch: Option<usize>,
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
    /// Write event files for TensorBoard to DIR/RUN
    ///
    /// RUN is the last part of --out. A resumed run continues them.
    #[arg(long, value_name = "DIR", help_heading = "Output")]
    tensorboard: Option<PathBuf>,
    /// Resume from the last sound checkpoint of the run
    #[arg(long, conflicts_with = "restart")]
    resume: bool,
    /// Start over: remove the files of the existing run
    #[arg(long)]
    restart: bool,
    /// Preview memory and weight decay; write nothing
    #[arg(long)]
    pub(super) dry_run: bool,
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
        let arguments = FinetuneArguments {
            model: model.job_path().clone(),
            weights: adapter.weights(),
            tuning: tuning.arguments(),
            seed: context.seed,
        };
        execute(Finetune::resolve(&arguments, context)?.train(), tuning.dry_run, context)
    }
}

impl Adapter {
    /// Returns the weights that train.
    pub(super) fn weights(self) -> TrainedWeights {
        match self {
            Adapter::Lora => TrainedWeights::Lora,
            Adapter::Dora => TrainedWeights::Dora,
            Adapter::Qlora => TrainedWeights::Qlora,
            Adapter::None => TrainedWeights::All,
        }
    }
}

impl Tuning {
    /// Returns the options as arguments of a job.
    pub(super) fn arguments(&self) -> TuningArguments {
        TuningArguments {
            data: self.data.clone(),
            out: self.out.clone(),
            base_scheme: self.base_scheme.clone(),
            rank: self.rank,
            alpha: self.alpha,
            dropout: self.dropout,
            target: self.target.clone(),
            train: self.train.clone(),
            rslora: self.rslora,
            loftq: self.loftq,
            lr: self.lr,
            epochs: self.epochs,
            steps: self.steps,
            batch: self.batch,
            length: self.length,
            validation: self.validation.clone(),
            patience: self.patience,
            optimizer: self.optimizer.clone(),
            moments: self.moments.clone(),
            policy: self.policy.clone(),
            set: self.set.clone(),
            merge: self.merge,
            requantize: self.requantize.clone(),
            tensorboard: self.tensorboard.clone(),
            start: start_mode(self.resume, self.restart),
        }
    }

    /// Adds the paths that a run reads and writes, without its model.
    pub(super) fn paths(&self, paths: &mut Paths) {
        self.data.iter().for_each(|file| paths.read(file));
        if let Ok(Some(HeldOutData::File(file))) = self.arguments().held_out() {
            paths.read(file);
        }
        if !self.dry_run {
            paths.write("--out", &self.out, Kind::Run);
            if let Some(dir) = &self.tensorboard {
                paths.write("--tensorboard", events_folder(dir, &self.out), Kind::Run);
            }
        }
    }
}
