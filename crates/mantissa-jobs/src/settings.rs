//! Small text files that a job reads whole.

use std::path::Path;

use mantissa_store::{TextFile, regular};

use crate::error::{BadInput, Result};
use crate::text::bytes;

/// Maximum size of a settings file in bytes.
const MAX_SETTINGS: u64 = 16 << 20;

/// Reads a file of settings, which must be a regular file.
///
/// # Errors
/// A missing file, one of another type, one that is not UTF-8, or one that is too large.
pub fn read_settings(path: &Path) -> Result<String> {
    Ok(regular::read_text(path, MAX_SETTINGS, "a file of settings")?)
}

/// Reads a small text, from a file or a pipe.
///
/// # Errors
/// A missing file, one that is not UTF-8, or one that is too large.
pub fn read_text(path: &Path) -> Result<String> {
    let text = TextFile::open(path)?.whole(MAX_SETTINGS)?;
    text.ok_or_else(|| {
        let most = bytes(MAX_SETTINGS);
        BadInput::new(path.display().to_string(), format!("more than {most}"), format!("at most {most}"))
            .into()
    })
}
