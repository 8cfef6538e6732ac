//! Heads, windows and what else the attention of an architecture has.

use serde_json::Value;

use super::fields::{ConfigError, Fields};
use super::{MAX_POSITIONS, MAX_WIDTH, ModelType};

/// Multi-head latent attention (DeepSeek-V2, sec. 2.1): queries, keys and values come from narrow latents; only a part of
/// a head, in keys common to all heads, is rotated.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Latent {
    /// Width of the latent of the queries; `None` where they are projected at once.
    pub q_rank: Option<usize>,
    /// Width of the latent of keys and values.
    pub kv_rank: usize,
    /// Width of the part of a head that is rotated, even.
    pub rotated: usize,
    /// Width of the other part.
    pub unrotated: usize,
    /// Width of a head of the values.
    pub value: usize,
    /// Whether the rotated pairs stand side by side in the weights, and not half a head apart.
    pub interleaved: bool,
}

impl Latent {
    /// Added to the mean square in the norms of the latents, whatever the config says of the others.
    pub const EPS: f32 = 1e-6;

    pub(super) fn parse(fields: Fields<'_>, model_type: ModelType) -> Result<Option<Self>, ConfigError> {
        if !model_type.is_deepseek() {
            return Ok(None);
        }
        let rotated = fields.size("qk_rope_head_dim", 2..=MAX_WIDTH)?;
        if !rotated.is_multiple_of(2) {
            return Err(fields.error("qk_rope_head_dim", "an even number: rotary embedding turns pairs"));
        }
        Ok(Some(Latent {
            q_rank: fields.optional_size("q_lora_rank", 1..=MAX_WIDTH)?,
            kv_rank: fields.size("kv_lora_rank", 1..=MAX_WIDTH)?,
            rotated,
            unrotated: fields.size("qk_nope_head_dim", 1..=MAX_WIDTH)?,
            value: fields.size("v_head_dim", 1..=MAX_WIDTH)?,
            // DeepSeek-V2 multiplies complex numbers, which is the same.
            interleaved: model_type == ModelType::DeepseekV2 || fields.flag("rope_interleave", true)?,
        }))
    }

    /// Width of a head of queries and keys.
    pub fn head(&self) -> usize {
        self.rotated + self.unrotated
    }
}

/// The sizes that depend on one another.
pub(super) struct Heads {
    pub(super) hidden_size: usize,
    pub(super) query: usize,
    pub(super) key_value: usize,
    pub(super) dim: usize,
}

impl Heads {
    pub(super) fn parse(
        fields: Fields<'_>,
        model_type: ModelType,
        latent: Option<Latent>,
    ) -> Result<Self, ConfigError> {
        let hidden_size = fields.size("hidden_size", 1..=MAX_WIDTH)?;
        let query = fields.size("num_attention_heads", 1..=MAX_WIDTH)?;
        if let Some(latent) = latent {
            // Every head has keys and values of its own; they share one width, padded with zeros.
            let dim = latent.head().max(latent.value);
            let heads = Heads { hidden_size, query, key_value: query, dim: dim + dim % 2 };
            return heads.check(fields, model_type).map(|()| heads);
        }
        let key_value = match model_type {
            // Whatever the config says.
            ModelType::Gpt2 | ModelType::GptNeox => query,
            _ => fields.optional_size("num_key_value_heads", 1..=MAX_WIDTH)?.unwrap_or(query),
        };
        if !query.is_multiple_of(key_value) {
            let allowed = format!("a divisor of num_attention_heads, which is {query}");
            return Err(fields.error("num_key_value_heads", allowed));
        }
        let dim = match fields.optional_size("head_dim", 1..=MAX_WIDTH)? {
            Some(dim) if !matches!(model_type, ModelType::Gpt2 | ModelType::GptNeox) => dim,
            None if model_type == ModelType::Qwen3 && !fields.has("head_dim") => 128,
            None if model_type.is_gemma() => 256,
            None if model_type == ModelType::GptOss => 64,
            _ if hidden_size.is_multiple_of(query) => hidden_size / query,
            _ => {
                let allowed =
                    format!("a divisor of hidden_size, which is {hidden_size}, where head_dim is absent");
                return Err(fields.error("num_attention_heads", allowed));
            }
        };
        let heads = Heads { hidden_size, query, key_value, dim };
        heads.check(fields, model_type).map(|()| heads)
    }

