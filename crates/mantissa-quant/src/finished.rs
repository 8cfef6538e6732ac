//! Comparison of a finished output with what a plan would make, by what its `quality.json` records.

use mantissa_store::convention::ModelFiles;
use mantissa_store::{Shown, TOOL};
use serde_json::Value;

use crate::assess::exceeded;
use crate::calibrate::CalibrationSet;
use crate::error::Result;
use crate::measure::hashes::of_source;
use crate::plan::{Plan, Use};
use crate::quality::{Quality, Recorded, TokenSet};

impl Plan {
    /// Names the first thing in which the output that `quality` describes differs from what this plan makes of `source`;
    /// `None` if it would make the same. Hashes the files of the source.
    ///
    /// # Errors
    /// A file of the source that cannot be read.
    pub fn difference(&self, quality: &Quality, source: &ModelFiles) -> Result<Option<String>> {
        if quality.tool != TOOL {
            return Ok(Some(format!("made by {}, this is {TOOL}", Shown(&quality.tool))));
        }
        let stated =
            self.settings(quality).or_else(|| self.texts(quality)).or_else(|| self.measured(quality));
        if stated.is_some() {
            return Ok(stated);
        }
        // A matrix of importance is recorded by its name alone.
        if self.options.importance.is_some() {
            return Ok(Some("an importance matrix, whose content is not recorded".to_owned()));
        }
        let now = of_source(source)?;
        let before = &quality.hashes.source;
        let changed = now.iter().find(|(name, digest)| before.get(*name) != Some(digest));
        let gone = before.keys().find(|name| !now.contains_key(*name));
        let name = changed.map(|(name, _)| name).or(gone);
        Ok(name.map(|name| format!("{} of the source, whose content is another", Shown(name))))
    }

    /// Compares the recorded job.
    fn settings(&self, quality: &Quality) -> Option<String> {
        let format = self.container.name();
        if quality.container != format {
            return Some(format!("format {}, now {format}", Shown(&quality.container)));
        }
        match (&quality.rebuild, &self.options.rebuild) {
            (Some(Recorded::Job(before)), Some(Recorded::Job(now))) => {
                let (before, now) = (Value::Object(before.clone()), Value::Object(now.clone()));
                let found = changed("", &before, &now)?;
                Some(Shown(&found).to_string())
            }
            (before, now) if before == now && before.is_some() => None,
            _ => Some("a job that is not recorded".to_owned()),
        }
        .or_else(|| (quality.hashes.recipe != self.job.sha256()).then(|| "another recipe".to_owned()))
    }

    /// Compares the calibration.
    fn texts(&self, quality: &Quality) -> Option<String> {
        let calibration = self.text().or(self.text_for(Use::Cache)).map(CalibrationSet::identity);
        let differs = |before: &Option<TokenSet>, now: Option<TokenSet>, what: &str| {
            let hash = |set: Option<&TokenSet>| set.map(|set| set.sha256.clone());
            (hash(before.as_ref()) != hash(now.as_ref())).then(|| format!("{what}, whose windows are others"))
        };
        differs(&quality.calibration, calibration, "the calibration").or_else(|| {
            differs(&quality.held_out, self.held_out().map(|set| set.identity()), "held-out windows")
        })
    }

    /// Compares what was measured with what is asked for, and with its limits.
    fn measured(&self, quality: &Quality) -> Option<String> {
        let text = match (self.evaluation(), &quality.evaluation) {
            (None, None) => None,
            (Some(now), Some(before)) if before.text.sha256 == now.text.sha256 => {
                exceeded(self, quality).map(|found| found.to_string())
            }
            (Some(_), _) => Some("not measured on this text".to_owned()),
            (None, Some(before)) => Some(format!("measured on {}, now on none", Shown(&before.text.name))),
        };
        text.or_else(|| match self.tasks() {
            Some(tasks) if !tasks.are_of(&quality.tasks) => Some("not measured on these tasks".to_owned()),
            Some(_) => exceeded(self, quality).map(|found| found.to_string()),
            None if !quality.tasks.is_empty() => Some("measured on tasks, now on none".to_owned()),
            _ => None,
        })
    }
}

/// Names the first field in which two values differ, with both.
fn changed(place: &str, before: &Value, now: &Value) -> Option<String> {
    if before == now {
        return None;
    }
    if let (Value::Object(before), Value::Object(now)) = (before, now) {
        let mut names: Vec<&String> =
            now.keys().chain(before.keys().filter(|name| !now.contains_key(*name))).collect();
        names.dedup();
        let field = |name: &&String| {
            let place = if place.is_empty() { (*name).clone() } else { format!("{place}.{name}") };
            changed(&place, before.get(*name).unwrap_or(&Value::Null), now.get(*name).unwrap_or(&Value::Null))
        };
        return names.iter().find_map(field);
    }
    let short = |value: &Value| match value {
        Value::Null => "none".to_owned(),
        Value::String(text) => text.chars().take(60).collect(),
        other => other.to_string().chars().take(60).collect(),
    };
    Some(format!("{place} {}, now {}", short(before), short(now)))
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn the_first_setting_that_differs_is_named_with_both_values() {
        let before = json!({"job": "quantize", "weights": {"seed": 0, "recipe": {"name": "nvfp4"}}});
        let of = |now: Value| changed("", &before, &now);
        assert_eq!(of(before.clone()), None);
        let seed = of(json!({"job": "quantize", "weights": {"seed": 1, "recipe": {"name": "nvfp4"}}}));
        assert_eq!(seed.as_deref(), Some("weights.seed 0, now 1"));
        let more = of(
            json!({"job": "quantize", "weights": {"seed": 0, "recipe": {"name": "nvfp4"}, "keep": ["a"]}}),
        );
        assert_eq!(more.as_deref(), Some("weights.keep none, now [\"a\"]"));
        let fewer = of(json!({"job": "quantize", "weights": {"recipe": {"name": "nvfp4"}}}));
        assert_eq!(fewer.as_deref(), Some("weights.seed 0, now none"));
        let recipe = of(json!({"job": "quantize", "weights": {"seed": 0, "recipe": {"name": "mxfp4"}}}));
        assert_eq!(recipe.as_deref(), Some("weights.recipe.name nvfp4, now mxfp4"));
    }
}
