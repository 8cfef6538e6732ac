//! One line of the data.

use std::borrow::Cow;

use mantissa_model::Message;
use mantissa_store::Shown;
use serde_json::{Map, Value};

use super::super::records::{FORMS, renaming};
use super::super::text::kind;

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
    pub(super) fix: Cow<'static, str>,
}

impl Fault {
    /// Creates the fault of a line that has none of the [`FORMS`].
    fn form(found: impl Into<String>) -> Self {
        let fix = "write one JSON object of one of these forms on the line, or remove it";
        Fault { field: String::new(), found: found.into(), allowed: FORMS, fix: fix.into() }
    }

    fn new(
        field: impl Into<String>,
        found: impl Into<String>,
        allowed: &'static str,
        fix: impl Into<Cow<'static, str>>,
    ) -> Self {
        Fault { field: field.into(), found: found.into(), allowed, fix: fix.into() }
    }

    /// Creates the fault of a field that holds another value, or none.
    fn text(field: impl Into<String>, found: Option<&Value>, fix: impl Into<Cow<'static, str>>) -> Self {
        Fault::new(field, found.map_or("no such field", kind), "a text", fix)
    }
}

/// Fields of a line that tell its form, the first of two that stand together first.
const FIELDS: [&str; 6] = ["messages", "conversations", "prompt", "completion", "instruction", "text"];

impl Line {
    /// Parses a line.
    ///
    /// # Errors
    /// The field at fault.
    pub(super) fn parse(line: &str) -> Result<Self, Fault> {
        let value: Value = serde_json::from_str(line).map_err(|error| Fault::form(error.to_string()))?;
        let Value::Object(mut fields) = value else { return Err(Fault::form(kind(&value))) };
        for field in ["tools", "functions"] {
            if fields.get(field).is_some_and(|value| !value.is_null()) {
                let (found, allowed) = (format!("\"{field}\""), "conversations without tools");
                return Err(Fault::new(field, found, allowed, "remove the field"));
            }
        }
        let has = |field: &str| fields.get(field).is_some_and(|value| !value.is_null());
        let form: Vec<&str> = FIELDS.into_iter().filter(|field| has(field)).collect();
        let renaming = renaming(fields.keys());
        let parsed = match form.as_slice() {
            // Alpaca has its prompt as "text" too.
            ["instruction"] | ["instruction", "text"] => instruction(&mut fields),
            ["messages"] | ["conversations"] => {
                let name = form[0];
                let value = fields.remove(name).unwrap_or_default();
                let (mut messages, mut counted) = conversation(name, value)?;
                let system = optional(&mut fields, "system")?;
                let has_own = messages.iter().any(|message| message.role == "system");
                if let Some(system) = system.filter(|_| !has_own) {
                    messages.insert(0, Message { role: "system".to_owned(), content: system });
                    counted.insert(0, false);
                }
                Ok(counting(messages, counted))
            }
            ["prompt", "completion"] => completion(&mut fields),
            ["prompt"] if fields.contains_key("completion") => match fields.get("prompt") {
                Some(Value::String(_) | Value::Array(_)) => Ok(Line::Unanswered),
                other => Err(Fault::text("prompt", other, "write a text or a list of messages")),
            },
            ["text"] => match fields.remove("text") {
                Some(Value::String(text)) if text.is_empty() => Ok(Line::Unanswered),
                Some(Value::String(text)) => Ok(Line::Text(text)),
                other => Err(Fault::text("text", other.as_ref(), "write the document as a text")),
            },
            [] => {
                let names: Vec<_> = fields.keys().take(8).map(|name| format!("{name:?}")).collect();
                Err(Fault::form(match names.as_slice() {
                    [] => "no field".to_owned(),
                    names => format!("none of these fields, but {}", names.join(", ")),
                }))
            }
            form => {
                let shown = |name: &&str| format!("\"{name}\": {}", fields.get(*name).map_or("", kind));
                Err(Fault::form(form.iter().map(shown).collect::<Vec<_>>().join(", ")))
            }
        };
        // A pair of other names is told by its renaming, whatever its form lacks.
        let is_pair = form.is_empty() || ["prompt", "completion", "instruction"].contains(&form[0]);
        parsed.map_err(|fault| match renaming.filter(|_| is_pair) {
            Some(renaming) => Fault { fix: renaming.into(), ..fault },
            None => fault,
        })
    }
}

/// Reads a prompt with its completion: two texts, or two lists of messages.
fn completion(fields: &mut Map<String, Value>) -> Result<Line, Fault> {
    let mut take = |field: &str| fields.remove(field).unwrap_or_default();
    match (take("prompt"), take("completion")) {
        (Value::String(_), Value::String(completion)) if completion.is_empty() => Ok(Line::Unanswered),
        (Value::String(prompt), Value::String(completion)) => Ok(Line::Completion(prompt, completion)),
        (prompt @ Value::Array(_), completion @ Value::Array(_)) => {
            let (mut messages, counted) = conversation("prompt", prompt)?;
            let mut counted = vec![false; counted.len()];
            let (answers, answer_counts) = conversation("completion", completion)?;
            messages.extend(answers);
            counted.extend(answer_counts);
            Ok(counting(messages, counted))
        }
        (prompt, completion) => Err(Fault::new(
            "prompt, completion",
            format!("{} and {}", kind(&prompt), kind(&completion)),
            "two texts, or two lists of messages",
            "write both in the same form",
        )),
    }
}

