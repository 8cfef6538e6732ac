//! Hostile clients: slow, huge, malformed, unauthorized.

use std::io::{Read, Write};
use std::time::{Duration, Instant};

use mantissa_serve::{Limits, Options};
use serde_json::json;

use crate::support::{Running, Setup, plain, read, request, start};

/// Starts a server with short limits.
fn limited(limits: Limits) -> Running {
    start(Setup {
        options: Options { limits, drain: Duration::from_secs(2), ..Options::default() },
        ..Setup::default()
    })
}

/// Checks that the server still answers.
fn is_alive(server: &Running) {
    assert_eq!(server.get("/health").status, 200);
}

#[test]
fn slow_headers_and_idle_connections_are_closed() {
    let server = limited(Limits { header_time: Duration::from_millis(300), ..Limits::default() });
    for bytes in [
        &b""[..],
        b"GET /health HTTP/1.1\r\nhost: localhost\r\nx-slow: ",
        b"GET /health HTTP/1.1\r\nhost: localhost\r\n\r\n",
    ] {
        let (mut stream, begin) = (server.connect(), Instant::now());
        stream.write_all(bytes).unwrap();
        let mut rest = Vec::new();
        let _ = stream.read_to_end(&mut rest);
        let time = begin.elapsed();
        assert!(time > Duration::from_millis(250) && time < Duration::from_secs(5), "{time:?}");
    }
    is_alive(&server);
}

#[test]
fn headers_sent_byte_by_byte_are_closed_in_time() {
    let server = limited(Limits { header_time: Duration::from_millis(400), ..Limits::default() });
    let (mut stream, begin) = (server.connect(), Instant::now());
    for byte in b"GET /health HTTP/1.1\r\nhost: localhost\r\nx: ".iter().chain(std::iter::repeat(&b'a')) {
        if stream.write_all(&[*byte]).is_err() {
            break;
        }
        assert!(begin.elapsed() < Duration::from_secs(5));
        std::thread::sleep(Duration::from_millis(20));
    }
    is_alive(&server);
}

