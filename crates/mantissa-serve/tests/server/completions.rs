//! `/v1/completions`, `/tokenize` and the descriptions of the server.

use serde_json::{Value, json};

use crate::support::{Setup, plain, start};

#[test]
fn a_completion_has_text_and_usage() {
    let server = plain();
    let ask = json!({"prompt": "Once upon a time", "max_tokens": 12, "temperature": 0});
    let reply = server.json("/v1/completions", &ask);
    assert_eq!(reply["object"], "text_completion");
    assert_eq!(reply["model"], "demo");
    let choice = &reply["choices"][0];
    assert_eq!(choice["finish_reason"], "length");
    assert!(choice["text"].as_str().unwrap().len() > 12, "{reply}");
    let usage = &reply["usage"];
    assert_eq!(usage["completion_tokens"], 12);
    let total = usage["prompt_tokens"].as_u64().unwrap() + 12;
    assert_eq!(usage["total_tokens"].as_u64(), Some(total));
    // Greedy: the same again, and with the tokens of the prompt.
    assert_eq!(server.json("/v1/completions", &ask)["choices"], reply["choices"]);
    let tokens = server.json("/tokenize", &json!({"content": "Once upon a time", "add_special": true}));
    let ask = json!({"prompt": tokens["tokens"], "max_tokens": 12, "temperature": 0});
    assert_eq!(server.json("/v1/completions", &ask)["choices"], reply["choices"]);
}

#[test]
fn a_stream_has_the_text_of_the_whole() {
    let server = plain();
    let mut ask =
        json!({"prompt": "The dog", "max_tokens": 20, "temperature": 0.9, "seed": 3, "echo": true, "n": 2});
    let whole = server.json("/v1/completions", &ask);
    ask["stream"] = true.into();
    ask["stream_options"] = json!({"include_usage": true});
    let reply = server.post("/v1/completions", &ask.to_string());
    assert_eq!(reply.header("content-type"), Some("text/event-stream"));
    let events = reply.events();
    let (last, pieces) = events.split_last().unwrap();
    assert_eq!((&last["usage"], &last["choices"]), (&whole["usage"], &json!([])));
    for index in 0..2 {
        let mut of =
            pieces.iter().map(|event| &event["choices"][0]).filter(|choice| choice["index"] == index);
        let text: String = of.clone().map(|choice| choice["text"].as_str().unwrap()).collect();
        assert_eq!(text, whole["choices"][index]["text"].as_str().unwrap());
        assert!(text.starts_with("The dog"), "{text}");
        assert_eq!(of.next_back().unwrap()["finish_reason"], whole["choices"][index]["finish_reason"]);
    }
    // Choices have seeds of their own.
    assert_ne!(whole["choices"][0]["text"], whole["choices"][1]["text"]);
}

#[test]
fn stop_strings_cut_the_text_and_free_the_slot() {
    let server = plain();
    let ask = json!({"prompt": "Once upon a time", "max_tokens": 60, "temperature": 0});
    let whole = server.json("/v1/completions", &ask)["choices"][0]["text"].as_str().unwrap().to_owned();
    let stop: String = whole.chars().skip(20).take(5).collect();
    let mut ask = ask;
    ask["stop"] = json!(["never seen", stop]);
    let reply = server.json("/v1/completions", &ask);
    let text = reply["choices"][0]["text"].as_str().unwrap();
    assert_eq!(text, &whole[..whole.find(&stop).unwrap()]);
    assert_eq!(reply["choices"][0]["finish_reason"], "stop");
    assert!(reply["usage"]["completion_tokens"].as_u64().unwrap() < 60);
}

#[test]
fn probabilities_come_in_lists_of_one_length() {
    let server = plain();
    let ask = json!({"prompt": ["The cat", "A boy"], "max_tokens": 5, "temperature": 0, "logprobs": 3});
    let reply = server.json("/v1/completions", &ask);
    for choice in reply["choices"].as_array().unwrap() {
        let logprobs = &choice["logprobs"];
        let tokens = logprobs["tokens"].as_array().unwrap();
        assert_eq!(tokens.len(), 5);
        let text: String = tokens.iter().map(|token| token.as_str().unwrap()).collect();
        assert_eq!(text, choice["text"].as_str().unwrap());
        for name in ["token_logprobs", "top_logprobs", "text_offset"] {
            assert_eq!(logprobs[name].as_array().unwrap().len(), 5, "{name}");
        }
        // Greedy: the token is the most probable one.
        let own = logprobs["token_logprobs"][0].as_f64().unwrap();
        let top = logprobs["top_logprobs"][0].as_object().unwrap();
        assert_eq!(top.len(), 3);
        assert!(top.values().all(|value| value.as_f64().unwrap() <= own));
        assert_eq!(logprobs["text_offset"][0], 0);
    }
}

