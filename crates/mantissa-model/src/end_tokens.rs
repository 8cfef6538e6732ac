//! End tokens of a model folder: what its files state, and names of special tokens.

use std::collections::BTreeSet;
use std::path::Path;

use mantissa_store::end_tokens::{EndTokens, Source};
use mantissa_store::regular;
use serde::Deserialize;
use serde_json::Value;

use crate::config::{ConfigError, ModelConfig, read_json};

/// Largest tokenizer file that is searched for names, in bytes.
const MAX_TOKENIZER: u64 = 64 << 20;

/// The part of `tokenizer.json` that names special tokens.
#[derive(Default, Deserialize)]
struct Special {
    #[serde(default)]
    added_tokens: Vec<Added>,
}

#[derive(Deserialize)]
struct Added {
    id: u32,
    content: String,
    #[serde(default)]
    special: bool,
}

/// Reads the end tokens of the folder `dir`, whose `config.json` states the tokens `config`. One that
/// `generation_config.json` leaves out counts only if it is a special token: older versions of transformers wrote the default of
/// the class into `config.json`.
///
/// # Errors
/// [`ConfigError`] for a field of another type. The tokenizer's own reader reports faults of `tokenizer.json`.
pub fn of_folder(dir: &Path, config: &[u32]) -> Result<EndTokens, ConfigError> {
    let path = dir.join("generation_config.json");
    let generation = match read_json(&path)? {
        Some(value) => ModelConfig::end_tokens(&value, &path.display().to_string())?,
        None => Vec::new(),
    };
    Ok(with_generation(dir, config, &generation))
}

/// Returns ids and texts of the added tokens in `tokenizer.json` of `dir`; none if it cannot be read.
pub fn added_tokens(dir: &Path) -> Vec<(u32, String)> {
    read_special(dir).added_tokens.into_iter().map(|token| (token.id, token.content)).collect()
}

fn read_special(dir: &Path) -> Special {
    let tokenizer =
        regular::read_optional(&dir.join("tokenizer.json"), MAX_TOKENIZER, "a tokenizer.json").ok();
    tokenizer.flatten().and_then(|bytes| serde_json::from_slice(&bytes).ok()).unwrap_or_default()
}

/// Reads the end tokens of the folder `dir` as [`of_folder`], for a `generation_config.json` that states `generation`.
pub(crate) fn with_generation(dir: &Path, config: &[u32], generation: &[u32]) -> EndTokens {
    let mut tokens = EndTokens::default();
    let place = |name: &str| Source::Field(format!("{name}: eos_token_id"));
    let added = read_special(dir).added_tokens;
    let special: Vec<&Added> = added.iter().filter(|token| token.special).collect();
    let ids: BTreeSet<u32> = special.iter().map(|token| token.id).collect();
    tokens.add(&place("generation_config.json"), generation.iter().copied());
    let is_meant = |id: &u32| generation.is_empty() || generation.contains(id) || ids.contains(id);
    tokens.add(&place("config.json"), config.iter().copied().filter(is_meant));
    // transformers reads the second file where the first does not state the token.
    for file in ["tokenizer_config.json", "special_tokens_map.json"] {
        let Ok(Some(own)) = read_json(&dir.join(file)) else { continue };
        let text = match &own["eos_token"] {
            Value::Object(token) => token.get("content").and_then(Value::as_str),
            token => token.as_str(),
        };
        let Some(text) = text else { continue };
        let end = added.iter().find(|token| token.content == text).map(|token| token.id);
        let end = end.or_else(|| in_vocabulary(dir, text));
        tokens.add(&Source::Field(format!("{file}: eos_token")), end);
        break;
    }
    // Special or not: programs that find these tokens by name do not ask.
    tokens.add_named(added.iter().map(|token| (token.id, token.content.as_str())));
    let text = |id: u32| added.iter().find(|token| token.id == id).map(|token| token.content.clone());
    tokens.with_texts(text)
}

