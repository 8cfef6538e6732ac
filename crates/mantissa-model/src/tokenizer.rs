//! Text to token ids and back, using a model folder's `tokenizer.json`.
//!
//! The file is untrusted, and the `tokenizers` crate panics on some content. So the file is first checked field by
//! field, and every call into the crate is guarded, which turns a panic into an error. Truncation and padding
//! settings are dropped before loading: a text is always encoded whole. The longest text depends on the file, whose
//! steps determine memory and time.

mod bytes;
mod charsmap;
mod check;
mod error;
mod fault;
pub mod gguf;
mod guard;
mod limits;
mod probe;
mod regexes;
mod steps;
mod stream;

use std::collections::{BTreeMap, BTreeSet};
use std::io::{BufRead, Read};
use std::ops::Range;
use std::path::{Path, PathBuf};

use mantissa_store::shown::misleads;
use mantissa_store::{Error, json, regular};
use serde_json::Value;
use tokenizers::{NormalizedString, Normalizer};

pub use bytes::{TokenText, TokenTexts};
pub use error::TokenizerError;
pub use probe::{ProbeDifference, Probes};
pub use stream::DecodeStream;

use crate::chat::ChatTemplates;
use crate::config::read_json;
use check::Checked;
use guard::guarded;

/// Largest accepted `tokenizer.json`. The largest of public models have about 35 MB.
const MAX_FILE: u64 = 64 << 20;

/// Beginning-of-text token of an encoded text.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum Bos {
    /// Adds what the tokenizer's post-processor adds.
    #[default]
    Auto,
    /// Always adds it, and nothing else.
    Always,
    /// Adds nothing.
    Never,
}

/// A loaded tokenizer.
#[derive(Clone, Debug)]
pub struct Tokenizer {
    inner: tokenizers::Tokenizer,
    path: PathBuf,
    bos: Option<u32>,
    vocab_size: Option<usize>,
    templates: ChatTemplates,
    special: BTreeMap<String, String>,
    max_text: u64,
}

impl Tokenizer {
    /// Maximum memory per byte of a text during encoding. The library holds the original and the normalized text, the
    /// offset of every byte, and data of each token. Measured: 250 if every byte becomes a token of a byte-level
    /// model, 105 to 135 on prose.
    pub const ENCODING: u64 = 256;

    /// Largest memory per byte of `tokenizer.json` without its indentation, during loading and after it; 37 were
    /// measured.
    const LOADING: u64 = 40;

    /// Predicted peak memory of [`load`](Self::load).
    pub fn bytes_to_load(dir: &Path) -> u64 {
        let size = if dir.is_file() {
            // Metadata lie before the tensors.
            let file = mantissa_store::Gguf::open(dir).ok();
            let file = file.filter(|file| file.metadata().get("tokenizer.ggml.tokens").is_some());
            file.and_then(|file| file.tensors().iter().map(|tensor| tensor.offset).min()).unwrap_or(0)
        } else {
            compact_bytes(&dir.join("tokenizer.json"))
        };
        size.saturating_mul(Self::LOADING)
    }

    /// Loads `tokenizer.json` of the model folder `dir`; `tokenizer_config.json` and `config.json` state the
    /// beginning-of-text token and the vocabulary size. Loads the tokenizer in a GGUF file likewise.
    ///
    /// # Errors
    /// [`TokenizerError`] if the file is missing, too large, or rejected by the library.
    pub fn load(dir: &Path) -> Result<Self, TokenizerError> {
        if dir.is_file() {
            return Self::load_gguf(dir);
        }
        let path = dir.join("tokenizer.json");
        let file = json::parse_strict(&read_capped(&path)?, &path, MAX_FILE)?;
        let (inner, max_text) = load_checked(&path, file)?;
        let config = read_json(&dir.join("config.json"))?;
        let field = |name: &str| config.as_ref()?.get(name)?.as_u64();
        let own = read_json(&dir.join("tokenizer_config.json"))?;
        let mut special = own.as_ref().map(special_tokens).unwrap_or_default();
        // transformers reads this file where the other does not name a token.
        let map = read_json(&dir.join("special_tokens_map.json"))?;
        for (name, text) in map.as_ref().map(special_tokens).unwrap_or_default() {
            special.entry(name).or_insert(text);
        }
        let bos = special
            .get("bos_token")
            .and_then(|text| inner.token_to_id(text))
            .or_else(|| field("bos_token_id").and_then(|id| u32::try_from(id).ok()));
        let vocab_size = field("vocab_size").and_then(|n| usize::try_from(n).ok());
        let templates = ChatTemplates::load(dir, own.as_ref())?;
        Ok(Tokenizer { inner, path, bos, vocab_size, templates, special, max_text })
    }

