//! A reply in the form of Anthropic's Messages API: as one message, and as the events of a stream.

use serde_json::{Value, json};

use super::ApiError;
use super::anthropic_error::MessagesError;
use super::reply::{End, Usage};
use super::streamed::{Named, Reply};
use crate::engine::Progress;
use crate::tools::Piece;

/// A message while it is generated. Its events are returned as their name and data.
#[derive(Clone, Debug)]
pub(crate) struct AnthropicReply {
    id: String,
    model: String,
    /// Finished blocks, and the open one.
    blocks: Vec<Value>,
    /// True if the last block is open.
    is_open: bool,
    /// Arguments of the open call.
    arguments: String,
    call_ids: u64,
}

impl AnthropicReply {
    /// Begins message `number` of the server; `model` is its name.
    pub(crate) fn new(number: u64, id: &str, model: &str) -> Self {
        AnthropicReply {
            id: format!("msg_{id}"),
            model: model.to_owned(),
            blocks: Vec::new(),
            is_open: false,
            arguments: String::new(),
            call_ids: number,
        }
    }

    fn usage(usage: Usage) -> Value {
        json!({
            "input_tokens": usage.prompt - usage.cached,
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": usage.cached,
            "output_tokens": usage.new,
        })
    }

    fn index(&self) -> usize {
        self.blocks.len().saturating_sub(1)
    }

    /// True if the open block is of this type.
    fn is_in(&self, kind: &str) -> bool {
        self.is_open && self.blocks.last().is_some_and(|block| block["type"] == kind)
    }

    /// Adds text to a block of type `kind`, whose field of that name holds it.
    fn say(&mut self, kind: &'static str, text: &str, empty: Value, events: &mut Named) {
        if !self.is_in(kind) {
            self.close(events);
            self.open(empty, events);
        }
        self.delta(json!({ "type": format!("{kind}_delta"), kind: text }), events);
        if let Some(Value::String(all)) = self.blocks.last_mut().map(|block| &mut block[kind]) {
            all.push_str(text);
        }
    }
    fn open(&mut self, block: Value, events: &mut Named) {
        let index = self.blocks.len();
        let data = json!({ "type": "content_block_start", "index": index, "content_block": block });
        events.push(("content_block_start", data));
        self.blocks.push(block);
        self.is_open = true;
    }

    fn delta(&self, delta: Value, events: &mut Named) {
        let data = json!({ "type": "content_block_delta", "index": self.index(), "delta": delta });
        events.push(("content_block_delta", data));
    }

    fn close(&mut self, events: &mut Named) {
        if self.is_in("thinking") {
            // A signature lets Anthropic's servers check a thought that comes back; this one checks none.
            self.delta(json!({ "type": "signature_delta", "signature": "" }), events);
        }
        if !std::mem::take(&mut self.is_open) {
            return;
        }
        if let Some(block) = self.blocks.last_mut().filter(|block| block["type"] == "tool_use") {
            // Arguments that were cut are no object.
            let input = serde_json::from_str(&self.arguments).ok().filter(Value::is_object);
            block["input"] = input.unwrap_or_else(|| json!({}));
        }
        events.push(("content_block_stop", json!({ "type": "content_block_stop", "index": self.index() })));
    }

    fn stop(&self, end: &End) -> [Value; 2] {
        let has_calls = self.blocks.last().is_some_and(|block| block["type"] == "tool_use");
        match end {
            End::Length => [json!("max_tokens"), Value::Null],
            End::StopText(text) => [json!("stop_sequence"), json!(text)],
            End::Stop if has_calls => [json!("tool_use"), Value::Null],
            End::Stop => [json!("end_turn"), Value::Null],
        }
    }
}

impl Reply for AnthropicReply {
    const EARLY: bool = false;

    fn start(&mut self, usage: Usage) -> Named {
        let message = json!({
            "id": self.id, "type": "message", "role": "assistant", "model": self.model, "content": [],
            "stop_reason": null, "stop_sequence": null, "usage": Self::usage(usage),
        });
        vec![("message_start", json!({ "type": "message_start", "message": message }))]
    }

    fn progress(&mut self, progress: Progress) -> Named {
        vec![("ping", json!({ "type": "ping", "prompt_progress": progress }))]
    }