/// Returns the id of a token of the vocabulary that is no added token.
fn in_vocabulary(dir: &Path, text: &str) -> Option<u32> {
    let bytes = regular::read_optional(&dir.join("tokenizer.json"), MAX_TOKENIZER, "a tokenizer.json");
    let file: Value = serde_json::from_slice(&bytes.ok()??).ok()?;
    let id = match &file["model"]["vocab"] {
        Value::Object(vocabulary) => vocabulary.get(text)?.as_u64()?,
        // Of a unigram model: pieces with scores.
        Value::Array(pieces) => pieces.iter().position(|piece| piece[0] == text)? as u64,
        _ => return None,
    };
    u32::try_from(id).ok()
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    /// Writes files into a folder and reads its end tokens; `config.json` states `config`.
    fn tokens(files: &[(&str, &str)], config: &[u32]) -> Vec<u32> {
        let dir = tempfile::tempdir().unwrap();
        for (name, text) in files {
            std::fs::write(dir.path().join(name), text).unwrap();
        }
        of_folder(dir.path(), config).unwrap().ids()
    }

    const TOKENIZER: (&str, &str) = (
        "tokenizer.json",
        r#"{"model": {"vocab": {}}, "added_tokens": [
            {"id": 1, "content": "<s>", "special": true}, {"id": 2, "content": "</s>", "special": true},
            {"id": 5, "content": "<|im_end|>", "special": true}, {"id": 6, "content": "<|over|>", "special": false}]}"#,
    );

    #[test]
    fn every_place_counts() {
        assert_eq!(tokens(&[], &[2]), [2]);
        assert_eq!(tokens(&[TOKENIZER], &[2]), [2, 5]);
        assert_eq!(
            tokens(&[TOKENIZER, ("generation_config.json", r#"{"eos_token_id": [1]}"#)], &[2]),
            [1, 2, 5]
        );
        let own = ("tokenizer_config.json", r#"{"eos_token": {"content": "</s>", "lstrip": false}}"#);
        assert_eq!(tokens(&[TOKENIZER, own], &[]), [2, 5]);
        let own = ("tokenizer_config.json", r#"{"eos_token": "</s>"}"#);
        assert_eq!(tokens(&[TOKENIZER, own], &[]), [2, 5]);
        // An added token that is not special, and one of the vocabulary alone.
        let own = ("tokenizer_config.json", r#"{"eos_token": "<|over|>"}"#);
        assert_eq!(tokens(&[TOKENIZER, own], &[]), [6, 5]);
        for vocab in [r#"{"a": 0, "END": 7}"#, r#"[["a", 0], ["END", -1.5]]"#] {
            let file = format!(r#"{{"model": {{"vocab": {vocab}}}, "added_tokens": []}}"#);
            let own = ("tokenizer_config.json", r#"{"eos_token": "END"}"#);
            let expected = if vocab.starts_with('{') { 7 } else { 1 };
            assert_eq!(tokens(&[("tokenizer.json", file.as_str()), own], &[]), [expected]);
        }
        // The other file of special tokens, if the first says nothing.
        let map = ("special_tokens_map.json", r#"{"eos_token": {"content": "<s>"}}"#);
        assert_eq!(tokens(&[TOKENIZER, map], &[]), [1, 5]);
        assert_eq!(tokens(&[TOKENIZER, own, map], &[]), [6, 5]);
        assert_eq!(tokens(&[TOKENIZER, ("tokenizer_config.json", "{}"), map], &[]), [1, 5]);
    }

    /// Programs that find end tokens by name do not ask whether they are special, and a GGUF file does not say it of all.
    #[test]
    fn a_name_counts_whether_the_token_is_special_or_not() {
        for special in ["true", "false"] {
            let file = format!(
                r#"{{"model": {{"vocab": {{}}}}, "added_tokens": [{{"id": 5, "content": "<|im_end|>", "special": {special}}}]}}"#
            );
            assert_eq!(tokens(&[("tokenizer.json", file.as_str())], &[2]), [2, 5], "{special}");
        }
    }

    #[test]
    fn a_default_of_the_class_is_no_end() {
        let generation = ("generation_config.json", r#"{"eos_token_id": 5}"#);
        assert_eq!(tokens(&[TOKENIZER, generation], &[9]), [5]);
        assert_eq!(tokens(&[TOKENIZER], &[9]), [9, 5]);
    }
}
