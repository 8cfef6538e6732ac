//! Checkpoint that `inspect` shows.

use std::path::Path;

use anyhow::Result;
use mantissa_store::convention::ModelFiles;
use mantissa_store::{Checkpoint, Error};

/// Checkpoint, read through its format if that is known.
pub enum Model {
    /// Known format, or dense.
    Known(ModelFiles),
    /// Unknown format: tensors are shown as stored.
    Raw(Checkpoint),
}

impl Model {
    pub(super) fn open(path: &Path, warnings: &mut Vec<String>) -> Result<Self> {
        match ModelFiles::open(path) {
            Ok(files) => Ok(Model::Known(files)),
            Err(Error::Field(fault)) if fault.field == "quantization_config.quant_method" => {
                warnings.push(format!("{fault}; tensors are shown as stored"));
                Ok(Model::Raw(Checkpoint::open(path)?))
            }
            Err(error) => Err(error.into()),
        }
    }

    /// Returns the files.
    pub fn checkpoint(&self) -> &Checkpoint {
        match self {
            Model::Known(files) => files.checkpoint(),
            Model::Raw(checkpoint) => checkpoint,
        }
    }

    pub(super) fn convention(&self) -> &'static str {
        match self {
            Model::Known(files) => files.convention_name(),
            Model::Raw(_) => "unknown",
        }
    }

    pub(super) fn notes(&self) -> Vec<String> {
        match self {
            Model::Known(files) => files.notes(),
            Model::Raw(_) => Vec::new(),
        }
    }
}
