//! Conversations of other APIs as OpenAI's chat messages, which chat templates take.

use serde_json::{Map, Value, json};

/// A field that cannot be used.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{field}: expected {expected}, got {found}")]
pub(crate) struct FieldError {
    /// The field, with dots and indices.
    pub(crate) field: String,
    /// Values that can be used.
    pub(crate) expected: String,
    /// Value found, shortened.
    pub(crate) found: String,
}

impl FieldError {
    pub(crate) fn new(field: impl Into<String>, expected: impl Into<String>, found: &Value) -> Self {
        let found = match found {
            Value::Null => "none".to_owned(),
            Value::Array(items) => format!("an array of {}", items.len()),
            Value::Object(_) => "an object".to_owned(),
            other => other.to_string().chars().take(80).collect(),
        };
        FieldError { field: field.into(), expected: expected.into(), found }
    }
}

type Result<T> = std::result::Result<T, FieldError>;

/// Text in a field.
fn text<'a>(object: &'a Value, field: &str, path: &str) -> Result<&'a str> {
    let value = &object[field];
    value.as_str().ok_or_else(|| FieldError::new(format!("{path}.{field}"), "a string", value))
}

/// Text of a content: a string, or a list of parts of one of the types `types`.
fn content_text(content: &Value, types: &[&str], path: &str) -> Result<String> {
    match content {
        Value::String(text) => Ok(text.clone()),
        Value::Null => Ok(String::new()),
        Value::Array(parts) => {
            let mut all = String::new();
            for (i, part) in parts.iter().enumerate() {
                let path = format!("{path}[{i}]");
                let kind = part["type"].as_str().unwrap_or_default();
                if !types.contains(&kind) {
                    return Err(unsupported(part, types, &path));
                }
                all.push_str(text(part, "text", &path)?);
            }
            Ok(all)
        }
        other => Err(FieldError::new(path, "a string or an array of parts", other)),
    }
}

fn unsupported(part: &Value, types: &[&str], path: &str) -> FieldError {
    let expected = match part["type"].as_str() {
        Some("image" | "input_image" | "image_url") => "no image (image input is not supported)".to_owned(),
        _ => format!("one of {}", types.join(", ")),
    };
    FieldError::new(format!("{path}.type"), expected, &part["type"])
}

/// Call of a tool in a message.
fn tool_call(id: &str, name: &str, arguments: String) -> Value {
    json!({ "id": id, "type": "function", "function": { "name": name, "arguments": arguments } })
}

fn items<'a>(body: &'a Value, field: &str) -> Result<&'a [Value]> {
    let value = &body[field];
    value.as_array().map(Vec::as_slice).ok_or_else(|| FieldError::new(field, "an array", value))
}

/// Messages of a request of Anthropic's API, whose text parts may be of the types listed there.
pub(crate) fn anthropic_messages(body: &Value) -> Result<Vec<Value>> {
    let mut out = Vec::new();
    if !body["system"].is_null() {
        out.push(json!({ "role": "system", "content": content_text(&body["system"], &["text"], "system")? }));
    }
    for (i, message) in items(body, "messages")?.iter().enumerate() {
        let path = format!("messages[{i}]");
        match message["role"].as_str() {
            Some("user") => anthropic_user(&message["content"], &format!("{path}.content"), &mut out)?,
            Some("assistant") => {
                out.push(anthropic_assistant(&message["content"], &format!("{path}.content"))?);
            }
            Some("system") => {
                let content = content_text(&message["content"], &["text"], &format!("{path}.content"))?;
                out.push(json!({ "role": "system", "content": content }));
            }
            _ => return Err(FieldError::new(format!("{path}.role"), "user or assistant", &message["role"])),
        }
    }
    Ok(out)
}

/// Adds a user's message: results of tools become messages of their own.
fn anthropic_user(content: &Value, path: &str, out: &mut Vec<Value>) -> Result<()> {
    let Value::Array(blocks) = content else {
        out.push(json!({ "role": "user", "content": content_text(content, &["text"], path)? }));
        return Ok(());
    };
    let mut said = String::new();
    for (i, block) in blocks.iter().enumerate() {
        let path = format!("{path}[{i}]");
        match block["type"].as_str() {
            Some("text") => said.push_str(text(block, "text", &path)?),
            Some("tool_result") => {
                let mut result = content_text(&block["content"], &["text"], &format!("{path}.content"))?;
                if block["is_error"] == true {
                    result.insert_str(0, "Error: ");
                }
                let id = text(block, "tool_use_id", &path)?;
                out.push(json!({ "role": "tool", "tool_call_id": id, "content": result }));
            }
            _ => return Err(unsupported(block, &["text", "tool_result"], &path)),
        }
    }
    if !said.is_empty() || blocks.is_empty() {
        out.push(json!({ "role": "user", "content": said }));
    }
    Ok(())
}

