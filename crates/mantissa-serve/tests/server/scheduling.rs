//! Many requests at once: sharing, fairness, back-pressure, cancelling, stopping.

use std::io::{Read, Write};
use std::thread;
use std::time::{Duration, Instant};

use mantissa_runtime::RuntimeOptions;
use mantissa_serve::{Limits, Options};
use serde_json::{Value, json};

use crate::support::{PATIENCE, Running, Setup, parse, plain, read, request, start};

/// A request of many choices that takes seconds.
fn long(seed: u64) -> Value {
    json!({
        "prompt": "Once upon a time", "n": 64, "max_tokens": 10_000, "ignore_eos": true, "temperature": 1, "seed": seed,
        "stream": true,
    })
}

/// Starts a server for long sequences, `parallel` at once.
fn slow(parallel: usize, options: Options) -> Running {
    start(Setup { runtime: RuntimeOptions::batch(parallel, 512), options, ..Setup::default() })
}

fn options(queue: usize) -> Options {
    Options { queue, drain: Duration::from_secs(20), ..Options::default() }
}

/// Begins a request and waits for its first token.
fn begun(server: &Running, ask: &Value) -> std::net::TcpStream {
    let mut stream = server.connect();
    stream.write_all(&request("/v1/completions", &ask.to_string(), "")).unwrap();
    let mut seen = Vec::new();
    while !seen.windows(6).any(|six| six == b"data: ") {
        let mut bytes = [0; 512];
        let n = stream.read(&mut bytes).unwrap();
        assert!(n > 0, "{}", String::from_utf8_lossy(&seen));
        seen.extend_from_slice(&bytes[..n]);
    }
    stream
}

#[test]
fn answers_beside_others_are_those_alone() {
    let server = plain();
    let prompts = [
        "Once upon a time",
        "The dog",
        "def f(x):",
        "She said",
        "A",
        "In the morning, the king",
        "1 2 3",
        "Why",
    ];
    let ask = |prompt: &str, seed: u64| json!({"prompt": prompt, "max_tokens": 30, "temperature": seed % 2, "seed": seed});
    let alone: Vec<Value> = (0u64..)
        .zip(prompts)
        .map(|(i, p)| server.json("/v1/completions", &ask(p, i))["choices"].clone())
        .collect();
    for _ in 0..3 {
        let together: Vec<Value> = thread::scope(|scope| {
            let server = &server;
            let one =
                |(i, p)| scope.spawn(move || server.json("/v1/completions", &ask(p, i))["choices"].clone());
            let threads: Vec<_> = (0u64..).zip(prompts).map(one).collect();
            threads.into_iter().map(|thread| thread.join().unwrap()).collect()
        });
        assert_eq!(together, alone);
    }
}

#[test]
fn a_common_beginning_is_computed_once() {
    let server = plain();
    let prompt = "the quick brown fox jumps over the lazy dog and ".repeat(6);
    let ask = json!({"prompt": prompt, "max_tokens": 4, "n": 4, "temperature": 0});
    let reply = server.json("/v1/completions", &ask);
    let tokens = reply["usage"]["prompt_tokens"].as_u64().unwrap() as f64;
    server.wait_for("counts are published", || server.metric("prompt_tokens_shared_total") > 0.0);
    let shared = server.metric("prompt_tokens_shared_total");
    assert!(tokens > 64.0 && shared >= 3.0 * (tokens - 64.0).max(64.0), "{shared} of 4 x {tokens}");
}

