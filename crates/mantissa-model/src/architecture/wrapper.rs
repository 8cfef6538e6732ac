//! Multimodal models as data: a text model with its configuration and tensors inside those of a larger model. Only the
//! text model is run and quantized; towers and projectors are tensors that it does not use.
//!
//! Names and defaults are those of transformers 5.23 (`configuration_*.py`, `conversion_mapping.py`) and of the
//! published checkpoints.

use std::fmt;

use mantissa_num::nearest_list;
use mantissa_store::convention::StackForm;
use serde_json::Value;

use super::Architecture;

/// Field of the text model's configuration.
pub(crate) const TEXT_CONFIG: &str = "text_config";

/// A multimodal model. Two are equal when their names are.
#[derive(Clone, Copy)]
pub struct Wrapper {
    /// `model_type` in config.json.
    pub name: &'static str,
    /// Class in `architectures` of config.json.
    pub class: &'static str,
    /// Prefixes of its other modules, such as towers and projectors.
    pub towers: &'static [&'static str],
    /// Architectures of the text model: `model_type` in `text_config`, and the row that describes it. The first one is
    /// that of a config without a `model_type`. Other rows keep their name.
    pub(crate) text_models: &'static [(&'static str, &'static str)],
    /// Values of the fields that the text model's configuration may leave out; flags are 0 or 1.
    pub(crate) defaults: &'static [(&'static str, u64)],
    /// Places of the text model among the tensors. The names in a checkpoint decide; the first one is that of a config
    /// alone.
    pub(crate) places: &'static [TextPlace],
    /// True if the head is the embedding if `tie_word_embeddings` is absent.
    pub(crate) tied: bool,
    /// Form of fused experts, if it is not that of the text model's row.
    pub(crate) fused: Option<StackForm>,
}

/// Place of a text model among the tensors of a multimodal one.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TextPlace {
    /// Prefix instead of `model.`.
    pub(crate) model: &'static str,
    /// Output head.
    pub(crate) head: &'static str,
}

/// In a model with the text model's head inside.
const INNER: TextPlace = TextPlace { model: "language_model.model.", head: "language_model.lm_head" };
/// Beside the towers, in one model with a head outside.
const BESIDE: TextPlace = TextPlace { model: "model.language_model.", head: "lm_head" };
/// As if there were no towers.
const PLAIN: TextPlace = TextPlace { model: "model.", head: "lm_head" };

const LLAVA_TOWERS: &[&str] =
    &["vision_tower", "multi_modal_projector", "model.vision_tower", "model.multi_modal_projector"];
const QWEN_TOWERS: &[&str] = &["visual", "model.visual"];

/// Every multimodal model.
static TABLE: &[Wrapper] = &[
    // Fields that google's configs leave out are those of `Gemma3TextConfig`.
    Wrapper {
        name: "gemma3",
        class: "Gemma3ForConditionalGeneration",
        text_models: &[("gemma3_text", "gemma3_text")],
        defaults: &[
            ("vocab_size", 262_208),
            ("hidden_size", 2304),
            ("intermediate_size", 9216),
            ("num_hidden_layers", 26),
            ("num_attention_heads", 8),
            ("num_key_value_heads", 4),
            ("max_position_embeddings", 131_072),
        ],
        tied: true,
        ..LLAVA
    },
    Wrapper {
        name: "mistral3",
        class: "Mistral3ForConditionalGeneration",
        text_models: &[("mistral", "mistral"), ("ministral3", "ministral3")],
        defaults: &[],
        ..LLAVA
    },
    LLAVA,
    // The published configs have the text model's fields outside.
    Wrapper {
        name: "qwen2_5_vl",
        class: "Qwen2_5_VLForConditionalGeneration",
        text_models: &[("qwen2_5_vl_text", "qwen2"), ("qwen2_5_vl", "qwen2")],
        places: &[PLAIN, BESIDE],
        ..QWEN3_VL
    },
    QWEN3_VL,
    Wrapper {
        name: "qwen3_vl_moe",
        class: "Qwen3VLMoeForConditionalGeneration",
        text_models: &[("qwen3_vl_moe_text", "qwen3_moe")],
        defaults: &[("norm_topk_prob", 1)],
        fused: Some(StackForm::Columns),
        ..QWEN3_VL
    },
    // Qwen3.5 and Qwen3.6. Their heads that predict several tokens (`mtp.`) are parts that the text model does not use.
    Wrapper {
        name: "qwen3_5",
        class: "Qwen3_5ForConditionalGeneration",
        text_models: &[("qwen3_5_text", "qwen3_5_text")],
        ..QWEN3_VL
    },
    Wrapper {
        name: "qwen3_5_moe",
        class: "Qwen3_5MoeForConditionalGeneration",
        text_models: &[("qwen3_5_moe_text", "qwen3_5_moe_text")],
        fused: Some(StackForm::Rows),
        ..QWEN3_VL
    },
    Wrapper {
        name: "gemma3n",
        class: "Gemma3nForConditionalGeneration",
        towers: &["model.vision_tower", "model.embed_vision", "model.audio_tower", "model.embed_audio"],
        text_models: &[("gemma3n_text", "gemma3n_text")],
        tied: true,
        ..QWEN3_VL
    },
    Wrapper {
        name: "gemma4",
        class: "Gemma4ForConditionalGeneration",
        towers: &["model.vision_tower", "model.embed_vision", "model.audio_tower", "model.embed_audio"],
        text_models: &[("gemma4_text", "gemma4_text")],
        tied: true,
        ..QWEN3_VL
    },
    Wrapper {
        name: "llama4",
        class: "Llama4ForConditionalGeneration",
        towers: &["vision_model", "multi_modal_projector"],
        text_models: &[("llama4_text", "llama4_text")],
        places: &[INNER],
        ..QWEN3_VL
    },
];

