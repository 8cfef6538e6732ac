//! Tokenizers written to GGUF metadata and read back give the same ids.

mod variants;

use std::path::{Path, PathBuf};

use mantissa_store::gguf::{GgmlType, GgufTensorSpec, GgufWriter, Metadata, Value};

use super::pre_tokenizers::PRE_TOKENIZERS;
use super::*;
use crate::tokenizer::{Bos, Tokenizer};

fn workspace() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../..")
}

/// Loads the tokenizer of `dir` by way of a GGUF file.
fn by_gguf(
    dir: &Path,
    rows: usize,
    change: impl FnOnce(&mut Vec<(String, Value)>),
) -> Result<Tokenizer, String> {
    by_gguf_as(dir, rows, false, change)
}

/// The same for an architecture that keeps merges.
fn by_gguf_as(
    dir: &Path,
    rows: usize,
    merged: bool,
    change: impl FnOnce(&mut Vec<(String, Value)>),
) -> Result<Tokenizer, String> {
    let mut exported = export(dir, rows, merged).map_err(|e| e.to_string())?;
    // That llama.cpp reads some otherwise is another test's matter.
    exported.notes.retain(|note| !note.starts_with("with the GGUF file llama.cpp"));
    assert_eq!(exported.notes, [""; 0]);
    let mut metadata = exported.metadata;
    change(&mut metadata);
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("m.gguf");
    let spec = GgufTensorSpec::new("token_embd.weight", GgmlType::F32, [rows, 1]);
    let mut writer = GgufWriter::create(&path, &metadata, std::slice::from_ref(&spec)).unwrap();
    writer.write("token_embd.weight", &vec![0; rows * 4]).unwrap();
    writer.finish().unwrap();
    Tokenizer::load(&path).map_err(|e| e.to_string())
}

const TEXTS: [&str; 8] = [
    "",
    "Once upon a time, there was a little girl named Lily.",
    "  two  spaces, a\ttab\nand a line ",
    "don't you'll 12345 3.14159 CamelCase snake_case",
    "naïve café, Привет мир, 你好, 🦀!",
    "<s> and </s> and <unk> and <|endoftext|>",
    "a",
    " ",
];

fn assert_same(dir: &Path, rows: usize) {
    let (ours, theirs) = (by_gguf(dir, rows, |_| {}).unwrap(), Tokenizer::load(dir).unwrap());
    assert_eq!(ours.bos(), theirs.bos());
    for text in TEXTS {
        for bos in [Bos::Auto, Bos::Never] {
            let (a, b) = (ours.encode(text, bos).unwrap(), theirs.encode(text, bos).unwrap());
            assert_eq!(a, b, "{}: {text:?}", dir.display());
            assert_eq!(ours.decode(&a).unwrap(), theirs.decode(&b).unwrap(), "{text:?}");
        }
    }
}

#[test]
fn byte_level_bpe_round_trips() {
    let dir = workspace().join("tests/data/tiny/llama2-gqa-tied");
    let rows =
        crate::config::read_json(&dir.join("config.json")).unwrap().unwrap()["vocab_size"].as_u64().unwrap();
    assert_same(&dir, rows as usize);
}

