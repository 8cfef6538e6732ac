//! Ranges from another text: stored ranges of inputs, scales of a KV cache, and ranges that a calibration text would
//! give. Too narrow a range cuts values off, too wide a one wastes codes; the error of the products shows both.

use super::examination::{Examination, Examined};
use super::finding::{Finding, Location};
use crate::error::Result;

/// An error is a finding if it exceeds `TIMES` times the error with a range of this text, plus `SLACK`: the bound of
/// `doctor`. Ranges of the embedded model from the built-in calibration text stay below 1.7 times on
/// its stories (measured 2026-11-26).
const TIMES: f64 = 3.0;
const SLACK: f64 = 0.02;

fn beyond(error: f64, refitted: f64) -> bool {
    error > TIMES * refitted + SLACK
}

/// Returns the command that computes stored ranges again.
fn recalibrate(of: &Examined<'_>) -> String {
    let names = &of.request.names;
    format!("mantissa recalibrate {} {} --out {}-recalibrated", names.model, names.calibrate, names.stem)
}

/// Finds stored ranges of inputs that do not fit the text.
pub(super) struct Inputs;

impl Examination for Inputs {
    fn name(&self) -> &'static str {
        "input-ranges"
    }

    fn question(&self) -> &'static str {
        "Do the stored ranges of inputs fit this text?"
    }

    fn lacks(&self, of: &Examined<'_>) -> Option<&'static str> {
        let mut inputs = of.seen.layers.iter().flat_map(|layer| &layer.inputs);
        let none = inputs.all(|input| input.range_ratio.is_none());
        none.then_some("the model stores no ranges of inputs")
    }

    fn findings(&self, of: &Examined<'_>) -> Result<Vec<Finding>> {
        let mut worst: Option<(Location, f64, f64, f32)> = None;
        let (mut inputs, mut all) = (0, 0);
        for layer in &of.seen.layers {
            for input in &layer.inputs {
                let (Some(own), Some(refitted), Some(ratio)) =
                    (input.error_own, input.error_refitted, input.range_ratio)
                else {
                    continue;
                };
                all += 1;
                if !beyond(own, refitted) {
                    continue;
                }
                inputs += 1;
                if worst.as_ref().is_none_or(|(_, known, ..)| own > *known) {
                    let part = format!("input of {}", input.modules.first().map_or("", String::as_str));
                    let at = Location {
                        layer: Some(layer.layer),
                        part,
                        channel: Some(input.channel),
                        token: None,
                    };
                    worst = Some((at, own, refitted, ratio));
                }
            }
        }
        let Some((place, own, refitted, ratio)) = worst else { return Ok(Vec::new()) };
        let found = format!(
            "this text needs {ratio:.2} times the stored range; the products lose {:.1} %, {:.1} % with a range of this text \
             ({inputs} of {all} inputs)",
            100.0 * own,
            100.0 * refitted
        );
        Ok(vec![Finding {
            examination: self.name(),
            place,
            found,
            figures: [
                ("range_ratio", f64::from(ratio)),
                ("error", own),
                ("error_refitted", refitted),
                ("inputs", f64::from(inputs)),
            ]
            .into(),
            remedy: "calibrate on text like the one that is served".to_owned(),
            command: recalibrate(of),
        }])
    }
}

/// Finds a calibration text whose ranges do not fit the text.
pub(super) struct Calibration;

impl Examination for Calibration {
    fn name(&self) -> &'static str {
        "calibration-text"
    }

    fn question(&self) -> &'static str {
        "Would ranges from the calibration text fit this text?"
    }

    fn lacks(&self, of: &Examined<'_>) -> Option<&'static str> {
        of.calibration.is_none().then_some("no --calibration")
    }

    fn findings(&self, of: &Examined<'_>) -> Result<Vec<Finding>> {
        let mut worst: Option<(Location, f64, f64)> = None;
        let (mut inputs, mut all) = (0, 0);
        for layer in &of.seen.layers {
            for input in &layer.inputs {
                let (Some(error), Some(on_text)) = (input.error_calibrated, input.error_on_text) else {
                    continue;
                };
                all += 1;
                if !beyond(error, on_text) {
                    continue;
                }
                inputs += 1;
                if worst.as_ref().is_none_or(|(_, known, _)| error > *known) {
                    let part = format!("input of {}", input.modules.first().map_or("", String::as_str));
                    let at = Location {
                        layer: Some(layer.layer),
                        part,
                        channel: Some(input.channel),
                        token: None,
                    };
                    worst = Some((at, error, on_text));
                }
            }
        }
        let Some((place, error, on_text)) = worst else { return Ok(Vec::new()) };
        let names = &of.request.names;
        let found = format!(
            "int8 ranges of the calibration text cost {:.1} % of the products on this text, its own {:.1} % ({inputs} of {all} \
             inputs)",
            100.0 * error,
            100.0 * on_text
        );
        Ok(vec![Finding {
            examination: self.name(),
            place,
            found,
            figures: [("error_calibrated", error), ("error_on_text", on_text), ("inputs", f64::from(inputs))]
                .into(),
            remedy: "calibrate on text like the one that is served, or add such text".to_owned(),
            command: format!("mantissa diagnose {} {} {}", names.model, names.text, names.calibrate),
        }])
    }
}

/// Finds stored scales of keys and values that do not fit the text.
pub(super) struct Cache;

impl Examination for Cache {
    fn name(&self) -> &'static str {
        "cache-scales"
    }

    fn question(&self) -> &'static str {
        "Do the stored scales of keys and values fit this text?"
    }

    fn lacks(&self, of: &Examined<'_>) -> Option<&'static str> {
        let none = of.seen.layers.iter().all(|layer| layer.cache.is_empty());
        none.then_some("the model stores no scales of keys and values")
    }

    fn findings(&self, of: &Examined<'_>) -> Result<Vec<Finding>> {
        let sides =
            of.seen.layers.iter().flat_map(|layer| layer.cache.iter().map(move |side| (layer.layer, side)));
        let bad: Vec<_> = sides.filter(|(_, side)| beyond(side.error, side.error_refitted)).collect();
        let Some((layer, side)) = bad.iter().max_by(|a, b| a.1.error.total_cmp(&b.1.error)) else {
            return Ok(Vec::new());
        };
        let found = format!(
            "this text needs {:.2} times the stored scale; {} lose {:.1} %, {:.1} % with scales of this text ({} sides of layers)",
            side.range_ratio,
            side.side,
            100.0 * side.error,
            100.0 * side.error_refitted,
            bad.len()
        );
        let part = format!("{} of {}", side.side, of.config.attention_module(*layer));
        Ok(vec![Finding {
            examination: self.name(),
            place: Location { layer: Some(*layer), part, channel: None, token: None },
            found,
            figures: [
                ("range_ratio", f64::from(side.range_ratio)),
                ("error", side.error),
                ("error_refitted", side.error_refitted),
                ("sides", bad.len() as f64),
            ]
            .into(),
            remedy: "compute the scales of the cache again, on text like the one that is served".to_owned(),
            command: recalibrate(of),
        }])
    }
}
