//! Rotary parameters of a configuration, in the new form (`rope_parameters`) and the old one (`rope_theta`,
//! `rope_scaling`).

use crate::fields::{ConfigError, Fields, MAX_POSITIONS};
use crate::rope::{LongRope, Rope, RopeScaling, Yarn, yarn_mscale};
use mantissa_arch::rules::RopeRules;

/// The rotary parameters of a model.
pub(super) struct Rotary {
    pub(super) global: Rope,
    /// Parameters of layers with a window, if they differ.
    pub(super) local: Option<Rope>,
    /// Width of the rotated part of a head.
    pub(super) rotated: usize,
}

/// Parses the parameters in the order of transformers 5.23: `rope_scaling` before `rope_parameters`, the object's own
/// `rope_theta` before the one at the top level. `widths` are those of the part of a head that may
/// be rotated: in layers with a window, or all, and in layers without one.
pub(super) fn parse(
    root: Fields<'_>,
    rules: &RopeRules,
    max_positions: usize,
    widths: [usize; 2],
) -> Result<Rotary, ConfigError> {
    let [width, _] = widths;
    let nested = match root.object("rope_scaling")? {
        Some(fields) => Some(fields),
        None => root.object("rope_parameters")?,
    };
    if let Some(local_theta) = rules.local_theta {
        let bases = (rules.theta, local_theta);
        return by_layer_type(root, nested, bases, rules.required, max_positions, widths);
    }
    if let Some(theta) = rules.compressed_theta {
        return by_compression(root, nested, (rules.theta, theta), max_positions, width);
    }
    let rotated = rotated(root, nested, rules.partial, width)?;
    for layer_type in ["full_attention", "sliding_attention"] {
        if let Some(fields) = [Some(root), nested].into_iter().flatten().find(|f| f.has(layer_type)) {
            return Err(fields.error(layer_type, "one set of rotary parameters for all layers"));
        }
    }
    let theta = root.optional_positive("rope_theta")?.unwrap_or(rules.theta);
    let global = match nested {
        // No default matches the published models.
        None if rules.required => {
            return Err(root.error("rope_parameters", "an object: this architecture scales its rotation"));
        }
        nested => match nested.filter(|_| rules.alpha) {
            Some(fields) if fields.get("alpha").is_some() && scaling_name(fields)?.1 == "dynamic" => {
                stretched(fields, theta, rotated)?
            }
            _ => one(root, nested, theta, max_positions, rotated)?,
        },
    };
    Ok(Rotary { global, local: None, rotated })
}

/// Parses one set for layers with a window and one for the others (Gemma 3). In the old form, the former have a base
/// of their own and the latter everything else.
fn by_layer_type(
    root: Fields<'_>,
    nested: Option<Fields<'_>>,
    (theta, local_theta): (f64, f64),
    required: bool,
    max_positions: usize,
    [width, global_width]: [usize; 2],
) -> Result<Rotary, ConfigError> {
    let global_theta = root.optional_positive("rope_theta")?.unwrap_or(theta);
    let local_theta = root.optional_positive("rope_local_base_freq")?.unwrap_or(local_theta);
    let by_type = nested.filter(|f| f.has("full_attention") || f.has("sliding_attention"));
    let (full, local) = match by_type {
        Some(fields) => (fields.object("full_attention")?, fields.object("sliding_attention")?),
        None => (nested, None),
    };
    if required && full.is_none() {
        return Err(root.error("rope_parameters", "an object: this architecture scales its rotation"));
    }
    for fields in [Some(root), full, local].into_iter().flatten() {
        // This form rotates heads completely, a part of them by 0.
        if fields.text("rope_type")? != Some("proportional") {
            whole(fields)?;
        }
    }
    let global = one(root, full, global_theta, max_positions, global_width)?;
    let local = one(root, local, local_theta, max_positions, width)?;
    Ok(Rotary { global, local: Some(local), rotated: width })
}

