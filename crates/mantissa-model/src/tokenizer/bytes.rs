//! Bytes of each token of the vocabulary, for constraints on the text.

use std::collections::HashMap;

use serde_json::Value;
use tokenizers::AddedToken;

use super::{Tokenizer, TokenizerError};

/// Contribution of a token to a text, after other tokens.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum TokenText {
    /// These bytes, which may be a part of a character.
    Bytes(Vec<u8>),
    /// No text: a special token of this name.
    Special(String),
    /// No such token: a gap in the ids.
    Missing,
}

/// Step of the decoder, as far as it acts on a token by itself.
enum Step {
    /// Characters stand for bytes (the table of GPT-2).
    ByteLevel,
    /// `<0xHH>` stands for a byte.
    ByteFallback,
    Replace(String, String),
}

/// Texts of the tokens of a vocabulary, one at a time.
pub struct TokenTexts<'t> {
    tokenizer: &'t Tokenizer,
    steps: Vec<Step>,
    added: HashMap<u32, AddedToken>,
}

impl TokenTexts<'_> {
    /// Returns the text of token `id`.
    pub fn text(&self, id: u32) -> TokenText {
        match (self.added.get(&id), self.tokenizer.inner.id_to_token(id)) {
            (Some(token), _) if token.special => TokenText::Special(token.content.clone()),
            (Some(token), _) => TokenText::Bytes(token.content.clone().into_bytes()),
            (None, Some(token)) => TokenText::Bytes(bytes(&self.steps, token)),
            (None, None) => TokenText::Missing,
        }
    }
}

impl Tokenizer {
    /// Prepares the texts of single tokens.
    ///
    /// # Errors
    /// [`TokenizerError::Field`] if the decoder joins tokens in a way that their bytes alone do not tell.
    pub fn texts(&self) -> Result<TokenTexts<'_>, TokenizerError> {
        let added = self.inner.get_added_tokens_decoder().into_iter().collect();
        Ok(TokenTexts { tokenizer: self, steps: self.decoder_steps()?, added })
    }

    /// Returns the texts of the tokens below `vocabulary`, by id.
    ///
    /// # Errors
    /// As [`Self::texts`].
    pub fn token_texts(&self, vocabulary: usize) -> Result<Vec<TokenText>, TokenizerError> {
        let texts = self.texts()?;
        Ok((0..u32::try_from(vocabulary).unwrap_or(u32::MAX)).map(|id| texts.text(id)).collect())
    }

    fn decoder_steps(&self) -> Result<Vec<Step>, TokenizerError> {
        let decoder = serde_json::to_value(self.inner.get_decoder()).unwrap_or_default();
        let list = match decoder["type"].as_str() {
            Some("Sequence") => decoder["decoders"].as_array().cloned().unwrap_or_default(),
            _ => vec![decoder],
        };
        let mut steps = Vec::new();
        for step in &list {
            match step["type"].as_str() {
                Some("ByteLevel") => steps.push(Step::ByteLevel),
                Some("ByteFallback") => steps.push(Step::ByteFallback),
                Some("Replace") => match (step["pattern"]["String"].as_str(), step["content"].as_str()) {
                    (Some(from), Some(to)) => steps.push(Step::Replace(from.into(), to.into())),
                    _ => return Err(self.unsupported(step)),
                },
                Some("Metaspace") => {
                    let space = step["replacement"].as_str().unwrap_or("\u{2581}");
                    steps.push(Step::Replace(space.into(), " ".into()));
                }
                // They act on the whole text, or on its beginning.
                Some("Fuse" | "Strip") => {}
                _ => return Err(self.unsupported(step)),
            }
        }
        Ok(steps)
    }

    fn unsupported(&self, step: &Value) -> TokenizerError {
        TokenizerError::Field {
            path: self.path.clone(),
            field: "decoder".into(),
            found: step["type"].as_str().unwrap_or("none").to_owned(),
            allowed: "ByteLevel, ByteFallback, Metaspace or Replace, for constraints on the text".into(),
        }
    }
}

/// Bytes of a token of the vocabulary.
fn bytes(steps: &[Step], mut token: String) -> Vec<u8> {
    for step in steps {
        match step {
            Step::ByteLevel => return token.chars().flat_map(byte_of).collect(),
            Step::ByteFallback => {
                let hex = token.strip_prefix("<0x").and_then(|rest| rest.strip_suffix('>'));
                let byte = hex.filter(|hex| hex.len() == 2).and_then(|hex| u8::from_str_radix(hex, 16).ok());
                if let Some(byte) = byte {
                    return vec![byte];
                }
            }
            Step::Replace(from, to) => token = token.replace(from.as_str(), to),
        }
    }
    token.into_bytes()
}

/// Bytes of a character of a byte-level vocabulary: printable ones of Latin-1 stand for themselves, the others follow
/// from U+0100 on. A character outside the table stands for its UTF-8.
fn byte_of(c: char) -> Vec<u8> {
    let printable = |code: u32| matches!(code, 0x21..=0x7e | 0xa1..=0xac | 0xae..=0xff);
    let code = u32::from(c);
    if code < 0x100 && printable(code) {
        return vec![code as u8];
    }
    let byte =
        (0..=255u8).filter(|byte| !printable(u32::from(*byte))).zip(0x100..).find(|(_, at)| *at == code);
    byte.map_or_else(|| c.to_string().into_bytes(), |(byte, _)| vec![byte])
}

#[cfg(test)]
#[allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]
mod tests {
    use super::*;

    #[test]
    fn bytes_of_tokens_follow_the_decoder() {
        let byte_level = |token: &str| bytes(&[Step::ByteLevel], token.into());
        assert_eq!(byte_level("Ġab"), b" ab");
        assert_eq!(byte_level("ĊĀ"), [b'\n', 0]);
        assert_eq!(byte_level("Ã©"), "é".as_bytes());
        assert_eq!(byte_level("Ń"), [0xad]);
        let steps = [Step::Replace("\u{2581}".into(), " ".into()), Step::ByteFallback];
        assert_eq!(bytes(&steps, "\u{2581}the".into()), b" the");
        assert_eq!(bytes(&steps, "<0xE2>".into()), [0xe2]);
        assert_eq!(bytes(&steps, "<0xE2>x".into()), b"<0xE2>x");
    }

    /// Joined bytes of tokens are their decoded text.
    #[test]
    fn texts_of_tokens_join_to_the_text() {
        let tiny =
            std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/data/tiny/llama2-gqa-tied");
        let tokenizer = Tokenizer::load(&tiny).unwrap();
        let texts = tokenizer.token_texts(tokenizer.len() + 3).unwrap();
        assert_eq!(texts.last(), Some(&TokenText::Missing));
        let text = "{\"name\": \"Zoë\", \"n\": [1, 2]}\n\tté";
        let ids = tokenizer.encode(text, super::super::Bos::Never).unwrap();
        let joined: Vec<u8> = ids
            .iter()
            .flat_map(|id| match &texts[*id as usize] {
                TokenText::Bytes(bytes) => bytes.clone(),
                _ => panic!(),
            })
            .collect();
        assert_eq!(String::from_utf8(joined).unwrap(), tokenizer.decode(&ids).unwrap());
    }
}
