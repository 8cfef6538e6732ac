//! Constant factors of a model, and limits of scores and logits.

use super::attention::Heads;
use crate::fields::{ConfigError, Fields};
use crate::rope::{RopeScaling, yarn_mscale};
use crate::sizes::Latent;
use mantissa_arch::Architecture;
use mantissa_arch::rules::{LogitScale, QueryScale};

/// Constant factors of a model.
pub(super) struct Scales {
    pub(super) embedding: Option<f32>,
    pub(super) residual: f32,
    pub(super) attention: Option<f32>,
    pub(super) logits: Option<f32>,
}

impl Scales {
    pub(super) fn parse(
        fields: Fields<'_>,
        architecture: &Architecture,
        hidden: usize,
    ) -> Result<Self, ConfigError> {
        let own = architecture.scaled_embedding.then_some((hidden as f32).sqrt());
        let Some(rules) = architecture.scales else {
            return Ok(Scales { embedding: own, residual: 1.0, attention: None, logits: None });
        };
        let factor = |field: Option<&str>| match field {
            Some(field) => Ok(Some(fields.optional_positive(field)?.unwrap_or(1.0))),
            None => Ok(None),
        };
        let residual = factor(rules.residual)?.unwrap_or(1.0);
        let embedding = factor(rules.embedding)?.unwrap_or(1.0) / residual;
        let logits = match rules.logits {
            Some(LogitScale { field, default, divides }) => {
                let value = fields.optional_positive(field)?.unwrap_or(default);
                Some(if divides { 1.0 / value } else { value })
            }
            None => None,
        };
        let used = |scale: f64| (scale != 1.0).then_some(scale as f32);
        Ok(Scales {
            embedding: own.or(used(embedding)),
            residual: residual as f32,
            attention: factor(rules.attention)?.map(|scale| scale as f32),
            logits: logits.and_then(used),
        })
    }

    /// Returns the factor of the scores: the one that the config states, or that of the heads' width.
    pub(super) fn scores(
        &self,
        fields: Fields<'_>,
        architecture: &Architecture,
        heads: &Heads,
        latent: Option<Latent>,
        scaling: &RopeScaling,
    ) -> Result<f32, ConfigError> {
        if let Some(stated) = self.attention {
            return Ok(stated);
        }
        let width = match architecture.query_scale {
            QueryScale::Field(field, default) => fields.optional_positive(field)?.unwrap_or(default),
            QueryScale::One => 1.0,
            QueryScale::Head => latent.map_or(heads.dim, |latent| latent.head()) as f64,
        };
        // DeepSeek applies YaRN's factor to the scores as well as to cosines and sines.
        let mscale = match scaling {
            RopeScaling::Yarn(yarn) if latent.is_some() && yarn.mscale_all_dim != 0.0 => {
                yarn_mscale(yarn.factor, yarn.mscale_all_dim)
            }
            _ => 1.0,
        };
        Ok((width.powf(-0.5) * mscale * mscale) as f32)
    }

    /// Epsilon of norms that read the residual stream divided by the factor.
    pub(super) fn eps(&self, fields: Fields<'_>, eps: f32) -> Result<f32, ConfigError> {
        let divided = eps / (self.residual * self.residual);
        match divided.is_finite() && divided > 0.0 {
            true => Ok(divided),
            false => {
                Err(fields
                    .error("residual_multiplier", "a number whose square divides rms_norm_eps in float32"))
            }
        }
    }
}

/// Parses a limit that `rule` allows: the value of `field`, none if that is null, the default if it is absent.
pub(super) fn softcap(
    fields: Fields<'_>,
    field: &str,
    rule: Option<Option<f64>>,
) -> Result<Option<f32>, ConfigError> {
    let given = match rule {
        Some(default) if !fields.has(field) => default,
        Some(_) => fields.optional_positive(field)?,
        None => None,
    };
    Ok(given.map(|cap| cap as f32))
}
