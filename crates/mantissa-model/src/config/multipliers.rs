//! Constant factors of the parts of a layer.

use crate::fields::{ConfigError, Fields};
use crate::mixer::rules::list;

/// Constant factors of attention, mixer and MLP (Falcon-H1, from its maximal update parametrization).
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Multipliers {
    /// Factor of the attention scores, which [`attention_scale`](super::ModelConfig::attention_scale) includes.
    pub scores: f32,
    /// Factor of the joined heads.
    pub attended: f32,
    /// Factor of the mixer's result.
    pub mixed: f32,
    /// Factor of the MLP's gate before its activation.
    pub gate: f32,
    /// Factor of the MLP's inner activation.
    pub inner: f32,
}

impl Multipliers {
    /// Parses the factors. Those of inputs apply to the results: no projection has a bias.
    pub(super) fn parse(fields: Fields<'_>) -> Result<Self, ConfigError> {
        let factor = |field| Ok(fields.optional_number(field)?.unwrap_or(1.0) as f32);
        let input = factor("attention_in_multiplier")?;
        let [gate, inner] = list(fields, "mlp_multipliers")?;
        Ok(Multipliers {
            scores: input * input * factor("key_multiplier")?,
            attended: input * factor("attention_out_multiplier")?,
            mixed: factor("ssm_out_multiplier")?,
            gate,
            inner,
        })
    }
}
