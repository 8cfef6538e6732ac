//! A reply in the form of OpenAI's Responses API: as one response, and as the events of a stream.

use serde_json::{Value, json};

use super::ApiError;
use super::reply::{End, Usage};
use super::streamed::{Named, Reply};
use crate::engine::Progress;
use crate::tools::Piece;

/// A response while it is generated. Its events are returned as their name and data.
#[derive(Clone, Debug)]
pub(crate) struct ResponsesReply {
    /// The response without its results.
    base: Value,
    /// Unique part of the ids.
    id: String,
    number: u64,
    /// Finished items, and the open one.
    output: Vec<Value>,
    is_open: bool,
    /// Text of the open message or thought, or arguments of the open call.
    text: String,
    sequence: u64,
}

impl ResponsesReply {
    /// Begins response `number` of the server, to the request `body`, at `created` seconds since 1970.
    pub(crate) fn new(number: u64, id: &str, model: &str, created: u64, body: &Value) -> Self {
        let or =
            |field: &str, default: Value| if body[field].is_null() { default } else { body[field].clone() };
        let text = if body["text"].is_object() { body["text"].clone() } else { json!({}) };
        let format =
            if text["format"].is_object() { text["format"].clone() } else { json!({ "type": "text" }) };
        let base = json!({
            "id": format!("resp_{id}"),
            "object": "response",
            "created_at": created,
            "status": "in_progress",
            "background": false,
            "error": null,
            "incomplete_details": null,
            "instructions": body["instructions"],
            "max_output_tokens": body["max_output_tokens"],
            "metadata": or("metadata", json!({})),
            "model": model,
            "output": [],
            "parallel_tool_calls": or("parallel_tool_calls", json!(true)),
            "previous_response_id": null,
            "reasoning": { "effort": null, "summary": null },
            "store": false,
            "temperature": or("temperature", json!(1.0)),
            "text": { "format": format },
            "tool_choice": or("tool_choice", json!("auto")),
            "tools": or("tools", json!([])),
            "top_p": or("top_p", json!(1.0)),
            "truncation": "disabled",
            "usage": null,
            "user": body["user"],
        });
        ResponsesReply {
            base,
            id: id.to_owned(),
            number,
            output: Vec::new(),
            is_open: false,
            text: String::new(),
            sequence: 0,
        }
    }

    fn event(&mut self, name: &'static str, mut data: Value, events: &mut Named) {
        data["type"] = json!(name);
        data["sequence_number"] = json!(self.sequence);
        self.sequence += 1;
        events.push((name, data));
    }

    fn at(&self) -> usize {
        self.output.len().saturating_sub(1)
    }

    fn open_kind(&self) -> Option<&str> {
        self.output.last().filter(|_| self.is_open)?["type"].as_str()
    }

    fn item_id(&self) -> Value {
        self.output.last().map_or(Value::Null, |item| item["id"].clone())
    }

    fn open(&mut self, item: Value, events: &mut Named) {
        let data = json!({ "output_index": self.output.len(), "item": item });
        self.output.push(item);
        self.is_open = true;
        self.text.clear();
        self.event("response.output_item.added", data, events);
    }

    /// Begins an item with text, unless one of its form is open.
    fn open_text(&mut self, form: &'static Form, events: &mut Named) {
        if self.open_kind() == Some(form.kind) {
            return;
        }
        self.close("completed", events);
        let id = format!("{}_{}_{}", form.prefix, self.id, self.output.len());
        let mut item = json!({ "type": form.kind, "id": id, "status": "in_progress", "content": [] });
        match form.kind {
            "message" => item["role"] = json!("assistant"),
            _ => item["summary"] = json!([]),
        }
        self.open(item, events);
        let data = json!({
            "item_id": id, "output_index": self.at(), "content_index": 0, "part": form.part(""),
        });
        self.event("response.content_part.added", data, events);
    }