    /// Creates a tokenizer from the contents of a `tokenizer.json` alone; `path` is its name in errors.
    ///
    /// # Errors
    /// As [`load`](Self::load).
    pub fn from_json(path: &Path, file: &[u8]) -> Result<Self, TokenizerError> {
        let (inner, max_text) = load_checked(path, json::parse_strict(file, path, MAX_FILE)?)?;
        let (templates, special) = (ChatTemplates::default(), BTreeMap::new());
        Ok(Tokenizer { inner, path: path.into(), bos: None, vocab_size: None, templates, special, max_text })
    }

    fn load_gguf(path: &Path) -> Result<Self, TokenizerError> {
        let file = mantissa_store::Gguf::open(path)?;
        let metadata = file.metadata();
        let (inner, max_text) = load_checked(path, gguf::tokenizer_json(metadata)?)?;
        let special = gguf::special_tokens(metadata)?;
        let bos = special.get("bos_token").and_then(|text| inner.token_to_id(text));
        let vocab_size = file.get("token_embd.weight").and_then(|tensor| tensor.shape.first().copied());
        let templates = ChatTemplates::of_metadata(metadata)?;
        Ok(Tokenizer { inner, path: path.to_owned(), bos, vocab_size, templates, special, max_text })
    }

    /// Encodes `text`.
    ///
    /// # Errors
    /// [`TokenizerError::NoBos`] with [`Bos::Always`] if there is no such token, [`TokenizerError::Vocabulary`] for an
    /// id outside the model's `vocab_size`, [`TokenizerError::TextTooLong`] beyond [`max_text`](Self::max_text),
    /// [`TokenizerError::Invalid`] if the library fails.
    pub fn encode(&self, text: &str, bos: Bos) -> Result<Vec<u32>, TokenizerError> {
        let found = text.len() as u64;
        if found > self.max_text {
            return Err(self.too_long(found));
        }
        let encode = || self.inner.encode_fast(text, bos == Bos::Auto);
        let encoding = call(&self.path, "encode", encode)?;
        let mut ids = Vec::with_capacity(encoding.len() + 1);
        if bos == Bos::Always {
            ids.push(self.bos.ok_or_else(|| TokenizerError::NoBos { path: self.path.clone() })?);
        }
        ids.extend_from_slice(encoding.get_ids());
        let limit = self.vocab_size.unwrap_or(usize::MAX);
        match ids.iter().find(|id| **id as usize >= limit) {
            Some(&id) => Err(TokenizerError::Vocabulary { path: self.path.clone(), id, vocab_size: limit }),
            None => Ok(ids),
        }
    }

    /// Encodes `text`; returns each token with the bytes of the text that it stands for, which are none for a token that is
    /// inserted before or after the text.
    ///
    /// # Errors
    /// As [`encode`](Self::encode).
    pub fn encode_with_offsets(
        &self,
        text: &str,
        bos: Bos,
    ) -> Result<Vec<(u32, Range<usize>)>, TokenizerError> {
        let found = text.len() as u64;
        if found > self.max_text {
            return Err(self.too_long(found));
        }
        let encoding = call(&self.path, "encode", || self.inner.encode(text, bos == Bos::Auto))?;
        let mut all = Vec::with_capacity(encoding.len() + 1);
        if bos == Bos::Always {
            all.push((self.bos.ok_or_else(|| TokenizerError::NoBos { path: self.path.clone() })?, 0..0));
        }
        all.extend(encoding.get_ids().iter().zip(encoding.get_offsets()).map(|(id, (a, b))| (*id, *a..*b)));
        let limit = self.vocab_size.unwrap_or(usize::MAX);
        match all.iter().find(|(id, _)| *id as usize >= limit) {
            Some(&(id, _)) => {
                Err(TokenizerError::Vocabulary { path: self.path.clone(), id, vocab_size: limit })
            }
            None => Ok(all),
        }
    }

