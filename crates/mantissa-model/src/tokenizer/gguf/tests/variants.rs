//! Tokenizers of many kinds, written to GGUF metadata: they encode the same tokens there, or a note says that they do not.

use std::path::Path;

use serde_json::{Value as Json, json};

use super::super::*;
use crate::tokenizer::{Bos, Tokenizer};

/// Pieces of text from which texts are drawn.
const PIECES: [&str; 40] = [
    " ",
    "  ",
    "\t",
    "\n",
    "\r\n",
    "a",
    "the",
    "The",
    "THE",
    "don't",
    "WE'LL",
    "1",
    "2024",
    "3.14",
    "é",
    "e\u{301}",
    "Å",
    "ﬁ",
    "ß",
    "İ",
    "Привет",
    "你好",
    "日本語",
    "한국어",
    "مرحبا",
    "हिन्दी",
    "ไทย",
    "🦀",
    "👩‍👩‍👧",
    "\u{a0}",
    "\u{200b}",
    "\u{0}",
    "\u{7f}",
    "_",
    "camelCase",
    "x+=1;",
    "</s>",
    "<s>",
    "<Mark>",
    "##",
];

/// Draws texts of up to twelve pieces.
fn texts() -> impl Iterator<Item = String> {
    let mut state = 1_u64;
    let mut draw = move |below: u64| {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (state >> 33) % below
    };
    (0..1500).map(move |_| (0..1 + draw(12)).map(|_| PIECES[draw(PIECES.len() as u64) as usize]).collect())
}

