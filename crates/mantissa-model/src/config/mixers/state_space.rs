//! Mamba-2 of a configuration.

use serde_json::Value;

use super::blocks::{Block, blocks};
use super::rules::{
    Around, Halves, MAX_KERNEL, MixerRules, all_have_mlp, by_layer_type, check_width, list, recurs_but_at,
    silu,
};
use super::{Mixing, Recurrent};
use crate::config::fields::{ConfigError, Fields, MAX_WIDTH};

/// Sizes of a Mamba-2 mixer.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct StateSpace {
    /// Width of the residual stream.
    pub hidden: usize,
    /// Heads.
    pub heads: usize,
    /// Width of a head.
    pub head_dim: usize,
    /// Groups of heads with the same B and C; they divide the heads.
    pub groups: usize,
    /// Rows of a head's state.
    pub state: usize,
    /// Tokens that the convolution covers.
    pub kernel: usize,
    /// True if the convolution has a bias.
    pub convolution_bias: bool,
    /// True if the projections have biases.
    pub bias: bool,
    /// Factors of z, x, B, C and dt (Falcon-H1).
    pub factors: Option<[f32; 5]>,
    /// Norm of the result.
    pub norm: ResultNorm,
    /// Limits of a step Δ.
    pub steps: (f32, f32),
    /// Epsilon of the norm of the result.
    pub eps: f32,
}

/// Norm of the result of a Mamba-2 mixer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ResultNorm {
    /// No norm: the result is only gated.
    None,
    /// Norms the gated result.
    AfterGate,
    /// Gates the normed result.
    BeforeGate,
}

/// Mamba-2 in layers that `layer_types` states, or else in those not in `attn_layer_indices`; every layer has an MLP.
pub(crate) const STATE_SPACE: MixerRules = MixerRules {
    mixer: |fields, around| Ok(Recurrent::StateSpace(state_space(fields, around, &HYBRID)?)),
    halves: |fields, layers| {
        let mixing = by_layer_type(fields, "linear_attention", layers, || {
            recurs_but_at(fields, "attn_layer_indices", layers)
        })?;
        Ok(all_have_mlp(mixing))
    },
    layers: None,
};
/// Mamba-2 where a layer is a mixer, attention, an MLP or experts alone, by `layers_block_type` or `hybrid_override_pattern`
/// (Nemotron-H).
pub(crate) const STATE_SPACE_BLOCKS: MixerRules = MixerRules {
    mixer: |fields, around| Ok(Recurrent::StateSpace(state_space(fields, around, &BLOCKS)?)),
    halves: |fields, _| {
        let mixing: Vec<_> = blocks(fields)?.into_iter().map(Block::mixing).collect();
        let has_mlp = mixing.iter().map(|mixing| *mixing == Mixing::None).collect();
        Ok(Halves { mixing, has_mlp })
    },
    layers: Some(|fields| Ok(blocks(fields)?.len())),
};
/// Mamba-2 in every layer, and nothing else (Mamba-2).
pub(crate) const STATE_SPACE_ALONE: MixerRules = MixerRules {
    mixer: |fields, around| Ok(Recurrent::StateSpace(state_space(fields, around, &ALONE)?)),
    halves: |_, layers| Ok(Halves { mixing: vec![Mixing::Recurrent; layers], has_mlp: vec![false; layers] }),
    layers: None,
};
/// Mamba-2 in every layer, beside attention on the same input (Falcon-H1).
pub(crate) const PARALLEL_STATE_SPACE: MixerRules = MixerRules {
    mixer: |fields, around| Ok(Recurrent::StateSpace(parallel(fields, around)?)),
    halves: |_, layers| Ok(all_have_mlp(vec![Mixing::Both; layers])),
    layers: None,
};

/// Defaults of sizes, and fields that state the rest.
struct Form {
    groups: usize,
    state: usize,
    head_dim: Option<usize>,
    /// True if the width follows from that of the model.
    expands: bool,
    /// True if `time_step_limit` limits the steps, false if `time_step_min` does.
    limited: bool,
    /// Field of the convolution's activation, which may be that of the MLP.
    activation: &'static str,
}

const HYBRID: Form =
    Form { groups: 1, state: 256, head_dim: None, expands: true, limited: true, activation: "hidden_act" };
