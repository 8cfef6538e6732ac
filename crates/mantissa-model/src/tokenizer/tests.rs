use std::path::PathBuf;

use serde_json::json;

use super::*;

mod costs;

fn tiny() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/data/tiny/llama2-gqa-tied")
}

/// Loads the tiny tokenizer with one part of its file replaced, from its own folder.
fn changed(change: impl FnOnce(&mut Value)) -> Result<Tokenizer, TokenizerError> {
    let mut value = read_json(&tiny().join("tokenizer.json")).unwrap().unwrap();
    change(&mut value);
    load_text(&value.to_string())
}

fn load_text(text: &str) -> Result<Tokenizer, TokenizerError> {
    let dir = tempfile::tempdir().unwrap();
    std::fs::write(dir.path().join("tokenizer.json"), text).unwrap();
    Tokenizer::load(dir.path())
}

#[test]
fn ids_and_texts_match_transformers() {
    let tokenizer = Tokenizer::load(&tiny()).unwrap();
    let cases = read_json(&tiny().join("tokenizer_expected.json")).unwrap().unwrap();
    for case in cases.as_array().unwrap() {
        let text = case["text"].as_str().unwrap();
        let ids = |key: &str| -> Vec<u32> {
            case[key].as_array().unwrap().iter().map(|id| id.as_u64().unwrap() as u32).collect()
        };
        let (with, without) = (ids("ids_with_special"), ids("ids_without_special"));
        assert_eq!(tokenizer.encode(text, Bos::Auto).unwrap(), with, "{text:?}");
        assert_eq!(tokenizer.encode(text, Bos::Always).unwrap(), with, "{text:?}");
        assert_eq!(tokenizer.encode(text, Bos::Never).unwrap(), without, "{text:?}");
        let decoded = case["decoded"].as_str().unwrap();
        assert_eq!(tokenizer.decode_with_special(&without).unwrap(), decoded);

        let mut stream = tokenizer.stream();
        let pieces: Vec<_> = without.iter().map(|&id| stream.push(id).unwrap()).collect();
        assert!(pieces.iter().all(|piece| !piece.contains('\u{fffd}')), "{pieces:?}");
        let streamed = pieces.concat() + &stream.finish().unwrap();
        assert_eq!(streamed, tokenizer.decode(&with).unwrap());
        assert_eq!(streamed, decoded.replace("<s>", "").replace("</s>", ""));
    }
}

#[test]
fn bytes_that_are_not_text_are_returned_eventually() {
    let tokenizer = Tokenizer::load(&tiny()).unwrap();
    let half = tokenizer.encode("П", Bos::Never).unwrap()[0];
    let mut stream = tokenizer.stream();
    assert_eq!(stream.push(half).unwrap(), "");
    assert_eq!(stream.finish().unwrap(), "\u{fffd}");
    let mut stream = tokenizer.stream();
    let text: String = (0..40).map(|_| stream.push(half).unwrap()).collect();
    assert!(text.chars().count() >= 24, "{text:?}");
}

#[test]
fn truncation_and_padding_do_not_cut_texts() {
    let expected = Tokenizer::load(&tiny()).unwrap().encode("Once upon a time", Bos::Never).unwrap();
    for (length, stride) in [(3, 0), (0, 0), (3, 5)] {
        let tokenizer = changed(|file| {
            file["truncation"] = json!({"direction": "Right", "max_length": length, "strategy": "LongestFirst", "stride": stride});
            file["padding"] = json!({"strategy": {"Fixed": 64}, "direction": "Right", "pad_to_multiple_of": 0,
                "pad_id": 0, "pad_type_id": 0, "pad_token": "x"});
        });
        assert_eq!(tokenizer.unwrap().encode("Once upon a time", Bos::Never).unwrap(), expected);
    }
}

