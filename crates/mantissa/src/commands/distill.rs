//! `mantissa distill`: trains a model towards the predictions of another.
//!
//! Writes the settings of a training run with a teacher and runs it as `mantissa finetune` does. The loss is defined in
//! [`mantissa_train::Teacher`].

use anyhow::Result;
use mantissa_num::Scheme;
use mantissa_store::Paths;
use toml::Value;

use super::execute::Execute;
use super::finetune::{Adapter, Job, Tuning, table, text};
use super::model::ModelPath;
use super::parse::scheme;
use crate::context::Context;
use crate::error::BadInput;
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
    #[arg(long, value_name = "A", default_value_t = 1.0, help_heading = "Distillation")]
    weight: f64,
    /// Temperature of both models
    ///
    /// T, by which the logits of both are divided in the divergence.
    #[arg(long, value_name = "T", default_value_t = 1.0, help_heading = "Distillation")]
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
        if self.scheme.is_some() && self.adapter != Adapter::None {
            let error = BadInput::new("--scheme", "an adapter", "--adapter none");
            return Err(error.with_fix("leave out --scheme, or train all weights").into());
        }
        let keys =
            vec![("weight", Value::Float(self.weight)), ("temperature", Value::Float(self.temperature))];
        Job {
            name: "distill",
            model: &self.student,
            adapter: self.adapter,
            tuning: &self.tuning,
            teacher: Some((&self.teacher, keys)),
            precision: self.scheme.as_ref().map(rounded).unwrap_or_default(),
        }
        .run(context)
    }
}

/// Returns the keys of a precision policy whose linear weights are rounded to `scheme` in the forward pass, with
/// straight-through gradients.
fn rounded(scheme: &Scheme) -> Vec<(&'static str, Value)> {
    let straight = table(vec![("scheme", text("f32")), ("source", text("forward"))]);
    vec![("fprop", table(vec![("w", text(&scheme.to_string()))])), ("dgrad", table(vec![("w", straight)]))]
}
