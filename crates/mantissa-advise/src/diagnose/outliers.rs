//! Outlier channels: a few channels of an input that are far larger than the rest (LLM.int8(), Dettmers et al. 2022,
//! arXiv:2208.07339). With one range per token they take the codes of all other channels.
//!
//! A ratio of magnitudes alone accuses nothing: a channel may be large because it matters. A finding needs both the
//! ratio and the error that int8 inputs cause in the products, and a rotation (QuaRot, Ashkboos et al. 2024,
//! arXiv:2404.00456) that removes most of it.

use super::activations::InputStats;
use super::examination::{Examination, Examined};
use super::finding::{Finding, Location};
use crate::error::Result;

/// Largest channel over the median channel. Inputs of the test models reach 14 (measured 2026-11-26); published
/// outliers are 50 to 1000 times the median.
const RATIO: f32 = 20.0;

/// Relative error of the products: int8 by token costs .4 to 2.7 % in the test models.
const ERROR: f64 = 0.08;

/// Share of the error that a rotation must remove: otherwise the input is wide for another reason.
const REMOVED: f64 = 0.5;

/// Finds outlier channels that int8 inputs suffer from.
pub(super) struct Outliers;

impl Examination for Outliers {
    fn name(&self) -> &'static str {
        "outlier-channels"
    }

    fn question(&self) -> &'static str {
        "Do a few channels take the codes of all others where inputs are quantized?"
    }

    fn lacks(&self, _: &Examined<'_>) -> Option<&'static str> {
        None
    }

    fn findings(&self, of: &Examined<'_>) -> Result<Vec<Finding>> {
        let inputs =
            of.seen.layers.iter().flat_map(|layer| layer.inputs.iter().map(move |i| (layer.layer, i)));
        let found: Vec<(usize, &InputStats)> = inputs.filter(|(_, input)| suffers(input)).collect();
        // One finding for each channel: a channel of the residual stream shows in every layer.
        let mut findings: Vec<Finding> = Vec::new();
        for (layer, input) in &found {
            let same = |finding: &&mut Finding| finding.place.channel == Some(input.channel);
            match findings.iter_mut().find(same) {
                Some(known) => *known.figures.entry("inputs").or_insert(1.0) += 1.0,
                None => findings.push(finding(of, *layer, input)),
            }
        }
        Ok(findings)
    }
}

fn suffers(input: &InputStats) -> bool {
    let error = input.error_own.filter(|_| input.dynamic).unwrap_or(input.error_by_token);
    // A stored range is examined by itself.
    let counts = input.scheme.is_none() || input.dynamic;
    let removed = input.error_rotated.is_none_or(|rotated| rotated < (1.0 - REMOVED) * error);
    counts && input.channel_ratio > RATIO && error > ERROR && removed
}

fn finding(of: &Examined<'_>, layer: usize, input: &InputStats) -> Finding {
    let names = &of.request.names;
    let part = format!("input of {}", input.modules.first().map_or("", String::as_str));
    let rotated = input.error_rotated.unwrap_or(f64::NAN);
    let found = format!(
        "channel {} has {:.0} times the amax of the median channel; int8 inputs cost {:.1} % of the products, {:.1} % after a \
         rotation; kurtosis {:.0}, {:.1} after it",
        input.channel,
        input.channel_ratio,
        100.0 * input.error_by_token,
        100.0 * rotated,
        input.kurtosis,
        input.kurtosis_rotated.unwrap_or(f64::NAN)
    );
    Finding {
        examination: "outlier-channels",
        place: Location { layer: Some(layer), part, channel: Some(input.channel), token: None },
        found,
        figures: [
            ("channel_ratio", f64::from(input.channel_ratio)),
            ("error_by_token", input.error_by_token),
            ("error_rotated", rotated),
            ("kurtosis", input.kurtosis),
            ("kurtosis_rotated", input.kurtosis_rotated.unwrap_or(f64::NAN)),
            ("inputs", 1.0),
        ]
        .into(),
        remedy: "quantize weights alone, or rotate the inputs (QuaRot) or move the scale into the weights (w8a8-smooth)"
            .to_owned(),
        command: format!("mantissa quantize {} --recipe rotate-w8a8 --out {}-rotated", names.source, names.stem),
    }
}
