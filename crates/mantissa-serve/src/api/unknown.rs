//! Fields of a request that no endpoint reads: refused if they ask for something, so that no answer leaves out what was
//! asked for.

use serde_json::Value;

use super::ApiError;

/// Fields that change no answer: labels of the caller, hints about caches and priority, and parameters of a method
/// that another field turns on.
const WITHOUT_EFFECT: &[&str] = &[
    "betas",
    "cache_control",
    "cache_prompt",
    "cache_salt",
    "client_metadata",
    "context_management",
    "dry_allowed_length",
    "dry_base",
    "dry_penalty_last_n",
    "dry_sequence_breakers",
    "dynatemp_exponent",
    "id_slot",
    "inference_geo",
    "max_tool_calls",
    "metadata",
    "mirostat_eta",
    "mirostat_tau",
    "n_keep",
    "priority",
    "prompt_cache_key",
    "prompt_cache_retention",
    "request_id",
    "safety_identifier",
    "service_tier",
    "spaces_between_special_tokens",
    "store",
    "timings_per_token",
    "user",
    "xtc_threshold",
];

/// Flags that are on unless a request turns them off.
const ON: &[&str] = &["add_special_tokens", "detokenize", "skip_special_tokens"];

/// Values of other fields that ask for what happens anyway.
fn is_default(name: &str, value: &Value) -> bool {
    match value {
        Value::Null => true,
        Value::Bool(flag) => *flag == ON.contains(&name),
        Value::String(text) => {
            text.is_empty()
                || matches!(
                    (name, text.as_str()),
                    ("truncation", "auto" | "disabled")
                        | ("verbosity", "medium")
                        | ("encoding_format", "float")
                )
        }
        Value::Array(items) => match name {
            "modalities" => items.iter().all(|item| item == "text"),
            // The content of a thought goes back to the client as text.
            "include" => items.iter().all(|item| item == "reasoning.encrypted_content"),
            _ => items.is_empty(),
        },
        Value::Object(fields) => fields.is_empty(),
        Value::Number(number) => match name {
            "length_penalty" | "typical_p" | "typ_p" | "tfs_z" | "best_of" => number.as_f64() == Some(1.0),
            "n_predict" | "t_max_predict_ms" | "repeat_last_n" if number.as_f64() == Some(-1.0) => true,
            _ => number.as_f64() == Some(0.0),
        },
    }
}

/// Checks a field that the endpoint does not read; `name` may be a path with dots.
///
/// # Errors
/// Status 400 that names the field, if it asks for something.
pub(crate) fn check(name: &str, value: &Value) -> Result<(), ApiError> {
    if WITHOUT_EFFECT.contains(&name) || is_default(name, value) {
        return Ok(());
    }
    let message = format!(
        "{name}: expected a field that this endpoint honours (GET /openapi.json lists them), got an unknown one; fix: leave it out"
    );
    Err(ApiError::bad(message).param(name).code("unsupported_parameter"))
}

/// Objects whose fields are checked too; those of messages and tools may come from a reply of another server.
const NESTED: &[&str] = &["structured_outputs", "response_format", "stream_options"];

/// Checks the fields of the body `bytes` at the paths `ignored`, which no reader of the body took.
///
/// # Errors
/// As [`check`].
pub(crate) fn check_ignored(bytes: &[u8], ignored: &[String]) -> Result<(), ApiError> {
    let inner = |path: &str| path.split_once('.').is_some_and(|(object, _)| NESTED.contains(&object));
    // A field that is there may have passed an `Option`, which the path shows as `?`.
    let paths =
        ignored.iter().map(|path| path.replace(".?", "")).filter(|path| !path.contains('.') || inner(path));
    let paths: Vec<String> = paths.collect();
    if paths.is_empty() {
        return Ok(());
    }
    let body: Value = serde_json::from_slice(bytes).unwrap_or_default();
    paths.iter().try_for_each(|path| check(path, path.split('.').fold(&body, |value, field| &value[field])))
}

/// Checks the fields of an object that are not `known`, those that the endpoint reads.
///
/// # Errors
/// As [`check`].
pub(crate) fn check_fields(body: &Value, known: &[&str]) -> Result<(), ApiError> {
    let fields = body.as_object().into_iter().flatten();
    fields
        .filter(|(name, _)| !known.contains(&name.as_str()))
        .try_for_each(|(name, value)| check(name, value))
}

/// Checks the fields of the object `name` within a body that are not `known`.
///
/// # Errors
/// As [`check`].
pub(crate) fn check_within(body: &Value, name: &str, known: &[&str]) -> Result<(), ApiError> {
    let fields = body[name].as_object().into_iter().flatten();
    let mut others = fields.filter(|(field, _)| !known.contains(&field.as_str()));
    others.try_for_each(|(field, value)| check(&format!("{name}.{field}"), value))
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn fields_that_ask_for_something_are_refused() {
        let refused = [
            ("bad_words", json!(["x"])),
            ("min_p_threshold", json!(0.1)),
            ("use_beam_search", json!(true)),
            ("length_penalty", json!(0.5)),
            ("skip_special_tokens", json!(false)),
            ("add_special_tokens", json!(false)),
            ("detokenize", json!(false)),
            ("output_config.foo", json!(1)),
            ("mirostat", json!(2)),
            ("structured_outputs.whitespace_pattern", json!("x")),
        ];
        for (name, value) in refused {
            let error = check(name, &value).unwrap_err();
            assert_eq!((error.param.as_deref(), error.status.as_u16()), (Some(name), 400), "{name}");
        }
    }

    #[test]
    fn labels_and_defaults_are_accepted() {
        let accepted = [
            ("user", json!("me")),
            ("metadata", json!({ "a": 1 })),
            ("bad_words", json!([])),
            ("use_beam_search", json!(false)),
            ("length_penalty", json!(1)),
            ("skip_special_tokens", json!(true)),
            ("mirostat", json!(0)),
            ("anything", json!(null)),
        ];
        for (name, value) in accepted {
            assert_eq!(check(name, &value), Ok(()), "{name}");
        }
    }

    #[test]
    fn only_fields_of_the_request_itself_are_checked() {
        let body = json!({ "messages": [{ "cache_control": 1 }], "response_format": { "strictness": 2 } });
        let bytes = body.to_string();
        assert!(check_ignored(bytes.as_bytes(), &["messages.0.cache_control".into()]).is_ok());
        let error = check_ignored(bytes.as_bytes(), &["response_format.?.strictness".into()]).unwrap_err();
        assert_eq!(error.param.as_deref(), Some("response_format.strictness"));
    }
}
