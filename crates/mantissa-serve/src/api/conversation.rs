//! Messages of a conversation, and how chat templates read them.

use serde::Deserialize;
use serde_json::{Value, json};
use utoipa::ToSchema;

use super::ApiError;
use super::offered::calls_of_message;

/// Text of a message, whole or in parts.
#[derive(Clone, Debug, Deserialize, ToSchema)]
#[serde(untagged, expecting = "a string or a list of parts")]
enum Content {
    Text(String),
    Parts(Vec<ContentPart>),
}

/// Part of a message.
#[derive(Clone, Debug, Deserialize, ToSchema)]
struct ContentPart {
    /// `text`.
    #[serde(rename = "type")]
    kind: String,
    text: Option<String>,
}

/// Message of a conversation.
#[derive(Clone, Debug, Deserialize, ToSchema)]
pub(crate) struct ChatMessage {
    /// `system`, `developer`, `user`, `assistant` or `tool`.
    role: String,
    content: Option<Content>,
    name: Option<String>,
    #[schema(value_type = Option<Vec<Object>>)]
    tool_calls: Option<Vec<Value>>,
    tool_call_id: Option<String>,
    reasoning_content: Option<String>,
}

impl ChatMessage {
    /// Makes the message as templates read it. `at` is its index.
    fn value(self, at: usize) -> Result<Value, ApiError> {
        let role = match self.role.as_str() {
            // Templates know the older name.
            "developer" => "system",
            role @ ("system" | "user" | "assistant" | "tool" | "function") => role,
            other => {
                let allowed = "system, developer, user, assistant or tool";
                return Err(ApiError::field(format!("messages[{at}].role"), other, allowed));
            }
        };
        let mut value = json!({ "role": role });
        value["content"] = match self.content {
            Some(Content::Text(text)) => text.into(),
            Some(Content::Parts(parts)) => joined(parts, at)?.into(),
            // A turn that only calls tools has no text.
            None if self.tool_calls.is_some() => "".into(),
            None => return Err(ApiError::field(format!("messages[{at}].content"), "nothing", "a text")),
        };
        let others = [
            ("name", self.name.map(Value::from)),
            ("tool_calls", self.tool_calls.map(|calls| calls_of_message(calls, at)).transpose()?),
            ("tool_call_id", self.tool_call_id.map(Value::from)),
            ("reasoning_content", self.reasoning_content.map(Value::from)),
        ];
        for (name, other) in others {
            if let Some(other) = other {
                value[name] = other;
            }
        }
        Ok(value)
    }
}

/// Joins the parts of a message, which are all text.
fn joined(parts: Vec<ContentPart>, at: usize) -> Result<String, ApiError> {
    let text = |(i, part): (usize, ContentPart)| match (part.kind.as_str(), part.text) {
        ("text" | "input_text" | "output_text", Some(text)) => Ok(text),
        ("text" | "input_text" | "output_text", None) => {
            Err(ApiError::field(format!("messages[{at}].content[{i}].text"), "nothing", "a text"))
        }
        (kind, _) => Err(ApiError::field(format!("messages[{at}].content[{i}].type"), kind, "text")),
    };
    Ok(parts.into_iter().enumerate().map(text).collect::<Result<Vec<_>, _>>()?.join("\n"))
}

/// Makes the messages as templates read them.
///
/// # Errors
/// Status 400 without messages, or for one that no template reads.
pub(crate) fn values(messages: Vec<ChatMessage>) -> Result<Vec<Value>, ApiError> {
    if messages.is_empty() {
        return Err(ApiError::field("messages", "none", "at least one"));
    }
    messages.into_iter().enumerate().map(|(at, message)| message.value(at)).collect()
}