/// A tokenizer as Gemma 4's: spaces are a character, bytes are tokens, merges run over all of the text.
#[test]
fn merges_over_spaces_round_trip() {
    let dir = tempfile::tempdir().unwrap();
    let mut tokens: Vec<String> = ["<pad>", "<eos>", "<bos>", "<unk>", "<turn>"].map(str::to_owned).to_vec();
    tokens.extend((0..256).map(|byte| format!("<0x{byte:02X}>")));
    let letters = "\n\u{2581}abcdefghijklmnopqrstuvwxyzOTL.,'0123456789";
    tokens.extend(letters.chars().map(String::from));
    let merges = [
        ["\n", "\n"],
        ["\u{2581}", "a"],
        ["t", "h"],
        ["\u{2581}", "\u{2581}"],
        ["e", "r"],
        ["th", "er"],
        ["\u{2581}", "t"],
        ["\u{2581}a", "n"],
        ["e", "\u{2581}"],
        ["i", "n"],
    ];
    tokens.extend(merges.iter().map(|[left, right]| format!("{left}{right}")));
    let vocabulary: serde_json::Map<_, _> =
        tokens.iter().enumerate().map(|(id, token)| (token.clone(), id.into())).collect();
    let added = |id: usize| {
        serde_json::json!({"id": id, "content": tokens[id], "special": true, "normalized": false,
        "single_word": false, "lstrip": false, "rstrip": false})
    };
    let json = serde_json::json!({
        "version": "1.0", "added_tokens": (0..5).map(added).collect::<Vec<_>>(),
        "normalizer": {"type": "Replace", "pattern": {"String": " "}, "content": SPACE},
        "pre_tokenizer": {"type": "Split", "pattern": {"String": " "}, "behavior": "MergedWithPrevious", "invert": false},
        "post_processor": {"type": "TemplateProcessing", "single": [{"SpecialToken": {"id": "<bos>", "type_id": 0}},
            {"Sequence": {"id": "A", "type_id": 0}}], "pair": [{"Sequence": {"id": "A", "type_id": 0}},
            {"Sequence": {"id": "B", "type_id": 0}}],
            "special_tokens": {"<bos>": {"id": "<bos>", "ids": [2], "tokens": ["<bos>"]}}},
        "decoder": {"type": "Sequence", "decoders": [
            {"type": "Replace", "pattern": {"String": SPACE}, "content": " "}, {"type": "ByteFallback"}, {"type": "Fuse"}]},
        "model": {"type": "BPE", "unk_token": "<unk>", "fuse_unk": true, "byte_fallback": true, "vocab": vocabulary,
            "merges": merges}
    });
    std::fs::write(dir.path().join("tokenizer.json"), json.to_string()).unwrap();
    let own = serde_json::json!({"bos_token": "<bos>", "eos_token": "<eos>", "unk_token": "<unk>", "pad_token": "<pad>"});
    std::fs::write(dir.path().join("tokenizer_config.json"), own.to_string()).unwrap();
    let theirs = Tokenizer::load(dir.path()).unwrap();
    let mut kind = None;
    let ours = by_gguf_as(dir.path(), tokens.len() + 3, true, |metadata| {
        kind = metadata.iter().find(|(key, _)| key == "tokenizer.ggml.model").map(|(_, value)| value.clone());
    });
    assert_eq!(kind, Some(Value::String("gemma4".into())));
    let ours = ours.unwrap();
    let more = ["ab\n\n\nin the  other   an", "<turn>in a\nthen there"];
    for text in TEXTS.into_iter().chain(more) {
        for bos in [Bos::Auto, Bos::Never] {
            let (a, b) = (ours.encode(text, bos).unwrap(), theirs.encode(text, bos).unwrap());
            assert_eq!(a, b, "{text:?}");
            assert_eq!(ours.decode(&a).unwrap(), theirs.decode(&b).unwrap(), "{text:?}");
        }
    }
    // Other architectures state the order of the merges as scores.
    assert_same(dir.path(), tokens.len());
}

