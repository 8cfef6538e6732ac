//! The vocabulary as the parser sees it.

use std::sync::Arc;

use llguidance::toktrie::{ApproximateTokEnv, TokEnv, TokRxInfo, TokTrie};
use mantissa_model::TokenText;

/// Makes the trie of a vocabulary. Tokens without text are never allowed, unless a grammar names them. The end of the
/// text is a token of its own after the last: the runtime knows the model's end tokens.
pub(super) fn env(texts: &[TokenText]) -> TokEnv {
    let mut words: Vec<Vec<u8>> = texts.iter().map(word).collect();
    words.push(special("<|end|>"));
    let end = (words.len() - 1) as u32;
    let trie = TokTrie::from(&TokRxInfo::new(words.len() as u32, end), &words);
    Arc::new(ApproximateTokEnv::new(trie))
}

fn word(text: &TokenText) -> Vec<u8> {
    match text {
        TokenText::Bytes(bytes) => bytes.clone(),
        TokenText::Special(name) => special(name),
        TokenText::Missing => Vec::new(),
    }
}

fn special(name: &str) -> Vec<u8> {
    let mut word = vec![TokTrie::SPECIAL_TOKEN_MARKER];
    word.extend_from_slice(name.as_bytes());
    word
}
