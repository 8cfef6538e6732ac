//! What is evaluated: sequences of token ids, from a file of windows or from text.

use std::ops::RangeInclusive;
use std::path::Path;

use mantissa_model::{Bos, Tokenizer, TokenizerError};
use mantissa_store::{ErrorClass, Part, Shown, TextFile};
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
    /// Nothing to cut a text at.
    #[error("--split: found nothing, allowed one character or more, such as '<|endoftext|>'")]
    Separator,
    /// Nothing is predicted.
    #[error("{what}: found no token to predict, allowed at least one sequence of two tokens")]
    Empty {
        /// The text or file.
        what: String,
    },
    /// A text and its tokens take more memory than they may.
    #[error("{what}: needs {needs} bytes, {allowed} allowed")]
    Memory {
        /// The text or file.
        what: String,
        /// Bytes that it takes, at least.
        needs: u64,
        /// Bytes that it may take.
        allowed: u64,
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
            TokenError::Memory { .. } => ErrorClass::Environment,
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
/// [`TokenError`] names the file and the field; [`TokenError::Memory`] where reading takes more than `memory` bytes.
pub fn token_file(argument: &str, memory: u64) -> Result<Vec<Sequence>, TokenError> {
    not_empty(argument, token_windows(argument, memory)?)
}

/// As [`token_file`], for a use that predicts nothing: a window may be a single token.
///
/// # Errors
/// As [`token_file`]; no window holds a token.
pub fn token_windows(argument: &str, memory: u64) -> Result<Vec<Sequence>, TokenError> {
    let (file, key) = split_key(argument);
    let text = read_json(file, memory)?;
    let value: Value = serde_json::from_str(&text).map_err(|e| field(file, "JSON", e.to_string(), "JSON"))?;
    drop(text);
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

/// The path of `FILE.json[:KEY]`.
pub fn token_path(argument: &str) -> &Path {
    Path::new(split_key(argument).0)
}

/// The text of a token file whose values fit into `memory` bytes.
fn read_json(file: &str, memory: u64) -> Result<String, TokenError> {
    let path = Path::new(file);
    let open = TextFile::open(path).map_err(|error| match error {
        mantissa_store::Error::Missing { path, .. } => {
            mantissa_store::Error::Missing { path, expected: "a JSON file of token windows" }
        }
        error => error,
    })?;
    let beyond = |needs| TokenError::Memory { what: file.to_owned(), needs, allowed: memory };
    if let Some(size) = open.size().filter(|&size| size > MAX_FILE) {
        return Err(field(file, "size", format!("{size} bytes"), format!("at most {MAX_FILE}")));
    }
    // Every byte takes one byte at least.
    let Some(text) = open.whole(MAX_FILE.min(memory))? else {
        return Err(match memory < MAX_FILE {
            true => beyond(memory.saturating_add(1)),
            false => {
                field(file, "size", format!("more than {MAX_FILE} bytes"), format!("at most {MAX_FILE}"))
            }
        });
    };
    let needs = json_bytes(&text);
    if needs > memory { Err(beyond(needs)) } else { Ok(text) }
}

/// Bytes that a JSON text takes with its values and the ids that they become. A list that grows holds twice its values.
fn json_bytes(text: &str) -> u64 {
    let count = |of: &[u8]| text.bytes().filter(|byte| of.contains(byte)).count() as u64;
    let value = 2 * size_of::<Value>() as u64 + 4;
    let (values, keys) = (count(b",["), count(b":{"));
    text.len() as u64 + values * value + keys * (2 * value + 64)
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
    check_context(options)?;
    let sequences = match &options.split {
        Some(separator) => {
            check_separator(separator)?;
            let mut taken = Documents::new(name, tokenizer, options, None, u64::MAX);
            for part in text.split(separator.as_str()) {
                if !taken.take(part)? {
                    break;
                }
            }
            taken.finish()?
        }
        None => windows(name, text, tokenizer, options, None, u64::MAX)?,
    };
    not_empty(name, sequences)
}

/// [`sequences_from_text`] of a file or pipe in up to `memory` bytes: documents are read one at a time, and no further than `limit`
/// predicted tokens where there is one.
///
/// # Errors
/// As [`sequences_from_text`]; a file that cannot be read; [`TokenError::Memory`] where it takes more.
pub fn sequences_from_file(
    path: &Path,
    tokenizer: &Tokenizer,
    options: &TextOptions,
    limit: Option<usize>,
    memory: u64,
) -> Result<Vec<Sequence>, TokenError> {
    check_context(options)?;
    let name = path.display().to_string();
    let file = TextFile::open(path)?;
    let sequences = match &options.split {
        Some(separator) => {
            check_separator(separator)?;
            let mut taken = Documents::new(&name, tokenizer, options, limit, memory);
            documents(file, separator, &mut taken)?;
            taken.finish()?
        }
        None => {
            let text = whole(file, &name, tokenizer, memory)?;
            windows(&name, &text, tokenizer, options, limit, memory)?
        }
    };
    not_empty(&name, sequences)
}

fn check_context(options: &TextOptions) -> Result<(), TokenError> {
    match options.context {
        found @ (0 | 1) => {
            Err(TokenError::Window { option: "--context", found, allowed: "2 or more".into() })
        }
        _ => Ok(()),
    }
}

fn check_separator(separator: &str) -> Result<(), TokenError> {
    if separator.is_empty() {
        return Err(TokenError::Separator);
    }
    Ok(())
}

/// Documents longer than this are not read to their end: no tokenizer takes them.
const MAX_DOCUMENT: u64 = 64 << 20;

/// A text that is tokenized in one piece, where that fits into `memory` bytes.
///
/// # Errors
/// [`TokenError::Memory`], and [`TokenizerError::TextTooLong`], before more of it is read than may be held.
pub fn whole(file: TextFile, name: &str, tokenizer: &Tokenizer, memory: u64) -> Result<String, TokenError> {
    let (most, size) = (tokenizer.max_text(), file.size());
    let affordable = memory / Tokenizer::ENCODING;
    if let Some(text) = file.whole(most.min(affordable))? {
        return Ok(text);
    }
    // What the tokenizer refuses, no memory makes good.
    if size.map_or(most <= affordable, |size| size > most) {
        return Err(tokenizer.too_long(size.unwrap_or(most + 1)).into());
    }
    let needs = size.unwrap_or(affordable + 1).saturating_mul(Tokenizer::ENCODING);
    Err(TokenError::Memory { what: name.to_owned(), needs, allowed: memory })
}

/// Gives the parts of `file` to `taken` until it has enough.
fn documents(mut file: TextFile, separator: &str, taken: &mut Documents<'_>) -> Result<(), TokenError> {
    loop {
        let left = taken.left();
        match file.part(separator, left.min(MAX_DOCUMENT))? {
            Part::End => return Ok(()),
            Part::Text(part) if taken.take(part)? => {}
            Part::Text(_) => return Ok(()),
            Part::TooLong if left < MAX_DOCUMENT => return Err(taken.beyond(left.saturating_add(1))),
            Part::TooLong => return Err(taken.tokenizer.too_long(MAX_DOCUMENT + 1).into()),
        }
    }
}

/// Sequences from documents, each of which is tokenized as it comes.
struct Documents<'a> {
    name: &'a str,
    tokenizer: &'a Tokenizer,
    options: &'a TextOptions,
    /// Predicted tokens that are still asked for.
    wanted: usize,
    memory: u64,
    /// Bytes of the sequences.
    held: u64,
    /// Documents so far, taken or not.
    count: usize,
    sequences: Vec<Sequence>,
}

impl<'a> Documents<'a> {
    fn new(
        name: &'a str,
        tokenizer: &'a Tokenizer,
        options: &'a TextOptions,
        limit: Option<usize>,
        memory: u64,
    ) -> Self {
        let wanted = limit.unwrap_or(usize::MAX);
        Documents { name, tokenizer, options, wanted, memory, held: 0, count: 0, sequences: Vec::new() }
    }

    /// Bytes that may still be taken.
    fn left(&self) -> u64 {
        self.memory.saturating_sub(self.held)
    }

    fn beyond(&self, more: u64) -> TokenError {
        let needs = self.held.saturating_add(more);
        TokenError::Memory { what: self.name.to_owned(), needs, allowed: self.memory }
    }

    fn range(&self) -> (usize, usize) {
        self.options.docs.as_ref().map_or((1, usize::MAX), |range| (*range.start(), *range.end()))
    }

    /// Takes what stands between separators; `false` where no more is wanted.
    fn take(&mut self, part: &str) -> Result<bool, TokenError> {
        let document = part.trim();
        if document.is_empty() {
            return Ok(true);
        }
        self.count += 1;
        let (first, last) = self.range();
        if self.count < first {
            return Ok(true);
        }
        let encoding = (part.len() as u64).saturating_mul(1 + Tokenizer::ENCODING);
        if encoding > self.left() && document.len() as u64 <= self.tokenizer.max_text() {
            return Err(self.beyond(encoding));
        }
        let mut tokens = self.tokenizer.encode(document, self.options.bos)?;
        tokens.truncate(self.options.context);
        tokens.shrink_to_fit();
        if tokens.len() > 1 {
            // The list of them holds up to twice as many when it grows, the allocator a header for each.
            self.held += (4 * tokens.len() + 3 * size_of::<Sequence>() + 16) as u64;
            self.wanted = self.wanted.saturating_sub(tokens.len() - 1);
            self.sequences.push(Sequence { tokens, from: 1 });
        }
        Ok(self.count < last && self.wanted > 0)
    }

    fn finish(self) -> Result<Vec<Sequence>, TokenError> {
        let (first, last) = self.range();
        if self.options.docs.is_some() && last > self.count && self.wanted > 0 {
            let allowed = format!("1..{} (the documents there are)", self.count);
            return Err(TokenError::Docs { found: format!("{first}..{last}"), allowed });
        }
        Ok(self.sequences)
    }
}

/// A text in windows of the context, of which no more are made than `limit` predicted tokens take.
fn windows(
    name: &str,
    text: &str,
    tokenizer: &Tokenizer,
    options: &TextOptions,
    limit: Option<usize>,
    memory: u64,
) -> Result<Vec<Sequence>, TokenError> {
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
    // Windows that overlap much are many times the text.
    let wanted = limit.map_or(usize::MAX, |limit| limit / (stride - 1).max(1));
    let count = wanted.min(tokens.len() / stride).saturating_add(2);
    let window = 4 * (bos.len() + block.min(tokens.len())) + 3 * size_of::<Sequence>();
    let needs = (4 * tokens.len() as u64).saturating_add((count as u64).saturating_mul(window as u64));
    if needs > memory {
        return Err(TokenError::Memory { what: name.to_owned(), needs, allowed: memory });
    }
    let mut all = Vec::new();
    let (mut start, mut predicted) = (0, 0);
    while tokens.len().saturating_sub(start) >= block || (start == 0 && !tokens.is_empty()) {
        let end = start.saturating_add(block).min(tokens.len());
        let sequence: Vec<u32> = bos.iter().chain(&tokens[start..end]).copied().collect();
        // Tokens that an earlier window has predicted are context only.
        let fresh = if start == 0 { 0 } else { block - stride };
        let from = (bos.len() + fresh).max(1);
        predicted += sequence.len().saturating_sub(from);
        all.push(Sequence { from, tokens: sequence });
        start = start.saturating_add(stride);
        if limit.is_some_and(|limit| predicted >= limit) {
            break;
        }
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
        let windows = token_file(&format!("{name}:a"), u64::MAX).unwrap();
        assert_eq!(windows[1], Sequence { tokens: vec![4, 5], from: 1 });
        let message = |key: &str| token_file(&format!("{name}{key}"), u64::MAX).unwrap_err().to_string();
        assert!(message(":d").contains("one of a, b, c"));
        assert!(message(":b").contains("b[0]"));
        assert!(message(":c").contains("a number"));
        assert!(message("").contains("an object"));
        write("[[5]]");
        assert!(message("").contains("no token to predict"));
        write("[[5, 6], [7]]");
        let error = token_windows(&name, 100).unwrap_err();
        assert!(matches!(error, TokenError::Memory { needs: 101..=1000, .. }), "{error}");
        assert!(matches!(token_windows("/dev/zero", 1 << 20), Err(TokenError::File(_))));
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