/// Reads an instruction with its answer, as Alpaca's data set has them: the input follows the instruction after an empty line.
fn instruction(fields: &mut Map<String, Value>) -> Result<Line, Fault> {
    let fix = "write {\"instruction\": \"…\", \"input\": \"…\", \"output\": \"…\"}";
    let instruction = text(fields, "instruction", fix)?;
    let input = optional(fields, "input")?.unwrap_or_default();
    let output = text(fields, "output", fix)?;
    let asked = match input.trim().is_empty() {
        true => instruction,
        false => format!("{instruction}\n\n{input}"),
    };
    if output.is_empty() {
        return Ok(Line::Unanswered);
    }
    let message = |role: &str, content: String| Message { role: role.to_owned(), content };
    let system = optional(fields, "system")?.map(|system| message("system", system));
    let mut messages: Vec<Message> = system.into_iter().collect();
    messages.extend([message("user", asked), message("assistant", output)]);
    let counted = messages.iter().map(|message| message.role == "assistant").collect();
    Ok(counting(messages, counted))
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
        let fix = "write [{\"role\": \"user\", \"content\": \"…\"}, …]";
        return Err(Fault::new(field, kind(&value), "a list of messages", fix));
    };
    let read = |(i, value): (usize, Value)| message(&format!("{field}[{i}]"), value);
    messages
        .into_iter()
        .enumerate()
        .map(read)
        .collect::<Result<Vec<_>, _>>()
        .map(|all| all.into_iter().unzip())
}

/// Roles of ShareGPT's data sets, with those of chat templates.
const ROLES: [(&str, &str); 9] = [
    ("human", "user"),
    ("user", "user"),
    ("gpt", "assistant"),
    ("chatgpt", "assistant"),
    ("assistant", "assistant"),
    ("model", "assistant"),
    ("system", "system"),
    ("tool", "tool"),
    ("observation", "tool"),
];

/// Reads the message at `place`, and if it is an answer that counts.
fn message(place: &str, value: Value) -> Result<(Message, bool), Fault> {
    let fix = written(["role", "content"], "user");
    let Value::Object(mut fields) = value else {
        return Err(Fault::new(place, kind(&value), "a message of a role and a text", fix));
    };
    let named = |field: &str| format!("{place}.{field}");
    for field in ["tool_calls", "tool_call_id", "function_call"] {
        if fields.get(field).is_some_and(|value| !value.is_null()) {
            let allowed = "a message without calls of tools";
            return Err(Fault::new(named(field), field, allowed, "remove conversations with tools"));
        }
    }
    let is_sharegpt = !fields.contains_key("role") && fields.contains_key("from");
    let (role, content) = match is_sharegpt {
        true => {
            let fix = written(["from", "value"], "human");
            let from = text(&mut fields, "from", fix.clone()).map_err(|fault| fault.within(place))?;
            let Some((_, role)) = ROLES.into_iter().find(|(own, _)| own.eq_ignore_ascii_case(&from)) else {
                let allowed = "human, gpt, system or tool";
                return Err(Fault::new(named("from"), format!("{from:?}"), allowed, fix));
            };
            (role.to_owned(), content(&mut fields, place, "value", written(["from", "value"], &from))?)
        }
        false => {
            let role = text(&mut fields, "role", fix).map_err(|fault| fault.within(place))?;
            let content = content(&mut fields, place, "content", written(["role", "content"], &role))?;
            (role, content)
        }
    };
    let weight = match fields.get("weight") {
        None | Some(Value::Null) => 1.0,
        Some(weight) => {
            let known = weight.as_f64().filter(|w| [0.0, 1.0].contains(w));
            known.ok_or_else(|| Fault::new(named("weight"), weight.to_string(), "0 or 1", "write 0 or 1"))?
        }
    };
    let counts = role == "assistant" && weight == 1.0;
    Ok((Message { role, content }, counts))
}

/// Says how to write a message of `role`, with these names of its fields.
fn written([named, said]: [&str; 2], role: &str) -> String {
    format!("write it as {{\"{named}\": \"{}\", \"{said}\": \"…\"}}", Shown(role))
}

impl Fault {
    /// Returns the fault of a field of the value at `place`.
    fn within(self, place: &str) -> Self {
        Fault { field: format!("{place}.{}", self.field), ..self }
    }
}

/// Takes the text of a message: a text, or a list of parts that are texts (OpenAI's form).
fn content(fields: &mut Map<String, Value>, place: &str, field: &str, fix: String) -> Result<String, Fault> {
    let Some(Value::Array(parts)) = fields.get(field) else {
        return text(fields, field, fix).map_err(|fault| fault.within(place));
    };
    let mut all = String::new();
    for (i, part) in parts.iter().enumerate() {
        match (part.get("type").and_then(Value::as_str), part.get("text")) {
            (None | Some("text"), Some(Value::String(text))) => all += text,
            (other, _) => {
                let found = other.map_or_else(|| kind(part).to_owned(), |other| format!("{other:?}"));
                let allowed = "parts {\"type\": \"text\", \"text\": …}";
                return Err(Fault::new(format!("{place}.{field}[{i}]"), found, allowed, fix));
            }
        }
    }
    Ok(all)
}

/// Takes a text that must be there.
fn text(
    fields: &mut Map<String, Value>,
    field: &str,
    fix: impl Into<Cow<'static, str>>,
) -> Result<String, Fault> {
    match fields.remove(field) {
        Some(Value::String(text)) => Ok(text),
        other => Err(Fault::text(field, other.as_ref(), fix)),
    }
}

/// Takes a text that may be absent, null or empty.
fn optional(fields: &mut Map<String, Value>, field: &str) -> Result<Option<String>, Fault> {
    match fields.remove(field) {
        None | Some(Value::Null) => Ok(None),
        Some(Value::String(text)) => Ok(Some(text).filter(|text| !text.is_empty())),
        other => Err(Fault::text(field, other.as_ref(), "write a text, or leave the field out")),
    }
}
