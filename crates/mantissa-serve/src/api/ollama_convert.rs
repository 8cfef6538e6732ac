//! Requests of Ollama's API as requests of OpenAI's chat API, and what stands in `options`.

use std::collections::VecDeque;

use mantissa_model::SamplingDefaults;
use serde_json::{Map, Value, json};

use super::body::Sampling;
use super::convert::FieldError;
use super::llama_convert::penalty_window;
use super::{ApiError, unknown};
use crate::tools::call_id;

type Result<T> = std::result::Result<T, ApiError>;

/// Sampling that Ollama documents for what neither the request nor the model sets.
pub(super) const USUAL: SamplingDefaults = SamplingDefaults {
    temperature: Some(0.8),
    top_k: Some(40),
    top_p: Some(0.9),
    min_p: None,
    repetition: Some(1.1),
};

/// Fields of `/api/chat` that are read.
pub(super) const CHAT_FIELDS: &[&str] =
    &["format", "keep_alive", "messages", "model", "options", "stream", "think", "tools"];

/// Fields of `/api/generate` that are read.
pub(super) const GENERATE_FIELDS: &[&str] = &[
    "format",
    "images",
    "keep_alive",
    "model",
    "options",
    "prompt",
    "raw",
    "stream",
    "suffix",
    "system",
    "template",
    "think",
];

/// Fields of the endpoints of embeddings that are read.
pub(super) const EMBED_FIELDS: &[&str] =
    &["dimensions", "input", "keep_alive", "model", "options", "prompt", "truncate"];

/// Options that change no answer: where and how a model runs, which the server decides at its start, and parameters of a
/// method that another option turns on.
const WITHOUT_EFFECT: &[&str] = &[
    "draft_num_predict",
    "embedding_only",
    "f16_kv",
    "logits_all",
    "low_vram",
    "main_gpu",
    "mirostat_eta",
    "mirostat_tau",
    "num_batch",
    "num_gpu",
    "num_keep",
    "num_thread",
    "numa",
    "penalize_newline",
    "use_mlock",
    "use_mmap",
    "vocab_only",
];

/// Options under another name here, for errors of parsing.
const NAMES: &[(&str, &str)] = &[
    ("temperature", "options.temperature"),
    ("top_k", "options.top_k"),
    ("top_p", "options.top_p"),
    ("min_p", "options.min_p"),
    ("seed", "options.seed"),
    ("stop", "options.stop"),
    ("max_tokens", "options.num_predict"),
    ("presence_penalty", "options.presence_penalty"),
    ("frequency_penalty", "options.frequency_penalty"),
    ("repetition_penalty", "options.repeat_penalty"),
    ("response_format", "format"),
];

/// Name of the model of a request: `model`, or `name` in older requests.
pub(super) fn model(body: &Value) -> Result<Option<&str>> {
    for field in ["model", "name"] {
        match &body[field] {
            Value::Null => {}
            Value::String(name) => return Ok(Some(name)),
            other => return Err(FieldError::new(field, "a string", other).into()),
        }
    }
    Ok(None)
}

/// True if an answer is streamed, which it is unless the request says otherwise.
pub(super) fn streams(body: &Value) -> Result<bool> {
    flag(body, "stream", true)
}

/// Reads a field that is true or false.
pub(super) fn flag(body: &Value, field: &str, default: bool) -> Result<bool> {
    match &body[field] {
        Value::Null => Ok(default),
        Value::Bool(flag) => Ok(*flag),
        other => Err(FieldError::new(field, "true or false", other).into()),
    }
}

/// Reads a text; nothing is as empty.
pub(super) fn text<'a>(body: &'a Value, field: &str) -> Result<&'a str> {
    match &body[field] {
        Value::Null => Ok(""),
        Value::String(text) => Ok(text),
        other => Err(FieldError::new(field, "a string", other).into()),
    }
}