/// A tokenizer of words: white space separates them and is left out, characters without a token too.
#[test]
fn words_between_white_space_round_trip() {
    let tokens = ["<s>", "</s>", "a", "b", "c", "é", "中", "ab", "abc", "B"];
    let added = |id: usize| {
        serde_json::json!({"id": id, "content": tokens[id], "special": true, "normalized": false,
            "single_word": false, "lstrip": false, "rstrip": false})
    };
    let vocabulary: serde_json::Map<_, _> =
        tokens.iter().enumerate().map(|(id, token)| ((*token).to_owned(), id.into())).collect();
    for lowercase in [false, true] {
        let dir = tempfile::tempdir().unwrap();
        let json = serde_json::json!({
            "version": "1.0", "added_tokens": [added(0), added(1)],
            "normalizer": if lowercase { serde_json::json!({"type": "Lowercase"}) } else { serde_json::Value::Null },
            "pre_tokenizer": {"type": "WhitespaceSplit"}, "post_processor": null, "decoder": {"type": "Fuse"},
            "model": {"type": "BPE", "vocab": vocabulary, "merges": [["a", "b"], ["ab", "c"]]}
        });
        std::fs::write(dir.path().join("tokenizer.json"), json.to_string()).unwrap();
        let own = serde_json::json!({"bos_token": "<s>", "eos_token": "</s>"});
        std::fs::write(dir.path().join("tokenizer_config.json"), own.to_string()).unwrap();
        let (ours, theirs) = (by_gguf(dir.path(), 10, |_| {}).unwrap(), Tokenizer::load(dir.path()).unwrap());
        // Words by hand: "abc" is one token, "a b" two, "?" none.
        let expected: &[u32] = if lowercase { &[8, 2, 3, 5, 3, 6, 1] } else { &[8, 2, 3, 5, 9, 6, 1] };
        let text = " abc\ta b?\u{3000}é\n\nB中</s> ";
        assert_eq!(ours.encode(text, Bos::Never).unwrap(), expected);
        assert_eq!(theirs.encode(text, Bos::Never).unwrap(), expected);
        assert_eq!(ours.decode(&[8, 2]).unwrap(), "abca");
        // As the pre-tokenizer of byte-level merges it is read too.
        let named = by_gguf(dir.path(), 10, |metadata| {
            metadata.retain(|(key, _)| key != "tokenizer.ggml.model");
            metadata.push(("tokenizer.ggml.model".into(), Value::String("gpt2".into())));
        });
        assert_eq!(named.unwrap().encode(text, Bos::Never).unwrap(), expected);
    }
}

#[test]
fn tokenizers_of_the_shared_models_round_trip() {
    for (model, rows) in [("babyllama-105", 105), ("stories260K", 512), ("ref-8m", 4096)] {
        let dir = workspace().join("../shared/models").join(model);
        if dir.exists() {
            assert_same(&dir, rows);
        } else {
            eprintln!("skipped: no ../shared/models/{model}");
        }
    }
}

/// Every name is read, splits text as a `tokenizer.json` with its expressions, and is written again.
#[test]
fn every_pre_tokenizer_round_trips() {
    let dir = workspace().join("tests/data/tiny/llama2-gqa-tied");
    let text = "Hello  world, 1234567 don't\n\n  x=1; 你好世界 12.5 ÀÉ École's ½\r\n\tEND   ";
    for pre in PRE_TOKENIZERS {
        for name in std::iter::once(&pre.name).chain(pre.aliases) {
            let named = |metadata: &mut Vec<(String, Value)>| {
                metadata.retain(|(key, _)| key != "tokenizer.ggml.pre");
                metadata.push(("tokenizer.ggml.pre".into(), Value::String((*name).into())));
            };
            let read = by_gguf(&dir, 1024, named).unwrap_or_else(|error| panic!("{name}: {error}"));
            let ids = read.encode(text, Bos::Never).unwrap();
            assert_eq!(read.decode(&ids).unwrap(), text, "{name}");
            let mut metadata = export(&dir, 1024, false).unwrap().metadata;
            named(&mut metadata);
            let metadata = Metadata::from_pairs(&dir, metadata);
            let folder = tempfile::tempdir().unwrap();
            for (file, json) in folder_files(&metadata).unwrap() {
                std::fs::write(folder.path().join(file), json.to_string()).unwrap();
            }
            let written = export(folder.path(), 1024, false).unwrap();
            assert!(written.notes.is_empty(), "{name}: {:?}", written.notes);
            let key = written.metadata.iter().find(|(key, _)| key == "tokenizer.ggml.pre").unwrap();
            let again = pre_tokenizers::find(key.1.as_str().unwrap()).unwrap();
            assert_eq!(again.splits, pre.splits, "{name}");
        }
    }
}

