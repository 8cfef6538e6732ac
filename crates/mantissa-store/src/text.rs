//! Text files of any length, read a part at a time: documents between separators, lines, or one text up to a limit.
//!
//! Only the current part is in memory, and only up to the caller's limit, so an endless line or pipe cannot exhaust
//! it. Devices are refused before they are read.

use std::fs::{File, Metadata};
use std::io::Read;
use std::os::unix::fs::FileTypeExt;
use std::path::{Path, PathBuf};

use crate::error::{Error, Result};
use crate::regular;

/// UTF-8's byte order mark, which Windows programs write at the beginning of a text. It is no part of the text.
const BOM: &[u8] = b"\xef\xbb\xbf";

/// Bytes read at a time.
const PIECE: usize = 64 << 10;

/// A part of a text.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum TextPart<'a> {
    /// Text before a separator or the end.
    Text(&'a str),
    /// Nothing is left.
    End,
    /// The part exceeds its limit.
    TooLong,
}

/// Text file or pipe, and its current part.
#[derive(Debug)]
pub struct TextFile {
    path: PathBuf,
    input: File,
    size: Option<u64>,
    /// Start of the text that was read and not returned yet.
    buffer: Vec<u8>,
    start: usize,
    /// Place of `start` in the file.
    offset: u64,
    ended: bool,
    finished: bool,
    /// True once the beginning was searched for a byte order mark.
    begun: bool,
}

impl TextFile {
    /// Opens a regular file or a pipe.
    ///
    /// # Errors
    /// [`Error::Missing`]; [`Error::WrongKind`] for a folder, a device or a socket; [`Error::Io`].
    pub fn open(path: &Path) -> Result<Self> {
        let failed = |error| Error::opening(path, "a UTF-8 text", "read text", error);
        // A pipe that the user names is waited for; anything else must be a regular file when it is open.
        let is_pipe = |found: &Metadata| found.file_type().is_fifo();
        let (input, kind) = if std::fs::metadata(path).is_ok_and(|found| is_pipe(&found)) {
            let input = File::open(path).map_err(failed)?;
            let kind = input.metadata().map_err(failed)?;
            (input, kind)
        } else {
            regular::open_with_metadata(path, "a UTF-8 text")?
        };
        if let Some(found) = regular::found(&kind).filter(|_| !is_pipe(&kind)) {
            return Err(Error::WrongKind { path: path.to_owned(), found, expected: "a UTF-8 text" });
        }
        let size = kind.is_file().then_some(kind.len());
        let (path, buffer) = (path.to_owned(), Vec::new());
        Ok(TextFile {
            path,
            input,
            size,
            buffer,
            start: 0,
            offset: 0,
            ended: false,
            finished: false,
            begun: false,
        })
    }

    /// The file.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Bytes of a regular file.
    pub fn size(&self) -> Option<u64> {
        self.size
    }

    /// Reads the whole text; `None` if it has more than `most` bytes.
    ///
    /// # Errors
    /// [`Error::Field`] for a text that is not UTF-8, with the byte; [`Error::Io`].
    pub fn whole(mut self, most: u64) -> Result<Option<String>> {
        if self.size.is_some_and(|size| size > most) {
            return Ok(None);
        }
        self.buffer.reserve_exact(usize::try_from(self.size.unwrap_or(0)).unwrap_or(0) + 1);
        // One byte more shows that there is more.
        let read = self.input.by_ref().take(most.saturating_add(1)).read_to_end(&mut self.buffer);
        read.map_err(|error| Error::io(&self.path, "read text", error))?;
        if self.buffer.len() as u64 > most {
            return Ok(None);
        }
        if self.buffer.starts_with(BOM) {
            self.buffer.drain(..BOM.len());
        }
        let path = self.path;
        let text = String::from_utf8(self.buffer);
        text.map(Some).map_err(|error| Error::not_utf8(&path, error.utf8_error().valid_up_to() as u64))
    }

