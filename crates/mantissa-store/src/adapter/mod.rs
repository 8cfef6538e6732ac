//! Adapters in PEFT's format: a folder with `adapter_config.json` and `adapter_model.safetensors`, as
//! `PeftModel.save_pretrained` of peft 0.17 to 0.20 writes and reads it.
//!
//! LoRA (Hu et al. 2021, arXiv 2106.09685): a linear layer `W` `[out, in]` becomes `W + s·B·A` with `A` `[r, in]` and
//! `B` `[out, r]`; `s = alpha / r`, or `alpha / √r` with rank stabilization (Kalajdzievski 2023, arXiv 2312.03732).
//! DoRA (Liu et al. 2024, arXiv 2402.09353): each row of `W + s·B·A` is scaled to a learned norm, `magnitude` `[out]`.
//!
//! Tensors are named `base_model.model.MODULE.lora_A.weight`, `….lora_B.weight` and `….lora_magnitude_vector`. Tensors
//! of `modules_to_save` and trained biases replace tensors of the base model, under their own names after the same prefix.

mod config;
mod merge;
mod own_base;
mod read;
#[cfg(test)]
#[allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]
mod tests;
mod write;

use std::collections::BTreeMap;

pub use self::merge::MergeError;
pub use self::own_base::OwnBase;
pub use self::read::AdapterFiles;

/// Settings of an adapter.
pub const CONFIG_NAME: &str = "adapter_config.json";

/// Tensors of an adapter.
pub const WEIGHTS_NAME: &str = "adapter_model.safetensors";

/// Prefix of all tensor names.
const PREFIX: &str = "base_model.model.";

/// LoRA or DoRA adapter in memory.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Adapter {
    /// Settings that do not change the result.
    pub settings: AdapterSettings,
    /// Adapted linear layers by module name, as in the base model.
    pub modules: BTreeMap<String, AdapterModule>,
    /// Tensors that replace tensors of the base model, by name.
    pub replaced: BTreeMap<String, Replaced>,
}

/// Settings of an adapter that its result does not depend on.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct AdapterSettings {
    /// Name or path of the base model (`base_model_name_or_path`).
    pub base_model: Option<String>,
    /// Names that select the adapted modules: a module's full name, or its end after a dot. Empty: the full name of each
    /// module is written.
    pub target_modules: Vec<String>,
    /// Modules that are stored whole (`modules_to_save`).
    pub modules_to_save: Vec<String>,
    /// Dropout of the adapter's input in training (`lora_dropout`).
    pub dropout: f64,
}

/// Adapter of one linear layer `W` `[rows, cols]`: `W + s·B·A`, with rows scaled to `magnitude` if there is one.
#[derive(Clone, Debug, PartialEq)]
pub struct AdapterModule {
    /// Output features.
    pub rows: usize,
    /// Input features.
    pub cols: usize,
    /// Rank `r`.
    pub rank: usize,
    /// `alpha`.
    pub alpha: f64,
    /// True if `s = alpha / √r` instead of `alpha / r`.
    pub rank_stabilized: bool,
    /// `A`, `[rank, cols]`.
    pub a: Vec<f32>,
    /// `B`, `[rows, rank]`.
    pub b: Vec<f32>,
    /// Norm of each row, `[rows]` (DoRA).
    pub magnitude: Option<Vec<f32>>,
}

/// Tensor that replaces one of the base.
#[derive(Clone, Debug, PartialEq)]
pub struct Replaced {
    /// Dimensions, outermost first.
    pub shape: Vec<usize>,
    /// Values, row-major.
    pub values: Vec<f32>,
}

impl Adapter {
    /// Bytes of all values in memory.
    pub fn bytes(&self) -> u64 {
        let modules = self.modules.values().map(AdapterModule::bytes).sum::<u64>();
        modules + self.replaced.values().map(|tensor| 4 * tensor.values.len() as u64).sum::<u64>()
    }
}

impl AdapterModule {
    /// Factor `s` of `B·A`.
    pub fn scale(&self) -> f32 {
        let rank = self.rank as f64;
        (self.alpha / if self.rank_stabilized { rank.sqrt() } else { rank }) as f32
    }

    /// Bytes of its values in memory.
    pub fn bytes(&self) -> u64 {
        4 * (self.a.len() + self.b.len() + self.magnitude.as_ref().map_or(0, Vec::len)) as u64
    }
}