const ALONE: Form = Form { groups: 8, state: 128, head_dim: Some(64), ..HYBRID };
const BLOCKS: Form = Form { expands: false, limited: false, activation: "mamba_hidden_act", ..ALONE };

fn state_space(
    fields: Fields<'_>,
    &Around { hidden, eps, .. }: &Around,
    form: &Form,
) -> Result<StateSpace, ConfigError> {
    let size = |field, default| Ok(fields.optional_size(field, 1..=MAX_WIDTH)?.unwrap_or(default));
    let heads = size("mamba_n_heads", 128)?;
    let head_dim = match fields.get("mamba_d_head") {
        Some(Value::String(text)) if text == "auto" => None,
        _ => fields.optional_size("mamba_d_head", 1..=MAX_WIDTH)?.or(form.head_dim),
    };
    let expanded = fields.optional_size("mamba_expand", 1..=64)?.unwrap_or(2) * hidden;
    let inner = fields.optional_size("mamba_d_ssm", 1..=MAX_WIDTH)?.unwrap_or(expanded);
    let head_dim = head_dim.unwrap_or(inner / heads);
    if head_dim == 0 || (form.expands && heads.saturating_mul(head_dim) != inner) {
        let allowed = format!("{inner} (mamba_d_ssm, or mamba_expand times hidden_size) / {heads} heads");
        return Err(fields.error("mamba_d_head", allowed));
    }
    let steps = match form.limited {
        true => step_limits(fields)?,
        false => (fields.optional_number("time_step_min")?.unwrap_or(0.001) as f32, f32::INFINITY),
    };
    let mixer = StateSpace {
        hidden,
        heads,
        head_dim,
        groups: size("mamba_n_groups", form.groups)?,
        state: size("mamba_d_state", form.state)?,
        kernel: fields.optional_size("mamba_d_conv", 1..=MAX_KERNEL)?.unwrap_or(4),
        convolution_bias: fields.flag("mamba_conv_bias", true)?,
        bias: fields.flag("mamba_proj_bias", false)?,
        factors: None,
        norm: ResultNorm::AfterGate,
        steps,
        eps,
    };
    if !mixer.heads.is_multiple_of(mixer.groups) {
        return Err(fields.error("mamba_n_groups", format!("a divisor of the {heads} heads")));
    }
    check_width(fields, "mamba_d_head", mixer.heads, mixer.head_dim)?;
    check_width(fields, "mamba_d_state", mixer.groups.max(mixer.head_dim), mixer.state)?;
    silu(fields, form.activation)?;
    Ok(mixer)
}

/// Mamba-2 of Falcon-H1: an optional norm, and factors of the projected values.
fn parallel(fields: Fields<'_>, around: &Around) -> Result<StateSpace, ConfigError> {
    let mixer = state_space(fields, around, &HYBRID)?;
    let norm = match (fields.flag("mamba_rms_norm", false)?, fields.flag("mamba_norm_before_gate", true)?) {
        (false, _) => ResultNorm::None,
        (true, true) => ResultNorm::BeforeGate,
        (true, false) => ResultNorm::AfterGate,
    };
    let input = fields.optional_number("ssm_in_multiplier")?.unwrap_or(1.0) as f32;
    let factors = Some(list(fields, "ssm_multipliers")?.map(|factor: f32| factor * input));
    Ok(StateSpace { factors, norm, ..mixer })
}

/// Parses `time_step_limit`: two numbers, the second of which may be infinite.
fn step_limits(fields: Fields<'_>) -> Result<(f32, f32), ConfigError> {
    let Some(value) = fields.get("time_step_limit") else { return Ok((0.0, f32::INFINITY)) };
    // Infinity is no number in JSON; transformers writes it as an object or a string.
    let limit = |value: &Value| match value {
        Value::Object(object) => object.get("__float__").and_then(Value::as_str)?.parse::<f32>().ok(),
        Value::String(text) => text.parse::<f32>().ok(),
        value => value.as_f64().map(|limit| limit as f32),
    };
    match value.as_array().map(Vec::as_slice) {
        Some([low, high]) => match (limit(low), limit(high)) {
            (Some(low), Some(high)) if low <= high => Ok((low, high)),
            _ => Err(fields.error("time_step_limit", "two numbers, the smaller first")),
        },
        _ => Err(fields.error("time_step_limit", "two numbers, the smaller first")),
    }
}
