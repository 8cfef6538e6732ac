//! llama.cpp's own endpoints.

use mantissa_model::SamplingDefaults;
use serde_json::{Value, json};

use crate::support::{Reply, Setup, plain, start};

/// Values of the events of a stream, which has no last word.
fn events(reply: &Reply) -> Vec<Value> {
    let text = reply.text();
    let data = text.split("\n\n").filter_map(|event| event.strip_prefix("data: "));
    data.map(|event| serde_json::from_str(event).unwrap()).collect()
}

#[test]
fn a_text_is_continued() {
    let server = plain();
    let ask = json!({"prompt": "Once upon a time", "n_predict": 9, "temperature": 0, "return_tokens": true});
    let whole = server.json("/completion", &ask);
    let openai = json!({"prompt": "Once upon a time", "max_tokens": 9, "temperature": 0});
    let openai = server.json("/v1/completions", &openai);
    assert_eq!(whole["content"], openai["choices"][0]["text"]);
    assert_eq!(whole["tokens_evaluated"], openai["usage"]["prompt_tokens"]);
    assert_eq!(
        (&whole["tokens_predicted"], &whole["stop"], &whole["stop_type"]),
        (&json!(9), &json!(true), &json!("limit"))
    );
    assert_eq!((&whole["truncated"], &whole["stopping_word"]), (&json!(false), &json!("")));
    assert_eq!(whole["tokens"].as_array().unwrap().len(), 9);
    assert!(whole["prompt"].as_str().unwrap().ends_with("Once upon a time"));
    let settings = &whole["generation_settings"];
    assert_eq!((&settings["n_predict"], &settings["n_ctx"]), (&json!(9), &json!(256)));
    let timings = &whole["timings"];
    assert_eq!((&timings["predicted_n"], &timings["prompt_n"]), (&json!(9), &whole["tokens_evaluated"]));
    assert!(timings["predicted_per_second"].as_f64().unwrap() > 0.0, "{timings}");
    assert_eq!(server.json("/completions", &ask)["content"], whole["content"]);
}

#[test]
fn a_stream_has_pieces_and_a_last_event_with_all_the_rest() {
    let server = plain();
    let mut ask = json!({"prompt": "Once upon a time", "n_predict": 9, "temperature": 0, "n_probs": 2});
    let whole = server.json("/completion", &ask);
    ask["stream"] = true.into();
    let reply = server.post("/completion", &ask.to_string());
    assert_eq!(reply.header("content-type"), Some("text/event-stream"));
    let events = events(&reply);
    let (last, pieces) = events.split_last().unwrap();
    let text: String = pieces.iter().map(|piece| piece["content"].as_str().unwrap()).collect();
    assert_eq!(text, whole["content"].as_str().unwrap());
    assert!(pieces.iter().all(|piece| piece["stop"] == false));
    let tokens: usize = pieces.iter().map(|piece| piece["tokens"].as_array().unwrap().len()).sum();
    assert_eq!(tokens, 9);
    assert_eq!(
        (&last["stop"], &last["content"], &last["tokens_predicted"]),
        (&json!(true), &json!(""), &json!(9))
    );
    let probabilities: Vec<Value> = pieces
        .iter()
        .flat_map(|piece| piece["completion_probabilities"].as_array().unwrap().clone())
        .collect();
    assert_eq!(Value::from(probabilities.clone()), whole["completion_probabilities"]);
    assert_eq!(probabilities[0]["id"], probabilities[0]["top_logprobs"][0]["id"]);
    assert_eq!(probabilities[0]["top_logprobs"].as_array().unwrap().len(), 2);
}

#[test]
fn prompts_are_texts_tokens_and_both() {
    let server = plain();
    let tokens =
        server.json("/tokenize", &json!({"content": "Once upon a time", "add_special": true}))["tokens"]
            .clone();
    let content = |prompt: Value| {
        server.json("/completion", &json!({"prompt": prompt, "n_predict": 5, "temperature": 0}))
    };
    let text = content(json!("Once upon a time"))["content"].clone();
    assert_eq!(content(tokens.clone())["content"], text);
    assert_eq!(content(json!({"prompt_string": "Once upon a time"}))["content"], text);
    let several = content(json!(["Once upon a time", tokens]));
    assert_eq!(
        (&several[0]["content"], &several[1]["content"], &several[1]["index"]),
        (&text, &text, &json!(1))
    );
    let stopped = json!({"prompt": "Once upon a time", "n_predict": 40, "temperature": 0, "stop": ["a"]});
    let stopped = server.json("/completion", &stopped);
    assert_eq!((&stopped["stop_type"], &stopped["stopping_word"]), (&json!("word"), &json!("a")));
    let full = json!({"prompt": "Once", "temperature": 0, "ignore_eos": true, "response_fields": ["truncated", "stop_type", "timings/prompt_n"]});
    let full = server.json("/completion", &full);
    assert_eq!(
        (&full["truncated"], &full["stop_type"], full.as_object().unwrap().len()),
        (&json!(true), &json!("limit"), 3)
    );
}

#[test]
fn what_is_not_done_is_refused() {
    let server = plain();
    for (body, param) in [
        (json!({"prompt": "a", "mirostat": 1}), "mirostat"),
        (json!({"prompt": "a", "samplers": ["temperature"]}), "samplers"),
        (json!({"prompt": "a", "n_predict": -2}), "max_tokens"),
        (json!({"n_predict": 1}), "prompt"),
        (json!({"prompt": [2048]}), "prompt"),
        (json!({"prompt": "a", "lora": [{"id": 0}]}), "lora"),
    ] {
        let reply = server.post("/completion", &body.to_string());
        reply.error(400);
        assert_eq!(reply.json()["error"]["param"], param, "{body}");
    }
    assert!(server.post("/infill", "{\"input_prefix\": \"a\"}").error(501).contains("/completion"));
    let special = json!({"content": "a", "parse_special": false});
    server.post("/tokenize", &special.to_string()).error(400);
    assert_eq!(server.json("/tokenize", &json!({"content": "a", "parse_special": true}))["count"], 1);
}

#[test]
fn the_settings_are_those_that_hold() {
    let model = SamplingDefaults { temperature: Some(0.6), top_k: Some(20), ..SamplingDefaults::default() };
    let server = start(Setup { sampling: model, ..Setup::default() });
    let props = server.get("/props").json();
    let settings = &props["default_generation_settings"];
    assert_eq!((&settings["n_ctx"], &props["total_slots"]), (&json!(256), &json!(4)));
    let rounded = |value: &Value| (value.as_f64().unwrap() * 1e3).round() / 1e3;
    let params = &settings["params"];
    assert_eq!((rounded(&params["temperature"]), &params["top_k"]), (0.6, &json!(20)));
    assert_eq!((rounded(&params["top_p"]), rounded(&params["min_p"])), (0.95, 0.05));
    assert_eq!(props["modalities"], json!({"vision": false, "audio": false}));
    assert!(
        props["chat_template"].is_string() && props["build_info"].as_str().unwrap().starts_with("mantissa")
    );
    let answer = server.json("/completion", &json!({"prompt": "a", "n_predict": 1}));
    assert_eq!(rounded(&answer["generation_settings"]["temperature"]), 0.6);
    // Each client sees what it asks for.
    assert_eq!(rounded(&answer["generation_settings"]["min_p"]), 0.05);
}