    /// Ids of the added tokens, such as those that begin and end a turn.
    pub fn added(&self) -> BTreeSet<u32> {
        self.inner.get_added_tokens_decoder().into_keys().collect()
    }

    /// Special token of this name.
    pub fn special_id(&self, name: &str) -> Option<u32> {
        let id = self.inner.token_to_id(name)?;
        let added = self.inner.get_added_tokens_decoder();
        added.get(&id).filter(|token| token.special).map(|_| id)
    }

    /// End-of-text token.
    pub fn eos(&self) -> Option<u32> {
        self.inner.token_to_id(self.special.get("eos_token")?)
    }

    /// Number of tokens, the added ones included: all ids are below it unless the file leaves gaps.
    pub fn len(&self) -> usize {
        self.inner.get_vocab_size(true)
    }

    /// True if there is no token.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Decodes `ids`; special tokens have no text. Invalid UTF-8 becomes U+FFFD.
    ///
    /// # Errors
    /// [`TokenizerError::Invalid`] if the library fails.
    pub fn decode(&self, ids: &[u32]) -> Result<String, TokenizerError> {
        call(&self.path, "decode", || self.inner.decode(ids, true))
    }

    /// Decodes `ids` with the names of special tokens in their places.
    ///
    /// # Errors
    /// As [`decode`](Self::decode).
    pub fn decode_with_special(&self, ids: &[u32]) -> Result<String, TokenizerError> {
        call(&self.path, "decode", || self.inner.decode(ids, false))
    }

    /// Creates a decoder for tokens that arrive one by one.
    pub fn stream(&self) -> DecodeStream<'_> {
        DecodeStream::new(self)
    }

    /// Jinja template of a plain conversation, from the model's files.
    pub fn chat_template(&self) -> Option<&str> {
        self.templates.get(ChatTemplates::DEFAULT)
    }

    /// Jinja template of a conversation, with tools the one for them if the model has it, as in transformers.
    pub fn chat_template_for(&self, tools: bool) -> Option<&str> {
        let with_tools = tools.then(|| self.templates.get(ChatTemplates::TOOLS)).flatten();
        with_tools.or_else(|| self.chat_template())
    }

    /// Takes the chat templates in the folder `dir`, such as an adapter's, if it has any.
    ///
    /// # Errors
    /// [`TokenizerError`] if a template or `tokenizer_config.json` there cannot be read.
    pub fn with_templates_of(mut self, dir: &Path) -> Result<Self, TokenizerError> {
        let own = read_json(&dir.join("tokenizer_config.json"))?;
        let templates = ChatTemplates::load(dir, own.as_ref())?;
        if templates.names().next().is_some() {
            self.templates = templates;
        }
        Ok(self)
    }

    /// Takes other chat templates.
    #[must_use]
    pub fn with_templates(self, templates: ChatTemplates) -> Self {
        Tokenizer { templates, ..self }
    }

    /// All chat templates.
    pub fn chat_templates(&self) -> &ChatTemplates {
        &self.templates
    }

    /// Special tokens by their names in templates: `bos_token`, `eos_token` and so on.
    pub fn special_tokens(&self) -> &BTreeMap<String, String> {
        &self.special
    }

    /// Longest text that is encoded in one piece, in bytes: 16 MiB divided by the factor by which the file's steps can
    /// lengthen a text, less where its tokens and steps take more than 250 ns per byte, and 64 KiB if one of its regular
    /// expressions may take quadratic time.
    pub fn max_text(&self) -> u64 {
        self.max_text
    }

    /// Creates the error for a text of `found` bytes, which is longer than [`max_text`](Self::max_text).
    pub fn too_long(&self, found: u64) -> TokenizerError {
        TokenizerError::TextTooLong { path: self.path.clone(), found, allowed: self.max_text }
    }

    /// Returns the first id below `vocabulary` that stands for different tokens in two tokenizers, with both tokens. An
    /// id that only one of them has is padding of the vocabulary and no difference.
    pub fn first_difference(&self, other: &Self, vocabulary: usize) -> Option<(u32, [String; 2])> {
        (0u32..).take(vocabulary).find_map(|id| {
            let both = [self.inner.id_to_token(id)?, other.inner.id_to_token(id)?];
            (both[0] != both[1]).then_some((id, both))
        })
    }

    /// Beginning-of-text token.
    pub fn bos(&self) -> Option<u32> {
        self.bos
    }
}

