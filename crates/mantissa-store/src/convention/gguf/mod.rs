//! Models in GGUF files, as llama.cpp's converter writes them: names, row order, metadata, block types.
//!
//! A model is presented under Hugging Face names and in Hugging Face row order, with its metadata as the original
//! `config.json`. So nothing above this module depends on GGUF. Metadata with an unsupported effect on the
//! computation is refused by its key.

mod by_layer;
mod compressed;
mod config;
mod dense;
mod family;
mod listed;
mod model;
mod read;
mod recurrent;
mod streams;
mod write;

use std::path::Path;

pub use by_layer::UNROTATED;
pub use config::{LONG_ROPE, ROPE_FACTORS};
pub use dense::DenseTensor;
pub use mantissa_arch::gguf::{
    Architecture, Bias, DeltaHeads, Experts as GgufExperts, FixedStreams, Indexers, Joined, JoinedPart,
    LayerTypes, LocalTheta, MixerLayers, Moved, Place, Presence, Recurrence, RowOrder, Stored, Unrotated,
    Windows, Yarn, hf_name, place, stored_name, to_gguf_order, to_hf_order,
};
pub use model::Model;
pub use write::{Sizes, block_type, has_factor, metadata, specs, tensors};

use mantissa_num::{Quantized, Scheme};

use super::{
    Container, Convention, Experts, Facts, LayerKind, LinearPlan, ModelFiles, NamedBytes, Opened,
    SideTensors, Storable, StoredLinear,
};
use crate::gguf::{Gguf as GgufFile, Storage};
use crate::{Checkpoint, Result, TensorSpec};

/// Name on the command line and in reports.
pub const NAME: &str = "gguf";

/// GGUF, read by llama.cpp: one file.
#[derive(Debug)]
pub(super) struct Gguf;

/// Handle of the format.
pub const CONTAINER: Container = Container::new(&Gguf);

impl Convention for Gguf {
    fn name(&self) -> &'static str {
        NAME
    }

    fn open_file(&self, path: &Path) -> Result<Option<(Checkpoint, Box<dyn Opened>)>> {
        if !is_gguf(path) {
            return Ok(None);
        }
        let (checkpoint, model) = open(path)?;
        Ok(Some((checkpoint, Box::new(model))))
    }

    fn writes(&self) -> Option<Facts> {
        Some(Facts {
            one_file: true,
            experts: Experts::OwnNames,
            conv1d: true,
            importance: true,
            ..Facts::default()
        })
    }

    fn is_default_for(&self, schemes: &[&Scheme]) -> bool {
        schemes.iter().any(|scheme| scheme.format.codec().is_some())
    }

    fn layer_specs(&self, plan: &LinearPlan<'_>) -> Storable<Vec<TensorSpec>> {
        specs(plan)
    }

    fn layer_tensors(
        &self,
        plan: &LinearPlan<'_>,
        q: &Quantized,
        _: SideTensors<'_>,
    ) -> Storable<NamedBytes> {
        tensors(plan, q)
    }

    /// Keeps the up-projection of a latent unquantized: the file has it in two parts, one transposed.
    fn keeps_dense(&self, layer: LayerKind) -> Option<&'static str> {
        layer.latent_kv.then_some("GGUF has it transposed")
    }
}

impl Opened for Model {
    fn name(&self) -> &'static str {
        NAME
    }

    fn is_quantized(&self) -> bool {
        self.header.tensors.iter().any(|tensor| !matches!(tensor.ty.storage, Storage::Plain(_)))
    }

    fn notes(&self) -> Vec<String> {
        self.notes.clone()
    }

    fn linear(&self, files: &ModelFiles, module: &str, rows: usize, cols: usize) -> Result<StoredLinear> {
        self.linear_parts(files, module, rows, cols)
    }

    fn has(&self, _checkpoint: &Checkpoint, name: &str) -> bool {
        Model::has(self, name)
    }

    fn tensor_f32(&self, files: &ModelFiles, name: &str, shape: &[usize]) -> Result<Vec<f32>> {
        self.values_f32(files, name, shape)
    }

    fn check_tensor(&self, files: &ModelFiles, name: &str, shape: &[usize]) -> Result<()> {
        self.check(files, name, shape)
    }

    fn types_every_tensor(&self) -> bool {
        true
    }

    fn gguf(&self) -> Option<&Model> {
        Some(self)
    }
}

impl ModelFiles {
    /// Metadata and names of a GGUF model; `None` for any other.
    pub fn gguf(&self) -> Option<&Model> {
        self.opened().gguf()
    }
}

/// True if `path` is a GGUF file by its extension or its first bytes.
fn is_gguf(path: &Path) -> bool {
    let named = path.extension().is_some_and(|extension| extension.eq_ignore_ascii_case("gguf"));
    let folder = path.is_dir();
    !folder && (named || (path.extension().is_none_or(|e| e != "safetensors") && GgufFile::sniff(path)))
}

fn open(path: &Path) -> Result<(Checkpoint, Model)> {
    let gguf = GgufFile::open_model(path)?;
    let config::Parsed { config, architecture, order, groups, notes } = config::parse(&gguf)?;
    let (mut header, mut files) = gguf.into_parts();
    if let Some(architecture) = architecture {
        listed::add(architecture, &mut header, &mut files)?;
    }
    let model = Model { header, architecture, order, groups, notes };
    Ok((Checkpoint::of_gguf(path, files, config), model))
}

#[cfg(test)]
#[allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]
mod tests;
