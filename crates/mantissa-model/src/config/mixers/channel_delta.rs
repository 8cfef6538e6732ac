//! Kimi delta attention of a configuration.

use super::Recurrent;
use super::rules::{Around, MAX_KERNEL, MixerRules, all_have_mlp, by_layer_type, check_width, silu};
use crate::config::fields::{ConfigError, Fields, MAX_WIDTH};

/// Sizes of Kimi delta attention.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct ChannelDelta {
    /// Width of the residual stream.
    pub hidden: usize,
    /// Heads.
    pub heads: usize,
    /// Width of a head of queries, keys and values.
    pub head_dim: usize,
    /// Tokens that the convolutions cover.
    pub kernel: usize,
    /// Epsilon of the norm of the result.
    pub eps: f32,
}

/// Kimi delta attention in layers whose `layer_types` is `linear_attention`, or in the `kda_layers` of
/// `linear_attn_config`, counted from 1; else in all but every fourth layer, which is not the first (Kimi Linear).
pub(crate) const CHANNEL_DELTA: MixerRules = MixerRules {
    mixer,
    halves: |fields, layers| {
        let mixing = by_layer_type(fields, "linear_attention", layers, || match nested(fields)? {
            Some(nested) => {
                let recurrent = nested.tokens("kda_layers")?;
                Ok((1..=layers).map(|layer| recurrent.iter().any(|at| *at as usize == layer)).collect())
            }
            None => Ok((0..layers).map(|layer| layer == 0 || !layer.is_multiple_of(4)).collect()),
        })?;
        Ok(all_have_mlp(mixing))
    },
    layers: None,
};

/// Fields of the published checkpoints.
fn nested<'a>(fields: Fields<'a>) -> Result<Option<Fields<'a>>, ConfigError> {
    fields.object("linear_attn_config")
}

/// Parses the mixer by the fields of transformers, or by those of the published checkpoints.
fn mixer(fields: Fields<'_>, &Around { hidden, eps, .. }: &Around) -> Result<Recurrent, ConfigError> {
    let nested = nested(fields)?;
    let size = |own: &str, inner: &str, most, default| match nested {
        Some(nested) => Ok(nested.optional_size(inner, 1..=most)?.unwrap_or(default)),
        None => Ok(fields.optional_size(own, 1..=most)?.unwrap_or(default)),
    };
    let mixer = ChannelDelta {
        hidden,
        heads: size("linear_num_heads", "num_heads", MAX_WIDTH, 32)?,
        head_dim: size("linear_head_dim", "head_dim", MAX_WIDTH, 128)?,
        kernel: size("linear_conv_kernel_dim", "short_conv_kernel_size", MAX_KERNEL, 4)?,
        eps,
    };
    check_width(fields, "linear_num_heads", mixer.head_dim, mixer.heads)?;
    check_width(fields, "linear_head_dim", mixer.head_dim, mixer.head_dim)?;
    silu(fields, "hidden_act")?;
    Ok(Recurrent::ChannelDelta(mixer))
}
