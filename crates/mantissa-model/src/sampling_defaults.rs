//! Sampling that the makers of a model recommend: `generation_config.json` of a folder, `general.sampling.*` of a GGUF file.

use mantissa_store::convention::ModelFiles;
use mantissa_store::gguf::{Metadata, Value as GgufValue};
use serde_json::Value;

use crate::config::read_json;
use crate::sampling::Sampling;

/// Parameters of sampling that a model states; those that it does not are `None`.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct SamplingDefaults {
    /// Divides the logits; 0 takes the most probable token.
    pub temperature: Option<f32>,
    /// Keeps this many tokens; 0 keeps all.
    pub top_k: Option<usize>,
    /// Keeps the fewest tokens with this much probability.
    pub top_p: Option<f32>,
    /// Keeps the tokens with at least this share of the probability of the most probable one.
    pub min_p: Option<f32>,
    /// Repetition penalty.
    pub repetition: Option<f32>,
}

/// Recommendations of a model, and those of them that cannot be used.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Recommended {
    /// Parameters that are used.
    pub defaults: SamplingDefaults,
    /// Values that are not, with the place of each and the values that would be.
    pub refused: Vec<String>,
}

/// Parameter: its name in `generation_config.json` and in GGUF after `general.sampling.`, and its range.
struct Parameter {
    json: &'static str,
    gguf: &'static str,
    least: f64,
    most: f64,
}

const TEMPERATURE: Parameter = Parameter { json: "temperature", gguf: "temp", least: 0.0, most: 2.0 };
/// At most the largest vocabulary; a model's own caps it where it is used.
const TOP_K: Parameter = Parameter { json: "top_k", gguf: "top_k", least: -1.0, most: 16_777_216.0 };
const TOP_P: Parameter = Parameter { json: "top_p", gguf: "top_p", least: 0.0, most: 1.0 };
const MIN_P: Parameter = Parameter { json: "min_p", gguf: "min_p", least: 0.0, most: 1.0 };
const REPETITION: Parameter =
    Parameter { json: "repetition_penalty", gguf: "penalty_repeat", least: 0.01, most: 10.0 };

impl SamplingDefaults {
    /// True if nothing is stated.
    pub fn is_empty(&self) -> bool {
        *self == SamplingDefaults::default()
    }

    /// Returns these, and `others` for what they do not state.
    #[must_use]
    pub fn or(self, others: SamplingDefaults) -> SamplingDefaults {
        SamplingDefaults {
            temperature: self.temperature.or(others.temperature),
            top_k: self.top_k.or(others.top_k),
            top_p: self.top_p.or(others.top_p),
            min_p: self.min_p.or(others.min_p),
            repetition: self.repetition.or(others.repetition),
        }
    }

    /// Returns these without what `others` state.
    #[must_use]
    pub fn less(self, others: SamplingDefaults) -> SamplingDefaults {
        SamplingDefaults {
            temperature: self.temperature.filter(|_| others.temperature.is_none()),
            top_k: self.top_k.filter(|_| others.top_k.is_none()),
            top_p: self.top_p.filter(|_| others.top_p.is_none()),
            min_p: self.min_p.filter(|_| others.min_p.is_none()),
            repetition: self.repetition.filter(|_| others.repetition.is_none()),
        }
    }

    /// Returns `sampling` with what is stated here.
    #[must_use]
    pub fn over(self, sampling: Sampling) -> Sampling {
        Sampling {
            temperature: self.temperature.unwrap_or(sampling.temperature),
            top_k: self.top_k.unwrap_or(sampling.top_k),
            top_p: self.top_p.unwrap_or(sampling.top_p),
            min_p: self.min_p.unwrap_or(sampling.min_p),
            repetition: self.repetition.unwrap_or(sampling.repetition),
            ..sampling
        }
    }

    /// Describes what is stated, such as `temperature 0.6, top-p 0.95`.
    pub fn shown(&self) -> String {
        let number = |name: &str, value: Option<f32>| value.map(|value| format!("{name} {value}"));
        let parts = [
            number("temperature", self.temperature),
            self.top_k.map(|k| format!("top-k {k}")),
            number("top-p", self.top_p),
            number("min-p", self.min_p),
            number("repetition penalty", self.repetition),
        ];
        parts.into_iter().flatten().collect::<Vec<_>>().join(", ")
    }
}

impl Recommended {
    /// Reads what the model `files` recommends. A file that cannot be read recommends nothing: the reader of the
    /// configuration reports it.
    pub fn of(files: &ModelFiles) -> Self {
        if let Some(model) = files.gguf() {
            return Self::of_metadata(model.metadata());
        }
        let path = files.dir().join("generation_config.json");
        match read_json(&path) {
            Ok(Some(config)) => Self::from_config(&config, &path.display().to_string()),
            _ => Self::default(),
        }
    }