/// Parses one set for layers with compressed entries and one for those without (DeepSeek-V4): as transformers 5 writes
/// them, or as published, where only the former are scaled.
fn by_compression(
    root: Fields<'_>,
    nested: Option<Fields<'_>>,
    (theta, compressed_theta): (f64, f64),
    max_positions: usize,
    width: usize,
) -> Result<Rotary, ConfigError> {
    let theta = root.optional_positive("rope_theta")?.unwrap_or(theta);
    let compressed_theta = root.optional_positive("compress_rope_theta")?.unwrap_or(compressed_theta);
    let by_kind = nested.filter(|fields| fields.has("main") && fields.has("compress"));
    let (main, compressed) = match by_kind {
        Some(fields) => (fields.object("main")?, fields.object("compress")?),
        None => (None, nested),
    };
    let local = one(root, main, theta, max_positions, width)?;
    // The published form states the base of layers without entries inside.
    let mut global = one(root, compressed, compressed_theta, max_positions, width)?;
    if by_kind.is_none() {
        global.theta = compressed_theta;
    }
    // Rotated values keep their length unless the config says otherwise.
    let stated = compressed.is_some_and(|fields| fields.has("attention_factor"));
    if let RopeScaling::Yarn(yarn) = &mut global.scaling
        && !stated
    {
        yarn.attention_factor = 1.0;
    }
    Ok(Rotary { global, local: Some(local), rotated: width })
}

fn one(
    root: Fields<'_>,
    nested: Option<Fields<'_>>,
    outer_theta: f64,
    max_positions: usize,
    rotated: usize,
) -> Result<Rope, ConfigError> {
    let Some(fields) = nested else {
        return Ok(Rope { theta: outer_theta, scaling: RopeScaling::Default });
    };
    let theta = fields.optional_positive("rope_theta")?.unwrap_or(outer_theta);
    let scaling = match fields.text("rope_type")? {
        Some("factors") => factors(fields, "factors", rotated / 2).map(RopeScaling::Factors)?,
        _ => parse_scaling(root, fields, theta, max_positions, rotated)?,
    };
    Ok(Rope { theta, scaling })
}

/// Parses a base that `alpha` stretches as in NTK-aware scaling, `theta · alpha^(d / (d - 2))`. Configs call it dynamic, but it
/// does not depend on the length.
fn stretched(fields: Fields<'_>, outer_theta: f64, rotated: usize) -> Result<Rope, ConfigError> {
    let width = rotated as f64;
    let theta = fields.optional_positive("rope_theta")?.unwrap_or(outer_theta);
    let theta = theta * fields.positive("alpha")?.powf(width / (width - 2.0));
    match (theta as f32).is_finite() && theta as f32 > 0.0 {
        true => Ok(Rope { theta, scaling: RopeScaling::Default }),
        false => {
            let allowed =
                format!("a number with which rope_theta · alpha^({rotated} / ({rotated} - 2)) is finite");
            Err(fields.error("alpha", allowed))
        }
    }
}

/// Returns the field that names the scaling, and the name.
fn scaling_name(fields: Fields<'_>) -> Result<(&'static str, &str), ConfigError> {
    match fields.text("rope_type")? {
        Some(name) => Ok(("rope_type", name)),
        None => Ok(("type", fields.text("type")?.unwrap_or("default"))),
    }
}

/// Refuses a partial rotation.
fn whole(fields: Fields<'_>) -> Result<(), ConfigError> {
    match fields.optional_number("partial_rotary_factor")? {
        Some(factor) if factor != 1.0 => {
            Err(fields.error("partial_rotary_factor", "1: heads are rotated completely"))
        }
        _ => Ok(()),
    }
}

fn rotated(
    root: Fields<'_>,
    nested: Option<Fields<'_>>,
    default: Option<f64>,
    width: usize,
) -> Result<usize, ConfigError> {
    let Some(default) = default else {
        [Some(root), nested].into_iter().flatten().try_for_each(whole)?;
        return Ok(width);
    };
    // MiniMax-M2 states the width itself.
    if let Some(rotated) = root.optional_size("rotary_dim", 2..=width as u64)? {
        return match rotated.is_multiple_of(2) {
            true => Ok(rotated),
            false => Err(root.error("rotary_dim", "an even number: RoPE rotates pairs")),
        };
    }
    let stated = nested.filter(|fields| fields.get("partial_rotary_factor").is_some());
    let fields = stated.unwrap_or(root);
    let factor = fields.optional_positive("partial_rotary_factor")?.unwrap_or(default);
    let rotated = (width as f64 * factor) as usize;
    if factor > 1.0 || rotated == 0 || !rotated.is_multiple_of(2) {
        let allowed = format!("a share of the head width {width} that gives an even number");
        return Err(fields.error("partial_rotary_factor", allowed));
    }
    Ok(rotated)
}

