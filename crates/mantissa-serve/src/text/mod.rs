//! Text of generated tokens: pieces of complete UTF-8, cut at stop strings.

mod generation;
mod stops;

use mantissa_model::{Tokenizer, TokenizerError};

pub(crate) use self::generation::{Delta, Finish, Generation, TokenInfo};
pub(crate) use self::stops::Stops;

/// Returns the text of one token as it stands within a text. The text of a special token is its name.
pub(crate) fn piece(tokenizer: &Tokenizer, token: u32) -> Result<String, TokenizerError> {
    // Some tokenizers drop the space that begins a text.
    let twice = tokenizer.decode_with_special(&[token, token])?;
    let once = tokenizer.decode_with_special(&[token])?;
    Ok(twice.get(once.len()..).filter(|rest| rest.len() >= once.len()).map_or(once.clone(), str::to_owned))
}