    /// Reads the keys of a GGUF file.
    fn of_metadata(metadata: &Metadata) -> Self {
        let place = metadata.path().display().to_string();
        Self::from_values(|parameter| {
            let key = format!("general.sampling.{}", parameter.gguf);
            let number = |value: &GgufValue| match value {
                // In full, not the digits of the f32 that is nearest.
                GgufValue::F32(x) => x.to_string().parse().ok(),
                GgufValue::I32(x) => Some(f64::from(*x)),
                value => value.as_f64().or_else(|| value.as_u64().map(|x| x as f64)),
            };
            metadata.get(&key).map(|value| (format!("{place}: {key}"), number(value)))
        })
    }

    /// Reads `generation_config.json`. Without sampling (`do_sample` false) generation is greedy, and the parameters of
    /// sampling are not meant.
    fn from_config(config: &Value, file: &str) -> Self {
        if config["do_sample"] == false {
            let temperature = Some(0.0);
            let own = Self::from_values(|parameter| {
                read(config, parameter, file).filter(|_| is_penalty(parameter))
            });
            let defaults = SamplingDefaults { temperature, ..own.defaults };
            return Recommended { defaults, ..own };
        }
        Self::from_values(|parameter| read(config, parameter, file))
    }

    /// Takes the values in their ranges. `value` returns the place of a parameter and its value if it is a number.
    fn from_values(value: impl Fn(&Parameter) -> Option<(String, Option<f64>)>) -> Self {
        let mut refused = Vec::new();
        let mut take = |parameter: Parameter| {
            let (place, found) = value(&parameter)?;
            let Parameter { least, most, .. } = parameter;
            let used = found.filter(|found| (least..=most).contains(found));
            if used.is_none() {
                let found = found.map_or_else(|| "another value".to_owned(), |found| found.to_string());
                refused.push(format!(
                    "{place}: expected a number from {least} to {most}, got {found}; it is not used"
                ));
            }
            used
        };
        let temperature = take(TEMPERATURE).map(|x| x as f32);
        let top_k = take(TOP_K).map(|k| k.max(0.0) as usize);
        let [top_p, min_p, repetition] = [TOP_P, MIN_P, REPETITION].map(|p| take(p).map(|x| x as f32));
        // 0 keeps one token.
        let top_p = top_p.map(|p| p.max(f32::MIN_POSITIVE));
        Recommended { defaults: SamplingDefaults { temperature, top_k, top_p, min_p, repetition }, refused }
    }
}

fn is_penalty(parameter: &Parameter) -> bool {
    parameter.json == REPETITION.json
}

/// Returns the place of a parameter in `config`, the content of `file`, and its value if it is a number.
fn read(config: &Value, parameter: &Parameter, file: &str) -> Option<(String, Option<f64>)> {
    let value = config.get(parameter.json).filter(|value| !value.is_null())?;
    Some((format!("{file}: {}", parameter.json), value.as_f64()))
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn a_configuration_states_what_is_used() {
        let config = json!({"do_sample": true, "temperature": 0.6, "top_k": 20, "top_p": 0.95, "min_p": null, "repetition_penalty": 1.1});
        let found = Recommended::from_config(&config, "g");
        let expected = SamplingDefaults {
            temperature: Some(0.6),
            top_k: Some(20),
            top_p: Some(0.95),
            min_p: None,
            repetition: Some(1.1),
        };
        assert_eq!((found.defaults, found.refused), (expected, Vec::new()));
        assert_eq!(expected.shown(), "temperature 0.6, top-k 20, top-p 0.95, repetition penalty 1.1");
        assert!(Recommended::from_config(&json!({"eos_token_id": 2}), "g").defaults.is_empty());
    }

    #[test]
    fn without_sampling_a_model_is_greedy() {
        let config = json!({"do_sample": false, "temperature": 0.7, "top_p": 0.9, "repetition_penalty": 1.2});
        let found = Recommended::from_config(&config, "g").defaults;
        let expected =
            SamplingDefaults { temperature: Some(0.0), repetition: Some(1.2), ..SamplingDefaults::default() };
        assert_eq!(found, expected);
    }

    #[test]
    fn unusable_values_are_named_and_left_out() {
        let config = json!({"temperature": 7.5, "top_k": -3, "top_p": "x", "min_p": 0.05});
        let Recommended { defaults, refused } = Recommended::from_config(&config, "g");
        assert_eq!(defaults, SamplingDefaults { min_p: Some(0.05), ..SamplingDefaults::default() });
        assert_eq!(refused.len(), 3, "{refused:?}");
        assert!(
            refused[0].starts_with("g: temperature: expected a number from 0 to 2, got 7.5"),
            "{refused:?}"
        );
        // -1 keeps all, as 0 does.
        assert_eq!(Recommended::from_config(&json!({"top_k": -1}), "g").defaults.top_k, Some(0));
    }

    #[test]
    fn others_fill_what_is_not_stated() {
        let own = SamplingDefaults { temperature: Some(0.6), ..SamplingDefaults::default() };
        let others =
            SamplingDefaults { temperature: Some(0.8), top_k: Some(40), ..SamplingDefaults::default() };
        let both = own.or(others);
        assert_eq!((both.temperature, both.top_k), (Some(0.6), Some(40)));
        let sampling = both.over(Sampling { seed: 7, ..Sampling::default() });
        assert_eq!((sampling.temperature, sampling.top_k, sampling.top_p, sampling.seed), (0.6, 40, 1.0, 7));
    }
}