/// Reads a request whose fields beside those of sampling and form are in `out`, with the `options`, `format` and `think` of
/// `body`, which had so many `bytes`.
pub(super) fn sampling<T: serde::de::DeserializeOwned>(
    body: &Value,
    mut out: Map<String, Value>,
    bytes: usize,
) -> Result<Sampling<T>> {
    let context = options(&body["options"], &mut out)?;
    format(&body["format"], &mut out)?;
    thinking(&body["think"], &mut out)?;
    let mut request = Sampling::of(Value::Object(out), bytes, NAMES)?;
    request.sampled.usual = USUAL;
    request.sampled.context = context;
    Ok(request)
}

/// Adds the conversation of `/api/chat`.
pub(super) fn chat(body: &Value) -> Result<Map<String, Value>> {
    let mut out = Map::new();
    let messages = messages(&body["messages"])?;
    // A last turn of the assistant is the beginning of the answer.
    let begins = |last: &Value| last["role"] == "assistant" && last["tool_calls"].is_null();
    if messages.last().is_some_and(begins) {
        out.insert("continue_final_message".into(), json!(true));
    }
    out.insert("messages".into(), json!(messages));
    for field in ["model", "tools"] {
        if !body[field].is_null() {
            out.insert(field.into(), body[field].clone());
        }
    }
    Ok(out)
}

/// Adds the prompt of `/api/generate` as the message of a user, after the system message.
pub(super) fn generate(body: &Value) -> Result<Map<String, Value>> {
    let mut messages = Vec::new();
    let system = text(body, "system")?;
    if !system.is_empty() {
        messages.push(json!({ "role": "system", "content": system }));
    }
    messages.push(json!({ "role": "user", "content": text(body, "prompt")? }));
    let mut out = Map::new();
    out.insert("messages".into(), json!(messages));
    if let Some(model) = model(body)? {
        out.insert("model".into(), json!(model));
    }
    Ok(out)
}

/// Checks the fields of `/api/generate` that ask for what this server does not do.
pub(super) fn check_generate(body: &Value) -> Result<()> {
    if !text(body, "suffix")?.is_empty() {
        let allowed = "none: no text is put between two others here";
        return Err(FieldError::new("suffix", allowed, &body["suffix"]).into());
    }
    if !text(body, "template")?.is_empty() {
        let allowed = "none (templates of Go are not read); fix: serve with --chat-template FILE, or send the whole prompt with raw: true";
        return Err(FieldError::new("template", allowed, &body["template"]).into());
    }
    images(&body["images"], "images")
}

/// Refuses images.
fn images(images: &Value, path: &str) -> Result<()> {
    match images.as_array() {
        None if images.is_null() => Ok(()),
        Some(all) if all.is_empty() => Ok(()),
        _ => Err(FieldError::new(path, "none (image input is not supported)", images).into()),
    }
}

/// Reads the messages of a conversation. Calls of tools have no ids in this API, and some templates need them: the results
/// that follow a call take its id in their order.
fn messages(messages: &Value) -> Result<Vec<Value>> {
    let items = messages.as_array().ok_or_else(|| FieldError::new("messages", "an array", messages))?;
    let mut open = VecDeque::new();
    let message = |(i, message): (usize, &Value)| {
        let path = format!("messages[{i}]");
        if !message.is_object() {
            return Err(ApiError::from(FieldError::new(path, "an object", message)));
        }
        images(&message["images"], &format!("{path}.images"))?;
        let content = match &message["content"] {
            Value::Null => "",
            Value::String(text) => text,
            other => return Err(FieldError::new(format!("{path}.content"), "a string", other).into()),
        };
        let mut out = json!({ "role": message["role"], "content": content });
        for (theirs, ours) in
            [("thinking", "reasoning_content"), ("tool_name", "name"), ("tool_call_id", "tool_call_id")]
        {
            if message[theirs].as_str().is_some_and(|text| !text.is_empty()) {
                out[ours] = message[theirs].clone();
            }
        }
        if let Some(calls) = message["tool_calls"].as_array().filter(|calls| !calls.is_empty()) {
            open.clear();
            let named = calls.iter().enumerate().map(|(at, call)| {
                let id = call["id"].as_str().map_or_else(|| call_id(i as u64, at), str::to_owned);
                open.push_back(id.clone());
                json!({ "id": id, "type": "function", "function": call["function"] })
            });
            out["tool_calls"] = named.collect();
        }
        if message["role"] == "tool"
            && out["tool_call_id"].is_null()
            && let Some(id) = open.pop_front()
        {
            out["tool_call_id"] = json!(id);
        }
        Ok(out)
    };
    items.iter().enumerate().map(message).collect()
}

