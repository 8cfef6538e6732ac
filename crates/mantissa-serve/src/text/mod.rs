//! Text of generated tokens: pieces of complete UTF-8, cut at stop strings.

mod generation;
mod stops;

use mantissa_model::{TokenText, TokenTexts, Tokenizer, TokenizerError};

pub(crate) use self::generation::{Delta, Finish, Generation, Times, TokenInfo};
pub(crate) use self::stops::Stops;

/// Text of one token as it stands within a text.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Piece {
    /// UTF-8, or a part of a character. A special token has its name.
    pub(crate) bytes: Vec<u8>,
}

impl Piece {
    /// Returns the text; `None` for a part of a character.
    pub(crate) fn text(&self) -> Option<&str> {
        std::str::from_utf8(&self.bytes).ok()
    }

    /// Returns the text, with `\\xHH` for each byte of a part of a character.
    pub(crate) fn shown(&self) -> String {
        match self.text() {
            Some(text) => text.to_owned(),
            None => self.bytes.iter().map(|byte| format!("\\x{byte:02x}")).collect(),
        }
    }
}

/// Texts of single tokens.
pub(crate) struct Pieces<'t> {
    tokenizer: &'t Tokenizer,
    /// `None` if the decoder joins tokens in a way that their bytes alone do not tell.
    texts: Option<TokenTexts<'t>>,
}

impl<'t> Pieces<'t> {
    pub(crate) fn new(tokenizer: &'t Tokenizer) -> Self {
        Pieces { tokenizer, texts: tokenizer.texts().ok() }
    }

    /// Returns the text of a token.
    pub(crate) fn piece(&self, token: u32) -> Result<Piece, TokenizerError> {
        let bytes = match self.texts.as_ref().map(|texts| texts.text(token)) {
            Some(TokenText::Bytes(bytes)) => bytes,
            Some(TokenText::Special(name)) => name.into_bytes(),
            Some(TokenText::Missing) => Vec::new(),
            None => {
                // Some decoders drop the space that begins a text.
                let twice = self.tokenizer.decode_with_special(&[token, token])?;
                let once = self.tokenizer.decode_with_special(&[token])?;
                let rest = twice.get(once.len()..).filter(|rest| rest.len() >= once.len());
                rest.unwrap_or(&once).to_owned().into_bytes()
            }
        };
        Ok(Piece { bytes })
    }
}

impl std::fmt::Debug for Pieces<'_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Pieces").finish_non_exhaustive()
    }
}
