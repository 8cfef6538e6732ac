//! Families of models.

use crate::architecture::Architecture;
use crate::gguf;
use crate::wrapper::Wrapper;

/// Architectures that share rows and names, as a file of `families/` has them.
pub struct Family {
    /// Architectures of checkpoints.
    pub models: &'static [Architecture],
    /// Architectures of GGUF that they are written as and read from; none if llama.cpp has none.
    pub gguf: &'static [gguf::Architecture],
    /// Multimodal models around them.
    pub wrappers: &'static [Wrapper],
}
