//! Opening a model for a command: its files, its notes, its decoder under the memory ceiling.

use std::path::{Path, PathBuf};

use anyhow::Result;
use mantissa_model::{Buffers, Decoder};
use mantissa_quant::model_config;
use mantissa_store::convention::ModelFiles;

use crate::app::Context;
use crate::error::BadInput;

/// A model ready to run.
pub struct Model {
    /// Its files.
    pub files: ModelFiles,
    /// Its decoder.
    pub decoder: Decoder,
}

/// Opens the files of a model and tells its notes.
///
/// # Errors
/// As [`ModelFiles::open`]; under `--strict`, for notes.
pub fn open(path: &Path, context: &Context) -> Result<ModelFiles> {
    if path.as_os_str() == "demo" && !path.exists() {
        return Err(BadInput::new(
            "MODEL",
            "\"demo\"",
            "a model folder (the embedded model is not there yet)",
        )
        .into());
    }
    let files = ModelFiles::open(path)?;
    let notes: Vec<_> =
        files.notes().into_iter().chain(files.checkpoint().warnings().iter().cloned()).collect();
    context.warn_all(&notes)?;
    Ok(files)
}

/// Opens and loads a model that is to run sequences of up to `longest` tokens on `threads` threads.
///
/// # Errors
/// As [`open`] and [`Decoder::load`]; where `--memory` does not allow it.
pub fn load(path: &Path, longest: usize, threads: usize, context: &Context) -> Result<Model> {
    let files = open(path, context)?;
    let config = model_config(&files)?;
    let buffers = Buffers::bytes_needed(&config, longest, longest).saturating_mul(threads as u64);
    let what = format!("{}: weights and buffers", path.display());
    context.require_memory(&what, files.checkpoint().total_bytes().saturating_add(buffers))?;
    let decoder = Decoder::load(&files)?;
    Ok(Model { files, decoder })
}

/// Tokens that a model was made for.
///
/// # Errors
/// As [`model_config`].
pub fn context_length(files: &ModelFiles) -> Result<usize> {
    Ok(model_config(files)?.max_position_embeddings)
}

/// The path of a model as given.
pub type ModelPath = PathBuf;
