//! Place of the quantization in a `config.json`: one object at the top, wherever the file has it.
//!
//! Multimodal models are published with it inside the text model's configuration (Kimi-K2.5), and early versions of
//! compressed-tensors named it `compression_config`.

use serde_json::{Map, Value};

/// Key of the quantization.
pub const QUANTIZATION: &str = "quantization_config";

/// Names of the quantization, the usual one first.
const NAMES: [&str; 2] = [QUANTIZATION, "compression_config"];

/// Configurations of a text model within that of a larger model.
const TEXT_CONFIGS: [&str; 7] = [
    "text_config",
    "llm_config",
    "language_config",
    "language_model",
    "language_model_config",
    "thinker_config",
    "llm",
];

/// Deepest nesting of text configurations (`thinker_config.text_config`).
const DEEPEST: usize = 3;

/// Moves the quantization of `config` to the key `quantization_config` of its root. Returns a note if the file states
/// several that differ: the outermost is kept.
pub(crate) fn to_root(config: &mut Value) -> Option<String> {
    let Value::Object(fields) = config else { return None };
    let own = fields.get(QUANTIZATION).filter(|value| !value.is_null()).cloned();
    let mut found: Vec<_> = own.clone().map(|value| (QUANTIZATION.to_owned(), value)).into_iter().collect();
    take(fields, "", &NAMES[1..], DEEPEST, &mut found);
    let mut found = found.into_iter();
    let (place, kept) = found.next()?;
    let other = found.find(|(_, value)| *value != kept);
    let note = other.map(|(other, _)| {
        format!("{place} and {other} differ: expected one quantization, got two; {place} is used")
    });
    if own.is_none() {
        fields.insert(QUANTIZATION.to_owned(), kept);
    }
    note
}

/// Takes every quantization of these `names` out of `fields`, whose own names begin with `parent`, and those in text
/// configurations, the outermost first.
fn take(
    fields: &mut Map<String, Value>,
    parent: &str,
    names: &[&str],
    depth: usize,
    found: &mut Vec<(String, Value)>,
) {
    for name in names {
        if fields.get(*name).is_some_and(Value::is_object)
            && let Some(value) = fields.shift_remove(*name)
        {
            found.push((format!("{parent}{name}"), with_method(value, name)));
        }
    }
    if depth == 0 {
        return;
    }
    for name in TEXT_CONFIGS {
        if let Some(Value::Object(inner)) = fields.get_mut(name) {
            take(inner, &format!("{parent}{name}."), &NAMES, depth - 1, found);
        }
    }
}

/// Adds the `quant_method` that the older name implies.
fn with_method(mut value: Value, name: &str) -> Value {
    if let Value::Object(fields) = &mut value
        && name != QUANTIZATION
    {
        fields.entry("quant_method").or_insert_with(|| "compressed-tensors".into());
    }
    value
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    /// Moves the quantization of `config`; returns it and the note.
    fn moved(mut config: Value) -> (Value, Option<String>) {
        let note = to_root(&mut config);
        (config, note)
    }

    #[test]
    fn every_nesting_is_found() {
        let own = json!({"quant_method": "gptq", "bits": 4});
        for place in TEXT_CONFIGS {
            let (config, note) = moved(json!({"a": 1, place: {"b": 2, QUANTIZATION: own}}));
            assert_eq!(
                (config, note),
                (json!({"a": 1, place: {"b": 2}, QUANTIZATION: own}), None),
                "{place}"
            );
        }
        let deep = json!({"thinker_config": {"text_config": {QUANTIZATION: own}}});
        assert_eq!(moved(deep).0[QUANTIZATION], own);
        let of_tower = json!({"vision_config": {QUANTIZATION: own}});
        assert_eq!(moved(of_tower.clone()), (of_tower, None));
    }

    #[test]
    fn the_older_name_is_that_of_compressed_tensors() {
        let (config, note) = moved(json!({"compression_config": {"config_groups": {}}}));
        let expected = json!({"config_groups": {}, "quant_method": "compressed-tensors"});
        assert_eq!((config, note), (json!({QUANTIZATION: expected}), None));
        let nested = moved(json!({"text_config": {"compression_config": {"config_groups": {}}}}));
        assert_eq!(nested.0[QUANTIZATION], expected);
    }

    #[test]
    fn the_outermost_of_two_is_kept_with_a_note_if_they_differ() {
        let (a, b) = (json!({"quant_method": "gptq", "bits": 4}), json!({"quant_method": "gptq", "bits": 8}));
        let (config, note) = moved(json!({QUANTIZATION: a, "text_config": {QUANTIZATION: a}}));
        assert_eq!((config, note), (json!({QUANTIZATION: a, "text_config": {}}), None));
        let (config, note) = moved(json!({QUANTIZATION: a, "text_config": {QUANTIZATION: b}}));
        assert_eq!(config, json!({"text_config": {}, QUANTIZATION: a}));
        assert!(note.is_some_and(|note| note.contains("text_config.quantization_config differ")));
        let (config, note) = moved(json!({QUANTIZATION: null, "text_config": {QUANTIZATION: b}}));
        assert_eq!((&config[QUANTIZATION], note), (&b, None));
    }

    #[test]
    fn a_config_without_one_is_unchanged() {
        for config in [json!({}), json!([]), json!({"text_config": 3, "compression_config": "x"})] {
            assert_eq!(moved(config.clone()), (config, None));
        }
    }
}
