//! Tables of the settings with their defaults.

use serde::{Deserialize, Serialize};

use crate::optim::DecayGroups;
use crate::policy::PolicyTable;

/// Settings of a training run.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
#[expect(missing_docs, reason = "the text of the parent module describes every key")]
pub struct RunConfig {
    #[serde(default)]
    pub seed: u64,
    pub out: String,
    pub model: Model,
    pub data: Data,
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
#[expect(missing_docs, reason = "the text of the parent module describes every key")]
pub struct Model {
    pub config: String,
    pub tokenizer: String,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub init: Option<String>,
    #[serde(default = "std")]
    pub std: f64,
}

/// `[data]`.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
#[expect(missing_docs, reason = "the text of the parent module describes every key")]
pub struct Data {
    pub files: Vec<String>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub split: Option<String>,
    #[serde(default = "field")]
    pub field: String,
    pub length: usize,
    pub batch: usize,
    #[serde(default = "one")]
    pub accumulate: usize,
}

/// `[optimizer]`.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
#[expect(missing_docs, reason = "the text of the parent module describes every key")]
pub struct Optimizer {
    #[serde(default = "adamw")]
    pub kind: String,
    pub lr: f64,
    #[serde(default = "f32_moments")]
    pub moments: String,
    #[serde(default = "beta1")]
    pub beta1: f64,
    #[serde(default = "beta2")]
    pub beta2: f64,
    #[serde(default = "eps")]
    pub eps: f64,
    #[serde(default = "weight_decay")]
    pub weight_decay: f64,
    #[serde(default = "momentum")]
    pub momentum: f64,
    #[serde(default)]
    pub nesterov: bool,
    #[serde(default = "decay")]
    pub decay: Vec<String>,
    #[serde(default)]
    pub no_decay: Vec<String>,
    #[serde(default = "max_norm")]
    pub max_norm: f64,
}

/// `[schedule]`.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
#[expect(missing_docs, reason = "the text of the parent module describes every key")]
pub struct ScheduleConfig {
    pub steps: u64,
    #[serde(default = "cosine")]
    pub kind: String,
    #[serde(default)]
    pub warmup: u64,
    #[serde(default = "min_ratio")]
    pub min_ratio: f64,
    #[serde(default)]
    pub decay_steps: u64,
}

/// `[checkpoint]`.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
#[expect(missing_docs, reason = "the text of the parent module describes every key")]
pub struct CheckpointConfig {
    pub every: u64,
    pub keep: usize,
}

/// `[telemetry]`.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
#[expect(missing_docs, reason = "the text of the parent module describes every key")]
pub struct Telemetry {
    pub every: u64,
}

fn std() -> f64 {
    0.02
}

fn field() -> String {
    "text".to_owned()
}

fn one() -> usize {
    1
}

fn f32_moments() -> String {
    "f32".to_owned()
}

fn beta1() -> f64 {
    0.9
}

fn beta2() -> f64 {
    0.95
}

fn eps() -> f64 {
    1e-8
}

fn adamw() -> String {
    "adamw".to_owned()
}

fn momentum() -> f64 {
    0.9
}

fn decay() -> Vec<String> {
    DecayGroups::default().decay
}

fn weight_decay() -> f64 {
    0.1
}

fn max_norm() -> f64 {
    1.0
}

fn cosine() -> String {
    "cosine".to_owned()
}

fn min_ratio() -> f64 {
    0.1
}

impl Default for CheckpointConfig {
    fn default() -> Self {
        CheckpointConfig { every: 100, keep: 2 }
    }
}

impl Default for Telemetry {
    fn default() -> Self {
        Telemetry { every: 100 }
    }
}
