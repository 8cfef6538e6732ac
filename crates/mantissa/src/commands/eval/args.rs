//! Arguments of `mantissa eval`.

use std::path::PathBuf;

use mantissa_model::{AttentionOperands, KvPolicy};
use mantissa_num::Accumulator;
use mantissa_store::{Kind, Paths};

use crate::commands::adapter::AdapterArgs;
use crate::commands::calibration::CalibrationArgs;
use crate::commands::model::ModelPath;
use crate::commands::run::Engine;
use crate::commands::tasks;
use crate::commands::text::{TextArgs, bound};

/// Measure perplexity, KL, top-1 agreement, or accuracy on tasks
///
/// KL and top-1 agreement need --reference. NLL is the mean of -ln p over predicted tokens, in nats; KL is KL(reference || model) over the same
/// positions. Standard errors take windows (documents) as the independent unit; differences are paired per
/// position.
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
    pub(super) model: ModelPath,
    #[command(flatten)]
    pub(super) text: TextArgs,
    #[command(flatten)]
    pub(super) tasks: TaskArgs,
    /// Model to compare with
    #[arg(long, value_name = "MODEL", help_heading = "Evaluation")]
    pub(super) reference: Option<ModelPath>,
    /// Quantize the KV cache of MODEL
    ///
    /// A scheme (int8-head, int4-g32-asym …), or
    /// keys=SCHEME,values=SCHEME,window=N,sinks=N,scales=f16,channel-keys,pre-rope,rotate. Without --prefill,
    /// every position of a window is quantized. nuq4-1% and similar learn their levels on --calibration,
    /// unless MODEL has them.
    #[arg(long, value_name = "SCHEME", help_heading = "Simulation")]
    pub(super) kv: Option<KvPolicy>,
    #[command(flatten)]
    pub(super) calibration: CalibrationArgs,
    /// Decode like generation, with N tokens as the prompt
    ///
    /// The rest of each window is decoded one by one, and only those tokens count.
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..), help_heading = "Simulation", hide_short_help = true)]
    pub(super) prefill: Option<u32>,
    /// Simulate attention operand dtypes of MODEL
    ///
    /// int8 or fp8 for all operands, or q=SCHEME,k=SCHEME,v=SCHEME,p=ELEMENT for queries, keys, values and
    /// attention weights, plus rotate, smooth.
    #[arg(long, value_name = "OPERANDS", help_heading = "Simulation", hide_short_help = true)]
    pub(super) attention_operands: Option<AttentionOperands>,
    /// Simulate an FP8 accumulator for MODEL's FP8 matmuls
    ///
    /// f32, hopper (14 bits) or hopper-128 (14 bits, added to f32 every 128 products).
    #[arg(long, value_name = "UNIT", help_heading = "Simulation", hide_short_help = true)]
    pub(super) accumulator: Option<Accumulator>,
    /// Kernels that run MODEL
    ///
    /// fast measures the engine of run, through its KV cache. The reference model always runs on reference.
    #[arg(long, value_enum, value_name = "ENGINE", default_value_t = Engine::Reference, help_heading = "Evaluation")]
    pub(super) engine: Engine,
    #[command(flatten, next_help_heading = "Evaluation")]
    pub(super) adapter: AdapterArgs,
    /// Write the sums of each window to this JSON file
    #[arg(long, value_name = "FILE", help_heading = "Output", hide_short_help = true)]
    pub(super) per_window: Option<PathBuf>,
    /// Write all logits to this safetensors file
    ///
    /// F32 [windows, tokens, vocabulary], and the token ids.
    #[arg(long, value_name = "FILE", help_heading = "Output", hide_short_help = true)]
    pub(super) logits: Option<PathBuf>,
    /// Fail if the KL is higher (nats/token)
    ///
    /// Exit code 1.
    #[arg(long, value_name = "NATS", value_parser = bound, requires = "reference", help_heading = "Evaluation")]
    pub(super) max_kl: Option<f64>,
    /// Fail if perplexity grows by more, such as 0.02
    ///
    /// A share of the reference's perplexity. Exit code 1.
    #[arg(long, value_name = "SHARE", value_parser = bound, requires = "reference", help_heading = "Evaluation")]
    pub(super) max_ppl_increase: Option<f64>,
}

/// Options for tasks.
#[derive(clap::Args)]
pub struct TaskArgs {
    /// Measure accuracy on a task; can be repeated
    ///
    /// FILE.jsonl, or a built-in task: cloze, retrieval, arithmetic, format. Each line is an item: {"prompt",
    /// "choices", "answer"} takes the choice with the largest log-likelihood, {"prompt", "target"} generates greedily.
    #[arg(
        long,
        value_name = "TASK",
        group = "measured_on",
        help_heading = "Evaluation",
        conflicts_with_all = ["context", "stride", "split", "docs", "limit", "prefill", "per_window", "logits", "max_kl", "max_ppl_increase"]
    )]
    pub(super) task: Vec<PathBuf>,
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
    pub(super) chat: bool,
    /// Fail if the accuracy of a task falls by more, such as 0.02
    ///
    /// Against the reference. Exit code 1.
    #[arg(long, value_name = "SHARE", value_parser = bound, requires_all = ["reference", "task"], help_heading = "Evaluation", hide_short_help = true)]
    pub(super) max_accuracy_drop: Option<f64>,
    /// Write the answer to each item to this JSON Lines file
    #[arg(long, value_name = "FILE", requires = "task", help_heading = "Output", hide_short_help = true)]
    pub(super) per_item: Option<PathBuf>,
}

impl TaskArgs {
    /// True if a task is given.
    pub fn given(&self) -> bool {
        !self.task.is_empty()
    }

    /// Adds the files that are read and written.
    pub fn paths(&self, paths: &mut Paths) {
        tasks::paths(&self.task, paths);
        self.per_item.iter().for_each(|path| paths.write("--per-item", path, Kind::File));
    }
}
