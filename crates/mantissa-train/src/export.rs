//! Export of a trained model as a Hugging Face folder.

use std::path::Path;

use mantissa_store::convention::ModelFiles;
use mantissa_store::{Dtype, Manifest, Output, SafetensorsWriter, Staging, TensorSpec};
use serde_json::{Value, json};

use crate::arena::transposed;
use crate::error::TrainError;
use crate::store::Precision;
use crate::trainer::Trainer;

/// Values copied at a time.
const PIECE: usize = 1 << 18;

impl Trainer {
    /// Writes the model into the folder `out` atomically: stored weights, `config` as `config.json`, and the
    /// files of the folder `tokenizer`. The provenance of the initial model `init`, if any, is recorded with
    /// this run.
    ///
    /// # Errors
    /// [`TrainError::Store`].
    pub fn export(
        &self,
        out: &Output,
        config: &Value,
        tokenizer: &Path,
        init: Option<&Path>,
    ) -> Result<(), TrainError> {
        let params = self.model().parameters();
        let (dtype, name) = match params.precision() {
            Precision::F32 => (Dtype::F32, "float32"),
            Precision::Bf16 => (Dtype::BF16, "bfloat16"),
            Precision::F16 => (Dtype::F16, "float16"),
        };
        let mut staging = Staging::begin(out)?;
        let specs = params.table().iter();
        let specs = specs.map(|p| TensorSpec::new(&p.tensor.name, dtype, p.stored_shape())).collect();
        let metadata = [("format".to_owned(), "pt".to_owned())].into();
        let weights = staging.path().join("model.safetensors");
        let mut writer = SafetensorsWriter::create(&weights, specs, metadata)?;
        for param in params.table().iter() {
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
        for file in ["tokenizer.json", "tokenizer_config.json", "special_tokens_map.json"] {
            let from = tokenizer.join(file);
            if from.is_file() {
                staging.copy(&from, file)?;
            }
        }
        let fields = json!({ "command": "train", "steps": self.progress().steps });
        let run = fields.as_object().cloned().unwrap_or_default();
        staging.seal(match init {
            Some(init) => Manifest::run_after(init, run)?,
            None => run,
        })?;
        // An output that does not open must not replace one that works.
        ModelFiles::open(staging.path())?;
        staging.publish()?;
        Ok(())
    }
}
