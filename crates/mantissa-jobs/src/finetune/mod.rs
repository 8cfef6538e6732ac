//! Runs that start from a model: fine-tuning, and distillation from a teacher. Both make the settings of a training run
//! ([`crate::train`]).

mod arguments;
mod extent;
mod job;
mod settings;

pub use arguments::{HeldOutData, TrainedWeights, TuningArguments};
pub use job::{Distill, DistillArguments, Finetune, FinetuneArguments};
