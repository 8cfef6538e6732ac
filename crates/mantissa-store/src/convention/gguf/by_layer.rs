//! Features that distinguish the layers of a model (Gemma 4), from the metadata and the tensors of a file.
//!
//! Keys of llama.cpp: `attention.key_length` and `rope.dimension_count` hold for layers without a window, the same with
//! `_swa` for the others; `attention.head_count_kv` and `feed_forward_length` may list a number for each layer. Its
//! converter gives pairs that are not rotated a divisor of 1e30 (`conversion/gemma.py`), which makes their angle 0.

use serde_json::{Map, Value as Json, json};

use super::config::Reader;
use crate::error::Result;
use crate::gguf::Value;

/// Least divisor of a frequency that stops the rotation.
pub const UNROTATED: f32 = 1e30;

impl Reader<'_> {
    /// Numbers that a key lists for the layers, or states once for all; `None` without the key. A list may go on with layers
    /// that predict further tokens.
    ///
    /// # Errors
    /// [`crate::Error::Field`] for other values, or a list of another length.
    pub(super) fn by_layer(&self, key: &str, layers: usize) -> Result<Option<Vec<u64>>> {
        let key = self.key(key);
        let Some(Value::Array(_, values)) = self.metadata.get(&key) else {
            return Ok(self.metadata.uint(&key)?.map(|number| vec![number; layers]));
        };
        let numbers: Option<Vec<u64>> = values.iter().map(Value::as_u64).collect();
        let fits = self.is_by_layer(values.len(), layers)?;
        match numbers.filter(|_| fits) {
            Some(numbers) => Ok(Some(numbers[..layers].to_vec())),
            None => {
                let found = format!("{} values", values.len());
                Err(self.metadata.fault(&key, found, format!("{layers} numbers, one for each layer")))
            }
        }
    }

    /// Puts the fields of a model whose layers differ, whose windows are known.
    pub(super) fn put_by_layer(&self, config: &mut Map<String, Json>) -> Result<()> {
        let types = config.get("layer_types").and_then(Json::as_array).cloned().unwrap_or_default();
        let windowed: Vec<bool> = types.iter().map(|kind| kind == "sliding_attention").collect();
        let layers = windowed.len();
        // Heads of layers without a window, as `per_layer_config` states them.
        let (wide, local) = (self.uint("attention.key_length")?, self.uint("attention.key_length_swa")?);
        local.or(wide).map(|dim| config.insert("head_dim".into(), json!(dim)));
        let keys = self.by_layer("attention.head_count_kv", layers)?.unwrap_or_default();
        let local = windowed.iter().position(|&windowed| windowed).unwrap_or(0);
        if let Some(count) = keys.get(local) {
            config.insert("num_key_value_heads".into(), json!(count));
        }
        let global = |layer: usize| {
            let mut heads = Map::new();
            wide.map(|dim| heads.insert("head_dim".into(), json!(dim)));
            keys.get(layer).map(|count| heads.insert("num_key_value_heads".into(), json!(count)));
            (layer.to_string(), Json::Object(heads))
        };
        let full = (0..layers).filter(|&layer| !windowed[layer]);
        config.insert("per_layer_config".into(), Json::Object(full.clone().map(global).collect()));
        let has = |layer: usize, name: &str| self.gguf.get(&format!("blk.{layer}.{name}.weight")).is_some();
        let without = full.clone().any(|layer| has(layer, "attn_k") && !has(layer, "attn_v"));
        config.insert("attention_k_eq_v".into(), json!(without));
        let shared = self.uint("attention.shared_kv_layers")?.unwrap_or(0);
        config.insert("num_kv_shared_layers".into(), json!(shared));
        self.put_widths(config, layers, shared)?;
        let width = self.uint("embedding_length_per_layer_input")?.unwrap_or(0);
        config.insert("hidden_size_per_layer_input".into(), json!(width));
        let rows = self.gguf.get("per_layer_token_embd.weight").and_then(|tensor| tensor.shape.first());
        rows.map(|rows| config.insert("vocab_size_per_layer_input".into(), json!(rows)));
        self.put_proportional(config);
        Ok(())
    }

    /// Puts the width of the MLPs: one for all layers, or twice that for the last `shared`.
    fn put_widths(&self, config: &mut Map<String, Json>, layers: usize, shared: u64) -> Result<()> {
        const KEY: &str = "feed_forward_length";
        let widths = self.by_layer(KEY, layers)?.unwrap_or_default();
        let Some(&first) = widths.first() else { return Ok(()) };
        let from = layers.saturating_sub(usize::try_from(shared).unwrap_or(layers));
        let (own, reading) = widths.split_at(from.min(widths.len()));
        let double = reading.iter().any(|&width| width != first);
        let last = if double { first.saturating_mul(2) } else { first };
        if own.iter().any(|&width| width != first) || reading.iter().any(|&width| width != last) {
            let allowed = "one width, or twice that in the layers that share keys and values";
            return Err(self.metadata.fault(&self.key(KEY), "other widths", allowed));
        }
        config.insert("intermediate_size".into(), json!(first));
        config.insert("use_double_wide_mlp".into(), json!(double));
        Ok(())
    }

    /// States divisors of 1, and of [`UNROTATED`] for the last pairs, as the share of the rotated ones.
    fn put_proportional(&self, config: &mut Map<String, Json>) {
        let Some(scaling) = config.get_mut("rope_scaling").and_then(Json::as_object_mut) else { return };
        let Some(factors) = scaling.get("factors").and_then(Json::as_array) else { return };
        let factors: Vec<f64> = factors.iter().filter_map(Json::as_f64).collect();
        let rotated = factors.iter().take_while(|&&factor| factor == 1.0).count();
        if factors[rotated..].iter().any(|&factor| factor < f64::from(UNROTATED)) {
            return;
        }
        // As a float, the share must give the number again when multiplied and truncated.
        let share = rotated as f64 / factors.len().max(1) as f64;
        let exact = (share * factors.len() as f64) as usize == rotated;
        let share = if exact { share } else { share.next_up() };
        *scaling = Map::from_iter([
            ("rope_type".to_owned(), json!("proportional")),
            ("partial_rotary_factor".to_owned(), json!(share)),
        ]);
    }
}