/// What GGUF cannot say about a tokenizer is noted with the first text that shows it.
#[test]
fn differences_of_a_written_tokenizer_are_noted() {
    let dir = workspace().join("tests/data/tiny/llama2-gqa-tied");
    let tokenizer = std::fs::read(dir.join("tokenizer.json")).unwrap();
    let changed = |rows: usize, change: &dyn Fn(&mut serde_json::Value)| {
        let folder = tempfile::tempdir().unwrap();
        let mut json: serde_json::Value = serde_json::from_slice(&tokenizer).unwrap();
        change(&mut json);
        std::fs::write(folder.path().join("tokenizer.json"), json.to_string()).unwrap();
        export(folder.path(), rows, false).unwrap()
    };
    let added = |fields: serde_json::Value| {
        let mut token = serde_json::json!({"id": 288, "content": "Once", "special": false, "normalized": false,
            "single_word": false, "lstrip": false, "rstrip": false});
        token.as_object_mut().unwrap().extend(fields.as_object().unwrap().clone());
        move |json: &mut serde_json::Value| {
            json["added_tokens"].as_array_mut().unwrap().push(token.clone());
        }
    };
    assert_eq!(changed(1024, &|_| {}).notes, [""; 0]);
    for flag in ["lstrip", "rstrip", "single_word"] {
        let exported = changed(1024, &added(serde_json::json!({ flag: true })));
        assert!(
            exported.notes.iter().any(|note| note.contains("encodes other tokens")),
            "{flag}: {:?}",
            exported.notes
        );
        assert!(exported.metadata.iter().any(|(key, _)| key == TOKENIZER_NOTE), "{flag}");
    }
    let beyond = changed(288, &added(serde_json::json!({ "content": "<|beyond|>" })));
    assert!(
        beyond.notes[0].contains("without a row") && beyond.notes[0].contains("<|beyond|>"),
        "{:?}",
        beyond.notes
    );
}

/// llama.cpp removes no spaces for a SentencePiece vocabulary, whatever the file says, and finds tokens of bytes by their texts.
#[test]
fn what_llama_cpp_reads_otherwise_than_the_file_says_is_noted() {
    let tokens = ["<unk>", "<s>", "</s>", "<0x0A>", SPACE, "a", "b", "ab"];
    let vocabulary: serde_json::Map<_, _> =
        tokens.iter().enumerate().map(|(id, token)| ((*token).to_owned(), id.into())).collect();
    let added = |id: usize| {
        serde_json::json!({"id": id, "content": tokens[id], "special": true, "normalized": false,
            "single_word": false, "lstrip": false, "rstrip": false})
    };
    let replace = |pattern: serde_json::Value, content: &str| serde_json::json!({"type": "Replace", "pattern": pattern, "content": content});
    let exported = |trims: bool, bytes: bool| {
        let mut steps = vec![replace(serde_json::json!({"String": " "}), SPACE)];
        if trims {
            let extra = [("\\A +| +\\z", ""), (" {2,}", " ")];
            let extra = extra.map(|(regex, content)| replace(serde_json::json!({"Regex": regex}), content));
            steps.splice(0..0, extra);
        }
        let json = serde_json::json!({
            "version": "1.0", "added_tokens": (0..3).map(added).collect::<Vec<_>>(),
            "normalizer": {"type": "Sequence", "normalizers": steps}, "pre_tokenizer": null, "post_processor": null,
            "decoder": {"type": "Sequence", "decoders": [replace(serde_json::json!({"String": SPACE}), " "),
                {"type": "ByteFallback"}, {"type": "Fuse"}]},
            "model": {"type": "BPE", "unk_token": "<unk>", "fuse_unk": true, "byte_fallback": bytes,
                "vocab": vocabulary, "merges": [["a", "b"]]}
        });
        let dir = tempfile::tempdir().unwrap();
        std::fs::write(dir.path().join("tokenizer.json"), json.to_string()).unwrap();
        let own = serde_json::json!({"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"});
        std::fs::write(dir.path().join("tokenizer_config.json"), own.to_string()).unwrap();
        export(dir.path(), tokens.len(), false).unwrap()
    };
    assert_eq!(exported(false, true).notes, [""; 0]);
    for (trims, bytes) in [(true, true), (false, false)] {
        let exported = exported(trims, bytes);
        let noted = exported
            .notes
            .iter()
            .any(|note| note.contains("with the GGUF file llama.cpp encodes other tokens"));
        assert!(noted, "{trims} {bytes}: {:?}", exported.notes);
        assert!(exported.metadata.iter().any(|(key, _)| key == TOKENIZER_NOTE));
    }
}

