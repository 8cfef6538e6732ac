//! Granite 3 and 4.

use super::llama::{LLAMA, ROPE};
use super::mistral::{EXPERTS, MIXTRAL_EXPERT_NAMES};
use crate::architecture::Architecture;
use crate::family::Family;
use crate::features::{DenseMlp, MlpForm, Scores};
use crate::gguf::{self, Stated};
use crate::kinds::{LinearKind, VectorKind};
use crate::names::{ExpertNames, MixerNames, Names};
use crate::rules::{BiasRules, Eps, ExpertRules, Flag, LogitScale, NoRope, RopeRules, ScaleRules};

/// Rows of the family.
pub(super) static FAMILY: Family = Family {
    models: &[
        // Granite 3: constant factors of embedding, residual stream, scores and logits.
        Architecture {
            name: "granite",
            class: "GraniteForCausalLM",
            eps: Eps::Default(1e-6),
            scales: Some(GRANITE_SCALES),
            ..LLAMA
        },
        // Granite 4: Mamba-2 in most layers, the factors of Granite 3, no position embedding; in some models routed experts
        // beside the MLP, on the same states.
        Architecture {
            name: "granitemoehybrid",
            class: "GraniteMoeHybridForCausalLM",
            ffn: "shared_intermediate_size",
            names: GRANITE4_NAMES,
            eps: Eps::Default(1e-6),
            mlp: MlpForm::GatedJoined,
            biases: BiasRules::ATTENTION,
            rope: RopeRules { no_rope: NoRope::UnlessRope, ..ROPE },
            scales: Some(GRANITE_SCALES),
            recurrent: Some("state space"),
            experts: Some(ExpertRules {
                scores: Scores::SoftmaxOfChosen,
                normalize: Flag::Fixed(false),
                optional: true,
                dense: DenseMlp::Same,
                published_fused: true,
                ..EXPERTS
            }),
            ..LLAMA
        },
    ],
    gguf: &[
        GGUF_GRANITE,
        GGUF_GRANITE_HYBRID,
        // The same with experts beside the MLP, which is stored as a shared one.
        gguf::Architecture {
            own_names: &[("shared_mlp.output_linear", "ffn_down_shexp")],
            renamed: &[],
            split: &[(
                "shared_mlp.input_linear.weight",
                gguf::Split::Halves(["ffn_gate_shexp.weight", "ffn_up_shexp.weight"]),
            )],
            experts: gguf::Experts::BesideShared {
                count: "num_local_experts",
                shared: "shared_intermediate_size",
            },
            ..GGUF_GRANITE_HYBRID
        },
    ],
    wrappers: &[],
};

/// Names of Granite 4.
pub(super) const GRANITE4_NAMES: Names = Names {
    linears: &[
        (LinearKind::GateUp, "shared_mlp.input_linear"),
        (LinearKind::Down, "shared_mlp.output_linear"),
        (LinearKind::MixIn, "mamba.in_proj"),
        (LinearKind::MixOut, "mamba.out_proj"),
    ],
    experts: GRANITE4_EXPERT_NAMES,
    mixer: GRANITE_MIXER_NAMES,
    ..Names::LLAMA
};

/// Names of Granite 4.
pub(super) const GRANITE4_EXPERT_NAMES: ExpertNames = ExpertNames {
    fused: ["block_sparse_moe.input_linear.weight", "block_sparse_moe.output_linear.weight"],
    router: "block_sparse_moe.router.layer",
    ..MIXTRAL_EXPERT_NAMES
};

/// Names of Mamba-2 in Granite 4.
pub(super) const GRANITE_MIXER_NAMES: MixerNames = MixerNames {
    sides: &[],
    vectors: &[
        (VectorKind::Convolution, "mamba.conv1d.weight"),
        (VectorKind::ConvolutionBias, "mamba.conv1d.bias"),
        (VectorKind::StepBias, "mamba.dt_bias"),
        (VectorKind::DecayLog, "mamba.A_log"),
        (VectorKind::Skip, "mamba.D"),
        (VectorKind::MixNorm, "mamba.norm.weight"),
    ],
};

/// Factors of Granite 3 and 4.
pub(super) const GRANITE_SCALES: ScaleRules = ScaleRules {
    embedding: Some("embedding_multiplier"),
    residual: Some("residual_multiplier"),
    attention: Some("attention_multiplier"),
    logits: Some(LogitScale { field: "logits_scaling", default: 1.0, divides: true }),
};

/// Granite.
pub(super) const GGUF_GRANITE: gguf::Architecture = gguf::Architecture {
    name: "granite",
    model_types: &["granite"],
    rows: gguf::Rows::Interleaved,
    keys: &["embedding_scale", "residual_scale", "attention.scale", "logit_scale"],
    factors: &[
        ("embedding_scale", "embedding_multiplier"),
        ("residual_scale", "residual_multiplier"),
        ("attention.scale", "attention_multiplier"),
        ("logit_scale", "logits_scaling"),
    ],
    divided_logits: true,
    biases: &[
        gguf::Bias { presence: gguf::Presence::Optional, ..gguf::ATTENTION_BIAS },
        gguf::Bias { presence: gguf::Presence::Optional, ..gguf::MLP_BIAS },
    ],
    heads_fill_width: true,
    rope_factors: true,
    ..gguf::PLAIN
};

/// Granite 4: Mamba-2 in most layers, gate and up of the MLP in one projection.
pub(super) const GGUF_GRANITE_HYBRID: gguf::Architecture = gguf::Architecture {
    name: "granitehybrid",
    model_types: &["granitemoehybrid"],
    renamed: &[("intermediate_size", "shared_intermediate_size")],
    split: &[("shared_mlp.input_linear.weight", gguf::Split::Halves(["ffn_gate.weight", "ffn_up.weight"]))],
    unrotated: gguf::Unrotated::Switched,
    recurrence: Some(gguf::Recurrence {
        types: gguf::LayerTypes::Named("mamba"),
        fields: &[
            GGUF_STATE_SPACE,
            &[("num_local_experts", Stated::Default(gguf::Fixed::Size(0)))],
            GGUF_EXPANSION,
            &[("position_embedding_type", Stated::Switched("rope.scaling.finetuned", ["rope", "nope"]))],
        ],
        doubled: true,
        ..gguf::Recurrence::PLAIN
    }),
    columns_of_heads: true,
    ..GGUF_GRANITE
};

/// Sizes of Mamba-2 in GGUF.
pub(super) const GGUF_STATE_SPACE: &[(&str, Stated)] = &[
    ("mamba_d_conv", Stated::Size("ssm.conv_kernel")),
    ("mamba_d_state", Stated::Size("ssm.state_size")),
    ("mamba_n_groups", Stated::Size("ssm.group_count")),
    ("mamba_n_heads", Stated::Size("ssm.time_step_rank")),
    ("mamba_d_head", Stated::Quotient(["ssm.inner_size", "ssm.time_step_rank"])),
    ("mamba_conv_bias", Stated::Tensor("ssm_conv1d.bias")),
];

/// Inner width of Mamba and Mamba-2 in GGUF.
pub(super) const GGUF_EXPANSION: &[(&str, Stated)] =
    &[("mamba_expand", Stated::Multiple(["ssm.inner_size", "embedding_length"], "mamba_d_ssm"))];