fn anthropic_assistant(content: &Value, path: &str) -> Result<Value> {
    let Value::Array(blocks) = content else {
        return Ok(json!({ "role": "assistant", "content": content_text(content, &["text"], path)? }));
    };
    let (mut said, mut thought, mut calls) = (String::new(), String::new(), Vec::new());
    for (i, block) in blocks.iter().enumerate() {
        let path = format!("{path}[{i}]");
        match block["type"].as_str() {
            Some("text") => said.push_str(text(block, "text", &path)?),
            Some("thinking") => thought.push_str(text(block, "thinking", &path)?),
            Some("redacted_thinking") => {}
            Some("tool_use") => {
                let input = &block["input"];
                if !input.is_object() {
                    return Err(FieldError::new(format!("{path}.input"), "an object", input));
                }
                calls.push(tool_call(
                    text(block, "id", &path)?,
                    text(block, "name", &path)?,
                    input.to_string(),
                ));
            }
            _ => return Err(unsupported(block, &["text", "thinking", "tool_use"], &path)),
        }
    }
    let mut message = Map::new();
    message.insert("role".into(), json!("assistant"));
    message.insert("content".into(), json!(said));
    if !thought.is_empty() {
        message.insert("reasoning_content".into(), json!(thought));
    }
    if !calls.is_empty() {
        message.insert("tool_calls".into(), json!(calls));
    }
    Ok(Value::Object(message))
}

/// Copies the fields of `body` that are there, under the names of chat completions.
fn take(body: &Value, names: &[(&str, &str)], out: &mut Map<String, Value>) {
    for (theirs, ours) in names {
        if !body[*theirs].is_null() {
            out.insert((*ours).into(), body[*theirs].clone());
        }
    }
}

/// Request of OpenAI's chat API that asks for the same as `body`, a request of Anthropic's.
pub(crate) fn anthropic_to_chat(body: &Value) -> Result<Value> {
    let mut out = Map::new();
    let messages = anthropic_messages(body)?;
    // A last turn of the assistant is the beginning of the answer.
    let begins = |last: &Value| last["role"] == "assistant" && last["tool_calls"].is_null();
    if messages.last().is_some_and(begins) {
        out.insert("continue_final_message".into(), json!(true));
    }
    out.insert("messages".into(), json!(messages));
    let names = [
        ("model", "model"),
        ("max_tokens", "max_tokens"),
        ("temperature", "temperature"),
        ("top_p", "top_p"),
        ("top_k", "top_k"),
        ("stop_sequences", "stop"),
        ("stream", "stream"),
        ("min_p", "min_p"),
        ("seed", "seed"),
        ("sampler", "sampler"),
        ("return_progress", "return_progress"),
    ];
    take(body, &names, &mut out);
    let config = &body["output_config"];
    take(config, &[("effort", "reasoning_effort")], &mut out);
    // `output_format` is the name that the beta had.
    for (format, path) in
        [(&config["format"], "output_config.format"), (&body["output_format"], "output_format")]
    {
        if let Some(form) = response_format(format, &["json_schema"], path)? {
            out.insert("response_format".into(), form);
        }
    }
    let thinking = &body["thinking"];
    match thinking["type"].as_str() {
        None if thinking.is_null() => {}
        Some("disabled") => _ = out.insert("reasoning_effort".into(), json!("none")),
        Some("enabled" | "adaptive") => {
            out.insert("chat_template_kwargs".into(), json!({ "enable_thinking": true }));
            take(thinking, &[("budget_tokens", "reasoning_budget")], &mut out);
        }
        _ => {
            let expected = "enabled, adaptive or disabled";
            return Err(FieldError::new("thinking.type", expected, &thinking["type"]));
        }
    }
    if !body["tools"].is_null() {
        let mut tools = Vec::new();
        for (i, tool) in items(body, "tools")?.iter().enumerate() {
            let path = format!("tools[{i}]");
            if tool["type"].as_str().is_some_and(|kind| kind != "custom") {
                let expected = "custom (tools of Anthropic's servers are not supported)";
                return Err(FieldError::new(format!("{path}.type"), expected, &tool["type"]));
            }
            let mut function = json!({ "name": text(tool, "name", &path)? });
            function["description"] = tool["description"].clone();
            function["parameters"] = tool["input_schema"].clone();
            tools.push(json!({ "type": "function", "function": function }));
        }
        out.insert("tools".into(), json!(tools));
    }
    let choice = &body["tool_choice"];
    if !choice.is_null() {
        let chosen = match choice["type"].as_str() {
            Some("auto") => json!("auto"),
            Some("any") => json!("required"),
            Some("none") => json!("none"),
            Some("tool") => {
                json!({ "type": "function", "function": { "name": text(choice, "name", "tool_choice")? } })
            }
            _ => {
                let expected = "auto, any, tool or none";
                return Err(FieldError::new("tool_choice.type", expected, &choice["type"]));
            }
        };
        out.insert("tool_choice".into(), chosen);
        if choice["disable_parallel_tool_use"] == true {
            out.insert("parallel_tool_calls".into(), json!(false));
        }
    }
    Ok(Value::Object(out))
}

