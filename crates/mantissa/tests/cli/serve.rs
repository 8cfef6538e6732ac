//! `mantissa serve`: the binary as a server.

use std::fs;
use std::io::{BufRead, BufReader, Read, Write};
use std::net::TcpStream;
use std::process::{Child, Stdio};
use std::time::{Duration, Instant};

use serde_json::{Value, json};
use tempfile::TempDir;

use crate::support::{command, fail, succeed, text};

/// A server of the binary.
struct Server {
    child: Child,
    address: String,
}

/// Starts a server and waits until it listens.
fn start(arguments: &[&str]) -> Server {
    let arguments = [&["serve"], arguments, &["--port", "0"]].concat();
    let mut child = command().args(arguments).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
    let mut line = String::new();
    BufReader::new(child.stdout.as_mut().unwrap()).read_line(&mut line).unwrap();
    let address = line.split(' ').next().unwrap().strip_prefix("http://").expect("an address").to_owned();
    Server { child, address }
}

impl Server {
    /// Sends a request and returns status and body.
    fn ask(&self, method: &str, path: &str, body: &str) -> (u16, String) {
        let mut stream = TcpStream::connect(&self.address).unwrap();
        let request = format!(
            "{method} {path} HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\ncontent-type: application/json\r\ncontent-length: {}\r\n\r\n{body}",
            body.len()
        );
        stream.write_all(request.as_bytes()).unwrap();
        let mut reply = String::new();
        stream.read_to_string(&mut reply).unwrap();
        let (head, body) = reply.split_once("\r\n\r\n").unwrap();
        (head.split(' ').nth(1).unwrap().parse().unwrap(), body.to_owned())
    }

    fn post(&self, path: &str, body: &Value) -> Value {
        let (status, reply) = self.ask("POST", path, &body.to_string());
        assert_eq!(status, 200, "{reply}");
        serde_json::from_str(&reply).unwrap()
    }

