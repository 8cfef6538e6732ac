//! A reply in the form of Ollama's API: as one object, and as lines of a stream.

use std::time::{Duration, Instant};

use mantissa_model::chat;
use serde_json::{Map, Value, json};

use super::ApiError;
use super::reply::{End, Usage};
use super::sse::Framing;
use super::streamed::{Named, Reply};
use crate::engine::Progress;
use crate::tools::Piece;

/// Fields in which a reply stands.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Place {
    /// `message`, of `/api/chat`.
    Message,
    /// `response` and `thinking`, of `/api/generate`.
    Response,
}

/// Call of a tool.
#[derive(Clone, Debug)]
struct Call {
    index: usize,
    name: String,
    /// JSON text.
    arguments: String,
}

impl Call {
    /// Makes the call with its arguments as an object.
    fn value(&self) -> Value {
        let Call { index, name, arguments } = self;
        // Arguments that were cut are no object.
        let arguments = serde_json::from_str(arguments).ok().filter(Value::is_object);
        let arguments = arguments.unwrap_or_else(|| json!({}));
        json!({ "function": { "index": index, "name": name, "arguments": arguments } })
    }
}

/// A reply while it is generated.
#[derive(Clone, Debug)]
pub(super) struct OllamaReply {
    place: Place,
    model: String,
    arrived: Instant,
    text: String,
    thought: String,
    calls: Vec<Call>,
    /// Number of calls that were sent.
    sent: usize,
}

impl OllamaReply {
    /// Begins a reply of the model `model` to a request that arrived at `arrived`.
    pub(super) fn new(place: Place, model: &str, arrived: Instant) -> Self {
        let (text, thought) = Default::default();
        OllamaReply { place, model: model.to_owned(), arrived, text, thought, calls: Vec::new(), sent: 0 }
    }

    /// Makes an object with parts of the reply.
    fn object(&self, text: &str, thought: &str, calls: &[Call]) -> Map<String, Value> {
        let mut all = Map::new();
        all.insert("model".into(), json!(self.model));
        all.insert("created_at".into(), json!(now()));
        match self.place {
            Place::Message => {
                let mut message = json!({ "role": "assistant", "content": text });
                if !thought.is_empty() {
                    message["thinking"] = json!(thought);
                }
                if !calls.is_empty() {
                    message["tool_calls"] = calls.iter().map(Call::value).collect();
                }
                all.insert("message".into(), message);
            }
            Place::Response => {
                all.insert("response".into(), json!(text));
                if !thought.is_empty() {
                    all.insert("thinking".into(), json!(thought));
                }
            }
        }
        all
    }

    /// Makes a line of a stream.
    fn line(&self, text: &str, thought: &str, calls: &[Call]) -> Value {
        let mut all = self.object(text, thought, calls);
        all.insert("done".into(), json!(false));
        Value::Object(all)
    }

    /// Makes the line of a call that is complete, if there is one.
    fn complete(&mut self) -> Option<Value> {
        let call = self.calls.get(self.sent..).filter(|calls| !calls.is_empty())?;
        let line = self.line("", "", call);
        self.sent = self.calls.len();
        Some(line)
    }

    /// Adds what a reply ends with.
    fn ended(&self, mut all: Map<String, Value>, end: &End, usage: Usage) -> Value {
        let reason = match end {
            End::Length => "length",
            End::Stop | End::StopText(_) => "stop",
        };
        // Clients divide by it.
        let at_least_one = |time: Duration| nanoseconds(time).max(1);
        let load = usage.times.begun.map_or(Duration::ZERO, |begun| begun.duration_since(self.arrived));
        all.extend([
            ("done".to_owned(), json!(true)),
            ("done_reason".to_owned(), json!(reason)),
            ("total_duration".to_owned(), json!(nanoseconds(self.arrived.elapsed()))),
            ("load_duration".to_owned(), json!(nanoseconds(load))),
            ("prompt_eval_count".to_owned(), json!(usage.prompt)),
            ("prompt_eval_duration".to_owned(), json!(at_least_one(usage.times.prompt))),
            ("eval_count".to_owned(), json!(usage.new)),
            ("eval_duration".to_owned(), json!(at_least_one(usage.times.new))),
        ]);
        Value::Object(all)
    }

    /// Makes the reply to a request without a prompt, which asks for the model to be loaded or unloaded.
    pub(super) fn empty(&self, reason: &str) -> Value {
        let mut all = self.object("", "", &[]);
        all.insert("done".into(), json!(true));
        all.insert("done_reason".into(), json!(reason));
        Value::Object(all)
    }
}

fn nanoseconds(time: Duration) -> u64 {
    u64::try_from(time.as_nanos()).unwrap_or(u64::MAX)
}

