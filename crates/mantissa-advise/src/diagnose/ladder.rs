//! Relaxation of a quantized model that fails its bound, from the cheapest step to the dearest: the cache in f32, then
//! inputs unquantized too, then half of the weights. The first step that passes is the remedy.

use mantissa_model::{CacheInF32, WeightSource};
use mantissa_quant::Unquantized;

use super::compared;
use super::examination::{Examination, Examined};
use super::finding::{Finding, Location};
use super::measurements::Step;
use crate::error::Result;

/// Relaxes the model of `of` step by step; empty without a source.
///
/// # Errors
/// A model that cannot be loaded or run.
pub(super) fn steps(of: &Examined<'_>) -> Result<Vec<Step>> {
    let (Some(whole), Some(reference)) = (&of.compared, of.request.reference) else { return Ok(Vec::new()) };
    let mut steps = vec![Step { relaxed: "nothing", kl: whole.kl }];
    if of.request.max_kl.is_none_or(|bound| whole.kl <= bound) {
        return Ok(steps);
    }
    let theirs = mantissa_model::load_config(reference)?;
    let cache = CacheInF32(of.request.files);
    let inputs = Unquantized::new(of.request.files);
    let relaxed: [(&str, &dyn WeightSource); 2] = [("the KV cache", &cache), ("inputs", &inputs)];
    for (relaxed, source) in relaxed {
        let found = compared::compare(
            (source, &of.config),
            (reference, &theirs),
            &of.trials.windows,
            of.request.threads,
        )?;
        steps.push(Step { relaxed, kl: found.kl });
    }
    Ok(steps)
}

/// Finds what a failing bound is owed to.
pub(super) struct Ladder;

impl Examination for Ladder {
    fn name(&self) -> &'static str {
        "bound"
    }

    fn question(&self) -> &'static str {
        "Is the KL within --max-kl, and if not, what is to be relaxed?"
    }

    fn lacks(&self, of: &Examined<'_>) -> Option<&'static str> {
        match (of.request.max_kl, of.request.reference) {
            (None, _) => Some("no --max-kl"),
            (_, None) => Some("no --reference"),
            _ => None,
        }
    }

    fn findings(&self, of: &Examined<'_>) -> Result<Vec<Finding>> {
        let (Some(bound), Some(whole)) = (of.request.max_kl, of.ladder.first()) else {
            return Ok(Vec::new());
        };
        if whole.kl <= bound {
            return Ok(Vec::new());
        }
        let names = &of.request.names;
        let passing = of.ladder.iter().skip(1).find(|step| step.kl <= bound);
        let relaxed = passing.map_or("weights", |step| step.relaxed);
        let steps = of.ladder.iter().skip(1).map(|step| format!("{:.4} without {}", step.kl, step.relaxed));
        let text = steps.collect::<Vec<_>>().join(", ");
        let (remedy, command) = match relaxed {
            "weights" => (
                "give the weights more bits: fit chooses where, by measured KL".to_owned(),
                format!(
                    "mantissa fit {} --budget 6bpw {} --max-kl {bound} --out {}-fitted",
                    names.source, names.text, names.stem
                ),
            ),
            "inputs" => (
                "quantize weights alone".to_owned(),
                format!(
                    "mantissa quantize {} --recipe rtn-{} --out {}-weights",
                    names.source, names.weights, names.stem
                ),
            ),
            _ => (
                "serve with an unquantized cache, or with a wider one".to_owned(),
                format!("mantissa eval {} --reference {} {} --kv f32", names.model, names.source, names.text),
            ),
        };
        let mut figures = std::collections::BTreeMap::from([("kl", whole.kl), ("bound", bound)]);
        for (name, step) in
            ["kl_without_cache", "kl_without_inputs"].into_iter().zip(of.ladder.iter().skip(1))
        {
            figures.insert(name, step.kl);
        }
        Ok(vec![Finding {
            examination: self.name(),
            place: Location { part: relaxed.to_owned(), ..Location::default() },
            found: format!("KL {:.4} nats/token, bound {bound}: {text}", whole.kl),
            figures,
            remedy,
            command,
        }])
    }
}