/// LLaVA 1.5; fields that its configs leave out are those of `LlamaConfig`.
const LLAVA: Wrapper = Wrapper {
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
    places: &[INNER, BESIDE],
    tied: false,
    fused: None,
};

/// Qwen3-VL. Text has the same position in all three dimensions of its rotation, which makes it the plain one.
const QWEN3_VL: Wrapper = Wrapper {
    name: "qwen3_vl",
    class: "Qwen3VLForConditionalGeneration",
    towers: QWEN_TOWERS,
    text_models: &[("qwen3_vl_text", "qwen3")],
    defaults: &[],
    places: &[BESIDE],
    tied: false,
    fused: None,
};

impl Wrapper {
    /// Finds the multimodal model with this `model_type`.
    pub fn find(name: &str) -> Option<&'static Self> {
        Self::all().find(|wrapper| wrapper.name == name)
    }

    /// Every multimodal model.
    pub fn all() -> impl Iterator<Item = &'static Self> {
        TABLE.iter()
    }

    /// Finds the architecture of a text model with this `model_type`.
    pub(crate) fn text_model(&self, name: Option<&str>) -> Option<&'static Architecture> {
        let (first, _) = self.text_models.first()?;
        let name = name.unwrap_or(first);
        let row = self.text_models.iter().find(|(known, _)| *known == name).map_or(name, |(_, row)| row);
        Architecture::find(row)
    }

    /// Lists the names nearest to `got`, for a message.
    pub(crate) fn nearest_text_model(&self, got: &str) -> String {
        let own = self.text_models.iter().map(|(name, _)| *name);
        nearest_list(got, own.chain(Architecture::all().map(|row| row.name)))
    }
}

impl Architecture {
    /// Finds the architecture that a `config.json` describes: that of its text model if it is multimodal.
    pub fn of_config(config: &Value) -> Option<&'static Self> {
        let name = config["model_type"].as_str()?;
        match Wrapper::find(name) {
            None => Self::find(name),
            Some(wrapper) => {
                let text = config.get(TEXT_CONFIG).unwrap_or(config);
                wrapper.text_model(text["model_type"].as_str())
            }
        }
    }
}

impl PartialEq for Wrapper {
    fn eq(&self, other: &Self) -> bool {
        self.name == other.name
    }
}

impl fmt::Debug for Wrapper {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Wrapper({})", self.name)
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    #[test]
    fn every_text_model_has_a_row() {
        for wrapper in Wrapper::all() {
            assert!(Architecture::find(wrapper.name).is_none(), "{wrapper:?}");
            assert!(!wrapper.places.is_empty() && !wrapper.text_models.is_empty(), "{wrapper:?}");
            for (name, _) in wrapper.text_models {
                assert!(wrapper.text_model(Some(name)).is_some(), "{name}");
            }
            assert!(wrapper.text_model(Some("unheard")).is_none());
        }
    }
}
