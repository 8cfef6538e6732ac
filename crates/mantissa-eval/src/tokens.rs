//! What is evaluated: sequences of token ids, from a file of windows or from text.

use std::ops::RangeInclusive;
use std::path::Path;

use mantissa_model::{Bos, Tokenizer, TokenizerError};
use mantissa_store::{ErrorClass, Shown};
use serde_json::Value;

/// Tokens to run, and from which index on they are predicted.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Sequence {
    /// Token ids.
    pub tokens: Vec<u32>,
    /// Index of the first token that counts, at least 1.
    pub from: usize,
}

/// How text becomes sequences.
#[derive(Clone, Debug)]
pub struct TextOptions {
    /// Cuts the text into documents, each stripped of white space and one sequence.
    pub split: Option<String>,
    /// Documents to take, counted from 1.
    pub docs: Option<RangeInclusive<usize>>,
    /// Longest sequence, BOS included.
    pub context: usize,
    /// Distance of overlapping windows over undivided text; `None` puts them end to end.
    pub stride: Option<usize>,
    /// Whether a BOS stands before each sequence.
    pub bos: Bos,
}

/// Why there is nothing to evaluate.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum TokenError {
    /// A file is not there or cannot be read.
    #[error(transparent)]
    File(#[from] mantissa_store::Error),
    /// A token file does not hold windows.
    #[error("{file}: {field}: found {found}, allowed {allowed}")]
    Field {
        /// The file.
        file: String,
        /// Where.
        field: String,
        /// What is there.
        found: String,
        /// What may be there.
        allowed: String,
    },
    /// A window holds no token: nothing can be run on it, and a method that calibrates on it would have no states to keep.
    #[error(
        "{file}: {field}: expected at least one token id, got an empty list; fix: remove this window from the list"
    )]
    EmptyWindow {
        /// The file.
        file: String,
        /// The key and the index of the window.
        field: String,
    },
    /// A range of documents is not one, or lies beyond the text.
    #[error("--docs: found {found}, allowed {allowed}")]
    Docs {
        /// The range.
        found: String,
        /// What may stand there.
        allowed: String,
    },
    /// Windows of no use.
    #[error("{option}: found {found}, allowed {allowed}")]
    Window {
        /// The option.
        option: &'static str,
        /// Its value.
        found: usize,
        /// What it may be.
        allowed: String,
    },
    /// Nothing is predicted.
    #[error("{what}: found no token to predict, allowed at least one sequence of two tokens")]
    Empty {
        /// The text or file.
        what: String,
    },
    /// The tokenizer.
    #[error(transparent)]
    Tokenizer(#[from] TokenizerError),
}

impl TokenError {
    /// Whether the input or the environment is at fault.
    pub fn class(&self) -> ErrorClass {
        match self {
            TokenError::File(error) => error.class(),
            TokenError::Tokenizer(error) => error.class(),
            _ => ErrorClass::Input,
        }
    }
}

/// Token files up to this size are read.
const MAX_FILE: u64 = 1 << 30;

/// Windows of `FILE.json[:KEY]`: a list of lists of ids, or, with a key, an object of such lists. They are used as they are, of
/// whatever lengths; one without tokens is refused.
///
/// # Errors
/// [`TokenError`] names the file and the field.
pub fn token_file(argument: &str) -> Result<Vec<Sequence>, TokenError> {
    not_empty(argument, token_windows(argument)?)
}

/// As [`token_file`], for a use that predicts nothing: a window may be a single token.
///
/// # Errors
/// As [`token_file`]; no window holds a token.
pub fn token_windows(argument: &str) -> Result<Vec<Sequence>, TokenError> {
    let (file, key) = split_key(argument);
    let expected = "a JSON file of token windows";
    let io = |error| mantissa_store::Error::opening(Path::new(file), expected, "read", error);
    let size = std::fs::metadata(file).map_err(io)?.len();
    if size > MAX_FILE {
        return Err(field(file, "size", format!("{size} bytes"), format!("at most {MAX_FILE}")));
    }
    let bytes = std::fs::read(file).map_err(io)?;
    let value: Value =
        serde_json::from_slice(&bytes).map_err(|e| field(file, "JSON", e.to_string(), "JSON"))?;
    let windows = match key {
        None => &value,
        Some(key) => value.get(key).ok_or_else(|| field(file, key, "nothing", keys(&value)))?,
    };
    let name = key.unwrap_or("root");
    let list = windows.as_array().ok_or_else(|| {
        field(file, name, kind(windows), format!("a list of lists of ids; {}", keys(&value)))
    })?;
    let sequences: Vec<_> =
        list.iter().enumerate().map(|(i, w)| window(file, name, i, w)).collect::<Result<_, _>>()?;
    if sequences.is_empty() {
        return Err(field(file, name, "an empty list", "at least one window, a list of token ids"));
    }
    match sequences.iter().position(|sequence| sequence.tokens.is_empty()) {
        None => Ok(sequences),
        Some(i) => {
            Err(TokenError::EmptyWindow { file: file.to_owned(), field: format!("{}[{i}]", Shown(name)) })
        }
    }
}