/// Neither from cached tokens nor from the list of sequences.
#[test]
fn clients_do_not_see_each_other() {
    let prompt = "the quick brown fox jumps over the lazy dog and ".repeat(8);
    let ask = json!({"prompt": prompt, "max_tokens": 1, "temperature": 0}).to_string();
    for share_prefixes in [false, true] {
        let server = start(Setup {
            options: Options { share_prefixes, ..options(8) },
            runtime: RuntimeOptions::batch(2, 512),
            keys: Some("alpha\nbeta"),
            ..Setup::default()
        });
        let cached = |key: &str| {
            let reply = server.post_as(key, "/v1/completions", &ask).json();
            reply["usage"]["prompt_tokens_details"]["cached_tokens"].as_u64().unwrap()
        };
        assert_eq!(cached("alpha"), 0);
        assert_eq!(cached("beta") > 0, share_prefixes);
        assert!(cached("alpha") > 0 && cached("beta") > 0);
        let turn = server.turns.take();
        let mut stream = server.connect();
        let header = "authorization: Bearer alpha\r\n";
        stream.write_all(&request("/v1/completions", &ask, header)).unwrap();
        let slots = |key: &str| {
            let ask = format!(
                "GET /slots HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\nx-api-key: {key}\r\n\r\n"
            );
            server.raw(ask.as_bytes()).json().as_array().unwrap().len()
        };
        server.wait_for("the sequence is at work", || slots("alpha") == 1);
        assert_eq!(slots("beta"), 0);
        drop(turn);
        assert_eq!(read(&mut stream).status, 200);
    }
}

/// It is told that the server stops, and so are new requests.
#[test]
fn health_is_answered_while_the_server_stops() {
    let server = slow(1, options(8));
    let held = begun(&server, &long(1));
    server.stop();
    server.wait_for("the server says that it stops", || server.get("/health").status == 503);
    server.post("/v1/completions", &json!({"prompt": "A"}).to_string()).error(503);
    drop(held);
    server.join();
}

#[test]
fn time_limits_beyond_the_clock_are_no_fault() {
    let limits = Limits { time: Duration::from_secs(u64::MAX), ..Limits::default() };
    let server = slow(1, Options { limits, ..options(8) });
    server.json("/v1/completions", &json!({"prompt": "A", "max_tokens": 1}));
    server.json("/v1/embeddings", &json!({"input": "A"}));
}

#[test]
fn a_client_that_leaves_frees_its_slot_within_a_step() {
    let server = slow(1, options(8));
    let first = begun(&server, &long(1));
    let turn = server.turns.take();
    assert_eq!(server.get("/slots").json().as_array().unwrap().len(), 1);
    let steps = server.metric("steps_total");
    drop(first);
    // Time for the server to see it.
    thread::sleep(Duration::from_millis(500));
    drop(turn);
    server.wait_for("the sequence is cancelled", || server.metric("cancelled_total") > 0.0);
    server.wait_for("no slot is at work", || server.get("/slots").json() == json!([]));
    let steps = server.metric("steps_total") - steps;
    assert!(steps <= 2.0, "{steps}");
    server.json("/v1/completions", &json!({"prompt": "A", "max_tokens": 1}));
}

#[test]
fn a_client_that_leaves_before_its_answer_is_cancelled_too() {
    let server = slow(1, options(8));
    let mut ask = long(1);
    ask["stream"] = false.into();
    let mut stream = server.connect();
    stream.write_all(&request("/v1/completions", &ask.to_string(), "")).unwrap();
    server.wait_for("it is at work", || server.get("/slots").json() != json!([]));
    drop(stream);
    server.wait_for("all choices are cancelled", || server.get("/slots").json() == json!([]));
    assert!(server.metric("cancelled_total") > 1.0);
}

#[test]
fn a_full_queue_gives_503_with_a_time() {
    let server = slow(1, options(2));
    // An idle server takes all choices of a request.
    let held = begun(&server, &long(1));
    let turn = server.turns.take();
    let reply = server.post("/v1/completions", &json!({"prompt": "A"}).to_string());
    reply.error(503);
    assert_eq!(reply.json()["error"]["code"], "queue_full");
    assert!((1..=60).contains(&reply.header("retry-after").unwrap().parse::<u64>().unwrap()));
    drop((held, turn));
    server.wait_for("all are cancelled", || server.get("/slots").json() == json!([]));
    server.json("/v1/completions", &json!({"prompt": "A", "max_tokens": 1}));
}

