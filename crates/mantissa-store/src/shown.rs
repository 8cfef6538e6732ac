//! Text of others in messages: from files, and from clients.

use std::fmt::{self, Write as _};
use std::path::Path;

/// Longest text from a file in a message, in characters.
const MAX_SHOWN: usize = 200;

/// Text from a file: misleading characters escaped, cut to 200 characters.
#[derive(Clone, Copy, Debug)]
pub struct Shown<'a>(pub &'a str);

impl fmt::Display for Shown<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (i, c) in self.0.chars().enumerate() {
            if i == MAX_SHOWN {
                return f.write_str("…");
            }
            put(f, c)?;
        }
        Ok(())
    }
}

/// A path in a message, escaped; not cut, since the caller chose it.
pub(crate) struct ShownPath<'a>(pub(crate) &'a Path);

impl fmt::Display for ShownPath<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.to_string_lossy().chars().try_for_each(|c| put(f, c))
    }
}

/// Writes a character, escaped as `\u{202e}` if it [`misleads`].
fn put(f: &mut fmt::Formatter<'_>, c: char) -> fmt::Result {
    if misleads(c) { write!(f, "{}", c.escape_unicode()) } else { f.write_char(c) }
}

/// True for characters that act on a terminal, break a line, change the direction of text or are not seen: the Unicode
/// categories Cc, Cf, Zl and Zp, and the block of tags.
pub fn misleads(c: char) -> bool {
    c.is_control()
        || matches!(c,
            '\u{ad}' | '\u{600}'..='\u{605}' | '\u{61c}' | '\u{6dd}' | '\u{70f}' | '\u{890}' | '\u{891}' | '\u{8e2}'
            | '\u{180e}' | '\u{200b}'..='\u{200f}' | '\u{2028}'..='\u{202e}' | '\u{2060}'..='\u{206f}' | '\u{feff}'
            | '\u{fff9}'..='\u{fffb}' | '\u{110bd}' | '\u{110cd}' | '\u{13430}'..='\u{1343f}'
            | '\u{1bca0}'..='\u{1bca3}' | '\u{1d173}'..='\u{1d17a}' | '\u{e0000}'..='\u{e007f}')
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn shown_escapes_and_cuts() {
        assert_eq!(Shown("a\nb\u{1b}[31m\u{202e}").to_string(), "a\\u{a}b\\u{1b}[31m\\u{202e}");
        let long = "x".repeat(1 << 20);
        assert_eq!(Shown(&long).to_string().chars().count(), 201);
        for c in ['\u{7f}', '\u{9b}', '\u{200b}', '\u{200d}', '\u{2028}', '\u{2066}', '\u{feff}', '\u{e0041}']
        {
            assert_eq!(Shown(&c.to_string()).to_string(), c.escape_unicode().to_string());
        }
        let plain = "Grüße, 日本語, ▁Ġ<|im_end|> 👍";
        assert_eq!(Shown(plain).to_string(), plain);
    }
}
