//! Mixers in GGUF files: their keys, and what llama.cpp does not compute of them.
//!
//! Keys and limits are those of llama.cpp's loaders and graphs (`src/models/`, one file for each architecture, and
//! `mamba-base.cpp`).

use mantissa_store::convention::gguf::Recurrence;

/// Facts of a model around its mixer.
#[derive(Clone, Copy, Debug)]
pub struct GgufAround {
    /// Width of the residual stream.
    pub hidden: usize,
    /// Query heads of the attention.
    pub heads: usize,
    /// Width of the latent of queries of latent attention, if it has one.
    pub q_rank: Option<usize>,
    /// Epsilon of the norms.
    pub eps: f32,
    /// How the architecture states its mixers in GGUF.
    pub recurrence: Recurrence,
    /// Fields that the architecture's `config.json` names differently: `(ours, its own)`.
    pub aliases: &'static [(&'static str, &'static str)],
}

impl GgufAround {
    /// Returns the name that the architecture's `config.json` has for a field.
    pub(super) fn own_field(&self, field: &'static str) -> &'static str {
        self.aliases.iter().find(|(ours, _)| *ours == field).map_or(field, |(_, own)| own)
    }
}

/// A value that llama.cpp does not compute.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Uncomputed {
    /// Field of `config.json`.
    pub field: &'static str,
    /// Value found.
    pub found: String,
    /// Values that it computes, and why.
    pub allowed: String,
}

impl Uncomputed {
    pub(super) fn new(field: &'static str, found: impl ToString, allowed: impl Into<String>) -> Self {
        Uncomputed { field, found: found.to_string(), allowed: allowed.into() }
    }
}

/// Checks biases of the projections, which llama.cpp does not have, and of the convolution, which it requires.
pub(super) fn check_biases(
    (field, bias): (&'static str, bool),
    (convolution, of_convolution): (&'static str, bool),
) -> Result<(), Uncomputed> {
    match (bias, of_convolution) {
        (true, _) => Err(Uncomputed::new(field, true, "false: llama.cpp has no such biases")),
        (_, false) => Err(Uncomputed::new(convolution, false, "true: llama.cpp requires the bias")),
        _ => Ok(()),
    }
}

/// Checks that a mixer is twice as wide as the states.
pub(super) fn check_double(inner: usize, hidden: usize) -> Result<(), Uncomputed> {
    match inner == 2 * hidden {
        true => Ok(()),
        false => {
            let allowed = format!("2, {} wide: llama.cpp requires it", 2 * hidden);
            Err(Uncomputed::new("mamba_expand", format!("a mixer of {inner}"), allowed))
        }
    }
}