#[test]
fn one_client_leaves_room_in_the_queue_for_others() {
    let server = start(Setup {
        runtime: RuntimeOptions::batch(1, 512),
        options: options(4),
        keys: Some("alpha\nbeta"),
        ..Setup::default()
    });
    let turn = server.turns.take();
    let ask = json!({"prompt": "A", "max_tokens": 4});
    let send = |key: &str| {
        let mut stream = server.connect();
        let header = format!("authorization: Bearer {key}\r\n");
        stream.write_all(&request("/v1/completions", &ask.to_string(), &header)).unwrap();
        stream
    };
    let queued = |n: u64| {
        server.wait_for("requests wait", || {
            let ask =
                b"GET /props HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\nx-api-key: beta\r\n\r\n";
            let props = server.raw(ask).json();
            props["models"][0]["queued"] == n && props["models"][0]["running"] == 1
        });
    };
    let mut sent = vec![send("alpha")];
    queued(0);
    sent.extend([send("alpha"), send("alpha")]);
    queued(2);
    let reply = server.post_as("alpha", "/v1/completions", &ask.to_string());
    reply.error(429);
    assert_eq!(reply.json()["error"]["code"], "client_queue_full");
    assert!(reply.header("retry-after").is_some());
    sent.push(send("beta"));
    queued(3);
    drop(turn);
    for stream in &mut sent {
        assert_eq!(read(stream).status, 200);
    }
}

#[test]
fn a_time_limit_ends_an_answer() {
    let limits = Limits { time: Duration::from_millis(1), ..Limits::default() };
    let server = slow(1, Options { limits, ..options(8) });
    let mut ask = long(0);
    ask["stream"] = false.into();
    let reply = server.post("/v1/completions", &ask.to_string());
    match reply.status {
        // It was begun in time.
        200 => assert_eq!(reply.json()["choices"][0]["finish_reason"], "length"),
        _ => assert_eq!(reply.json()["error"]["code"], "time_limit", "{}", reply.text()),
    }
}

#[test]
fn a_stop_lets_requests_finish_and_takes_no_others() {
    let server = slow(2, options(8));
    let mut ask = long(1);
    ask["n"] = 2.into();
    let mut stream = begun(&server, &ask);
    let mut idle = server.connect();
    server.stop();
    let mut rest = Vec::new();
    stream.read_to_end(&mut rest).unwrap();
    assert!(String::from_utf8_lossy(&rest).contains("data: [DONE]"));
    // An idle connection ends without an answer.
    let mut nothing = Vec::new();
    let _ = idle.read_to_end(&mut nothing);
    assert!(nothing.is_empty());
    let begin = Instant::now();
    server.join();
    assert!(begin.elapsed() < Duration::from_secs(5));
}

#[test]
fn a_stop_cancels_what_takes_longer() {
    let drain = Duration::from_millis(1);
    let server = slow(1, Options { drain, ..options(200) });
    let mut streams: Vec<_> = vec![begun(&server, &long(0))];
    streams.push({
        let mut stream = server.connect();
        stream.write_all(&request("/v1/completions", &long(1).to_string(), "")).unwrap();
        stream
    });
    let sent = |path: &str| server.get("/metrics").text().contains(path);
    server.wait_for("both came", || sent("mantissa_connections 3"));
    let begin = Instant::now();
    server.stop();
    let mut text = String::new();
    let mut bytes = Vec::new();
    streams[0].read_to_end(&mut bytes).unwrap();
    text += &String::from_utf8_lossy(&bytes);
    assert!(text.contains("the server is stopping"), "{text}");
    let mut bytes = Vec::new();
    streams[1].read_to_end(&mut bytes).unwrap();
    let reply = parse(&bytes);
    assert!(reply.text().contains("the server is stopping"), "{}", reply.text());
    server.join();
    assert!(begin.elapsed() < PATIENCE / 3);
}
