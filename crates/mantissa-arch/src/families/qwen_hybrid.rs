//! Qwen3-Next and Qwen3.5, whose layers mostly have gated DeltaNet.

use super::llama::{LLAMA, ROPE};
use super::qwen::{QWEN_EXPERTS, QWEN3_VL_WRAPPER};
use crate::architecture::Architecture;
use crate::attention::AttentionRules;
use crate::family::Family;
use crate::features::{HeadNorms, NormForm};
use crate::gguf;
use crate::kinds::{LinearKind, SideKind, VectorKind};
use crate::names::{MixerNames, Names};
use crate::rules::{BiasRules, Eps, ExpertLayers, ExpertRules, Flag, HeadDim, RopeRules, SharedRules};
use crate::stack::StackForm;
use crate::wrapper::Wrapper;

/// Rows of the family.
pub(super) static FAMILY: Family = Family {
    models: &[
        // Qwen3-Next: gated DeltaNet in three of four layers, gated attention, a quarter of a head rotated. The rates of the
        // mixer, its convolution and its vectors stay unquantized; llm-compressor's recipes leave out all of `linear_attn`
        // (examples/quantization_w8a8_fp8/qwen3_5_moe.py), Qwen's own FP8 checkpoints only these.
        Architecture {
            name: "qwen3_next",
            class: "Qwen3NextForCausalLM",
            names: QWEN3_NEXT_NAMES,
            recurrent: Some("joined gated delta"),
            experts: Some(ExpertRules {
                shared: SharedRules::Gated,
                normalize: Flag::Field("norm_topk_prob", true),
                ..QWEN_EXPERTS
            }),
            ..QWEN3_5
        },
        QWEN3_5,
        // Qwen3.5-MoE (text): experts in every layer, a shared one with a gate.
        Architecture {
            name: "qwen3_5_moe_text",
            class: "Qwen3_5MoeForCausalLM",
            aliases: &[("intermediate_size", "moe_intermediate_size")],
            experts: Some(ExpertRules {
                layers: ExpertLayers::All,
                shared: SharedRules::Gated,
                normalize: Flag::Fixed(true),
                ..QWEN_EXPERTS
            }),
            ..QWEN3_5
        },
    ],
    gguf: &[
        GGUF_QWEN3_NEXT,
        // Value heads are in ggml's order. Positions have several coordinates, which are equal in text.
        gguf::Architecture {
            name: "qwen35",
            model_types: &["qwen3_5_text"],
            recurrence: Some(gguf::Recurrence { tiled: Some(true), ..GGUF_GATED_DELTA }),
            split: &[],
            sections: true,
            experts: gguf::Experts::None,
            ..GGUF_QWEN3_NEXT
        },
        gguf::Architecture {
            name: "qwen35moe",
            model_types: &["qwen3_5_moe_text"],
            recurrence: Some(gguf::Recurrence { tiled: Some(true), ..GGUF_GATED_DELTA }),
            split: &[],
            sections: true,
            ..GGUF_QWEN3_NEXT
        },
    ],
    wrappers: &[
        // Qwen3.5 and Qwen3.6. Their heads that predict several tokens (`mtp.`) are parts that the text model does not use.
        Wrapper {
            name: "qwen3_5",
            class: "Qwen3_5ForConditionalGeneration",
            text_models: &[("qwen3_5_text", "qwen3_5_text")],
            ..QWEN3_VL_WRAPPER
        },
        Wrapper {
            name: "qwen3_5_moe",
            class: "Qwen3_5MoeForConditionalGeneration",
            text_models: &[("qwen3_5_moe_text", "qwen3_5_moe_text")],
            fused: Some(StackForm::Rows),
            ..QWEN3_VL_WRAPPER
        },
    ],
};

