//! Packing: lines share windows, as sequences of their own.

use std::collections::BTreeSet;

use super::Conversations;
use crate::data::{Cursor, Data, DataError, Sample, Shuffle};

/// Epoch whose permutation orders the lines for packing; no run gets there.
const PACKING: u64 = u64::MAX;

/// Batches of packed windows in shuffled order.
///
/// Lines are taken in an order that depends on the seed, and each goes to the fullest window with room for it (best fit).
/// Windows stay the same in all epochs; their order differs.
#[derive(Debug)]
pub struct ChatBatches {
    pub(super) lines: Conversations,
    /// Lines of each window.
    pub(super) windows: Vec<Vec<u32>>,
    length: usize,
    vocab_size: usize,
    seed: u64,
    cursor: Cursor,
}

impl ChatBatches {
    /// Packs `lines` into windows of up to `length` inputs. `vocab_size` is the number of the tokenizer's ids.
    ///
    /// # Errors
    /// [`DataError::Field`] if there is no line, or one is longer than a window.
    pub fn new(
        lines: Conversations,
        vocab_size: usize,
        length: usize,
        seed: u64,
        cursor: Cursor,
    ) -> Result<Self, DataError> {
        let longest = (0..lines.len()).map(|i| lines.line(i).0.len()).max().unwrap_or(0);
        if longest == 0 || longest > length {
            return Err(DataError::Field {
                file: "data".to_owned(),
                field: "lines".to_owned(),
                found: format!("{} of up to {longest} tokens", lines.len()),
                allowed: format!("at least one, of at most {length} tokens"),
            });
        }
        let windows = packed(&lines, length, seed);
        Ok(ChatBatches { lines, windows, length, vocab_size, seed, cursor })
    }

    /// Number of windows per epoch.
    pub fn windows(&self) -> u64 {
        self.windows.len() as u64
    }

    /// The lines.
    pub fn conversations(&self) -> &Conversations {
        &self.lines
    }

    /// Adds the lines of window `at` to `sample`.
    ///
    /// # Panics
    /// If there is no such window.
    pub fn read(&self, at: u64, sample: &mut Sample) {
        for &line in &self.windows[at as usize] {
            let (tokens, targets) = self.lines.line(line as usize);
            sample.tokens.extend(tokens);
            sample.targets.extend(targets);
            sample.lens.push(tokens.len());
        }
    }

    /// Share of the windows' positions that hold an input.
    pub fn fill(&self) -> f64 {
        self.lines.tokens.len() as f64 / (self.windows.len() * self.length) as f64
    }
}

/// Lines of each window.
fn packed(lines: &Conversations, length: usize, seed: u64) -> Vec<Vec<u32>> {
    let count = lines.len() as u64;
    let shuffle = Shuffle::new(count, seed, PACKING);
    let mut windows: Vec<Vec<u32>> = Vec::new();
    // Room of each window that is not full, least first; of equal ones the oldest.
    let mut open: BTreeSet<(usize, usize)> = BTreeSet::new();
    for place in 0..count {
        let line = shuffle.at(place) as usize;
        let needs = lines.line(line).0.len();
        let (room, window) = match open.range((needs, 0)..).next().copied() {
            Some(found) => {
                open.remove(&found);
                found
            }
            None => {
                windows.push(Vec::new());
                (length, windows.len() - 1)
            }
        };
        windows[window].push(line as u32);
        if room > needs {
            open.insert((room - needs, window));
        }
    }
    windows
}

impl Data for ChatBatches {
    fn vocab_size(&self) -> usize {
        self.vocab_size
    }

    fn window(&self) -> usize {
        self.length
    }

    fn cursor(&self) -> Cursor {
        self.cursor
    }

    fn seek(&mut self, cursor: Cursor) {
        self.cursor = cursor;
    }

    fn next(&mut self, count: usize, sample: &mut Sample) -> Result<(), DataError> {
        let windows = self.windows();
        sample.clear();
        for _ in 0..count {
            if self.cursor.taken >= windows {
                self.cursor = Cursor { epoch: self.cursor.epoch + 1, taken: 0 };
            }
            let at = Shuffle::new(windows, self.seed, self.cursor.epoch).at(self.cursor.taken);
            self.cursor.taken += 1;
            self.read(at, sample);
        }
        Ok(())
    }
}