    fn check(&self, fields: Fields<'_>, model_type: ModelType) -> Result<(), ConfigError> {
        let found = self.dim.to_string();
        if !self.dim.is_multiple_of(2) && model_type != ModelType::Gpt2 {
            return Err(fields.error_found(
                "head_dim",
                found,
                "an even number: rotary embedding turns pairs",
            ));
        }
        let width = self.query.saturating_mul(self.dim);
        if width as u64 > MAX_WIDTH {
            let allowed = format!("at most {MAX_WIDTH} times num_attention_heads, which is {}", self.query);
            return Err(fields.error_found("head_dim", found, allowed));
        }
        // transformers gives the norm over the joined heads the width of the residual stream.
        if model_type == ModelType::Bitnet && width != self.hidden_size {
            let allowed = format!("hidden_size / num_attention_heads, {} / {}", self.hidden_size, self.query);
            return Err(fields.error_found("head_dim", found, allowed));
        }
        Ok(())
    }
}

/// For each layer, how many keys a query sees, itself included; `None` for all before it.
pub(super) fn windows(
    fields: Fields<'_>,
    model_type: ModelType,
    layers: usize,
) -> Result<Vec<Option<usize>>, ConfigError> {
    // The reference's default where the field is absent; null means no window.
    let default = match model_type {
        ModelType::Phi3 | ModelType::Mixtral => None,
        ModelType::GptOss => Some(128),
        _ => Some(4096),
    };
    let window = match fields.optional_size("sliding_window", 1..=MAX_POSITIONS) {
        Ok(None) if !fields.has("sliding_window") => default,
        // A window that is not used may be anything.
        Err(_) if matches!(model_type, ModelType::Qwen2Moe | ModelType::Qwen3Moe) => None,
        window => window?,
    };
    match model_type {
        ModelType::Mistral | ModelType::Phi3 | ModelType::Mixtral => Ok(vec![window; layers]),
        ModelType::Qwen2 | ModelType::Qwen3 => {
            let used = fields.flag("use_sliding_window", false)?;
            let window = window.filter(|_| used);
            let first = fields.optional_size("max_window_layers", 0..=u64::from(u32::MAX))?.unwrap_or(28);
            by_layer_type(fields, window, layers, |layer| layer >= first)
        }
        ModelType::Gemma2 | ModelType::GptOss => {
            by_layer_type(fields, window, layers, |layer| layer.is_multiple_of(2))
        }
        ModelType::Gemma3 => {
            let limits = 1..=u64::from(u32::MAX);
            let pattern = match fields.optional_size("sliding_window_pattern", limits.clone())? {
                None => fields.optional_size("_sliding_window_pattern", limits)?,
                pattern => pattern,
            };
            let pattern = pattern.unwrap_or(6);
            by_layer_type(fields, window, layers, |layer| !(layer + 1).is_multiple_of(pattern))
        }
        _ => Ok(vec![None; layers]),
    }
}

/// Windows by `layer_types`, or else on the layers that `default` says.
fn by_layer_type(
    fields: Fields<'_>,
    window: Option<usize>,
    layers: usize,
    default: impl Fn(usize) -> bool,
) -> Result<Vec<Option<usize>>, ConfigError> {
    let Some(value) = fields.get("layer_types") else {
        return Ok((0..layers).map(|layer| window.filter(|_| default(layer))).collect());
    };
    let wrong = || fields.error("layer_types", format!("{layers} of full_attention or sliding_attention"));
    let types = value.as_array().filter(|types| types.len() == layers).ok_or_else(wrong)?;
    let of =
        |layer_type: &Value| match layer_type.as_str() {
            Some("full_attention") => Ok(None),
            Some("sliding_attention") if window.is_none() => Err(fields
                .error("layer_types", "no sliding_attention without use_sliding_window and sliding_window")),
            Some("sliding_attention") => Ok(window),
            _ => Err(wrong()),
        };
    types.iter().map(of).collect()
}