    /// Ends the server by a signal; returns its exit code and standard error.
    fn end(&mut self, signal: &str) -> (Option<i32>, String) {
        let id = self.child.id().to_string();
        assert!(std::process::Command::new("kill").args(["-s", signal, &id]).status().unwrap().success());
        let mut errors = String::new();
        self.child.stderr.take().unwrap().read_to_string(&mut errors).unwrap();
        (self.child.wait().unwrap().code(), errors)
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        // A test that failed leaves no process.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

#[test]
fn the_binary_serves_demo_and_ends_in_order() {
    for signal in ["TERM", "INT"] {
        let mut server = start(&["demo"]);
        // The template is rendered in a process of its own.
        let ask = json!({"messages": [{"role": "user", "content": "Once upon a time"}], "max_tokens": 12, "temperature": 0});
        let answer = server.post("/v1/chat/completions", &ask);
        let own = succeed(&["run", "demo", "-p", "Once upon a time", "-n", "12", "--quiet"]);
        let content = answer["choices"][0]["message"]["content"].as_str().unwrap();
        assert_eq!(
            format!("Once upon a time{content}").trim_end(),
            format!("Once upon a time{}", own.trim_end())
        );
        let begin = Instant::now();
        let (code, errors) = server.end(signal);
        assert_eq!(code, Some(0), "{errors}");
        assert!(begin.elapsed() < Duration::from_secs(3));
        assert!(errors.contains("POST /v1/chat/completions 200"), "{errors}");
        // The log has no texts.
        assert!(!errors.contains("Once upon"), "{errors}");
    }
}

#[test]
fn a_template_beyond_its_limits_fails_its_request_alone() {
    let temp = TempDir::new().unwrap();
    let model = temp.path().join("model");
    let demo = crate::support::root().join("crates/mantissa-jobs/demo/model");
    fs::create_dir(&model).unwrap();
    for file in fs::read_dir(demo).unwrap() {
        let path = file.unwrap().path();
        fs::copy(&path, model.join(path.file_name().unwrap())).unwrap();
    }
    let doubling = "{% if messages[0].content == 'bomb' %}{% set ns = namespace(s='x' * 1000) %}\
        {% for i in range(40) %}{% set ns.s = ns.s ~ ns.s %}{% endfor %}{{ ns.s | length }}{% endif %}\
        {% if messages[0].content == 'no' %}{{ raise_exception('not this') }}{% endif %}{{ messages[0].content }}";
    fs::write(model.join("chat_template.jinja"), doubling).unwrap();
    let mut server = start(&[text(&model)]);
    let chat = |content: &str| {
        let ask = json!({"messages": [{"role": "user", "content": content}], "max_tokens": 2});
        server.ask("POST", "/v1/chat/completions", &ask.to_string())
    };
    let (status, reply) = chat("bomb");
    assert!(status == 500 || status == 400, "{status}: {reply}");
    let (status, reply) = chat("no");
    assert_eq!(status, 400, "{reply}");
    assert!(reply.contains("not this"), "{reply}");
    assert_eq!(chat("A story").0, 200);
    assert_eq!(server.end("TERM").0, Some(0));
}

#[test]
fn several_precisions_are_served_and_compared() {
    let temp = TempDir::new().unwrap();
    let int4 = temp.path().join("int4");
    succeed(&["quantize", "demo", "--recipe", "rtn-int4-g32", "--out", text(&int4), "--quiet"]);
    let q8 = temp.path().join("q8.gguf");
    succeed(&["quantize", "demo", "--recipe", "q8_0", "--out", text(&q8), "--quiet"]);
    let (also, as_gguf) = (format!("int4={}", text(&int4)), format!("q8={}", text(&q8)));
    let mut server = start(&[
        "demo",
        "--also",
        &also,
        "--also",
        &as_gguf,
        "--shadow",
        "demo=1",
        "--shadow-limit",
        "0.000001",
        "--context",
        "256",
    ]);
    let ask = json!({"model": "int4", "prompt": "Once upon a time", "max_tokens": 150, "temperature": 0, "ignore_eos": true});
    assert_eq!(server.post("/v1/completions", &ask)["model"], "int4");
    let format =
        |name: &str| server.post("/api/show", &json!({ "model": name }))["details"]["format"].clone();
    assert_eq!(
        (format("demo"), format("int4"), format("q8")),
        ("safetensors".into(), "safetensors".into(), "gguf".into())
    );
    // A file is called by its type, as llama.cpp spells it, whatever most of its tensors are.
    let details = &server.post("/api/show", &json!({ "model": "q8" }))["details"];
    assert_eq!(
        (&details["quantization_level"], &details["tensor_types"][0]),
        (&json!("Q8_0"), &json!("q8_0"))
    );
    server.post("/v1/completions", &json!({"prompt": "A", "max_tokens": 1}));
    let value = |metrics: &str, name: &str| {
        let line =
            metrics.lines().find(|line| line.starts_with(&format!("mantissa_{name}{{model=\"int4\"}}")));
        line.and_then(|line| line.rsplit(' ').next()?.parse::<f64>().ok())
    };
    let begin = Instant::now();
    let metrics = loop {
        let metrics = server.ask("GET", "/metrics", "").1;
        if value(&metrics, "shadow_sequences_total") == Some(1.0) {
            break metrics;
        }
        assert!(begin.elapsed() < Duration::from_secs(30), "{metrics}");
        std::thread::sleep(Duration::from_millis(20));
    };
    assert_eq!(value(&metrics, "shadow_tokens_total"), Some(150.0));
    let kl = value(&metrics, "shadow_kl_nats_total").unwrap() / 150.0;
    assert!(kl > 1e-4 && kl < 0.5, "{kl}");
    assert!((value(&metrics, "shadow_kl_recent").unwrap() - kl).abs() < 1e-6);
    assert_eq!(value(&metrics, "shadow_alarm"), Some(1.0));
    assert!(!metrics.contains("mantissa_shadow_tokens_total{model=\"demo\"}"));
    let (code, errors) = server.end("TERM");
    assert_eq!(code, Some(0));
    assert!(errors.contains("shadow: int4: KL"), "{errors}");
}

#[test]
fn settings_that_cannot_be_served_are_refused() {
    let temp = TempDir::new().unwrap();
    let keys = temp.path().join("keys.txt");
    fs::write(&keys, "good\nsecret 77\n").unwrap();
    let line = fail(2, &["serve", "demo", "--api-key-file", text(&keys)]);
    assert!(line.contains("line 2") && !line.contains("secret"), "{line}");
    assert!(fail(2, &["serve", "demo", "--host", "0.0.0.0"]).contains("--api-key-file"));
    assert!(fail(2, &["serve", "demo", "--context", "100000", "--port", "0"]).contains("512"));
    assert!(fail(2, &["serve", "demo", "--also", "demo=demo", "--port", "0"]).contains("demo twice"));
    assert!(fail(2, &["serve", "demo", "--shadow", "other=0.5", "--port", "0"]).contains("--also"));
    fail(2, &["serve", "demo", "--shadow", "demo=2", "--port", "0"]);
    let taken = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let port = taken.local_addr().unwrap().port().to_string();
    assert!(fail(3, &["serve", "demo", "--port", &port]).contains("choose another --port"));
    fail(3, &["serve", "demo", "--port", "0", "--memory", "20M"]);
}
