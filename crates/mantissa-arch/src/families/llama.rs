//! Llama 1 to 4 and LLaVA, and the rows that most others start from.

use super::mistral::EXPERTS;
use super::qwen::QWEN3_VL_WRAPPER;
use crate::architecture::Architecture;
use crate::attention::AttentionRules;
use crate::family::Family;
use crate::features::{HeadNorms, MlpForm, NormForm, NormPlaces, QkvForm, Scores};
use crate::gguf;
use crate::kinds::LinearKind;
use crate::names::{ExpertNames, Names};
use crate::rules::{
    BiasRules, ByLayer, Eps, ExpertLayers, ExpertRules, FeedForward, Flag, GrowthRule, HeadDim, NoRope,
    QueryScale, RopeRules, SharedRules, Windows,
};
use crate::stack::StackForm;
use crate::wrapper::{TextPlace, Wrapper};

/// Rows of the family.
pub(super) static FAMILY: Family = Family {
    models: &[
        LLAMA,
        // Llama 4 (text): adjacent pairs rotated, chunks and QK norms without weights in rotated layers, growing queries in
        // the others; experts whose input is weighted, with a shared one.
        Architecture {
            name: "llama4_text",
            class: "Llama4ForCausalLM",
            names: Names {
                linears: &[
                    (LinearKind::Gate, "feed_forward.gate_proj"),
                    (LinearKind::Up, "feed_forward.up_proj"),
                    (LinearKind::Down, "feed_forward.down_proj"),
                ],
                experts: LLAMA4_EXPERT_NAMES,
                ..Names::LLAMA
            },
            eps: Eps::Default(1e-5),
            head_norms: HeadNorms::Plain,
            norms_heads: Flag::Field("use_qk_norm", true),
            by_layer: ByLayer { chunks: true, ..ByLayer::NONE },
            head_dim: HeadDim::IfAbsent(128),
            ffn: "intermediate_size_mlp",
            biases: BiasRules::ATTENTION,
            rope: RopeRules { theta: 500_000.0, no_rope: NoRope::Listed, interleaved: true, ..ROPE },
            query_growth: GrowthRule::Unrotated,
            experts: Some(ExpertRules {
                layers: ExpertLayers::Interleaved,
                shared: SharedRules::One,
                scores: Scores::Sigmoid,
                normalize: Flag::Fixed(false),
                scales_input: true,
                fused: StackForm::Columns,
                published_fused: true,
                ..EXPERTS
            }),
            ..LLAMA
        },
    ],
    gguf: &[
        // Mistral and Mixtral have no architecture of their own.
        gguf::Architecture {
            name: "llama",
            model_types: &["llama", "mistral", "mixtral"],
            rows: gguf::Rows::Interleaved,
            biases: &[
                gguf::Bias { presence: gguf::Presence::Optional, ..gguf::ATTENTION_BIAS },
                gguf::Bias { presence: gguf::Presence::Optional, ..gguf::MLP_BIAS },
            ],
            rope_factors: true,
            long_rope: true,
            experts: gguf::Experts::Some { model_type: "mixtral" },
            ..gguf::PLAIN
        },
        // Adjacent pairs are rotated, as in the source. The loader fixes the length of chunks, the growth of the queries in
        // layers that are not rotated, and which layers these are; a model of 128 experts has no norms of heads.
        gguf::Architecture {
            name: "llama4",
            model_types: &["llama4_text"],
            unnormed_with: Some(128),
            unrotated: gguf::Unrotated::LastOf(4),
            rope_factors: true,
            chunk: Some(8192),
            growth: Some([0.1, 8192.0, 1.0]),
            fixed: &[
                ("attention_chunk_size", gguf::Fixed::Size(8192)),
                ("attn_temperature_tuning", gguf::Fixed::Flag(true)),
                ("attn_scale", gguf::Fixed::Number(0.1)),
                ("floor_scale", gguf::Fixed::Number(8192.0)),
            ],
            experts: gguf::Experts::Interleaved {
                count: "num_local_experts",
                width: "intermediate_size",
                dense: "intermediate_size_mlp",
            },
            ..gguf::PLAIN
        },
    ],
    wrappers: &[
        LLAVA_WRAPPER,
        Wrapper {
            name: "llama4",
            class: "Llama4ForConditionalGeneration",
            towers: &["vision_model", "multi_modal_projector"],
            text_models: &[("llama4_text", "llama4_text")],
            places: &[TextPlace::INNER],
            ..QWEN3_VL_WRAPPER
        },
    ],
};

/// Names of Llama 4.
pub(super) const LLAMA4_EXPERT_NAMES: ExpertNames = ExpertNames {
    experts: "feed_forward.experts.",
    fused: ["feed_forward.experts.gate_up_proj", "feed_forward.experts.down_proj"],
    shared: "feed_forward.shared_expert.",
    router: "feed_forward.router",
    ..ExpertNames::QWEN
};

/// Llama 1, 2 and 3.
pub(super) const LLAMA: Architecture = Architecture {
    name: "llama",
    class: "LlamaForCausalLM",
    aliases: &[],
    defaults: &[],
    fixed_flags: &[],
    only: &[],
    fixed_counts: &[],
    names: Names::LLAMA,
    tied: false,
    norm: NormForm::Rms,
    eps: Eps::Required,
    norm_places: NormPlaces::Before,
    parallel: Flag::Fixed(false),
    head_norms: HeadNorms::Absent,
    norms_heads: Flag::Fixed(true),
    by_layer: ByLayer::NONE,
    sub_norms: false,
    activation: "silu",
    gelu_is_tanh: false,
    head_dim: HeadDim::Stated,
    ffn: "intermediate_size",
    feed_forward: FeedForward::Stated,
    qkv: QkvForm::Separate,
    mlp: MlpForm::Gated,
    biases: BiasRules { mlp: Flag::Field("mlp_bias", false), ..BiasRules::ATTENTION },
    head_bias: false,
    conv1d: false,
    ternary: false,
    windows: Windows::None,
    default_window: None,
    rope: ROPE,
    learned_positions: false,
    scaled_embedding: false,
    query_scale: QueryScale::Head,
    scales: None,
    query_growth: GrowthRule::None,
    softcaps: None,
    latent: None,
    attention: AttentionRules::PLAIN,
    multipliers: false,
    recurrent: None,
    experts: None,
};

/// Plain rotary embedding of whole heads.
pub(super) const ROPE: RopeRules = RopeRules::PLAIN;

/// Biases of the attention unless `attention_bias` is false.
pub(super) const ATTENTION_BIAS: BiasRules = {
    let flag = Flag::Field("attention_bias", true);
    BiasRules { qkv: flag, output: flag, ..BiasRules::NONE }
};

pub(super) const LLAVA_TOWERS: &[&str] =
    &["vision_tower", "multi_modal_projector", "model.vision_tower", "model.multi_modal_projector"];

/// LLaVA 1.5; fields that its configs leave out are those of `LlamaConfig`.
pub(super) const LLAVA_WRAPPER: Wrapper = Wrapper {
    name: "llava",
    class: "LlavaForConditionalGeneration",
    towers: LLAVA_TOWERS,
    text_models: &[("llama", "llama")],
    defaults: &[
        ("vocab_size", 32_000),
        ("hidden_size", 4096),
        ("intermediate_size", 11_008),
        ("num_hidden_layers", 32),
        ("num_attention_heads", 32),
        ("max_position_embeddings", 2048),
    ],
    places: &[TextPlace::INNER, TextPlace::BESIDE],
    tied: false,
    fused: None,
};
