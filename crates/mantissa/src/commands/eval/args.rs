//! Arguments of `mantissa eval`.

use std::path::PathBuf;

use mantissa_jobs::Evaluate;
use mantissa_jobs::names::AsText;
use mantissa_model::{AttentionOperands, KvPolicy};
use mantissa_num::Accumulator;

use crate::commands::adapter::AdapterArgs;
use crate::commands::calibration::CalibrationArgs;
use crate::commands::model::ModelPath;
use crate::commands::run::Engine;
use crate::commands::text::{TextArgs, bound};
use crate::commands::workers::WorkersArgs;

/// Measure perplexity, KL, top-1 agreement, or accuracy on tasks
///
/// KL and top-1 agreement need --reference. NLL is the mean of -ln p over predicted tokens, in nats; KL is KL(reference || model) over the same
/// positions. Standard errors take windows (documents) as the independent unit; differences are paired per
/// position.
///
/// Built-in tasks: cloze, retrieval, arithmetic, format (mantissa help reference/tasks). Those of lm-evaluation-harness, such as
/// hellaswag, run through the Python package (mantissa help guide/python).
#[derive(clap::Args)]
#[command(after_help = "EXAMPLES
  mantissa eval demo --text story.txt --context 256
  mantissa eval demo-int4 --reference demo --text story.txt --context 256
  mantissa eval demo --reference demo --text story.txt --context 256 \\
      --kv int4-head-asym,window=64 --prefill 32
  mantissa eval path/to/model --text stories.txt --split '<|endoftext|>' \\
      --docs 1..64 --json
  mantissa eval path/to/quantized --reference path/to/model \\
      --tokens windows.json:eval --max-kl 0.05
  mantissa eval demo-int4 --reference demo --task cloze --task retrieval")]
pub struct Args {
    /// Hugging Face folder, .gguf file, or demo
    ///
    /// demo is the model inside the binary.
    model: ModelPath,
    #[command(flatten)]
    text: TextArgs,
    #[command(flatten)]
    tasks: TaskArgs,
    /// Model to compare with
    #[arg(long, value_name = "MODEL", help_heading = "Evaluation")]
    reference: Option<ModelPath>,
    /// Quantize the KV cache of MODEL
    ///
    /// A scheme (int8-head, int4-g32-asym …), or
    /// keys=SCHEME,values=SCHEME,window=N,sinks=N,scales=f16,channel-keys,pre-rope,rotate. Without --prefill,
    /// every position of a window is quantized. nuq4-1% and similar learn their levels on --calibration,
    /// unless MODEL has them.
    #[arg(long, value_name = "SCHEME", help_heading = "Simulation")]
    kv: Option<KvPolicy>,
    #[command(flatten)]
    calibration: CalibrationArgs,
    /// Decode like generation, with N tokens as the prompt
    ///
    /// The rest of each window is decoded one by one, and only those tokens count.
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..), help_heading = "Simulation", hide_short_help = true)]
    prefill: Option<u32>,
    /// Simulate attention operand dtypes of MODEL
    ///
    /// int8 or fp8 for all operands, or q=SCHEME,k=SCHEME,v=SCHEME,p=ELEMENT for queries, keys, values and
    /// attention weights, plus rotate, smooth.
    #[arg(long, value_name = "OPERANDS", help_heading = "Simulation", hide_short_help = true)]
    attention_operands: Option<AttentionOperands>,
    /// Simulate an FP8 accumulator for MODEL's FP8 matmuls
    ///
    /// f32, hopper (14 bits) or hopper-128 (14 bits, added to f32 every 128 products).
    #[arg(long, value_name = "UNIT", help_heading = "Simulation", hide_short_help = true)]
    accumulator: Option<Accumulator>,
    /// Kernels that run MODEL
    ///
    /// fast measures the engine of run, through its KV cache. The reference model always runs on reference.
    #[arg(long, value_enum, value_name = "ENGINE", default_value_t = Engine::Reference, help_heading = "Evaluation")]
    engine: Engine,
    #[command(flatten, next_help_heading = "Evaluation")]
    adapter: AdapterArgs,
    #[command(flatten)]
    pub(super) workers: WorkersArgs,
    /// Say what would be loaded; measure nothing
    #[arg(long, help_heading = "Output")]
    pub(super) dry_run: bool,
    /// Write the sums of each window to this JSON file
    #[arg(long, value_name = "FILE", help_heading = "Output", hide_short_help = true)]
    per_window: Option<PathBuf>,
    /// Write all logits to this safetensors file
    ///
    /// F32 [windows, tokens, vocabulary], and the token ids.
    #[arg(long, value_name = "FILE", help_heading = "Output", hide_short_help = true)]
    logits: Option<PathBuf>,
    /// Fail if the KL is higher (nats/token)
    ///
    /// Exit code 1.
    #[arg(long, value_name = "NATS", value_parser = bound, requires = "reference", help_heading = "Evaluation")]
    max_kl: Option<f64>,
    /// Fail if perplexity grows by more, such as 0.02
    ///
    /// A share of the reference's perplexity. Exit code 1.
    #[arg(long, value_name = "SHARE", value_parser = bound, requires = "reference", help_heading = "Evaluation")]
    max_ppl_increase: Option<f64>,
}

