//! Gated DeltaNet of a configuration.

use super::Recurrent;
use super::rules::{Around, MAX_KERNEL, MixerRules, all_have_mlp, by_layer_type, check_width, silu};
use crate::config::fields::{ConfigError, Fields, MAX_WIDTH};

/// Sizes of a gated DeltaNet.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct GatedDelta {
    /// Width of the residual stream.
    pub hidden: usize,
    /// Heads of queries and of keys; they divide the value heads.
    pub key_heads: usize,
    /// Heads of values and states.
    pub value_heads: usize,
    /// Width of a head of queries and keys.
    pub key_dim: usize,
    /// Width of a head of values.
    pub value_dim: usize,
    /// Tokens that the convolution covers.
    pub kernel: usize,
    /// Epsilon of the norm of the result.
    pub eps: f32,
    /// True if q, k, v and z are one projection, ordered by key head, and b and a another (Qwen3-Next).
    pub joined: bool,
}

/// Gated DeltaNet in layers whose `layer_types` is `linear_attention`, or else in all but the last of each
/// `full_attention_interval` (4).
pub(crate) const GATED_DELTA: MixerRules = rules(false);
/// [`GATED_DELTA`] with q, k, v and z in one projection, and b and a in another.
pub(crate) const JOINED_GATED_DELTA: MixerRules = rules(true);

const fn rules(joined: bool) -> MixerRules {
    MixerRules {
        mixer: if joined {
            |fields, around| mixer(fields, around, true)
        } else {
            |fields, around| mixer(fields, around, false)
        },
        halves: |fields, layers| {
            let mixing = by_layer_type(fields, "linear_attention", layers, || {
                let limits = 1..=u64::from(u32::MAX);
                let interval = fields.optional_size("full_attention_interval", limits)?.unwrap_or(4);
                Ok((1..=layers).map(|layer| !layer.is_multiple_of(interval)).collect())
            })?;
            Ok(all_have_mlp(mixing))
        },
        layers: None,
    }
}

fn mixer(
    fields: Fields<'_>,
    &Around { hidden, eps, .. }: &Around,
    joined: bool,
) -> Result<Recurrent, ConfigError> {
    let size = |field, default| Ok(fields.optional_size(field, 1..=MAX_WIDTH)?.unwrap_or(default));
    let mixer = GatedDelta {
        hidden,
        key_heads: size("linear_num_key_heads", 16)?,
        value_heads: size("linear_num_value_heads", 32)?,
        key_dim: size("linear_key_head_dim", 128)?,
        value_dim: size("linear_value_head_dim", 128)?,
        kernel: fields.optional_size("linear_conv_kernel_dim", 1..=MAX_KERNEL)?.unwrap_or(4),
        eps,
        joined,
    };
    if !mixer.value_heads.is_multiple_of(mixer.key_heads) {
        let allowed = format!("a multiple of linear_num_key_heads, which is {}", mixer.key_heads);
        return Err(fields.error("linear_num_value_heads", allowed));
    }
    check_width(fields, "linear_key_head_dim", mixer.key_heads, mixer.key_dim)?;
    check_width(fields, "linear_value_head_dim", mixer.value_heads, mixer.value_dim)?;
    check_width(fields, "linear_value_head_dim", mixer.key_dim, mixer.value_dim)?;
    // The convolution has the activation of the MLP, the gate of the result always SiLU.
    silu(fields, "hidden_act")?;
    Ok(Recurrent::GatedDelta(mixer))
}
