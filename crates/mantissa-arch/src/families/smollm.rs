//! SmolLM3.

use super::llama::{LLAMA, ROPE};
use crate::architecture::Architecture;
use crate::family::Family;
use crate::gguf;
use crate::rules::{NoRope, RopeRules};

/// Rows of the family.
pub(super) static FAMILY: Family = Family {
    models: &[
        // SmolLM3: some layers have no position embedding.
        Architecture {
            name: "smollm3",
            class: "SmolLM3ForCausalLM",
            fixed_flags: &[("use_sliding_window", false)],
            tied: true,
            rope: RopeRules { theta: 2_000_000.0, no_rope: NoRope::Listed, ..ROPE },
            ..LLAMA
        },
    ],
    gguf: &[
        // The graph has no divisors of frequencies, and rotates all layers but the last of each four.
        gguf::Architecture {
            name: "smollm3",
            model_types: &["smollm3"],
            rows: gguf::Rows::Interleaved,
            unrotated: gguf::Unrotated::LastOf(4),
            ..gguf::PLAIN
        },
    ],
    wrappers: &[],
};
