//! Strict JSON: duplicate keys are an error, depth is limited to 128 (by `serde_json`), size is capped.
//!
//! Readers that resolve duplicate keys differently would see different models.

use std::borrow::Cow;
use std::cell::RefCell;
use std::fmt;
use std::path::Path;

use serde::de::{DeserializeSeed, Deserializer, Error as _, MapAccess, SeqAccess, Visitor};
use serde_json::{Map, Number, Value};

use crate::error::{Error, JsonFault, Result};
use crate::regular;

/// Parses `bytes`, the content of the file at `path`, as one JSON value; objects keep the order of their keys.
///
/// # Errors
/// [`Error::Json`] when the text is longer than `cap` bytes, is not UTF-8, is not JSON, nests deeper than 128
/// or repeats a key within one object.
pub fn parse_strict(bytes: &[u8], path: &Path, cap: u64) -> Result<Value> {
    parse(bytes, cap).map_err(|fault| Error::Json { path: path.to_owned(), fault })
}

/// Reads and parses the file at `path`; `expected` names it in messages, for example `a model's config.json`.
///
/// # Errors
/// As [`parse_strict`], and [`Error::Missing`], [`Error::WrongKind`] or [`Error::Io`] when it cannot be read.
pub fn read_strict(path: &Path, cap: u64, expected: &'static str) -> Result<Value> {
    let bytes = regular::read(path, cap, expected)?;
    // Windows editors begin UTF-8 with a byte order mark.
    parse_strict(bytes.strip_prefix(b"\xef\xbb\xbf").unwrap_or(&bytes), path, cap)
}

/// Replaces the bare words `Infinity`, `-Infinity` and `NaN`, which Python writes and JSON lacks, by the objects
/// `{"__float__": "Infinity"}` that transformers 5 writes instead. Configs of Mamba models have them.
pub fn with_spelled_floats(text: &[u8]) -> Cow<'_, [u8]> {
    const WORDS: [&str; 3] = ["-Infinity", "Infinity", "NaN"];
    let (mut out, mut copied, mut at, mut quoted) = (Vec::new(), 0, 0, false);
    while at < text.len() {
        let word = WORDS.iter().find(|word| !quoted && text[at..].starts_with(word.as_bytes()));
        match (text[at], word) {
            (_, Some(word)) => {
                out.extend_from_slice(&text[copied..at]);
                out.extend_from_slice(format!("{{\"__float__\": \"{word}\"}}").as_bytes());
                at += word.len();
                copied = at;
                continue;
            }
            (b'"', None) => quoted = !quoted,
            (b'\\', None) if quoted => at += 1,
            _ => {}
        }
        at += 1;
    }
    match copied {
        0 => Cow::Borrowed(text),
        _ => {
            out.extend_from_slice(&text[copied..]);
            Cow::Owned(out)
        }
    }
}

fn parse(bytes: &[u8], cap: u64) -> std::result::Result<Value, JsonFault> {
    let found = bytes.len() as u64;
    if found > cap {
        return Err(JsonFault::TooLarge { found, cap });
    }
    let text = std::str::from_utf8(bytes).map_err(|e| JsonFault::NotUtf8 { position: e.valid_up_to() })?;
    let duplicate = RefCell::new(None);
    let mut parser = serde_json::Deserializer::from_str(text);
    let parsed = Strict { duplicate: &duplicate }.deserialize(&mut parser);
    parsed.and_then(|value| parser.end().map(|()| value)).map_err(|error| {
        let (line, column) = (error.line(), error.column());
        match duplicate.take() {
            Some(key) => JsonFault::Duplicate { key, line, column },
            None => JsonFault::Syntax { line, column, message: message(&error) },
        }
    })
}

/// The parser's message without the position that it appends.
pub(crate) fn message(error: &serde_json::Error) -> String {
    let text = error.to_string();
    let suffix = format!(" at line {} column {}", error.line(), error.column());
    text.strip_suffix(&suffix).map(str::to_owned).unwrap_or(text)
}

/// Builds a [`Value`] and leaves the first repeated key in `duplicate`, since a parser error carries only text.
#[derive(Clone, Copy)]
struct Strict<'a> {
    duplicate: &'a RefCell<Option<String>>,
}

impl<'de> DeserializeSeed<'de> for Strict<'_> {
    type Value = Value;

    fn deserialize<D: Deserializer<'de>>(self, deserializer: D) -> std::result::Result<Value, D::Error> {
        deserializer.deserialize_any(self)
    }
}

