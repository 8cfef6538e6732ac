//! Models with an adapter that is not merged: the option `--adapter`, loading, and memory.

use std::path::{Path, PathBuf};

use anyhow::Result;
use mantissa_model::{Adapted, Decoder, WeightSource};
use mantissa_quant::model_config;
use mantissa_runtime::FastModel;
use mantissa_store::convention::ModelFiles;
use mantissa_store::{AdapterFiles, Paths};

/// Option that names an adapter.
#[derive(clap::Args, Clone, Debug, Default)]
pub struct AdapterArgs {
    /// Run MODEL with this PEFT adapter, not merged
    ///
    /// Folder with adapter_config.json and adapter_model.safetensors: LoRA or DoRA of linear layers. MODEL is the model
    /// it was trained on, in any format, quantized or not.
    #[arg(long, value_name = "DIR")]
    adapter: Option<PathBuf>,
}

impl AdapterArgs {
    /// Adds the paths that the option reads.
    pub fn paths(&self, paths: &mut Paths) {
        self.adapter.iter().for_each(|adapter| paths.read(adapter));
    }

    /// Folder of the adapter.
    pub fn named(&self) -> Option<&Path> {
        self.adapter.as_deref()
    }

    /// Opens the adapter, if there is one.
    ///
    /// # Errors
    /// As [`AdapterFiles::open`].
    pub fn open(&self) -> Result<Option<AdapterFiles>> {
        Ok(self.adapter.as_deref().map(AdapterFiles::open).transpose()?)
    }
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
            let name = adapter.dir().display().to_string();
            load(&Adapted::new(files, adapter.load()?, &name)?)
        }
    }
}

/// Bytes that the adapter of a model takes beside it.
///
/// # Errors
/// As [`model_config`].
pub fn bytes_needed(files: &ModelFiles, adapter: Option<&AdapterFiles>) -> Result<u64> {
    Ok(match adapter {
        None => 0,
        Some(adapter) => Adapted::bytes_needed(&model_config(files)?, adapter),
    })
}
