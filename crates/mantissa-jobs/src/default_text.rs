//! Built-in text for calibration and measurement: English prose, documentation, code, dialogue and other languages.
//!
//! Origin and licences: `crates/mantissa-jobs/calibration/README.md`.

use std::path::Path;

use mantissa_eval::{Sequence, TextOptions, sequences_from_text};
use mantissa_model::{Bos, Tokenizer};
use mantissa_quant::Evaluation;
use mantissa_store::FileDigest;
use mantissa_store::convention::ModelFiles;

use crate::error::Result;
use crate::host::Host;
use crate::model::{self, load_tokenizer};

/// Name on the command line and in reports.
pub const NAME: &str = "default";

/// Name of the held-out part in reports.
pub const HELD_OUT_NAME: &str = "default (held out)";

/// Tokens per window.
pub const WINDOW: usize = 512;

/// Text to calibrate on.
const CALIBRATION: &str = include_str!("../calibration/default.txt");

/// Text to measure on: pieces of the same kinds that [`CALIBRATION`] does not have.
const HELD_OUT: &str = include_str!("../calibration/held-out.txt");

/// True if `path` names the built-in text.
pub fn is(path: &Path) -> bool {
    path.as_os_str() == NAME
}

/// Returns the name of a text for readers: a file's own, or a description of the built-in text.
pub fn shown(name: &str) -> &str {
    match name {
        NAME => "the built-in text",
        HELD_OUT_NAME => "the built-in text (held-out part)",
        name => name,
    }
}

/// Returns the SHA-256 of the calibration text in hexadecimal.
pub fn sha256() -> String {
    FileDigest::of(CALIBRATION.as_bytes()).hex()
}

/// Returns the windows to calibrate on.
///
/// # Errors
/// The tokenizer fails.
pub fn calibration(tokenizer: &Tokenizer, options: &TextOptions) -> Result<Vec<Sequence>> {
    let options = TextOptions { split: None, docs: None, stride: None, ..options.clone() };
    Ok(sequences_from_text(NAME, CALIBRATION, tokenizer, &options)?)
}

/// Returns the held-out windows to measure on.
///
/// # Errors
/// No tokenizer, or it fails.
pub fn held_out(source: &ModelFiles, host: &Host) -> Result<Vec<Sequence>> {
    let tokenizer = load_tokenizer(source, host)?;
    let window = WINDOW.min(model::context_length(source)?);
    let options = TextOptions { split: None, docs: None, context: window, stride: None, bos: Bos::Auto };
    held_out_with(&tokenizer, &options)
}

/// Makes an evaluation on the held-out windows; `max_kl` is its limit.
///
/// # Errors
/// No tokenizer; windows that the model cannot run.
pub fn evaluation(source: &ModelFiles, max_kl: Option<f64>, host: &Host) -> Result<Evaluation> {
    let windows = host.reading_texts(|| held_out(source, host))?;
    Ok(Evaluation::new(source, HELD_OUT_NAME, windows, max_kl)?)
}

/// Returns the held-out windows that `options` cut.
///
/// # Errors
/// The tokenizer fails; the options leave no window.
pub fn held_out_with(tokenizer: &Tokenizer, options: &TextOptions) -> Result<Vec<Sequence>> {
    Ok(sequences_from_text(HELD_OUT_NAME, HELD_OUT, tokenizer, options)?)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_texts_are_small_and_share_no_piece() {
        assert!(CALIBRATION.len() + HELD_OUT.len() < 250_000);
        let shared = HELD_OUT.split("\n\n").filter(|piece| piece.len() > 200 && CALIBRATION.contains(*piece));
        assert_eq!(shared.count(), 0);
    }

    #[test]
    fn the_readme_states_the_hashes() {
        let readme = include_str!("../calibration/README.md");
        assert!(readme.contains(&sha256()) && readme.contains(&FileDigest::of(HELD_OUT.as_bytes()).hex()));
    }
}
