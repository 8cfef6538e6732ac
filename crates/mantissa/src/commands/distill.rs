//! `mantissa distill`: trains a model towards the predictions of another.
//!
//! The job makes the settings of a training run with a teacher, which runs as `mantissa finetune` does. The loss is defined in
//! [`mantissa_train::Teacher`].

use anyhow::Result;
use mantissa_jobs::finetune::{Distill, DistillArguments};
use mantissa_num::Scheme;
use mantissa_store::Paths;
use mantissa_train::SoftTargets;

use super::execute::Execute;
use super::finetune::{Adapter, Tuning};
use super::model::ModelPath;
use super::parse::scheme;
use super::train::execute;
use crate::context::Context;
use crate::help::Group;

/// Train a model towards the predictions of another
///
/// Knowledge distillation: the loss of a token is (1 - A) times its negative log-likelihood, plus A T² times
/// KL(teacher || student), both softened by the temperature T. With --scheme the student's weights are rounded to that
/// scheme in every forward pass (quantization-aware distillation); quantize --recipe rtn-SCHEME --format native then
/// rounds them so. Data, folder of the run, checkpoints and --resume are those of finetune.
#[derive(clap::Args)]
#[command(after_help = "EXAMPLES
  mantissa distill demo demo --scheme int3-g32 --data story.txt --out qad
  mantissa distill path/to/large path/to/small --data text.txt --out small
  mantissa distill path/to/model model-int4 --adapter lora --data text.txt \\
      --out healed --weight 0.5 --temperature 2")]
pub struct Args {
    /// Model to learn from: folder, .gguf file, or demo
    ///
    /// Dense or quantized, with the tokenizer of STUDENT.
    teacher: ModelPath,
    /// Model to train: folder, dense or quantized, or demo
    ///
    /// A quantized one needs an adapter.
    student: ModelPath,
    /// Weight of the teacher, 0 to 1
    ///
    /// A in the loss, where its predictions have it, and the text's tokens 1 - A.
    #[arg(long, value_name = "A", default_value_t = SoftTargets::default().weight, help_heading = "Distillation")]
    weight: f64,
    /// Temperature of both models
    ///
    /// T, by which the logits of both are divided in the divergence.
    #[arg(long, value_name = "T", default_value_t = SoftTargets::default().temperature, help_heading = "Distillation")]
    temperature: f64,
    /// Train the linear weights for this scheme (QAT)
    ///
    /// They are rounded to it in every forward pass; gradients pass the rounding unchanged. Needs --adapter none.
    #[arg(long, value_name = "SCHEME", value_parser = scheme, help_heading = "Distillation")]
    scheme: Option<Scheme>,
    /// Weights to train
    #[arg(long, value_enum, default_value = "none", help_heading = "Adapter")]
    adapter: Adapter,
    #[command(flatten)]
    tuning: Tuning,
}

impl Execute for Args {
    const GROUP: Group = Group::Train;
    const TRAINS: bool = true;

    fn paths(&self, paths: &mut Paths) -> Result<()> {
        self.teacher.paths(paths);
        self.student.paths(paths);
        self.tuning.paths(paths);
        Ok(())
    }

    /// # Errors
    /// As `mantissa finetune`; a teacher with another vocabulary or tokenizer.
    fn run(&self, context: &Context) -> Result<()> {
        let arguments = DistillArguments {
            teacher: self.teacher.job_path().clone(),
            student: self.student.job_path().clone(),
            weight: self.weight,
            temperature: self.temperature,
            scheme: self.scheme.clone(),
            weights: self.adapter.weights(),
            tuning: self.tuning.arguments(),
            seed: context.seed,
        };
        execute(Distill::resolve(&arguments, context)?.train(), self.tuning.dry_run, context)
    }
}