    /// Reads the next part before a `separator` or the end; parts are divided as by [`str::split`].
    ///
    /// # Errors
    /// [`Error::Field`] for a part that is not UTF-8, with the byte, and for an empty separator; [`Error::Io`].
    pub fn part(&mut self, separator: &str, most: u64) -> Result<TextPart<'_>> {
        if separator.is_empty() {
            let hint = "give the text between two documents, such as '<|endoftext|>'";
            return Err(Error::field(&self.path, "separator", "nothing", "one character or more", hint));
        }
        if self.finished {
            return Ok(TextPart::End);
        }
        let separator = separator.as_bytes();
        let mut searched = self.start;
        let (end, next) = loop {
            if let Some(at) = find(&self.buffer[searched..], separator) {
                break (searched + at, searched + at + separator.len());
            }
            if self.ended {
                self.finished = true;
                break (self.buffer.len(), self.buffer.len());
            }
            // A separator may begin in the part already searched.
            searched = (self.buffer.len() - self.start).saturating_sub(separator.len() - 1);
            if searched as u64 > most {
                return Ok(TextPart::TooLong);
            }
            self.fill()?;
        };
        let (first, at) = (std::mem::replace(&mut self.start, next), self.offset);
        self.offset += (next - first) as u64;
        if (end - first) as u64 > most {
            return Ok(TextPart::TooLong);
        }
        let part = std::str::from_utf8(&self.buffer[first..end]);
        part.map(TextPart::Text).map_err(|error| Error::not_utf8(&self.path, at + error.valid_up_to() as u64))
    }

    /// Reads the next piece of a text without separators: at least about `least` bytes, ended where `cut` allows.
    ///
    /// # Errors
    /// As [`part`](Self::part).
    pub fn piece(
        &mut self,
        least: usize,
        most: u64,
        cut: impl Fn(&str) -> Option<usize>,
    ) -> Result<TextPart<'_>> {
        let mut wanted = least;
        loop {
            while !self.ended && self.buffer.len() - self.start < wanted {
                self.fill()?;
            }
            let held = &self.buffer[self.start..];
            if held.is_empty() {
                return Ok(TextPart::End);
            }
            let valid = match std::str::from_utf8(held) {
                Ok(text) => text.len(),
                // The buffer ends inside a character.
                Err(error) if error.error_len().is_none() && !self.ended => error.valid_up_to(),
                Err(error) => {
                    return Err(Error::not_utf8(&self.path, self.offset + error.valid_up_to() as u64));
                }
            };
            let text = std::str::from_utf8(&held[..valid]).unwrap_or_default();
            let end = if self.ended { Some(text.len()) } else { cut(text) };
            if let Some(end) = end.filter(|&end| end > 0 && end as u64 <= most) {
                let first = self.start;
                self.start += end;
                self.offset += end as u64;
                let text = std::str::from_utf8(&self.buffer[first..first + end]).unwrap_or_default();
                return Ok(TextPart::Text(text));
            }
            if text.len() as u64 > most {
                return Ok(TextPart::TooLong);
            }
            wanted = 2 * held.len();
        }
    }

    /// Reads a piece after the buffered text, which moves to the front.
    fn fill(&mut self) -> Result<()> {
        self.buffer.drain(..self.start);
        self.start = 0;
        let held = self.buffer.len();
        self.buffer.resize(held + PIECE, 0);
        let read = loop {
            match self.input.read(&mut self.buffer[held..]) {
                Err(error) if error.kind() == std::io::ErrorKind::Interrupted => {}
                read => break read.map_err(|error| Error::io(&self.path, "read text", error)),
            }
        };
        self.buffer.truncate(held + *read.as_ref().unwrap_or(&0));
        self.ended = read? == 0;
        if !self.begun && (self.ended || self.buffer.len() >= BOM.len()) {
            self.begun = true;
            if self.buffer.starts_with(BOM) {
                self.buffer.drain(..BOM.len());
                self.offset = BOM.len() as u64;
            }
        }
        Ok(())
    }
}

