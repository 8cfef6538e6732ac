//! `/v1/compare` and the page.

use serde_json::{Value, json};

use crate::support::{Setup, plain, start};

fn pair() -> crate::support::Running {
    start(Setup { names: &["demo", "twin"], ..Setup::default() })
}

fn kinds<'e>(events: &'e [Value], kind: &str) -> Vec<&'e Value> {
    events.iter().filter(|event| event["kind"] == kind).collect()
}

#[test]
fn a_model_and_its_twin_do_not_differ() {
    let server = pair();
    let ask = json!({"model": "demo", "other": "twin", "prompt": "Once upon a time", "max_tokens": 70, "temperature": 0.9, "seed": 5});
    let events = server.post("/v1/compare", &ask.to_string()).events();
    let answer = |side: u64| -> Vec<&Value> {
        kinds(&events, "token")
            .into_iter()
            .filter(|event| event["side"] == side)
            .map(|event| &event["token"])
            .collect()
    };
    assert_eq!(answer(0).len(), 70);
    assert_eq!(answer(0), answer(1));
    let scores = kinds(&events, "score");
    assert_eq!(scores.len(), 70);
    for (i, score) in scores.iter().enumerate() {
        assert_eq!(
            (score["index"].as_u64(), score["kl"].as_f64(), score["same"].as_bool()),
            (Some(i as u64), Some(0.0), Some(true))
        );
    }
    assert_eq!(events.last().unwrap(), &json!({"kind": "done", "tokens": 70, "kl": 0.0, "agreement": 1.0}));
    // The same tokens as a completion with this seed.
    let ask = json!({"prompt": "Once upon a time", "max_tokens": 70, "temperature": 0.9, "seed": 5});
    let completion = server.json("/v1/completions", &ask);
    let text: String = kinds(&events, "token")
        .iter()
        .filter(|event| event["side"] == 0)
        .filter_map(|event| event["text"].as_str())
        .collect();
    assert_eq!(completion["choices"][0]["text"], text);
}

#[test]
fn greedy_answers_say_what_the_other_would_say() {
    let server = pair();
    let ask = json!({"other": "twin", "messages": [{"role": "user", "content": "Once upon a time"}], "max_tokens": 12, "temperature": 0});
    let events = server.post("/v1/compare", &ask.to_string()).events();
    let said: Vec<&Value> = kinds(&events, "token")
        .iter()
        .filter(|event| event["side"] == 0)
        .map(|event| &event["text"])
        .collect();
    let likely: Vec<&Value> = kinds(&events, "score").iter().map(|event| &event["likely"]).collect();
    assert_eq!(said, likely);
}

#[test]
fn a_comparison_at_fault_is_named() {
    let server = pair();
    for (ask, status, param) in [
        (json!({"other": "none", "prompt": "a"}), 404, "other"),
        (json!({"model": "none", "other": "twin", "prompt": "a"}), 404, "model"),
        (json!({"other": "twin"}), 400, "messages"),
        (
            json!({"other": "twin", "prompt": "a", "messages": [{"role": "user", "content": "a"}]}),
            400,
            "prompt",
        ),
        (json!({"other": "twin", "prompt": "a", "temperature": 3}), 400, "temperature"),
        (json!({"prompt": "a"}), 400, "other"),
    ] {
        let reply = server.post("/v1/compare", &ask.to_string());
        let message = reply.error(status);
        assert!(
            reply.json()["error"]["param"] == param || message.contains(param),
            "{ask}: {}",
            reply.text()
        );
    }
}

#[test]
fn the_page_comes_from_this_server_alone() {
    let server = plain();
    let reply = server
        .raw(b"GET / HTTP/1.1\r\nhost: localhost\r\naccept: text/html,*/*\r\nconnection: close\r\n\r\n");
    assert_eq!(reply.status, 200);
    assert!(reply.header("content-type").unwrap().starts_with("text/html"));
    let policy = reply.header("content-security-policy").unwrap();
    assert!(
        policy.contains("default-src 'none'")
            && policy.contains("script-src 'sha256-")
            && policy.contains("connect-src 'self'"),
        "{policy}"
    );
    assert!(!policy.contains("unsafe"), "{policy}");
    let text = reply.text();
    assert!(text.contains("<title>mantissa</title>"));
    for other in ["http:", "https:", "//cdn", " src=", "@import"] {
        assert!(!text.contains(other), "{other}");
    }
}