/// The library would refuse each late, panic, or give other tokens than the file states.
#[test]
fn contradictions_are_refused_at_loading_by_their_field() {
    type Change = fn(&mut Value);
    let changes: [(&str, &str, Change); 34] = [
        ("merges[0]", "\"ab\", which is not a token", |f| f["model"]["merges"] = json!([["ab", "cd"]])),
        ("merges[0]", "two tokens", |f| f["model"]["merges"] = json!(["a"])),
        ("merges[0]", "\"zq\", which is not a token", |f| f["model"]["merges"] = json!([["z", "q"]])),
        ("merges[1]", "two tokens", |f| f["model"]["merges"] = json!(["#version: 0.2", "a b c"])),
        ("merges[0]", "begins with \"##\"", |f| {
            f["model"]["continuing_subword_prefix"] = json!("##");
            f["model"]["merges"] = json!([["a", "b"]]);
        }),
        ("model.dropout", "0.5", |f| f["model"]["dropout"] = json!(0.5)),
        ("model.vocab", "id 1 for \"a\" and for \"b\"", |f| {
            f["model"] = json!({"type": "BPE", "merges": [], "vocab": {"x": 0, "a": 1, "b": 1}});
            f["added_tokens"] = json!([]);
        }),
        ("model.vocab.a", "4000000000", |f| f["model"]["vocab"]["a"] = json!(4_000_000_000u64)),
        ("model.vocab.a", "an id below", |f| f["model"]["vocab"]["a"] = json!(1u64 << 40)),
        ("model.vocab.a", "-1", |f| f["model"]["vocab"]["a"] = json!(-1)),
        ("model.vocab", "no token with id 2", |f| {
            f["model"] = json!({"type": "BPE", "merges": [], "vocab": {"x": 0, "a": 1, "b": 3}});
            f["added_tokens"] = json!([]);
            f["post_processor"] = Value::Null;
        }),
        ("model.vocab", "no token", |f| {
            f["model"]["vocab"] = json!({});
            f["model"]["merges"] = json!([]);
            f["added_tokens"] = json!([]);
        }),
        ("model.vocab", "no object", |f| f["model"]["vocab"] = json!([1])),
        ("model.type", "\"None\"", |f| f["model"]["type"] = json!("None")),
        ("added_tokens[0].content", "nothing", |f| f["added_tokens"][0]["content"] = json!("")),
        ("added_tokens[1].content", "a second time", |f| {
            f["added_tokens"][1]["content"] = f["added_tokens"][0]["content"].clone();
        }),
        ("added_tokens[0].id", "7", |f| f["added_tokens"][0]["id"] = json!(7)),
        ("added_tokens[0].id", "follows from the vocabulary", |f| {
            f["added_tokens"][0]["content"] = json!("<brand-new>");
        }),
        ("added_tokens", "a list", |f| f["added_tokens"] = json!({})),
        ("post_processor.single[0]", "\"<nope>\"", |f| {
            f["post_processor"]["single"][0]["SpecialToken"]["id"] = json!("<nope>");
        }),
        ("post_processor.single", "the sequence A once", |f| {
            f["post_processor"]["single"] = json!([{"Sequence": {"id": "B", "type_id": 0}}]);
        }),
        ("post_processor.single", "the sequence A once", |f| {
            f["post_processor"]["single"] = json!(vec![json!({"Sequence": {"id": "A", "type_id": 0}}); 1000]);
        }),
        ("post_processor.single[0]", "equally many", |f| {
            f["post_processor"]["special_tokens"]["<s>"]["ids"] = json!([1, 2]);
        }),
        ("post_processor.single[0]", "id 4000000000", |f| {
            f["post_processor"]["special_tokens"]["<s>"]["ids"] = json!([4_000_000_000u64]);
        }),
        ("post_processor.cls[1]", "an id below", |f| {
            f["post_processor"] = json!({"type": "BertProcessing", "sep": ["a", 1], "cls": ["b", 70000]});
        }),
        ("pre_tokenizer.length", "1 or more", |f| {
            f["pre_tokenizer"] = json!({"type": "FixedLength", "length": 0});
        }),
        ("pre_tokenizer.pretokenizers[1].type", "\"Magic\"", |f| {
            f["pre_tokenizer"] = json!({"type": "Sequence", "pretokenizers": [{"type": "Digits", "individual_digits": true}, {"type": "Magic"}]});
        }),
        ("normalizer.precompiled_charsmap", "a trie of 4294967295 bytes", |f| {
            f["normalizer"] = json!({"type": "Precompiled", "precompiled_charsmap": "/////w=="});
        }),
        ("normalizer.pattern.Regex", "broken expression", |f| {
            f["normalizer"] = json!({"type": "Replace", "pattern": {"Regex": "("}, "content": ""});
        }),
        ("pre_tokenizer.pattern.Regex", "look-around", |f| {
            f["pre_tokenizer"] = json!({"type": "Split", "pattern": {"Regex": "(?=(a+)+$)\\1b"}, "behavior": "Isolated", "invert": false});
        }),
        ("normalizer", "multiply the length", |f| {
            let doubled = json!({"type": "Replace", "pattern": {"String": "a"}, "content": "aa"});
            f["normalizer"] = json!({"type": "Sequence", "normalizers": vec![doubled; 40]});
        }),
        ("normalizer", "up to 64", |f| {
            f["normalizer"] = json!({"type": "Sequence", "normalizers": vec![json!({"type": "NFC"}); 65]});
        }),
        ("decoder.stop", "0", |f| {
            f["decoder"] = json!({"type": "Strip", "content": " ", "start": 0, "stop": 9});
        }),
        ("decoder.type", "nothing", |f| f["decoder"] = json!({})),
    ];
    for (field, says, change) in changes {
        let error = changed(change).map(|_| ()).unwrap_err();
        let text = error.to_string();
        assert!(matches!(error, TokenizerError::Field { .. }), "{field}: {text}");
        assert!(
            text.contains("tokenizer.json: ") && text.contains(field) && text.contains(says),
            "{field}: {text}"
        );
        assert!(!text.contains('\n') && text.len() < 1000, "{text}");
    }
}

