//! Bamba.

use super::falcon_h1::FALCON_H1_NAMES;
use super::llama::{LLAMA, ROPE};
use crate::architecture::Architecture;
use crate::family::Family;
use crate::rules::{Eps, RopeRules};

/// Rows of the family.
pub(super) static FAMILY: Family = Family {
    models: &[
        // Mamba-2 in the layers that `attn_layer_indices` does not list; attention rotates half of a head.
        Architecture {
            name: "bamba",
            class: "BambaForCausalLM",
            names: FALCON_H1_NAMES,
            eps: Eps::Default(1e-5),
            rope: RopeRules { partial: Some(0.5), ..ROPE },
            recurrent: Some("state space"),
            ..LLAMA
        },
    ],
    // llama.cpp has no architecture of its own for it. Its converter writes `granitehybrid`, whose rows of q and k are
    // interleaved over whole heads, which does not fit half a head's rotation.
    gguf: &[],
    wrappers: &[],
};
