//! Thoughts: their separation, their budget, and the form of the answer after them; progress of prompts.

use mantissa_runtime::RuntimeOptions;
use serde_json::{Value, json};

use crate::support::{Running, Setup, plain, start};

/// A server whose template begins a thought, and ends it if it is not wanted.
fn thinking() -> Running {
    let template = "{{ messages[0].content }}<think>\n{# </think> #}";
    start(Setup { template: Some(template), runtime: RuntimeOptions::batch(4, 512), ..Setup::default() })
}

fn ask(more: Value) -> Value {
    let mut ask = json!({ "messages": [{ "role": "user", "content": "Once upon a time" }], "max_tokens": 60, "temperature": 0 });
    more.as_object().unwrap().iter().for_each(|(key, item)| ask[key] = item.clone());
    ask
}

#[test]
fn a_thought_has_its_own_field_and_budget() {
    let server = thinking();
    let answer = server.json("/v1/chat/completions", &ask(json!({ "reasoning_budget": 6 })));
    let message = &answer["choices"][0]["message"];
    let (thought, text) =
        (message["reasoning_content"].as_str().unwrap(), message["content"].as_str().unwrap());
    assert!(
        !thought.is_empty() && !text.is_empty() && !format!("{thought}{text}").contains("think>"),
        "{answer}"
    );
    // The budget, and the mark that ends the thought.
    let used = answer["usage"]["completion_tokens_details"]["reasoning_tokens"].as_u64().unwrap();
    assert!((6..20).contains(&used), "{answer}");
    // In the text, if asked for.
    let whole = server
        .json("/v1/chat/completions", &ask(json!({ "reasoning_budget": 6, "reasoning_format": "none" })));
    let whole = whole["choices"][0]["message"]["content"].as_str().unwrap().to_owned();
    assert!(
        whole.trim_start().starts_with(thought) && whole.contains("</think>") && whole.ends_with(text),
        "{whole}"
    );
    // Streamed the same.
    let events = server
        .post("/v1/chat/completions", &ask(json!({ "reasoning_budget": 6, "stream": true })).to_string())
        .events();
    let joined = |field: &str| -> String {
        events.iter().filter_map(|event| event["choices"][0]["delta"][field].as_str()).collect()
    };
    assert_eq!((joined("reasoning_content").as_str(), joined("content").as_str()), (thought, text));
    // No budget: the model never ends its thought.
    let endless = server.json("/v1/chat/completions", &ask(json!({})));
    assert_eq!(endless["choices"][0]["message"]["content"], "");
}

#[test]
fn a_form_begins_after_the_thought() {
    let server = thinking();
    let form = json!({ "reasoning_budget": 5, "structured_outputs": { "choice": ["yes!"] } });
    let answer = server.json("/v1/chat/completions", &ask(form.clone()));
    let message = &answer["choices"][0]["message"];
    assert_eq!(message["content"], "yes!", "{answer}");
    assert!(!message["reasoning_content"].as_str().unwrap().is_empty());
    assert_eq!(answer["choices"][0]["finish_reason"], "stop");
    let none = json!({ "reasoning_effort": "none", "structured_outputs": { "choice": ["yes!"] } });
    let answer = server.json("/v1/chat/completions", &ask(none));
    assert_eq!(answer["choices"][0]["message"], json!({ "role": "assistant", "content": "yes!" }));
    // A budget of 0 ends the thought at once.
    let zero = json!({ "reasoning_budget": 0, "structured_outputs": { "choice": ["yes!"] } });
    let answer = server.json("/v1/chat/completions", &ask(zero));
    assert_eq!(answer["choices"][0]["message"], json!({ "role": "assistant", "content": "yes!" }));
    let mut prompt = ask(json!({ "chat_template_kwargs": { "enable_thinking": false } }));
    let rendered = server.json("/apply-template", &prompt)["prompt"].clone();
    assert_eq!(rendered, "Once upon a time<think>\n\n</think>\n\n");
    prompt["reasoning_format"] = json!("sideways");
    server.post("/v1/chat/completions", &prompt.to_string()).error(400);
    for (field, value) in [("reasoning_budget", json!(-2)), ("reasoning_budget", json!("x"))] {
        let reply = server.post("/v1/chat/completions", &ask(json!({ field: value })).to_string());
        reply.error(400);
        assert_eq!(reply.json()["error"]["param"], field);
    }
}

