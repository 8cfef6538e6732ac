//! Forms of answers, tools, and the other APIs.

use mantissa_runtime::RuntimeOptions;
use serde_json::{Value, json};

use crate::support::{Reply, Running, Setup, start};

/// A server with the longest context of the model.
fn plain() -> Running {
    start(Setup { runtime: RuntimeOptions::batch(4, 512), ..Setup::default() })
}

fn schema() -> Value {
    json!({
        "type": "object",
        "properties": { "kind": { "enum": ["cat", "dog"] }, "age": { "type": "integer", "minimum": 0, "maximum": 99 } },
        "required": ["kind", "age"],
        "additionalProperties": false
    })
}

fn is_animal(text: &str) {
    let value: Value = serde_json::from_str(text).unwrap_or_else(|error| panic!("{error}: {text}"));
    assert!(["cat", "dog"].contains(&value["kind"].as_str().unwrap()), "{text}");
    assert!((0..=99).contains(&value["age"].as_i64().unwrap()), "{text}");
}

fn tools() -> Value {
    json!([{ "type": "function", "function": { "name": "pet", "parameters": schema() } }])
}

fn ask() -> Value {
    json!({ "messages": [{ "role": "user", "content": "Hi" }], "max_tokens": 300, "temperature": 1, "seed": 7 })
}

fn with(mut value: Value, more: Value) -> Value {
    for (key, item) in more.as_object().unwrap() {
        value[key] = item.clone();
    }
    value
}

/// Names and data of the events of a stream.
fn events(reply: &Reply) -> Vec<(String, Value)> {
    let text = reply.text();
    let event = |event: &str| {
        let (name, data) = event.strip_prefix("event: ")?.split_once("\ndata: ")?;
        Some((name.to_owned(), serde_json::from_str(data).unwrap()))
    };
    text.split("\n\n").filter_map(event).collect()
}

#[test]
fn answers_have_the_form_that_was_asked_for() {
    let server = plain();
    for seed in 0..8 {
        let temperature = [0.0, 0.7, 1.0, 2.0][seed % 4];
        for form in [
            json!({ "response_format": { "type": "json_schema", "json_schema": { "name": "a", "description": "An animal", "strict": true, "schema": schema() } } }),
            json!({ "json_schema": schema() }),
            json!({ "structured_outputs": { "json": schema() } }),
        ] {
            let form = with(form, json!({ "seed": seed, "temperature": temperature }));
            let answer = server.json("/v1/chat/completions", &with(ask(), form));
            assert_eq!(answer["choices"][0]["finish_reason"], "stop", "{answer}");
            is_animal(answer["choices"][0]["message"]["content"].as_str().unwrap());
        }
    }
    let text = |form: Value| {
        let ask = with(json!({ "prompt": "Once", "max_tokens": 60, "temperature": 1, "seed": 3 }), form);
        server.json("/v1/completions", &ask)["choices"][0]["text"].as_str().unwrap().to_owned()
    };
    assert_eq!(text(json!({ "grammar": "root ::= \"a\"{5,5}" })), "aaaaa");
    assert_eq!(text(json!({ "structured_outputs": { "regex": "x{3}" } })), "xxx");
    assert_eq!(text(json!({ "structured_outputs": { "choice": ["yes!"] } })), "yes!");
    assert!(text(json!({ "structured_outputs": { "grammar": "start: \"b\" | \"c\"" } })).len() == 1);
}

/// Never an answer without the form.
#[test]
fn forms_that_cannot_be_used_are_refused() {
    let server = plain();
    let deep = format!("root ::= {}\"a\"{}", "(".repeat(60_000), ")".repeat(60_000));
    for (form, param) in [
        (json!({ "response_format": { "type": "sound" } }), "response_format.type"),
        (json!({ "response_format": { "type": "json_schema" } }), "response_format.json_schema.schema"),
        (
            json!({ "response_format": { "type": "json_object", "schema": { "type": "hiccup" } } }),
            "response_format",
        ),
        (json!({ "response_format": { "type": "json_object", "schema": 123 } }), "response_format"),
        (json!({ "json_schema": { "type": "array", "uniqueItems": true } }), "json_schema"),
        (json!({ "grammar": "root ::= this is (not valid GBNF" }), "grammar"),
        (json!({ "grammar": deep }), "grammar"),
        (json!({ "structured_outputs": { "regex": "(" } }), "structured_outputs"),
        (json!({ "grammar": "root ::= \"a\"", "json_schema": {} }), "grammar"),
        (
            json!({ "tools": tools(), "tool_choice": { "type": "function", "function": { "name": "x" } } }),
            "tool_choice.function.name",
        ),
        (json!({ "tool_choice": "required" }), "tools"),
        (
            json!({ "tools": [{ "type": "function", "function": { "name": "a b" } }] }),
            "tools[0].function.name",
        ),
        (json!({ "tools": [{ "type": "function", "function": {} }] }), "tools[0].function"),
        (
            json!({ "tools": [{ "type": "function", "function": { "name": "a", "parameters": { "type": "x" } } }], "tool_choice": "required" }),
            "tools",
        ),
    ] {
        let reply = server.post("/v1/chat/completions", &with(ask(), form.clone()).to_string());
        reply.error(400);
        assert_eq!(reply.json()["error"]["param"], param, "{}", reply.text());
    }
    assert_eq!(server.json("/v1/chat/completions", &ask())["choices"].as_array().unwrap().len(), 1);
}

