//! ModelOpt's unified Hugging Face checkpoints (TensorRT-LLM, vLLM, SGLang): `quantization_config` of `config.json` with
//! `quant_method: "modelopt"`, and `hf_quant_config.json`.
//!
//! For a module with weight `[N, K]`:
//!
//! | algorithm | `weight` | scales | input |
//! |---|---|---|---|
//! | FP8 | F8_E4M3 `[N, K]` | `weight_scale` F32 `[]` | `input_scale` F32 `[]`, for all tokens |
//! | FP8_PER_CHANNEL_PER_TOKEN | F8_E4M3 `[N, K]` | `weight_scale` F32 `[N]` | FP8, a scale per token |
//! | W4A16_AWQ | U8 `[N/2, K]`: two's complement, row 2r in the low nibble | `weight_scale` `[N, K/g]` | times `pre_quant_scale` `[K]` |
//! | NVFP4, W4A16_NVFP4 | U8 `[N, K/2]` | `weight_scale` F8_E4M3 `[N, K/16]`, `weight_scale_2` F32 `[]`, both factors | `input_scale` F32 `[]`, or none |
//! | MXFP8 | F8_E4M3 `[N, K]` | `weight_scale` U8 `[N, K/32]` (E8M0) | MXFP8 |
//!
//! Source: NVIDIA Model-Optimizer 0.47, `export/quant_utils.py`, `export/convert_hf_config.py`, `qtensor/*.py`.

use mantissa_num::{Blocks, Quantized, RowKind, Scheme};
use serde_json::{Value, json};

use super::cache;
use super::container::with_scales_in;
use super::{
    CheckpointFolder, Container, Convention, Facts, KvQuant, LinearPlan, LinearWeight, ModelFiles, ModelPlan,
    NamedBytes, Opened, ShapeSource, SideTensors, Storable, StoredLinear, StoredTensors,
};
use crate::{Dtype, Result, TensorMeta, TensorSpec};

mod config;
mod read;
mod write;

pub use config::{Algo, Config, FILE_NAME, QUANT_METHOD};
pub use write::{as_stored, hf_quant_config, quantization_config, specs, store, tensors};

/// ModelOpt, read by TensorRT-LLM, vLLM and SGLang.
#[derive(Debug)]
pub(crate) struct Modelopt;

/// Handle of the format.
pub const CONTAINER: Container = Container::new(&Modelopt);

impl Convention for Modelopt {
    fn name(&self) -> &'static str {
        QUANT_METHOD
    }

    fn quant_methods(&self) -> &'static [&'static str] {
        &[QUANT_METHOD]
    }

    fn open(&self, folder: &CheckpointFolder<'_>) -> Result<Option<Box<dyn Opened>>> {
        let value = folder.of_method(QUANT_METHOD);
        if value.is_none() && folder.quantization.is_some() {
            return Ok(None);
        }
        let config = Config::open(folder.config_path, value)?;
        Ok(config.map(|config| Box::new(config) as Box<dyn Opened>))
    }

    fn writes(&self) -> Option<Facts> {
        Some(Facts { input_scales: true, folded_transforms: true, transposed: true, ..Facts::default() })
    }

    fn layer_specs(&self, plan: &LinearPlan<'_>) -> Storable<Vec<TensorSpec>> {
        specs(plan)
    }

    fn layer_tensors(
        &self,
        plan: &LinearPlan<'_>,
        q: &Quantized,
        _: SideTensors<'_>,
    ) -> Storable<NamedBytes> {
        tensors(plan, q)
    }

    fn store(&self, module: &str, layer: &LinearWeight) -> Storable<StoredTensors> {
        store(module, layer)
    }

    fn quantization_config(&self, model: &ModelPlan<'_>) -> Storable<Value> {
        let mut config = quantization_config(&model.groups(), &model.kept_with_tables())?;
        if let Some(kv) = model.kv {
            config["kv_cache_scheme"] =
                json!({"dynamic": false, "num_bits": 8, "type": cache::element_type(kv)});
        }
        Ok(config)
    }

    fn side_files(&self) -> &'static [&'static str] {
        &[FILE_NAME]
    }

    fn side_config(
        &self,
        model: &ModelPlan<'_>,
        _quantization: &Value,
    ) -> Storable<Option<(&'static str, Value)>> {
        let content = hf_quant_config(&model.groups(), &model.kept_with_tables(), model.kv)?;
        Ok(Some((FILE_NAME, content)))
    }

    fn as_stored(&self, scheme: Scheme, dtype: Dtype) -> Scheme {
        let grouped = matches!(scheme.format.blocks(), Blocks::Group(_));
        as_stored(if grouped { with_scales_in(scheme, dtype) } else { scheme })
    }

    fn kv_format(&self, scheme: &Scheme) -> Storable<()> {
        cache::require_static(QUANT_METHOD, scheme)?;
        if cache::known(scheme) && scheme.row != RowKind::Head {
            return Ok(());
        }
        let why = "modelopt supports a KV cache of int8 (:full) and fp8-e4m3 with one scale per tensor";
        Err(cache::not_storable(scheme, why))
    }

    fn kv_specs(&self, module: &str, _count: usize) -> [TensorSpec; 2] {
        ["k_proj.k_scale", "v_proj.v_scale"]
            .map(|suffix| TensorSpec::new(format!("{module}.{suffix}"), Dtype::F32, vec![]))
    }
}

impl Opened for Config {
    fn name(&self) -> &'static str {
        QUANT_METHOD
    }

    fn quantizes(&self, module: &str) -> Option<bool> {
        Some(self.names(module))
    }

    fn shapes(&self) -> ShapeSource {
        ShapeSource::Codes
    }

    fn notes(&self) -> Vec<String> {
        self.notes().to_vec()
    }

    fn kv_quant(&self, files: &ModelFiles, module: &str, kv_heads: usize) -> Result<Option<KvQuant>> {
        self.cache(files, module, kv_heads)
    }

    fn coded_shape(&self, files: &ModelFiles, module: &str, codes: &TensorMeta) -> Option<(usize, usize)> {
        let &[rows, cols] = codes.shape.as_slice() else { return None };
        match codes.dtype {
            // Two codes per byte: NVFP4 packs columns, int4 rows.
            Dtype::U8 if files.has(&format!("{module}.weight_scale_2")) => Some((rows, cols.checked_mul(2)?)),
            Dtype::U8 => Some((rows.checked_mul(2)?, cols)),
            _ => Some((rows, cols)),
        }
    }

    fn weight_scales(&self) -> &'static [&'static str] {
        &["weight_scale"]
    }

    fn linear(&self, files: &ModelFiles, module: &str, rows: usize, cols: usize) -> Result<StoredLinear> {
        self.layer(files, module, rows, cols)
    }
}
