//! OLMo 1 to 3.

use super::llama::{LLAMA, ROPE};
use crate::architecture::Architecture;
use crate::attention::AttentionRules;
use crate::family::Family;
use crate::features::{HeadNorms, NormForm, NormPlaces};
use crate::gguf;
use crate::rules::{BiasRules, Eps, RopeRules, Windows};

/// Rows of the family.
pub(super) static FAMILY: Family = Family {
    models: &[
        // OLMo: norms without parameters, clipped q, k and v.
        Architecture {
            name: "olmo",
            class: "OlmoForCausalLM",
            biases: BiasRules::ATTENTION,
            norm: NormForm::LayerPlain,
            eps: Eps::Fixed(1e-5),
            attention: AttentionRules { clips_qkv: true, ..AttentionRules::PLAIN },
            ..LLAMA
        },
        // OLMo 2: norms after attention and MLP, one QK norm for all heads.
        Architecture {
            name: "olmo2",
            class: "Olmo2ForCausalLM",
            biases: BiasRules::ATTENTION,
            norm_places: NormPlaces::After,
            head_norms: HeadNorms::Whole,
            ..LLAMA
        },
        // OLMo 3: as OLMo 2, with windows; only layers without one scale their rotation.
        Architecture {
            name: "olmo3",
            class: "Olmo3ForCausalLM",
            biases: BiasRules::ATTENTION,
            norm_places: NormPlaces::After,
            head_norms: HeadNorms::Whole,
            windows: Windows::ButLast { fields: &[], default: 4 },
            default_window: Some(4096),
            rope: RopeRules { theta: 500_000.0, local_theta: Some(500_000.0), ..ROPE },
            ..LLAMA
        },
    ],
    gguf: &[
        gguf::Architecture {
            name: "olmo",
            model_types: &["olmo"],
            layer_norms: true,
            fixed_epsilon: Some(1e-5),
            rows: gguf::Rows::Interleaved,
            keys: &["attention.clamp_kqv"],
            ..gguf::PLAIN
        },
        // OLMo 3 is OLMo 2 with windows; only layers without one scale their rotation.
        gguf::Architecture {
            name: "olmo2",
            model_types: &["olmo2", "olmo3"],
            windowed: Some("olmo3"),
            post_attention_norm: true,
            tied: gguf::Presence::Absent,
            heads_fill_width: true,
            local_theta: gguf::LocalTheta::Same,
            windows: gguf::Windows::Periodic { period: 4, stated: true, only_with: None },
            ..gguf::PLAIN
        },
    ],
    wrappers: &[],
};