/// A SentencePiece tokenizer of six pieces, whose scores decide between two ways to split.
fn sentence_piece(scores: [f32; 3]) -> Tokenizer {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("m.gguf");
    let tokens = ["<unk>", "<s>", "\u{2581}", "a", "b", "c", "ab", "bc", "abc"];
    let types = [2, 3, 1, 1, 1, 1, 1, 1, 1];
    let scores = [0.0; 6].into_iter().chain(scores);
    let i32s = types.map(Value::I32).to_vec();
    let metadata = [
        ("tokenizer.ggml.model", Value::String("llama".into())),
        ("tokenizer.ggml.tokens", Value::strings(tokens.map(str::to_owned))),
        ("tokenizer.ggml.token_type", Value::Array(mantissa_store::gguf::ValueType::I32, i32s)),
        (
            "tokenizer.ggml.scores",
            Value::Array(mantissa_store::gguf::ValueType::F32, scores.map(Value::F32).collect()),
        ),
        ("tokenizer.ggml.bos_token_id", Value::U32(1)),
        ("tokenizer.chat_template", Value::String("{{ messages }}".into())),
    ]
    .map(|(key, value)| (key.to_owned(), value));
    GgufWriter::create(&path, &metadata, &[]).unwrap().finish().unwrap();
    Tokenizer::load(&path).unwrap()
}

#[test]
fn scores_order_the_merges() {
    let early = sentence_piece([-1.0, -2.0, -9.0]);
    assert_eq!(early.encode("abb", Bos::Auto).unwrap(), [1, 2, 6, 4]);
    assert_eq!(early.encode("abc", Bos::Never).unwrap(), [2, 8]);
    assert_eq!(early.chat_template(), Some("{{ messages }}"));
    assert_eq!(early.decode(&[1, 2, 8]).unwrap(), "abc");
    assert_eq!(early.encode("x", Bos::Never).unwrap(), [2, 0]);
}

/// A SentencePiece file that names no special tokens has those of llama.cpp, if they are control tokens.
#[test]
fn special_tokens_have_defaults() {
    let dir = workspace().join("../shared/models/stories260K");
    if !dir.exists() {
        eprintln!("skipped: no ../shared/models/stories260K");
        return;
    }
    let without = |metadata: &mut Vec<(String, Value)>| {
        metadata.retain(|(key, _)| !key.ends_with("_token_id") && !key.ends_with("add_bos_token"));
    };
    let (ours, theirs) = (by_gguf(&dir, 512, without).unwrap(), Tokenizer::load(&dir).unwrap());
    assert_eq!((ours.bos(), ours.eos()), (Some(1), Some(2)));
    assert_eq!(ours.encode("a story", Bos::Auto).unwrap(), theirs.encode("a story", Bos::Auto).unwrap());
    let plain = by_gguf(&dir, 512, |metadata| {
        without(metadata);
        for (key, value) in metadata.iter_mut() {
            if let (true, Value::Array(_, types)) = (key == "tokenizer.ggml.token_type", value) {
                types[1] = Value::I32(1);
                types[2] = Value::I32(1);
            }
        }
    });
    let plain = plain.unwrap();
    assert_eq!((plain.bos(), plain.eos()), (None, None));
}

