//! GPT-NeoX and Pythia.

use super::llama::{ATTENTION_BIAS, LLAMA, ROPE};
use crate::architecture::Architecture;
use crate::family::Family;
use crate::features::{MlpForm, NormForm, QkvForm};
use crate::gguf;
use crate::kinds::LinearKind;
use crate::names::Names;
use crate::rules::{BiasRules, Eps, Flag, HeadDim, RopeRules};

/// Rows of the family.
pub(super) static FAMILY: Family = Family {
    models: &[
        // GPT-NeoX and Pythia: attention and MLP in parallel, projections joined head by head.
        Architecture {
            name: "gpt_neox",
            class: "GPTNeoXForCausalLM",
            aliases: &[
                ("rms_norm_eps", "layer_norm_eps"),
                ("rope_theta", "rotary_emb_base"),
                ("partial_rotary_factor", "rotary_pct"),
            ],
            names: GPT_NEOX_NAMES,
            norm: NormForm::Layer,
            eps: Eps::Default(1e-5),
            parallel: Flag::Field("use_parallel_residual", true),
            activation: "gelu",
            head_dim: HeadDim::Divided,
            qkv: QkvForm::ByHead,
            mlp: MlpForm::Plain,
            biases: BiasRules { mlp: Flag::Fixed(true), ..ATTENTION_BIAS },
            rope: RopeRules { partial: Some(0.25), ..ROPE },
            ..LLAMA
        },
    ],
    gguf: &[gguf::Architecture {
        name: "gptneox",
        model_types: &["gpt_neox"],
        activation: "gelu",
        renamed: &[("rms_norm_eps", "layer_norm_eps"), ("rope_theta", "rotary_emb_base")],
        layer_norms: true,
        rows: gguf::Rows::ByHead,
        tensors: &["attn_qkv.weight"],
        biases: &[gguf::Bias {
            tensors: &["attn_qkv"],
            presence: gguf::Presence::Required,
            ..gguf::ATTENTION_BIAS
        }],
        partial: Some("rotary_pct"),
        parallel_key: true,
        ..gguf::PLAIN
    }],
    wrappers: &[],
};

/// Names of GPT-NeoX.
pub(super) const GPT_NEOX_NAMES: Names = Names {
    embedding: "gpt_neox.embed_in",
    head: "embed_out",
    final_norm: "gpt_neox.final_layer_norm",
    layers: "gpt_neox.layers.",
    attention: "attention",
    linears: &[
        (LinearKind::Qkv, "attention.query_key_value"),
        (LinearKind::O, "attention.dense"),
        (LinearKind::Up, "mlp.dense_h_to_4h"),
        (LinearKind::Down, "mlp.dense_4h_to_h"),
    ],
    ..Names::LLAMA
};