fn parse_scaling(
    root: Fields<'_>,
    fields: Fields<'_>,
    theta: f64,
    max_positions: usize,
    rotated: usize,
) -> Result<RopeScaling, ConfigError> {
    const CONTEXT: &str = "original_max_position_embeddings";
    let context = || -> Result<usize, ConfigError> {
        let limits = 1..=MAX_POSITIONS;
        let stated = match root.optional_size(CONTEXT, limits.clone())? {
            Some(outside) => Some(outside),
            None => fields.optional_size(CONTEXT, limits)?,
        };
        Ok(stated.unwrap_or(max_positions))
    };
    let (key, name) = scaling_name(fields)?;
    match name {
        // "mrope" rotates by three positions, which are equal in text.
        "default" | "mrope" => Ok(RopeScaling::Default),
        "linear" => Ok(RopeScaling::Linear { factor: fields.positive("factor")? }),
        "llama3" => llama3(fields, context()?),
        "yarn" => yarn(fields, theta, context()?, max_positions),
        "proportional" => {
            let share = fields.optional_number("partial_rotary_factor")?.unwrap_or(1.0);
            if !(0.0..=1.0).contains(&share) {
                return Err(fields.error("partial_rotary_factor", "a number from 0 to 1"));
            }
            let factor = fields.optional_positive("factor")?.unwrap_or(1.0);
            Ok(RopeScaling::Proportional { rotated: (share * rotated as f64 / 2.0) as usize, factor })
        }
        // The first configs of Phi-3 said "su".
        "longrope" | "su" => long_rope(fields, context()?, max_positions, rotated),
        _ => Err(fields.error(key, "default, linear, llama3, longrope, proportional or yarn")),
    }
}

/// Parses one divisor for each frequency. No config of transformers has `factors`; a GGUF file does.
fn factors(fields: Fields<'_>, field: &str, count: usize) -> Result<Vec<f32>, ConfigError> {
    let positive =
        |value: &serde_json::Value| value.as_f64().map(|f| f as f32).filter(|f| f.is_finite() && *f > 0.0);
    let listed = fields.get(field).and_then(|value| value.as_array());
    let parsed: Option<Vec<f32>> = listed.and_then(|list| list.iter().map(positive).collect());
    match parsed.filter(|factors| factors.len() == count) {
        Some(factors) => Ok(factors),
        None => Err(fields.error(
            field,
            format!("{count} finite numbers greater than 0, half the rotated width of a head"),
        )),
    }
}

fn long_rope(
    fields: Fields<'_>,
    original_context: usize,
    max_positions: usize,
    rotated: usize,
) -> Result<RopeScaling, ConfigError> {
    let factor = match original_context == max_positions {
        true => fields.optional_positive("factor")?.unwrap_or(1.0),
        false => max_positions as f64 / original_context as f64,
    };
    let derived = match factor <= 1.0 {
        true => 1.0,
        false => (1.0 + factor.ln() / (original_context as f64).ln()).sqrt(),
    };
    let attention_factor = fields.optional_positive("attention_factor")?.unwrap_or(derived);
    if !attention_factor.is_finite() {
        let allowed = "more than 1 position";
        return Err(fields.error("original_max_position_embeddings", allowed));
    }
    Ok(RopeScaling::Long(LongRope {
        short: factors(fields, "short_factor", rotated / 2)?,
        long: factors(fields, "long_factor", rotated / 2)?,
        original_context,
        attention_factor,
    }))
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
    // The reference treats 0 as absent here.
    let or = |field: &str, default: f64| -> Result<f64, ConfigError> {
        match fields.optional_number(field)?.filter(|x| *x != 0.0) {
            Some(x) if x < 0.0 => Err(fields.error(field, "a number of at least 0")),
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
        mscale_all_dim: all_dim,
    }))
}
