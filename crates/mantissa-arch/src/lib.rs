//! Architectures of decoder-only language models as data, one file for each family (`families/`).
//!
//! A file states everything that `config.json` does not: features, which fields state the rest, the names of a checkpoint's
//! tensors, the architectures of GGUF with what llama.cpp fixes or cannot compute, and the multimodal models around them.
//! No code depends on the name of a model, only on the features of its row. Nothing here reads a file.
#![forbid(unsafe_code)]

// Layer: kinds of parameters and parts.
pub mod kinds;
mod stack;

// Layer: features, rules and names.
pub mod attention;
pub mod features;
pub mod names;
pub mod rules;

// Layer: rows.
mod architecture;
mod family;
pub mod gguf;
pub mod wrapper;

// Layer: families.
mod families;

// Layer: look-ups.
mod lookup;

pub use architecture::Architecture;
pub use family::Family;
pub use stack::StackForm;
