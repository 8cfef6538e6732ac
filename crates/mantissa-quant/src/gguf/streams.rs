//! Parallel streams of states (Gemma 3n) in GGUF: their keys, what llama.cpp fixes of them, and a table of embeddings of
//! layers as long as the vocabulary.
//!
//! Keys are named as in llama.cpp's converter (`conversion/gemma.py`); its loader and graph set the limits
//! (`src/models/gemma3n.cpp`).

use mantissa_model::{ModelConfig, load_config};
use mantissa_store::convention::ModelFiles;
use mantissa_store::convention::gguf::{Architecture, block_type};
use mantissa_store::gguf::{GgmlType, GgufTensorSpec, Value, ValueType};
use serde_json::{Value as Json, json};

use super::keys::Keys;
use super::limits::Limits;
use crate::error::Result;
use mantissa_num::Scheme;

/// Field of the rows of the table of embeddings of layers.
const ROWS: &str = "vocab_size_per_layer_input";

/// Lists the keys of parallel streams.
pub(super) fn put_streams(keys: &mut Keys, config: &ModelConfig) {
    let by_layer = &config.by_layer;
    let (Some(streams), Some(inputs)) = (by_layer.streams, by_layer.inputs) else { return };
    keys.put_number("altup.active_idx", 0);
    keys.put_number("altup.num_inputs", streams.count);
    keys.put_number("embedding_length_per_layer_input", inputs.width);
    keys.put_number("attention.shared_kv_layers", config.num_hidden_layers - by_layer.shared_from);
    // 0 deviations above the mean stand for gates that are not cut off.
    let deviations = by_layer.cutoffs.iter().map(|cut| Value::F32(cut.unwrap_or(0.0)));
    keys.put("activation_sparsity_scale", Value::Array(ValueType::F32, deviations.collect()));
}

/// Lists what llama.cpp computes differently.
pub(super) fn notes(row: &Architecture, config: &ModelConfig) -> Vec<String> {
    let width = config.intermediate_size;
    let cut = row.streams.is_some_and(|fixed| fixed.cut > 0) && width > 1;
    let note = || {
        let n = width - 1;
        format!(
            "activation_sparsity_pattern: llama.cpp divides variances of gates by {n}, the model by {width}"
        )
    };
    cut.then(note).into_iter().collect()
}

/// Lists the tensors of keys and values that no layer reads, which the loader requires. `weights` is the scheme of weights.
pub(super) fn unread(row: &Architecture, config: &ModelConfig, weights: &Scheme) -> Vec<GgufTensorSpec> {
    if row.streams.is_none() {
        return Vec::new();
    }
    let spec = |(name, shape): (String, Vec<usize>)| {
        let cols = shape.last().copied().unwrap_or(1);
        let fits = |ty: &GgmlType| cols.is_multiple_of(ty.block().0);
        let ty = match shape.len() {
            1 => GgmlType::F32,
            _ => block_type(&weights.format).filter(fits).unwrap_or(GgmlType::F16),
        };
        Some(GgufTensorSpec::new(row.place(&name)?.tensor, ty, shape))
    };
    config.unread().into_iter().filter_map(spec).collect()
}

/// Presents a model with fewer embeddings of layers than tokens as one with as many: the tokens behind read the first, as in
/// transformers. Other models are returned unchanged.
///
/// # Errors
/// The config does not describe a model.
pub(super) fn with_all_inputs(files: ModelFiles) -> Result<ModelFiles> {
    let config = load_config(&files)?;
    let inputs = config.by_layer.inputs.filter(|inputs| inputs.vocabulary < config.vocab_size);
    if inputs.is_none() || config.by_layer.streams.is_none() || files.gguf().is_some() {
        return Ok(files);
    }
    let mut fields = files.config().cloned().unwrap_or_default();
    let text = if fields["text_config"].is_object() { &mut fields["text_config"] } else { &mut fields };
    if let Json::Object(fields) = text {
        fields.insert(ROWS.to_owned(), json!(config.vocab_size));
    }
    let [table, ..] = config.layer_input_names();
    Ok(files.with_rows(&table, config.vocab_size, fields))
}

impl Limits<'_> {
    /// Checks the sizes of parallel streams, which no key states.
    pub(super) fn check_streams(&self) -> Result<()> {
        let (config, by_layer) = (self.config, &self.config.by_layer);
        let (Some(fixed), Some(streams)) = (self.row.streams, by_layer.streams) else { return Ok(()) };
        let layers = config.num_hidden_layers;
        let own = layers.min(fixed.own_keys);
        for (field, found, expected) in [
            ("altup_num_inputs", streams.count, fixed.count),
            ("laurel_rank", streams.laurel, fixed.laurel),
            ("hidden_size_per_layer_input", by_layer.inputs.map_or(0, |inputs| inputs.width), fixed.inputs),
            ("num_kv_shared_layers", layers - by_layer.shared_from, layers - own),
            ("altup_correct_scale", usize::from(streams.scales), 1),
            ("use_double_wide_mlp", usize::from(by_layer.wide_shared && own < layers), 0),
        ] {
            if found != expected {
                let allowed = format!("{expected}: llama.cpp has no key");
                return self.refuse(field, found.to_string(), &allowed);
            }
        }
        if config.logit_softcap != Some(fixed.cap) {
            let found = config.logit_softcap.map_or("null".to_owned(), |cap| cap.to_string());
            let allowed = format!("{}: llama.cpp reads no other", fixed.cap);
            return self.refuse("final_logit_softcapping", found, &allowed);
        }
        // Deviations of a normal distribution above its mean, for the share.
        const DEVIATIONS: f32 = 1.644_853_6;
        let fits = |(layer, cut): (usize, &Option<f32>)| match cut {
            Some(found) => layer < fixed.cut && (found - DEVIATIONS).abs() < 1e-5,
            None => layer >= fixed.cut,
        };
        match by_layer.cutoffs.iter().enumerate().position(|cutoff| !fits(cutoff)) {
            None => Ok(()),
            Some(layer) => {
                let allowed =
                    format!("{} in the first {} layers: llama.cpp has no key", fixed.share, fixed.cut);
                self.refuse("activation_sparsity_pattern", format!("another in layer {layer}"), &allowed)
            }
        }
    }
}
