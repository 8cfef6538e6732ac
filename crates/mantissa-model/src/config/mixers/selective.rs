//! Mamba of a configuration.

use serde_json::Value;

use super::rules::{Around, MAX_KERNEL, MixerRules, all_have_mlp, check_width, silu};
use super::{Mixing, Recurrent};
use crate::config::fields::{ConfigError, Fields, MAX_WIDTH};

/// Sizes of a Mamba mixer.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct SelectiveScan {
    /// Width of the residual stream.
    pub hidden: usize,
    /// Channels.
    pub inner: usize,
    /// Values of a channel's state.
    pub state: usize,
    /// Width of δ.
    pub rank: usize,
    /// Tokens that the convolution covers.
    pub kernel: usize,
    /// True if the convolution has a bias.
    pub convolution_bias: bool,
    /// True if input and output projections have biases.
    pub bias: bool,
    /// Epsilon of the norms.
    pub eps: f32,
}

/// Mamba in all layers but those at `attn_layer_offset` of each `attn_layer_period` (Jamba).
pub(crate) const SELECTIVE_SCAN: MixerRules = MixerRules {
    mixer,
    halves: |fields, layers| {
        let limits = 1..=u64::from(u32::MAX);
        let period = fields.optional_size("attn_layer_period", limits)?.unwrap_or(8);
        let offset = fields.optional_size("attn_layer_offset", 0..=period as u64 - 1)?.unwrap_or(4);
        let of = |layer| if layer % period == offset { Mixing::Attention } else { Mixing::Recurrent };
        Ok(all_have_mlp((0..layers).map(of).collect()))
    },
    layers: None,
};

fn mixer(fields: Fields<'_>, &Around { hidden, eps, .. }: &Around) -> Result<Recurrent, ConfigError> {
    let rank = match fields.get("mamba_dt_rank") {
        Some(Value::String(text)) if text == "auto" => None,
        _ => fields.optional_size("mamba_dt_rank", 1..=MAX_WIDTH)?,
    };
    let mixer = SelectiveScan {
        hidden,
        inner: fields.optional_size("mamba_expand", 1..=64)?.unwrap_or(2) * hidden,
        state: fields.optional_size("mamba_d_state", 1..=MAX_WIDTH)?.unwrap_or(16),
        rank: rank.unwrap_or(hidden.div_ceil(16)),
        kernel: fields.optional_size("mamba_d_conv", 1..=MAX_KERNEL)?.unwrap_or(4),
        convolution_bias: fields.flag("mamba_conv_bias", true)?,
        bias: fields.flag("mamba_proj_bias", false)?,
        eps,
    };
    check_width(fields, "mamba_d_state", mixer.inner, mixer.state)?;
    check_width(fields, "mamba_expand", 1, mixer.inner)?;
    silu(fields, "hidden_act")?;
    Ok(Recurrent::SelectiveScan(mixer))
}
