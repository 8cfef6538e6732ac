//! Tokenizers in GGUF metadata: read into a `tokenizer.json`, and written from one.
//!
//! There are four kinds. `gpt2` is byte-level BPE with a list of merges and a named pre-tokenizer. `llama` is
//! SentencePiece BPE, which merges adjacent pieces whose text is a token, highest score first; a `tokenizer.json`
//! states this as merges in that order, one for every way to split a token in two. `gemma4` has the vocabulary of the second
//! kind, with spaces as a character of their own and single bytes as tokens, and a list of merges; newlines are apart from
//! other text. `whitespace` merges the characters of words and drops the white space between them (`src/llama-vocab.cpp` of
//! llama.cpp).

mod export;
mod folder;
mod import;
mod pre_tokenizers;

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

/// Kind of tokenizer, and name of its pre-tokenizer, with merges of the characters of words that white space separates.
const WORDS: &str = "whitespace";

/// Key, after `tokenizer.ggml.`, of the flag that [`WORDS`] are put into lower case.
const LOWERCASE: &str = "normalizer.lowercase";

/// Key with the first difference between the tokenizer of a file and the one that it was made from.
pub const TOKENIZER_NOTE: &str = "mantissa.tokenizer_difference";

/// SentencePiece's character for a space.
const SPACE: &str = "\u{2581}";

#[cfg(test)]
#[allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]
mod tests;
