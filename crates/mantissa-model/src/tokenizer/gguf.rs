//! Tokenizers in GGUF metadata: read into a `tokenizer.json`, and written from one.
//!
//! There are three kinds. `gpt2` is byte-level BPE with a list of merges and a named pre-tokenizer. `llama` is
//! SentencePiece BPE, which merges adjacent pieces whose text is a token, highest score first; a `tokenizer.json`
//! states this as merges in that order, one for every way to split a token in two. `gemma4` has the vocabulary of the second
//! kind, with spaces as a character of their own and single bytes as tokens, and a list of merges; newlines are apart from
//! other text (`src/llama-vocab.cpp` of llama.cpp).

mod export;
mod folder;
mod import;

pub use export::{Exported, export};
pub use folder::folder_files;
pub(super) use import::{special_tokens, tokenizer_json};

/// Types of tokens (`tokenizer.ggml.token_type`).
mod token_type {
    pub(super) const NORMAL: i32 = 1;
    pub(super) const UNKNOWN: i32 = 2;
    pub(super) const CONTROL: i32 = 3;
    pub(super) const USER_DEFINED: i32 = 4;
    pub(super) const UNUSED: i32 = 5;
    pub(super) const BYTE: i32 = 6;
}

/// Kind of tokenizer with merges over text in which spaces are a character.
const MERGED: &str = "gemma4";

/// SentencePiece's character for a space.
const SPACE: &str = "\u{2581}";

/// A pre-tokenizer by its name in GGUF.
struct PreTokenizer {
    name: &'static str,
    /// Other names of the same pre-tokenizer.
    aliases: &'static [&'static str],
    /// Regular expression that splits the text; `None` for the one built into byte-level pre-tokenization.
    regex: Option<&'static str>,
    /// True if a piece that is a token is not split by merges.
    ignore_merges: bool,
    /// True if a text begins with BOS where the file does not state it.
    add_bos: bool,
    /// True if text is normalized to NFC first.
    nfc: bool,
}

/// Known pre-tokenizers. Expressions are those of the models' own `tokenizer.json`.
const PRE_TOKENIZERS: [PreTokenizer; 3] = [
    PreTokenizer {
        name: "gpt-2",
        aliases: &["gpt2"],
        regex: None,
        ignore_merges: false,
        add_bos: false,
        nfc: false,
    },
    PreTokenizer {
        name: "llama-bpe",
        aliases: &["llama3", "llama-v3"],
        regex: Some(
            r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
        ),
        ignore_merges: true,
        add_bos: true,
        nfc: false,
    },
    PreTokenizer {
        name: "qwen2",
        aliases: &[],
        regex: Some(
            r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
        ),
        ignore_merges: false,
        add_bos: false,
        nfc: true,
    },
];

#[cfg(test)]
#[allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]
mod tests;
