//! Spikes: a few tokens, usually the first or punctuation, whose inputs are far larger than all others (massive
//! activations, Sun et al. 2024, arXiv:2402.17762). A range per token contains them; with one range for all tokens
//! the others lose their codes.

use super::activations::{InputStats, SPIKE};
use super::examination::{Examination, Examined};
use super::finding::{Finding, Location};
use crate::error::Result;

/// Relative error of the products of ordinary tokens with one int8 range: 2 to 22 % in the test models, whose largest
/// token has up to 50 times the amax of the median (measured 2026-11-26).
const ERROR: f64 = 0.3;

/// How much larger that error is than with the range of ordinary tokens.
const TIMES: f64 = 5.0;

/// Finds spiking tokens that one range for all tokens suffers from.
pub(super) struct Spikes;

impl Examination for Spikes {
    fn name(&self) -> &'static str {
        "token-spikes"
    }

    fn question(&self) -> &'static str {
        "Do a few tokens, such as BOS, take the codes of all others where inputs have one range?"
    }

    fn lacks(&self, _: &Examined<'_>) -> Option<&'static str> {
        None
    }

    fn findings(&self, of: &Examined<'_>) -> Result<Vec<Finding>> {
        let inputs =
            of.seen.layers.iter().flat_map(|layer| layer.inputs.iter().map(move |i| (layer.layer, i)));
        let mut findings: Vec<Finding> = Vec::new();
        for (layer, input) in inputs.filter(|(_, input)| suffers(input)) {
            let Some(at) = input.token else { continue };
            let Some(token) = of.token(at.window, at.position) else { continue };
            let same = |known: &&mut Finding| known.place.token.as_ref().is_some_and(|t| t.id == token.id);
            if let Some(known) = findings.iter_mut().find(same) {
                *known.figures.entry("inputs").or_insert(1.0) += 1.0;
                continue;
            }
            let names = &of.request.names;
            let bos = if of.config.bos_token_id == Some(token.id) { "BOS, " } else { "" };
            let found = format!(
                "{bos}{} has {:.0} times the amax of the median token; with one int8 range for all tokens the products of the \
                 others lose {:.1} %, without the spike {:.1} %",
                token.described(),
                input.token_ratio,
                100.0 * input.error_by_tensor,
                100.0 * input.error_without_spikes
            );
            let part = format!("input of {}", input.modules.first().map_or("", String::as_str));
            findings.push(Finding {
                examination: self.name(),
                place: Location { layer: Some(layer), part, channel: Some(at.channel), token: Some(token) },
                found,
                figures: [
                    ("token_ratio", f64::from(input.token_ratio)),
                    ("error_by_tensor", input.error_by_tensor),
                    ("error_without_spikes", input.error_without_spikes),
                    ("inputs", 1.0),
                ]
                .into(),
                remedy: "give every token a range of its own (dynamic inputs), or quantize weights alone"
                    .to_owned(),
                command: format!(
                    "mantissa quantize {} --recipe w8a8 --out {}-w8a8",
                    names.source, names.stem
                ),
            });
        }
        Ok(findings)
    }
}

fn suffers(input: &InputStats) -> bool {
    // A range per token contains a spike, so nothing is to be said of a model that has one.
    let counts = input.scheme.is_none() || !input.dynamic;
    counts
        && input.token_ratio > SPIKE
        && input.error_by_tensor > ERROR
        && input.error_by_tensor > TIMES * input.error_without_spikes
}