#[test]
fn the_prompt_comes_back_with_its_probabilities() {
    let server = plain();
    let mut ask =
        json!({"prompt": "The dog ran", "max_tokens": 1, "temperature": 0, "logprobs": 2, "echo": true});
    let whole = server.json("/v1/completions", &ask)["choices"][0].clone();
    let logprobs = &whole["logprobs"];
    let prompt = server.json("/tokenize", &json!({"content": "The dog ran", "add_special": true}))["count"]
        .as_u64()
        .unwrap();
    let own = logprobs["token_logprobs"].as_array().unwrap();
    assert_eq!(own.len() as u64, prompt + 1);
    assert!(own[0].is_null() && own[1..].iter().all(|value| value.as_f64().unwrap() < 0.0));
    assert!(logprobs["top_logprobs"][0].is_null());
    assert!(whole["text"].as_str().unwrap().starts_with("The dog ran"));
    // The last token is generated: its probability equals its probability without echo.
    let plain = json!({"prompt": "The dog ran", "max_tokens": 1, "temperature": 0, "logprobs": 2});
    let plain = server.json("/v1/completions", &plain)["choices"][0]["logprobs"].clone();
    assert_eq!(own.last(), plain["token_logprobs"].as_array().unwrap().first());
    ask["stream"] = true.into();
    let events = server.post("/v1/completions", &ask.to_string()).events();
    let streamed: Vec<Value> = events
        .iter()
        .flat_map(|event| event["choices"][0]["logprobs"]["token_logprobs"].as_array().unwrap().clone())
        .collect();
    assert_eq!(&streamed, own);
    ask["stream"] = false.into();
    ask["max_tokens"] = 0.into();
    let only = server.json("/v1/completions", &ask)["choices"][0].clone();
    assert_eq!(only["text"], "The dog ran");
    assert_eq!(only["logprobs"]["token_logprobs"].as_array().unwrap(), &own[..own.len() - 1]);
}

#[test]
fn biases_and_penalties_change_the_tokens() {
    let server = plain();
    let ask = json!({"prompt": "Once upon a time", "max_tokens": 40, "temperature": 0});
    let tokens = |extra: Value| {
        let mut ask = ask.clone();
        ask.as_object_mut().unwrap().extend(extra.as_object().unwrap().clone());
        let text = server.json("/v1/completions", &ask)["choices"][0]["text"].clone();
        let tokens = server.json("/tokenize", &json!({"content": text}));
        tokens["tokens"].as_array().unwrap().iter().map(|id| id.as_u64().unwrap()).collect::<Vec<_>>()
    };
    let plain = tokens(json!({}));
    let banned = tokens(json!({"logit_bias": {plain[0].to_string(): -100}}));
    assert_ne!(banned[0], plain[0]);
    let distinct = |tokens: &[u64]| tokens.iter().collect::<std::collections::HashSet<_>>().len();
    let varied = tokens(json!({"frequency_penalty": 2, "presence_penalty": 2, "repetition_penalty": 1.5}));
    assert!(distinct(&varied) > distinct(&plain), "{varied:?} {plain:?}");
    assert_eq!(tokens(json!({"temperature": 1, "min_p": 1, "seed": 5})), plain);
}