/// A path may itself hold a colon: the key is what follows the last one, unless the whole is a file.
fn split_key(argument: &str) -> (&str, Option<&str>) {
    match argument.rsplit_once(':') {
        Some((file, key)) if !Path::new(argument).exists() && !key.contains('/') => (file, Some(key)),
        _ => (argument, None),
    }
}

fn window(file: &str, name: &str, index: usize, value: &Value) -> Result<Sequence, TokenError> {
    let at = || format!("{name}[{index}]");
    let ids = value.as_array().ok_or_else(|| field(file, &at(), kind(value), "a list of token ids"))?;
    let id = |v: &Value| v.as_u64().and_then(|id| u32::try_from(id).ok());
    let tokens: Option<Vec<u32>> = ids.iter().map(id).collect();
    let tokens = tokens
        .ok_or_else(|| field(file, &at(), "something that is not an id", "ids from 0 to 4294967295"))?;
    Ok(Sequence { tokens, from: 1 })
}

fn keys(value: &Value) -> String {
    match value.as_object() {
        None => "no key: the file is a list".to_owned(),
        // Keys are text of the file: escaped and cut.
        Some(object) => {
            let keys: Vec<_> = object.keys().take(20).map(|key| Shown(key).to_string()).collect();
            format!("one of {}", keys.join(", "))
        }
    }
}

fn kind(value: &Value) -> &'static str {
    match value {
        Value::Null => "null",
        Value::Bool(_) => "a truth value",
        Value::Number(_) => "a number",
        Value::String(_) => "a string",
        Value::Array(_) => "a list",
        Value::Object(_) => "an object",
    }
}

fn field(file: &str, field: &str, found: impl Into<String>, allowed: impl Into<String>) -> TokenError {
    let field = Shown(field).to_string();
    TokenError::Field { file: file.into(), field, found: found.into(), allowed: allowed.into() }
}

/// Parses `A..B`, counted from 1 and inclusive.
///
/// # Errors
/// [`TokenError::Docs`].
pub fn parse_docs(text: &str) -> Result<RangeInclusive<usize>, TokenError> {
    let bounds = text.split_once("..").and_then(|(a, b)| Some((a.parse().ok()?, b.parse().ok()?)));
    match bounds {
        Some((first, last)) if 1 <= first && first <= last => Ok(first..=last),
        _ => Err(TokenError::Docs {
            found: format!("\"{text}\""),
            allowed: "A..B with 1 <= A <= B".to_owned(),
        }),
    }
}

/// Tokenizes `text` into sequences. With a separator, each document is one sequence, cut to the context. Without, the whole
/// text is tokenized in one piece and cut into windows of the context, a BOS before each where there is one; an incomplete
/// last window is dropped unless it is the only one.
///
/// # Errors
/// [`TokenError`] for options that leave nothing, and for the tokenizer's own.
pub fn sequences_from_text(
    name: &str,
    text: &str,
    tokenizer: &Tokenizer,
    options: &TextOptions,
) -> Result<Vec<Sequence>, TokenError> {
    if options.context < 2 {
        return Err(TokenError::Window {
            option: "--context",
            found: options.context,
            allowed: "2 or more".into(),
        });
    }
    let sequences = match &options.split {
        Some(separator) => documents(text, separator, tokenizer, options)?,
        None => windows(text, tokenizer, options)?,
    };
    not_empty(name, sequences)
}

