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
}

/// Value found, and the allowed ones.
pub(super) type Fault = (String, &'static str);

impl Line {
    /// Parses a line.
    ///
    /// # Errors
    /// The value found and the forms allowed.
    pub(super) fn parse(line: &str) -> Result<Self, Fault> {
        let value: Value = serde_json::from_str(line).map_err(|error| (error.to_string(), FORMS))?;
        let Value::Object(mut fields) = value else { return Err(("no object".to_owned(), FORMS)) };
        for field in ["tools", "functions"] {
            if fields.get(field).is_some_and(|value| !value.is_null()) {
                return Err((format!("\"{field}\""), "conversations without tools"));
            }
        }
        let mut take = |field: &str| fields.remove(field).filter(|value| !value.is_null());
        match (take("messages"), take("prompt"), take("completion"), take("text")) {
            (Some(messages), None, None, None) => {
                let (messages, counted) = conversation("messages", messages)?;
                counting(messages, counted)
            }
            (None, Some(Value::String(prompt)), Some(Value::String(completion)), None) => {
                match completion.is_empty() {
                    true => Err(("an empty completion".to_owned(), "a completion of one character or more")),
                    false => Ok(Line::Completion(prompt, completion)),
                }
            }
            (None, Some(prompt @ Value::Array(_)), Some(completion @ Value::Array(_)), None) => {
                let (mut messages, counted) = conversation("prompt", prompt)?;
                let mut counted = vec![false; counted.len()];
                let (answers, of_answers) = conversation("completion", completion)?;
                messages.extend(answers);
                counted.extend(of_answers);
                counting(messages, counted)
            }
            (None, None, None, Some(Value::String(text))) if !text.is_empty() => Ok(Line::Text(text)),
            (messages, prompt, completion, text) => {
                let found =
                    [("messages", messages), ("prompt", prompt), ("completion", completion), ("text", text)];
                let found = found
                    .into_iter()
                    .filter_map(|(name, value)| Some(format!("\"{name}\": {}", kind(&value?))));
                let found = found.collect::<Vec<_>>().join(", ");
                Err((if found.is_empty() { "none of these fields".to_owned() } else { found }, FORMS))
            }
        }
    }
}

/// Makes a conversation in which the loss counts at least one message.
fn counting(messages: Vec<Message>, counted: Vec<bool>) -> Result<Line, Fault> {
    match counted.contains(&true) {
        true => Ok(Line::Messages(messages, counted)),
        false => Err(("no message of the assistant that counts".to_owned(), "one answer or more")),
    }
}

/// Reads messages, and for each if it is an answer that counts.
fn conversation(field: &str, value: Value) -> Result<(Vec<Message>, Vec<bool>), Fault> {
    let Value::Array(messages) = value else { return Err((format!("\"{field}\": {}", kind(&value)), FORMS)) };
    let read = |(i, value): (usize, Value)| {
        let fault =
            |found: &str| (format!("message {} with {found}", i + 1), "messages of a role and a text");
        let Value::Object(mut fields) = value else { return Err(fault("no object")) };
        let role = text(&mut fields, "role").ok_or_else(|| fault("no role"))?;
        let content = text(&mut fields, "content").ok_or_else(|| fault("no text as its content"))?;
        for field in ["tool_calls", "tool_call_id", "function_call"] {
            if fields.get(field).is_some_and(|value| !value.is_null()) {
                return Err(fault(field));
            }
        }
        let weight = match fields.get("weight") {
            None | Some(Value::Null) => 1.0,
            Some(weight) => weight
                .as_f64()
                .filter(|w| [0.0, 1.0].contains(w))
                .ok_or_else(|| fault("a weight that is neither 0 nor 1"))?,
        };
        let counts = role == "assistant" && weight == 1.0;
        Ok((Message { role, content }, counts))
    };
    messages
        .into_iter()
        .enumerate()
        .map(read)
        .collect::<Result<Vec<_>, _>>()
        .map(|all| all.into_iter().unzip())
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
