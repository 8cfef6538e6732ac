//! The table: what one client may say. A row for every endpoint, and for every kind of cost: deep, wide, endless,
//! ambiguous, huge, greedy, abandoned.

use std::fmt::Write;
use std::time::Duration;

use serde_json::{Value, json};

/// Requests of one kind.
pub struct Row {
    pub name: &'static str,
    pub path: &'static str,
    pub get: bool,
    pub body: fn() -> String,
    /// Statuses that the requests may get.
    pub statuses: &'static [u16],
    /// Clients at once, all with one key.
    pub clients: usize,
    /// Time after which the client leaves.
    pub abandon: Option<Duration>,
    /// Requests of as many plain clients to `/v1/completions`: the other client's times beside them are the measure.
    pub plain: fn() -> String,
}

impl Row {
    pub fn allows(&self, status: &str) -> bool {
        status == "left" || self.statuses.iter().any(|allowed| *status == allowed.to_string())
    }
}

const COMPLETIONS: &str = "/v1/completions";
const CHAT: &str = "/v1/chat/completions";
/// An error of the request, or too many of them.
const BAD: &[u16] = &[400, 429, 503];
const ANY: &[u16] = &[200, 400, 413, 429, 503];

fn row(name: &'static str, path: &'static str, statuses: &'static [u16], body: fn() -> String) -> Row {
    Row { name, path, get: false, body, statuses, clients: 6, abandon: None, plain }
}

fn get(name: &'static str, path: &'static str) -> Row {
    Row { get: true, ..row(name, path, &[200], String::new) }
}

fn left(name: &'static str, path: &'static str, body: fn() -> String) -> Row {
    Row { abandon: Some(Duration::from_millis(30)), ..row(name, path, ANY, body) }
}

/// Request of a plain client.
fn plain() -> String {
    json!({ "prompt": "The dog", "max_tokens": 80, "temperature": 1, "ignore_eos": true }).to_string()
}

/// As [`plain`], until the context is full: a step takes longer the more tokens its sequences have.
fn plain_and_long() -> String {
    json!({ "prompt": "word ".repeat(100), "max_tokens": 400, "temperature": 1, "ignore_eos": true })
        .to_string()
}

/// A completion with these fields.
fn completion(fields: Value) -> String {
    let mut ask = json!({ "prompt": "Once", "max_tokens": 80, "temperature": 1 });
    ask.as_object_mut().unwrap().extend(fields.as_object().unwrap().clone());
    ask.to_string()
}

fn gbnf(text: String) -> String {
    completion(json!({ "grammar": text }))
}

fn lark(text: String) -> String {
    completion(json!({ "structured_outputs": { "grammar": text } }))
}

fn regex(text: String) -> String {
    completion(json!({ "structured_outputs": { "regex": text } }))
}

fn schema(schema: Value) -> String {
    completion(json!({ "json_schema": schema }))
}

/// `before` and `after` around a value, so many times, as text: too deep for a value of this program.
fn nested(before: &str, inner: &str, after: &str, times: usize) -> String {
    format!("{}{inner}{}", before.repeat(times), after.repeat(times))
}

fn chain(rules: usize, last: &str) -> String {
    let mut text = String::from("root ::= a0\n");
    for i in 0..rules {
        let _ = writeln!(text, "a{i} ::= \"x\" a{}", i + 1);
    }
    format!("{text}a{rules} ::= {last}\n")
}

fn user(text: &str) -> Value {
    json!([{ "role": "user", "content": text }])
}

fn ambiguous() -> String {
    lark("start: a\na: a a a | a a | \"x\" | \"a\" | \"b\" | \"c\" | \" \"".into())
}

fn endless() -> String {
    schema(json!({ "type": "integer", "multipleOf": 100_000_007 }))
}

/// 2048 texts for embedding.
fn texts() -> String {
    let text = "the quick brown fox jumps over the lazy dog and ".repeat(8);
    json!({ "model": "demo", "input": vec![text; 2048] }).to_string()
}

