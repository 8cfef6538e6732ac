//! Change of `[precision]` that removes the error of an operand.

use mantissa_num::{Format, Scheme};
use serde::Serialize;

use super::site::{Site, operand};
use crate::health::OperandHealth;
use crate::policy::{Gemm, Side};
use crate::policy::{OperandPolicy, Policy};
use crate::store::Precision;

/// Keys of `[precision]` with values, and why they help.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Remedy {
    /// Settings, such as `precision.dgrad.dy="fp8-e5m2-token"`.
    pub set: Vec<String>,
    /// Reason.
    pub why: String,
    /// Gradient error of the operand alone with these settings; `None` if that was not tried.
    pub error: Option<f64>,
}

/// Share of values that become 0 or are clipped from which on that is the reason.
const MUCH: f64 = 0.001;

/// Scheme that may replace an operand's, and why it helps.
pub(super) struct SchemeCandidate {
    pub(super) scheme: String,
    why: String,
}

impl SchemeCandidate {
    /// Lists schemes for an operand from the smallest change on, by what its rounding lost; the last one always helps.
    pub(super) fn all(site: Site, found: &OperandPolicy, health: Option<&OperandHealth>) -> Vec<Self> {
        let candidate =
            |scheme: &str, why: &str| SchemeCandidate { scheme: scheme.to_owned(), why: why.to_owned() };
        match Precision::of(&found.scheme.format) {
            Some(Precision::F16) => {
                vec![candidate("bf16", "bf16 has the range of f32"), candidate("f32", "f32 keeps all digits")]
            }
            Some(_) => vec![candidate("f32", "f32 keeps all digits")],
            None => {
                let lost = lost(health);
                let finer = finer(site, &found.scheme).into_iter();
                let finer = finer.filter(|(scheme, _)| scheme.parse::<Scheme>().is_ok());
                let last = ("bf16".to_owned(), "bf16 keeps range and eight digits");
                let all = finer.chain([last]);
                all.map(|(scheme, why)| SchemeCandidate { scheme, why: format!("{lost}; {why}") }).collect()
            }
        }
    }
}

impl Remedy {
    /// Makes the remedy of an operand that `candidate` replaces, with `error` alone.
    pub(super) fn new(
        site: Site,
        found: &OperandPolicy,
        policy: &Policy,
        candidate: &SchemeCandidate,
        error: Option<f64>,
    ) -> Self {
        let set = match site.layer {
            None => vec![format!("precision.head=\"{}\"", candidate.scheme)],
            Some(_) => settings(site, found, policy, &candidate.scheme),
        };
        Remedy { set, why: candidate.why.clone(), error }
    }

    /// Proposes a loss scale for gradients that f16 rounds to 0 without one.
    pub(super) fn scaling(
        site: Site,
        found: &OperandPolicy,
        policy: &Policy,
        health: Option<&OperandHealth>,
    ) -> Option<Self> {
        let health = health?;
        let lifts = Precision::of(&found.scheme.format) == Some(Precision::F16)
            && policy.weights == Precision::F16
            && policy.scaling.is_none()
            && operand(site.gemm, site.side) == "dy"
            && health.underflowed > MUCH
            && health.saturated == 0.0;
        let why = format!("{} of the values become 0; a loss scale lifts them", percent(health.underflowed));
        lifts.then(|| Remedy { set: vec!["precision.scaling=\"pytorch\"".to_owned()], why, error: None })
    }
}

/// Returns schemes with finer scales.
fn finer(site: Site, scheme: &Scheme) -> Vec<(String, &'static str)> {
    let text = scheme.to_string();
    let per_line = if operand(site.gemm, site.side) == "w" { "channel" } else { "token" };
    if matches!(&scheme.format, Format::Affine(affine) if affine.scale.is_none()) {
        return vec![(format!("{text}-{per_line}"), "a scale for each line fits the range to the values")];
    }
    let why = "a scale for each line keeps an outlier from the other lines";
    let blocks = "scales for blocks of 32 keep an outlier from all but its block";
    let Some((code, rest)) =
        ["-tensor", "-token", "-channel"].iter().find_map(|blocks| text.split_once(blocks))
    else {
        return Vec::new();
    };
    // A history of amax belongs to a scale per tensor.
    let rest = rest.split('@').next().unwrap_or_default();
    let lines = (format!("{code}-{per_line}{rest}"), why);
    let groups = (format!("{code}-g32{rest}"), blocks);
    if text.contains("-tensor") { vec![lines, groups] } else { vec![groups] }
}

/// Names what the rounding lost.
fn lost(health: Option<&OperandHealth>) -> String {
    let (under, over) = health.map_or((0.0, 0.0), |health| (health.underflowed, health.saturated));
    match (under > MUCH, over > MUCH) {
        (true, true) => format!("{} become 0, {} are clipped", percent(under), percent(over)),
        (true, false) => format!("{} of the values become 0", percent(under)),
        (false, true) => format!("{} of the values are clipped", percent(over)),
        (false, false) => "its values keep too few digits".to_owned(),
    }
}

/// Returns the settings that change the operand, in every matmul that rounds the same tensor to the same scheme.
fn settings(site: Site, found: &OperandPolicy, policy: &Policy, scheme: &str) -> Vec<String> {
    let name = operand(site.gemm, site.side);
    let same = |(gemm, side): &(Gemm, Side)| {
        (*gemm, *side) == (site.gemm, site.side)
            || operand(*gemm, *side) == name && side.of(gemm.of(&policy.linear)).scheme == found.scheme
    };
    let all = Gemm::ALL.into_iter().flat_map(|gemm| Side::ALL.map(|side| (gemm, side)));
    all.filter(same).map(|(gemm, _)| format!("precision.{}.{name}=\"{scheme}\"", gemm.name())).collect()
}

fn percent(share: f64) -> String {
    format!("{:.3} %", 100.0 * share)
}