#[test]
fn other_apis_have_thoughts_too() {
    let server = thinking();
    let message = json!({
        "max_tokens": 40, "temperature": 0, "messages": [{ "role": "user", "content": "Once upon a time" }],
        "thinking": { "type": "enabled", "budget_tokens": 6 }
    });
    let answer = server.json("/v1/messages", &message);
    let kinds: Vec<_> = answer["content"].as_array().unwrap().iter().map(|block| &block["type"]).collect();
    assert_eq!(kinds, ["thinking", "text"], "{answer}");
    let response = json!({ "input": "Once upon a time", "max_output_tokens": 40, "temperature": 0 });
    let answer = server.json("/v1/responses", &response);
    assert_eq!(answer["output"][0]["type"], "reasoning", "{answer}");
    assert!(answer["usage"]["output_tokens_details"]["reasoning_tokens"].as_u64().unwrap() > 0);
    let none =
        json!({ "input": "Once upon a time", "max_output_tokens": 5, "reasoning": { "effort": "none" } });
    assert_eq!(server.json("/v1/responses", &none)["output"][0]["type"], "message");
    let wrong = json!({ "max_tokens": 4, "messages": [{ "role": "user", "content": "A" }], "thinking": { "type": "x" } });
    assert_eq!(server.post("/v1/messages", &wrong.to_string()).status, 400);
}

#[test]
fn the_progress_of_a_prompt_is_told() {
    let server = start(Setup {
        runtime: RuntimeOptions { step_tokens: 128, ..RuntimeOptions::batch(2, 512) },
        ..Setup::default()
    });
    let prompt = "the dog ran to the tree and ".repeat(40);
    let ask = json!({ "prompt": prompt, "max_tokens": 2, "stream": true, "return_progress": true });
    let told = || -> Vec<[u64; 3]> {
        let events = server.post("/v1/completions", &ask.to_string()).events();
        let progress = events.iter().map(|event| &event["prompt_progress"]).filter(|value| value.is_object());
        progress
            .map(|value| ["cache", "processed", "total"].map(|name| value[name].as_u64().unwrap()))
            .collect()
    };
    let first = told();
    assert!(first.len() > 2 && first[0][..2] == [0, 0], "{first:?}");
    assert!(first.windows(2).all(|pair| pair[0][1] < pair[1][1]), "{first:?}");
    assert_eq!(first.last().unwrap()[1], first.last().unwrap()[2]);
    // The second time most of it is there already.
    let second = told();
    assert!(second[0][0] >= 64 && second[0][0] == second[0][1], "{second:?}");
    // In a chat, and only if asked for.
    let chat = json!({ "messages": [{ "role": "user", "content": "Hi" }], "max_tokens": 2, "stream": true });
    let events = server.post("/v1/chat/completions", &chat.to_string()).events();
    assert!(events.iter().all(|event| event["prompt_progress"].is_null()));
}

/// The same numbers and cuts as llama.cpp, for the same seed.
#[test]
fn a_request_chooses_its_sampler() {
    let server = plain();
    let text = |sampler: &str, seed: u32| {
        let ask =
            json!({ "prompt": "Once", "max_tokens": 24, "temperature": 1, "seed": seed, "sampler": sampler });
        server.json("/v1/completions", &ask)["choices"][0]["text"].as_str().unwrap().to_owned()
    };
    assert_eq!(text("llama.cpp", 1), text("llama.cpp", 1));
    assert_ne!(text("llama.cpp", 1), text("llama.cpp", 2));
    assert_ne!(text("llama.cpp", 1), text("mantissa", 1));
    let reply = server.post("/v1/completions", &json!({ "prompt": "A", "sampler": "dice" }).to_string());
    assert_eq!(reply.status, 400);
    assert_eq!(reply.json()["error"]["param"], "sampler");
}
