//! Configuration files of the output: `config.json`, metadata of the weight files, and the format's own file.

use std::collections::BTreeMap;

use mantissa_methods::Method;
use mantissa_model::{LinearInfo, Role, TensorInfo, untie};
use mantissa_store::convention::{ModelFiles, ModelPlan, NotStorable, PlannedLayer};
use serde_json::Value;

use super::{Plan, model_not_storable};
use crate::error::{QuantError, Result};

impl Plan {
    /// Builds the output's `config.json`: the source's with the format's `quantization_config`.
    pub(crate) fn output_config(&self, source: &ModelFiles) -> Result<Value> {
        let mut config = source.config().cloned().unwrap_or_default();
        // A GGUF file does not state the class that loaders ask for.
        if let (Some(_), Value::Object(fields)) = (source.gguf(), &mut config) {
            fields.entry("architectures").or_insert_with(|| serde_json::json!([self.config.class()]));
        }
        // A source may tie the head in its config and store one with other values.
        if self.untied.is_some() || (self.config.states_tied && !self.config.tie_word_embeddings) {
            untie(&mut config);
        }
        let quantization = self.container.quantization_config(&self.model()).map_err(|e| self.fault(e))?;
        if let Value::Object(fields) = &mut config {
            // An engine follows the stated dtype: FP16 would undo the range of BF16 weights.
            if self.job.recipe().is_some() && self.weights.to_string() == "bf16" {
                for key in ["dtype", "torch_dtype"] {
                    if let Some(dtype) = fields.get_mut(key).filter(|dtype| *dtype == "float16") {
                        *dtype = Value::String("bfloat16".to_owned());
                    }
                }
            }
            let keys = self.container.config_keys();
            if !keys.contains(&"quantization") {
                // A source in MLX's format has its own description, which no longer holds.
                fields.remove("quantization");
            }
            for key in keys {
                fields.insert((*key).to_owned(), quantization.clone());
            }
        }
        Ok(config)
    }

    /// Returns the metadata of the weight files.
    pub(crate) fn metadata(&self) -> BTreeMap<String, String> {
        let mut metadata = BTreeMap::from([("format".to_owned(), "pt".to_owned())]);
        metadata.extend(self.container.metadata(&self.model()));
        metadata
    }

    /// Returns name and content of the format's own configuration file, if it has one.
    pub(crate) fn side_config(&self, config: &Value) -> Result<Option<(&'static str, Value)>> {
        let quantization = &config["quantization_config"];
        self.container.side_config(&self.model(), quantization).map_err(|e| self.fault(e))
    }

    /// Returns the plan as formats take it.
    fn model(&self) -> ModelPlan<'_> {
        let layer = |(info, scheme): (_, _)| {
            let LinearInfo { module, rows, cols, .. }: &LinearInfo = info;
            PlannedLayer { module, scheme, rows: *rows, cols: *cols }
        };
        ModelPlan {
            layers: self.quantized().map(layer).collect(),
            tables: self.quantized_tables().map(layer).collect(),
            weights: &self.weights,
            input: self.activations.as_ref(),
            inputs: Some(&self.inputs),
            kept: self.kept(),
            head: self.config.head_module().to_owned(),
            embedding: self.config.embedding_module(),
            by_group: self.by_group,
            damp: self.job.recipe().and_then(|recipe| recipe.methods().find_map(Method::damping)),
            rotations: self.rotations.clone(),
            kv: self.kv.as_ref(),
            kv_levels: self.kv_levels.as_ref().map(ToString::to_string),
            bits_per_weight: self.linear_bits_per_weight(),
            specs: &self.specs,
        }
    }

    fn fault(&self, error: NotStorable) -> QuantError {
        model_not_storable(self.container, error.to_string())
    }

    /// Returns the unquantized linear modules: layers without a scheme, routers, what makes the inputs of layers, and what
    /// the text model does not use, such as towers. Engines would otherwise read them as quantized.
    fn kept(&self) -> Vec<String> {
        let kept = self.linears.iter().filter(|l| l.scheme.is_none()).map(|l| l.info.module.clone());
        let is_kept = |t: &TensorInfo| match t.role {
            Role::Side { .. } => true,
            Role::LayerInputs => t.shape.len() == 2,
            _ => false,
        };
        let sides = self.config.tensors().into_iter().filter(is_kept);
        let sides = sides.filter_map(|t| t.name.strip_suffix(".weight").map(str::to_owned));
        kept.chain(sides).chain(self.unused.iter().cloned()).collect()
    }
}
