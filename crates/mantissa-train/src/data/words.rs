//! Word counts of texts, the input of byte-level BPE training.
//!
//! Texts are read in pieces that end before white space, where no word continues, so the counts equal those
//! of the whole text. Only distinct words are held; the memory of training follows from them.

use std::path::Path;

use ahash::AHashMap;
use compact_str::CompactString;
use mantissa_kernels::map_reduce_fixed;
use mantissa_store::TextPart;
use tokenizers::pre_tokenizers::byte_level::ByteLevel;
use tokenizers::{OffsetReferential, OffsetType, PreTokenizedString, PreTokenizer};

use super::text::{documents_within, named, open, too_long};
use super::{DataError, TextFormat};

/// Bytes of text split into words at a time; a longer word is not cut.
const PIECE: usize = 16 << 10;

/// Bytes of memory per byte of a piece while it is split: the text, its byte-level form, the offsets of both,
/// and the words.
const CUTTING: u64 = 192;

/// Maximum word length in bytes.
pub(super) const MAX_WORD: u64 = 16 << 20;

/// Bytes per entry of the counts: word, count and one byte of the hash table.
const ENTRY: u64 = (size_of::<(CompactString, u64)>() + 1) as u64;

/// Allocator overhead in bytes per allocation.
const HEADER: u64 = 16;

/// Returns the pre-tokenizer of GPT-2; merges never cross its words.
pub(super) fn pre_tokenizer() -> ByteLevel {
    ByteLevel::new(false, false, true)
}

/// Distinct words with their counts, within a memory limit.
#[derive(Debug)]
pub struct WordCounts {
    words: AHashMap<CompactString, u64>,
    /// Bytes of words stored outside the table.
    outside: u64,
    /// Bytes that training needs beyond the counts.
    learning: u64,
    /// Bytes of all distinct words, which bound the number of merges.
    symbols: u64,
    pending: Vec<String>,
    threads: usize,
    memory: u64,
}

type Counts = AHashMap<CompactString, u64>;

impl WordCounts {
    /// Starts an empty count. Counting and training use at most `memory` bytes.
    pub fn new(threads: usize, memory: u64) -> Self {
        let (words, pending) = (Counts::new(), Vec::new());
        WordCounts { words, outside: 0, learning: 0, symbols: 0, pending, threads: threads.max(1), memory }
    }

    /// Adds every document of a file; returns their number.
    ///
    /// # Errors
    /// As [`documents_within`], and [`DataError::Memory`].
    pub fn add_file(&mut self, path: &Path, format: &TextFormat) -> Result<usize, DataError> {
        let file = named(path);
        self.require(2 * PIECE as u64 * CUTTING, &file)?;
        if matches!(format, TextFormat::Text { split: None }) {
            return self.add_text(path);
        }
        // A document is held together with its pieces.
        let half = self.left() / 2;
        let found = documents_within(path, format, half, |document| self.add(document));
        found.map(|found| found.documents).map_err(|error| match error {
            DataError::Memory { needs, allowed, file } if allowed == half => {
                let needs = (2 * needs).saturating_add(self.memory.saturating_sub(2 * half));
                DataError::Memory { file, needs, allowed: self.memory }
            }
            error => error,
        })
    }

    /// Adds a file that is one document; returns 0 if it is only white space.
    fn add_text(&mut self, path: &Path) -> Result<usize, DataError> {
        let (mut file, mut last) = (open(path)?, String::new());
        loop {
            let affordable = self.left() / CUTTING;
            let most = MAX_WORD.min(affordable);
            match file.piece(PIECE, most, boundary)? {
                TextPart::End => break,
                TextPart::TooLong => {
                    self.require((most + 1).saturating_mul(CUTTING), &named(path))?;
                    return Err(too_long(path, 1, most, u64::MAX));
                }
                TextPart::Text(piece) => {
                    // Documents are stripped, so leading and trailing white space is dropped here too.
                    let piece = if last.is_empty() { piece.trim_start() } else { piece };
                    let before = std::mem::replace(&mut last, piece.to_owned());
                    self.add_piece(before, &named(path))?;
                }
            }
        }
        let any = !last.is_empty();
        self.add_piece(last.trim_end().to_owned(), &named(path))?;
        Ok(usize::from(any))
    }

    /// Adds a document.
    ///
    /// # Errors
    /// [`DataError::Memory`].
    pub fn add(&mut self, document: &str) -> Result<(), DataError> {
        let mut rest = document;
        while rest.len() > PIECE {
            // A byte offset may fall inside a character.
            let near = (PIECE..rest.len().min(PIECE + 4)).find(|&at| rest.is_char_boundary(at));
            let end = near.and_then(|near| boundary(&rest[..near]).or_else(|| first_boundary(rest, near)));
            let (piece, after) = rest.split_at(end.unwrap_or(rest.len()));
            self.add_piece(piece.to_owned(), "a document")?;
            rest = after;
        }
        self.add_piece(rest.to_owned(), "a document")
    }