    /// Adds text to an item of the form `form`.
    fn say(&mut self, form: &'static Form, text: &str, events: &mut Named) {
        self.open_text(form, events);
        self.text.push_str(text);
        let mut data = json!({
            "item_id": self.item_id(), "output_index": self.at(), "content_index": 0, "delta": text,
        });
        form.add_logprobs(&mut data);
        self.event(form.delta, data, events);
    }

    /// Ends the open item.
    fn close(&mut self, status: &str, events: &mut Named) {
        let Some(kind) = self.open_kind().map(str::to_owned) else { return };
        let (id, at, text) = (self.item_id(), self.at(), std::mem::take(&mut self.text));
        match FORMS.iter().find(|form| form.kind == kind) {
            Some(form) => {
                let place = json!({ "item_id": id, "output_index": at, "content_index": 0 });
                let mut done = place.clone();
                done["text"] = json!(text);
                form.add_logprobs(&mut done);
                self.event(form.done, done, events);
                let mut done = place;
                done["part"] = form.part(&text);
                self.event("response.content_part.done", done, events);
                self.output[at]["content"] = json!([form.part(&text)]);
            }
            None => {
                let name = self.output[at]["name"].clone();
                let done = json!({ "item_id": id, "output_index": at, "name": name, "arguments": text });
                self.event("response.function_call_arguments.done", done, events);
                self.output[at]["arguments"] = json!(text);
            }
        }
        self.is_open = false;
        self.output[at]["status"] = json!(status);
        let data = json!({ "output_index": at, "item": self.output[at] });
        self.event("response.output_item.done", data, events);
    }
}

/// Item of text: its type, the beginning of its id, its part, and its events.
struct Form {
    kind: &'static str,
    prefix: &'static str,
    part: &'static str,
    delta: &'static str,
    done: &'static str,
}

/// Messages, and thoughts.
static FORMS: [Form; 2] = [
    Form {
        kind: "message",
        prefix: "msg",
        part: "output_text",
        delta: "response.output_text.delta",
        done: "response.output_text.done",
    },
    Form {
        kind: "reasoning",
        prefix: "rs",
        part: "reasoning_text",
        delta: "response.reasoning_text.delta",
        done: "response.reasoning_text.done",
    },
];

impl Form {
    /// Part of the content.
    fn part(&self, text: &str) -> Value {
        let mut part = json!({ "type": self.part, "text": text });
        if self.part == "output_text" {
            part["annotations"] = json!([]);
        }
        self.add_logprobs(&mut part);
        part
    }

    /// Adds the probabilities, which only messages have, and none of them here.
    fn add_logprobs(&self, data: &mut Value) {
        if self.part == "output_text" {
            data["logprobs"] = json!([]);
        }
    }
}

impl Reply for ResponsesReply {
    const EARLY: bool = true;

    fn start(&mut self, _: Usage) -> Named {
        let mut events = Named::new();
        for name in ["response.created", "response.in_progress"] {
            let data = json!({ "response": self.base });
            self.event(name, data, &mut events);
        }
        events
    }

    fn progress(&mut self, progress: Progress) -> Named {
        let mut events = Named::new();
        let data = json!({ "response": self.base, "prompt_progress": progress });
        self.event("response.in_progress", data, &mut events);
        events
    }

    fn push(&mut self, piece: Piece) -> Named {
        let mut events = Named::new();
        let [message, thought] = &FORMS;
        match piece {
            Piece::Text(text) => self.say(message, &text, &mut events),
            Piece::Thought(text) => self.say(thought, &text, &mut events),
            Piece::Call { index, name } => {
                self.close("completed", &mut events);
                self.open(
                    json!({
                        "type": "function_call",
                        "id": format!("fc_{}_{index}", self.id),
                        "call_id": format!("call_{}", crate::tools::call_id(self.number, index)),
                        "name": name, "arguments": "", "status": "in_progress",
                    }),
                    &mut events,
                );
            }
            Piece::Arguments { text, .. } => {
                self.text.push_str(&text);
                let data = json!({ "item_id": self.item_id(), "output_index": self.at(), "delta": text });
                self.event("response.function_call_arguments.delta", data, &mut events);
            }
        }
        events
    }

