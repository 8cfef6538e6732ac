//! Lookups in the table of checkpoint formats.

use std::path::Path;

use mantissa_num::Scheme;
use serde_json::Value;

use super::container::{CheckpointFolder, Container, Convention};
use super::files::{ModelFiles, Opened};
use super::{ROWS, native};
use crate::{Checkpoint, Error, Result};

impl Container {
    /// Every writable format.
    pub fn all() -> impl Iterator<Item = Container> {
        ROWS.into_iter().filter(|row| row.writes().is_some()).map(Container::new)
    }

    /// Names of all writable formats.
    pub fn names() -> Vec<&'static str> {
        Self::all().map(|container| container.name()).collect()
    }

    /// The writable format of this name.
    pub fn named(name: &str) -> Option<Container> {
        Self::all().find(|container| container.name() == name)
    }

    /// Default format for weights with these schemes: the first that is a default for them and that `holds` accepts,
    /// else mantissa's own.
    pub fn default_for(schemes: &[&Scheme], holds: impl Fn(Container) -> bool) -> Container {
        let mut defaults = Self::all().filter(|container| container.is_default_for(schemes));
        defaults.find(|container| holds(*container)).unwrap_or(native::CONTAINER)
    }
}

/// Names of the files beside `config.json` in which any format describes the quantization.
pub fn side_files() -> impl Iterator<Item = &'static str> {
    ROWS.into_iter().flat_map(Convention::side_files).copied()
}

impl ModelFiles {
    /// Opens a Hugging Face directory, one bare `.safetensors` file or one GGUF file.
    ///
    /// # Errors
    /// As [`Checkpoint::open`] and [`crate::Gguf::open`]; [`Error::Field`] if `quantization_config` names an unsupported format
    /// or is malformed.
    pub fn open(path: &Path) -> Result<Self> {
        for row in ROWS {
            if let Some((checkpoint, opened)) = row.open_file(path)? {
                return Ok(ModelFiles::new(checkpoint, opened));
            }
        }
        let checkpoint = Checkpoint::open(path)?.with_embedding();
        let opened = detect(&checkpoint, true)?;
        Ok(ModelFiles::new(checkpoint, opened))
    }

    /// Opens a model while it is written to `dir`, from its partial weight files `names` and its config. Read only
    /// tensors known to be written.
    ///
    /// # Errors
    /// As [`Self::open`].
    pub fn unfinished<'n>(
        dir: &Path,
        names: impl IntoIterator<Item = &'n str>,
        config: Value,
    ) -> Result<Self> {
        let checkpoint = Checkpoint::of_begun(dir, names, config)?;
        let opened = detect(&checkpoint, false)?;
        Ok(ModelFiles::new(checkpoint, opened))
    }
}

/// Opens a folder in the first format that recognises it.
fn detect(checkpoint: &Checkpoint, complete: bool) -> Result<Box<dyn Opened>> {
    let config_path = checkpoint.dir().join("config.json");
    let quantization = checkpoint.config().and_then(|config| config.get("quantization_config"));
    let quantization = quantization.filter(|value| !value.is_null());
    let folder = CheckpointFolder { checkpoint, config_path: &config_path, quantization, complete };
    for row in ROWS {
        if let Some(opened) = row.open(&folder)? {
            return Ok(opened);
        }
    }
    let known: Vec<_> =
        ROWS.iter().flat_map(|row| row.quant_methods()).map(|name| format!("\"{name}\"")).collect();
    Err(Error::field(
        &config_path,
        "quantization_config.quant_method",
        format!("\"{}\"", folder.method()),
        format!("{} or no quantization_config", known.join(", ")),
        "this format is not read; fix: convert the model with the tool that wrote it",
    ))
}
