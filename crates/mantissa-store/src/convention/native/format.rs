//! The native format behind the trait of all formats.

use std::collections::BTreeMap;

use mantissa_num::stored::Transforms;
use mantissa_num::{Quantized, Scheme};
use serde_json::{Value, json};

use super::{
    Config, NAME, QUANT_METHOD, all_tensors, check, declare_levels, metadata, quantization_config,
    rotate_inputs, specs, store,
};
use crate::convention::cache;
use crate::convention::container::store_plain;
use crate::convention::{
    CheckpointFolder, Container, Convention, Facts, KvQuant, LinearPlan, LinearWeight, ModelFiles, ModelPlan,
    NamedBytes, Opened, PlannedLayer, ShapeSource, SideTensors, Storable, StoredLinear, StoredTensors,
    Weight,
};
use crate::{Result, TensorSpec};

/// mantissa's own format.
#[derive(Debug)]
pub(crate) struct Native;

/// Handle of the format.
pub const CONTAINER: Container = Container::new(&Native);

impl Convention for Native {
    fn name(&self) -> &'static str {
        NAME
    }

    fn quant_methods(&self) -> &'static [&'static str] {
        &[QUANT_METHOD]
    }

    fn open(&self, folder: &CheckpointFolder<'_>) -> Result<Option<Box<dyn Opened>>> {
        folder.open_as(QUANT_METHOD, |_, _| Config::parse(folder.checkpoint))
    }

    fn writes(&self) -> Option<Facts> {
        Some(Facts {
            conv1d: true,
            input_scales: true,
            signed_scales: true,
            outliers: true,
            half_scales: true,
            rotations: true,
            folded_transforms: true,
            kv_levels: true,
            quantized_head: true,
            quantized_embedding: true,
            ..Facts::default()
        })
    }

    fn layer_specs(&self, plan: &LinearPlan<'_>) -> Storable<Vec<TensorSpec>> {
        specs(plan)
    }

    fn layer_tensors(
        &self,
        plan: &LinearPlan<'_>,
        q: &Quantized,
        beside: SideTensors<'_>,
    ) -> Storable<NamedBytes> {
        match beside {
            SideTensors::Outliers(outliers) => all_tensors(plan, q, Some(outliers)),
            _ => all_tensors(plan, q, None),
        }
    }

    fn quantization_config(&self, model: &ModelPlan<'_>) -> Storable<Value> {
        let input = |layer: &PlannedLayer<'_>| {
            Some((layer.module.to_owned(), model.input_of(layer.module).cloned()?))
        };
        let inputs: BTreeMap<_, _> = model.layers.iter().filter_map(input).collect();
        let mut config = quantization_config(&inputs);
        if !model.rotations.is_empty() {
            let rotations = model.rotations.iter().map(|(module, order)| (module.as_str(), *order));
            rotate_inputs(&mut config, rotations);
        }
        if let Some(kv) = model.kv {
            config[cache::NATIVE_KEY] = json!(kv.to_string());
        }
        if let Some(policy) = &model.kv_levels {
            declare_levels(&mut config, policy);
        }
        Ok(config)
    }

    fn metadata(&self, model: &ModelPlan<'_>) -> Vec<(String, String)> {
        model.layers.iter().chain(&model.tables).map(|layer| metadata(&layer.plan())).collect()
    }

    /// Stores outliers too, which no other format has.
    fn store(&self, module: &str, layer: &LinearWeight) -> Storable<StoredTensors> {
        let Transforms { before, after, extras } = &layer.transforms;
        let kept_columns = layer.input.as_ref().is_some_and(|input| input.keep_above.is_some());
        let outliers = !extras.is_empty() && before.is_empty() && after.is_empty() && !kept_columns;
        match &layer.weight {
            Weight::Quantized(q) if outliers => store(module, layer, q),
            _ => store_plain(self, module, layer),
        }
    }

    fn kv_format(&self, _scheme: &Scheme) -> Storable<()> {
        Ok(())
    }
}

impl Opened for Config {
    fn name(&self) -> &'static str {
        NAME
    }

    fn shapes(&self) -> ShapeSource {
        ShapeSource::Metadata
    }

    fn kv_quant(&self, files: &ModelFiles, module: &str, kv_heads: usize) -> Result<Option<KvQuant>> {
        self.cache(files, module, kv_heads)
    }

    fn kv_policy(&self) -> Option<&str> {
        self.levels.as_deref()
    }

    fn code_tensors(&self) -> &'static [(&'static str, &'static [&'static str])] {
        &[("weight.packed", &[])]
    }

    fn check_codes(&self, files: &ModelFiles, module: &str, rows: usize, cols: usize) -> Result<()> {
        match files.has(&format!("{module}.weight.packed")) {
            true => check(files, module, rows, cols),
            false => files.meta(&format!("{module}.weight")).map(|_| ()),
        }
    }

    fn linear(&self, files: &ModelFiles, module: &str, rows: usize, cols: usize) -> Result<StoredLinear> {
        self.layer(files, module, rows, cols)
    }
}
