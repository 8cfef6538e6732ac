//! Heads, windows and latent attention of a configuration.

use serde_json::Value;

use super::experts::Experts;
use crate::fields::{ConfigError, Fields, MAX_POSITIONS, MAX_WIDTH};
use crate::mixer::entries;
use crate::sizes::{Latent, QueryGrowth};
use mantissa_arch::Architecture;
use mantissa_arch::rules::{GrowthRule, HeadDim, NoRope, Windows};

impl Latent {
    pub(super) fn parse(
        fields: Fields<'_>,
        architecture: &Architecture,
    ) -> Result<Option<Self>, ConfigError> {
        let Some(rules) = &architecture.latent else { return Ok(None) };
        let rotated = fields.size("qk_rope_head_dim", 2..=MAX_WIDTH)?;
        if !rotated.is_multiple_of(2) {
            return Err(fields.error("qk_rope_head_dim", "an even number: RoPE rotates pairs"));
        }
        Ok(Some(Latent {
            q_rank: fields.optional_size("q_lora_rank", 1..=MAX_WIDTH)?,
            kv_rank: fields.size("kv_lora_rank", 1..=MAX_WIDTH)?,
            rotated,
            unrotated: fields.size("qk_nope_head_dim", 1..=MAX_WIDTH)?,
            value: fields.size("v_head_dim", 1..=MAX_WIDTH)?,
            interleaved: fields.resolve(rules.interleaved)?,
        }))
    }
}

impl QueryGrowth {
    pub(super) fn parse(
        fields: Fields<'_>,
        architecture: &Architecture,
    ) -> Result<Option<Self>, ConfigError> {
        match architecture.query_growth {
            GrowthRule::None => Ok(None),
            GrowthRule::Rotary => {
                let nested = match fields.object("rope_scaling")? {
                    Some(nested) => Some(nested),
                    None => fields.object("rope_parameters")?,
                };
                let Some(nested) = nested else { return Ok(None) };
                let Some(rate) = nested.optional_number("llama_4_scaling_beta")? else { return Ok(None) };
                let period = nested.positive("original_max_position_embeddings")? as f32;
                let (rate, offset, unrotated) = (rate as f32, 0.0, false);
                Ok((rate != 0.0).then_some(QueryGrowth { rate, period, offset, unrotated }))
            }
            GrowthRule::Unrotated => {
                // The first configs state a number.
                let value = fields.get("attn_temperature_tuning");
                let tuned = value.is_none_or(|value| value.as_bool().unwrap_or(value.as_u64() != Some(0)));
                let rate = fields.optional_number("attn_scale")?.unwrap_or(0.1) as f32;
                let period = fields.optional_positive("floor_scale")?.unwrap_or(8192.0) as f32;
                Ok(tuned.then_some(QueryGrowth { rate, period, offset: 1.0, unrotated: true }))
            }
        }
    }
}

/// Sizes that depend on one another.
pub(super) struct Heads {
    pub(super) hidden_size: usize,
    pub(super) query: usize,
    pub(super) key_value: usize,
    pub(super) dim: usize,
}

impl Heads {
    pub(super) fn parse(
        fields: Fields<'_>,
        architecture: &Architecture,
        latent: Option<Latent>,
    ) -> Result<Self, ConfigError> {
        let hidden_size = fields.size("hidden_size", 1..=MAX_WIDTH)?;
        let query = fields.size("num_attention_heads", 1..=MAX_WIDTH)?;
        let (key_value, dim) = match latent {
            // Every head has its own keys and values; they share one width, padded with zeros.
            Some(latent) => (query, latent.head().max(latent.value).next_multiple_of(2)),
            None => (
                key_value_heads(fields, architecture.head_dim, query)?,
                head_dim(fields, architecture.head_dim, hidden_size, query)?,
            ),
        };
        let heads = Heads { hidden_size, query, key_value, dim };
        heads.check(fields, architecture).map(|()| heads)
    }

