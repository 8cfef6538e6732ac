use std::path::PathBuf;

use serde_json::json;

use super::*;

fn tiny() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/data/tiny/llama2-gqa-tied")
}

/// The tiny tokenizer with one part of its file replaced, loaded from a folder of its own.
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
fn ids_and_texts_are_those_of_transformers() {
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
fn bytes_that_are_no_text_come_out_at_last() {
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

/// Files that the library refuses, panics on, or takes with a surprise: an error or usable, never a panic here.
#[test]
fn broken_files_never_panic() {
    type Change = fn(&mut Value);
    let changes: [(&str, Change); 14] = [
        ("merge of unknown tokens", |f| f["model"]["merges"] = json!([["ab", "cd"]])),
        ("merge of one token", |f| f["model"]["merges"] = json!(["a"])),
        ("merge into a missing token", |f| f["model"]["merges"] = json!([["z", "q"]])),
        ("duplicate ids", |f| f["model"]["vocab"] = json!({"a": 1, "b": 1})),
        ("huge id", |f| f["model"]["vocab"]["a"] = json!(4_000_000_000u64)),
        ("id beyond 32 bits", |f| f["model"]["vocab"]["a"] = json!(1u64 << 40)),
        ("empty vocabulary", |f| f["model"]["vocab"] = json!({})),
        ("unknown model", |f| f["model"]["type"] = json!("None")),
        ("added token without content", |f| f["added_tokens"][0]["content"] = json!("")),
        ("template of a missing token", |f| {
            f["post_processor"] = json!({"type": "TemplateProcessing", "single": [{"SpecialToken": {"id": "<nope>", "type_id": 0}}],
                "pair": [], "special_tokens": {}});
        }),
        ("fixed length 0", |f| f["pre_tokenizer"] = json!({"type": "FixedLength", "length": 0})),
        ("bad precompiled map", |f| {
            f["normalizer"] = json!({"type": "Precompiled", "precompiled_charsmap": "/////w=="});
        }),
        ("bad regex", |f| {
            f["normalizer"] = json!({"type": "Replace", "pattern": {"Regex": "("}, "content": ""});
        }),
        ("catastrophic regex", |f| {
            f["pre_tokenizer"] = json!({"type": "Split", "pattern": {"Regex": "(?=(a+)+$)\\1b"}, "behavior": "Isolated", "invert": false});
        }),
    ];
    for (name, change) in changes {
        let result = changed(change).and_then(|tokenizer| {
            let ids = tokenizer.encode(&("a".repeat(200) + " b\u{0}ü"), Bos::Auto)?;
            tokenizer.decode(&ids)
        });
        if let Err(error) = result {
            let text = error.to_string();
            assert!(
                text.contains("tokenizer.json: ") && !text.contains('\n') && text.len() < 500,
                "{name}: {text}"
            );
        }
    }
}

#[test]
fn files_that_are_no_tokenizer_are_errors() {
    let nested = "[".repeat(100_000);
    for text in ["", "{}", "[]", "null", "\u{0}", "{\"model\": null}", nested.as_str()] {
        assert!(matches!(load_text(text), Err(TokenizerError::Invalid { operation: "load", .. })));
    }
    let dir = tempfile::tempdir().unwrap();
    assert!(matches!(Tokenizer::load(dir.path()), Err(TokenizerError::Missing { .. })));
    let file = File::create(dir.path().join("tokenizer.json")).unwrap();
    file.set_len(MAX_FILE + 1).unwrap();
    assert!(matches!(Tokenizer::load(dir.path()), Err(TokenizerError::TooLarge { .. })));
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
