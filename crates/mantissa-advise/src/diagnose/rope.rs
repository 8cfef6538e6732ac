//! The base of the rotary embedding, tried without the source: a config that lost or changed `rope_theta` loads and
//! predicts worse, the more so the longer the context.

use super::examination::{Examination, Examined};
use super::finding::{Finding, Location};
use super::trials::Better;
use crate::doctor::settings;
use crate::error::Result;

/// Finds another base with which the model predicts better.
pub(super) struct Base;

impl Examination for Base {
    fn name(&self) -> &'static str {
        "rope-base"
    }

    fn question(&self) -> &'static str {
        "Is rope_theta the base that the model was trained with?"
    }

    fn lacks(&self, of: &Examined<'_>) -> Option<&'static str> {
        (!settings::has_base(&of.config)).then_some("the model has no single rotary base")
    }

    fn findings(&self, of: &Examined<'_>) -> Result<Vec<Finding>> {
        let mut best: Option<(f64, Better)> = None;
        for setting in settings::bases(&of.config) {
            let base = setting.value;
            let score = of.trials.under(of.request.files, &setting.applied(&of.config))?;
            if let Some(better) = of.trials.whole(score.as_ref())
                && best.as_ref().is_none_or(|(_, known)| better.nll < known.nll)
            {
                best = Some((base, better));
            }
        }
        let Some((base, better)) = best else { return Ok(Vec::new()) };
        let (delta, se) = better.gain.map_or((f64::NAN, f64::NAN), |gain| (gain.delta, gain.se));
        let names = &of.request.names;
        let measured =
            || format!("mantissa doctor {} {} --reference {}", names.model, names.text, names.source);
        Ok(vec![Finding {
            examination: self.name(),
            place: Location { part: "config.json: rope_theta".to_owned(), ..Location::default() },
            found: format!(
                "{} in the config; with {base} the loss falls by {}",
                of.config.rope.theta,
                of.trials.shown(-delta, se)
            ),
            figures: [
                ("theta", of.config.rope.theta),
                ("better", base),
                ("delta_nll", delta),
                ("delta_nll_se", se),
            ]
            .into(),
            remedy: format!("set rope_theta to {base}, or copy config.json from the source"),
            command: names.again.clone().unwrap_or_else(measured),
        }])
    }
}
