//! Export of a trained model as a Hugging Face folder.

mod adapter;

use std::path::Path;

use mantissa_store::convention::ModelFiles;
use mantissa_store::{Dtype, Error, Manifest, Output, SafeTensors, SafetensorsWriter, Staging, TensorSpec};
use serde_json::{Value, json};

use crate::error::TrainError;
use crate::model::TrainModel;
use crate::param_table::{ParamInfo, transposed};
use crate::store::Precision;
use crate::trainer::Trainer;

/// Values copied at a time.
const PIECE: usize = 1 << 18;

/// Values compared at a time: few, because all of the run's memory is still in use.
const COMPARED: usize = 1 << 14;

/// Files of a tokenizer.
const TOKENIZER: [&str; 3] = ["tokenizer.json", "tokenizer_config.json", "special_tokens_map.json"];

/// File of a chat template.
const TEMPLATE: &str = "chat_template.jinja";

/// Tokenizer of a result.
#[derive(Clone, Copy, Debug)]
pub struct TokenizerFiles<'a> {
    /// Folder with its files.
    pub dir: &'a Path,
    /// Chat template that replaces the folder's.
    pub template: Option<&'a str>,
}

impl TokenizerFiles<'_> {
    /// Copies the files, as far as they exist.
    ///
    /// # Errors
    /// I/O.
    pub(crate) fn copy(&self, staging: &mut Staging) -> Result<(), Error> {
        let template = self.template.is_none().then_some(TEMPLATE);
        for file in TOKENIZER.into_iter().chain(template) {
            let from = self.dir.join(file);
            if from.is_file() {
                staging.copy(&from, file)?;
            }
        }
        if let Some(template) = self.template {
            staging.write(TEMPLATE, template.as_bytes())?;
        }
        Ok(())
    }
}

/// Reads the weights at `path` back and compares those that are stored as the model holds them.
fn check(path: &Path, model: &mut TrainModel, params: &[ParamInfo]) -> Result<(), TrainError> {
    let file = SafeTensors::open(path)?;
    let mut found = Vec::new();
    for param in params {
        let name = &param.tensor.name;
        let fault = |found: &str| {
            let hint = "rerun with --resume; if it happens again, the disk is faulty";
            Error::field(path, name.clone(), found, "the bytes that were written", hint)
        };
        let meta = file.get(name).ok_or_else(|| fault("no such tensor"))?;
        let mut at = 0;
        model.reach_param(param)?;
        // Transposed weights are in another order.
        let range = if param.transposed { 0..0 } else { param.range.clone() };
        for first in range.clone().step_by(COMPARED) {
            let bytes = model.params.stored_bytes(first..range.end.min(first + COMPARED));
            found.resize(bytes.len(), 0);
            file.read_range(meta, at, &mut found)?;
            if found != bytes {
                return Err(fault("other bytes").into());
            }
            at += bytes.len() as u64;
        }
    }
    Ok(())
}

impl Trainer {
    /// Writes the model into the folder `out` atomically: stored weights without learned scales, `config` as `config.json`, and the
    /// files of the tokenizer. The provenance of the initial model `init`, if any, is recorded with
    /// this run.
    ///
    /// # Errors
    /// [`TrainError::Store`].
    pub fn export(
        &mut self,
        out: &Output,
        config: &Value,
        tokenizer: TokenizerFiles<'_>,
        init: Option<&Path>,
    ) -> Result<(), TrainError> {
        let (dtype, name) = match self.model.params.precision() {
            Precision::F32 => (Dtype::F32, "float32"),
            Precision::Bf16 => (Dtype::BF16, "bfloat16"),
            Precision::F16 => (Dtype::F16, "float16"),
        };
        let mut staging = Staging::begin(out)?;
        let tensors = self.model.params.table().iter().filter(|param| !param.is_scales());
        let tensors: Vec<ParamInfo> = tensors.cloned().collect();
        let specs =
            tensors.iter().map(|p| TensorSpec::new(&p.tensor.name, dtype, p.stored_shape())).collect();
        let metadata = [("format".to_owned(), "pt".to_owned())].into();
        let weights = staging.path().join("model.safetensors");
        let mut writer = SafetensorsWriter::create(&weights, specs, metadata)?;
        for param in &tensors {
            self.model.reach_param(param)?;
            let params = &self.model.params;
            if param.transposed {
                let (bytes, size) = (params.stored_bytes(param.range.clone()), params.precision().bytes());
                let values: Vec<&[u8]> = bytes.chunks_exact(size as usize).collect();
                let bytes = transposed(&values, param.tensor.shape[1]).concat();
                writer.write_range(&param.tensor.name, 0, &bytes)?;
                continue;
            }
            let mut at = 0;
            for first in param.range.clone().step_by(PIECE) {
                let bytes = params.stored_bytes(first..param.range.end.min(first + PIECE));
                writer.write_range(&param.tensor.name, at, &bytes)?;
                at += bytes.len() as u64;
            }
        }
        let digest = writer.finish()?;
        staging.record("model.safetensors", digest);
        let mut config = config.clone();
        if let Value::Object(fields) = &mut config {
            fields.insert("torch_dtype".to_owned(), name.into());
        }
        staging.write("config.json", format!("{config:#}\n").as_bytes())?;
        tokenizer.copy(&mut staging)?;
        let fields = json!({ "command": "train", "steps": self.progress().steps });
        let run = fields.as_object().cloned().unwrap_or_default();
        staging.seal(match init {
            Some(init) => Manifest::run_after(init, run)?,
            None => run,
        })?;
        // An output that does not open, or holds other weights, must not replace one that works.
        ModelFiles::open(staging.path())?;
        check(&weights, &mut self.model, &tensors)?;
        staging.publish()?;
        Ok(())
    }
}
