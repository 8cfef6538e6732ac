//! Value of an evaluation.

use std::path::PathBuf;

use mantissa_model::{AttentionOperands, KvPolicy};
use mantissa_num::Accumulator;
use serde::{Deserialize, Serialize};

use crate::calibration::Calibration;
use crate::measured_text::MeasuredText;
use crate::model::ModelPath;
use crate::names::{AsText, Engine};

/// Evaluates a model on a text or on tasks, and compares it with a reference.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Evaluate {
    /// Model to evaluate.
    pub model: ModelPath,
    /// Folder of an adapter that is not merged.
    pub adapter: Option<PathBuf>,
    /// Model to compare with.
    pub reference: Option<ModelPath>,
    /// Text whose perplexity is measured.
    pub text: MeasuredText,
    /// Tasks instead of a text: files, or names of built-in tasks.
    pub tasks: Vec<PathBuf>,
    /// True if each prompt of a task is rendered as a chat message of the user.
    pub chat: bool,
    /// Engine that runs the model; the reference model always runs on the reference engine.
    pub engine: Engine,
    /// Policy of the model's KV cache, if other than its own.
    pub kv: Option<AsText<KvPolicy>>,
    /// Samples on which a policy learns its levels.
    pub calibration: Calibration,
    /// Tokens of each window that are the prompt, after which it is decoded one by one.
    pub prefill: Option<u32>,
    /// Simulated operands of the model's attention.
    pub attention_operands: Option<AsText<AttentionOperands>>,
    /// Simulated accumulator of the model's FP8 matmuls.
    pub accumulator: Option<AsText<Accumulator>>,
    /// JSON file for the sums of each window.
    pub per_window: Option<PathBuf>,
    /// Safetensors file for all logits.
    pub logits: Option<PathBuf>,
    /// JSON Lines file for the answer to each item.
    pub per_item: Option<PathBuf>,
    /// Largest accepted KL from the reference, nats/token.
    pub max_kl: Option<f64>,
    /// Largest accepted growth of the perplexity, as a share of the reference's.
    pub max_ppl_increase: Option<f64>,
    /// Largest accepted fall of the accuracy of a task, as a share.
    pub max_accuracy_drop: Option<f64>,
    /// Seed of all random numbers.
    pub seed: u64,
}
