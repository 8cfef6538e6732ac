//! Escapes misleading characters in text for readers: names of files, tensors and clients can hold commands for the
//! terminal, marks that turn the direction of what follows, or a megabyte.

use std::io::{self, Write};
use std::path::Path;

use mantissa_store::shown::misleads;

/// Longest line, in bytes.
const MAX_LINE: usize = 4000;

/// Returns `text` as one line: its lines joined, misleading characters escaped, cut to `MAX_LINE`.
pub fn line(text: &str) -> String {
    let lines = text.split(['\n', '\r']).map(str::trim).filter(|line| !line.is_empty());
    let mut out = Vec::new();
    let mut writer = Escaping::new(&mut out);
    for (i, line) in lines.enumerate() {
        // A write to memory cannot fail.
        let _ = writer.put(if i > 0 { " " } else { "" }).and_then(|()| writer.put(line));
    }
    String::from_utf8(out).unwrap_or_default()
}

/// Returns a path, or another word of a command, quoted for a POSIX shell if it needs that.
pub fn quoted(path: &Path) -> String {
    let text = path.display().to_string();
    let plain = |c: char| c.is_alphanumeric() || "/._-+=@%:,".contains(c);
    if !text.is_empty() && text.chars().all(plain) {
        text
    } else {
        format!("'{}'", text.replace('\'', "'\\''"))
    }
}

/// Writer that escapes misleading characters except line breaks, and cuts lines to `MAX_LINE`.
pub struct Escaping<W> {
    out: W,
    /// Start of a character of which more bytes follow.
    begun: Vec<u8>,
    /// Bytes of the current line.
    length: usize,
}

impl<W: Write> Escaping<W> {
    /// Creates a writer to `out`.
    pub fn new(out: W) -> Self {
        Escaping { out, begun: Vec::new(), length: 0 }
    }

    fn put(&mut self, text: &str) -> io::Result<()> {
        for c in text.chars() {
            if c == '\n' {
                self.length = 0;
                self.out.write_all(b"\n")?;
                continue;
            }
            if self.length > MAX_LINE {
                continue;
            }
            let mut held = [0; 4];
            let escaped;
            let shown = if misleads(c) {
                escaped = c.escape_unicode().to_string();
                &escaped
            } else {
                &*c.encode_utf8(&mut held)
            };
            self.length += shown.len();
            let shown = if self.length > MAX_LINE { "…" } else { shown };
            self.out.write_all(shown.as_bytes())?;
        }
        Ok(())
    }
}

impl<W: Write> Write for Escaping<W> {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        let mut text = std::mem::take(&mut self.begun);
        text.extend_from_slice(bytes);
        let mut rest = text.as_slice();
        loop {
            match std::str::from_utf8(rest) {
                Ok(text) => {
                    self.put(text)?;
                    return Ok(bytes.len());
                }
                Err(error) => {
                    let (valid, after) = rest.split_at(error.valid_up_to());
                    self.put(std::str::from_utf8(valid).unwrap_or_default())?;
                    let Some(invalid) = error.error_len() else {
                        self.begun = after.to_owned();
                        return Ok(bytes.len());
                    };
                    self.put("\u{fffd}")?;
                    rest = &after[invalid..];
                }
            }
        }
    }

    fn flush(&mut self) -> io::Result<()> {
        self.out.flush()
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    #[test]
    fn lines_are_escaped_joined_and_cut() {
        assert_eq!(line("a\r\n  b\u{1b}[2J\u{202e}c\u{e0041}"), "a b\\u{1b}[2J\\u{202e}c\\u{e0041}");
        let long = line(&"ü".repeat(100_000));
        assert!(long.len() <= MAX_LINE + 3 && long.ends_with("ü…"), "{}", long.len());
        let escapes = line(&"\u{7}".repeat(100_000));
        assert!(escapes.len() <= MAX_LINE + 3 && escapes.ends_with('…'), "{}", escapes.len());
    }

    #[test]
    fn characters_may_arrive_in_parts() {
        let text = "ü日👍\n\u{202e}\u{9b}x";
        let mut out = Vec::new();
        let mut writer = Escaping::new(&mut out);
        text.as_bytes().iter().for_each(|byte| writer.write_all(&[*byte]).unwrap());
        writer.write_all(b"\xff!").unwrap();
        assert_eq!(String::from_utf8(out).unwrap(), "ü日👍\n\\u{202e}\\u{9b}x\u{fffd}!");
    }
}
