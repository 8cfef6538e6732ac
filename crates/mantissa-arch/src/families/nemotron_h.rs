//! Nemotron-H.

use super::deepseek::DEEPSEEK_V3_EXPERTS;
use super::granite::GGUF_STATE_SPACE;
use super::llama::{LLAMA, ROPE};
use crate::architecture::Architecture;
use crate::family::Family;
use crate::features::MlpForm;
use crate::gguf;
use crate::kinds::{LinearKind, NormKind, VectorKind};
use crate::names::{ExpertNames, MixerNames, Names};
use crate::rules::{
    BiasRules, Eps, ExpertLayers, ExpertRules, Flag, HeadDim, NoRope, RopeRules, SharedRules,
};

/// Rows of the family.
pub(super) static FAMILY: Family = Family {
    models: &[
        // Nemotron-H: every layer is a Mamba-2 mixer, attention, an MLP or experts without a gate; no position embedding. The
        // projections to and from the latent of experts stay unquantized: NVIDIA's recipes leave them in bf16
        // (modelopt_recipes/models/Nemotron-3-Super-120B-A12B/super-nvfp4-max-calib.yaml, but for three layers).
        Architecture {
            name: "nemotron_h",
            class: "NemotronHForCausalLM",
            aliases: &[
                ("rms_norm_eps", "layer_norm_epsilon"),
                ("hidden_act", "mlp_hidden_act"),
                ("mamba_n_heads", "mamba_num_heads"),
                ("mamba_d_head", "mamba_head_dim"),
                ("mamba_n_groups", "n_groups"),
                ("mamba_d_state", "ssm_state_size"),
                ("mamba_d_conv", "conv_kernel"),
                ("mamba_conv_bias", "use_conv_bias"),
                ("mamba_proj_bias", "use_bias"),
            ],
            names: NEMOTRON_H_NAMES,
            eps: Eps::Default(1e-5),
            activation: "relu2",
            head_dim: HeadDim::Default(128),
            mlp: MlpForm::Plain,
            biases: BiasRules { mlp: Flag::Field("mlp_bias", false), ..BiasRules::NONE },
            rope: RopeRules { no_rope: NoRope::All, ..ROPE },
            recurrent: Some("state space blocks"),
            experts: Some(ExpertRules {
                layers: ExpertLayers::Blocks,
                shared: SharedRules::Stated {
                    width: "moe_shared_expert_intermediate_size",
                    count: "n_shared_experts",
                },
                scale: Some(1.0),
                gated: false,
                latent: Some("moe_latent_size"),
                only: &[],
                ..DEEPSEEK_V3_EXPERTS
            }),
            ..LLAMA
        },
    ],
    gguf: &[
        GGUF_NEMOTRON_H,
        // The same with experts in place of MLPs.
        gguf::Architecture {
            name: "nemotron_h_moe",
            tensors: &["exp_probs_b.bias"],
            keys: &["expert_gating_func", "expert_weights_scale", "expert_group_count"],
            experts: gguf::Experts::Blocks {
                shared: "moe_shared_expert_intermediate_size",
                latent: "moe_latent_size",
            },
            ..GGUF_NEMOTRON_H
        },
    ],
    wrappers: &[],
};

/// Names of Nemotron-H, whose layers have one half each.
pub(super) const NEMOTRON_H_NAMES: Names = Names {
    embedding: "backbone.embeddings",
    final_norm: "backbone.norm_f",
    layers: "backbone.layers.",
    attention: "mixer",
    norms: &[(NormKind::Input, "norm"), (NormKind::Post, "norm")],
    linears: &[
        (LinearKind::Q, "mixer.q_proj"),
        (LinearKind::K, "mixer.k_proj"),
        (LinearKind::V, "mixer.v_proj"),
        (LinearKind::O, "mixer.o_proj"),
        (LinearKind::Up, "mixer.up_proj"),
        (LinearKind::Down, "mixer.down_proj"),
        (LinearKind::MixIn, "mixer.in_proj"),
        (LinearKind::MixOut, "mixer.out_proj"),
    ],
    experts: NEMOTRON_EXPERT_NAMES,
    mixer: NEMOTRON_MIXER_NAMES,
    ..Names::LLAMA
};

/// Names of Nemotron-H, whose experts have no gate.
pub(super) const NEMOTRON_EXPERT_NAMES: ExpertNames = ExpertNames {
    experts: "mixer.experts.",
    fused: ["mixer.experts.up_proj", "mixer.experts.down_proj"],
    shared: "mixer.shared_experts.",
    router: "mixer.gate",
    correction: "mixer.gate.e_score_correction_bias",
    latent: ["mixer.fc1_latent_proj", "mixer.fc2_latent_proj"],
    ..ExpertNames::QWEN
};

/// Names of Mamba-2 in Nemotron-H.
pub(super) const NEMOTRON_MIXER_NAMES: MixerNames = MixerNames {
    sides: &[],
    vectors: &[
        (VectorKind::Convolution, "mixer.conv1d.weight"),
        (VectorKind::ConvolutionBias, "mixer.conv1d.bias"),
        (VectorKind::StepBias, "mixer.dt_bias"),
        (VectorKind::DecayLog, "mixer.A_log"),
        (VectorKind::Skip, "mixer.D"),
        (VectorKind::MixNorm, "mixer.norm.weight"),
    ],
};

/// Nemotron-H: no position embedding, a layer is a mixer, attention or an MLP.
pub(super) const GGUF_NEMOTRON_H: gguf::Architecture = gguf::Architecture {
    name: "nemotron_h",
    model_types: &["nemotron_h"],
    activation: "relu2",
    activation_field: "mlp_hidden_act",
    renamed: &[("rms_norm_eps", "layer_norm_epsilon")],
    biases: &[gguf::Bias {
        field: "mlp_bias",
        tensors: &["ffn_up", "ffn_down"],
        presence: gguf::Presence::Absent,
    }],
    unrotated: gguf::Unrotated::All,
    recurrence: Some(gguf::Recurrence {
        types: gguf::LayerTypes::Blocks,
        fields: &[GGUF_STATE_SPACE],
        ..gguf::Recurrence::PLAIN
    }),
    columns_of_heads: true,
    both_epsilons: true,
    ..gguf::PLAIN
};
