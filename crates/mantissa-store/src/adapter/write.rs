//! Writing, in the form of `PeftModel.save_pretrained`.

use std::collections::BTreeMap;

use serde_json::Map;

use super::{Adapter, AdapterModule, CONFIG_NAME, PREFIX, WEIGHTS_NAME, config};
use crate::commit::{Committed, Staging};
use crate::dtype::Dtype;
use crate::error::{Error, Result};
use crate::output::Output;
use crate::writer::{SafetensorsWriter, TensorSpec};

impl Adapter {
    /// Writes the adapter as the folder `output`.
    ///
    /// # Errors
    /// As [`Staging::begin`] and [`write_to`](Self::write_to).
    pub fn write(&self, output: &Output) -> Result<Committed> {
        let mut staging = Staging::begin(output)?;
        self.write_to(&mut staging)?;
        staging.commit(Map::new())
    }

    /// Writes `adapter_config.json` and `adapter_model.safetensors` (f32) into a folder that is being written.
    ///
    /// # Errors
    /// [`Error::Field`] for modules that one file of settings cannot describe, or values that do not have their shape;
    /// [`Error::Io`].
    pub fn write_to(&self, staging: &mut Staging) -> Result<()> {
        let path = staging.path().join(WEIGHTS_NAME);
        self.check(staging)?;
        let (mut specs, mut values) = (Vec::new(), Vec::new());
        let mut put = |name: String, shape: &[usize], data| {
            specs.push(TensorSpec::new(name.clone(), Dtype::F32, shape));
            values.push((name, data));
        };
        for (name, module) in &self.modules {
            let AdapterModule { rows, cols, rank, a, b, magnitude, .. } = module;
            put(format!("{PREFIX}{name}.lora_A.weight"), &[*rank, *cols], a.as_slice());
            put(format!("{PREFIX}{name}.lora_B.weight"), &[*rows, *rank], b);
            if let Some(magnitude) = magnitude {
                put(format!("{PREFIX}{name}.lora_magnitude_vector"), &[*rows], magnitude);
            }
        }
        for (name, tensor) in &self.replaced {
            put(format!("{PREFIX}{name}"), &tensor.shape, &tensor.values);
        }
        let metadata = BTreeMap::from([("format".to_owned(), "pt".to_owned())]);
        let mut writer = SafetensorsWriter::create(&path, specs, metadata)?;
        for (name, values) in values {
            let bytes: Vec<u8> = values.iter().flat_map(|value| value.to_le_bytes()).collect();
            writer.write(&name, &bytes)?;
        }
        let digest = writer.finish()?;
        staging.record(WEIGHTS_NAME, digest);
        staging.write(CONFIG_NAME, format!("{:#}", config::written(self)).as_bytes())
    }

    /// Checks that lengths fit shapes and that all modules are of one kind.
    fn check(&self, staging: &Staging) -> Result<()> {
        let path = staging.path().join(WEIGHTS_NAME);
        let bad =
            |field: String, found: String, allowed: &str| Err(Error::field(&path, field, found, allowed, ""));
        let kind = |module: &AdapterModule| (module.rank_stabilized, module.magnitude.is_some());
        let first = self.modules.values().next().map(kind);
        for (name, module) in &self.modules {
            let AdapterModule { rows, cols, rank, a, b, magnitude, .. } = module;
            let fits = a.len() == rank * cols && b.len() == rows * rank && *rank > 0;
            if !fits || magnitude.as_ref().is_some_and(|values| values.len() != *rows) {
                return bad(
                    name.clone(),
                    format!("{} and {} values", a.len(), b.len()),
                    "values of A [rank, in] and B [out, rank]",
                );
            }
            if Some(kind(module)) != first {
                return bad(
                    name.clone(),
                    "a module of another kind".into(),
                    "LoRA or DoRA with one kind of scale in all modules",
                );
            }
        }
        for (name, tensor) in &self.replaced {
            if tensor.values.len() != tensor.shape.iter().product::<usize>() {
                return bad(
                    name.clone(),
                    format!("{} values", tensor.values.len()),
                    "as many values as its shape has",
                );
            }
        }
        Ok(())
    }
}