    fn check(&self, fields: Fields<'_>, architecture: &Architecture) -> Result<(), ConfigError> {
        let refuse = |allowed: String| Err(fields.error_found("head_dim", self.dim.to_string(), allowed));
        if !self.dim.is_multiple_of(2) && !architecture.learned_positions {
            return refuse("an even number: RoPE rotates pairs".into());
        }
        let width = self.query.saturating_mul(self.dim);
        if width as u64 > MAX_WIDTH {
            return refuse(format!("at most {MAX_WIDTH} times num_attention_heads, which is {}", self.query));
        }
        // transformers gives the norm over the joined heads the width of the residual stream.
        if architecture.sub_norms && width != self.hidden_size {
            return refuse(format!(
                "hidden_size / num_attention_heads, {} / {}",
                self.hidden_size, self.query
            ));
        }
        Ok(())
    }
}

fn key_value_heads(fields: Fields<'_>, rule: HeadDim, query: usize) -> Result<usize, ConfigError> {
    let key_value = match rule {
        HeadDim::Divided => query,
        _ => fields.optional_size("num_key_value_heads", 1..=MAX_WIDTH)?.unwrap_or(query),
    };
    if !query.is_multiple_of(key_value) {
        let allowed = format!("a divisor of num_attention_heads, which is {query}");
        return Err(fields.error("num_key_value_heads", allowed));
    }
    Ok(key_value)
}

fn head_dim(
    fields: Fields<'_>,
    rule: HeadDim,
    hidden_size: usize,
    query: usize,
) -> Result<usize, ConfigError> {
    let stated = fields.optional_size("head_dim", 1..=MAX_WIDTH)?;
    match (rule, stated) {
        (HeadDim::Divided, _) => {}
        (_, Some(dim)) => return Ok(dim),
        (HeadDim::Default(dim), None) => return Ok(dim),
        (HeadDim::IfAbsent(dim), None) if !fields.has("head_dim") => return Ok(dim),
        _ => {}
    }
    if hidden_size.is_multiple_of(query) {
        return Ok(hidden_size / query);
    }
    let allowed = format!("a divisor of hidden_size, which is {hidden_size}, where head_dim is absent");
    Err(fields.error("num_attention_heads", allowed))
}

/// Parses the sliding window of each layer: the number of keys that a query attends to, itself included; `None` for all.
pub(super) fn windows(
    fields: Fields<'_>,
    architecture: &Architecture,
    layers: usize,
) -> Result<Vec<Option<usize>>, ConfigError> {
    let window = || stated_window(fields, architecture);
    match architecture.windows {
        Windows::None => Ok(vec![None; layers]),
        Windows::Every => Ok(vec![window()?; layers]),
        Windows::Listed => by_layer_type(fields, window()?, layers, |_| Ok(true)),
        Windows::Late => {
            let (window, used) = (window()?, fields.flag("use_sliding_window", false)?);
            let first = fields.optional_size("max_window_layers", 0..=u64::from(u32::MAX))?.unwrap_or(28);
            by_layer_type(fields, window.filter(|_| used), layers, |layer| Ok(layer >= first))
        }
        Windows::ButEnd(period) => {
            let window = window()?;
            let mut windows =
                by_layer_type(fields, window, layers, |layer| Ok(!(layer + 1).is_multiple_of(period)))?;
            // The reference overrides the config.
            if let Some(last) = windows.last_mut() {
                *last = None;
            }
            Ok(windows)
        }
        Windows::Uncompressed => {
            // Layers without entries have rotary parameters of their own, so null is not an absent window.
            let window = window()?.or(architecture.default_window);
            let entries = entries::layers(fields, layers)?.into_iter();
            Ok(entries.map(|entries| window.filter(|_| entries.is_none())).collect())
        }
        Windows::Even => by_layer_type(fields, window()?, layers, |layer| Ok(layer.is_multiple_of(2))),
        Windows::ButLast { fields: names, default } => by_layer_type(fields, window()?, layers, |layer| {
            let limits = 1..=u64::from(u32::MAX);
            let name = names.iter().find(|name| fields.get(name).is_some());
            let period = name.map(|name| fields.size(name, limits)).transpose()?.unwrap_or(default);
            Ok(!(layer + 1).is_multiple_of(period))
        }),
        Windows::BehindDense(default) => {
            let limits = 0..=u64::from(u32::MAX);
            let dense = fields.optional_size("first_k_dense_replace", limits.clone())?.unwrap_or(0);
            let period =
                fields.optional_size("sliding_window_pattern", 1..=*limits.end())?.unwrap_or(default);
            let of_dense = dense_period(fields)?;
            by_layer_type(fields, window()?, layers, |layer| {
                Ok(match layer.checked_sub(dense) {
                    Some(behind) => !(behind + 1).is_multiple_of(period),
                    None => !(layer + 1).is_multiple_of(of_dense),
                })
            })
        }
    }
}