    fn finish(&mut self, end: &End, usage: Usage) -> Named {
        let mut events = Named::new();
        let is_cut = *end == End::Length;
        self.close(if is_cut { "incomplete" } else { "completed" }, &mut events);
        let data = json!({ "response": self.whole(end, usage) });
        let name = if is_cut { "response.incomplete" } else { "response.completed" };
        self.event(name, data, &mut events);
        events
    }

    fn fail(&mut self, error: ApiError) -> Named {
        let mut events = Named::new();
        let mut response = self.base.clone();
        response["status"] = json!("failed");
        response["error"] = json!({ "code": "server_error", "message": error.message });
        response["output"] = json!(self.output);
        self.event("response.failed", json!({ "response": response }), &mut events);
        events
    }

    fn whole(&self, end: &End, usage: Usage) -> Value {
        let mut response = self.base.clone();
        response["output"] = json!(self.output);
        response["status"] = json!("completed");
        if *end == End::Length {
            response["status"] = json!("incomplete");
            response["incomplete_details"] = json!({ "reason": "max_output_tokens" });
        }
        response["usage"] = json!({
            "input_tokens": usage.prompt,
            "input_tokens_details": { "cached_tokens": usage.cached },
            "output_tokens": usage.new,
            "output_tokens_details": { "reasoning_tokens": usage.thought },
            "total_tokens": usage.prompt + usage.new,
        });
        response
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn items_open_and_close_in_turn() {
        let usage = Usage { prompt: 70, cached: 64, new: 9, thought: 2, ..Usage::default() };
        let mut reply = ResponsesReply::new(3, "a", "m", 7, &json!({ "input": "Hi", "temperature": 0.5 }));
        let mut events = reply.start(usage);
        for piece in [
            Piece::Thought("Hm".into()),
            Piece::Text("I ".into()),
            Piece::Text("look.".into()),
            Piece::Call { index: 0, name: "w".into() },
            Piece::Arguments { index: 0, text: "{}".into() },
        ] {
            events.extend(reply.push(piece));
        }
        events.extend(reply.finish(&End::Stop, usage));
        let names: Vec<_> = events.iter().map(|(name, _)| name.trim_start_matches("response.")).collect();
        assert_eq!(
            names,
            [
                "created",
                "in_progress",
                "output_item.added",
                "content_part.added",
                "reasoning_text.delta",
                "reasoning_text.done",
                "content_part.done",
                "output_item.done",
                "output_item.added",
                "content_part.added",
                "output_text.delta",
                "output_text.delta",
                "output_text.done",
                "content_part.done",
                "output_item.done",
                "output_item.added",
                "function_call_arguments.delta",
                "function_call_arguments.done",
                "output_item.done",
                "completed",
            ]
        );
        assert!((0..).zip(&events).all(|(i, (_, data))| data["sequence_number"] == json!(i)));
        let response = &events.last().map(|(_, data)| data["response"].clone()).unwrap_or_default();
        assert_eq!(response["output"][0]["content"][0], json!({ "type": "reasoning_text", "text": "Hm" }));
        assert_eq!(response["output"][1]["content"][0]["text"], "I look.");
        assert_eq!(response["usage"]["output_tokens_details"]["reasoning_tokens"], 2);
        assert_eq!(response["output"][2]["arguments"], "{}");
        assert_eq!(response["usage"]["total_tokens"], 79);
        assert_eq!((&response["temperature"], &response["status"]), (&json!(0.5), &json!("completed")));
        assert_eq!(reply.whole(&End::Length, usage)["incomplete_details"]["reason"], "max_output_tokens");
    }
}
