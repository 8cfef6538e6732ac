//! A model that is served.

use std::sync::Arc;

use mantissa_model::{SamplingDefaults, Tokenizer};
use mantissa_runtime::FastModel;

use crate::engine::Engine;

/// A model that is served: one set of weights in one precision.
#[derive(Debug)]
pub struct Artifact {
    /// Name in requests and metrics.
    pub name: String,
    /// Tokenizer and chat template.
    pub tokenizer: Tokenizer,
    /// Weights.
    pub model: Arc<FastModel>,
    /// Format of their files: `gguf` or `safetensors`.
    pub format: &'static str,
    /// File type of a GGUF file as llama.cpp names it, such as `Q4_K_M`.
    pub file_type: Option<String>,
    /// Scheme of the KV cache.
    pub kv: String,
    /// Sampling that the model recommends, for what a request does not set.
    pub sampling: SamplingDefaults,
    /// The model at work.
    pub engine: Engine,
}
