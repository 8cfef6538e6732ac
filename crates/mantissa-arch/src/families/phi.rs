//! Phi-1 to Phi-4.

use super::llama::{LLAMA, ROPE};
use crate::architecture::Architecture;
use crate::family::Family;
use crate::features::{MlpForm, NormForm, NormPlaces, QkvForm};
use crate::gguf;
use crate::kinds::LinearKind;
use crate::names::Names;
use crate::rules::{BiasRules, Eps, Flag, RopeRules, Windows};

/// Rows of the family.
pub(super) static FAMILY: Family = Family {
    models: &[
        // Phi-1, 1.5 and 2: attention and MLP in parallel on one norm, partial rotation, no gate, a bias of the head.
        Architecture {
            name: "phi",
            class: "PhiForCausalLM",
            aliases: &[("rms_norm_eps", "layer_norm_eps")],
            fixed_flags: &[("qk_layernorm", false)],
            names: PHI_NAMES,
            norm: NormForm::Layer,
            eps: Eps::Default(1e-5),
            norm_places: NormPlaces::ParallelShared,
            activation: "gelu_pytorch_tanh",
            mlp: MlpForm::Plain,
            biases: BiasRules::all(Flag::Fixed(true)),
            head_bias: true,
            rope: RopeRules { partial: Some(0.5), ..ROPE },
            ..LLAMA
        },
        // Phi-3 and Phi-4: joined projections, partial rotation, LongRoPE.
        Architecture {
            name: "phi3",
            class: "Phi3ForCausalLM",
            biases: BiasRules::NONE,
            qkv: QkvForm::Joined,
            mlp: MlpForm::GatedJoined,
            windows: Windows::Every,
            rope: RopeRules { partial: Some(1.0), ..ROPE },
            ..LLAMA
        },
    ],
    gguf: &[
        gguf::Architecture {
            name: "phi2",
            model_types: &["phi"],
            activation: "gelu_new",
            renamed: &[("rms_norm_eps", "layer_norm_eps")],
            layer_norms: true,
            biases: &[],
            partial: Some("partial_rotary_factor"),
            ..gguf::PLAIN
        },
        gguf::Architecture {
            name: "phi3",
            model_types: &["phi3"],
            tensors: &["attn_qkv.weight"],
            partial: Some("partial_rotary_factor"),
            long_rope: true,
            windows: gguf::Windows::Zero,
            ..gguf::PLAIN
        },
    ],
    wrappers: &[],
};

/// Names of Phi-1 to Phi-2.
pub(super) const PHI_NAMES: Names = Names {
    final_norm: "model.final_layernorm",
    linears: &[
        (LinearKind::O, "self_attn.dense"),
        (LinearKind::Up, "mlp.fc1"),
        (LinearKind::Down, "mlp.fc2"),
    ],
    ..Names::LLAMA
};
