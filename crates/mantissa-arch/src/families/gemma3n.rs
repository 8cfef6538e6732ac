//! Gemma 3n.

use super::gemma::{GEMMA2, GGUF_GEMMA2};
use super::llama::ROPE;
use super::qwen::QWEN3_VL_WRAPPER;
use crate::architecture::Architecture;
use crate::attention::AttentionRules;
use crate::family::Family;
use crate::features::{HeadNorms, NormForm};
use crate::gguf;
use crate::rules::{ByLayer, FeedForward, QueryScale, RopeRules, Softcaps, Windows};
use crate::wrapper::Wrapper;

/// Rows of the family.
pub(super) static FAMILY: Family = Family {
    models: &[
        // Gemma 3n (text): parallel streams of states with a low-rank path beside attention, QK and value norms, unscaled
        // scores, keys and values shared by later layers, embeddings for each layer, cut-off gates. What makes the streams
        // and the low-rank path stay unquantized, as in llm-compressor's recipe
        // (examples/multimodal_vision/gemma3n_example.py).
        Architecture {
            name: "gemma3n_text",
            class: "Gemma3nForCausalLM",
            norm: NormForm::Rms,
            head_norms: HeadNorms::Each,
            attention: AttentionRules { value_norm: true, ..AttentionRules::PLAIN },
            by_layer: ByLayer {
                shared_kv: Some(15),
                inputs: true,
                streams: true,
                sparsity: true,
                ..ByLayer::NONE
            },
            softcaps: Some(Softcaps { attention: None, logits: Some(30.0) }),
            windows: Windows::ButLast { fields: &[], default: 5 },
            default_window: Some(512),
            feed_forward: FeedForward::Listed,
            query_scale: QueryScale::One,
            rope: RopeRules { theta: 1_000_000.0, local_theta: Some(10_000.0), ..ROPE },
            ..GEMMA2
        },
    ],
    gguf: &[
        // Norms without the 1.
        gguf::Architecture {
            name: "gemma3n",
            model_types: &["gemma3n_text"],
            norms_plus_one: false,
            keys: &["final_logit_softcapping"],
            biases: &[gguf::ATTENTION_BIAS],
            windows: gguf::Windows::Listed { period: 5 },
            local_theta: gguf::LocalTheta::Default(10_000.0),
            streams: Some(GGUF_GEMMA3N),
            unscaled: true,
            ..GGUF_GEMMA2
        },
    ],
    wrappers: &[Wrapper {
        name: "gemma3n",
        class: "Gemma3nForConditionalGeneration",
        towers: &["model.vision_tower", "model.embed_vision", "model.audio_tower", "model.embed_audio"],
        text_models: &[("gemma3n_text", "gemma3n_text")],
        tied: true,
        ..QWEN3_VL_WRAPPER
    }],
};

/// Streams of Gemma 3n.
pub(super) const GGUF_GEMMA3N: gguf::FixedStreams =
    gguf::FixedStreams { count: 4, laurel: 64, inputs: 256, own_keys: 20, cut: 10, share: 0.95, cap: 30.0 };