/// Names of Qwen3-Next.
pub(super) const QWEN3_NEXT_NAMES: Names = Names {
    linears: &[(LinearKind::MixIn, "linear_attn.in_proj_qkvz"), (LinearKind::MixOut, "linear_attn.out_proj")],
    mixer: QWEN_MIXER_NAMES,
    ..Names::LLAMA
};

/// Names of Qwen3.5.
pub(super) const QWEN3_5_NAMES: Names = Names {
    linears: &[
        (LinearKind::MixIn, "linear_attn.in_proj_qkv"),
        (LinearKind::MixGate, "linear_attn.in_proj_z"),
        (LinearKind::MixOut, "linear_attn.out_proj"),
    ],
    mixer: QWEN_MIXER_NAMES,
    ..Names::LLAMA
};

/// Names of Qwen's gated DeltaNet.
pub(super) const QWEN_MIXER_NAMES: MixerNames = MixerNames {
    sides: &[
        (SideKind::Rates, "linear_attn.in_proj_ba"),
        (SideKind::WriteRate, "linear_attn.in_proj_b"),
        (SideKind::DecayRate, "linear_attn.in_proj_a"),
    ],
    vectors: &[
        (VectorKind::Convolution, "linear_attn.conv1d.weight"),
        (VectorKind::StepBias, "linear_attn.dt_bias"),
        (VectorKind::DecayLog, "linear_attn.A_log"),
        (VectorKind::MixNorm, "linear_attn.norm.weight"),
    ],
};

/// Qwen3.5 (text): gated DeltaNet in three of four layers, gated attention, a quarter of a head rotated. The three
/// positions of a text token are equal, so its interleaved M-RoPE is plain RoPE.
pub(super) const QWEN3_5: Architecture = Architecture {
    name: "qwen3_5_text",
    class: "Qwen3_5ForCausalLM",
    names: QWEN3_5_NAMES,
    norm: NormForm::RmsPlusOne,
    eps: Eps::Default(1e-6),
    head_norms: HeadNorms::Each,
    head_dim: HeadDim::IfAbsent(256),
    biases: BiasRules::ATTENTION,
    rope: RopeRules { partial: Some(0.25), ..ROPE },
    attention: AttentionRules { gated: true, ..AttentionRules::PLAIN },
    recurrent: Some("gated delta"),
    ..LLAMA
};

/// Gated DeltaNet in most layers, gated attention, norms that hold 1 plus the weight except that of a mixer's result.
pub(super) const GGUF_QWEN3_NEXT: gguf::Architecture = gguf::Architecture {
    name: "qwen3next",
    model_types: &["qwen3_next"],
    norms_plus_one: true,
    post_attention_norm: true,
    split: &[(
        "linear_attn.in_proj_qkvz.weight",
        gguf::Split::KeyGroups(["attn_qkv.weight", "attn_gate.weight"]),
    )],
    tensors: &["attn_qkv.weight"],
    partial: Some("partial_rotary_factor"),
    recurrence: Some(GGUF_GATED_DELTA),
    experts: gguf::Experts::Every {
        count: "num_experts",
        width: "moe_intermediate_size",
        normalized: Some(true),
        shared: Some("shared_expert_intermediate_size"),
    },
    ..gguf::PLAIN
};

/// Gated DeltaNet.
const GGUF_GATED_DELTA: gguf::Recurrence = gguf::Recurrence {
    layers: gguf::MixerLayers::Interval,
    fields: &[&[
        ("linear_num_key_heads", gguf::Stated::Size("ssm.group_count")),
        ("linear_num_value_heads", gguf::Stated::Size("ssm.time_step_rank")),
        ("linear_key_head_dim", gguf::Stated::Size("ssm.state_size")),
        ("linear_value_head_dim", gguf::Stated::Quotient(["ssm.inner_size", "ssm.time_step_rank"])),
        ("linear_conv_kernel_dim", gguf::Stated::Size("ssm.conv_kernel")),
    ]],
    tiled: Some(false),
    ..gguf::Recurrence::PLAIN
};
