//! Checkpoint to inspect.

use std::path::Path;

use mantissa_model::config_notes;
use mantissa_store::convention::ModelFiles;
use mantissa_store::{Checkpoint, Error};

use crate::error::Result;
use crate::model::{explained, no_adapter};

/// Checkpoint, read through its format if that is known.
pub enum Model {
    /// Known format, or dense.
    Known(ModelFiles),
    /// Unknown format: tensors are shown as stored.
    Raw(Checkpoint),
}

impl Model {
    /// Opens the checkpoint at `path`. Weights of an adapter are shown as any other file; its folder is no model.
    pub(crate) fn open(path: &Path, warnings: &mut Vec<String>) -> Result<Self> {
        if let Some(error) = no_adapter(path).filter(|_| path.is_dir()) {
            return Err(error.into());
        }
        match ModelFiles::open(path) {
            Ok(files) => Ok(Model::Known(files)),
            Err(Error::Field(fault)) if fault.field == "quantization_config.quant_method" => {
                warnings.push(format!("{fault}; tensors are shown as stored"));
                Ok(Model::Raw(Checkpoint::open(path)?))
            }
            Err(error) => Err(explained(path, &error).map_or_else(|| error.into(), Into::into)),
        }
    }

    /// Returns the files.
    pub fn checkpoint(&self) -> &Checkpoint {
        match self {
            Model::Known(files) => files.checkpoint(),
            Model::Raw(checkpoint) => checkpoint,
        }
    }

    pub(crate) fn convention(&self) -> &'static str {
        match self {
            Model::Known(files) => files.convention_name(),
            Model::Raw(_) => "unknown",
        }
    }

    pub(crate) fn notes(&self) -> Vec<String> {
        match self {
            // Patterns that take too many steps are noted once they were tried.
            Model::Known(files) => config_notes(files).into_iter().chain(files.notes()).collect(),
            Model::Raw(_) => Vec::new(),
        }
    }
}
