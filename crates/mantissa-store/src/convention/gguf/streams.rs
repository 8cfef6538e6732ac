//! Parallel streams of states (Gemma 3n), whose sizes llama.cpp's loader and graph fix (`src/models/gemma3n.cpp`,
//! `src/llama-hparams.h`): its converter writes keys for some of them, which nothing reads.

use serde_json::{Map, Value as Json, json};

use super::config::Reader;
use crate::error::Result;

/// Sizes of a model with parallel streams.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct FixedStreams {
    /// Number of streams.
    pub count: usize,
    /// Inner width of the low-rank path beside attention.
    pub laurel: usize,
    /// Width of a layer's embedding.
    pub inputs: usize,
    /// Layers with keys and values of their own, which come first; the others read those of the last two.
    pub own_keys: usize,
    /// Layers that cut off their gates, which come first.
    pub cut: usize,
    /// Share of a gate's values that they cut off.
    pub share: f64,
    /// Soft cap of the logits.
    pub cap: f32,
}

/// Sizes of Gemma 3n.
pub(super) const GEMMA3N: FixedStreams =
    FixedStreams { count: 4, laurel: 64, inputs: 256, own_keys: 20, cut: 10, share: 0.95, cap: 30.0 };

impl Reader<'_> {
    /// Puts the fixed sizes of parallel streams, and the number of embeddings of layers.
    pub(super) fn put_streams(&self, config: &mut Map<String, Json>) -> Result<()> {
        let Some(fixed) = self.architecture.streams else { return Ok(()) };
        let layers = self.number_of_layers()?;
        for (field, size) in [
            ("altup_num_inputs", fixed.count),
            ("altup_active_idx", 0),
            ("laurel_rank", fixed.laurel),
            ("hidden_size_per_layer_input", fixed.inputs),
            ("num_kv_shared_layers", layers.saturating_sub(fixed.own_keys)),
        ] {
            config.insert(field.into(), json!(size));
        }
        config.insert("altup_correct_scale".into(), json!(true));
        config.insert("final_logit_softcapping".into(), json!(fixed.cap));
        let shares: Vec<f64> =
            (0..layers).map(|layer| if layer < fixed.cut { fixed.share } else { 0.0 }).collect();
        config.insert("activation_sparsity_pattern".into(), json!(shares));
        let rows = self.gguf.get("per_layer_token_embd.weight").and_then(|tensor| tensor.shape.first());
        rows.map(|rows| config.insert("vocab_size_per_layer_input".into(), json!(rows)));
        Ok(())
    }
}
