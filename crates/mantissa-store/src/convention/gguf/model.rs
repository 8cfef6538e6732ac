//! A GGUF file as a model: its tensors under their Hugging Face names.

use crate::gguf::{GgufHeader, GgufTensor, Metadata};
use mantissa_arch::gguf::Architecture;
use mantissa_arch::gguf::Joined;
use mantissa_arch::gguf::RowOrder;
use mantissa_arch::gguf::{Place, place};

/// A GGUF file as a model.
#[derive(Clone, Debug)]
pub struct Model {
    pub(super) header: GgufHeader,
    pub(super) architecture: Option<&'static Architecture>,
    pub(super) order: RowOrder,
    /// Groups of a recurrent mixer.
    pub(super) groups: usize,
    pub(super) notes: Vec<String>,
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

    /// True if the file has the tensor with this Hugging Face (or GGUF) name, whole or in parts.
    pub fn has(&self, name: &str) -> bool {
        self.tensor(name).is_some() || self.joined(name).is_some()
    }

    /// Parts of the tensor with this Hugging Face name, if this file has it in parts.
    pub fn joined(&self, name: &str) -> Option<Joined> {
        let joined = self.architecture?.joined(name, self.order)?;
        joined.names().iter().all(|part| self.header.get(part).is_some()).then_some(joined)
    }

    /// Tensor with this Hugging Face name, or else this GGUF name. For an expert, the tensor that holds it.
    pub fn tensor(&self, name: &str) -> Option<&GgufTensor> {
        self.place(name).and_then(|place| self.header.get(&place.tensor)).or_else(|| self.header.get(name))
    }

    /// True if the file has the tensor with this Hugging Face name as one tensor whose columns are in their order.
    pub fn is_whole(&self, name: &str) -> bool {
        self.joined(name).is_none() && self.order.columns(name).is_none() && self.place(name).is_some()
    }

    /// Place of the tensor with this Hugging Face name.
    pub fn place(&self, name: &str) -> Option<Place> {
        let found = match self.architecture {
            Some(architecture) => architecture.place(name),
            None => place(name),
        }?;
        if found.expert.is_none() || self.header.get(&found.tensor).is_some() {
            return Some(found);
        }
        let other = found.other_form().filter(|other| self.header.get(&other.tensor).is_some());
        Some(other.unwrap_or(found))
    }

    /// Architecture, if it is supported.
    pub fn architecture(&self) -> Option<&'static Architecture> {
        self.architecture
    }

    /// Row order of the file.
    pub fn row_order(&self) -> RowOrder {
        self.order
    }
}
