//! Attention and MLP of each layer alone: the source with one part taken from the quantized model, by measured KL
//! ([`crate::sensitivity`]).

use mantissa_model::LinearInfo;

use super::examination::{Examination, Examined};
use super::finding::{Finding, Location};
use super::measurements::Alone;
use crate::error::Result;
use crate::sensitivity::{Baseline, Unit};
use crate::subject::is_plain;

/// Smallest KL of a part that is a finding, nats/token.
const KL: f64 = 0.05;

/// How many times the KL of the median part it must be: the largest has up to 4.4 times in the embedded
/// model, in 3 to 8 bits (measured 2026-11-26).
const TIMES: f64 = 16.0;

/// Measures every part of the model of `of` alone; empty without a source.
///
/// # Errors
/// A model that cannot be loaded or run.
pub(super) fn alone(of: &Examined<'_>) -> Result<Vec<Alone>> {
    let Some(reference) = of.request.reference else { return Ok(Vec::new()) };
    let files = of.request.files;
    let (mut units, mut names) = (Vec::new(), Vec::new());
    for layer in 0..of.config.num_hidden_layers {
        let linears = of.config.layer_linears(layer);
        let (attention, mlp): (Vec<LinearInfo>, Vec<LinearInfo>) = linears
            .into_iter()
            .filter(|info| !is_plain(files, &info.module))
            .partition(|info| info.kind.input().turn() < mantissa_model::LinearInput::GateUp.turn());
        for (part, linears) in [("attention", attention), ("mlp", mlp)] {
            if !linears.is_empty() {
                units.push(Unit { layer, linears });
                names.push((layer, part));
            }
        }
    }
    if units.is_empty() {
        return Ok(Vec::new());
    }
    let baseline = Baseline::new(reference, &of.trials.windows, of.request.threads)?;
    let found = baseline.measure(files, &units, &mut |_| {})?;
    let alone = |((layer, part), kl): ((usize, &'static str), mantissa_eval::stats::Estimate)| Alone {
        layer,
        part,
        kl: kl.mean,
        kl_se: kl.se,
    };
    Ok(names.into_iter().zip(found).map(alone).collect())
}

/// Finds a part that costs far more than the others.
pub(super) struct Sensitivity;

impl Examination for Sensitivity {
    fn name(&self) -> &'static str {
        "sensitivity"
    }

    fn question(&self) -> &'static str {
        "Is the loss spread over the layers?"
    }

    fn lacks(&self, of: &Examined<'_>) -> Option<&'static str> {
        if of.request.reference.is_none() {
            return Some("no --reference");
        }
        of.alone.is_empty().then_some("no layer is quantized")
    }

    fn findings(&self, of: &Examined<'_>) -> Result<Vec<Finding>> {
        let Some(compared) = &of.compared else { return Ok(Vec::new()) };
        let all: f64 = of.alone.iter().map(|part| part.kl).sum();
        // Rotated or rescaled layers do not fit the source's one by one: their KLs exceed the KL of the whole model.
        if all > 3.0 * compared.kl + KL {
            return Ok(Vec::new());
        }
        let mut sorted: Vec<f64> = of.alone.iter().map(|part| part.kl).collect();
        sorted.sort_by(f64::total_cmp);
        let median = sorted[sorted.len() / 2];
        let Some(most) = of.alone.iter().max_by(|a, b| a.kl.total_cmp(&b.kl)) else { return Ok(Vec::new()) };
        if most.kl < KL || most.kl < TIMES * median || most.kl < all / 2.0 {
            return Ok(Vec::new());
        }
        let names = &of.request.names;
        Ok(vec![Finding {
            examination: self.name(),
            place: Location { layer: Some(most.layer), part: most.part.to_owned(), ..Location::default() },
            found: format!(
                "quantized alone it costs KL {}, the median part {median:.4}, all parts {all:.4}",
                of.shown(most.kl, most.kl_se)
            ),
            figures: [("kl", most.kl), ("kl_se", most.kl_se), ("kl_median", median), ("kl_sum", all)].into(),
            remedy: "give this part more bits; fit chooses them by measured KL".to_owned(),
            command: format!(
                "mantissa fit {} --budget 4.5bpw {} --out {}-fitted",
                names.source, names.text, names.stem
            ),
        }])
    }
}
