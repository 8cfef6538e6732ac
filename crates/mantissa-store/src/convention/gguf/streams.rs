//! Parallel streams of states (Gemma 3n), whose sizes llama.cpp's loader and graph fix (`src/models/gemma3n.cpp`,
//! `src/llama-hparams.h`): its converter writes keys for some of them, which nothing reads.

use serde_json::{Map, Value as Json, json};

use super::config::Reader;
use crate::error::Result;

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
