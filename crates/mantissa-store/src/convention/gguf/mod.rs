//! Models in GGUF files, as llama.cpp's converter writes them: names, row order, metadata, block types.
//!
//! A model is presented under Hugging Face names and in Hugging Face row order, its metadata as the `config.json` that it
//! was made from, so that nothing above this module knows where it came from. Architectures: llama (Mistral too), qwen2,
//! qwen3. What changes the computation and is not understood is refused by its key.

mod config;
mod names;
mod order;
mod read;
mod write;

use std::path::Path;

pub use names::{hf_name, stored_name};
pub use order::{RowOrder, to_gguf_order, to_hf_order};
pub use write::{Sizes, block_type, metadata, specs, tensors};

use crate::gguf::{Gguf, GgufHeader, GgufTensor, Metadata, Storage};
use crate::{Checkpoint, Result};

/// An architecture of GGUF that is read and written.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Architecture {
    /// Llama and Mistral: the rows of q and k are interleaved.
    Llama,
    /// Qwen2 and Qwen2.5.
    Qwen2,
    /// Qwen3.
    Qwen3,
}

impl Architecture {
    /// Every architecture with its name in `general.architecture`, which is also its `model_type`.
    pub const NAMES: [(Self, &'static str); 3] =
        [(Self::Llama, "llama"), (Self::Qwen2, "qwen2"), (Self::Qwen3, "qwen3")];

    /// The architecture with this name.
    pub fn parse(name: &str) -> Option<Self> {
        Self::NAMES.into_iter().find(|(_, known)| *known == name).map(|(architecture, _)| architecture)
    }

    /// Name in `general.architecture`.
    pub fn name(self) -> &'static str {
        Self::NAMES.iter().find(|(known, _)| *known == self).map_or("", |(_, name)| name)
    }

    /// The architecture that a Hugging Face `model_type` is written as.
    pub fn of_model_type(model_type: &str) -> Option<Self> {
        Self::parse(if model_type == "mistral" { "llama" } else { model_type })
    }
}

/// A GGUF file as a model.
#[derive(Clone, Debug)]
pub struct Model {
    header: GgufHeader,
    order: RowOrder,
    notes: Vec<String>,
}

/// Whether `path` is to be opened as GGUF: by its extension or, for a file of another name, by its first bytes.
pub(super) fn is_gguf(path: &Path) -> bool {
    let named = path.extension().is_some_and(|extension| extension.eq_ignore_ascii_case("gguf"));
    let folder = path.is_dir();
    !folder && (named || (path.extension().is_none_or(|e| e != "safetensors") && Gguf::sniff(path)))
}

pub(super) fn open(path: &Path) -> Result<(Checkpoint, Model)> {
    let gguf = Gguf::open_model(path)?;
    let config::Parsed { config, order, notes } = config::parse(&gguf)?;
    let (header, files) = gguf.into_parts();
    let model = Model { header, order, notes };
    Ok((Checkpoint::of_gguf(path, files, config), model))
}

impl Model {
    /// The key-value metadata.
    pub fn metadata(&self) -> &Metadata {
        &self.header.metadata
    }

    /// Every tensor, under its GGUF name.
    pub fn tensors(&self) -> &[GgufTensor] {
        &self.header.tensors
    }

    /// The tensor that has this Hugging Face name, or, where that stands for none, this GGUF name.
    pub fn tensor(&self, name: &str) -> Option<&GgufTensor> {
        stored_name(name).and_then(|stored| self.header.get(&stored)).or_else(|| self.header.get(name))
    }

    /// Which rows of q and k lie where.
    pub fn row_order(&self) -> RowOrder {
        self.order
    }

    /// Whether some tensor is stored in blocks.
    pub(super) fn has_blocks(&self) -> bool {
        self.header.tensors.iter().any(|tensor| !matches!(tensor.ty.storage, Storage::Plain(_)))
    }

    /// What the file says and this reader leaves out.
    pub(super) fn notes(&self) -> &[String] {
        &self.notes
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]
mod tests;
