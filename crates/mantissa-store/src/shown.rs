//! Text of others in messages.

use std::fmt;
use std::path::Path;

/// Text from a file: control and bidirectional characters escaped, cut to 200 characters.
#[derive(Clone, Copy, Debug)]
pub struct Shown<'a>(pub &'a str);

impl fmt::Display for Shown<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (i, c) in self.0.chars().enumerate() {
            if i == 200 {
                return f.write_str("…");
            }
            if misleads(c) { write!(f, "{}", c.escape_unicode())? } else { fmt::Write::write_char(f, c)? }
        }
        Ok(())
    }
}

/// Characters that can break the line or reorder what a terminal shows.
fn misleads(c: char) -> bool {
    c.is_control()
        || matches!(c, '\u{200e}' | '\u{200f}' | '\u{2028}'..='\u{202e}' | '\u{2066}'..='\u{2069}' | '\u{feff}')
}

/// A path in a message, escaped; not cut, since the caller chose it.
pub(crate) struct ShownPath<'a>(pub(crate) &'a Path);

impl fmt::Display for ShownPath<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for c in self.0.to_string_lossy().chars() {
            if misleads(c) { write!(f, "{}", c.escape_unicode())? } else { fmt::Write::write_char(f, c)? }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn shown_escapes_and_cuts() {
        assert_eq!(Shown("a\nb\u{1b}[31m\u{202e}").to_string(), "a\\u{a}b\\u{1b}[31m\\u{202e}");
        let long = "x".repeat(1 << 20);
        assert_eq!(Shown(&long).to_string().chars().count(), 201);
    }
}