/// Period of the layers without a window among the dense ones before those with experts.
fn dense_period(fields: Fields<'_>) -> Result<usize, ConfigError> {
    let stated = fields.optional_size("prefix_dense_sliding_window_pattern", 1..=u64::from(u32::MAX))?;
    Ok(stated.unwrap_or(1))
}

/// The window of the layers that have one.
fn stated_window(fields: Fields<'_>, architecture: &Architecture) -> Result<Option<usize>, ConfigError> {
    let window = fields.optional_size("sliding_window", 1..=MAX_POSITIONS)?;
    Ok(if fields.has("sliding_window") { window } else { architecture.default_window })
}

/// Windows by `layer_types`, or else on the layers for which `default` is true.
fn by_layer_type(
    fields: Fields<'_>,
    window: Option<usize>,
    layers: usize,
    default: impl Fn(usize) -> Result<bool, ConfigError>,
) -> Result<Vec<Option<usize>>, ConfigError> {
    let Some(value) = fields.get("layer_types") else {
        return (0..layers).map(|layer| Ok(if default(layer)? { window } else { None })).collect();
    };
    let wrong = || fields.error("layer_types", format!("{layers} of full_attention or sliding_attention"));
    let types = value.as_array().filter(|types| types.len() == layers).ok_or_else(wrong)?;
    let parse =
        |layer_type: &Value| match layer_type.as_str() {
            Some("full_attention") => Ok(None),
            Some("sliding_attention") if window.is_none() => Err(fields
                .error("layer_types", "no sliding_attention without use_sliding_window and sliding_window")),
            Some("sliding_attention") => Ok(window),
            _ => Err(wrong()),
        };
    types.iter().map(parse).collect()
}

/// Parses which layers rotate queries and keys; the others have no position embedding (NoPE).
pub(super) fn rotated_layers(
    fields: Fields<'_>,
    architecture: &Architecture,
    windows: &[Option<usize>],
    experts: Option<&Experts>,
) -> Result<Vec<bool>, ConfigError> {
    let layers = windows.len();
    match architecture.rope.no_rope {
        NoRope::None => Ok(vec![true; layers]),
        NoRope::All => Ok(vec![false; layers]),
        NoRope::UnlessRope => match fields.text("position_embedding_type")? {
            Some("rope") => Ok(vec![true; layers]),
            None | Some("nope") => Ok(vec![false; layers]),
            Some(_) => Err(fields.error("position_embedding_type", "rope, nope or null")),
        },
        NoRope::FullAttention => {
            let hybrid = stated_window(fields, architecture)?.is_some();
            Ok(windows.iter().map(|window| !hybrid || window.is_some()).collect())
        }
        NoRope::FullAttentionButDense => {
            let rotates = dense_period(fields)? == 1;
            let dense = |layer: usize| experts.is_none_or(|experts| !experts.layers[layer]);
            let all = windows.iter().enumerate();
            Ok(all.map(|(layer, window)| window.is_some() || (rotates && dense(layer))).collect())
        }
        NoRope::Listed => {
            // The reference takes an empty list for an absent one.
            let stated = fields.get("no_rope_layers");
            let stated = stated.filter(|value| value.as_array().is_none_or(|list| !list.is_empty()));
            let Some(value) = stated else {
                let limits = 1..=u64::from(u32::MAX);
                let period = fields.optional_size("no_rope_layer_interval", limits)?.unwrap_or(4);
                return Ok((1..=layers).map(|layer| !layer.is_multiple_of(period)).collect());
            };
            let flag = |value: &Value| value.as_u64().filter(|flag| *flag <= 1).map(|flag| flag == 1);
            let listed = value.as_array().filter(|list| list.len() == layers);
            let flags = listed.and_then(|list| list.iter().map(flag).collect());
            flags.ok_or_else(|| fields.error("no_rope_layers", format!("{layers} of 0 or 1")))
        }
    }
}
