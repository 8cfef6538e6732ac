//! StarCoder2.

use super::llama::LLAMA;
use crate::architecture::Architecture;
use crate::family::Family;
use crate::features::{MlpForm, NormForm};
use crate::gguf;
use crate::kinds::LinearKind;
use crate::names::Names;
use crate::rules::{BiasRules, Eps, Flag, Windows};

/// Rows of the family.
pub(super) static FAMILY: Family = Family {
    models: &[
        // StarCoder2: LayerNorm, no gate, biases everywhere.
        Architecture {
            name: "starcoder2",
            class: "Starcoder2ForCausalLM",
            aliases: &[("rms_norm_eps", "norm_epsilon")],
            names: Names {
                linears: &[(LinearKind::Up, "mlp.c_fc"), (LinearKind::Down, "mlp.c_proj")],
                ..Names::LLAMA
            },
            tied: true,
            norm: NormForm::Layer,
            eps: Eps::Default(1e-5),
            activation: "gelu_pytorch_tanh",
            mlp: MlpForm::Plain,
            biases: BiasRules::all(Flag::Field("use_bias", true)),
            windows: Windows::Every,
            ..LLAMA
        },
    ],
    gguf: &[gguf::Architecture {
        name: "starcoder2",
        model_types: &["starcoder2"],
        activation: "gelu_pytorch_tanh",
        renamed: &[("rms_norm_eps", "norm_epsilon")],
        layer_norms: true,
        biases: &[gguf::Bias {
            field: "use_bias",
            tensors: &["attn_q", "attn_k", "attn_v", "attn_output", "ffn_up", "ffn_down"],
            presence: gguf::Presence::Required,
        }],
        heads_fill_width: true,
        ..gguf::PLAIN
    }],
    wrappers: &[],
};