fn long_text() -> String {
    "word ".repeat(180_000)
}

/// All rows.
pub fn rows() -> Vec<Row> {
    let mut all = deep();
    all.extend(costly());
    all.extend(greedy());
    all.extend(abandoned());
    all.extend([
        get("page", "/"),
        get("health", "/health"),
        get("metrics", "/metrics"),
        get("slots", "/slots"),
        get("props", "/props"),
        get("models", "/v1/models"),
        Row { statuses: &[404], ..get("a model", "/v1/models/{name}") },
        get("description", "/openapi.json"),
        get("ollama: version", "/api/version"),
        get("ollama: models", "/api/tags"),
        get("ollama: models in memory", "/api/ps"),
        row("ollama: a model", "/api/show", &[404], || json!({ "model": "x".repeat(100_000) }).to_string()),
    ]);
    all
}

/// Nested 10^5 times, wherever a client may nest.
fn deep() -> Vec<Row> {
    const DEEP: usize = 100_000;
    vec![
        row("deep: gbnf stars", COMPLETIONS, BAD, || gbnf(format!("root ::= \"a\"{}", "*".repeat(20_000)))),
        row("deep: gbnf options", COMPLETIONS, BAD, || {
            gbnf(format!("root ::= \"a\"{}", "?".repeat(250_000)))
        }),
        row("deep: gbnf counts", COMPLETIONS, BAD, || {
            gbnf(format!("root ::= \"a\"{}", "{1}".repeat(60_000)))
        }),
        row("deep: gbnf groups", COMPLETIONS, BAD, || {
            gbnf(format!("root ::= {}", nested("(", "\"a\"", ")", DEEP)))
        }),
        row("deep: lark groups", COMPLETIONS, BAD, || {
            lark(format!("start: {}", nested("(", "\"a\"", ")", DEEP)))
        }),
        row("deep: lark stars", COMPLETIONS, BAD, || lark(format!("start: \"a\"{}", "*".repeat(DEEP)))),
        row("deep: lark rules", COMPLETIONS, ANY, || {
            let rules = (0..6000).map(|i| format!("a{i}: \"x\" a{}\n", i + 1)).collect::<String>();
            lark(format!("start: a0\n{rules}a6000: \"y\""))
        }),
        row("deep: regex groups", COMPLETIONS, BAD, || regex(nested("(", "a", ")", 4000))),
        row("deep: regex stars", COMPLETIONS, ANY, || regex(format!("a{}", "*".repeat(8000)))),
        row("deep: schema", COMPLETIONS, BAD, || {
            let inner = nested("{\"type\":\"array\",\"items\":", "{}", "}", 30_000);
            format!("{{\"prompt\":\"a\",\"json_schema\":{inner}}}")
        }),
        row("deep: schema within limits", COMPLETIONS, ANY, || {
            let inner = nested("{\"type\":\"array\",\"items\":", "{}", "}", 60);
            format!("{{\"prompt\":\"a\",\"json_schema\":{inner}}}")
        }),
        row("deep: references", COMPLETIONS, ANY, || {
            let link = |i: usize| (format!("d{i}"), json!({ "$ref": format!("#/$defs/d{}", i + 1) }));
            let mut defs: serde_json::Map<String, Value> = (0..5000).map(link).collect();
            defs.insert("d5000".into(), json!({ "type": "string" }));
            schema(json!({ "$ref": "#/$defs/d0", "$defs": defs }))
        }),
        row("deep: body", COMPLETIONS, BAD, || nested("{\"a\":", "1", "}", DEEP)),
        row("deep: messages", CHAT, BAD, || format!("{{\"messages\":{}}}", nested("[", "", "]", DEEP))),
        row("deep: tools", CHAT, BAD, || {
            let inner = nested("{\"properties\":{\"a\":", "{}", "}}", 40_000);
            format!(
                "{{\"messages\":[],\"tools\":[{{\"type\":\"function\",\"function\":{{\"name\":\"f\",\"parameters\":{inner}}}}}]}}"
            )
        }),
        row("deep: template variables", "/apply-template", BAD, || {
            let inner = nested("[", "", "]", DEEP);
            format!(
                "{{\"messages\":[{{\"role\":\"user\",\"content\":\"a\"}}],\"chat_template_kwargs\":{{\"x\":{inner}}}}}"
            )
        }),
        row("deep: arguments in a text", CHAT, ANY, || {
            let deep = nested("[", "", "]", DEEP);
            let call =
                json!({ "id": "a", "type": "function", "function": { "name": "f", "arguments": deep } });
            json!({ "messages": [{ "role": "assistant", "tool_calls": [call] }], "max_tokens": 1 })
                .to_string()
        }),
        row("deep: responses", "/v1/responses", BAD, || {
            format!("{{\"input\":{}}}", nested("[", "", "]", DEEP))
        }),
        row("deep: ollama", "/api/chat", BAD, || {
            format!("{{\"model\":\"demo\",\"messages\":[],\"options\":{}}}", nested("[", "", "]", DEEP))
        }),
        row("deep: anthropic", "/v1/messages", BAD, || {
            format!("{{\"max_tokens\":1,\"messages\":{}}}", nested("[", "", "]", DEEP))
        }),
    ]
}

