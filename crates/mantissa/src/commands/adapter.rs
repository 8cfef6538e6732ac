//! The option `--adapter`: an adapter that is not merged.

use std::path::{Path, PathBuf};

use mantissa_store::Paths;

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

    /// Returns the folder of the adapter.
    pub fn named(&self) -> Option<&Path> {
        self.adapter.as_deref()
    }
}
