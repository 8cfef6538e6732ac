//! Models and sequences that a command would load, and the memory that it is predicted to take.

use mantissa_model::KvPolicy;
use mantissa_store::convention::ModelFiles;
use serde::Serialize;

use crate::machine::resident_files;
use crate::model::BASE;

/// Predicted memory of the models and sequences of a command. Bytes are anonymous memory unless stated otherwise.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct LoadNeeds {
    /// Sequences at work at once.
    pub sequences: usize,
    /// Tokens of the longest sequence.
    pub context: usize,
    /// Policy of the KV cache of the first model; `none` where nothing is cached.
    pub kv: String,
    /// Bytes of a token in the caches of all models.
    pub kv_bytes_per_token: f64,
    /// Bytes of the caches of all models.
    pub kv_bytes: u64,
    /// Bytes of the weights as they run.
    pub weights: u64,
    /// Bytes beyond the weights at the peak of loading.
    pub loading: u64,
    /// Bytes of activations, logits and tables.
    pub buffers: u64,
    /// Bytes of the process beside models and buffers, an upper bound: code tables, tokenizer, allocator.
    pub process: u64,
    /// Predicted peak: accurate to 10 % where models take more than 100 MB, an upper bound below.
    pub predicted_peak_memory: u64,
    /// Bytes of file pages that are resident beside it, as far as they are by now: pages of the program. Checkpoints are read,
    /// not mapped, so that theirs do not count.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub resident_files: Option<u64>,
}

impl LoadNeeds {
    /// Needs of nothing, for sequences of these sizes.
    pub fn of(sequences: usize, context: usize, kv: String) -> Self {
        LoadNeeds {
            sequences,
            context,
            kv,
            kv_bytes_per_token: 0.0,
            kv_bytes: 0,
            weights: 0,
            loading: 0,
            buffers: 0,
            process: BASE,
            predicted_peak_memory: 0,
            resident_files: resident_files(),
        }
    }
}

/// Names the policy of a cache: the given one, that of the files, or `usual`.
pub fn kv_name(given: Option<&KvPolicy>, files: &ModelFiles, usual: &str) -> String {
    let own = || files.kv_policy().map(str::to_owned);
    given.map(KvPolicy::to_string).or_else(own).unwrap_or_else(|| usual.to_owned())
}