/// Wide, endless and ambiguous grammars, and bounds beyond what numbers hold.
fn costly() -> Vec<Row> {
    vec![
        row("wide: chain of rules", COMPLETIONS, ANY, || gbnf(chain(1000, "\"y\""))),
        row("wide: recursive chain", COMPLETIONS, ANY, || gbnf(chain(1000, "\"y\" a1000?"))),
        row("wide: long chain", COMPLETIONS, ANY, || gbnf(chain(12_000, "\"y\""))),
        row("wide: doubling rules", COMPLETIONS, ANY, || {
            let rules = (0..40).map(|i| format!("a{i} ::= a{0} a{0}\n", i + 1)).collect::<String>();
            gbnf(format!("root ::= a0\n{rules}a40 ::= [a-z]{{1,9}}\n"))
        }),
        row("wide: alternatives", COMPLETIONS, ANY, || {
            let all = (0..10_000).map(|i| format!("\"w{i}\"")).collect::<Vec<_>>().join(" | ");
            gbnf(format!("root ::= {all}"))
        }),
        row("wide: values", COMPLETIONS, ANY, || {
            schema(json!({ "enum": (0..100_000).map(|i| format!("v{i}")).collect::<Vec<_>>() }))
        }),
        row("wide: properties", COMPLETIONS, ANY, || {
            let properties: serde_json::Map<String, Value> =
                (0..3000).map(|i| (format!("p{i}"), json!({ "type": ["string", "null"] }))).collect();
            schema(json!({ "type": "object", "properties": properties }))
        }),
        row("endless: multipleOf", COMPLETIONS, BAD, endless),
        row("endless: products", COMPLETIONS, ANY, || {
            let of = |n: u64| json!({ "type": "integer", "multipleOf": n });
            schema(json!({ "allOf": [of(9973), of(9967), of(9949)] }))
        }),
        row("endless: counted unions", COMPLETIONS, ANY, || {
            let parts = (1..60).map(|i| format!("(a|b|[c-z]{{{i},900}}){{{i},900}}")).collect::<Vec<_>>();
            regex(parts.join("|"))
        }),
        row("endless: nested counts", COMPLETIONS, ANY, || {
            regex("((([a-z]{1,999}){1,999}){1,999}){1,999}x".into())
        }),
        row("endless: look-alikes", COMPLETIONS, ANY, || regex("(.*a.{200}b.*|.*c.{200}d.*){3}".into())),
        Row { clients: 60, ..row("ambiguous: lark", COMPLETIONS, ANY, ambiguous) },
        row("ambiguous: gbnf", COMPLETIONS, ANY, || {
            gbnf("root ::= a\na ::= a a a a | a a | [a-z] | \"x\" a \"y\" |".into())
        }),
        row("ambiguous: right recursion", COMPLETIONS, ANY, || {
            gbnf("root ::= a\na ::= [a-z] a | [a-z] a a | [a-z]".into())
        }),
        row("bounds: integers", COMPLETIONS, BAD, || {
            schema(json!({ "type": "integer", "minimum": i64::MIN, "maximum": i64::MAX }))
        }),
        row("bounds: counts", COMPLETIONS, BAD, || {
            schema(json!({ "type": "string", "minLength": u64::MAX }))
        }),
        row("bounds: items", COMPLETIONS, ANY, || {
            schema(json!({ "type": "array", "minItems": u32::MAX, "items": { "type": "integer" } }))
        }),
        row("bounds: numbers", COMPLETIONS, ANY, || {
            schema(json!({ "type": "number", "minimum": 1e-300, "maximum": 1e300, "multipleOf": 1e-9 }))
        }),
    ]
}

