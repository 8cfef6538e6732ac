//! Text of tokens that arrive one by one, in pieces of complete UTF-8.

use super::{Tokenizer, TokenizerError};

/// Maximum number of tokens held back for a continuation. A character has at most four bytes and so four tokens;
/// longer runs that end in U+FFFD are not UTF-8 and are returned unchanged.
const MAX_HELD: usize = 8;

/// Decodes a growing list of tokens.
///
/// A token's text may depend on the one before it (a leading space) and be a part of a character. So the last tokens
/// are decoded twice, without and with the new one; the difference is the new text.
#[derive(Clone, Debug)]
pub struct DecodeStream<'a> {
    tokenizer: &'a Tokenizer,
    /// Tokens decoded together: some already returned as text, then those held back.
    ids: Vec<u32>,
    given: usize,
    /// Text of `ids[..given]`.
    text: String,
}

impl<'a> DecodeStream<'a> {
    pub(super) fn new(tokenizer: &'a Tokenizer) -> Self {
        DecodeStream { tokenizer, ids: Vec::new(), given: 0, text: String::new() }
    }

    /// Takes tokens that precede the text but are not returned: the prompt.
    ///
    /// # Errors
    /// As [`Tokenizer::decode`].
    pub fn skip(&mut self, ids: &[u32]) -> Result<(), TokenizerError> {
        // A few are enough context for the first new token.
        self.ids.extend(&ids[ids.len().saturating_sub(MAX_HELD)..]);
        self.given = self.ids.len();
        self.text = self.tokenizer.decode(&self.ids)?;
        Ok(())
    }

    /// Adds the next token and returns the text that it completes, which may be empty.
    ///
    /// # Errors
    /// As [`Tokenizer::decode`].
    pub fn push(&mut self, id: u32) -> Result<String, TokenizerError> {
        self.ids.push(id);
        let text = self.tokenizer.decode(&self.ids)?;
        let held = self.ids.len() - self.given;
        if text.ends_with('\u{fffd}') && held < MAX_HELD {
            return Ok(String::new());
        }
        let new = self.new_part(&text);
        self.ids.drain(..self.given);
        self.given = self.ids.len();
        self.text = self.tokenizer.decode(&self.ids)?;
        Ok(new)
    }

    /// Returns the text of the tokens still held back, complete or not.
    ///
    /// # Errors
    /// As [`Tokenizer::decode`].
    pub fn finish(self) -> Result<String, TokenizerError> {
        let text = self.tokenizer.decode(&self.ids)?;
        Ok(self.new_part(&text))
    }

    fn new_part(&self, text: &str) -> String {
        text.get(self.text.len()..).unwrap_or_default().to_owned()
    }
}