#[test]
fn other_models_are_checked_alike() {
    let with = |model: Value| {
        changed(|f| {
            *f = json!({"version": "1.0", "added_tokens": [], "model": model});
        })
    };
    let pieces = |list: Value| json!({"type": "Unigram", "unk_id": 0, "vocab": list});
    let good = with(pieces(json!([["<unk>", 0.0], ["a", -1.0], ["ab", -1.5]]))).unwrap();
    assert_eq!(good.encode("aba", Bos::Auto).unwrap(), [2, 1]);
    let refused = |model: Value, says: &str| {
        let text = with(model).map(|_| ()).unwrap_err().to_string();
        assert!(text.contains(says), "{says}: {text}");
    };
    refused(pieces(json!([["<unk>", 0.0], ["a", -1.0], ["a", -2.0]])), "model.vocab[2]");
    refused(pieces(json!([["<unk>", 0.0], ["", -1.0]])), "an empty token");
    refused(pieces(json!([["<unk>", 0.0], ["a"]])), "a token and its score");
    refused(json!({"type": "Unigram", "unk_id": 3, "vocab": [["a", 0.0]]}), "model.unk_id");
    refused(pieces(json!([])), "model.unk_id");
    let words = |extra: u64| {
        json!({"type": "WordPiece", "unk_token": "[UNK]", "continuing_subword_prefix": "##",
        "max_input_chars_per_word": extra, "vocab": {"[UNK]": 0, "a": 1, "##b": 2}})
    };
    assert_eq!(with(words(100)).unwrap().encode("ab", Bos::Auto).unwrap(), [1, 2]);
    refused(words(1_000_000), "max_input_chars_per_word");
    refused(json!({"type": "WordLevel", "unk_token": "u", "vocab": {"u": 0, "a": 2}}), "no token with id 1");
}

