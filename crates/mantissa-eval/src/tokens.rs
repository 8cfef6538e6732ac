//! Evaluation input: token sequences from a token file or from text.

use std::ops::RangeInclusive;
use std::path::Path;

use mantissa_model::{Bos, Tokenizer, TokenizerError};
use mantissa_store::{ErrorClass, Shown, TextFile, TextPart};
use serde_json::Value;

/// Token sequence with the index of the first predicted token.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Sequence {
    /// Token ids.
    pub tokens: Vec<u32>,
    /// Index of the first predicted token, at least 1.
    pub from: usize,
}

/// Options for cutting text into sequences.
#[derive(Clone, Debug)]
pub struct TextOptions {
    /// Separator between documents. Each document is stripped of white space and becomes one sequence.
    pub split: Option<String>,
    /// Range of documents to take, 1-based and inclusive.
    pub docs: Option<RangeInclusive<usize>>,
    /// Maximum sequence length in tokens, BOS included.
    pub context: usize,
    /// Stride in tokens between windows of undivided text; `None` means no overlap.
    pub stride: Option<usize>,
    /// Policy for a BOS token before each sequence.
    pub bos: Bos,
}

/// Error of reading evaluation input.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum TokenError {
    /// A file is missing or cannot be read.
    #[error(transparent)]
    File(#[from] mantissa_store::Error),
    /// A field of a token file has the wrong form.
    #[error("{file}: {field}: expected {allowed}, got {found}")]
    Field {
        /// Token file.
        file: String,
        /// Key or index in the file.
        field: String,
        /// Value in the file.
        found: String,
        /// Accepted form.
        allowed: String,
    },
    /// A window is empty: there is nothing to run and no state to calibrate on.
    #[error(
        "{file}: {field}: expected at least one token id, got an empty list; fix: remove this window from the list"
    )]
    EmptyWindow {
        /// Token file.
        file: String,
        /// Key and index of the window.
        field: String,
    },
    /// A document range is malformed or outside the text.
    #[error("--docs: expected {allowed}, got {found}")]
    Docs {
        /// Range given.
        found: String,
        /// Accepted ranges.
        allowed: String,
    },
    /// A window option is out of range.
    #[error("{option}: expected {allowed}, got {found}")]
    Window {
        /// Name of the option.
        option: &'static str,
        /// Value given.
        found: usize,
        /// Accepted values.
        allowed: String,
    },
    /// The document separator is empty.
    #[error("--split: expected at least one character, such as '<|endoftext|>', got an empty separator")]
    Separator,
    /// The input holds no token to predict.
    #[error("{what}: expected at least one sequence of two tokens, got no token to predict")]
    Empty {
        /// Name of the text or file.
        what: String,
    },
    /// A text and its tokens exceed the memory limit.
    #[error("{what}: expected at most {allowed} bytes of memory, got a need of {needs}; fix: raise --memory")]
    Memory {
        /// Name of the text or file.
        what: String,
        /// Bytes needed, at least.
        needs: u64,
        /// Bytes allowed.
        allowed: u64,
    },
    /// The tokenizer failed.
    #[error(transparent)]
    Tokenizer(#[from] TokenizerError),
}

impl TokenError {
    /// Returns who has to act: the input or the environment is at fault.
    pub fn class(&self) -> ErrorClass {
        match self {
            TokenError::File(error) => error.class(),
            TokenError::Tokenizer(error) => error.class(),
            TokenError::Memory { .. } => ErrorClass::Environment,
            _ => ErrorClass::Input,
        }
    }
}

/// Maximum size of a token file, bytes.
const MAX_FILE: u64 = 1 << 30;

/// Reads the windows of `FILE.json[:KEY]`: a list of lists of token ids or, with a key, an object of such
/// lists.
///
/// Windows are used as they are, of any length; an empty window is refused.
///
/// # Errors
/// [`TokenError`] names the file and the field; [`TokenError::Memory`] if reading needs more than `memory`
/// bytes.
pub fn token_file(argument: &str, memory: u64) -> Result<Vec<Sequence>, TokenError> {
    not_empty(argument, token_windows(argument, memory)?)
}

/// Reads windows like [`token_file`], for uses that predict nothing: a window may hold a single token.
///
/// # Errors
/// As [`token_file`], and if no window holds a token.
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
        let hint = if key.is_none() && windows.is_object() {
            format!(", or a key: {}", keys(&value))
        } else {
            String::new()
        };
        field(file, name, kind(windows), format!("a list of lists of ids{hint}"))
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

/// Returns the path part of `FILE.json[:KEY]`.
pub fn token_path(argument: &str) -> &Path {
    Path::new(split_key(argument).0)
}

/// Reads the text of a token file if its parsed values fit into `memory` bytes.
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
    // Each byte of the file occupies at least one byte.
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

/// Upper bound on the bytes of a JSON text, its parsed values and the token ids. A growing list can hold
/// twice its length.
fn json_bytes(text: &str) -> u64 {
    let count = |of: &[u8]| text.bytes().filter(|byte| of.contains(byte)).count() as u64;
    let value = 2 * size_of::<Value>() as u64 + 4;
    let (values, keys) = (count(b",["), count(b":{"));
    text.len() as u64 + values * value + keys * (2 * value + 64)
}