/// Gemma 4 begins every text with BOS, whatever the file says.
#[test]
fn gemma_begins_with_bos() {
    let tokens = ["<pad>", "<eos>", "<bos>", "a", "b", "ab"];
    let json = |add| {
        let pairs = [
            ("tokenizer.ggml.model", Value::String("gemma4".into())),
            ("tokenizer.ggml.tokens", Value::strings(tokens.map(str::to_owned))),
            (
                "tokenizer.ggml.token_type",
                Value::Array(
                    mantissa_store::gguf::ValueType::I32,
                    [3, 3, 3, 1, 1, 1].map(Value::I32).to_vec(),
                ),
            ),
            ("tokenizer.ggml.merges", Value::strings(["a b".to_owned()])),
            ("tokenizer.ggml.bos_token_id", Value::U32(2)),
            ("tokenizer.ggml.add_bos_token", Value::Bool(add)),
        ];
        let pairs = pairs.map(|(key, value)| (key.to_owned(), value));
        tokenizer_json(&Metadata::from_pairs(Path::new("m.gguf"), pairs)).unwrap()
    };
    assert_eq!(json(false), json(true));
    let tokenizer = Tokenizer::from_json(Path::new("m.gguf"), json(false).to_string().as_bytes()).unwrap();
    assert_eq!(tokenizer.encode("ab", Bos::Auto).unwrap(), [2, 5]);
}

#[test]
fn unknown_values_are_refused_by_their_key() {
    let dir = workspace().join("tests/data/tiny/llama2-gqa-tied");
    let replaced = |key: &str, value: Option<Value>| {
        let result = by_gguf(&dir, 1024, |metadata| {
            metadata.retain(|(known, _)| known != key);
            metadata.extend(value.map(|value| (key.to_owned(), value)));
        });
        result.map(|_| ()).unwrap_err()
    };
    let text = |s: &str| Some(Value::String(s.into()));
    assert!(replaced("tokenizer.ggml.model", text("bert")).contains("got \"bert\""));
    assert!(replaced("tokenizer.ggml.pre", text("cobol")).contains("llama-bpe"));
    assert!(replaced("tokenizer.ggml.merges", None).contains("tokenizer.ggml.merges"));
    assert!(replaced("tokenizer.ggml.bos_token_id", Some(Value::U32(1 << 30))).contains("below 1024"));
    let twice = Value::strings(["a".to_owned(), "a".to_owned()]);
    let refused = replaced("tokenizer.ggml.tokens", Some(twice));
    assert!(refused.contains("one for every token") || refused.contains("twice"), "{refused}");
}

#[test]
fn tokenizers_without_a_name_in_gguf_are_left_out_with_a_note() {
    let none = export(Path::new("/nonexistent"), 4, false).unwrap();
    assert_eq!(none.metadata, [("tokenizer.ggml.model".to_owned(), Value::String("none".into()))]);
    assert!(none.notes[0].contains("no tokenizer.json"));
    let dir = tempfile::tempdir().unwrap();
    let odd = r#"{"version": "1.0", "added_tokens": [], "normalizer": {"type": "Lowercase"}, "pre_tokenizer": null,
        "post_processor": null, "decoder": null, "model": {"type": "BPE", "vocab": {"a": 0}, "merges": []}}"#;
    std::fs::write(dir.path().join("tokenizer.json"), odd).unwrap();
    assert!(export(dir.path(), 4, false).unwrap().notes[0].contains("normalizes"));
}
