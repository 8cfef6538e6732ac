//! Low-bit attention operands, rounded as in kernels with 8-bit products (SageAttention, Zhang et al. 2024, arXiv
//! 2410.02367; FlashAttention-3, Shah et al. 2024, arXiv 2407.08608, sec. 3.3). Measures their quality loss,
//! independent of the cache's scheme.
//!
//! Text: items separated by commas. `int8` and `fp8` set all operands; `q=SCHEME`, `k=SCHEME` and `v=SCHEME` set one
//! each, with a row per token and head (`int8-head`, `fp8-e4m3-head`) or token; `p=int8`, `p=fp8-e4m3` … set the
//! weights, in [0, 1] before normalization, with 1 mapped to the largest element. `rotate` multiplies queries and
//! keys by a Hadamard matrix before rounding, which changes no score (FlashAttention-3's incoherent processing).
//! `smooth` subtracts the mean of each channel of the keys over a sequence before rounding. This shifts all scores of
//! a query by one number, which the softmax cancels (SageAttention, sec. 4.2).

use std::fmt;
use std::str::FromStr;

use mantissa_kernels::Element;
use mantissa_num::{Hadamard, Scheme, parse_activation};

use crate::config::ModelConfig;
use crate::error::LoadError;
use crate::input::fast_element;
use crate::kv::codec::{RowCodec, is_by_head};
use crate::kv::side::Side;

/// Rounding of the operands of attention. Parses from and prints to text: see the [module](self).
#[derive(Clone, Debug, Default, PartialEq)]
pub struct AttentionOperands {
    /// Queries.
    pub q: Option<Scheme>,
    /// Keys.
    pub k: Option<Scheme>,
    /// Values.
    pub v: Option<Scheme>,
    /// Weights: a scheme per token, of which only the elements count.
    pub p: Option<Scheme>,
    /// True if queries and keys are multiplied by a Hadamard matrix first.
    pub rotate: bool,
    /// True if the mean of the keys is subtracted first.
    pub smooth: bool,
}

/// The text does not parse.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error(
    "attention operands \"{text}\": expected int8, fp8, q=SCHEME, k=SCHEME, v=SCHEME, p=ELEMENT, rotate or smooth, got {found}"
)]
pub struct OperandsError {
    text: String,
    found: String,
}

impl FromStr for AttentionOperands {
    type Err = OperandsError;

    fn from_str(text: &str) -> Result<Self, OperandsError> {
        let fault = |found: String| OperandsError { text: text.into(), found };
        let scheme = |name: &str| parse_activation(name).map(Some).map_err(|error| fault(error.to_string()));
        let element = |name: &str| {
            let scheme = scheme(&format!("{name}-token"))?.filter(|scheme| fast_element(scheme).is_some());
            scheme.map(Some).ok_or_else(|| fault(format!("p={name}")))
        };
        let mut all = AttentionOperands::default();
        for part in text.split(',') {
            match part.split_once('=') {
                Some(("q", name)) => all.q = scheme(name)?,
                Some(("k", name)) => all.k = scheme(name)?,
                Some(("v", name)) => all.v = scheme(name)?,
                Some(("p", name)) => all.p = element(name)?,
                None if part == "rotate" => all.rotate = true,
                None if part == "smooth" => all.smooth = true,
                None if part == "int8" || part == "fp8" => {
                    let name = if part == "fp8" { "fp8-e4m3" } else { part };
                    let heads = scheme(&format!("{name}-head"))?;
                    (all.q, all.k, all.v, all.p) = (heads.clone(), heads.clone(), heads, element(name)?);
                }
                _ => return Err(fault(format!("\"{part}\""))),
            }
        }
        Ok(all)
    }
}

impl fmt::Display for AttentionOperands {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let weights = self.p.as_ref().map(|p| p.to_string().trim_end_matches("-token").to_owned());
        let names = [&self.q, &self.k, &self.v].map(|scheme| scheme.as_ref().map(Scheme::to_string));
        let all = ["q", "k", "v"].into_iter().zip(names).chain([("p", weights)]);
        let named = all.filter_map(|(name, scheme)| Some(format!("{name}={}", scheme?)));
        let flags = [(self.rotate, "rotate"), (self.smooth, "smooth")];
        let flags = flags.into_iter().filter(|(on, _)| *on).map(|(_, name)| name.to_owned());
        f.write_str(&named.chain(flags).collect::<Vec<_>>().join(","))
    }
}