/// Splits off the key: the text after the last colon, unless the whole argument is a file (a path may contain
/// a colon).
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
        .ok_or_else(|| field(file, &at(), "a value that is not a token id", "ids from 0 to 4294967295"))?;
    Ok(Sequence { tokens, from: 1 })
}

fn keys(value: &Value) -> String {
    match value.as_object() {
        None => "no key, since the file holds no object".to_owned(),
        // Keys come from the file, so they are escaped and cut.
        Some(object) => {
            let keys: Vec<_> = object.keys().take(20).map(|key| Shown(key).to_string()).collect();
            format!("one of {}", keys.join(", "))
        }
    }
}

fn kind(value: &Value) -> &'static str {
    match value {
        Value::Null => "null",
        Value::Bool(_) => "a boolean",
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

/// Parses a document range `A..B`, 1-based and inclusive.
///
/// # Errors
/// [`TokenError::Docs`] if the text is not such a range.
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

/// Tokenizes `text` into sequences.
///
/// With a separator, each document becomes one sequence, cut to the context. Without, the whole text is
/// tokenized at once and cut into windows of the context, each with its own BOS where the tokenizer adds one.
/// An incomplete last window is dropped unless it is the only one.
///
/// # Errors
/// [`TokenError`] for options that leave no sequence, and for errors of the tokenizer.
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

/// Tokenizes a file or pipe like [`sequences_from_text`], in at most `memory` bytes. Documents are read one
/// at a time and only until `limit` tokens are predicted, if there is a limit.
///
/// # Errors
/// As [`sequences_from_text`]; an unreadable file; [`TokenError::Memory`] if more memory is needed.
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

/// Documents longer than this are not read to the end: no tokenizer accepts them.
const MAX_DOCUMENT: u64 = 64 << 20;

/// Reads a text that is tokenized in one piece, if it fits into `memory` bytes.
///
/// # Errors
/// [`TokenError::Memory`] or [`TokenizerError::TextTooLong`], before reading more than may be held.
pub fn whole(file: TextFile, name: &str, tokenizer: &Tokenizer, memory: u64) -> Result<String, TokenError> {
    let (most, size) = (tokenizer.max_text(), file.size());
    let affordable = memory / Tokenizer::ENCODING;
    if let Some(text) = file.whole(most.min(affordable))? {
        return Ok(text);
    }
    // More memory does not help a text that the tokenizer refuses, so that error comes first.
    if size.map_or(most <= affordable, |size| size > most) {
        return Err(tokenizer.too_long(size.unwrap_or(most + 1)).into());
    }
    let needs = size.unwrap_or(affordable + 1).saturating_mul(Tokenizer::ENCODING);
    Err(TokenError::Memory { what: name.to_owned(), needs, allowed: memory })
}

/// Passes the documents of `file` to `taken` until it has enough.
fn documents(mut file: TextFile, separator: &str, taken: &mut Documents<'_>) -> Result<(), TokenError> {
    loop {
        let left = taken.left();
        match file.part(separator, left.min(MAX_DOCUMENT))? {
            TextPart::End => return Ok(()),
            TextPart::Text(part) if taken.take(part)? => {}
            TextPart::Text(_) => return Ok(()),
            TextPart::TooLong if left < MAX_DOCUMENT => return Err(taken.beyond(left.saturating_add(1))),
            TextPart::TooLong => return Err(taken.tokenizer.too_long(MAX_DOCUMENT + 1).into()),
        }
    }
}

/// Collects sequences, tokenizing one document at a time.
struct Documents<'a> {
    name: &'a str,
    tokenizer: &'a Tokenizer,
    options: &'a TextOptions,
    /// Predicted tokens still wanted.
    wanted: usize,
    memory: u64,
    /// Bytes of the collected sequences.
    held: u64,
    /// Documents read so far, including skipped ones.
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

    /// Returns the bytes still available.
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

    /// Adds the text between two separators; returns `false` once no more is wanted.
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
            // A growing list holds up to twice its length, and the allocator adds a header per sequence.
            self.held += (4 * tokens.len() + 3 * size_of::<Sequence>() + 16) as u64;
            self.wanted = self.wanted.saturating_sub(tokens.len() - 1);
            self.sequences.push(Sequence { tokens, from: 1 });
        }
        Ok(self.count < last && self.wanted > 0)
    }

    fn finish(self) -> Result<Vec<Sequence>, TokenError> {
        let (first, last) = self.range();
        if self.options.docs.is_some() && last > self.count && self.wanted > 0 {
            let allowed = format!("a range within 1..{} (the number of documents)", self.count);
            return Err(TokenError::Docs { found: format!("{first}..{last}"), allowed });
        }
        Ok(self.sequences)
    }
}

/// Cuts a text into windows of the context, no more than `limit` predicted tokens need.
fn windows(
    name: &str,
    text: &str,
    tokenizer: &Tokenizer,
    options: &TextOptions,
    limit: Option<usize>,
    memory: u64,
) -> Result<Vec<Sequence>, TokenError> {
    // The tokenizer's prefix (BOS) is repeated before each window.
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
    // A small stride repeats most tokens in several windows, so memory is checked before any is made.
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
        // Tokens predicted in the previous window serve only as context.
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
    fn token_file_errors_name_the_fault() {
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
        assert!(
            message(":b")
                .contains("t.json: b: expected at least one window, a list of token ids, got an empty list")
        );
        assert!(message(":c").contains("c[0]: expected at least one token id"));
        std::fs::remove_dir_all(&dir).unwrap();
    }
}
