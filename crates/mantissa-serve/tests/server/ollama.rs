//! Ollama's API.

use mantissa_model::SamplingDefaults;
use mantissa_serve::Options;
use serde_json::{Value, json};

use crate::support::{Reply, Running, Setup, plain, request, start};

/// Lines of a stream.
#[track_caller]
fn lines(reply: &Reply) -> Vec<Value> {
    assert_eq!(reply.status, 200, "{}", reply.text());
    assert_eq!(reply.header("content-type"), Some("application/x-ndjson"));
    reply.text().lines().map(|line| serde_json::from_str(line).unwrap()).collect()
}

/// Message of an error in Ollama's shape.
#[track_caller]
fn error(reply: &Reply, status: u16) -> String {
    assert_eq!(reply.status, status, "{}", reply.text());
    let json = reply.json();
    assert_eq!(json.as_object().unwrap().len(), 1, "{json}");
    json["error"].as_str().unwrap().to_owned()
}

fn ask(server: &Running, path: &str, body: &Value) -> Reply {
    server.post(path, &body.to_string())
}

#[test]
fn the_models_are_listed_and_described() {
    let server = start(Setup { names: &["demo", "other"], keys: Some("alpha"), ..Setup::default() });
    // Which models there are needs no key; what is done with them does.
    assert!(server.get("/api/version").json()["version"].as_str().unwrap().starts_with("0."));
    let models = server.get("/api/tags").json()["models"].clone();
    let names: Vec<_> = models.as_array().unwrap().iter().map(|model| model["name"].clone()).collect();
    assert_eq!(names, ["demo", "other"]);
    assert_eq!(models[0]["digest"].as_str().unwrap().len(), 64);
    assert_ne!(models[0]["digest"], models[1]["digest"]);
    assert!(models[0]["size"].as_u64().unwrap() > 0 && models[0]["details"]["family"] == "llama");
    let key = "authorization: Bearer alpha\r\n";
    let running = format!("GET /api/ps HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n{key}\r\n");
    assert_eq!(server.raw(running.as_bytes()).json()["models"][1]["context_length"], 256);
    assert!(error(&server.get("/api/ps"), 401).contains("API key"));
    let shown = server.post_as("alpha", "/api/show", &json!({"model": "demo:latest"}).to_string()).json();
    assert_eq!(shown["model_info"]["general.architecture"], "llama");
    assert!(shown["model_info"]["llama.context_length"].as_u64().unwrap() > 0);
    assert_eq!(shown["capabilities"], json!(["completion", "embedding", "tools"]));
    let unknown = server.post_as("alpha", "/api/show", &json!({"model": "none"}).to_string());
    assert!(error(&unknown, 404).contains("demo or other"));
}

#[test]
fn an_answer_is_streamed_as_lines_unless_it_is_asked_for_whole() {
    let server = plain();
    let messages = json!([{"role": "user", "content": "Once upon a time"}]);
    let options = json!({"temperature": 0, "num_predict": 9, "repeat_penalty": 1.0});
    let mut body = json!({"model": "demo", "messages": messages, "options": options});
    let lines = lines(&ask(&server, "/api/chat", &body));
    body["stream"] = false.into();
    let whole = server.json("/api/chat", &body);
    let text: String = lines.iter().map(|line| line["message"]["content"].as_str().unwrap()).collect();
    assert_eq!(text, whole["message"]["content"].as_str().unwrap());
    let openai = json!({"messages": messages, "temperature": 0, "max_tokens": 9});
    let openai = server.json("/v1/chat/completions", &openai);
    assert_eq!(whole["message"]["content"], openai["choices"][0]["message"]["content"]);
    let (last, before) = lines.split_last().unwrap();
    assert!(before.len() > 1 && before.iter().all(|line| line["done"] == false && line["model"] == "demo"));
    for end in [last, &whole] {
        assert_eq!(
            (&end["done"], &end["done_reason"], &end["eval_count"]),
            (&json!(true), &json!("length"), &json!(9))
        );
        assert_eq!(end["prompt_eval_count"], openai["usage"]["prompt_tokens"]);
        let time = |name: &str| end[name].as_u64().unwrap();
        let parts = time("load_duration") + time("prompt_eval_duration") + time("eval_duration");
        assert!(time("eval_duration") > 0 && parts <= time("total_duration"), "{end}");
    }
}