#[test]
fn a_slow_body_gets_408() {
    let server = limited(Limits { body_time: Duration::from_millis(300), ..Limits::default() });
    let mut stream = server.connect();
    stream
        .write_all(b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\ncontent-length: 50\r\n\r\n{")
        .unwrap();
    // The connection ends too: its bytes are in no known place.
    read(&mut stream).error(408);
    is_alive(&server);
}

#[test]
fn a_client_that_reads_nothing_is_dropped() {
    let server = limited(Limits { write_time: Duration::from_millis(300), ..Limits::default() });
    let mut stream = server.connect();
    // Requests in a row, whose answers fill all buffers.
    let ask =
        request("/tokenize", &json!({"content": "a ".repeat(200_000), "with_pieces": true}).to_string(), "");
    let ask = String::from_utf8(ask).unwrap().replace("connection: close\r\n", "");
    stream.set_write_timeout(Some(Duration::from_secs(1))).unwrap();
    for _ in 0..4 {
        if stream.write_all(ask.as_bytes()).is_err() {
            break;
        }
    }
    server.wait_for("the connection is dropped", || server.metric("connections") < 2.0);
}

#[test]
fn connections_beyond_the_limit_get_503() {
    let server = limited(Limits { connections: 3, ..Limits::default() });
    let held: Vec<_> = (0..3).map(|_| server.connect()).collect();
    std::thread::sleep(Duration::from_millis(100));
    let reply = read(&mut server.connect());
    reply.error(503);
    assert_eq!(reply.header("retry-after"), Some("1"));
    drop(held);
    server.wait_for("places are free again", || {
        let mut stream = server.connect();
        let _ = stream.write_all(b"GET /health HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n");
        read(&mut stream).status == 200
    });
}

#[test]
fn what_is_too_large_is_refused_before_it_is_read() {
    let (server, begin) = (limited(Limits { body: 1000, ..Limits::default() }), Instant::now());
    let large = json!({"prompt": "x".repeat(2000)}).to_string();
    server.post("/v1/completions", &large).error(413);
    let chunked = format!(
        "POST /v1/completions HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\ncontent-type: application/json\r\n\
         transfer-encoding: chunked\r\n\r\n{:x}\r\n{large}\r\n0\r\n\r\n",
        large.len()
    );
    server.raw(chunked.as_bytes()).error(413);
    let claimed = "POST /v1/completions HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\ncontent-type: application/json\r\ncontent-length: 99999999999\r\n\r\n";
    server.raw(claimed.as_bytes()).error(413);
    let headers = format!(
        "GET /health HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\nx: {}\r\n\r\n",
        "y".repeat(40_000)
    );
    server.raw(headers.as_bytes()).error(431);
    let headers = format!("GET /health HTTP/1.1\r\nhost: localhost\r\nx: {}\r\n\r\n", "y".repeat(100_000));
    assert_eq!(server.raw(headers.as_bytes()).status, 431);
    let many = format!("GET /health HTTP/1.1\r\nhost: localhost\r\n{}\r\n", "a: b\r\n".repeat(500));
    assert_eq!(server.raw(many.as_bytes()).status, 431);
    let target = format!("/health?{}", "z".repeat(5000));
    server.get(&target).error(414);
    assert!(begin.elapsed() < Duration::from_secs(5));
    is_alive(&server);
}

#[test]
fn what_is_no_json_is_refused() {
    let server = plain();
    let post = |body: &str| server.post("/v1/completions", body);
    for body in [
        "",
        "{",
        "[1]",
        "{\"prompt\": NaN}",
        "{\"prompt\":\"a\",\"prompt\":\"b\"}",
        "\"x\"",
        "{\"prompt\": \"\\ud800\"}",
    ] {
        post(body).error(400);
    }
    let deep = format!("{{\"prompt\":\"a\",\"x\":{}{}}}", "[".repeat(100_000), "]".repeat(100_000));
    assert!(post(&deep).error(400).contains("nested at most 100 deep"));
    let mut bytes = request("/v1/completions", "{\"prompt\":\"aa\"}", "");
    let at = bytes.len() - 3;
    bytes[at] = 0xff;
    server.raw(&bytes).error(400);
    for kind in ["text/plain", "application/x-www-form-urlencoded", "multipart/form-data"] {
        let ask = format!(
            "POST /v1/completions HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\ncontent-type: {kind}\r\ncontent-length: 2\r\n\r\n{{}}"
        );
        let told = server.raw(ask.as_bytes()).error(415);
        assert!(told.contains("-H 'Content-Type: application/json'"), "{told}");
    }
    is_alive(&server);
}

#[test]
fn what_is_no_http_is_refused() {
    let server = plain();
    for bytes in [
        &b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03\r\n\r\n"[..],
        b"GET\r\n\r\n",
        b"GET / HTTP/9.9\r\n\r\n",
        b"G\0T / HTTP/1.1\r\n\r\n",
    ] {
        assert_eq!(server.raw(bytes).status, 400, "{bytes:?}");
    }
    let smuggled = b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-length: 5\r\ncontent-length: 6\r\n\r\n{}";
    assert_eq!(server.raw(smuggled).status, 400);
    is_alive(&server);
}

#[test]
fn other_paths_and_methods_are_refused() {
    let server = plain();
    for path in ["/v1/none", "/../../etc/passwd", "/v1/models/..%2f..%2fetc%2fpasswd", "/v1/completions/"] {
        let message = server.get(path).error(404);
        let names_paths = message.contains("/api/chat, ") && message.contains("/v1/chat/completions, ");
        assert!(names_paths || path.starts_with("/v1/models/"), "{message}");
    }
    server.get("/v1/completions").error(405);
    server.post("/health", "{}").error(405);
}

#[test]
fn parameters_out_of_range_name_their_field() {
    let server = plain();
    for (name, value) in [
        ("n", json!(0)),
        ("n", json!(-1)),
        ("n", json!(1_000_000)),
        ("n", json!(1.5)),
        ("max_tokens", json!(-2)),
        ("max_tokens", json!(0)),
        ("max_tokens", json!(1e300)),
        ("max_tokens", json!("5")),
        ("top_k", json!(-2)),
        ("top_k", json!(1_000_000)),
        ("top_p", json!(-0.1)),
        ("top_p", json!(1.1)),
        ("top_p", json!("NaN")),
        ("temperature", json!(-1)),
        ("temperature", json!(1e38)),
        ("temperature", json!(1e300)),
        ("logprobs", json!(-1)),
        ("logprobs", json!(1000)),
        ("seed", json!(1e30)),
        ("seed", json!(0.5)),
        ("stop", json!(vec!["x"; 100])),
        ("stop", json!("")),
        ("stop", json!("x".repeat(1000))),
        ("stop", json!([1])),
        ("prompt", json!(5)),
        ("prompt", json!({})),
        ("prompt", json!([])),
        ("prompt", json!([[]])),
        ("prompt", json!([2048])),
        ("prompt", json!([-1])),
        ("prompt", json!(vec!["x"; 1000])),
        ("prompt", json!("word ".repeat(1000))),
        ("best_of", json!(50)),
        ("min_p", json!(1.5)),
        ("presence_penalty", json!(3)),
        ("frequency_penalty", json!(-3)),
        ("repetition_penalty", json!(0)),
        ("logit_bias", json!({"2048": 1})),
        ("logit_bias", json!({"x": 1})),
        ("logit_bias", json!({"1": 101})),
        ("suffix", json!("x")),
        ("stream", json!("yes")),
        ("model", json!(7)),
    ] {
        let mut ask = json!({"prompt": "A", "max_tokens": 1});
        ask[name] = value.clone();
        let reply = server.post("/v1/completions", &ask.to_string());
        reply.error(400);
        assert_eq!(reply.json()["error"]["param"], name, "{name}: {value}: {}", reply.text());
    }
    let ask = json!({"prompt": "A", "max_tokens": 18_446_744_073_709_551_615u64});
    server.post("/v1/completions", &ask.to_string()).error(400);
    // Nothing of all that was queued.
    assert_eq!(server.metric("steps_total"), 0.0);
}

#[test]
fn keys_are_required_where_there_are_some() {
    let server = start(Setup { keys: Some("alpha\nbeta 2"), ..Setup::default() });
    let ask = json!({"prompt": "A", "max_tokens": 1}).to_string();
    let reply = server.post("/v1/completions", &ask);
    reply.error(401);
    assert_eq!(reply.header("www-authenticate"), Some("Bearer"));
    server.post_as("alph", "/v1/completions", &ask).error(401);
    assert_eq!(server.post_as("alpha", "/v1/completions", &ask).status, 200);
    let reply = server.raw(&request("/v1/completions", &ask, "x-api-key: beta\r\n"));
    assert_eq!(reply.status, 200);
    for path in ["/health", "/v1/models"] {
        assert_eq!(server.get(path).status, 200, "{path}");
    }
    for path in ["/metrics", "/slots", "/props", "/v1/models/demo", "/none"] {
        server.get(path).error(401);
    }
}

#[test]
fn pages_of_other_hosts_are_refused() {
    let server = plain();
    let ask = |host: &str| {
        server.raw(format!("GET /health HTTP/1.1\r\nhost: {host}\r\nconnection: close\r\n\r\n").as_bytes())
    };
    ask("evil.example:8080").error(403);
    assert_eq!(ask("127.0.0.1:8080").status, 200);
    // No header lets another origin read anything.
    let preflight = server.raw(
        b"OPTIONS /v1/completions HTTP/1.1\r\nhost: localhost\r\norigin: http://evil.example\r\n\
          access-control-request-method: POST\r\nconnection: close\r\n\r\n",
    );
    assert!(!preflight.head.to_ascii_lowercase().contains("access-control"), "{}", preflight.head);
    for (name, value) in
        [("x-content-type-options", "nosniff"), ("x-frame-options", "DENY"), ("cache-control", "no-store")]
    {
        assert_eq!(preflight.header(name), Some(value), "{}", preflight.head);
    }
    assert!(preflight.header("content-security-policy").unwrap().contains("'none'"));
}

#[test]
fn pages_of_allowed_origins_may_use_the_server() {
    let cors = &["https://chat.example"][..];
    let server = start(Setup { cors, keys: Some("alpha"), ..Setup::default() });
    let ask = |method: &str, origin: &str, more: &str| {
        let head =
            format!("{method} /v1/completions HTTP/1.1\r\nhost: localhost\r\norigin: {origin}\r\n{more}");
        server.raw(format!("{head}content-length: 0\r\nconnection: close\r\n\r\n").as_bytes())
    };
    // A preflight has no key.
    let asks = "access-control-request-method: POST\r\naccess-control-request-headers: authorization\r\n";
    let allowed = ask("OPTIONS", "https://chat.example", asks);
    assert_eq!(allowed.status, 200, "{}", allowed.head);
    for (name, value) in [
        ("access-control-allow-origin", "https://chat.example"),
        ("access-control-allow-headers", "authorization"),
        ("access-control-allow-methods", "GET, POST, DELETE, OPTIONS"),
        ("vary", "Origin"),
    ] {
        assert_eq!(allowed.header(name), Some(value), "{}", allowed.head);
    }
    let other = ask("OPTIONS", "https://evil.example", asks);
    assert_eq!((other.status, other.header("access-control-allow-origin")), (200, None), "{}", other.head);
    assert_eq!(other.header("vary"), Some("Origin"));
    // The page can read an error too.
    let error = ask("POST", "https://chat.example", "");
    error.error(401);
    assert_eq!(error.header("access-control-allow-origin"), Some("https://chat.example"));
    assert_eq!(error.header("cross-origin-resource-policy"), Some("cross-origin"));
    // Any other request with this method is none of the API.
    ask("OPTIONS", "https://chat.example", "").error(401);
}

#[test]
fn messages_quote_little_of_a_request() {
    let server = start(Setup {
        options: Options { strict_model: true, ..Setup::default().options },
        ..Setup::default()
    });
    let ask = json!({"model": "x\n".repeat(5000), "prompt": "A"});
    let message = server.post("/v1/completions", &ask.to_string()).error(404);
    assert!(message.len() < 300, "{message}");
}
