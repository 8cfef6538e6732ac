//! Tokenizers made to take as much time and memory as possible.

use std::time::{Duration, Instant};

use serde_json::json;

use super::*;

/// Returns a tokenizer with this model alone.
fn with(model: Value) -> Value {
    json!({"version": "1.0", "model": model})
}

/// Returns a unigram model with these tokens.
fn unigram(tokens: impl Iterator<Item = String>) -> Value {
    let vocab: Vec<Value> = std::iter::once(json!(["<unk>", 0.0]))
        .chain(tokens.enumerate().map(|(i, token)| json!([token, -1.0 - i as f64])))
        .collect();
    with(json!({"type": "Unigram", "unk_id": 0, "vocab": vocab, "byte_fallback": false}))
}

/// Tokens `a`, `aa`, `aaa` and so on.
fn runs(most: usize) -> impl Iterator<Item = String> {
    (1..=most).map(|n| "a".repeat(n))
}

/// Returns a BPE model of letters whose runs of `a` merge by doubling and by one.
fn bpe(fields: Value) -> Value {
    let letters = ('a'..='z').chain('0'..='9').chain([' ']).map(String::from);
    let mut tokens: Vec<String> = std::iter::once("<unk>".to_owned()).chain(letters).collect();
    let mut merges = Vec::new();
    for n in 1..256 {
        let (left, right) = ("a".repeat(n), "a".to_owned());
        tokens.push("a".repeat(n + 1));
        merges.push(json!([left, right]));
    }
    let mut model = json!({"type": "BPE", "unk_token": "<unk>", "merges": merges});
    let vocab = tokens.into_iter().enumerate().map(|(id, token)| (token, json!(id))).collect();
    model["vocab"] = Value::Object(vocab);
    model.as_object_mut().unwrap().extend(fields.as_object().unwrap().clone());
    with(model)
}

fn by_name(kind: &str, fields: Value) -> Value {
    let letters = ('a'..='z').map(String::from);
    let tokens = std::iter::once("<unk>".to_owned()).chain(letters.clone());
    let tokens = tokens.chain(letters.map(|c| format!("##{c}")));
    let vocab: serde_json::Map<_, _> = tokens.enumerate().map(|(id, token)| (token, json!(id))).collect();
    let mut model = json!({"type": kind, "unk_token": "<unk>", "vocab": vocab});
    model.as_object_mut().unwrap().extend(fields.as_object().unwrap().clone());
    with(model)
}

fn word_piece(word: usize) -> Value {
    let fields = json!({"continuing_subword_prefix": "##", "max_input_chars_per_word": word});
    let mut all = by_name("WordPiece", fields);
    all["pre_tokenizer"] = json!({"type": "FixedLength", "length": word});
    all
}

fn load(value: &Value) -> Result<Tokenizer, TokenizerError> {
    Tokenizer::from_json(Path::new("tokenizer.json"), value.to_string().as_bytes())
}