#[test]
fn a_prompt_is_rendered_unless_it_is_raw() {
    let template = Some("{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}[answer]");
    let server = start(Setup { template, ..Setup::default() });
    let options = json!({"temperature": 0, "num_predict": 4, "repeat_penalty": 1.0});
    let generate = |more: Value| {
        let mut body = json!({"model": "demo", "prompt": "A dog", "stream": false, "options": options});
        body.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
        server.json("/api/generate", &body)
    };
    let complete = |prompt: &str| {
        let ask = json!({"prompt": prompt, "temperature": 0, "max_tokens": 4});
        server.json("/v1/completions", &ask)["choices"][0]["text"].clone()
    };
    assert_eq!(generate(json!({"raw": true}))["response"], complete("A dog"));
    let count = |prompt: &str| server.json("/tokenize", &json!({"content": prompt}))["count"].clone();
    let rendered = generate(json!({"system": "Be brief"}));
    assert_eq!(rendered["prompt_eval_count"], count("[system]Be brief[user]A dog[answer]"));
    let raw = json!({"model": "demo", "prompt": "A", "raw": true, "system": "b"});
    assert!(error(&ask(&server, "/api/generate", &raw), 400).starts_with("system: "));
}

#[test]
fn a_request_without_a_prompt_finds_the_model_loaded() {
    let server = plain();
    for (path, body) in [
        ("/api/generate", json!({"model": "demo"})),
        ("/api/chat", json!({"model": "demo", "messages": []})),
        ("/api/generate", json!({"model": "demo", "keep_alive": 0})),
    ] {
        let reply = ask(&server, path, &body);
        assert_eq!((&reply.json()["done"], &reply.json()["done_reason"]), (&json!(true), &json!("load")));
        let unloads = body["keep_alive"] == 0;
        assert_eq!(reply.header("x-mantissa-note").is_some_and(|note| note.contains("stay loaded")), unloads);
    }
    assert_eq!(server.metric("steps_total"), 0.0);
}

#[test]
fn the_form_of_an_answer_and_its_length_are_kept() {
    let server = plain();
    let body = json!({
        "model": "demo", "prompt": "Colour:", "stream": false, "options": {"num_predict": -1, "seed": 3},
        "format": {"type": "object", "properties": {"colour": {"enum": ["red", "blue"]}}, "required": ["colour"], "additionalProperties": false}
    });
    let answer = server.json("/api/generate", &body);
    let value: Value = serde_json::from_str(answer["response"].as_str().unwrap()).unwrap();
    assert!(["red", "blue"].contains(&value["colour"].as_str().unwrap()), "{value}");
    let cut = json!({"model": "demo", "prompt": "Once upon", "raw": true, "stream": false, "options": {"num_ctx": 12, "num_predict": -2}});
    let answer = server.json("/api/generate", &cut);
    let tokens = |name: &str| answer[name].as_u64().unwrap();
    assert!(tokens("prompt_eval_count") + tokens("eval_count") <= 12, "{answer}");
    let more = json!({"model": "demo", "prompt": "Once", "stream": false, "options": {"num_ctx": 100_000, "num_predict": 1}});
    let reply = ask(&server, "/api/generate", &more);
    assert!(reply.header("x-mantissa-note").unwrap().contains("num_ctx"), "{}", reply.head);
}

#[test]
fn tools_are_called() {
    let server = plain();
    let body = json!({
        "model": "demo", "stream": false, "options": {"seed": 1, "num_predict": 200},
        "messages": [
            {"role": "user", "content": "Weather?"},
            {"role": "assistant", "tool_calls": [{"function": {"name": "weather", "arguments": {"city": "Bern"}}}]},
            {"role": "tool", "tool_name": "weather", "content": "sun"}
        ],
        "tools": [{"type": "function", "function": {"name": "weather", "parameters": {"type": "object", "properties": {"city": {"enum": ["Bern"]}}, "required": ["city"]}}}]
    });
    let answer = server.json("/api/chat", &body);
    assert_eq!(answer["message"]["role"], "assistant");
}