    fn push(&mut self, piece: Piece) -> Named {
        let mut events = Named::new();
        match piece {
            Piece::Text(text) => {
                self.say("text", &text, json!({ "type": "text", "text": "" }), &mut events);
            }
            Piece::Thought(text) => {
                let empty = json!({ "type": "thinking", "thinking": "", "signature": "" });
                self.say("thinking", &text, empty, &mut events);
            }
            Piece::Call { index, name } => {
                self.close(&mut events);
                let id = format!("toolu_{}", crate::tools::call_id(self.call_ids, index));
                self.arguments.clear();
                self.open(json!({ "type": "tool_use", "id": id, "name": name, "input": {} }), &mut events);
            }
            Piece::Arguments { text, .. } => {
                self.delta(json!({ "type": "input_json_delta", "partial_json": text }), &mut events);
                self.arguments.push_str(&text);
            }
        }
        events
    }

    fn finish(&mut self, end: &End, usage: Usage) -> Named {
        let mut events = Named::new();
        self.close(&mut events);
        let [reason, sequence] = self.stop(end);
        let delta = json!({ "stop_reason": reason, "stop_sequence": sequence });
        let data = json!({ "type": "message_delta", "delta": delta, "usage": Self::usage(usage) });
        events.push(("message_delta", data));
        events.push(("message_stop", json!({ "type": "message_stop" })));
        events
    }

    fn fail(&mut self, error: ApiError) -> Named {
        vec![("error", json!(MessagesError::from(error).body()))]
    }

    fn whole(&self, end: &End, usage: Usage) -> Value {
        let [reason, sequence] = self.stop(end);
        json!({
            "id": self.id, "type": "message", "role": "assistant", "model": self.model, "content": self.blocks,
            "stop_reason": reason, "stop_sequence": sequence, "usage": Self::usage(usage),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn blocks_open_and_close_in_turn() {
        let usage = Usage { prompt: 70, cached: 64, new: 9, thought: 2, ..Usage::default() };
        let mut reply = AnthropicReply::new(3, "a", "m");
        let mut events = reply.start(Usage { new: 0, ..usage });
        for piece in [
            Piece::Thought("Hm".into()),
            Piece::Text("I ".into()),
            Piece::Text("look.".into()),
            Piece::Call { index: 0, name: "w".into() },
            Piece::Arguments { index: 0, text: "{\"city\": ".into() },
            Piece::Arguments { index: 0, text: "\"Bern\"}".into() },
        ] {
            events.extend(reply.push(piece));
        }
        events.extend(reply.finish(&End::Stop, usage));
        let names: Vec<_> = events.iter().map(|(name, data)| (*name, data["index"].as_u64())).collect();
        assert_eq!(
            names,
            [
                ("message_start", None),
                ("content_block_start", Some(0)),
                // The thought, and its signature.
                ("content_block_delta", Some(0)),
                ("content_block_delta", Some(0)),
                ("content_block_stop", Some(0)),
                ("content_block_start", Some(1)),
                ("content_block_delta", Some(1)),
                ("content_block_delta", Some(1)),
                ("content_block_stop", Some(1)),
                ("content_block_start", Some(2)),
                ("content_block_delta", Some(2)),
                ("content_block_delta", Some(2)),
                ("content_block_stop", Some(2)),
                ("message_delta", None),
                ("message_stop", None),
            ]
        );
        let message = reply.whole(&End::Stop, usage);
        assert_eq!(message["content"][0], json!({ "type": "thinking", "thinking": "Hm", "signature": "" }));
        assert_eq!(message["content"][1], json!({ "type": "text", "text": "I look." }));
        assert_eq!(message["content"][2]["input"], json!({ "city": "Bern" }));
        assert_eq!(message["stop_reason"], "tool_use");
        assert_eq!(message["usage"]["input_tokens"], 6);
        assert_eq!(message["usage"]["cache_read_input_tokens"], 64);
    }

    #[test]
    fn ends_have_their_reason() {
        let mut reply = AnthropicReply::new(0, "a", "m");
        reply.push(Piece::Text("a".into()));
        let usage = Usage { prompt: 1, new: 1, ..Usage::default() };
        for (end, reason, sequence) in [
            (End::Length, "max_tokens", Value::Null),
            (End::StopText("END".into()), "stop_sequence", json!("END")),
            (End::Stop, "end_turn", Value::Null),
        ] {
            let message = reply.whole(&end, usage);
            assert_eq!((&message["stop_reason"], &message["stop_sequence"]), (&json!(reason), &sequence));
        }
    }
}