/// Form of a reply as the chat API has it, of one of the `types`; `None` for any text.
fn response_format(format: &Value, types: &[&str], path: &str) -> Result<Option<Value>> {
    if format.is_null() {
        return Ok(None);
    }
    let kind = format["type"].as_str().filter(|kind| types.contains(kind));
    Ok(match kind {
        Some("text") => None,
        Some("json_object") => Some(json!({ "type": "json_object" })),
        Some("json_schema") => {
            let inner =
                json!({ "name": format["name"], "schema": format["schema"], "strict": format["strict"] });
            Some(json!({ "type": "json_schema", "json_schema": inner }))
        }
        _ => return Err(FieldError::new(format!("{path}.type"), types.join(" or "), &format["type"])),
    })
}

/// Fields of a request of Anthropic's Messages API that are read.
pub(crate) const ANTHROPIC_FIELDS: &[&str] = &[
    "max_tokens",
    "messages",
    "min_p",
    "model",
    "output_config",
    "output_format",
    "return_progress",
    "sampler",
    "seed",
    "stop_sequences",
    "stream",
    "system",
    "temperature",
    "thinking",
    "tool_choice",
    "tools",
    "top_k",
    "top_p",
];

/// Fields of a request of OpenAI's Responses API that are read.
pub(crate) const RESPONSES_FIELDS: &[&str] = &[
    "background",
    "conversation",
    "input",
    "instructions",
    "max_output_tokens",
    "min_p",
    "model",
    "parallel_tool_calls",
    "previous_response_id",
    "prompt",
    "reasoning",
    "return_progress",
    "sampler",
    "seed",
    "stream",
    "temperature",
    "text",
    "tool_choice",
    "tools",
    "top_k",
    "top_p",
];

/// Messages of a request of OpenAI's Responses API.
fn responses_messages(body: &Value) -> Result<Vec<Value>> {
    let mut out: Vec<Value> = Vec::new();
    if !body["instructions"].is_null() {
        let content = content_text(&body["instructions"], &["input_text", "text"], "instructions")?;
        out.push(json!({ "role": "system", "content": content }));
    }
    if let Value::String(text) = &body["input"] {
        out.push(json!({ "role": "user", "content": text }));
        return Ok(out);
    }
    for (i, item) in items(body, "input")?.iter().enumerate() {
        let path = format!("input[{i}]");
        match item["type"].as_str().unwrap_or("message") {
            "message" => {
                let role = match item["role"].as_str() {
                    Some("developer" | "system") => "system",
                    Some("user") => "user",
                    Some("assistant") => "assistant",
                    _ => {
                        let expected = "user, assistant, system or developer";
                        return Err(FieldError::new(format!("{path}.role"), expected, &item["role"]));
                    }
                };
                let types = ["input_text", "output_text", "text", "refusal"];
                let content = content_text(&item["content"], &types, &format!("{path}.content"))?;
                out.push(json!({ "role": role, "content": content }));
            }
            "function_call" => {
                let id = text(item, "call_id", &path)?;
                let call =
                    tool_call(id, text(item, "name", &path)?, text(item, "arguments", &path)?.to_owned());
                match out.last_mut() {
                    Some(Value::Object(last)) if last["role"] == "assistant" => {
                        match last.entry("tool_calls").or_insert_with(|| json!([])) {
                            Value::Array(calls) => calls.push(call),
                            other => *other = json!([call]),
                        }
                    }
                    _ => out.push(json!({ "role": "assistant", "content": "", "tool_calls": [call] })),
                }
            }
            "function_call_output" => {
                let id = text(item, "call_id", &path)?;
                let types = ["input_text", "output_text", "text"];
                let content = content_text(&item["output"], &types, &format!("{path}.output"))?;
                out.push(json!({ "role": "tool", "tool_call_id": id, "content": content }));
            }
            "reasoning" => {}
            _ => {
                let expected = "message, function_call, function_call_output or reasoning";
                return Err(FieldError::new(format!("{path}.type"), expected, &item["type"]));
            }
        }
    }
    Ok(out)
}

