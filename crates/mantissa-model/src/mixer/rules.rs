//! Rules by which an architecture states its mixer, and what the rules of several have in common.

use serde_json::Value;

use super::halves::{Halves, Mixing};
use crate::fields::{ConfigError, Fields, MAX_WIDTH};

/// Longest convolution, in tokens.
pub(super) const MAX_KERNEL: u64 = 256;

/// Sizes of the model around a mixer.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Around {
    /// Width of the residual stream.
    pub(crate) hidden: usize,
    /// Query heads.
    pub(crate) heads: usize,
    /// Width of a head.
    pub(crate) head_dim: usize,
    /// Epsilon of norms.
    pub(crate) eps: f32,
}

/// Recurrent mixer of an architecture, and the layers that have it.
#[derive(Clone, Copy)]
pub(crate) struct MixerRules<M> {
    /// Parses the mixer.
    pub(crate) mixer: fn(Fields<'_>, &Around) -> Result<M, ConfigError>,
    /// Parses the halves of each of this number of layers.
    pub(crate) halves: fn(Fields<'_>, usize) -> Result<Halves, ConfigError>,
    /// Parses the number of layers, if `num_hidden_layers` does not state it.
    pub(crate) layers: Option<fn(Fields<'_>) -> Result<usize, ConfigError>>,
}

/// Parses a list of factors; 1 without the field.
pub(crate) fn list<const N: usize>(fields: Fields<'_>, field: &str) -> Result<[f32; N], ConfigError> {
    let Some(value) = fields.get(field) else { return Ok([1.0; N]) };
    let numbers = value.as_array().and_then(|list| {
        let numbers: Option<Vec<f32>> = list.iter().map(|x| x.as_f64().map(|x| x as f32)).collect();
        numbers?.try_into().ok()
    });
    numbers.ok_or_else(|| fields.error(field, format!("{N} numbers")))
}

/// Refuses products of sizes that make a layer too wide.
pub(super) fn check_width(
    fields: Fields<'_>,
    field: &str,
    count: usize,
    width: usize,
) -> Result<(), ConfigError> {
    match count as u64 * width as u64 <= MAX_WIDTH / 8 {
        true => Ok(()),
        false => Err(fields.error(field, format!("at most {} / {count}", MAX_WIDTH / 8))),
    }
}

/// Refuses other activations than SiLU.
pub(super) fn silu(fields: Fields<'_>, field: &str) -> Result<(), ConfigError> {
    match fields.text(field)? {
        None | Some("silu" | "swish") => Ok(()),
        Some(_) => Err(fields.error(field, "silu in a model with recurrent layers")),
    }
}

/// True for each layer that is not in the list of a field; without the field for all.
pub(super) fn recurs_but_at(
    fields: Fields<'_>,
    field: &str,
    layers: usize,
) -> Result<Vec<bool>, ConfigError> {
    let attend = fields.tokens(field)?;
    Ok((0..layers).map(|layer| !attend.iter().any(|at| *at as usize == layer)).collect())
}

/// Mixing by `layer_types`, in which `recurrent` or its older name names the layers of the mixer, or else by
/// `default`: true for them.
pub(super) fn by_layer_type(
    fields: Fields<'_>,
    recurrent: &str,
    layers: usize,
    default: impl Fn() -> Result<Vec<bool>, ConfigError>,
) -> Result<Vec<Mixing>, ConfigError> {
    let of = |recurs: bool| if recurs { Mixing::Recurrent } else { Mixing::Attention };
    let Some(value) = fields.get("layer_types") else {
        return Ok(default()?.into_iter().map(of).collect());
    };
    let wrong = || fields.error("layer_types", format!("{layers} of full_attention or {recurrent}"));
    let types = value.as_array().filter(|types| types.len() == layers).ok_or_else(wrong)?;
    let parse = |layer_type: &Value| match layer_type.as_str() {
        Some("full_attention" | "attention") => Ok(Mixing::Attention),
        Some(name) if name == recurrent => Ok(Mixing::Recurrent),
        Some("mamba") if recurrent == "linear_attention" => Ok(Mixing::Recurrent),
        _ => Err(wrong()),
    };
    types.iter().map(parse).collect()
}