fn documents(
    text: &str,
    separator: &str,
    tokenizer: &Tokenizer,
    options: &TextOptions,
) -> Result<Vec<Sequence>, TokenError> {
    let all: Vec<&str> = text.split(separator).map(str::trim).filter(|doc| !doc.is_empty()).collect();
    let (first, last) = options.docs.as_ref().map_or((1, all.len()), |r| (*r.start(), *r.end()));
    if last > all.len() {
        let allowed = format!("1..{} (the documents there are)", all.len());
        return Err(TokenError::Docs { found: format!("{first}..{last}"), allowed });
    }
    let sequence = |doc: &&str| {
        let mut tokens = tokenizer.encode(doc, options.bos)?;
        tokens.truncate(options.context);
        Ok(Sequence { tokens, from: 1 })
    };
    all[first - 1..last]
        .iter()
        .map(sequence)
        .filter(|s| s.as_ref().map_or(true, |s| s.tokens.len() > 1))
        .collect()
}

fn windows(text: &str, tokenizer: &Tokenizer, options: &TextOptions) -> Result<Vec<Sequence>, TokenError> {
    // What the tokenizer puts before a text is put before each window.
    let bos = tokenizer.encode("", options.bos)?;
    let tokens = tokenizer.encode(text, Bos::Never)?;
    let block = options.context.saturating_sub(bos.len()).max(1);
    let stride = options.stride.unwrap_or(block);
    if stride == 0 || stride > block {
        return Err(TokenError::Window {
            option: "--stride",
            found: stride,
            allowed: format!("1 to {block}"),
        });
    }
    let mut all = Vec::new();
    let mut start = 0;
    while tokens.len().saturating_sub(start) >= block || (start == 0 && !tokens.is_empty()) {
        let end = start.saturating_add(block).min(tokens.len());
        let sequence: Vec<u32> = bos.iter().chain(&tokens[start..end]).copied().collect();
        // Tokens that an earlier window has predicted are context only.
        let fresh = if start == 0 { 0 } else { block - stride };
        all.push(Sequence { from: (bos.len() + fresh).max(1), tokens: sequence });
        start = start.saturating_add(stride);
    }
    Ok(all)
}

fn not_empty(what: &str, sequences: Vec<Sequence>) -> Result<Vec<Sequence>, TokenError> {
    if sequences.iter().any(|s| s.tokens.len() > s.from) {
        Ok(sequences)
    } else {
        Err(TokenError::Empty { what: what.to_owned() })
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    #[test]
    fn docs_are_counted_from_one() {
        assert_eq!(parse_docs("1..64").unwrap(), 1..=64);
        for bad in ["0..3", "4..3", "5", "a..b", "1..=3", "..", "-1..2"] {
            assert!(parse_docs(bad).is_err(), "{bad}");
        }
    }

    #[test]
    fn token_files_say_what_is_wrong() {
        let dir = std::env::temp_dir().join(format!("mantissa-tokens-{}", std::process::id()));
        std::fs::create_dir_all(&dir).unwrap();
        let path = dir.join("t.json");
        let name = path.display().to_string();
        let write = |text: &str| std::fs::write(&path, text).unwrap();
        write(r#"{"a": [[1, 2, 3], [4, 5]], "b": [[1, -2]], "c": 7}"#);
        let windows = token_file(&format!("{name}:a")).unwrap();
        assert_eq!(windows[1], Sequence { tokens: vec![4, 5], from: 1 });
        let message = |key: &str| token_file(&format!("{name}{key}")).unwrap_err().to_string();
        assert!(message(":d").contains("one of a, b, c"));
        assert!(message(":b").contains("b[0]"));
        assert!(message(":c").contains("a number"));
        assert!(message("").contains("an object"));
        write("[[5]]");
        assert!(message("").contains("no token to predict"));
        write("[[5, 6]");
        assert!(message("").contains("JSON"));
        write(r#"{"a": [[1, 2], [], [3]], "b": [], "c": [[]]}"#);
        assert!(
            message(":a").contains("t.json: a[1]: expected at least one token id, got an empty list; fix: ")
        );
        assert!(message(":b").contains("t.json: b: found an empty list"));
        assert!(message(":c").contains("c[0]: expected at least one token id"));
        std::fs::remove_dir_all(&dir).unwrap();
    }
}
