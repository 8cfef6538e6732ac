//! Pieces of documents: a long document is read or cut at word boundaries, so that the memory of tokenizing it does
//! not grow with it.

use std::path::Path;

use mantissa_store::TextPart;

use super::text::{open, too_long};
use super::words::{MAX_WORD, boundary, first_boundary};
use super::{DataError, Found, TextFormat, documents_within};

/// Piece of a document.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Piece<'a> {
    /// Its text.
    pub text: &'a str,
    /// True for the first piece of a document.
    pub first: bool,
    /// True for the last piece of a document.
    pub last: bool,
}

/// Passes every document of `path` to `each` in pieces of about `most` bytes, which end before white space; returns
/// their numbers. A document of at most `most` bytes is one piece.
///
/// A text without separator is one document and is never held as a whole. Other documents are held one at a time,
/// with at most `memory` bytes.
///
/// # Errors
/// As [`documents_within`]; errors of `each`.
pub fn pieces_within(
    path: &Path,
    format: &TextFormat,
    most: usize,
    memory: u64,
    mut each: impl FnMut(Piece<'_>) -> Result<(), DataError>,
) -> Result<Found, DataError> {
    if *format == (TextFormat::Text { split: None }) {
        let documents = text_pieces(path, most, memory, &mut each)?;
        return Ok(Found { documents, ..Found::default() });
    }
    documents_within(path, format, memory, |document| {
        let mut rest = Some(document);
        while let Some(text) = rest {
            let (piece, after) = cut(text, most);
            rest = after;
            each(Piece { text: piece, first: text.len() == document.len(), last: rest.is_none() })?;
        }
        Ok(())
    })
}

/// Reads a text that is one document. Its leading and trailing white space is dropped.
fn text_pieces(
    path: &Path,
    most: usize,
    memory: u64,
    each: &mut impl FnMut(Piece<'_>) -> Result<(), DataError>,
) -> Result<usize, DataError> {
    let (mut file, limit) = (open(path)?, MAX_WORD.min(memory));
    // The last piece is known only when nothing follows.
    let mut held = String::new();
    let mut first = true;
    loop {
        let text = match file.piece(most.saturating_add(1), limit, boundary)? {
            TextPart::End => break,
            TextPart::TooLong => return Err(too_long(path, 1, limit, memory)),
            TextPart::Text(text) => text,
        };
        let mut rest =
            Some(if held.is_empty() { text.trim_start() } else { text }).filter(|text| !text.is_empty());
        while let Some(text) = rest {
            let (piece, after) = cut(text, most);
            rest = after;
            let before = std::mem::replace(&mut held, piece.to_owned());
            if !before.is_empty() {
                each(Piece { text: &before, first, last: false })?;
                first = false;
            }
        }
    }
    if held.is_empty() {
        return Ok(0);
    }
    each(Piece { text: held.trim_end(), first, last: true })?;
    Ok(1)
}

/// Cuts a text after about `most` bytes, before white space; returns the piece and the rest.
fn cut(text: &str, most: usize) -> (&str, Option<&str>) {
    if text.len() <= most {
        return (text, None);
    }
    // A byte offset may fall inside a character.
    let near = (most.max(1)..text.len().min(most + 4)).find(|&at| text.is_char_boundary(at));
    let end = near.and_then(|near| boundary(&text[..near]).or_else(|| first_boundary(text, near)));
    match end {
        Some(end) if end < text.len() => (&text[..end], Some(&text[end..])),
        _ => (text, None),
    }
}

/// Chooses the parts of the data that are held out for validation: as soon as less than a share of the bytes so far
/// is held out, the next part is. The choice depends only on the lengths, so it is the same for every seed.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct HoldOut {
    share: f64,
    seen: u64,
    held: u64,
}

impl HoldOut {
    /// Starts to hold out `share` of the bytes; 0 holds out nothing.
    pub fn new(share: f64) -> Self {
        HoldOut { share, seen: 0, held: 0 }
    }

    /// True if the next part, of `len` bytes, is held out.
    pub fn takes(&mut self, len: usize) -> bool {
        let takes = (self.held as f64) < self.share * self.seen as f64;
        self.seen += len as u64;
        self.held += if takes { len as u64 } else { 0 };
        takes
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    fn all(path: &Path, format: &TextFormat, most: usize) -> Vec<(String, bool, bool)> {
        let mut all = Vec::new();
        pieces_within(path, format, most, u64::MAX, |piece| {
            all.push((piece.text.to_owned(), piece.first, piece.last));
            Ok(())
        })
        .unwrap();
        all
    }

    #[test]
    fn pieces_join_to_the_documents() {
        let dir = tempfile::TempDir::new().unwrap();
        let path = dir.path().join("t.txt");
        let line = |i: usize| format!("{}ü line {i},  of {} words\n\n", "x".repeat(i % 7), i * i);
        let text: String = (0..9000).map(line).collect();
        std::fs::write(&path, format!("\n  {text} \n\n")).unwrap();
        for most in [100, 5000, 70_000, 1 << 20] {
            let whole = all(&path, &TextFormat::Text { split: None }, most);
            assert_eq!(whole.iter().map(|piece| &*piece.0).collect::<String>(), text.trim(), "{most}");
            assert!(whole.iter().all(|piece| piece.0.len() <= most + 40), "{most}");
            assert!(whole.iter().enumerate().all(|(i, piece)| piece.1 == (i == 0)));
            assert!(whole.iter().rev().enumerate().all(|(i, piece)| piece.2 == (i == 0)));
            let split = all(&path, &TextFormat::Text { split: Some("words\n".to_owned()) }, most);
            assert_eq!(split.iter().filter(|piece| piece.1).count(), 9000);
            assert_eq!(split.iter().filter(|piece| piece.2).count(), 9000);
        }
        std::fs::write(&path, " \n ").unwrap();
        assert!(all(&path, &TextFormat::Text { split: None }, 100).is_empty());
    }

    #[test]
    fn a_share_is_held_out_evenly() {
        let mut hold_out = HoldOut::new(0.05);
        let taken: Vec<_> = (0..200).filter(|_| hold_out.takes(100)).collect();
        assert_eq!(taken.len(), 10);
        assert_eq!(taken[..3], [1, 21, 41]);
        assert!(!(0..200).any(|_| HoldOut::new(0.0).takes(100)));
    }
}
