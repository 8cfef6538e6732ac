//! bitsandbytes (QLoRA, transformers, vLLM): NF4 and FP4 weights, and LLM.int8().
//!
//! 4 bits: a module's weight `[N, K]` is flattened and cut into blocks of `B`. `weight` U8 `[ceil(N·K/2), 1]` has the
//! first code in the high nibble; `weight.absmax` F32 `[ceil(N·K/B)]`; `weight.quant_map` F32 `[16]`; and
//! `weight.quant_state.bitsandbytes__nf4` (or `__fp4`) U8, a JSON object as text. With double quantization
//! `weight.absmax` holds U8 codes of the signed dynamic map, `weight.nested_absmax` F32 one amax per 256 of them,
//! `weight.nested_quant_map` F32 `[256]` the map, and the JSON their mean. `w = map[code] · absmax`.
//!
//! LLM.int8(): `weight` I8 `[N, K]`, `SCB` F32 `[N]`, the amax of each row, `weight_format` U8 `[]` = 0. `w = code ·
//! SCB / 127`. Inputs are int8 per token, except values of at least `llm_int8_threshold`.
//!
//! Source: bitsandbytes 0.50.2, `functional.py` (`QuantState`), `nn/modules.py`, `backends/default/ops.py`; Dettmers
//! et al. 2022 (arXiv 2208.07339), 2023 (arXiv 2305.14314).

mod config;
mod read;
mod scheme;
mod write;

pub use config::{BitWidth, Config, QUANT_METHOD};
pub use write::{quantization_config, specs, store, tensors};

use mantissa_num::{Format, Quantized, Scheme};
use serde_json::Value;

use super::{
    CheckpointFolder, Container, Convention, Facts, LinearPlan, LinearWeight, ModelFiles, ModelPlan,
    NamedBytes, Opened, ShapeSource, SideTensors, Storable, StoredLinear, StoredTensors,
};
use crate::{Dtype, Result, TensorMeta, TensorSpec};
use read::shape;

/// bitsandbytes, read by transformers and vLLM.
#[derive(Debug)]
pub(crate) struct Bitsandbytes;

/// Handle of the format.
pub const CONTAINER: Container = Container::new(&Bitsandbytes);

impl Convention for Bitsandbytes {
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
        Some(Facts { folded_transforms: true, quantized_head: true, ..Facts::default() })
    }

    /// Code books, either all double quantized or none: no other public format stores them.
    fn is_default_for(&self, schemes: &[&Scheme]) -> bool {
        let doubled = |scheme: &Scheme| match &scheme.format {
            Format::Table(table) => Some(table.scale.nested().is_some()),
            _ => None,
        };
        let first = schemes.first().and_then(|scheme| doubled(scheme));
        first.is_some() && schemes.iter().all(|scheme| doubled(scheme) == first)
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
        let head = (!model.quantizes_head()).then_some("lm_head").map(str::to_owned);
        let kept: Vec<_> = model.kept.iter().cloned().chain(head).collect();
        quantization_config(&model.groups(), &kept)
    }
}

impl Opened for Config {
    fn name(&self) -> &'static str {
        QUANT_METHOD
    }

    fn quantizes(&self, module: &str) -> Option<bool> {
        Some(!self.skipped.has(module))
    }

    fn shapes(&self) -> ShapeSource {
        ShapeSource::Codes
    }

    fn coded_shape(&self, files: &ModelFiles, module: &str, codes: &TensorMeta) -> Option<(usize, usize)> {
        match codes.dtype {
            Dtype::U8 => shape(files, module),
            _ => <[usize; 2]>::try_from(codes.shape.as_slice()).ok().map(Into::into),
        }
    }

    fn weight_scales(&self) -> &'static [&'static str] {
        &["weight.absmax", "SCB"]
    }

    fn linear(&self, files: &ModelFiles, module: &str, rows: usize, cols: usize) -> Result<StoredLinear> {
        self.layer(files, module, rows, cols)
    }
}
