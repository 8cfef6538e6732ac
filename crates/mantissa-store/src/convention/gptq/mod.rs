//! GPTQ (AutoGPTQ, GPTQModel, vLLM, transformers) and AutoRound's naming of the same tensors.
//!
//! For a module with weight `[N, K]`, codes of `b` bits and groups of `g` columns, `G = ceil(K/g)`: `qweight` I32 `[K·b/32, N]`
//! packed along K, `qzeros` I32 `[G, N·b/32]` packed along N, `scales` F16 `[G, N]`, and `g_idx` I32 `[K]`, the group of each
//! column (absent in AutoRound's files). `w[n, k] = scales[g_idx[k], n] · (q[n, k] - z[g_idx[k], n])`; `qzeros` holds `z - 1` in
//! `gptq` files (v1) and `z` in `gptq_v2`.
//!
//! Source: GPTQModel 7, `nn_modules/qlinear/__init__.py`, `utils/model.py`, `docs/gptq_planar.md`.

use mantissa_num::{Code, Quantized, Scheme, minifloat};
use serde_json::Value;

use super::container::with_scales_in;
use super::{
    CheckpointFolder, Container, Convention, Facts, LinearPlan, ModelFiles, ModelPlan, NamedBytes, Opened,
    ShapeSource, SideTensors, Storable, StoredLinear, Support,
};
use crate::{Dtype, Result, TensorSpec};

mod config;
mod read;
mod version;
mod write;

pub use super::weight::in_own_order;
pub use config::{
    AUTO_ROUND, AUTO_ROUND_FILE, Config, Layer, Layout, QUANT_METHOD, ZeroVersion, packing_format,
};
pub use write::{FILE_NAME, Settings, quantization_config, specs, tensors};

pub(crate) use read::{centred, group_int, read_order, read_scales};
pub(crate) use write::int_groups;

/// GPTQ, read by GPTQModel, vLLM, SGLang and transformers.
#[derive(Debug)]
pub(crate) struct Gptq;

/// Handle of the format.
pub const CONTAINER: Container = Container::new(&Gptq);

impl Convention for Gptq {
    fn name(&self) -> &'static str {
        QUANT_METHOD
    }

    fn quant_methods(&self) -> &'static [&'static str] {
        &[QUANT_METHOD, AUTO_ROUND[0], AUTO_ROUND[1], AUTO_ROUND[2]]
    }

    fn open(&self, folder: &CheckpointFolder<'_>) -> Result<Option<Box<dyn Opened>>> {
        let path = folder.config_path;
        let mut config = match (folder.of_method(QUANT_METHOD), folder.quantization) {
            (Some(value), _) => Config::parse(path, value)?,
            (_, Some(value)) if is_auto_round(folder) && !packing_format(value).contains("awq") => {
                Config::parse_auto_round(path, value)?
            }
            _ => return Ok(None),
        };
        if folder.complete {
            config.check_version(folder.checkpoint);
        }
        Ok(Some(Box::new(config)))
    }

    fn writes(&self) -> Option<Facts> {
        Some(Facts {
            conv1d: true,
            group_order: Support::Yes,
            signed_scales: true,
            folded_transforms: true,
            transposed: true,
            quantized_head: true,
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
        let g_idx = match beside {
            SideTensors::Groups(g_idx) => Some(g_idx),
            _ => None,
        };
        tensors(plan, q, g_idx, plan.scheme.format.has_zero())
    }

    fn quantization_config(&self, model: &ModelPlan<'_>) -> Storable<Value> {
        let settings =
            Settings { desc_act: model.by_group, damp: model.damp, lm_head: model.quantizes_head() };
        quantization_config(&model.groups(), &model.kept, settings)
    }

    fn side_files(&self) -> &'static [&'static str] {
        &[FILE_NAME, AUTO_ROUND_FILE]
    }

    fn side_config(
        &self,
        _model: &ModelPlan<'_>,
        quantization: &Value,
    ) -> Storable<Option<(&'static str, Value)>> {
        Ok(Some((FILE_NAME, quantization.clone())))
    }

    fn as_stored(&self, scheme: Scheme, _dtype: Dtype) -> Scheme {
        with_scales_in(scheme, Dtype::F16)
    }

    fn scale_code(&self, _dtype: Dtype) -> Option<Code> {
        Some(Code::Float(minifloat::F16))
    }
}

/// True if a folder is AutoRound's, with GPTQ or AWQ tensors.
pub(crate) fn is_auto_round(folder: &CheckpointFolder<'_>) -> bool {
    AUTO_ROUND.contains(&folder.method())
}

impl Opened for Config {
    fn name(&self) -> &'static str {
        if self.is_auto_round() { "auto-round" } else { QUANT_METHOD }
    }

    fn shapes(&self) -> ShapeSource {
        ShapeSource::Words
    }

    fn notes(&self) -> Vec<String> {
        self.notes()
    }

    fn quantizes(&self, module: &str) -> Option<bool> {
        Some(self.names(module))
    }

    fn code_tensors(&self) -> &'static [(&'static str, &'static [&'static str])] {
        &[("qweight", &["qzeros", "scales"])]
    }

    fn linear(&self, files: &ModelFiles, module: &str, rows: usize, cols: usize) -> Result<StoredLinear> {
        Ok(self.weight(files, module, rows, cols)?.into())
    }
}

impl ModelFiles {
    /// Storage of a model with GPTQ's tensors; `None` for any other.
    pub fn gptq(&self) -> Option<&Config> {
        self.as_convention()
    }
}
