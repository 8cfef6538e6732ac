//! compressed-tensors (llm-compressor, vLLM): `quantization_config` of `config.json` and the tensors it describes.
//!
//! Source: compressed-tensors 0.18-0.20, `config/base.py`, `compressors/*/base.py`, `quantization/quant_{config,args}.py`.

use std::collections::BTreeMap;

use mantissa_num::{Code, Quantized, RowKind, Scheme, minifloat};
use serde_json::{Value, json};

use super::cache;
use super::container::with_scales_in;
use super::{
    CheckpointFolder, Container, Convention, Facts, KvQuant, LinearPlan, ModelFiles, ModelPlan, NamedBytes,
    Opened, ShapeSource, SideTensors, Storable, StoredLinear, Support,
};
use crate::{Dtype, Result, TensorSpec};

mod config;
mod read;
mod target;
mod transform;
mod write;

pub use config::{Args, Config, Group, PackFormat};
pub use transform::rotated_inputs;
/// `quant_method` of this format.
pub const QUANT_METHOD: &str = "compressed-tensors";

pub use write::{pack_format, quantization_config, specs, tensors};

/// compressed-tensors, read by vLLM, SGLang and transformers.
#[derive(Debug)]
pub(crate) struct CompressedTensors;

/// Handle of the format.
pub const CONTAINER: Container = Container::new(&CompressedTensors);

impl Convention for CompressedTensors {
    fn name(&self) -> &'static str {
        QUANT_METHOD
    }

    fn quant_methods(&self) -> &'static [&'static str] {
        &[QUANT_METHOD]
    }

    fn open(&self, folder: &CheckpointFolder<'_>) -> Result<Option<Box<dyn Opened>>> {
        folder.open_as(QUANT_METHOD, Config::parse)
    }

    fn writes(&self) -> Option<Facts> {
        Some(Facts {
            group_order: Support::OnRequest(
                "compressed-tensors reads weight_g_idx up to version 0.19; 0.20 refuses the model: --format gptq, or groups = \"static\"",
            ),
            input_scales: true,
            signed_scales: true,
            rotations: true,
            quantized_head: true,
            folded_transforms: true,
            ..Facts::default()
        })
    }

    fn is_default_for(&self, schemes: &[&Scheme]) -> bool {
        schemes.iter().all(|scheme| scheme.format.codec().is_none())
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
        let g_idx = match beside {
            SideTensors::Groups(g_idx) => Some(g_idx),
            _ => None,
        };
        tensors(plan, q, g_idx)
    }

    fn quantization_config(&self, model: &ModelPlan<'_>) -> Storable<Value> {
        let ignore: Vec<_> = model.dense_head().into_iter().chain(model.kept.iter().cloned()).collect();
        let mut config = quantization_config(&model.groups(), &ignore, model.by_group)?;
        if let (true, Some(targets)) = (model.quantizes_head(), single_targets(&mut config)) {
            // vLLM and SGLang do not count the head among the class of the layers.
            targets.push(json!(model.head));
        }
        if !model.rotations.is_empty() {
            let mut groups: BTreeMap<usize, Vec<&str>> = BTreeMap::new();
            for (module, order) in &model.rotations {
                groups.entry(*order).or_default().push(module);
            }
            config["transform_config"] = rotated_inputs(groups);
        }
        if let Some(kv) = model.kv {
            config["kv_cache_scheme"] = kv_cache_scheme(kv);
        }
        Ok(config)
    }

    /// Stores scales in the model's dtype, to which loaders cast them.
    fn as_stored(&self, scheme: Scheme, dtype: Dtype) -> Scheme {
        with_scales_in(scheme, dtype)
    }

    fn scale_code(&self, dtype: Dtype) -> Option<Code> {
        Some(match dtype {
            Dtype::BF16 => Code::Float(minifloat::BF16),
            Dtype::F16 => Code::Float(minifloat::F16),
            _ => Code::F32,
        })
    }

    fn kv_format(&self, scheme: &Scheme) -> Storable<()> {
        cache::require_static(QUANT_METHOD, scheme)?;
        if cache::known(scheme) {
            return Ok(());
        }
        Err(cache::not_storable(
            scheme,
            "compressed-tensors supports a KV cache of int8 (:full) and fp8-e4m3",
        ))
    }
}

/// Returns the targets of a config with one group, which names the class of the layers and not the layers.
fn single_targets(config: &mut Value) -> Option<&mut Vec<Value>> {
    let groups = config.get_mut("config_groups")?.as_object_mut().filter(|groups| groups.len() == 1)?;
    groups.values_mut().next()?.get_mut("targets")?.as_array_mut()
}

/// `kv_cache_scheme` for an 8-bit cache with stored scales.
fn kv_cache_scheme(scheme: &Scheme) -> Value {
    let strategy = if scheme.row == RowKind::Head { "attn_head" } else { "tensor" };
    json!({
        "actorder": null, "block_structure": null, "dynamic": false, "group_size": null, "num_bits": 8,
        "observer": "minmax", "observer_kwargs": {}, "scale_dtype": null, "strategy": strategy,
        "symmetric": true, "type": cache::element_type(scheme), "zp_dtype": null,
    })
}

impl Opened for Config {
    fn name(&self) -> &'static str {
        QUANT_METHOD
    }

    fn shapes(&self) -> ShapeSource {
        ShapeSource::Recorded
    }

    fn notes(&self) -> Vec<String> {
        self.notes()
    }

    fn quantizes(&self, module: &str) -> Option<bool> {
        Some(self.group(module).is_some_and(|group| group.weights.is_some()))
    }

    fn kv_quant(&self, files: &ModelFiles, module: &str, kv_heads: usize) -> Result<Option<KvQuant>> {
        self.cache(files, module, kv_heads)
    }

    fn code_tensors(&self) -> &'static [(&'static str, &'static [&'static str])] {
        &[("weight_packed", &["weight_scale"])]
    }

    fn weight_scales(&self) -> &'static [&'static str] {
        &["weight_scale"]
    }

    fn linear(&self, files: &ModelFiles, module: &str, rows: usize, cols: usize) -> Result<StoredLinear> {
        self.layer(files, module, rows, cols)
    }
}
