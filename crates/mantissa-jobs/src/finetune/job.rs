//! Fine-tuning and distillation as jobs: training runs that start from a model.

use std::path::PathBuf;

use mantissa_num::Scheme;
use serde::{Deserialize, Serialize};
use toml::Value;

use super::arguments::{TrainedWeights, TuningArguments};
use super::settings::{Tuned, table, text};
use crate::error::{BadInput, Result};
use crate::host::Host;
use crate::job::{Job, JobOutput};
use crate::model::ModelPath;
use crate::train::{Train, TrainReport};

/// Arguments of fine-tuning.
#[derive(Clone, Debug, PartialEq)]
pub struct FinetuneArguments {
    /// Model to train.
    pub model: ModelPath,
    /// Weights to train.
    pub weights: TrainedWeights,
    /// Options of the run.
    pub tuning: TuningArguments,
    /// Seed of all random numbers.
    pub seed: u64,
}

/// Arguments of distillation.
#[derive(Clone, Debug, PartialEq)]
pub struct DistillArguments {
    /// Model to learn from.
    pub teacher: ModelPath,
    /// Model to train.
    pub student: ModelPath,
    /// Weight of the teacher in the loss.
    pub weight: f64,
    /// Temperature of both models.
    pub temperature: f64,
    /// Scheme that linear weights are trained for (QAT).
    pub scheme: Option<Scheme>,
    /// Weights to train.
    pub weights: TrainedWeights,
    /// Options of the run.
    pub tuning: TuningArguments,
    /// Seed of all random numbers.
    pub seed: u64,
}

/// Fine-tuning of a model: adapters or all weights.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(transparent)]
pub struct Finetune(Train);

/// Training of a model towards the predictions of another.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(transparent)]
pub struct Distill(Train);

impl Finetune {
    /// Makes the settings of the run. Data are read if an option is to be chosen by them.
    ///
    /// # Errors
    /// Options that do not fit each other; data or a model that cannot be read.
    pub fn resolve(arguments: &FinetuneArguments, host: &Host) -> Result<Self> {
        let FinetuneArguments { model, weights, tuning, seed } = arguments;
        let tuned = Tuned {
            name: "finetune",
            model,
            weights: *weights,
            tuning,
            teacher: None,
            precision: Vec::new(),
        };
        tuned.resolve(*seed, host).map(Finetune)
    }

    /// Returns the training run.
    pub fn train(&self) -> &Train {
        &self.0
    }
}

impl Distill {
    /// Makes the settings of the run. Data are read if an option is to be chosen by them.
    ///
    /// # Errors
    /// As [`Finetune::resolve`].
    pub fn resolve(arguments: &DistillArguments, host: &Host) -> Result<Self> {
        let DistillArguments { teacher, student, weight, temperature, scheme, weights, tuning, seed } =
            arguments;
        if scheme.is_some() && *weights != TrainedWeights::All {
            let error = BadInput::new("--scheme", "an adapter", "--adapter none");
            return Err(error.with_fix("leave out --scheme, or train all weights").into());
        }
        let keys = vec![("weight", Value::Float(*weight)), ("temperature", Value::Float(*temperature))];
        let tuned = Tuned {
            name: "distill",
            model: student,
            weights: *weights,
            tuning,
            teacher: Some((teacher, keys)),
            precision: scheme.as_ref().map(rounded).unwrap_or_default(),
        };
        tuned.resolve(*seed, host).map(Distill)
    }

    /// Returns the training run.
    pub fn train(&self) -> &Train {
        &self.0
    }
}

/// Returns the keys of a precision policy whose linear weights are rounded to `scheme` in the forward pass, with
/// straight-through gradients.
fn rounded(scheme: &Scheme) -> Vec<(&'static str, Value)> {
    let straight = table(vec![("scheme", text("f32")), ("source", text("forward"))]);
    vec![("fprop", table(vec![("w", text(&scheme.to_string()))])), ("dgrad", table(vec![("w", straight)]))]
}

impl Job for Finetune {
    const NAME: &'static str = "finetune";
    const VERSION: u32 = Train::VERSION;
    type Report = TrainReport;

    fn inputs(&self) -> Vec<PathBuf> {
        self.0.inputs()
    }

    fn outputs(&self) -> Vec<JobOutput> {
        self.0.outputs()
    }

    fn memory(&self, host: &Host) -> Result<u64> {
        self.0.memory(host)
    }

    fn run(&self, host: &Host) -> Result<TrainReport> {
        self.0.run(host)
    }
}

impl Job for Distill {
    const NAME: &'static str = "distill";
    const VERSION: u32 = Train::VERSION;
    type Report = TrainReport;

    fn inputs(&self) -> Vec<PathBuf> {
        self.0.inputs()
    }

    fn outputs(&self) -> Vec<JobOutput> {
        self.0.outputs()
    }

    fn memory(&self, host: &Host) -> Result<u64> {
        self.0.memory(host)
    }

    fn run(&self, host: &Host) -> Result<TrainReport> {
        self.0.run(host)
    }
}