#[test]
fn required_calls_are_valid_and_streamed() {
    let server = plain();
    for choice in [json!("required"), json!({ "type": "function", "function": { "name": "pet" } })] {
        let one =
            with(ask(), json!({ "tools": tools(), "tool_choice": choice, "parallel_tool_calls": false }));
        let answer = server.json("/v1/chat/completions", &one);
        let choice = &answer["choices"][0];
        assert_eq!(choice["finish_reason"], "tool_calls", "{answer}");
        let call = &choice["message"]["tool_calls"][0];
        assert_eq!((&call["function"]["name"], &call["type"]), (&json!("pet"), &json!("function")));
        is_animal(call["function"]["arguments"].as_str().unwrap());
        assert_eq!(choice["message"]["content"], Value::Null);
        let stream = server.post("/v1/chat/completions", &with(one, json!({ "stream": true })).to_string());
        let events = stream.events();
        let calls = events.iter().filter_map(|event| event["choices"][0]["delta"]["tool_calls"].as_array());
        let calls: Vec<Value> = calls.flatten().cloned().collect();
        assert_eq!(calls[0]["function"]["name"], "pet");
        assert!(calls.iter().all(|call| call["index"] == 0));
        let arguments: String =
            calls.iter().filter_map(|call| call["function"]["arguments"].as_str()).collect();
        assert_eq!(call["function"]["arguments"], json!(arguments));
        assert_eq!(events.last().unwrap()["choices"][0]["finish_reason"], "tool_calls");
    }
}

fn messages(server: &Running, more: Value) -> Value {
    let body =
        json!({ "max_tokens": 300, "messages": [{ "role": "user", "content": "Hi" }], "temperature": 0 });
    server.json("/v1/messages", &with(body, more))
}

#[test]
fn messages_have_the_shape_of_their_api() {
    let server = plain();
    let message = messages(&server, json!({ "max_tokens": 8, "system": "Be brief." }));
    assert_eq!((&message["type"], &message["role"]), (&json!("message"), &json!("assistant")));
    assert_eq!(message["stop_reason"], "max_tokens");
    assert_eq!(message["usage"]["output_tokens"], 8);
    let text = message["content"][0]["text"].as_str().unwrap();
    let body = json!({
        "max_tokens": 8, "system": "Be brief.", "temperature": 0, "stream": true,
        "messages": [{ "role": "user", "content": "Hi" }]
    });
    let events = events(&server.post("/v1/messages", &body.to_string()));
    assert_eq!(events.first().unwrap().0, "message_start");
    assert_eq!(events.last().unwrap().0, "message_stop");
    let streamed: String = events.iter().filter_map(|(_, data)| data["delta"]["text"].as_str()).collect();
    assert_eq!(streamed, text);
    let pet = json!([{ "name": "pet", "input_schema": schema() }]);
    let called = messages(&server, json!({ "tools": pet, "tool_choice": { "type": "tool", "name": "pet" } }));
    assert_eq!(called["stop_reason"], "tool_use", "{called}");
    is_animal(&called["content"][0]["input"].to_string());
    let count = server.json(
        "/v1/messages/count_tokens",
        &json!({ "system": "Be brief.", "messages": [{ "role": "user", "content": "Hi" }] }),
    );
    let usage = &message["usage"];
    let tokens = |field: &str| usage[field].as_u64().unwrap();
    assert_eq!(count["input_tokens"], tokens("input_tokens") + tokens("cache_read_input_tokens"));
    for body in ["{}", "{\"messages\": []}", "[]", "{\"max_tokens\": 3, \"messages\": 3}", "nonsense"] {
        let reply = server.post("/v1/messages", body);
        assert_eq!(reply.status, 400, "{body}");
        assert_eq!(reply.json()["type"], "error", "{body}");
        assert_eq!(reply.json()["error"]["type"], "invalid_request_error", "{body}");
    }
}