#[test]
fn texts_are_embedded() {
    let server = plain();
    let both = server.json("/api/embed", &json!({"model": "demo", "input": ["a dog", "a cat"]}));
    let one = server.json("/v1/embeddings", &json!({"input": "a cat"}));
    assert!(
        both["prompt_eval_count"].as_u64().unwrap() > 1 && both["embeddings"].as_array().unwrap().len() == 2
    );
    let old =
        server.json("/api/embeddings", &json!({"model": "demo", "prompt": "a cat"}))["embedding"].clone();
    let numbers =
        |value: &Value| value.as_array().unwrap().iter().map(|x| x.as_f64().unwrap()).collect::<Vec<_>>();
    let (old, new, openai) =
        (numbers(&old), numbers(&both["embeddings"][1]), numbers(&one["data"][0]["embedding"]));
    assert!(new.len() > 9 && new.iter().zip(&openai).all(|(new, openai)| (new - openai).abs() < 1e-6));
    let length = old.iter().map(|x| x * x).sum::<f64>().sqrt();
    assert!(!(0.9..=1.1).contains(&length), "{length}");
    assert!(old.iter().zip(&new).all(|(old, new)| (old / length - new).abs() < 1e-6));
    // A text beyond the context is cut, and the answer says so, unless that is not wanted.
    let long = json!({"model": "demo", "input": "word ".repeat(400)});
    assert!(
        ask(&server, "/api/embed", &long)
            .header("x-mantissa-note")
            .unwrap()
            .contains("1 of 1 texts were cut")
    );
    let mut whole = long.clone();
    whole["truncate"] = false.into();
    assert!(error(&ask(&server, "/api/embed", &whole), 400).contains("at most 256 tokens"));
    assert_eq!(server.json("/api/embed", &json!({"model": "demo", "input": ""}))["embeddings"], json!([]));
}

#[test]
fn what_is_not_done_is_refused_by_name() {
    let server = plain();
    let message = json!([{"role": "user", "content": "a"}]);
    for (path, body, field) in [
        ("/api/chat", json!({"messages": message}), "model"),
        (
            "/api/chat",
            json!({"model": "demo", "messages": message, "options": {"mirostat": 1}}),
            "options.mirostat",
        ),
        (
            "/api/chat",
            json!({"model": "demo", "messages": message, "options": {"temperature": 9}}),
            "temperature",
        ),
        ("/api/chat", json!({"model": "demo", "messages": message, "stream": 1}), "stream"),
        ("/api/chat", json!({"model": "demo", "messages": message, "think": true}), "think"),
        ("/api/chat", json!({"model": "demo", "messages": message, "format": "xml"}), "format"),
        (
            "/api/chat",
            json!({"model": "demo", "messages": [{"role": "user", "content": "a", "images": ["x"]}]}),
            "messages[0].images",
        ),
        ("/api/generate", json!({"model": "demo", "prompt": "a", "template": "{{ .Prompt }}"}), "template"),
        ("/api/generate", json!({"model": "demo", "prompt": "a", "suffix": "b"}), "suffix"),
        ("/api/generate", json!({"model": "demo", "prompt": "a", "context": [1]}), "context"),
        ("/api/generate", json!({"model": "demo", "prompt": "a", "logprobs": true}), "logprobs"),
        ("/api/embed", json!({"model": "demo", "input": "a", "dimensions": 7}), "dimensions"),
    ] {
        let said = error(&ask(&server, path, &body), 400);
        assert!(said.starts_with(&format!("{field}: expected ")), "{body}: {said}");
    }
    assert_eq!(server.metric("steps_total"), 0.0);
    let fetched = ask(&server, "/api/pull", &json!({"model": "demo", "stream": false}));
    assert_eq!((fetched.status, fetched.json()), (200, json!({"status": "success"})));
    for path in ["/api/pull", "/api/push", "/api/create", "/api/copy"] {
        assert!(
            error(&ask(&server, path, &json!({"model": "llama3"})), 501).contains("--also NAME=MODEL"),
            "{path}"
        );
    }
    let delete = b"DELETE /api/delete HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n";
    error(&server.raw(delete), 501);
    error(&server.get("/api/none"), 404);
    error(&server.get("/api/chat"), 405);
    error(&server.post("/api/chat", "{"), 400);
}