/// Files that pass the checks never panic out of this module.
#[test]
fn a_panic_of_the_library_is_an_error() {
    let error = call::<()>(Path::new("tokenizer.json"), "encode", || panic!("index out of bounds\nat 7"))
        .unwrap_err();
    assert!(error.to_string().contains("got `index out of bounds at 7`"), "{error}");
}

#[test]
fn long_texts_are_refused_and_those_below_take_near_linear_time() {
    let tokenizer = Tokenizer::load(&tiny()).unwrap();
    assert_eq!(tokenizer.max_text(), 8 << 20);
    let limit = tokenizer.max_text() as usize;
    let error = tokenizer.encode(&"a".repeat(limit + 1), Bos::Auto).unwrap_err();
    assert!(
        matches!(error, TokenizerError::TextTooLong { .. }) && error.to_string().contains("--split"),
        "{error}"
    );
    // One word without a space, and every character another.
    let word: String = (0..1u64 << 20).map(|i| char::from(b'a' + (i * i % 26) as u8)).collect();
    let started = std::time::Instant::now();
    assert!(tokenizer.encode(&word, Bos::Auto).unwrap().len() > 100_000);
    // Quadratic time would be hours.
    assert!(started.elapsed() < std::time::Duration::from_secs(60), "{:?}", started.elapsed());

    let slow = changed(|f| {
        f["pre_tokenizer"] =
            json!({"type": "Split", "pattern": {"Regex": "a*b|a"}, "behavior": "Isolated", "invert": false});
    });
    let slow = slow.unwrap();
    assert_eq!(slow.max_text(), 64 << 10);
    assert!(slow.encode(&"a".repeat(64 << 10), Bos::Never).is_ok());
    assert!(slow.encode(&"a".repeat((64 << 10) + 1), Bos::Never).is_err());
}

#[test]
fn files_that_are_no_tokenizer_are_errors() {
    let nested = "[".repeat(100_000);
    for text in
        ["", "{}", "[]", "null", "\u{0}", "{\"model\": null}", "{\"model\":1,\"model\":2}", nested.as_str()]
    {
        let error = load_text(text).map(|_| ()).unwrap_err();
        assert!(matches!(error, TokenizerError::Field { .. } | TokenizerError::Store(_)), "{error}");
        assert!(error.to_string().contains("tokenizer.json: "), "{error}");
    }
    let dir = tempfile::tempdir().unwrap();
    assert!(matches!(Tokenizer::load(dir.path()), Err(TokenizerError::Missing { .. })));
    let file = std::fs::File::create(dir.path().join("tokenizer.json")).unwrap();
    file.set_len(MAX_FILE + 1).unwrap();
    let error = Tokenizer::load(dir.path()).map(|_| ()).unwrap_err().to_string();
    let wanted = format!("tokenizer.json: file: expected at most {MAX_FILE} bytes, got {}", MAX_FILE + 1);
    assert!(error.contains(&wanted), "{error}");
}

#[test]
fn ids_beyond_the_model_and_a_missing_bos_are_refused() {
    let dir = tempfile::tempdir().unwrap();
    std::fs::copy(tiny().join("tokenizer.json"), dir.path().join("tokenizer.json")).unwrap();
    let tokenizer = Tokenizer::load(dir.path()).unwrap();
    assert!(matches!(tokenizer.encode("x", Bos::Always), Err(TokenizerError::NoBos { .. })));

    std::fs::write(dir.path().join("config.json"), r#"{"vocab_size": 40, "bos_token_id": 7}"#).unwrap();
    let tokenizer = Tokenizer::load(dir.path()).unwrap();
    assert_eq!(tokenizer.encode("", Bos::Always).unwrap(), [7]);
    let error = tokenizer.encode("Once", Bos::Never).unwrap_err();
    assert!(matches!(error, TokenizerError::Vocabulary { vocab_size: 40, .. }), "{error}");
}