/// Request of OpenAI's chat API that asks for the same as `body`, a request of its Responses API.
pub(crate) fn responses_to_chat(body: &Value) -> Result<Value> {
    for field in ["previous_response_id", "conversation", "prompt"] {
        if !body[field].is_null() {
            let expected = "none: responses are not stored; fix: send the whole conversation in `input`";
            return Err(FieldError::new(field, expected, &body[field]));
        }
    }
    if body["background"] == true {
        return Err(FieldError::new("background", "false", &body["background"]));
    }
    let mut out = Map::new();
    out.insert("messages".into(), json!(responses_messages(body)?));
    let names = [
        ("model", "model"),
        ("max_output_tokens", "max_tokens"),
        ("temperature", "temperature"),
        ("top_p", "top_p"),
        ("top_k", "top_k"),
        ("min_p", "min_p"),
        ("seed", "seed"),
        ("stream", "stream"),
        ("parallel_tool_calls", "parallel_tool_calls"),
        ("sampler", "sampler"),
        ("return_progress", "return_progress"),
    ];
    take(body, &names, &mut out);
    take(&body["reasoning"], &[("effort", "reasoning_effort")], &mut out);
    if !body["tools"].is_null() {
        let mut tools = Vec::new();
        for (i, tool) in items(body, "tools")?.iter().enumerate() {
            let path = format!("tools[{i}]");
            if tool["type"] != "function" {
                return Err(FieldError::new(format!("{path}.type"), "function", &tool["type"]));
            }
            let mut function = json!({ "name": text(tool, "name", &path)? });
            for field in ["description", "parameters", "strict"] {
                if !tool[field].is_null() {
                    function[field] = tool[field].clone();
                }
            }
            tools.push(json!({ "type": "function", "function": function }));
        }
        out.insert("tools".into(), json!(tools));
    }
    match &body["tool_choice"] {
        Value::Null => {}
        Value::Object(choice) if choice.get("type") == Some(&json!("function")) => {
            let name = text(&body["tool_choice"], "name", "tool_choice")?;
            out.insert("tool_choice".into(), json!({ "type": "function", "function": { "name": name } }));
        }
        Value::String(choice) => _ = out.insert("tool_choice".into(), json!(choice)),
        other => {
            let expected = "auto, none, required or a function";
            return Err(FieldError::new("tool_choice", expected, other));
        }
    }
    let types = ["text", "json_object", "json_schema"];
    if let Some(form) = response_format(&body["text"]["format"], &types, "text.format")? {
        out.insert("response_format".into(), form);
    }
    Ok(Value::Object(out))
}

#[cfg(test)]
#[allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]
mod tests {
    use super::*;

    #[test]
    fn conversations_of_anthropic_become_chat_messages() {
        let body = json!({
            "max_tokens": 5,
            "system": [{ "type": "text", "text": "Be" }, { "type": "text", "text": " brief." }],
            "messages": [
                { "role": "user", "content": "Weather?" },
                { "role": "assistant", "content": [
                    { "type": "thinking", "thinking": "Ask.", "signature": "" },
                    { "type": "text", "text": "I look." },
                    { "type": "tool_use", "id": "t1", "name": "w", "input": { "city": "Bern" } }
                ] },
                { "role": "user", "content": [
                    { "type": "tool_result", "tool_use_id": "t1", "content": [{ "type": "text", "text": "none" }], "is_error": true },
                    { "type": "text", "text": "And?" }
                ] }
            ],
            "stop_sequences": ["END"],
            "thinking": { "type": "enabled", "budget_tokens": 20 },
            "tools": [{ "name": "w", "description": "d", "input_schema": { "type": "object" } }],
            "tool_choice": { "type": "any", "disable_parallel_tool_use": true }
        });
        assert_eq!(
            anthropic_to_chat(&body).unwrap(),
            json!({
                "messages": [
                    { "role": "system", "content": "Be brief." },
                    { "role": "user", "content": "Weather?" },
                    { "role": "assistant", "content": "I look.", "reasoning_content": "Ask.", "tool_calls": [
                        { "id": "t1", "type": "function", "function": { "name": "w", "arguments": "{\"city\":\"Bern\"}" } }
                    ] },
                    { "role": "tool", "tool_call_id": "t1", "content": "Error: none" },
                    { "role": "user", "content": "And?" }
                ],
                "max_tokens": 5,
                "stop": ["END"],
                "chat_template_kwargs": { "enable_thinking": true },
                "reasoning_budget": 20,
                "tools": [{ "type": "function", "function": { "name": "w", "description": "d", "parameters": { "type": "object" } } }],
                "tool_choice": "required",
                "parallel_tool_calls": false
            })
        );
    }

