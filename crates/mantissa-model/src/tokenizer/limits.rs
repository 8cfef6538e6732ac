//! Limits on what a `tokenizer.json` can make a text cost.
//!
//! The library looks up tokens at every place of a text: a unigram model all that begin there, WordPiece every part of a
//! word. It also copies affixes and unknown tokens once per character or piece. Ordinary files need microseconds per
//! byte; a file made for it needs seconds. So the lengths are limited, and the rest is a cost in nanoseconds per byte, from
//! which the longest text follows ([`max_text`]).

use super::fault::{Fault, fault};

/// Longest token, in bytes. The longest of public models are runs of spaces of some hundred.
pub(super) const MAX_TOKEN: usize = 8 << 10;

/// Longest text that is copied for every character or piece: affixes, unknown tokens, prefixes of a text. Those of public
/// models have up to 13 bytes.
pub(super) const MAX_AFFIX: usize = 64;

/// Longest added token, also after normalization. A search looks that far ahead at every place of a text.
pub(super) const MAX_ADDED: usize = 1 << 10;

/// Bytes that normalization may make of all added tokens at loading.
pub(super) const MAX_NORMALIZED_TOKENS: u64 = 64 << 20;

/// Nodes of the trie of a unigram vocabulary, of which each takes about 250 bytes. Public vocabularies of a million tokens
/// have 4 million.
const MAX_NODES: usize = 8 << 20;

/// Time that a text may take, in nanoseconds on one core.
const MAX_TIME: u64 = 4_000_000_000;

/// Cost that the longest texts may have.
const ORDINARY: u64 = 250;

/// Largest cost per byte, at which texts of 64 KiB are accepted.
const MAX_COST: u64 = MAX_TIME / (64 << 10);

/// Checks the length of a text that is copied for every character or piece.
pub(super) fn affix(field: &str, text: Option<&str>) -> Result<(), Fault> {
    at_most(field, "bytes", text.map_or(0, str::len), MAX_AFFIX)
}

/// Checks a length in `unit`.
pub(super) fn at_most(field: &str, unit: &str, found: usize, most: usize) -> Result<(), Fault> {
    if found <= most {
        return Ok(());
    }
    Err(fault(field, format!("{found} {unit}"), format!("at most {most} {unit}")))
}

/// Longest text for a cost in nanoseconds per byte, at most `longest` bytes.
pub(super) fn max_text(cost: u64, longest: u64) -> u64 {
    if cost <= ORDINARY { longest } else { longest.min(MAX_TIME / cost) }
}

/// Cost of the steps before the model, beyond the few of ordinary files.
pub(super) fn cost_of_steps(steps: usize) -> u64 {
    90 * steps.saturating_sub(3) as u64
}

/// Cost of a search for added tokens of up to `longest` bytes.
pub(super) fn cost_of_added(longest: usize) -> u64 {
    2 * longest as u64
}

/// Cost of WordPiece for words of up to `word` characters: at each of them, every longer part of the word is copied,
/// hashed and looked up.
pub(super) fn cost_of_word_pieces(word: u64) -> u64 {
    word * (30 + word / 4)
}

/// Cost of a unigram model: at the worst place of a text all bytes of the longest token are followed, and each token
/// that begins there is copied and hashed.
pub(super) fn cost_of_unigram(tokens: impl Iterator<Item = impl AsRef<str>>) -> Result<u64, Fault> {
    const FIELD: &str = "model.vocab";
    let mut sorted: Vec<_> = tokens.collect();
    sorted.sort_unstable_by(|a, b| a.as_ref().cmp(b.as_ref()));
    // The tokens that the current one begins with, each with the cost of all up to it.
    let mut begun: Vec<(&str, u64)> = Vec::new();
    let (mut nodes, mut before, mut worst) = (0, "", 0);
    for token in sorted.iter().map(AsRef::as_ref) {
        let shared = before.bytes().zip(token.bytes()).take_while(|(a, b)| a == b).count();
        nodes += token.len() - shared;
        before = token;
        while begun.last().is_some_and(|(start, _)| !token.starts_with(start)) {
            begun.pop();
        }
        let copies = begun.last().map_or(0, |(_, cost)| *cost) + 100 + 2 * token.len() as u64;
        begun.push((token, copies));
        let cost = copies + 15 * token.len() as u64;
        if cost > MAX_COST {
            let bytes: usize = begun.iter().map(|(start, _)| start.len()).sum();
            let found = format!("{} tokens of {bytes} bytes that begin \"{token}\"", begun.len());
            return Err(fault(
                FIELD,
                found,
                format!("tokens that take at most {MAX_COST} ns per byte of a text"),
            ));
        }
        worst = worst.max(cost);
    }
    at_most(FIELD, "different beginnings of tokens", nodes, MAX_NODES)?;
    Ok(worst)
}
