//! Report on a checkpoint.

use std::path::{Path, PathBuf};

use mantissa_model::{ModelConfig, end_tokens};
use mantissa_store::end_tokens::{EndToken, EndTokens};
use serde::Serialize;
use serde_json::Value;

use super::architecture::{self, Architecture};
use super::inventory::{Entry, Inventory, bits};
use super::model::Model;
use super::stats::Stats;

/// What a checkpoint holds.
#[derive(Serialize)]
pub struct InspectReport {
    /// Model as named.
    pub model: PathBuf,
    /// Field `model_type` of the config.
    pub model_type: Option<String>,
    /// Sizes, if the architecture is known.
    pub architecture: Option<Architecture>,
    /// Checkpoint format.
    pub convention: &'static str,
    /// Number of logical weights, without scales, zero points and shapes of quantized tensors.
    pub parameters: u64,
    /// Size of all tensors in bytes.
    pub bytes: u64,
    /// Number of weight files.
    pub files: usize,
    /// Bits per weight over all tensors, embedding, head and norms included.
    pub bits_per_weight: Option<f64>,
    /// Bits per weight of the decoder's linear layers, scales and zero points included; `None` for an unknown
    /// architecture.
    pub linear_bits_per_weight: Option<f64>,
    /// KV cache scheme, if the checkpoint has one.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub kv_cache: Option<String>,
    /// Tokens that end a text or a turn, with the places that state them.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub end_tokens: Vec<EndToken>,
    /// Totals by dtype or scheme.
    pub by_scheme: Vec<SchemeTotal>,
    /// Commands that made the model, oldest first, from its manifest.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub history: Vec<Value>,
    /// Remarks.
    pub notes: Vec<String>,
    /// Faults.
    pub warnings: Vec<String>,
    /// Tensors.
    pub tensors: Vec<InspectedTensor>,
}

/// Totals of one dtype or scheme.
#[derive(Serialize)]
pub struct SchemeTotal {
    /// Dtype or scheme.
    pub scheme: String,
    /// Number of tensors.
    pub tensors: usize,
    /// Number of logical weights.
    pub parameters: u64,
    /// Bytes.
    pub bytes: u64,
    /// Bits per weight.
    pub bits_per_weight: Option<f64>,
}

/// Tensor of a checkpoint.
#[derive(Serialize)]
pub struct InspectedTensor {
    /// Name, shape and scheme.
    #[serde(flatten)]
    pub entry: Entry,
    /// Bits per weight.
    pub bits_per_weight: Option<f64>,
    /// Statistics of the values, if they were measured and are floats.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub stats: Option<Stats>,
}

/// Makes the report of `model`, which the user calls `named`, from its entries and their statistics, without KV cache and
/// history.
pub(crate) fn assemble(
    named: &Path,
    model: &Model,
    config: Option<&ModelConfig>,
    inventory: Inventory,
    stats: Vec<Option<Stats>>,
) -> InspectReport {
    let checkpoint = model.checkpoint();
    let entries = inventory.entries;
    let stored = checkpoint.total_bytes();
    let linear_bits_per_weight = match (model, config) {
        (Model::Known(files), Some(config)) => architecture::linear_bits(config, files, &entries),
        _ => None,
    };
    let parameters = match (model, config) {
        // Packed codes of an unknown format cannot be counted, but the architecture gives the count.
        (Model::Raw(_), Some(config)) => config.parameters(),
        _ => entries.iter().map(|entry| entry.parameters).sum(),
    };
    let by_scheme = totals(&entries);
    let mut stats = stats.into_iter();
    let tensors = entries.into_iter().map(|entry| InspectedTensor {
        bits_per_weight: bits(entry.bytes, entry.parameters),
        stats: stats.next().flatten(),
        entry,
    });
    InspectReport {
        model: named.to_owned(),
        model_type: checkpoint.config().and_then(|c| c["model_type"].as_str()).map(str::to_owned),
        architecture: config.map(Architecture::of),
        convention: model.convention(),
        parameters,
        bytes: stored,
        files: checkpoint.files().count(),
        bits_per_weight: bits(stored, parameters),
        linear_bits_per_weight,
        kv_cache: None,
        end_tokens: end_tokens(model),
        by_scheme,
        history: Vec::new(),
        notes: Vec::new(),
        warnings: Vec::new(),
        tensors: tensors.collect(),
    }
}

/// Returns the end tokens of a model; none if a file that states them is at fault, which reading the model reports.
fn end_tokens(model: &Model) -> Vec<EndToken> {
    let Model::Known(files) = model else { return Vec::new() };
    let tokens = match files.gguf() {
        Some(gguf) => EndTokens::of_metadata(gguf.metadata()).unwrap_or_default(),
        None => {
            let config = |config| match ModelConfig::from_json(config, "config.json") {
                Ok(model) => Some(model.eos_token_ids),
                // Of an architecture that is not supported, the fields alone.
                Err(_) => ModelConfig::end_tokens(config, "config.json").ok(),
            };
            let stated = files.config().and_then(config).unwrap_or_default();
            end_tokens::of_folder(files.dir(), &stated).unwrap_or_default()
        }
    };
    tokens.iter().cloned().collect()
}

/// Sums the entries by dtype or scheme, in the order of their first tensors.
fn totals(entries: &[Entry]) -> Vec<SchemeTotal> {
    let mut totals: Vec<SchemeTotal> = Vec::new();
    for entry in entries {
        let name = entry.scheme.as_deref().unwrap_or(entry.dtype);
        let at = totals.iter().position(|total| total.scheme == name).unwrap_or_else(|| {
            let scheme = name.to_owned();
            totals.push(SchemeTotal { scheme, tensors: 0, parameters: 0, bytes: 0, bits_per_weight: None });
            totals.len() - 1
        });
        let total = &mut totals[at];
        total.tensors += 1;
        total.parameters += entry.parameters;
        total.bytes += entry.bytes;
        total.bits_per_weight = bits(total.bytes, total.parameters);
    }
    totals
}
