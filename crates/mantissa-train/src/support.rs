//! Features of architectures without a backward, which training refuses by name.

use mantissa_model::config::{DenseMlp, HeadNorms, MlpForm, NormForm, NormPlaces, QkvForm};
use mantissa_model::{Activation, ModelConfig};

use crate::error::TrainError;

/// Feature: name, true if it is supported, what the model has, what is supported.
type Feature = (&'static str, bool, String, &'static str);

fn absent(field: &'static str, absent: bool) -> Feature {
    (field, absent, "in use".to_owned(), "not in use")
}

fn recurrent(config: &ModelConfig) -> Feature {
    let name = config.recurrent.as_ref().map_or("", |recurrent| recurrent.name());
    ("recurrent layers", config.recurrent.is_none(), name.to_owned(), "not in use")
}

fn given(field: &'static str, found: Option<f32>) -> Feature {
    (field, found.is_none(), found.unwrap_or_default().to_string(), "null")
}

fn first(features: impl IntoIterator<Item = Feature>) -> Result<(), TrainError> {
    match features.into_iter().find(|(_, supported, ..)| !supported) {
        Some((field, _, found, allowed)) => Err(TrainError::Unsupported { field, found, allowed }),
        None => Ok(()),
    }
}

/// Features of attention.
fn attention(config: &ModelConfig) -> Feature {
    let untrained = config.attention.untrained();
    absent(untrained.unwrap_or("features of attention"), untrained.is_none())
}

/// Features that distinguish the layers of a model.
fn by_layer(config: &ModelConfig) -> [Feature; 13] {
    let features = &config.by_layer;
    [
        absent("heads that differ by layer", features.global_heads.is_none()),
        absent("keys and values shared by layers", features.shared_from >= config.num_hidden_layers),
        absent("embeddings of each layer", features.inputs.is_none()),
        absent("parallel streams of states", features.streams.is_none() && features.hyper.is_none()),
        absent("gates that are cut off", features.cutoffs.iter().all(Option::is_none)),
        absent("a factor after each layer", !features.scales),
        absent(
            "experts beside an MLP",
            config.experts.as_ref().is_none_or(|experts| experts.dense == DenseMlp::None),
        ),
        absent("experts without a gate", config.experts.as_ref().is_none_or(|experts| experts.gated)),
        absent("a latent of experts", config.experts.as_ref().is_none_or(|experts| experts.latent.is_none())),
        absent(
            "the mean of routed and shared experts",
            config.experts.as_ref().and_then(|experts| experts.shared).is_none_or(|shared| !shared.averaged),
        ),
        absent(
            "experts that weight their input",
            config.experts.as_ref().is_none_or(|experts| !experts.scales_input),
        ),
        absent("attention within chunks", features.chunk.is_none()),
        absent("QK norms without weights", config.head_norms != HeadNorms::Plain),
    ]
}

/// Checks that every feature of the architecture has a backward.
///
/// # Errors
/// [`TrainError::Unsupported`] for the first feature without one.
pub(crate) fn check_model(config: &ModelConfig) -> Result<(), TrainError> {
    let experts = config.experts.as_ref();
    let clips_joined = config.clip_qkv.is_some() && config.qkv != QkvForm::Separate;
    first(by_layer(config))?;
    first([
        absent("a multimodal model around it", config.wrapper.is_none()),
        absent("latent attention", config.latent.is_none()),
        recurrent(config),
        attention(config),
        absent("factors of attention and MLP", config.multipliers.is_none()),
        absent("experts stored as one tensor", experts.is_none_or(|experts| experts.fused.is_none())),
        absent("clamped SwiGLU", experts.is_none_or(|experts| experts.limited.is_none())),
        absent("correction of router scores", experts.is_none_or(|experts| !experts.routing.correction)),
        absent("clip_qkv of a joined projection", !clips_joined),
        absent("rotation of adjacent pairs", !config.rope_interleaved),
        absent("a factor of the logits", config.logit_scale.is_none()),
        absent("queries that grow with the position", config.query_growth.is_none()),
        absent("LayerNorm without a bias", config.norm != NormForm::LayerWeight),
    ])
}

/// Checks that a layer can be trained alone, and its parts be learned by reconstruction: methods of quantization that
/// use it need an architecture whose linear layers are the [plain](mantissa_model::LinearKind::PLAIN) ones.
///
/// # Errors
/// [`TrainError::Unsupported`] for the first other feature.
pub(crate) fn check_plain(config: &ModelConfig) -> Result<(), TrainError> {
    first(by_layer(config))?;
    first([
        ("norm", config.norm == NormForm::Rms, format!("{:?}", config.norm), "RMSNorm"),
        (
            "norm placement",
            config.norm_places == NormPlaces::Before,
            format!("{:?}", config.norm_places),
            "before attention and MLP",
        ),
        ("QK norm", config.head_norms != HeadNorms::Whole, "over all heads".to_owned(), "per head or none"),
        absent("norms before the output and down projections", !config.has_sub_norms()),
        ("MLP", config.mlp == MlpForm::Gated, format!("{:?}", config.mlp), "gate, up and down"),
        ("q, k and v", config.qkv == QkvForm::Separate, format!("{:?}", config.qkv), "stored separately"),
        ("hidden_act", config.hidden_act == Activation::Silu, config.hidden_act.to_string(), "silu"),
        absent("latent attention", config.latent.is_none()),
        recurrent(config),
        attention(config),
        absent("experts", config.experts.is_none()),
        absent("attention sinks", !config.attention.sinks),
        absent("learned positions", !config.learned_positions),
        absent("partial rotation", config.rotary_dim == config.head_dim),
        absent("rotary parameters by layer", config.local_rope.is_none()),
        absent("bias of the head", !config.head_bias),
        given("the scale of the embedding", config.embedding_scale),
        absent("rotation of adjacent pairs", !config.rope_interleaved),
        given("a factor of the logits", config.logit_scale),
        absent("queries that grow with the position", config.query_growth.is_none()),
        given("attn_logit_softcapping", config.attention_softcap),
        given("final_logit_softcapping", config.logit_softcap),
        given("clip_qkv", config.clip_qkv),
    ])
}