/// Adds the form of the answer.
fn format(format: &Value, out: &mut Map<String, Value>) -> Result<()> {
    let form = match format {
        Value::Null => return Ok(()),
        Value::String(text) if text.is_empty() => return Ok(()),
        Value::String(text) if text == "json" => json!({ "type": "json_object" }),
        Value::Object(_) => json!({ "type": "json_schema", "json_schema": { "schema": format } }),
        other => return Err(FieldError::new("format", "json or a JSON schema", other).into()),
    };
    out.insert("response_format".into(), form);
    Ok(())
}

/// Adds whether the model thinks, and how much.
fn thinking(think: &Value, out: &mut Map<String, Value>) -> Result<()> {
    match think {
        Value::Null => {}
        Value::Bool(true) => {
            out.insert("chat_template_kwargs".into(), json!({ "enable_thinking": true }));
        }
        Value::Bool(false) => _ = out.insert("reasoning_effort".into(), json!("none")),
        Value::String(effort) if ["low", "medium", "high"].contains(&effort.as_str()) => {
            out.insert("chat_template_kwargs".into(), json!({ "enable_thinking": true }));
            out.insert("reasoning_effort".into(), json!(effort));
        }
        other => return Err(FieldError::new("think", "true, false, low, medium or high", other).into()),
    }
    Ok(())
}

