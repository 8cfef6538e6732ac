//! Figures of measurements that run the model again.

use serde::Serialize;

/// A scheme of the cache on the model.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct CacheScheme {
    /// Scheme.
    pub kv: String,
    /// Bytes per token.
    pub bytes_per_token: f64,
    /// KL(cache in f32 ‖ this cache), nats/token.
    pub kl: f64,
    /// Standard error of `kl`.
    pub kl_se: f64,
    /// Share of facts retrieved; absent without a tokenizer or where prompts do not fit.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub retrieved: Option<f64>,
    /// The same with a cache in f32.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub retrieved_in_f32: Option<f64>,
    /// `retrieved - retrieved_in_f32`, with its paired standard error.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub delta: Option<[f64; 2]>,
}

/// Attention or MLP of a layer, alone.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Alone {
    /// Layer index.
    pub layer: usize,
    /// `attention` or `mlp`.
    pub part: &'static str,
    /// KL(source ‖ source with this part quantized), nats/token.
    pub kl: f64,
    /// Standard error of `kl`.
    pub kl_se: f64,
}

/// KL of one part in another precision.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Ablation {
    /// `residual stream`, `norms` or `softmax weights`.
    pub part: &'static str,
    /// Precision.
    pub precision: &'static str,
    /// KL(f32 ‖ this precision), nats/token; absent if it is not finite.
    pub kl: Option<f64>,
}

/// A step of the ladder.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Step {
    /// Part that is relaxed, together with the parts of all earlier steps.
    pub relaxed: &'static str,
    /// KL(source ‖ relaxed model), nats/token.
    pub kl: f64,
}
