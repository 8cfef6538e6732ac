//! Known disagreements between writer and reader, as `doctor` finds them: against the source if there is one, else by the
//! loss on the text.

use super::examination::{Examination, Examined};
use super::finding::{Finding, Location};
use crate::doctor::{self, Fault};
use crate::error::Result;

/// Finds the fault that `doctor` finds.
pub(super) struct Readings;

impl Examination for Readings {
    fn name(&self) -> &'static str {
        "stored-as-read"
    }

    fn question(&self) -> &'static str {
        "Do tensors, config and tokenizer mean what the reader takes them for?"
    }

    fn lacks(&self, _: &Examined<'_>) -> Option<&'static str> {
        None
    }

    fn findings(&self, of: &Examined<'_>) -> Result<Vec<Finding>> {
        let request = of.request;
        let found = match request.reference {
            Some(reference) => {
                doctor::against(request.files, reference, &of.windows, request.threads, &|_| {})?
            }
            // The fields of the config have examinations of their own.
            None => doctor::examine_tensors(request.files, &of.trials.windows, request.threads, &|_| {})?,
        };
        let Some(Fault { tensor, layers, alternative, cause, fix }) = found.fault else {
            return Ok(Vec::new());
        };
        let repaired = alternative.map_or_else(String::new, |name| format!("; repaired by: {name}"));
        let mut figures = std::collections::BTreeMap::from([("layers", layers.len() as f64)]);
        if let Some(whole) = found.whole {
            figures.extend([("kl", whole.kl), ("kl_expected", whole.expected)]);
        }
        let trial =
            found.trials.iter().find(|trial| Some(trial.alternative) == alternative && trial.decisive);
        if let Some(gain) = trial.and_then(|trial| trial.gain) {
            figures.extend([("delta_nll", gain.delta), ("delta_nll_se", gain.se)]);
        }
        let names = &request.names;
        let measured = || format!("mantissa doctor {} {}", names.model, names.text);
        Ok(vec![Finding {
            examination: self.name(),
            place: Location { layer: layers.first().copied(), part: tensor, ..Location::default() },
            found: format!("{cause}{repaired}"),
            figures,
            remedy: fix.to_owned(),
            command: names.again.clone().unwrap_or_else(measured),
        }])
    }
}