#[test]
fn the_root_tells_clients_that_a_server_is_there() {
    let server = plain();
    assert_eq!(server.get("/").text(), "Ollama is running");
    let head = server.raw(b"HEAD / HTTP/1.1\r\nhost: localhost\r\naccept: */*\r\nconnection: close\r\n\r\n");
    assert_eq!((head.status, head.body.len()), (200, 0));
}

#[test]
fn a_command_line_need_not_name_the_type_but_a_page_must() {
    let server = plain();
    let body = json!({"model": "demo"}).to_string();
    let form = |more: &str| {
        let text = String::from_utf8(request("/api/generate", &body, more)).unwrap();
        server.raw(text.replace("application/json", "application/x-www-form-urlencoded").as_bytes())
    };
    assert_eq!(form("").status, 200);
    error(&form("origin: https://evil.example\r\n"), 415);
    error(&form("sec-fetch-site: cross-site\r\n"), 415);
}

#[test]
fn a_single_model_answers_for_any_name_unless_the_server_is_strict() {
    let body = json!({"model": "llama3.2", "prompt": "a", "stream": false, "options": {"num_predict": 1}});
    let reply = ask(&plain(), "/api/generate", &body);
    assert_eq!((reply.status, &reply.json()["model"]), (200, &json!("demo")));
    assert!(reply.header("x-mantissa-note").unwrap().contains("no model is named llama3.2; demo answers"));
    let show = json!({"model": "llama3.2"});
    let reply = ask(&plain(), "/api/show", &show);
    assert_eq!((reply.status, &reply.json()["details"]["format"]), (200, &json!("safetensors")));
    assert!(reply.header("x-mantissa-note").unwrap().contains("no model is named llama3.2; demo answers"));
    let options = Options { strict_model: true, ..Setup::default().options };
    let strict = start(Setup { options, ..Setup::default() });
    assert!(error(&ask(&strict, "/api/show", &show), 404).contains("expected demo, got llama3.2"));
    assert!(error(&ask(&strict, "/api/generate", &body), 404).contains("expected demo, got llama3.2"));
    let several = start(Setup { names: &["demo", "other"], ..Setup::default() });
    error(&ask(&several, "/api/generate", &body), 404);
    error(&ask(&several, "/api/show", &show), 404);
}

#[test]
fn the_sampling_of_the_model_holds_where_a_request_sets_none() {
    let greedy =
        SamplingDefaults { temperature: Some(0.0), repetition: Some(1.0), ..SamplingDefaults::default() };
    let server = start(Setup { sampling: greedy, ..Setup::default() });
    let text = |options: Value| {
        let body =
            json!({"model": "demo", "prompt": "Once upon a time", "stream": false, "options": options});
        server.json("/api/generate", &body)["response"].clone()
    };
    let most_probable = text(json!({"num_predict": 24, "temperature": 0}));
    for seed in 0..3 {
        assert_eq!(text(json!({"num_predict": 24, "seed": seed})), most_probable);
    }
    let hot =
        |seed: u64| text(json!({"num_predict": 24, "seed": seed, "temperature": 2, "top_k": 0, "top_p": 1}));
    assert!((0..3).any(|seed| hot(seed) != most_probable));
    let shown = server.json("/api/show", &json!({"model": "demo"}));
    assert_eq!(shown["parameters"], "temperature 0.0\nrepeat_penalty 1.0");
}