/// Options for tasks.
#[derive(clap::Args)]
struct TaskArgs {
    /// Measure accuracy on a task; can be repeated
    ///
    /// A built-in task (cloze, retrieval, arithmetic, format), or FILE.jsonl. Each line is an item: {"prompt",
    /// "choices", "answer"} takes the choice with the largest log-likelihood, {"prompt", "target"} generates greedily.
    #[arg(
        long,
        value_name = "TASK",
        group = "measured_on",
        help_heading = "Evaluation",
        conflicts_with_all = ["context", "stride", "split", "docs", "limit", "prefill", "per_window", "logits", "max_kl", "max_ppl_increase"]
    )]
    task: Vec<PathBuf>,
    /// Use each prompt as a chat message of the user
    ///
    /// MODEL's chat template renders it.
    #[arg(
        long,
        requires = "task",
        conflicts_with = "bos",
        help_heading = "Evaluation",
        hide_short_help = true
    )]
    chat: bool,
    /// Fail if the accuracy of a task falls by more, such as 0.02
    ///
    /// Against the reference. Exit code 1.
    #[arg(long, value_name = "SHARE", value_parser = bound, requires_all = ["reference", "task"], help_heading = "Evaluation", hide_short_help = true)]
    max_accuracy_drop: Option<f64>,
    /// Write the answer to each item to this JSON Lines file
    #[arg(long, value_name = "FILE", requires = "task", help_heading = "Output", hide_short_help = true)]
    per_item: Option<PathBuf>,
}

impl Args {
    /// Returns the models to load.
    pub(super) fn models(&self) -> impl Iterator<Item = &mantissa_jobs::ModelPath> {
        [Some(&self.model), self.reference.as_ref()].into_iter().flatten().map(ModelPath::job_path)
    }

    /// Returns the job.
    pub(super) fn job(&self, seed: u64) -> Evaluate {
        let TaskArgs { task, chat, max_accuracy_drop, per_item } = &self.tasks;
        Evaluate {
            model: self.model.job_path().clone(),
            adapter: self.adapter.named().map(Into::into),
            reference: self.reference.as_ref().map(|model| model.job_path().clone()),
            text: self.text.value(),
            tasks: task.clone(),
            chat: *chat,
            engine: self.engine.into(),
            kv: self.kv.clone().map(AsText),
            calibration: self.calibration.value(),
            prefill: self.prefill,
            attention_operands: self.attention_operands.clone().map(AsText),
            accumulator: self.accumulator.map(AsText),
            per_window: self.per_window.clone(),
            logits: self.logits.clone(),
            per_item: per_item.clone(),
            max_kl: self.max_kl,
            max_ppl_increase: self.max_ppl_increase,
            max_accuracy_drop: *max_accuracy_drop,
            seed,
        }
    }
}