    fn add_piece(&mut self, piece: String, what: &str) -> Result<(), DataError> {
        if piece.is_empty() {
            return Ok(());
        }
        self.require((piece.len() as u64).saturating_mul(CUTTING), what)?;
        self.pending.push(piece);
        let held: usize = self.pending.iter().map(String::len).sum();
        if self.pending.len() >= 4 * self.threads || held > 4 * self.threads * PIECE {
            self.count()
        } else {
            Ok(())
        }
    }

    /// Counts the words of the pending pieces.
    fn count(&mut self) -> Result<(), DataError> {
        let pieces = std::mem::take(&mut self.pending);
        let of = |range: std::ops::Range<usize>| words(&pieces[range]);
        let counts = map_reduce_fixed(self.threads, pieces.len(), 1, of, Ok(Vec::new()), |all, part| {
            let mut all: Vec<Counts> = all?;
            all.push(part?);
            Ok::<_, DataError>(all)
        })?;
        for (word, count) in counts.into_iter().flatten() {
            if let Some(known) = self.words.get_mut(&word) {
                *known += count;
                continue;
            }
            if self.words.len() == self.words.capacity() {
                // Growing doubles the table while the old one is still there.
                self.require(3 * self.table(), "the words of the texts")?;
            }
            let symbols = word.len() as u64;
            self.outside += if word.is_heap_allocated() { symbols + HEADER } else { 0 };
            self.learning += learning_bytes(symbols);
            self.symbols += symbols;
            self.words.insert(word, count);
        }
        self.require(0, "the words of the texts")
    }

    fn require(&self, more: u64, what: &str) -> Result<(), DataError> {
        let needs = self.bytes().saturating_add(more);
        if needs > self.memory {
            return Err(DataError::Memory { file: what.to_owned(), needs, allowed: self.memory });
        }
        Ok(())
    }

    /// Bytes of the hash table, which is full at 7/8.
    fn table(&self) -> u64 {
        (self.words.capacity() as u64).saturating_mul(8 * ENTRY) / 7
    }

    fn bytes(&self) -> u64 {
        // Pieces are held in batches; each thread splits one.
        let batch = (self.threads * PIECE) as u64 * (4 + CUTTING);
        self.table().saturating_add(self.outside).saturating_add(batch)
    }

    fn left(&self) -> u64 {
        self.memory.saturating_sub(self.bytes())
    }

    /// Returns the largest vocabulary that can be learned: `least` tokens, and a merge for each symbol but the last of
    /// every distinct word, because a merge shortens a word by one symbol.
    pub(super) fn most_tokens(&mut self, least: usize) -> Result<u64, DataError> {
        self.count()?;
        Ok((least as u64).saturating_add(self.symbols).saturating_sub(self.words.len() as u64))
    }

    /// Returns all words, after checking that `vocab_size` tokens can be learned from them within the memory
    /// limit.
    ///
    /// # Errors
    /// [`DataError::Field`] if the text holds too few merges; [`DataError::Memory`].
    pub(super) fn finish(mut self, vocab_size: usize, least: usize) -> Result<Counts, DataError> {
        let most = self.most_tokens(least)?;
        if vocab_size as u64 > most {
            return Err(DataError::Field {
                file: "tokenizer".to_owned(),
                field: "vocab_size".to_owned(),
                found: format!("at most {most} tokens in the text"),
                allowed: format!("a text with at least {vocab_size} tokens"),
            });
        }
        let tokens = (vocab_size as u64).saturating_mul(PER_TOKEN);
        self.require(self.learning.saturating_add(tokens), "learning the merges")?;
        Ok(self.words)
    }
}

/// Bytes per token of the vocabulary: its text in the trainer's and the model's tables, its merge, and both
/// as JSON. Measured: about 600.
const PER_TOKEN: u64 = 800;

/// Bytes that training needs for a word of `symbols` bytes: a 32-byte symbol each in a doubling list, and per
/// pair the word's index in a doubling set, before and after the merge.
fn learning_bytes(symbols: u64) -> u64 {
    let list = 32 * symbols.next_power_of_two().max(4) + HEADER;
    32 + list + PER_PAIR * symbols.saturating_sub(1)
}

/// Bytes per pair of a word, in the sets of pair positions and merge changes.
const PER_PAIR: u64 = 45;