/// Texts without much to cut at, of about `len` bytes.
fn texts(len: usize) -> [(&'static str, String); 6] {
    let mut state = 1u64;
    let mut next = || {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
        (state >> 33) as u32
    };
    let bytes: Vec<u8> = (0..len / 2).map(|_| next() as u8).collect();
    let word = (0..len).map(|_| char::from(b'a' + (next() % 26) as u8)).collect();
    [
        ("a", "a".repeat(len)),
        ("random bytes", String::from_utf8_lossy(&bytes).into_owned()),
        ("spaces", " ".repeat(len)),
        ("digits", (0..len).map(|_| char::from(b'0' + (next() % 10) as u8)).collect()),
        ("one word", word),
        ("a, space", "a ".repeat(len / 2)),
    ]
}

/// The worst tokenizers that load.
fn worst() -> Vec<(&'static str, Value)> {
    let added = |content: &dyn Fn(usize) -> String, count: usize, rest: Value| {
        let mut all = bpe(json!({}));
        let ids = all["model"]["vocab"].as_object().unwrap().len();
        let token = |i: usize| {
            let mut token = json!({"id": ids + i, "content": content(i), "special": false,
                "normalized": false, "single_word": false, "lstrip": false, "rstrip": false});
            token.as_object_mut().unwrap().extend(rest.as_object().unwrap().clone());
            token
        };
        all["added_tokens"] = (0..count).map(token).collect();
        all
    };
    let mut steps = bpe(json!({}));
    let swap = |from: &str, to: &str| json!({"type": "Replace", "pattern": {"String": from}, "content": to});
    let normalizers: Vec<Value> =
        (0..63).map(|i| if i % 2 == 0 { swap("a", "b") } else { swap("b", "a") }).collect();
    steps["normalizer"] = json!({"type": "Sequence", "normalizers": normalizers});
    let mut cut = bpe(json!({}));
    cut["pre_tokenizer"] = json!({"type": "FixedLength", "length": 1});
    let affix = "x".repeat(64);
    vec![
        ("unigram of runs to 16", unigram(runs(16))),
        ("unigram of runs to 64", unigram(runs(64))),
        ("unigram of runs to 180", unigram(runs(180))),
        ("unigram of one token of 2000", unigram(["a".to_owned(), "a".repeat(2000)].into_iter())),
        ("BPE", bpe(json!({}))),
        ("BPE, bytes", bpe(json!({"byte_fallback": true, "fuse_unk": true}))),
        ("BPE with a prefix of 64", bpe(json!({"continuing_subword_prefix": affix, "merges": []}))),
        ("BPE with a suffix of 64", bpe(json!({"end_of_word_suffix": affix}))),
        ("BPE, 63 replacements", steps),
        ("BPE, every character apart", cut),
        (
            "BPE, added token of 1024",
            added(&|i| if i == 0 { format!("{}b", "a".repeat(1023)) } else { "a".repeat(300) }, 2, json!({})),
        ),
        ("BPE, 4000 added tokens", added(&|i| format!("a{i}"), 4000, json!({}))),
        (
            "BPE, stripping added tokens",
            added(&|i| ["ab", "0 "][i].into(), 2, json!({"lstrip": true, "rstrip": true})),
        ),
        ("BPE, added words", added(&|i| ["ab", "0 ", "  "][i].into(), 3, json!({"single_word": true}))),
        ("WordPiece of 100", word_piece(100)),
        ("WordPiece of 400", word_piece(400)),
        ("WordLevel", by_name("WordLevel", json!({}))),
    ]
}

/// Processor time of this thread; `None` where the system does not say.
fn processor() -> Option<Duration> {
    let text = std::fs::read_to_string("/proc/thread-self/schedstat").ok()?;
    text.split_whitespace().next()?.parse().ok().map(Duration::from_nanos)
}

/// The longest texts that are accepted take seconds under the worst tokenizers, and time grows with the length. Prints the
/// table.
#[test]
fn the_worst_tokenizers_take_seconds() {
    // The longest texts take two minutes: `.ci/nightly` has them.
    let whole = std::env::var_os("MANTISSA_TESTS").is_some_and(|tests| tests == "all");
    let sizes = if whole { &[20_000, 200_000, 2_000_000][..] } else { &[20_000, 200_000] };
    for (name, value) in worst() {
        let tokenizer = load(&value).unwrap_or_else(|error| panic!("{name}: {error}"));
        let most = tokenizer.max_text() as usize;
        let mut line = format!("{name}: up to {most} bytes");
        for size in sizes.iter().map(|size: &usize| most.min(*size)) {
            let time = |(text_name, text): (&'static str, String)| {
                let end = (0..=size.min(text.len())).rev().find(|end| text.is_char_boundary(*end)).unwrap();
                let (started, on_processor) = (Instant::now(), processor());
                let encoded = tokenizer.encode(&text[..end], Bos::Never);
                assert!(encoded.is_ok(), "{name}: {text_name}: {encoded:?}");
                // Other tests and programs may hold the processor meanwhile.
                let took = processor().zip(on_processor).map(|(end, begin)| end.saturating_sub(begin));
                (took.unwrap_or_else(|| started.elapsed()), text_name)
            };
            let (took, text_name) = texts(size).into_iter().map(time).max().unwrap();
            line += &format!("; {size}: {:.2} s ({text_name})", took.as_secs_f64());
            assert!(took < Duration::from_secs(20), "{line}");
        }
        println!("{line}");
        let long = "a".repeat(most + 1);
        assert!(
            matches!(tokenizer.encode(&long, Bos::Never), Err(TokenizerError::TextTooLong { .. })),
            "{name}"
        );
    }
}

/// Files that would take minutes or gigabytes are refused at loading, with the limit.
#[test]
fn files_that_cost_too_much_are_refused_with_the_limit() {
    let refused = |value: &Value, field: &str, limit: &str| {
        let started = Instant::now();
        let error = load(value).map(|_| ()).unwrap_err().to_string();
        assert!(error.contains(field) && error.contains(limit), "{field}, {limit}: {error}");
        assert!(error.len() < 1000 && started.elapsed() < Duration::from_secs(10), "{error}");
    };
    refused(&unigram(runs(1000)), "model.vocab", "bytes that begin \"aaa");
    refused(&unigram(runs(300)), "model.vocab", "at most 61035 ns per byte");
    refused(&unigram(["a".repeat(8000)].into_iter()), "model.vocab", "at most 61035 ns per byte");
    refused(&unigram((0..1000).map(|i| format!("{i}{}", "b".repeat(20_000)))), "model.vocab", "ns per byte");
    let distinct =
        (0u64..8500).map(|i| format!("{:08x}{}", i.wrapping_mul(0x9e37_79b9) as u32, "b".repeat(1000)));
    refused(&unigram(distinct), "model.vocab", "at most 8388608 different beginnings");
    let long = "x".repeat(100_000);
    for name in ["continuing_subword_prefix", "end_of_word_suffix", "unk_token"] {
        refused(&bpe(json!({name: long, "merges": []})), &format!("model.{name}"), "at most 64 bytes");
    }
    for name in ["continuing_subword_prefix", "unk_token"] {
        refused(&by_name("WordPiece", json!({name: long})), &format!("model.{name}"), "at most 64 bytes");
    }
    refused(&by_name("WordLevel", json!({"unk_token": long})), "model.unk_token", "at most 64 bytes");
    refused(&word_piece(1000), "max_input_chars_per_word", "up to 400");
    let mut huge = bpe(json!({}));
    let ids = huge["model"]["vocab"].as_object().unwrap().len();
    huge["model"]["vocab"][&long] = json!(ids);
    refused(&huge, "model.vocab.x", "at most 8192 bytes");

    let changed = |field: &str, step: Value| {
        let mut all = bpe(json!({}));
        all[field] = step;
        all
    };
    refused(
        &changed("normalizer", json!({"type": "Prepend", "prepend": long})),
        "normalizer.prepend",
        "at most 64",
    );
    let double = json!({"type": "Replace", "pattern": {"String": "a"}, "content": "aa"});
    let doubled = json!({"type": "Sequence", "normalizers": vec![double.clone(); 40]});
    refused(&changed("normalizer", doubled), "normalizer", "up to 16777216-fold");
    let decoders = json!({"type": "Sequence", "decoders": vec![double; 10]});
    refused(&changed("decoder", decoders), "decoder", "up to 64-fold");
    let around = json!({"type": "TemplateProcessing",
        "single": [{"SpecialToken": {"id": "x", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}], "pair": [],
        "special_tokens": {"x": {"id": "x", "ids": vec![0; 100_000], "tokens": vec!["x"; 100_000]}}});
    refused(&changed("post_processor", around), "post_processor", "up to 64");
    let around = json!({"type": "TemplateProcessing",
        "single": [{"SpecialToken": {"id": "x", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}], "pair": [],
        "special_tokens": {"x": {"id": "x", "ids": [0], "tokens": [long]}}});
    refused(&changed("post_processor", around), "post_processor.single[0]", "at most 1024 bytes");

    let token = |content: &str, normalized: bool, lstrip: bool| {
        json!({"id": ids, "content": content, "special": false, "normalized": normalized, "single_word": false,
            "lstrip": lstrip, "rstrip": false})
    };
    refused(&changed("added_tokens", json!([token(&long, false, false)])), "added_tokens[0].content", "1024");
    refused(
        &changed("added_tokens", json!([token("   ", false, true)])),
        "added_tokens[0].lstrip",
        "expected false",
    );
    let grown =
        |times: usize| json!({"type": "Replace", "pattern": {"String": "x"}, "content": "x".repeat(times)});
    let mut added = changed("added_tokens", json!([token("xx", true, false)]));
    added["normalizer"] = grown(1000);
    refused(&added, "added_tokens", "2000 bytes after normalization");
    added["normalizer"] = json!({"type": "Sequence", "normalizers": [grown(3000), grown(5000)]});
    added["added_tokens"] = json!([token(&"x".repeat(1000), true, false)]);
    refused(&added, "normalizer", "at most 67108864 bytes");
}

/// SentencePiece in a GGUF file states no merges; those that follow from its vocabulary are limited.
#[test]
fn a_gguf_vocabulary_of_runs_is_refused_with_the_limit() {
    use mantissa_store::gguf::{GgufWriter, Value, ValueType};
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("m.gguf");
    let tokens: Vec<String> =
        (b'a'..=b'z').flat_map(|c| (1..=2000).map(move |n| char::from(c).to_string().repeat(n))).collect();
    let texts = tokens.iter().map(|token| Value::String(token.clone())).collect();
    let metadata = [
        ("general.architecture".to_owned(), Value::String("llama".into())),
        ("tokenizer.ggml.model".to_owned(), Value::String("llama".into())),
        ("tokenizer.ggml.tokens".to_owned(), Value::Array(ValueType::String, texts)),
        (
            "tokenizer.ggml.scores".to_owned(),
            Value::Array(ValueType::F32, vec![Value::F32(0.0); tokens.len()]),
        ),
    ];
    GgufWriter::create(&path, &metadata, &[]).unwrap().finish().unwrap();
    let error = Tokenizer::load(&path).map(|_| ()).unwrap_err().to_string();
    assert!(error.contains("tokenizer.ggml.tokens") && error.contains("at most 4194304 merges"), "{error}");
}