/// A tokenizer that differs from the plain one, by its name.
type Variant = (&'static str, fn(&mut Json));

fn split(expression: &str, behavior: &str) -> Json {
    json!({"type": "Sequence", "pretokenizers": [
        {"type": "Split", "pattern": {"Regex": expression}, "behavior": behavior, "invert": false},
        {"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true, "use_regex": false}]})
}

/// Adds the token `<Mark>` with some flags set.
fn mark(file: &mut Json, flags: &[&str]) {
    let id = file["model"]["vocab"].as_object().unwrap().len();
    let flag = |name: &str| flags.contains(&name);
    file["added_tokens"].as_array_mut().unwrap().push(json!({"id": id, "content": "<Mark>", "special": flag("special"),
        "normalized": flag("normalized"), "single_word": flag("single_word"), "lstrip": flag("lstrip"), "rstrip": flag("rstrip")}));
}

const VARIANTS: [Variant; 28] = [
    ("plain", |_| {}),
    ("nfc", |file| file["normalizer"] = json!({"type": "NFC"})),
    ("nfkc", |file| file["normalizer"] = json!({"type": "NFKC"})),
    ("lowercase", |file| file["normalizer"] = json!({"type": "Lowercase"})),
    ("strip accents", |file| {
        file["normalizer"] =
            json!({"type": "Sequence", "normalizers": [{"type": "NFD"}, {"type": "StripAccents"}]});
    }),
    ("strip", |file| file["normalizer"] = json!({"type": "Strip", "strip_left": true, "strip_right": true})),
    ("replace", |file| {
        file["normalizer"] = json!({"type": "Replace", "pattern": {"Regex": " {2,}"}, "content": "▁"});
    }),
    ("prefix space", |file| {
        file["pre_tokenizer"] =
            json!({"type": "ByteLevel", "add_prefix_space": true, "trim_offsets": true, "use_regex": true});
    }),
    ("no expression", |file| {
        file["pre_tokenizer"] =
            json!({"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true, "use_regex": false});
    }),
    ("digits", |file| {
        file["pre_tokenizer"] = json!({"type": "Sequence", "pretokenizers": [{"type": "Digits", "individual_digits": true},
            {"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true, "use_regex": true}]});
    }),
    ("qwen2", |file| {
        let expression = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+";
        file["pre_tokenizer"] = split(expression, "Isolated");
        file["normalizer"] = json!({"type": "NFC"});
    }),
    ("unknown expression", |file| file["pre_tokenizer"] = split(r"\w+|\W", "Isolated")),
    ("removed", |file| file["pre_tokenizer"] = split(r"\s+", "Removed")),
    ("merged with next", |file| file["pre_tokenizer"] = split(r"\s", "MergedWithNext")),
    ("whitespace", |file| {
        file["pre_tokenizer"] = json!({"type": "Sequence", "pretokenizers": [{"type": "Whitespace"},
            {"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true, "use_regex": false}]});
    }),
    ("ignored merges", |file| file["model"]["ignore_merges"] = json!(true)),
    ("word suffix", |file| file["model"]["end_of_word_suffix"] = json!("</w>")),
    ("subword prefix", |file| file["model"]["continuing_subword_prefix"] = json!("##")),
    ("token that strips its left", |file| mark(file, &["special", "lstrip"])),
    ("token that strips its right", |file| mark(file, &["special", "rstrip"])),
    ("token of one word", |file| mark(file, &["single_word"])),
    ("plain token", |file| mark(file, &[])),
    ("normalized token", |file| {
        mark(file, &["normalized"]);
        file["normalizer"] = json!({"type": "Lowercase"});
    }),
    ("ending", |file| {
        let id = file["added_tokens"][0]["id"].clone();
        let token = file["added_tokens"][0]["content"].clone();
        file["post_processor"] = json!({"type": "TemplateProcessing", "single": [{"Sequence": {"id": "A", "type_id": 0}},
            {"SpecialToken": {"id": token, "type_id": 0}}], "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 0}}],
            "special_tokens": {token.as_str().unwrap(): {"id": token, "ids": [id], "tokens": [token]}}});
    }),
    ("cut and padded", |file| {
        file["truncation"] =
            json!({"direction": "Right", "max_length": 8, "strategy": "LongestFirst", "stride": 0});
        file["padding"] = json!({"strategy": {"Fixed": 16}, "direction": "Right", "pad_to_multiple_of": null, "pad_id": 0,
            "pad_type_id": 0, "pad_token": "<s>"});
    }),
    ("unigram", |file| {
        let vocab = file["model"]["vocab"].as_object().unwrap().clone();
        let mut pieces: Vec<_> = vocab.into_iter().collect();
        pieces.sort_by_key(|(_, id)| id.as_u64());
        let scored: Vec<_> =
            pieces.iter().enumerate().map(|(i, (piece, _))| json!([piece, -(i as f64) / 8.0])).collect();
        file["model"] = json!({"type": "Unigram", "unk_id": 0, "vocab": scored, "byte_fallback": false});
    }),
    ("word pieces", |file| {
        let vocab = file["model"]["vocab"].clone();
        file["model"] = json!({"type": "WordPiece", "unk_token": "<unk>", "continuing_subword_prefix": "##",
            "max_input_chars_per_word": 100, "vocab": vocab});
    }),
    ("fallback to bytes", |file| file["model"]["byte_fallback"] = json!(true)),
];

/// Variants that GGUF expresses.
const EQUAL: [&str; 7] =
    ["plain", "digits", "qwen2", "ignored merges", "plain token", "cut and padded", "fallback to bytes"];

/// Writes the tokenizer. Returns the first text that differs, if any; `None` if a note says that some do, or if this
/// program does not load it.
fn unnoted(file: &Json, dir: &Path) -> Option<Result<(), String>> {
    std::fs::write(dir.join("tokenizer.json"), file.to_string()).unwrap();
    let theirs = Tokenizer::load(dir).ok()?;
    let rows = file["model"]["vocab"].as_object().map_or(512, serde_json::Map::len) + 8;
    let exported = export(dir, rows, false).unwrap();
    if !exported.notes.is_empty() {
        return None;
    }
    let metadata = mantissa_store::gguf::Metadata::from_pairs(dir, exported.metadata.iter().cloned());
    let read = tokenizer_json(&metadata).unwrap().to_string();
    let ours = Tokenizer::from_json(dir, read.as_bytes()).unwrap();
    let differs = |text: &String| {
        [Bos::Auto, Bos::Never]
            .iter()
            .any(|&bos| theirs.encode(text, bos).unwrap() != ours.encode(text, bos).unwrap())
    };
    Some(texts().find(differs).map_or(Ok(()), Err))
}

#[test]
fn no_kind_of_tokenizer_changes_without_a_note() {
    let base = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/data/tiny/llama2-gqa-tied");
    let dir = tempfile::tempdir().unwrap();
    std::fs::copy(base.join("tokenizer_config.json"), dir.path().join("tokenizer_config.json")).unwrap();
    let plain: Json = serde_json::from_slice(&std::fs::read(base.join("tokenizer.json")).unwrap()).unwrap();
    let mut equal = Vec::new();
    for (name, change) in VARIANTS {
        let mut file = plain.clone();
        change(&mut file);
        match unnoted(&file, dir.path()) {
            Some(Err(text)) => panic!("{name}: {text:?} differs without a note"),
            Some(Ok(())) => equal.push(name),
            None => {}
        }
    }
    assert_eq!(equal, EQUAL);
}
