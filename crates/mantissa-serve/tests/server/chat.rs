//! `/v1/chat/completions` and `/apply-template`.

use serde_json::{Value, json};

use crate::support::plain;

fn conversation() -> Value {
    json!([{"role": "system", "content": "Once upon a time"}, {"role": "user", "content": [{"type": "text", "text": "there was a dog"}]}])
}

#[test]
fn an_answer_continues_the_rendered_conversation() {
    let server = plain();
    let prompt = server.json("/apply-template", &json!({"messages": conversation()}))["prompt"].clone();
    assert!(prompt.as_str().unwrap().ends_with("Once upon a time there was a dog"), "{prompt}");
    let ask = json!({"messages": conversation(), "max_tokens": 10, "temperature": 0});
    let answer = server.json("/v1/chat/completions", &ask);
    assert_eq!(answer["object"], "chat.completion");
    assert_eq!(answer["choices"][0]["message"]["role"], "assistant");
    let ask = json!({"prompt": "Once upon a time there was a dog", "max_tokens": 10, "temperature": 0});
    let completion = server.json("/v1/completions", &ask);
    assert_eq!(answer["choices"][0]["message"]["content"], completion["choices"][0]["text"]);
    assert_eq!(answer["usage"], completion["usage"]);
}

#[test]
fn a_streamed_answer_has_a_role_pieces_and_an_end() {
    let server = plain();
    let mut ask = json!({"messages": conversation(), "max_completion_tokens": 8, "temperature": 0, "logprobs": true, "top_logprobs": 2});
    let whole = server.json("/v1/chat/completions", &ask);
    ask["stream"] = true.into();
    ask["stream_options"] = json!({"include_usage": true});
    let events = server.post("/v1/chat/completions", &ask.to_string()).events();
    assert!(
        events
            .iter()
            .all(|event| event["object"] == "chat.completion.chunk" && event["id"] == events[0]["id"])
    );
    assert_eq!(events[0]["choices"][0]["delta"], json!({"role": "assistant", "content": ""}));
    let (last, pieces) = events.split_last().unwrap();
    assert_eq!(last["usage"], whole["usage"]);
    let choices: Vec<&Value> = pieces.iter().map(|event| &event["choices"][0]).collect();
    let text: String = choices.iter().filter_map(|choice| choice["delta"]["content"].as_str()).collect();
    assert_eq!(text, whole["choices"][0]["message"]["content"].as_str().unwrap());
    let logprobs: Vec<Value> = choices
        .iter()
        .filter_map(|choice| choice["logprobs"]["content"].as_array())
        .flatten()
        .cloned()
        .collect();
    assert_eq!(logprobs.len(), 8);
    assert_eq!(Value::from(logprobs), whole["choices"][0]["logprobs"]["content"]);
    assert_eq!(choices.last().unwrap()["finish_reason"], "length");
}

#[test]
fn a_message_at_fault_is_named() {
    let server = plain();
    for (messages, param) in [
        (json!([]), "messages"),
        (json!([{"role": "robot", "content": "x"}]), "messages[0].role"),
        (json!([{"role": "user"}]), "messages[0].content"),
        (json!([{"role": "user", "content": 3}]), "messages[0].content"),
        (json!([{"role": "user", "content": [{"type": "image_url"}]}]), "messages[0].content[0].type"),
        (json!([{"role": "user", "content": [{"type": "text"}]}]), "messages[0].content[0].text"),
        (json!([{"content": "x"}]), "messages[0]"),
        (json!("hello"), "messages"),
    ] {
        let reply = server.post("/v1/chat/completions", &json!({"messages": messages}).to_string());
        reply.error(400);
        assert_eq!(reply.json()["error"]["param"], param, "{messages}");
    }
}