impl<'de> Visitor<'de> for Strict<'_> {
    type Value = Value;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a JSON value")
    }

    fn visit_unit<E>(self) -> std::result::Result<Value, E> {
        Ok(Value::Null)
    }

    fn visit_bool<E>(self, value: bool) -> std::result::Result<Value, E> {
        Ok(Value::Bool(value))
    }

    fn visit_i64<E>(self, value: i64) -> std::result::Result<Value, E> {
        Ok(Value::Number(value.into()))
    }

    fn visit_u64<E>(self, value: u64) -> std::result::Result<Value, E> {
        Ok(Value::Number(value.into()))
    }

    fn visit_f64<E: serde::de::Error>(self, value: f64) -> std::result::Result<Value, E> {
        Number::from_f64(value).map(Value::Number).ok_or_else(|| E::custom("number out of range"))
    }

    fn visit_str<E>(self, value: &str) -> std::result::Result<Value, E> {
        Ok(Value::String(value.to_owned()))
    }

    fn visit_string<E>(self, value: String) -> std::result::Result<Value, E> {
        Ok(Value::String(value))
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut seq: A) -> std::result::Result<Value, A::Error> {
        let mut items = Vec::new();
        while let Some(item) = seq.next_element_seed(self)? {
            items.push(item);
        }
        Ok(Value::Array(items))
    }

    fn visit_map<A: MapAccess<'de>>(self, mut entries: A) -> std::result::Result<Value, A::Error> {
        let mut object = Map::new();
        while let Some(key) = entries.next_key::<String>()? {
            if object.contains_key(&key) {
                *self.duplicate.borrow_mut() = Some(key);
                return Err(A::Error::custom("duplicate key"));
            }
            let value = entries.next_value_seed(self)?;
            object.insert(key, value);
        }
        Ok(Value::Object(object))
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]
mod tests {
    use super::*;

    fn fault(text: &[u8]) -> JsonFault {
        match parse_strict(text, Path::new("config.json"), 1 << 20).unwrap_err() {
            Error::Json { fault, .. } => fault,
            other => panic!("{other}"),
        }
    }

    #[test]
    fn values_match_serde_json() {
        let text = r#" {"b":[1,-2,3.5,null,true,"x\u0041",{}],"a":{"b":18446744073709551615}} "#;
        let ours = parse_strict(text.as_bytes(), Path::new("c"), 1000).unwrap();
        assert_eq!(ours, serde_json::from_str::<Value>(text).unwrap());
        assert_eq!(ours.as_object().unwrap().keys().collect::<Vec<_>>(), ["b", "a"]);
    }

    #[test]
    fn duplicates_are_refused_at_any_depth() {
        let same_key_in_two_objects = br#"{"a":{"k":1},"b":{"k":1}}"#;
        assert!(parse_strict(same_key_in_two_objects, Path::new("c"), 100).is_ok());
        let expected = JsonFault::Duplicate { key: "k".into(), line: 2, column: 13 };
        assert_eq!(fault(b"{\"a\":\n [{\"k\":1, \"k\":1}]}"), expected);
        // Equal after unescaping is equal.
        assert!(matches!(fault(br#"{"k":1,"\u006b":2}"#), JsonFault::Duplicate { .. }));
    }

    #[test]
    fn malformed_text_is_refused_with_its_position() {
        assert_eq!(fault(b"{\"a\": \xff}"), JsonFault::NotUtf8 { position: 6 });
        assert!(matches!(fault(b"{\"a\":1}\n x"), JsonFault::Syntax { line: 2, column: 2, .. }));
        for text in [&b""[..], b"{", b"{\"a\":NaN}", b"[1,]", b"\xef\xbb\xbf{}", b"{\"a\":1e999}"] {
            assert!(fault(text) != JsonFault::NotUtf8 { position: 0 });
        }
        let deep = [vec![b'['; 100_000], vec![b']'; 100_000]].concat();
        assert!(matches!(fault(&deep), JsonFault::Syntax { .. }));
        let error = parse_strict(b"[1]", Path::new("c"), 2).unwrap_err();
        assert_eq!(error.to_string(), "c: file: expected at most 2 bytes, got 3");
    }

    #[test]
    fn bare_words_become_objects_outside_of_strings() {
        let text = br#"{"a \" Infinity": [0.0, Infinity], "b": -Infinity, "c": "NaN", "d": NaN}"#;
        let spelled = with_spelled_floats(text);
        let value = parse_strict(&spelled, Path::new("c"), 1000).unwrap();
        let float = |word: &str| serde_json::json!({ "__float__": word });
        assert_eq!(value["a \" Infinity"][1], float("Infinity"));
        assert_eq!([&value["b"], &value["d"]], [&float("-Infinity"), &float("NaN")]);
        assert_eq!(value["c"], "NaN");
        assert!(matches!(with_spelled_floats(b"{\"a\": 1}"), Cow::Borrowed(_)));
    }
}
