//! The rotary parameters of a configuration, in the new (`rope_parameters`) and the old form (`rope_theta`,
//! `rope_scaling`).

use super::fields::{ConfigError, Fields};
use crate::rope::{Rope, RopeScaling, Yarn, yarn_mscale};

/// Reads the parameters as transformers 5.23 does: `rope_scaling` before `rope_parameters`, the object's own
/// `rope_theta` before the one beside it.
pub(super) fn parse(
    root: Fields<'_>,
    default_theta: f64,
    max_positions: usize,
    head_dim: usize,
) -> Result<Rope, ConfigError> {
    let nested = match root.object("rope_scaling")? {
        Some(fields) => Some(fields),
        None => root.object("rope_parameters")?,
    };
    for fields in [Some(root), nested].into_iter().flatten() {
        if fields.optional_number("partial_rotary_factor")?.is_some_and(|f| f != 1.0) {
            return Err(fields.error("partial_rotary_factor", "1: heads are rotated whole"));
        }
        for layer_type in ["full_attention", "sliding_attention"] {
            if fields.has(layer_type) {
                return Err(fields.error(layer_type, "one set of rotary parameters for all layers"));
            }
        }
    }
    let outer_theta = root.optional_positive("rope_theta")?;
    let Some(fields) = nested else {
        return Ok(Rope { theta: outer_theta.unwrap_or(default_theta), scaling: RopeScaling::Default });
    };
    let theta = fields.optional_positive("rope_theta")?.or(outer_theta).unwrap_or(default_theta);
    let scaling = match fields.text("rope_type")? {
        Some("factors") => factors(fields, head_dim / 2)?,
        _ => parse_scaling(root, fields, theta, max_positions)?,
    };
    Ok(Rope { theta, scaling })
}

fn parse_scaling(
    root: Fields<'_>,
    fields: Fields<'_>,
    theta: f64,
    max_positions: usize,
) -> Result<RopeScaling, ConfigError> {
    const CONTEXT: &str = "original_max_position_embeddings";
    let context = || -> Result<usize, ConfigError> {
        let limits = 1..=super::MAX_POSITIONS;
        let stated = match root.optional_size(CONTEXT, limits.clone())? {
            Some(outside) => Some(outside),
            None => fields.optional_size(CONTEXT, limits)?,
        };
        Ok(stated.unwrap_or(max_positions))
    };
    let (key, name) = match fields.text("rope_type")? {
        Some(name) => ("rope_type", name),
        None => ("type", fields.text("type")?.unwrap_or("default")),
    };
    match name {
        "default" => Ok(RopeScaling::Default),
        "linear" => Ok(RopeScaling::Linear { factor: fields.positive("factor")? }),
        "llama3" => llama3(fields, context()?),
        "yarn" => yarn(fields, theta, context()?, max_positions),
        _ => Err(fields.error(key, "default, linear, llama3 or yarn")),
    }
}

/// One divisor for each frequency; no config of transformers says this, a GGUF file does.
fn factors(fields: Fields<'_>, count: usize) -> Result<RopeScaling, ConfigError> {
    let positive =
        |value: &serde_json::Value| value.as_f64().map(|f| f as f32).filter(|f| f.is_finite() && *f > 0.0);
    let listed = fields.get("factors").and_then(|value| value.as_array());
    let parsed: Option<Vec<f32>> = listed.and_then(|list| list.iter().map(positive).collect());
    match parsed.filter(|factors| factors.len() == count) {
        Some(factors) => Ok(RopeScaling::Factors(factors)),
        None => {
            Err(fields.error("factors", format!("{count} finite numbers greater than 0, half of head_dim")))
        }
    }
}

fn llama3(fields: Fields<'_>, original_context: usize) -> Result<RopeScaling, ConfigError> {
    let low_freq_factor = fields.positive("low_freq_factor")?;
    let high_freq_factor = fields.positive("high_freq_factor")?;
    if high_freq_factor <= low_freq_factor {
        let allowed = format!("a number greater than low_freq_factor, which is {low_freq_factor}");
        return Err(fields.error("high_freq_factor", allowed));
    }
    let factor = fields.positive("factor")?;
    Ok(RopeScaling::Llama3 { factor, low_freq_factor, high_freq_factor, original_context })
}

fn yarn(
    fields: Fields<'_>,
    theta: f64,
    original_context: usize,
    max_positions: usize,
) -> Result<RopeScaling, ConfigError> {
    if theta <= 1.0 {
        return Err(fields.error_found("rope_theta", theta.to_string(), "a number greater than 1 with yarn"));
    }
    let stated = fields.optional_positive("factor")?;
    let factor = stated.unwrap_or(max_positions as f64 / original_context as f64);
    // The reference takes 0 for "not given" here.
    let or = |field: &str, default: f64| -> Result<f64, ConfigError> {
        match fields.optional_number(field)?.filter(|x| *x != 0.0) {
            Some(x) if x < 0.0 => Err(fields.error(field, "a number that is not negative")),
            x => Ok(x.unwrap_or(default)),
        }
    };
    let (mscale, all_dim) = (or("mscale", 0.0)?, or("mscale_all_dim", 0.0)?);
    let derived = match mscale != 0.0 && all_dim != 0.0 {
        true => yarn_mscale(factor, mscale) / yarn_mscale(factor, all_dim),
        false => yarn_mscale(factor, 1.0),
    };
    Ok(RopeScaling::Yarn(Yarn {
        factor,
        beta_fast: or("beta_fast", 32.0)?,
        beta_slow: or("beta_slow", 1.0)?,
        truncate: fields.flag("truncate", true)?,
        original_context,
        attention_factor: fields.optional_positive("attention_factor")?.unwrap_or(derived),
    }))
}