#[test]
fn fields_are_honoured_or_refused() {
    let server = plain();
    let ask = json!({"prompt": "A", "max_tokens": 1, "user": "u", "bad_words": [], "stop": null, "temperature": null});
    server.json("/v1/completions", &ask);
    let completion = json!({"prompt": "A", "max_tokens": 1});
    let messages = json!([{"role": "user", "content": "A"}]);
    let chat = json!({"messages": messages, "max_tokens": 1});
    let rows = [
        ("/v1/completions", &completion, "bad_words", json!(["x"])),
        ("/v1/completions", &completion, "whatever", json!([1])),
        ("/v1/completions", &completion, "tools", json!([{"type": "function"}])),
        (
            "/v1/completions",
            &completion,
            "structured_outputs",
            json!({"regex": "a", "whitespace_pattern": "x"}),
        ),
        ("/v1/chat/completions", &chat, "allowed_token_ids", json!([1])),
        ("/v1/chat/completions", &chat, "echo", json!(true)),
        ("/v1/chat/completions", &chat, "functions", json!([{"name": "f"}])),
        ("/v1/messages", &chat, "mcp_servers", json!([{"name": "x"}])),
        ("/v1/messages", &chat, "guided_json", json!({"type": "object"})),
        ("/v1/responses", &json!({"input": "A", "max_output_tokens": 1}), "top_logprobs", json!(2)),
        ("/tokenize", &json!({"content": "A"}), "parse_special", json!(false)),
    ];
    for (path, ask, field, value) in rows {
        let mut ask = ask.clone();
        ask[field] = value;
        let reply = server.post(path, &ask.to_string());
        let message = reply.error(400);
        assert!(message.contains(field), "{path} {field}: {message}");
    }
}

#[test]
fn a_text_ends_at_stop_tokens_and_not_before_the_least_number() {
    let server = plain();
    let ask =
        json!({"prompt": "Once upon a time", "max_tokens": 12, "temperature": 0, "return_token_ids": true});
    let with = |more: Value| {
        let mut ask = ask.clone();
        ask.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
        server.json("/v1/completions", &ask)["choices"][0].clone()
    };
    let whole = with(json!({}));
    let ids: Vec<u64> =
        whole["token_ids"].as_array().unwrap().iter().map(|id| id.as_u64().unwrap()).collect();
    let end = (1..12).find(|&at| !ids[..at].contains(&ids[at])).unwrap();
    let stopped = with(json!({"stop_token_ids": [ids[end]]}));
    assert_eq!(
        (&stopped["finish_reason"], stopped["token_ids"].as_array().unwrap().len()),
        (&json!("stop"), end)
    );
    let longer = with(json!({"stop_token_ids": [ids[end]], "min_tokens": end + 1}));
    let longer = longer["token_ids"].as_array().unwrap();
    assert!(longer.len() > end && longer[end] != ids[end], "{longer:?}");
    // A stop string at the beginning of the text counts after so many tokens only.
    let first: String = whole["text"].as_str().unwrap().chars().take(2).collect();
    assert_eq!(with(json!({"stop": first}))["text"], "");
    let text = with(json!({"stop": first, "min_tokens": 3}))["text"].as_str().unwrap().to_owned();
    assert!(text.starts_with(&first), "{text}");
    let refused = json!({"prompt": "A", "max_tokens": 3, "min_tokens": 4}).to_string();
    assert!(server.post("/v1/completions", &refused).error(400).contains("min_tokens"));
    let refused = json!({"prompt": "A", "stop_token_ids": [99_999_999]}).to_string();
    assert!(server.post("/v1/completions", &refused).error(400).contains("stop_token_ids"));
}

