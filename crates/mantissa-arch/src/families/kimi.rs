//! Kimi Linear.

use super::deepseek::{DEEPSEEK_V3, DEEPSEEK_V3_EXPERTS, GGUF_DEEPSEEK2};
use super::llama::ROPE;
use super::mistral::MIXTRAL_EXPERT_NAMES;
use crate::architecture::Architecture;
use crate::family::Family;
use crate::gguf;
use crate::kinds::{LinearKind, SideKind, VectorKind};
use crate::names::{ExpertNames, MixerNames, Names};
use crate::rules::{Eps, ExpertLayers, ExpertRules, Flag, LatentRules, NoRope, RopeRules, SharedRules};

/// Rows of the family.
pub(super) static FAMILY: Family = Family {
    models: &[
        // Kimi Linear: Kimi delta attention in three of four layers, latent attention without positions in the others, the
        // routing of DeepSeek-V3. The low-rank forget and output gates, the write rates and the convolutions stay unquantized,
        // as those of gated DeltaNet.
        Architecture {
            name: "kimi_linear",
            class: "KimiLinearForCausalLM",
            aliases: &[
                ("max_position_embeddings", "model_max_length"),
                ("norm_topk_prob", "moe_renormalize"),
                ("n_group", "num_expert_group"),
                ("num_experts_per_tok", "num_experts_per_token"),
            ],
            fixed_flags: &[("mla_use_nope", true), ("use_grouped_topk", true)],
            names: KIMI_LINEAR_NAMES,
            eps: Eps::Default(1e-5),
            rope: RopeRules { no_rope: NoRope::All, ..ROPE },
            latent: Some(LatentRules { interleaved: Flag::Fixed(false), indexer: None }),
            recurrent: Some("channel delta"),
            experts: Some(ExpertRules {
                count: "num_experts",
                layers: ExpertLayers::Listed(1),
                shared: SharedRules::Counted("num_shared_experts"),
                scale: Some(2.446),
                only: &[("moe_router_activation_func", &["sigmoid"])],
                ..DEEPSEEK_V3_EXPERTS
            }),
            ..DEEPSEEK_V3
        },
    ],
    gguf: &[
        // Kimi delta attention in most layers, latent attention without position embedding in the others.
        gguf::Architecture {
            name: "kimi-linear",
            model_types: &["kimi_linear"],
            one_epsilon: &["kimi_linear"],
            renamed: &[
                ("max_position_embeddings", "model_max_length"),
                ("num_experts_per_tok", "num_experts_per_token"),
                ("norm_topk_prob", "moe_renormalize"),
                ("n_group", "num_expert_group"),
                ("n_routed_experts", "num_experts"),
                ("n_shared_experts", "num_shared_experts"),
            ],
            tied: gguf::Presence::Absent,
            unrotated: gguf::Unrotated::All,
            recurrence: Some(gguf::Recurrence {
                fields: &[&[
                    ("linear_num_heads", gguf::Stated::Size("attention.head_count")),
                    ("linear_head_dim", gguf::Stated::Size("kda.head_dim")),
                    ("linear_conv_kernel_dim", gguf::Stated::Size("ssm.conv_kernel")),
                ]],
                whole_convolutions: true,
                ..gguf::Recurrence::PLAIN
            }),
            experts: gguf::Experts::Grouped { softmax: "" },
            ..GGUF_DEEPSEEK2
        },
    ],
    wrappers: &[],
};

/// Names of Kimi Linear, whose mixer's projections are named as those of the attention in other layers.
pub(super) const KIMI_LINEAR_NAMES: Names = Names {
    linears: &[
        (LinearKind::MixQ, "self_attn.q_proj"),
        (LinearKind::MixK, "self_attn.k_proj"),
        (LinearKind::MixV, "self_attn.v_proj"),
        (LinearKind::MixOut, "self_attn.o_proj"),
    ],
    experts: KIMI_LINEAR_EXPERT_NAMES,
    mixer: KIMI_MIXER_NAMES,
    ..Names::LLAMA
};

/// Names of Kimi Linear.
pub(super) const KIMI_LINEAR_EXPERT_NAMES: ExpertNames = ExpertNames {
    shared: "block_sparse_moe.shared_experts.",
    correction: "block_sparse_moe.gate.e_score_correction_bias",
    ..MIXTRAL_EXPERT_NAMES
};

/// Names of Kimi delta attention.
pub(super) const KIMI_MIXER_NAMES: MixerNames = MixerNames {
    sides: &[
        (SideKind::WriteRate, "self_attn.b_proj"),
        (SideKind::DecayLatent, "self_attn.f_a_proj"),
        (SideKind::Decay, "self_attn.f_b_proj"),
        (SideKind::GateLatent, "self_attn.g_a_proj"),
        (SideKind::Gate, "self_attn.g_b_proj"),
    ],
    vectors: &[
        (VectorKind::QueryConvolution, "self_attn.q_conv1d.weight"),
        (VectorKind::KeyConvolution, "self_attn.k_conv1d.weight"),
        (VectorKind::ValueConvolution, "self_attn.v_conv1d.weight"),
        (VectorKind::StepBias, "self_attn.dt_bias"),
        (VectorKind::DecayLog, "self_attn.A_log"),
        (VectorKind::MixNorm, "self_attn.o_norm.weight"),
    ],
};
