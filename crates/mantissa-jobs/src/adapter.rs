//! Models with an adapter that is not merged: files, loading, and memory.

use std::path::Path;

use mantissa_model::{Adapted, Decoder, Tokenizer, WeightSource, load_config};
use mantissa_runtime::FastModel;
use mantissa_store::AdapterFiles;
use mantissa_store::adapter::OwnBase;
use mantissa_store::convention::ModelFiles;

use crate::error::{BadInput, Result};

/// Opens the adapter in the folder `dir`, if there is one.
///
/// # Errors
/// As [`AdapterFiles::open`].
pub fn open(dir: Option<&Path>) -> Result<Option<AdapterFiles>> {
    Ok(dir.map(AdapterFiles::open).transpose()?)
}

/// Gives the tokenizer the chat templates beside the adapter in `dir`, which was trained with them, if there are any.
///
/// # Errors
/// As [`Tokenizer::with_templates_of`].
pub fn templates(tokenizer: Tokenizer, dir: Option<&Path>) -> Result<Tokenizer> {
    Ok(match dir {
        Some(dir) => tokenizer.with_templates_of(dir)?,
        None => tokenizer,
    })
}

/// Loads a model for the reference engine, with its adapter.
///
/// # Errors
/// As [`Decoder::load`] and [`Adapted::new`].
pub fn decoder(files: &ModelFiles, adapter: Option<&AdapterFiles>) -> Result<Decoder> {
    with(files, adapter, |source| Ok(Decoder::load(source)?))
}

/// Loads a model for the fast engine, with its adapter.
///
/// # Errors
/// As [`FastModel::load`] and [`Adapted::new`].
pub fn fast(files: &ModelFiles, adapter: Option<&AdapterFiles>, threads: usize) -> Result<FastModel> {
    with(files, adapter, |source| Ok(FastModel::load(source, threads)?))
}

fn with<T>(
    files: &ModelFiles,
    adapter: Option<&AdapterFiles>,
    load: impl FnOnce(&(dyn WeightSource + Sync)) -> Result<T>,
) -> Result<T> {
    match adapter {
        None => load(files),
        Some(adapter) => {
            require_base(files, adapter)?;
            let name = adapter.dir().display().to_string();
            load(&Adapted::new(files, adapter.load()?, &name)?)
        }
    }
}

/// Refuses a model that is not the base of an adapter that fits no other.
fn require_base(files: &ModelFiles, adapter: &AdapterFiles) -> Result<()> {
    let Some(own) = OwnBase::recorded(adapter.dir())? else { return Ok(()) };
    if own.is_at(files.dir())? {
        return Ok(());
    }
    let OwnBase { path, sha256 } = own;
    let (base, short) = (path.display(), sha256.get(..12).unwrap_or_default());
    let allowed = format!("the base that LoftQ changed with the adapter, {base} (SHA-256 {short}…)");
    let named = adapter.dir().display().to_string();
    let error = BadInput::new(named, files.dir().display().to_string(), allowed);
    Err(error.with_fix(format!("give {base} as the model, or merge with mantissa finetune --merge")).into())
}

/// Bytes that the adapter of a model takes beside it.
///
/// # Errors
/// As [`load_config`].
pub fn bytes_needed(files: &ModelFiles, adapter: Option<&AdapterFiles>) -> Result<u64> {
    Ok(match adapter {
        None => 0,
        Some(adapter) => Adapted::bytes_needed(&load_config(files)?, adapter),
    })
}