/// Much at once: choices, texts, tokens, comparisons.
fn greedy() -> Vec<Row> {
    vec![
        row("greedy: embeddings", "/v1/embeddings", ANY, texts),
        Row {
            clients: 16,
            ..row("greedy: choices", COMPLETIONS, ANY, || {
                completion(json!({ "n": 64, "max_tokens": 200, "ignore_eos": true }))
            })
        },
        Row {
            clients: 60,
            ..row("greedy: comparisons", "/v1/compare", ANY, || {
                json!({ "prompt": "Once", "model": "demo", "other": "other", "max_tokens": 80, "ignore_eos": true }).to_string()
            })
        },
        Row {
            plain: plain_and_long,
            ..row("greedy: llama.cpp prompts", "/completion", ANY, || {
                json!({ "prompt": vec!["word ".repeat(100); 64], "n_predict": -1, "n_probs": 20, "ignore_eos": true })
                    .to_string()
            })
        },
        row("greedy: ollama prompt", "/api/generate", ANY, || {
            json!({ "model": "demo", "prompt": long_text(), "options": { "num_predict": -1, "num_ctx": 1_000_000 } }).to_string()
        }),
        row("greedy: ollama embeddings", "/api/embed", ANY, texts),
        row("greedy: ollama old embedding", "/api/embeddings", BAD, || {
            json!({ "model": "demo", "prompt": long_text() }).to_string()
        }),
        row("greedy: tokenize", "/tokenize", ANY, || json!({ "content": long_text() }).to_string()),
        row("greedy: one word", "/tokenize", ANY, || json!({ "content": "a".repeat(900_000) }).to_string()),
        row("greedy: detokenize", "/detokenize", ANY, || json!({ "tokens": vec![5; 250_000] }).to_string()),
        row("greedy: conversation", CHAT, ANY, || {
            json!({ "messages": vec![json!({ "role": "user", "content": "word ".repeat(100) }); 1500] })
                .to_string()
        }),
        row("greedy: count", "/v1/messages/count_tokens", ANY, || {
            json!({ "messages": user(&long_text()) }).to_string()
        }),
        row("greedy: stops and biases", COMPLETIONS, ANY, || {
            let biases: serde_json::Map<String, Value> =
                (0..1000).map(|i| (i.to_string(), json!(-1))).collect();
            completion(json!({ "stop": vec!["zzz"; 16], "logit_bias": biases, "logprobs": 20, "n": 8 }))
        }),
    ]
}

/// Work that nobody waits for.
fn abandoned() -> Vec<Row> {
    vec![
        left("abandoned: compilation", COMPLETIONS, endless),
        left("abandoned: masks", COMPLETIONS, ambiguous),
        left("abandoned: tokens", "/tokenize", || json!({ "content": long_text() }).to_string()),
        left("abandoned: embeddings", "/v1/embeddings", texts),
        left("abandoned: comparison", "/v1/compare", || {
            json!({ "prompt": "Once", "other": "other", "max_tokens": 400, "ignore_eos": true }).to_string()
        }),
        left("abandoned: answer", CHAT, || {
            json!({ "messages": user("Hello"), "max_tokens": 400, "n": 16 }).to_string()
        }),
    ]
}