/// Counts the words of some pieces.
fn words(pieces: &[String]) -> Result<Counts, DataError> {
    let mut counts = Counts::new();
    for piece in pieces {
        let mut cut = PreTokenizedString::from(piece.as_str());
        pre_tokenizer().pre_tokenize(&mut cut).map_err(|error| DataError::Field {
            file: "tokenizer".to_owned(),
            field: "training".to_owned(),
            found: error.to_string(),
            allowed: "a text to learn from".to_owned(),
        })?;
        for (word, _, _) in cut.get_splits(OffsetReferential::Original, OffsetType::Byte) {
            match counts.get_mut(word) {
                Some(count) => *count += 1,
                None => {
                    counts.insert(CompactString::from(word), 1);
                }
            }
        }
    }
    Ok(counts)
}

/// Returns the last offset of `text` where a word ends and white space begins. No word of the pre-tokenizer
/// has white space after other characters, and none depends on the text before it.
pub(super) fn boundary(text: &str) -> Option<usize> {
    (1..text.len()).rev().find(|&at| is_boundary(text, at))
}

/// Returns the first such offset at or after `from`.
pub(super) fn first_boundary(text: &str, from: usize) -> Option<usize> {
    (from.max(1)..text.len()).find(|&at| is_boundary(text, at))
}

fn is_boundary(text: &str, at: usize) -> bool {
    let ends = |before: char| !before.is_whitespace() && !before.is_control();
    matches!(text.as_bytes()[at], b' ' | b'\n' | b'\r' | b'\t')
        && text[..at].chars().next_back().is_some_and(ends)
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    fn counted(pieces: &[&str]) -> Vec<(String, u64)> {
        let mut counts = WordCounts::new(2, u64::MAX);
        pieces.iter().for_each(|piece| counts.add_piece((*piece).to_owned(), "test").unwrap());
        counts.count().unwrap();
        let mut all: Vec<_> = counts.words.into_iter().map(|(word, n)| (word.to_string(), n)).collect();
        all.sort();
        all
    }

    #[test]
    fn pieces_and_the_whole_text_have_the_same_words() {
        let text = "It's  the\u{a0}\tfox's 12 3x4,\r\n\n don't -- \u{85}日本 語e\u{301}\n\t\u{0}\u{0} a\u{1} 'll ' s\n";
        let whole = counted(&[text]);
        for at in (1..text.len()).filter(|&at| text.is_char_boundary(at) && is_boundary(text, at)) {
            assert_eq!(counted(&[&text[..at], &text[at..]]), whole, "{at}");
        }
        assert!((1..text.len()).filter(|&at| text.is_char_boundary(at)).any(|at| is_boundary(text, at)));
    }

    #[test]
    fn a_file_has_the_words_of_its_text() {
        let dir = tempfile::TempDir::new().unwrap();
        let path = dir.path().join("t.txt");
        let line = |i: usize| format!("{}ü line {i},  of {} words\n\n", "x".repeat(i % 7), i * i);
        let text: String = (0..4000).map(line).collect::<String>() + &"y".repeat(3 * PIECE) + " end \n ";
        std::fs::write(&path, format!("\n  {text}")).unwrap();
        let sorted = |mut counts: WordCounts| {
            counts.count().unwrap();
            let mut all: Vec<_> = counts.words.into_iter().collect();
            all.sort();
            all
        };
        let mut file = WordCounts::new(2, u64::MAX);
        assert_eq!(file.add_file(&path, &TextFormat::Text { split: None }).unwrap(), 1);
        let mut document = WordCounts::new(1, u64::MAX);
        document.add(text.trim()).unwrap();
        let file_counts = sorted(file);
        assert_eq!(file_counts, sorted(document));
        let whole = counted(&[text.trim()]);
        assert!(file_counts.iter().map(|(word, n)| (word.to_string(), *n)).eq(whole));
    }

    #[test]
    fn a_word_without_end_and_words_without_number_are_refused() {
        let dir = tempfile::TempDir::new().unwrap();
        let path = dir.path().join("t.txt");
        std::fs::write(&path, "a".repeat(1 << 20)).unwrap();
        let mut counts = WordCounts::new(1, 32 << 20);
        let error = counts.add_file(&path, &TextFormat::Text { split: None }).unwrap_err();
        assert!(matches!(error, DataError::Memory { .. }), "{error}");
        let mut counts = WordCounts::new(1, 8 << 20);
        let error = (0..1_000_000).find_map(|i| counts.add(&format!("w{i}x{}", i * 7)).err()).unwrap();
        assert!(matches!(error, DataError::Memory { allowed: 8_388_608, .. }), "{error}");
        assert!(matches!(WordCounts::new(1, u64::MAX).finish(1 << 40, 258), Err(DataError::Field { .. })));
    }
}
