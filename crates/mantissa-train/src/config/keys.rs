//! Tables of the settings with their defaults.

use serde::{Deserialize, Serialize};

use super::Optimizer;
use super::adapter::AdapterConfig;
use super::declared::default;
use crate::policy::PolicyTable;
use crate::teacher::SoftTargets;

/// Settings of a training run.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
#[expect(missing_docs, reason = "`declared` describes every key")]
pub struct RunConfig {
    #[serde(default)]
    pub seed: u64,
    pub out: String,
    pub model: Model,
    pub data: Data,
    #[serde(default, skip_serializing_if = "Validation::is_default")]
    pub validation: Validation,
    #[serde(default, skip_serializing_if = "Samples::is_default")]
    pub samples: Samples,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub adapter: Option<AdapterConfig>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub distill: Option<Distill>,
    #[serde(default)]
    pub precision: PolicyTable,
    pub optimizer: Optimizer,
    pub schedule: ScheduleConfig,
    #[serde(default)]
    pub checkpoint: CheckpointConfig,
    #[serde(default)]
    pub telemetry: Telemetry,
}

/// `[model]`.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
#[expect(missing_docs, reason = "`declared` describes every key")]
pub struct Model {
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub config: Option<String>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub tokenizer: Option<String>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub init: Option<String>,
    #[serde(default = "std")]
    pub std: f64,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub architecture: Option<toml::Table>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub balance: Option<f64>,
}

/// `[distill]`.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
#[expect(missing_docs, reason = "`declared` describes every key")]
pub struct Distill {
    #[serde(skip_serializing_if = "Option::is_none")]
    pub teacher: Option<String>,
    // Checkpoints of earlier versions have neither.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub weight: Option<f64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub temperature: Option<f64>,
    pub generated: usize,
}

impl Distill {
    /// Returns weight and temperature of the teacher's predictions.
    pub fn soft_targets(&self) -> SoftTargets {
        let SoftTargets { weight, temperature } = SoftTargets::default();
        SoftTargets {
            weight: self.weight.unwrap_or(weight),
            temperature: self.temperature.unwrap_or(temperature),
        }
    }
}

/// `[data]`.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
#[expect(missing_docs, reason = "`declared` describes every key")]
pub struct Data {
    pub files: Vec<String>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub split: Option<String>,
    #[serde(default = "field")]
    pub field: String,
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub chat: bool,
    pub length: usize,
    pub batch: usize,
    #[serde(default = "accumulate")]
    pub accumulate: usize,
}

/// `[validation]`.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
#[expect(missing_docs, reason = "`declared` describes every key")]
pub struct Validation {
    pub files: Vec<String>,
    pub share: f64,
    pub every: u64,
    pub batches: usize,
    pub patience: u64,
}

impl Validation {
    fn is_default(&self) -> bool {
        *self == Self::default()
    }

    /// True if documents are held out and their loss is measured.
    pub fn is_active(&self) -> bool {
        self.share > 0.0 || !self.files.is_empty()
    }

    /// True if the loss is measured after `step` of `last`.
    pub fn is_due(&self, step: u64, last: bool) -> bool {
        self.is_active() && (last || step.is_multiple_of(self.every.max(1)))
    }
}

impl Default for Validation {
    fn default() -> Self {
        Validation {
            files: Vec::new(),
            share: default("validation.share"),
            every: default("validation.every"),
            batches: default("validation.batches"),
            patience: default("validation.patience"),
        }
    }
}

/// `[samples]`.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
#[expect(missing_docs, reason = "`declared` describes every key")]
pub struct Samples {
    pub prompts: Vec<String>,
    pub every: u64,
    pub tokens: usize,
    pub temperature: f64,
}

impl Samples {
    fn is_default(&self) -> bool {
        *self == Self::default()
    }

    /// True if prompts are continued after `step`.
    pub fn is_due(&self, step: u64, last: bool) -> bool {
        !self.prompts.is_empty() && (last || step.is_multiple_of(self.every.max(1)))
    }
}

impl Default for Samples {
    fn default() -> Self {
        Samples {
            prompts: Vec::new(),
            every: default("samples.every"),
            tokens: default("samples.tokens"),
            temperature: default("samples.temperature"),
        }
    }
}

/// `[schedule]`.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
#[expect(missing_docs, reason = "`declared` describes every key")]
pub struct ScheduleConfig {
    #[serde(default, skip_serializing_if = "is_zero")]
    pub steps: u64,
    #[serde(default, skip_serializing_if = "is_zero_minutes")]
    pub minutes: f64,
    #[serde(default = "cosine")]
    pub kind: String,
    #[serde(default)]
    pub warmup: u64,
    #[serde(default = "min_ratio")]
    pub min_ratio: f64,
    #[serde(default)]
    pub decay_steps: u64,
    #[serde(default = "decay_share", skip_serializing_if = "is_decay_share")]
    pub decay_share: f64,
}

/// `[checkpoint]`.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
#[expect(missing_docs, reason = "`declared` describes every key")]
pub struct CheckpointConfig {
    pub every: u64,
    pub keep: usize,
    #[serde(skip_serializing_if = "is_true")]
    pub best: bool,
}

/// `[telemetry]`.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
#[expect(missing_docs, reason = "`declared` describes every key")]
pub struct Telemetry {
    pub every: u64,
}

fn is_zero(n: &u64) -> bool {
    *n == 0
}

fn is_zero_minutes(n: &f64) -> bool {
    *n == 0.0
}

fn decay_share() -> f64 {
    default("schedule.decay_share")
}

fn is_decay_share(share: &f64) -> bool {
    *share == decay_share()
}

fn is_true(value: &bool) -> bool {
    *value
}

fn std() -> f64 {
    default("model.std")
}

fn field() -> String {
    default("data.field")
}

fn accumulate() -> usize {
    default("data.accumulate")
}

fn cosine() -> String {
    default("schedule.kind")
}

fn min_ratio() -> f64 {
    default("schedule.min_ratio")
}

impl Default for CheckpointConfig {
    fn default() -> Self {
        CheckpointConfig {
            every: default("checkpoint.every"),
            keep: default("checkpoint.keep"),
            best: default("checkpoint.best"),
        }
    }
}

impl Default for Telemetry {
    fn default() -> Self {
        Telemetry { every: default("telemetry.every") }
    }
}