/// The current time as RFC 3339 writes it.
pub(super) fn now() -> String {
    let since = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH).unwrap_or_default();
    format!("{}.{:09}Z", second(since.as_secs()), since.subsec_nanos())
}

/// Seconds since 1970 as RFC 3339 writes them.
pub(super) fn date(seconds: u64) -> String {
    second(seconds) + "Z"
}

fn second(seconds: u64) -> String {
    chat::date("%FT%T", seconds).unwrap_or_default()
}

impl Reply for OllamaReply {
    const EARLY: bool = false;

    const FRAMING: Framing = Framing::Lines;

    fn start(&mut self, _: Usage) -> Named {
        Named::new()
    }

    fn progress(&mut self, _: Progress) -> Named {
        Named::new()
    }

    fn push(&mut self, piece: Piece) -> Named {
        let mut lines = Vec::new();
        match piece {
            Piece::Text(text) => {
                lines.extend(self.complete());
                lines.push(self.line(&text, "", &[]));
                self.text += &text;
            }
            Piece::Thought(text) => {
                lines.push(self.line("", &text, &[]));
                self.thought += &text;
            }
            Piece::Call { index, name } => {
                lines.extend(self.complete());
                self.calls.push(Call { index, name, arguments: String::new() });
            }
            Piece::Arguments { text, .. } => {
                if let Some(call) = self.calls.last_mut() {
                    call.arguments.push_str(&text);
                }
            }
        }
        lines.into_iter().map(|line| ("", line)).collect()
    }

    fn finish(&mut self, end: &End, usage: Usage) -> Named {
        let mut lines: Vec<_> = self.complete().into_iter().collect();
        lines.push(self.ended(self.object("", "", &[]), end, usage));
        lines.into_iter().map(|line| ("", line)).collect()
    }

    fn fail(&mut self, error: ApiError) -> Named {
        vec![("", json!({ "error": error.message }))]
    }

    fn whole(&self, end: &End, usage: Usage) -> Value {
        self.ended(self.object(&self.text, &self.thought, &self.calls), end, usage)
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    #[test]
    fn a_reply_is_lines_and_one_object() {
        let usage = Usage { prompt: 70, cached: 64, new: 9, ..Usage::default() };
        let mut reply = OllamaReply::new(Place::Message, "m", Instant::now());
        let mut lines = reply.start(usage);
        for piece in [
            Piece::Thought("Hm".into()),
            Piece::Text("I ".into()),
            Piece::Text("look.".into()),
            Piece::Call { index: 0, name: "w".into() },
            Piece::Arguments { index: 0, text: "{\"city\": ".into() },
            Piece::Arguments { index: 0, text: "\"Bern\"}".into() },
            Piece::Call { index: 1, name: "v".into() },
            Piece::Arguments { index: 1, text: "{\"cut".into() },
        ] {
            lines.extend(reply.push(piece));
        }
        lines.extend(reply.finish(&End::Stop, usage));
        let messages: Vec<Value> = lines.iter().map(|(_, line)| line["message"].clone()).collect();
        let call = |index, name: &str, arguments: Value| json!({ "function": { "index": index, "name": name, "arguments": arguments } });
        let said = |content: &str| json!({ "role": "assistant", "content": content });
        let mut thought = said("");
        thought["thinking"] = json!("Hm");
        let calls = [call(0, "w", json!({ "city": "Bern" })), call(1, "v", json!({}))];
        assert_eq!(messages[..3], [thought, said("I "), said("look.")]);
        assert_eq!(messages[3]["tool_calls"], json!([calls[0]]));
        assert_eq!(messages[4]["tool_calls"][0]["function"]["name"], "v");
        assert_eq!(messages[5], said(""));
        let (last, before) = lines.split_last().unwrap();
        assert!(before.iter().all(|(_, line)| line["done"] == false));
        let whole = reply.whole(&End::Stop, usage);
        assert_eq!(whole["message"]["tool_calls"], json!(calls));
        assert_eq!(
            (&whole["message"]["content"], &whole["message"]["thinking"]),
            (&json!("I look."), &json!("Hm"))
        );
        for end in [&last.1, &whole] {
            assert_eq!((&end["done"], &end["done_reason"]), (&json!(true), &json!("stop")));
            assert_eq!((&end["prompt_eval_count"], &end["eval_count"]), (&json!(70), &json!(9)));
            for time in ["total_duration", "prompt_eval_duration", "eval_duration"] {
                assert!(end[time].as_u64().is_some_and(|time| time > 0), "{time}: {end}");
            }
        }
        assert_eq!(reply.ended(Map::new(), &End::Length, usage)["done_reason"], "length");
    }

    #[test]
    fn times_are_dates() {
        assert_eq!(date(1_795_381_449), "2026-11-22T21:04:09Z");
        assert!(now().len() == "2026-11-22T21:04:09.000000000Z".len() && now().ends_with('Z'));
    }
}