impl AttentionOperands {
    /// Builds the rounding of a layer's operands.
    ///
    /// # Errors
    /// [`LoadError::AttentionOperands`] if the heads cannot be rounded that way.
    pub(crate) fn rounding(&self, config: &ModelConfig) -> Result<OperandRounding, LoadError> {
        let head = config.head_dim;
        let refused = |allowed| LoadError::AttentionOperands { operands: self.to_string(), allowed };
        if config.latent.is_some() {
            return Err(refused("models whose cache holds heads, not latents"));
        }
        if config.attention_layers().next().is_none() {
            return Err(refused("models with layers whose keys and values are cached"));
        }
        let hadamard =
            || Hadamard::new(head).ok_or_else(|| refused("heads with a width that has a Hadamard matrix"));
        let rotation = self.rotate.then(hadamard).transpose()?;
        let side = |scheme: &Option<Scheme>, width: usize, rotation: &Option<Hadamard>| {
            let Some(scheme) = scheme else { return Ok(None) };
            let codec = RowCodec::new(scheme, if is_by_head(scheme) { head } else { width })
                .map_err(|_| refused("schemes with a scale per head, token or group of a token"))?;
            Ok::<_, LoadError>(Some(Side::tokens(codec, width, rotation.clone())))
        };
        let width = config.key_value_width();
        Ok(OperandRounding {
            q: side(&self.q, config.query_width(), &rotation)?,
            k: side(&self.k, width, &rotation)?,
            v: side(&self.v, width, &None)?,
            p: self.p.as_ref().and_then(fast_element),
            smooth: self.smooth,
        })
    }
}

/// Rounds the operands of one layer's attention.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct OperandRounding {
    q: Option<Side>,
    k: Option<Side>,
    v: Option<Side>,
    p: Option<Element>,
    smooth: bool,
}

impl OperandRounding {
    /// Rounds queries after RoPE, `[tokens, query width]`.
    pub(crate) fn queries(&self, q: &mut [f32]) {
        self.q.iter().for_each(|side| side.round_trip(q));
    }

    /// Rounds all keys of a sequence after RoPE, and its values, `[tokens, key width]` each.
    pub(crate) fn keys_and_values(&self, k: &mut [f32], v: &mut [f32]) {
        if let Some(side) = &self.k {
            let means = if self.smooth { means(k, side.width()) } else { vec![0.0; side.width()] };
            let each = |k: &mut [f32], sign: f32| {
                k.chunks_exact_mut(means.len()).for_each(|k| {
                    k.iter_mut().zip(&means).for_each(|(k, mean)| *k += sign * mean);
                });
            };
            each(k, -1.0);
            side.round_trip(k);
            // Scores without the means differ by one number per query.
            each(k, 1.0);
        }
        self.v.iter().for_each(|side| side.round_trip(v));
    }

    /// True if keys or values are rounded.
    pub(crate) fn rounds_past(&self) -> bool {
        self.k.is_some() || self.v.is_some()
    }

    /// Element that the weights are rounded to.
    pub(crate) fn weights(&self) -> Option<Element> {
        self.p
    }
}

/// Mean of each channel of `x` `[tokens, width]`.
fn means(x: &[f32], width: usize) -> Vec<f32> {
    let mut sums = vec![0f64; width];
    let rows = x.chunks_exact(width);
    let tokens = rows.len().max(1) as f64;
    rows.for_each(|row| sums.iter_mut().zip(row).for_each(|(sum, x)| *sum += f64::from(*x)));
    sums.into_iter().map(|sum| (sum / tokens) as f32).collect()
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    #[test]
    fn operands_round_trip_as_text() {
        for text in [
            "q=int8-head,k=int8-head,v=int8-head,p=int8",
            "q=fp8-e4m3-token,p=fp8-e5m2,rotate",
            "k=int4-head,smooth",
        ] {
            assert_eq!(text.parse::<AttentionOperands>().unwrap().to_string(), text);
        }
        let fp8: AttentionOperands = "fp8,rotate".parse().unwrap();
        assert_eq!(fp8.to_string(), "q=fp8-e4m3-head,k=fp8-e4m3-head,v=fp8-e4m3-head,p=fp8-e4m3,rotate");
        for text in ["", "int9", "p=nf4", "p=int8-head", "q=", "w=int8-head", "rotated"] {
            assert!(
                text.parse::<AttentionOperands>().unwrap_err().to_string().contains("expected"),
                "{text}"
            );
        }
    }

    /// An offset common to all keys costs them bits unless it is subtracted first.
    #[test]
    fn smoothing_preserves_the_precision_of_keys_with_a_common_offset() {
        let config = ModelConfig::from_json(&crate::config::example("llama"), "config.json").unwrap();
        let width = config.key_value_width();
        let x: Vec<f32> = (0..20 * width)
            .map(|i| (i as f32 * 0.7).sin() + if i % width == 3 { 100.0 } else { 0.0 })
            .collect();
        let error = |text: &str| {
            let rounding = text.parse::<AttentionOperands>().unwrap().rounding(&config).unwrap();
            let (mut k, mut v) = (x.clone(), x.clone());
            rounding.keys_and_values(&mut k, &mut v);
            assert!(v == x);
            k.iter().zip(&x).map(|(a, b)| (a - b).abs()).fold(0f32, f32::max)
        };
        let (plain, smooth) = (error("k=int8-head"), error("k=int8-head,smooth"));
        assert!(plain > 0.3 && smooth < 0.02 && smooth > 0.0, "{plain} {smooth}");
    }
}
