//! Gated short convolution of a configuration.

use super::Recurrent;
use super::rules::{MAX_KERNEL, MixerRules, all_have_mlp, by_layer_type, recurs_but_at};

/// Sizes of a gated short convolution.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ShortConvolution {
    /// Width of the residual stream, the channels of the convolution.
    pub hidden: usize,
    /// Tokens that the convolution covers.
    pub kernel: usize,
    /// True if convolution and projections have biases.
    pub bias: bool,
}

/// Short convolution in layers whose `layer_types` is `conv`, or else in those not in `full_attn_idxs`.
pub(crate) const SHORT_CONVOLUTION: MixerRules = MixerRules {
    mixer: |fields, around| {
        let kernel = fields.optional_size("conv_L_cache", 1..=MAX_KERNEL)?.unwrap_or(3);
        let bias = fields.flag("conv_bias", false)?;
        Ok(Recurrent::ShortConvolution(ShortConvolution { hidden: around.hidden, kernel, bias }))
    },
    halves: |fields, layers| {
        let mixing = by_layer_type(fields, "conv", layers, || {
            let Some(_) = fields.get("full_attn_idxs") else { return Ok(vec![false; layers]) };
            recurs_but_at(fields, "full_attn_idxs", layers)
        })?;
        Ok(all_have_mlp(mixing))
    },
    layers: None,
};
