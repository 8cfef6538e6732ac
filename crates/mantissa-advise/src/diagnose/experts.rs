//! Experts that the text never reaches: a method would quantize them without having seen an input, and static ranges of
//! their inputs would be a guess.

use super::examination::{Examination, Examined};
use super::finding::{Finding, Location};
use crate::error::Result;

/// Tokens that an expert would get if all got the same number: with fewer, an expert without tokens may be chance. An
/// even router misses one of 64 with a probability below 1e-27.
const EXPECTED: f64 = 64.0;

/// Finds experts that no token of the text is routed to.
pub(super) struct Unseen;

impl Examination for Unseen {
    fn name(&self) -> &'static str {
        "unseen-experts"
    }

    fn question(&self) -> &'static str {
        "Does the text reach every expert?"
    }

    fn lacks(&self, of: &Examined<'_>) -> Option<&'static str> {
        if of.seen.layers.iter().all(|layer| layer.routed.is_empty()) {
            return Some("the model has no experts");
        }
        let short = expected(of).is_none_or(|expected| expected < EXPECTED);
        if short {
            return Some("the text is too short for the number of experts");
        }
        // An untrained router is uneven by chance.
        (!of.trials.knows()).then_some("the model does not know this text")
    }

    fn findings(&self, of: &Examined<'_>) -> Result<Vec<Finding>> {
        let Some(expected) = expected(of) else { return Ok(Vec::new()) };
        let unseen: Vec<(usize, usize)> = of
            .seen
            .layers
            .iter()
            .flat_map(|layer| {
                layer.routed.iter().enumerate().map(move |(e, tokens)| (layer.layer, e, *tokens))
            })
            .filter(|(.., tokens)| *tokens == 0)
            .map(|(layer, expert, _)| (layer, expert))
            .collect();
        let Some(&(layer, expert)) = unseen.first() else { return Ok(Vec::new()) };
        let names = &of.request.names;
        let all = of.seen.layers.iter().map(|layer| layer.routed.len()).sum::<usize>();
        let found = format!(
            "no token of {} is routed to expert {expert}, {expected:.0} would be with an even router; {} of {all} experts get none",
            of.seen.tokens,
            unseen.len()
        );
        Ok(vec![Finding {
            examination: self.name(),
            place: Location {
                layer: Some(layer),
                part: format!("expert {expert}"),
                channel: None,
                token: None,
            },
            found,
            figures: [("expected", expected), ("unseen", unseen.len() as f64), ("experts", all as f64)].into(),
            remedy: "calibrate with every token through every expert (--route-all-experts), or on text that reaches it"
                .to_owned(),
            command: format!(
                "mantissa quantize {} --recipe gptq-int4-g128 {} --route-all-experts --out {}-int4",
                names.source, names.calibrate, names.stem
            ),
        }])
    }
}

/// Returns the tokens of an expert under an even router.
fn expected(of: &Examined<'_>) -> Option<f64> {
    let experts = of.config.experts.as_ref()?;
    Some(of.seen.tokens as f64 * experts.per_token as f64 / f64::from(experts.count))
}