/// First position of the nonempty `needle`.
fn find(text: &[u8], needle: &[u8]) -> Option<usize> {
    let mut from = 0;
    loop {
        let at = from + text.get(from..)?.iter().position(|byte| *byte == needle[0])?;
        if text[at..].starts_with(needle) {
            return Some(at);
        }
        from = at + 1;
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    fn file(dir: &tempfile::TempDir, content: &[u8]) -> TextFile {
        let path = dir.path().join("t.txt");
        std::fs::write(&path, content).unwrap();
        TextFile::open(&path).unwrap()
    }

    fn all(mut text: TextFile, separator: &str) -> Vec<String> {
        let mut parts = Vec::new();
        while let TextPart::Text(part) = text.part(separator, 1 << 20).unwrap() {
            parts.push(part.to_owned());
        }
        parts
    }

    #[test]
    fn parts_match_str_split() {
        let dir = tempfile::TempDir::new().unwrap();
        let long = format!("{}<|end|>ü{}<|end|><|en", "a".repeat(PIECE - 3), "b".repeat(2 * PIECE));
        for text in ["", "a", "<|end|>", "a<|end|>b", "a<<|end|>|end|>", "<|end|><|end|>x\n", &long] {
            for separator in ["<|end|>", "\n", "<|"] {
                let split: Vec<&str> = text.split(separator).collect();
                assert_eq!(all(file(&dir, text.as_bytes()), separator), split, "{separator}");
            }
        }
    }

    #[test]
    fn a_byte_order_mark_is_no_text() {
        let dir = tempfile::TempDir::new().unwrap();
        assert_eq!(all(file(&dir, b"\xef\xbb\xbfa\nb"), "\n"), ["a", "b"]);
        assert_eq!(file(&dir, b"\xef\xbb\xbf{}").whole(10).unwrap().as_deref(), Some("{}"));
        let mut marked = file(&dir, b"\xef\xbb\xbfab\xff");
        assert!(marked.part("\n", 10).unwrap_err().to_string().contains('5'), "places count the mark");
    }

    #[test]
    fn texts_beyond_the_limit_are_not_held() {
        let dir = tempfile::TempDir::new().unwrap();
        let text = [b"ab\n", "c".repeat(1 << 20).as_bytes()].concat();
        let mut open = file(&dir, &text);
        assert_eq!(open.part("\n", 1000).unwrap(), TextPart::Text("ab"));
        assert_eq!(open.part("\n", 1000).unwrap(), TextPart::TooLong);
        assert!(open.buffer.len() < 3 * PIECE);
        assert_eq!(file(&dir, &text).whole(1000).unwrap(), None);
        assert_eq!(file(&dir, &text).whole(text.len() as u64).unwrap().unwrap().len(), text.len());
        // A part of exactly the limit is accepted.
        let mut open = file(&dir, b"abc\ndefg");
        assert_eq!(open.part("\n", 3).unwrap(), TextPart::Text("abc"));
        assert_eq!(open.part("\n", 3).unwrap(), TextPart::TooLong);
    }

    #[test]
    fn devices_empty_separators_and_other_bytes_are_named() {
        let error = TextFile::open(Path::new("/dev/zero")).unwrap_err().to_string();
        assert!(error.contains("a character device, not a regular file"), "{error}");
        let dir = tempfile::TempDir::new().unwrap();
        assert!(file(&dir, b"a").part("", 10).unwrap_err().to_string().contains("separator"));
        let bytes = [b"good\n".as_slice(), b"b\xffd"].concat();
        let mut open = file(&dir, &bytes);
        assert_eq!(open.part("\n", 10).unwrap(), TextPart::Text("good"));
        assert!(open.part("\n", 10).unwrap_err().to_string().contains("invalid UTF-8 at byte 6"));
        assert!(file(&dir, &bytes).whole(10).unwrap_err().to_string().contains("invalid UTF-8 at byte 6"));
        assert!(matches!(TextFile::open(dir.path()), Err(Error::WrongKind { .. })));
    }
}
