//! Jamba.

use super::falcon_h1::FALCON_H1_NAMES;
use super::granite::GGUF_EXPANSION;
use super::llama::{LLAMA, ROPE};
use super::mistral::EXPERTS;
use crate::architecture::Architecture;
use crate::family::Family;
use crate::gguf;
use crate::kinds::{SideKind, VectorKind};
use crate::names::{ExpertNames, MixerNames, Names};
use crate::rules::{BiasRules, Eps, ExpertLayers, ExpertRules, Flag, NoRope, RopeRules};

/// Rows of the family.
pub(super) static FAMILY: Family = Family {
    models: &[
        // Jamba: Mamba in most layers, experts in every other one, no position embedding.
        Architecture {
            name: "jamba",
            class: "JambaForCausalLM",
            names: JAMBA_NAMES,
            eps: Eps::Default(1e-6),
            biases: BiasRules::NONE,
            rope: RopeRules { no_rope: NoRope::All, ..ROPE },
            recurrent: Some("selective scan"),
            experts: Some(ExpertRules {
                count: "num_experts",
                layers: ExpertLayers::Period,
                normalize: Flag::Fixed(false),
                ..EXPERTS
            }),
            ..LLAMA
        },
    ],
    gguf: &[
        // No position embedding. The graph does not normalize the weights of experts.
        gguf::Architecture {
            name: "jamba",
            model_types: &["jamba"],
            biases: &[],
            heads_fill_width: true,
            unrotated: gguf::Unrotated::All,
            recurrence: Some(gguf::Recurrence {
                types: gguf::LayerTypes::Period(["attn_layer_period", "attn_layer_offset"]),
                fields: &[
                    &[
                        ("mamba_d_conv", gguf::Stated::Size("ssm.conv_kernel")),
                        ("mamba_d_state", gguf::Stated::Size("ssm.state_size")),
                        ("mamba_dt_rank", gguf::Stated::Size("ssm.time_step_rank")),
                    ],
                    GGUF_EXPANSION,
                ],
                ..gguf::Recurrence::PLAIN
            }),
            experts: gguf::Experts::Periodic { count: "num_experts" },
            ..gguf::PLAIN
        },
    ],
    wrappers: &[],
};

/// Names of Jamba.
pub(super) const JAMBA_NAMES: Names =
    Names { experts: JAMBA_EXPERT_NAMES, mixer: JAMBA_MIXER_NAMES, ..FALCON_H1_NAMES };

/// Names of Jamba.
pub(super) const JAMBA_EXPERT_NAMES: ExpertNames =
    ExpertNames { experts: "feed_forward.experts.", router: "feed_forward.router", ..ExpertNames::QWEN };

/// Names of Mamba in Jamba.
pub(super) const JAMBA_MIXER_NAMES: MixerNames = MixerNames {
    sides: &[(SideKind::Selection, "mamba.x_proj"), (SideKind::Step, "mamba.dt_proj")],
    vectors: &[
        (VectorKind::Convolution, "mamba.conv1d.weight"),
        (VectorKind::ConvolutionBias, "mamba.conv1d.bias"),
        (VectorKind::DecayLog, "mamba.A_log"),
        (VectorKind::Skip, "mamba.D"),
        (VectorKind::StepNorm, "mamba.dt_layernorm.weight"),
        (VectorKind::WriteNorm, "mamba.b_layernorm.weight"),
        (VectorKind::ReadNorm, "mamba.c_layernorm.weight"),
    ],
};