#[test]
fn responses_have_the_shape_of_their_api() {
    let server = plain();
    let body = json!({ "input": "Hi", "max_output_tokens": 8, "temperature": 0 });
    let response = server.json("/v1/responses", &body);
    assert_eq!((&response["object"], &response["status"]), (&json!("response"), &json!("incomplete")));
    assert_eq!(response["usage"]["output_tokens"], 8);
    let text = response["output"][0]["content"][0]["text"].as_str().unwrap();
    let stream = server.post("/v1/responses", &with(body, json!({ "stream": true })).to_string());
    let all = events(&stream);
    assert!((0u64..).zip(&all).all(|(i, (_, data))| data["sequence_number"] == i));
    assert_eq!(all.last().unwrap().0, "response.incomplete");
    let deltas = all.iter().filter(|(name, _)| name == "response.output_text.delta");
    let streamed: String = deltas.filter_map(|(_, data)| data["delta"].as_str()).collect();
    assert_eq!(streamed, text);
    let form = json!({ "format": { "type": "json_schema", "name": "a", "schema": schema() } });
    let body = json!({ "input": "Hi", "max_output_tokens": 300, "text": form });
    let formed = server.json("/v1/responses", &body);
    is_animal(formed["output"][0]["content"][0]["text"].as_str().unwrap());
    let tool = json!([{ "type": "function", "name": "pet", "parameters": schema() }]);
    let body = json!({ "input": "Hi", "max_output_tokens": 300, "tools": tool, "tool_choice": "required" });
    let called = server.json("/v1/responses", &body);
    is_animal(called["output"][0]["arguments"].as_str().unwrap());
    for (body, param) in [
        (json!({}), "input"),
        (json!({ "input": "a", "previous_response_id": "resp_1" }), "previous_response_id"),
        (json!({ "input": "a", "max_output_tokens": "x" }), "max_output_tokens"),
        (
            json!({ "input": [{ "role": "user", "content": [{ "type": "input_image" }] }] }),
            "input[0].content[0].type",
        ),
    ] {
        let reply = server.post("/v1/responses", &body.to_string());
        reply.error(400);
        assert_eq!(reply.json()["error"]["param"], param, "{body}");
    }
}

#[test]
fn embeddings_are_vectors_of_length_one() {
    let server = plain();
    let body = json!({ "input": ["The dog.", "A cat.", "The dog."] });
    let reply = server.json("/v1/embeddings", &body);
    let vector = |i: usize| -> Vec<f64> {
        reply["data"][i]["embedding"].as_array().unwrap().iter().map(|x| x.as_f64().unwrap()).collect()
    };
    assert_eq!(vector(0), vector(2));
    assert_ne!(vector(0), vector(1));
    assert!((vector(0).iter().map(|x| x * x).sum::<f64>() - 1.0).abs() < 1e-4);
    assert_eq!(reply["usage"]["prompt_tokens"], reply["usage"]["total_tokens"]);
    let coded = server.json("/v1/embeddings", &json!({ "input": "The dog.", "encoding_format": "base64" }));
    assert!(coded["data"][0]["embedding"].is_string());
    for (body, param) in [
        (json!({}), "input"),
        (json!({ "input": [] }), "input"),
        (json!({ "input": "a", "encoding_format": "hex" }), "encoding_format"),
        (json!({ "input": [[1, 999_999]] }), "input[0]"),
        (json!({ "input": "word ".repeat(3000) }), "input[0]"),
        (json!({ "input": "a", "dimensions": 3 }), "dimensions"),
    ] {
        let reply = server.post("/v1/embeddings", &body.to_string());
        reply.error(400);
        assert_eq!(reply.json()["error"]["param"], param, "{}", reply.text());
    }
}

#[test]
fn forms_by_the_names_of_other_servers() {
    let server = plain();
    let ask = with(ask(), json!({ "temperature": 0 }));
    let text = |path: &str, more: Value| server.json(path, &with(ask.clone(), more));
    let content = |reply: Value| reply["choices"][0]["message"]["content"].as_str().unwrap().to_owned();
    is_animal(&content(text("/v1/chat/completions", json!({ "guided_json": schema() }))));
    is_animal(&content(text("/v1/chat/completions", json!({ "guided_json": schema().to_string() }))));
    assert_eq!(content(text("/v1/chat/completions", json!({ "guided_choice": ["zebra"] }))), "zebra");
    assert_eq!(content(text("/v1/chat/completions", json!({ "guided_regex": "[0-9]{3}" }))).len(), 3);
    let format = json!({ "type": "json_schema", "schema": schema() });
    for more in [json!({ "output_config": { "format": format } }), json!({ "output_format": format })] {
        is_animal(text("/v1/messages", more)["content"][0]["text"].as_str().unwrap());
    }
    let both = with(ask.clone(), json!({ "guided_regex": "a", "json_schema": schema() }));
    assert!(server.post("/v1/chat/completions", &both.to_string()).error(400).contains("guided_regex"));
}

#[test]
fn integers_that_the_parser_would_change_are_refused() {
    let server = plain();
    let exact = |schema: Value| {
        server.post(
            "/v1/completions",
            &json!({ "prompt": "A", "max_tokens": 24, "json_schema": schema }).to_string(),
        )
    };
    for schema in [
        json!({ "const": 9_007_199_254_740_993u64 }),
        json!({ "enum": [9_007_199_254_740_993u64] }),
        json!({ "type": "integer", "minimum": 9_007_199_254_740_993u64 }),
    ] {
        assert!(exact(schema).error(400).contains("9007199254740993"));
    }
    let kept = exact(json!({ "const": 9_007_199_254_740_992u64 })).json();
    assert_eq!(kept["choices"][0]["text"], "9007199254740992");
}