/// Runs a call into the library; its errors and its panics become [`TokenizerError::Invalid`].
fn call<T>(
    path: &Path,
    operation: &'static str,
    f: impl FnOnce() -> tokenizers::Result<T>,
) -> Result<T, TokenizerError> {
    let invalid = |message: String| {
        // One short line: the message may quote the file.
        let message = message.chars().map(|c| if misleads(c) { ' ' } else { c }).take(200).collect();
        TokenizerError::Invalid { path: path.into(), operation, message }
    };
    guarded(f).map_err(invalid)?.map_err(|error| invalid(error.to_string()))
}

/// Returns the bytes of the JSON file at `path` without white space between its values; 0 if it cannot be read.
fn compact_bytes(path: &Path) -> u64 {
    let Ok(file) = regular::open(path, "a tokenizer.json") else { return 0 };
    let mut file = std::io::BufReader::with_capacity(64 << 10, file.take(MAX_FILE));
    let (mut bytes, mut quoted, mut escaped) = (0, false, false);
    while let Ok(block) = file.fill_buf() {
        if block.is_empty() {
            break;
        }
        for &byte in block {
            bytes += u64::from(quoted || !byte.is_ascii_whitespace());
            quoted ^= byte == b'"' && !escaped;
            escaped = quoted && byte == b'\\' && !escaped;
        }
        let n = block.len();
        file.consume(n);
    }
    bytes
}

fn read_capped(path: &Path) -> Result<Vec<u8>, TokenizerError> {
    regular::read(path, MAX_FILE, "a tokenizer.json").map_err(|error| match error {
        Error::Missing { .. } => TokenizerError::Missing { path: path.into() },
        error => error.into(),
    })
}

/// Loads a checked file, and checks that added tokens have the ids stated in the file. Also returns the longest text
/// that may be encoded.
fn load_checked(path: &Path, file: Value) -> Result<(tokenizers::Tokenizer, u64), TokenizerError> {
    let Checked { json, max_text, added } = check::check(path, file)?;
    let inner = call(path, "load", || tokenizers::Tokenizer::from_bytes(&json))?;
    match added.iter().find(|(token, id)| inner.token_to_id(token) != Some(*id)) {
        None => {
            let longest = longest_normalized(path, &inner)?;
            Ok((inner, limits::max_text(limits::cost_of_added(longest), max_text)))
        }
        Some((token, id)) => Err(TokenizerError::Field {
            path: path.into(),
            field: "added_tokens".into(),
            found: format!("\"{token}\" with another id than {id} once it is loaded"),
            allowed: "the ids of the file".into(),
        }),
    }
}

/// Longest text that the search for added tokens looks for after normalization, in bytes.
fn longest_normalized(path: &Path, inner: &tokenizers::Tokenizer) -> Result<usize, TokenizerError> {
    let Some(normalizer) = inner.get_normalizer() else { return Ok(0) };
    let mut longest = 0;
    for token in inner.get_added_tokens_decoder().into_values().filter(|token| token.normalized) {
        let normalize = || {
            let mut text = NormalizedString::from(token.content.as_str());
            normalizer.normalize(&mut text).map(|()| text.get().len())
        };
        let found = call(path, "load", normalize)?;
        if found > limits::MAX_ADDED {
            return Err(TokenizerError::Field {
                path: path.into(),
                field: "added_tokens".into(),
                found: format!("\"{}\" of {found} bytes after normalization", token.content),
                allowed: format!("at most {} bytes", limits::MAX_ADDED),
            });
        }
        longest = longest.max(found);
    }
    Ok(longest)
}

/// Reads a special token of `tokenizer_config.json`: a string, or an added token with its content.
fn special_text(config: &Value, field: &str) -> Option<String> {
    let token = config.get(field)?;
    let content = token.as_str().or_else(|| token.get("content")?.as_str());
    content.map(str::to_owned)
}

/// Reads the special tokens that `tokenizer_config.json` names.
fn special_tokens(config: &Value) -> BTreeMap<String, String> {
    const NAMES: [&str; 7] =
        ["bos_token", "eos_token", "unk_token", "pad_token", "sep_token", "cls_token", "mask_token"];
    NAMES.into_iter().filter_map(|name| Some((name.to_owned(), special_text(config, name)?))).collect()
}

#[cfg(test)]
#[allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]
mod tests;
