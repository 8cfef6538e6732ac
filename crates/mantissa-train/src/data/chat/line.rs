//! One line of the data.

use mantissa_model::Message;
use serde_json::{Map, Value};

/// Forms that a line may have.
const FORMS: &str =
    "{\"messages\": [{\"role\": …, \"content\": …}, …]}, {\"prompt\": …, \"completion\": …} or {\"text\": …}";

/// A parsed line.
pub(super) enum Line {
    /// A conversation, and for each message if the loss counts it.
    Messages(Vec<Message>, Vec<bool>),
    /// A prompt and the completion that the loss counts.
    Completion(String, String),
    /// A document.
    Text(String),
    /// A line of one of these forms without an answer or text that the loss counts.
    Unanswered,
}

/// Fault of a line.
pub(super) struct Fault {
    /// Field at fault; empty for the whole line.
    pub(super) field: String,
    /// Value found.
    pub(super) found: String,
    /// Values allowed.
    pub(super) allowed: &'static str,
    /// Change that makes the line valid.
    pub(super) fix: &'static str,
}

impl Fault {
    /// Creates the fault of a line that has none of the [`FORMS`].
    fn form(found: impl Into<String>) -> Self {
        let fix = "write one JSON object of one of these forms on the line, or remove it";
        Fault { field: String::new(), found: found.into(), allowed: FORMS, fix }
    }

    fn new(
        field: impl Into<String>,
        found: impl Into<String>,
        allowed: &'static str,
        fix: &'static str,
    ) -> Self {
        Fault { field: field.into(), found: found.into(), allowed, fix }
    }
}

impl Line {
    /// Parses a line.
    ///
    /// # Errors
    /// The field at fault.
    pub(super) fn parse(line: &str) -> Result<Self, Fault> {
        let value: Value = serde_json::from_str(line).map_err(|error| Fault::form(error.to_string()))?;
        let Value::Object(mut fields) = value else { return Err(Fault::form("no object")) };
        for field in ["tools", "functions"] {
            if fields.get(field).is_some_and(|value| !value.is_null()) {
                let (found, allowed) = (format!("\"{field}\""), "conversations without tools");
                return Err(Fault::new(field, found, allowed, "remove the field"));
            }
        }
        let no_completion = fields.get("completion").is_some_and(Value::is_null);
        let mut take = |field: &str| fields.remove(field).filter(|value| !value.is_null());
        match (take("messages"), take("prompt"), take("completion"), take("text")) {
            (Some(messages), None, None, None) => {
                let (messages, counted) = conversation("messages", messages)?;
                Ok(counting(messages, counted))
            }
            (None, Some(Value::String(prompt)), Some(Value::String(completion)), None) => {
                Ok(match completion.is_empty() {
                    true => Line::Unanswered,
                    false => Line::Completion(prompt, completion),
                })
            }
            (None, Some(Value::String(_) | Value::Array(_)), None, None) if no_completion => {
                Ok(Line::Unanswered)
            }
            (None, Some(prompt @ Value::Array(_)), Some(completion @ Value::Array(_)), None) => {
                let (mut messages, counted) = conversation("prompt", prompt)?;
                let mut counted = vec![false; counted.len()];
                let (answers, answer_counts) = conversation("completion", completion)?;
                messages.extend(answers);
                counted.extend(answer_counts);
                Ok(counting(messages, counted))
            }
            (None, None, None, Some(Value::String(text))) => Ok(match text.is_empty() {
                true => Line::Unanswered,
                false => Line::Text(text),
            }),
            (messages, prompt, completion, text) => {
                let found =
                    [("messages", messages), ("prompt", prompt), ("completion", completion), ("text", text)];
                let found = found
                    .into_iter()
                    .filter_map(|(name, value)| Some(format!("\"{name}\": {}", kind(&value?))));
                let found = found.collect::<Vec<_>>().join(", ");
                Err(Fault::form(if found.is_empty() { "none of these fields".to_owned() } else { found }))
            }
        }
    }
}

/// Makes a conversation, if the loss counts at least one message of it.
fn counting(messages: Vec<Message>, counted: Vec<bool>) -> Line {
    match counted.contains(&true) {
        true => Line::Messages(messages, counted),
        false => Line::Unanswered,
    }
}

/// Reads messages, and for each if it is an answer that counts.
fn conversation(field: &str, value: Value) -> Result<(Vec<Message>, Vec<bool>), Fault> {
    let Value::Array(messages) = value else {
        return Err(Fault::form(format!("\"{field}\": {}", kind(&value))));
    };
    let read = |(i, value): (usize, Value)| message(&format!("{field}[{i}]"), i + 1, value);
    messages
        .into_iter()
        .enumerate()
        .map(read)
        .collect::<Result<Vec<_>, _>>()
        .map(|all| all.into_iter().unzip())
}

/// Reads the message at `place`, of this number from 1, and if it is an answer that counts.
fn message(place: &str, number: usize, value: Value) -> Result<(Message, bool), Fault> {
    const FORM: &str = "messages of a role and a text";
    let fault = |field: &str, found: &str, fix| {
        let place = if field.is_empty() { place.to_owned() } else { format!("{place}.{field}") };
        Fault::new(place, format!("message {number} with {found}"), FORM, fix)
    };
    let fix = "write it as {\"role\": \"user\", \"content\": \"…\"}";
    let Value::Object(mut fields) = value else { return Err(fault("", "no object", fix)) };
    let role = text(&mut fields, "role").ok_or_else(|| fault("role", "no role", fix))?;
    let content =
        text(&mut fields, "content").ok_or_else(|| fault("content", "no text as its content", fix))?;
    for field in ["tool_calls", "tool_call_id", "function_call"] {
        if fields.get(field).is_some_and(|value| !value.is_null()) {
            return Err(fault(field, field, "remove conversations with tools"));
        }
    }
    let weight = match fields.get("weight") {
        None | Some(Value::Null) => 1.0,
        Some(weight) => weight
            .as_f64()
            .filter(|w| [0.0, 1.0].contains(w))
            .ok_or_else(|| fault("weight", "a weight that is neither 0 nor 1", "write 0 or 1"))?,
    };
    let counts = role == "assistant" && weight == 1.0;
    Ok((Message { role, content }, counts))
}

fn text(fields: &mut Map<String, Value>, field: &str) -> Option<String> {
    match fields.remove(field) {
        Some(Value::String(text)) => Some(text),
        _ => None,
    }
}

fn kind(value: &Value) -> &'static str {
    match value {
        Value::Null => "null",
        Value::Bool(_) => "a boolean",
        Value::Number(_) => "a number",
        Value::String(text) if text.is_empty() => "an empty text",
        Value::String(_) => "a text",
        Value::Array(_) => "a list",
        Value::Object(_) => "an object",
    }
}