/// Offsets index the text, and bytes join to it, also within characters of several tokens.
#[test]
fn offsets_and_bytes_of_tokens_are_those_of_the_text() {
    let server = plain();
    let prompt = "Once é🙂 x";
    let ask = json!({"prompt": prompt, "max_tokens": 4, "temperature": 0, "echo": true, "logprobs": 1});
    let choice = server.json("/v1/completions", &ask)["choices"][0].clone();
    let (text, logprobs) = (choice["text"].as_str().unwrap(), &choice["logprobs"]);
    assert!(text.starts_with(prompt), "{text}");
    let chars: Vec<char> = text.chars().collect();
    let tokens: Vec<&str> =
        logprobs["tokens"].as_array().unwrap().iter().map(|token| token.as_str().unwrap()).collect();
    let offsets: Vec<usize> = logprobs["text_offset"]
        .as_array()
        .unwrap()
        .iter()
        .map(|offset| usize::try_from(offset.as_u64().unwrap()).unwrap())
        .collect();
    assert!(offsets.is_sorted() && *offsets.last().unwrap() <= chars.len(), "{offsets:?}");
    let mut parts = 0;
    for (token, &at) in tokens.iter().zip(&offsets) {
        let rest: String = chars[at..].iter().collect();
        if token.starts_with("bytes:\\x") {
            parts += 1;
            assert!(rest.starts_with(['é', '🙂']), "{token} {rest}");
        } else if !token.starts_with('<') {
            // The space before the first word is not in the text.
            assert!(rest.starts_with(token.trim_start()) || rest.starts_with(token), "{token:?} {rest:?}");
        }
    }
    assert!(parts >= 4, "{tokens:?}");
    let messages = json!([{"role": "user", "content": "Hi"}]);
    let ask = json!({"messages": messages, "max_tokens": 40, "temperature": 1.5, "seed": 4, "logprobs": true, "top_logprobs": 2});
    let choice = server.json("/v1/chat/completions", &ask)["choices"][0].clone();
    let bytes: Vec<u8> = choice["logprobs"]["content"]
        .as_array()
        .unwrap()
        .iter()
        .flat_map(|token| {
            token["bytes"]
                .as_array()
                .unwrap()
                .iter()
                .map(|byte| u8::try_from(byte.as_u64().unwrap()).unwrap())
        })
        .collect();
    let content = choice["message"]["content"].as_str().unwrap();
    assert_eq!(String::from_utf8_lossy(&bytes).trim_start(), content.trim_start());
}

#[test]
fn tokens_and_texts_go_both_ways() {
    let server = plain();
    let tokens = server.json("/tokenize", &json!({"content": "Once upon a time", "with_pieces": true}));
    let list = tokens["tokens"].as_array().unwrap();
    assert_eq!(tokens["count"].as_u64(), Some(list.len() as u64));
    let text: String = list.iter().map(|token| token["piece"].as_str().unwrap()).collect();
    assert_eq!(text, "Once upon a time");
    let ids: Vec<&Value> = list.iter().map(|token| &token["id"]).collect();
    assert_eq!(server.json("/detokenize", &json!({"tokens": ids}))["content"], "Once upon a time");
}

#[test]
fn the_server_describes_itself() {
    let server = start(Setup { names: &["demo", "other"], ..Setup::default() });
    assert_eq!(server.get("/health").json(), json!({"status": "ok"}));
    let models = server.get("/v1/models").json();
    let names: Vec<&Value> = models["data"].as_array().unwrap().iter().map(|model| &model["id"]).collect();
    assert_eq!(names, ["demo", "other"]);
    assert_eq!(server.get("/v1/models/other").json()["meta"]["context"], 256);
    assert!(server.get("/v1/models/none").error(404).contains("demo or other"));
    let reply = server.json("/v1/completions", &json!({"model": "other", "prompt": "A", "max_tokens": 1}));
    assert_eq!(reply["model"], "other");
    let props = server.get("/props").json();
    assert_eq!(props["models"][1]["parallel"], 4);
    assert_eq!(server.get("/slots").json(), json!([]));
    let metrics = server.get("/metrics").text();
    for name in [
        "mantissa_generated_tokens_total{model=\"other\"} 1",
        "mantissa_time_to_first_token_seconds_count{model=\"other\"} 1",
        "mantissa_precision{model=\"demo\",phase=\"decode\",format=\"bf16\"",
        "path=\"/v1/completions\",status=\"200\"",
    ] {
        assert!(metrics.contains(name), "{name}: {metrics}");
    }
    assert!(metrics.ends_with("# EOF\n"));
}

#[test]
fn every_path_of_the_description_is_served() {
    let server = plain();
    let api = server.get("/openapi.json").json();
    assert!(api["openapi"].as_str().unwrap().starts_with("3."));
    let paths = api["paths"].as_object().unwrap();
    assert!(paths.len() >= 11, "{paths:?}");
    for (path, methods) in paths {
        for (method, operation) in methods.as_object().unwrap() {
            let path = path.replace("{name}", "demo");
            let reply = match method.as_str() {
                "get" => server.get(&path),
                _ => server.post(&path, "{}"),
            };
            let status = reply.status.to_string();
            assert!(reply.status != 404 && reply.status != 405, "{method} {path}: {}", reply.text());
            assert!(operation["responses"].get(&status).is_some(), "{method} {path}: {status}");
        }
    }
}
