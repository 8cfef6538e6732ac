//! Results of fine-tuning: the adapter as a folder in PEFT's format, and the merged model.

use std::path::Path;

use mantissa_kernels::kernels;
use mantissa_model::{ModelConfig, Role, StoredAs, TensorInfo};
use mantissa_store::adapter::{AdapterSettings, OwnBase, Replaced};
use mantissa_store::convention::ModelFiles;
use mantissa_store::{
    Adapter, AdapterModule, Dtype, Manifest, Output, SafetensorsWriter, Staging, TensorSpec,
};
use serde_json::{Map, Value, json};

use super::TokenizerFiles;
use crate::error::TrainError;
use crate::lora::{A, B, MAGNITUDE, adapter_name, is_adapter};
use crate::model::TrainModel;
use crate::param_table::transposed;
use crate::store::Precision;
use crate::trainer::Trainer;

impl TrainModel {
    /// Returns the adapters and other trained tensors; `None` for a model without adapters. `base_model` is the name
    /// or path of the base.
    pub fn adapter(&self, base_model: &str) -> Option<Adapter> {
        let params = self.parameters();
        let tuning = &params.base()?.tuning;
        let module = |info: &mantissa_model::LinearInfo| AdapterModule {
            rows: info.rows,
            cols: info.cols,
            rank: tuning.lora.rank,
            alpha: tuning.lora.alpha,
            rank_stabilized: tuning.lora.rslora,
            a: params.values_of(&adapter_name(&info.module, A)),
            b: params.values_of(&adapter_name(&info.module, B)),
            magnitude: tuning.lora.dora.then(|| params.values_of(&adapter_name(&info.module, MAGNITUDE))),
        };
        let modules =
            tuning.adapted(self.config()).map(|info| (info.module.clone(), module(&info))).collect();
        let others = params.table().iter().filter(|param| !is_adapter(&param.tensor.name));
        let replaced = |param: &crate::param_table::ParamInfo| {
            let values = params.values_of(&param.tensor.name);
            (param.tensor.name.clone(), Replaced { shape: param.tensor.shape.clone(), values })
        };
        let replaced: std::collections::BTreeMap<_, _> = others.map(replaced).collect();
        let of = |name: &String| name.rsplit_once('.').map_or(&**name, |(module, _)| module).to_owned();
        let settings = AdapterSettings {
            base_model: Some(base_model.to_owned()),
            target_modules: Vec::new(),
            modules_to_save: replaced.keys().map(of).collect(),
            dropout: tuning.lora.dropout,
        };
        Some(Adapter { settings, modules, replaced })
    }
}

impl Trainer {
    /// Writes the adapter into the folder `out` atomically, in PEFT's format, with the files of the tokenizer. An adapter
    /// that LoftQ initialized fits only the base that was changed with it, [written](Self::export_model) before to
    /// `own_base`: its hash is recorded ([`mantissa_store::adapter::OwnBase`]).
    ///
    /// # Errors
    /// [`TrainError::Store`].
    pub fn export_adapter(
        &self,
        out: &Output,
        base_model: &str,
        tokenizer: TokenizerFiles<'_>,
        own_base: Option<&Path>,
    ) -> Result<(), TrainError> {
        let mut staging = Staging::begin(out)?;
        if let Some(adapter) = self.model().adapter(base_model) {
            adapter.write_to(&mut staging)?;
        }
        tokenizer.copy(&mut staging)?;
        let mut run = self.run_fields();
        if let Some(dir) = own_base {
            OwnBase::of(dir)?.record(&mut run);
        }
        staging.seal(run)?;
        staging.publish()?;
        Ok(())
    }

    /// Writes the model into the folder `out` atomically, with its adapters merged in f32, or the frozen base without
    /// them, stored in `precision`. Other arguments as in [`export`](Self::export).
    ///
    /// # Errors
    /// [`TrainError::Store`].
    pub fn export_model(
        &self,
        out: &Output,
        merged: bool,
        config: &Value,
        tokenizer: TokenizerFiles<'_>,
        init: Option<&Path>,
        precision: Precision,
    ) -> Result<(), TrainError> {
        let (dtype, name) = match precision {
            Precision::F32 => (Dtype::F32, "float32"),
            Precision::Bf16 => (Dtype::BF16, "bfloat16"),
            Precision::F16 => (Dtype::F16, "float16"),
        };
        let (params, model) = (self.model().parameters(), self.model().config());
        let mut staging = Staging::begin(out)?;
        let tensors = model.tensors();
        let specs = tensors.iter().map(|t| TensorSpec::new(&t.name, dtype, t.shape.clone())).collect();
        let metadata = [("format".to_owned(), "pt".to_owned())].into();
        let weights = staging.path().join("model.safetensors");
        let mut writer = SafetensorsWriter::create(&weights, specs, metadata)?;
        for (tensor, values) in params.written_tensors(model, merged) {
            let values = match is_transposed(model, &tensor) {
                true => transposed(&values, tensor.shape[0]),
                false => values,
            };
            writer.write(&tensor.name, &stored(precision, &values))?;
        }
        let digest = writer.finish()?;
        staging.record("model.safetensors", digest);
        let mut config = config.clone();
        if let Value::Object(fields) = &mut config {
            fields.insert("torch_dtype".to_owned(), name.into());
            fields.remove("dtype");
            // The base may have been quantized; the merged model is not.
            fields.remove("quantization_config");
        }
        staging.write("config.json", format!("{config:#}\n").as_bytes())?;
        tokenizer.copy(&mut staging)?;
        let run = self.run_fields();
        staging.seal(match init {
            Some(init) => Manifest::run_after(init, run)?,
            None => run,
        })?;
        // An output that does not open must not replace one that works.
        ModelFiles::open(staging.path())?;
        staging.publish()?;
        Ok(())
    }

    fn run_fields(&self) -> Map<String, Value> {
        let fields = json!({ "command": "train", "steps": self.progress().steps });
        fields.as_object().cloned().unwrap_or_default()
    }
}

/// True for the weight of a linear layer that the checkpoint stores as `[in, out]`.
fn is_transposed(model: &ModelConfig, tensor: &TensorInfo) -> bool {
    match tensor.role {
        Role::Linear { layer, kind } => model.linear(layer, kind).stored == StoredAs::Columns,
        _ => false,
    }
}

/// Returns the little-endian bytes of values in `precision`, rounded to nearest.
fn stored(precision: Precision, values: &[f32]) -> Vec<u8> {
    let mut bits = vec![0; if precision == Precision::F32 { 0 } else { values.len() }];
    match precision {
        Precision::F32 => return values.iter().flat_map(|v| v.to_le_bytes()).collect(),
        Precision::Bf16 => kernels().f32_to_bf16(values, &mut bits),
        Precision::F16 => kernels().f32_to_f16(values, &mut bits),
    }
    bits.iter().flat_map(|v| v.to_le_bytes()).collect()
}
