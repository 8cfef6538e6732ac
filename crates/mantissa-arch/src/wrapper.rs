//! Multimodal models as data: a text model with its configuration and tensors inside those of a larger model. Only the
//! text model is run and quantized; towers and projectors are tensors that it does not use.
//!
//! Names and defaults are those of transformers 5.23 (`configuration_*.py`, `conversion_mapping.py`) and of the
//! published checkpoints.

use std::fmt;

use crate::stack::StackForm;

/// Field of the text model's configuration.
pub const TEXT_CONFIG: &str = "text_config";

/// A multimodal model. Two are equal when their names are.
#[derive(Clone, Copy)]
pub struct Wrapper {
    /// `model_type` in config.json.
    pub name: &'static str,
    /// Class in `architectures` of config.json.
    pub class: &'static str,
    /// Prefixes of its other modules, such as towers and projectors.
    pub towers: &'static [&'static str],
    /// Architectures of the text model: `model_type` in `text_config`, and the row that describes it. The first one is
    /// that of a config without a `model_type`. Other rows keep their name.
    pub text_models: &'static [(&'static str, &'static str)],
    /// Values of the fields that the text model's configuration may leave out; flags are 0 or 1.
    pub defaults: &'static [(&'static str, u64)],
    /// Places of the text model among the tensors. The names in a checkpoint decide; the first one is that of a config
    /// alone.
    pub places: &'static [TextPlace],
    /// True if the head is the embedding if `tie_word_embeddings` is absent.
    pub tied: bool,
    /// Form of fused experts, if it is not that of the text model's row.
    pub fused: Option<StackForm>,
}

/// Place of a text model among the tensors of a multimodal one.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TextPlace {
    /// Prefix instead of `model.`.
    pub model: &'static str,
    /// Output head.
    pub head: &'static str,
}

impl TextPlace {
    /// In a model with the text model's head inside.
    pub const INNER: Self = TextPlace { model: "language_model.model.", head: "language_model.lm_head" };
    /// Beside the towers, in one model with a head outside.
    pub const BESIDE: Self = TextPlace { model: "model.language_model.", head: "lm_head" };
    /// As if there were no towers.
    pub const PLAIN: Self = TextPlace { model: "model.", head: "lm_head" };
}

impl PartialEq for Wrapper {
    fn eq(&self, other: &Self) -> bool {
        self.name == other.name
    }
}

impl fmt::Debug for Wrapper {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Wrapper({})", self.name)
    }
}