    #[test]
    fn a_last_turn_of_the_assistant_begins_the_answer() {
        let user = json!({ "role": "user", "content": "Weather?" });
        let begun = json!({ "messages": [user, { "role": "assistant", "content": "It is" }] });
        assert_eq!(anthropic_to_chat(&begun).unwrap()["continue_final_message"], true);
        let call = json!([{ "type": "tool_use", "id": "t", "name": "w", "input": {} }]);
        for messages in [json!([user]), json!([user, { "role": "assistant", "content": call }])] {
            let chat = anthropic_to_chat(&json!({ "messages": messages })).unwrap();
            assert!(chat["continue_final_message"].is_null(), "{chat}");
        }
    }

    #[test]
    fn conversations_of_responses_become_chat_messages() {
        let body = json!({
            "instructions": "Be brief.",
            "input": [
                { "role": "user", "content": [{ "type": "input_text", "text": "Weather?" }] },
                { "type": "reasoning", "summary": [] },
                { "type": "message", "role": "assistant", "content": [{ "type": "output_text", "text": "I look." }] },
                { "type": "function_call", "call_id": "c1", "name": "w", "arguments": "{}" },
                { "type": "function_call_output", "call_id": "c1", "output": "sun" }
            ],
            "max_output_tokens": 9,
            "reasoning": { "effort": "none" },
            "tools": [{ "type": "function", "name": "w", "parameters": {}, "strict": true }],
            "tool_choice": { "type": "function", "name": "w" },
            "text": { "format": { "type": "json_schema", "name": "n", "schema": { "type": "object" }, "strict": true } }
        });
        let chat = responses_to_chat(&body).unwrap();
        assert_eq!(
            chat["messages"],
            json!([
                { "role": "system", "content": "Be brief." },
                { "role": "user", "content": "Weather?" },
                { "role": "assistant", "content": "I look.", "tool_calls": [
                    { "id": "c1", "type": "function", "function": { "name": "w", "arguments": "{}" } }
                ] },
                { "role": "tool", "tool_call_id": "c1", "content": "sun" }
            ])
        );
        assert_eq!((&chat["max_tokens"], &chat["reasoning_effort"]), (&json!(9), &json!("none")));
        assert_eq!(chat["tool_choice"]["function"]["name"], "w");
        assert_eq!(chat["response_format"]["json_schema"]["schema"], json!({ "type": "object" }));
        assert_eq!(responses_to_chat(&json!({ "input": "Hi" })).unwrap()["messages"][0]["content"], "Hi");
    }

    #[test]
    fn faults_name_the_field() {
        let anthropic = |body: Value| anthropic_to_chat(&body).unwrap_err().field;
        assert_eq!(anthropic(json!({})), "messages");
        assert_eq!(anthropic(json!({ "messages": [{ "role": "x" }] })), "messages[0].role");
        let block = json!({ "type": "image", "source": {} });
        let image = json!({ "messages": [{ "role": "user", "content": [block] }] });
        let error = anthropic_to_chat(&image).unwrap_err();
        assert_eq!(error.field, "messages[0].content[0].type");
        assert!(error.to_string().contains("image input is not supported"));
        let tool = json!({ "messages": [], "tools": [{ "name": 3 }] });
        assert_eq!(anthropic(tool), "tools[0].name");
        let responses = |body: Value| responses_to_chat(&body).unwrap_err().field;
        assert_eq!(responses(json!({})), "input");
        assert_eq!(responses(json!({ "input": "a", "previous_response_id": "r" })), "previous_response_id");
        assert_eq!(responses(json!({ "input": [{ "role": "user", "content": 3 }] })), "input[0].content");
        assert_eq!(responses(json!({ "input": "a", "tools": [{ "type": "web_search" }] })), "tools[0].type");
    }
}