/// Adds the options; returns the longest sequence, if they limit it.
fn options(options: &Value, out: &mut Map<String, Value>) -> Result<Option<usize>> {
    let fields = match options {
        Value::Null => return Ok(None),
        Value::Object(fields) => fields,
        other => return Err(FieldError::new("options", "an object", other).into()),
    };
    let mut context = None;
    for (name, value) in fields.iter().filter(|(_, value)| !value.is_null()) {
        let integer = |expected: &str| {
            value.as_i64().ok_or_else(|| FieldError::new(format!("options.{name}"), expected, value))
        };
        match name.as_str() {
            "temperature" | "top_p" | "min_p" | "presence_penalty" | "frequency_penalty" | "stop" => {
                out.insert(name.clone(), value.clone());
            }
            "repeat_penalty" => _ = out.insert("repetition_penalty".into(), value.clone()),
            "top_k" => _ = out.insert(name.clone(), json!(integer("a number of tokens")?.max(0))),
            // -1 is a random one.
            "seed" if value == -1 => {}
            "seed" => _ = out.insert(name.clone(), json!(integer("an integer")?)),
            "num_predict" => {
                let tokens = match integer("a number of tokens, -1 or -2 (until the end)")? {
                    -2..=0 => -1,
                    tokens => tokens,
                };
                out.insert("max_tokens".into(), json!(tokens));
            }
            "num_ctx" => {
                let tokens = usize::try_from(integer("a number of tokens of at least 1")?);
                context = tokens.ok().filter(|tokens| *tokens > 0);
                if context.is_none() {
                    let expected = "a number of tokens of at least 1";
                    return Err(FieldError::new("options.num_ctx", expected, value).into());
                }
            }
            "repeat_last_n" => {}
            name if WITHOUT_EFFECT.contains(&name) => {}
            name => unknown::check(name, value).map_err(|error| {
                let message = format!("options.{}", error.message);
                ApiError { message, ..error }.param(format!("options.{name}"))
            })?,
        }
    }
    penalty_window("options.repeat_last_n", &options["repeat_last_n"], out);
    Ok(context)
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::super::chat::ChatRequest;
    use super::super::continuation::Nothing;
    use super::*;

    #[test]
    fn options_become_fields() {
        let given = json!({
            "temperature": 0.5, "top_k": -1, "top_p": 0.9, "min_p": 0.05, "seed": 7, "num_predict": -2, "stop": ["a"],
            "repeat_penalty": 1.2, "repeat_last_n": 64, "num_ctx": 2048, "num_thread": 4, "mirostat": 0, "typical_p": 1.0, "tfs_z": 1
        });
        let mut out = Map::new();
        assert_eq!(options(&given, &mut out).unwrap(), Some(2048));
        let expected = json!({
            "temperature": 0.5, "top_k": 0, "top_p": 0.9, "min_p": 0.05, "seed": 7, "max_tokens": -1, "stop": ["a"],
            "repetition_penalty": 1.2
        });
        assert_eq!(Value::Object(out), expected);
        let mut off = Map::new();
        options(&json!({ "repeat_last_n": 0, "repeat_penalty": 1.5, "seed": -1 }), &mut off).unwrap();
        assert_eq!(Value::Object(off), json!({ "repetition_penalty": 1.0 }));
    }

    #[test]
    fn options_that_ask_for_something_else_are_refused_by_name() {
        for (given, param) in [
            (json!({ "mirostat": 2 }), "options.mirostat"),
            (json!({ "typical_p": 0.5 }), "options.typical_p"),
            (json!({ "num_ctx": 0 }), "options.num_ctx"),
            (json!({ "num_predict": "x" }), "options.num_predict"),
            (json!({ "surprise": 1 }), "options.surprise"),
            (json!(3), "options"),
        ] {
            let error = options(&given, &mut Map::new()).unwrap_err();
            assert_eq!((error.param.as_deref(), error.status.as_u16()), (Some(param), 400), "{given}");
            assert!(error.message.starts_with(param), "{}", error.message);
        }
        let body = json!({ "options": { "temperature": "hot" } });
        let error = sampling::<Nothing>(&body, Map::new(), 0).unwrap_err();
        assert_eq!(error.param.as_deref(), Some("options.temperature"));
    }

    #[test]
    fn results_take_the_ids_of_their_calls() {
        let call = |name: &str| json!({ "function": { "name": name, "arguments": { "city": "Bern" } } });
        let body = json!({ "messages": [
            { "role": "user", "content": "Weather?" },
            { "role": "assistant", "thinking": "Ask.", "tool_calls": [call("w"), call("v")] },
            { "role": "tool", "tool_name": "w", "content": "sun" },
            { "role": "tool", "tool_name": "v", "content": "rain" },
        ] });
        let all = chat(&body).unwrap();
        let messages = &all["messages"];
        assert_eq!(messages[1]["reasoning_content"], "Ask.");
        for (call, result) in [(0, 2), (1, 3)] {
            assert_eq!(messages[1]["tool_calls"][call]["id"], messages[result]["tool_call_id"]);
        }
        assert_ne!(messages[2]["tool_call_id"], messages[3]["tool_call_id"]);
        let request = sampling::<ChatRequest>(&json!({ "format": "json", "think": "low" }), all, 0);
        assert!(request.is_ok());
    }

    #[test]
    fn what_is_no_text_is_refused() {
        for body in [
            json!({ "messages": [{ "role": "user", "content": "a", "images": ["x"] }] }),
            json!({ "messages": [{ "role": "user", "content": 3 }] }),
            json!({ "messages": ["a"] }),
            json!({}),
        ] {
            assert_eq!(chat(&body).unwrap_err().status.as_u16(), 400, "{body}");
        }
        for field in ["suffix", "template"] {
            let error = check_generate(&json!({ field: "x" })).unwrap_err();
            assert_eq!(error.param.as_deref(), Some(field));
        }
        for body in [json!({ "format": "xml" }), json!({ "think": 3 }), json!({ "format": [1] })] {
            assert!(sampling::<Nothing>(&body, Map::new(), 0).is_err(), "{body}");
        }
    }
}
