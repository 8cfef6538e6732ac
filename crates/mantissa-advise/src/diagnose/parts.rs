//! Parts of layers without which the model predicts the text better: they are damaged. In a sound model every part
//! helps, or nearly nothing depends on it.

use super::examination::{Examination, Examined};
use super::finding::{Finding, Location};
use crate::error::Result;

/// Finds parts that are better left out.
pub(super) struct Damaged;

impl Examination for Damaged {
    fn name(&self) -> &'static str {
        "damaged-layer"
    }

    fn question(&self) -> &'static str {
        "Does every attention and MLP help to predict the text?"
    }

    fn lacks(&self, _: &Examined<'_>) -> Option<&'static str> {
        None
    }

    fn findings(&self, of: &Examined<'_>) -> Result<Vec<Finding>> {
        let found = of.trials.silences(of.request.files, &of.config)?;
        // Next to a damaged part, leaving out those that read it may help as well: the largest gain is the part itself.
        let Some((layer, part, better)) = found.into_iter().min_by(|a, b| a.2.nll.total_cmp(&b.2.nll)) else {
            return Ok(Vec::new());
        };
        let names = &of.request.names;
        let by = match better.gain {
            Some(gain) => format!("the loss falls by {}", of.trials.shown(-gain.delta, gain.se)),
            None => format!("the loss becomes finite, {:.3} nats/token", better.nll),
        };
        let mut figures = std::collections::BTreeMap::from([("nll_without", better.nll)]);
        if let Some(gain) = better.gain {
            figures.extend([("delta_nll", gain.delta), ("delta_nll_se", gain.se)]);
        }
        let measured =
            || format!("mantissa doctor {} {} --reference {}", names.model, names.text, names.source);
        Ok(vec![Finding {
            examination: self.name(),
            place: Location { layer: Some(layer), part: part.to_owned(), ..Location::default() },
            found: format!("without it {by}"),
            figures,
            remedy: "write the layer again from the source".to_owned(),
            command: names.again.clone().unwrap_or_else(measured),
        }])
    }
}
