//! Batches of windows in shuffled order.

use super::{DataError, Shuffle, TokenFile};
use crate::loss::IGNORE_TARGET;

/// Position in the data; all that a checkpoint stores of it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Cursor {
    /// Completed epochs.
    pub epoch: u64,
    /// Windows taken in this epoch.
    pub taken: u64,
}

/// Training data: batches of windows in an order that depends only on the seed and the position.
pub trait Data: std::fmt::Debug + Send {
    /// Vocabulary size; all ids are below it.
    fn vocab_size(&self) -> usize;

    /// Most inputs of a window.
    fn window(&self) -> usize;

    /// Current position.
    fn cursor(&self) -> Cursor;

    /// Moves to `cursor`.
    fn seek(&mut self, cursor: Cursor);

    /// Fills `sample` with the next `count` windows. A batch may span two epochs.
    ///
    /// # Errors
    /// [`DataError`]; the position then stays unchanged.
    fn next(&mut self, count: usize, sample: &mut Sample) -> Result<(), DataError>;
}

/// Windows of `len + 1` tokens. Adjacent windows share one token, so that every token but the first is
/// predicted once per epoch.
#[derive(Debug)]
pub struct Batches {
    file: TokenFile,
    len: usize,
    seed: u64,
    windows: u64,
    cursor: Cursor,
}

/// Batch of whole windows, concatenated.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Sample {
    /// Input token ids, at most `[windows, len]`.
    pub tokens: Vec<u32>,
    /// Target of each input: the token after it, or [`IGNORE_TARGET`] if the loss does not count it.
    pub targets: Vec<u32>,
    /// Lengths of the sequences: the windows, or the sequences packed into them.
    pub lens: Vec<usize>,
}

impl Sample {
    /// Removes everything.
    pub fn clear(&mut self) {
        self.tokens.clear();
        self.targets.clear();
        self.lens.clear();
    }

    /// Number of targets that the loss counts.
    pub fn counted(&self) -> usize {
        self.targets.iter().filter(|target| **target != IGNORE_TARGET).count()
    }
}

impl Data for Box<dyn Data> {
    fn vocab_size(&self) -> usize {
        (**self).vocab_size()
    }

    fn window(&self) -> usize {
        (**self).window()
    }

    fn cursor(&self) -> Cursor {
        (**self).cursor()
    }

    fn seek(&mut self, cursor: Cursor) {
        (**self).seek(cursor);
    }

    fn next(&mut self, count: usize, sample: &mut Sample) -> Result<(), DataError> {
        (**self).next(count, sample)
    }
}

impl Data for Batches {
    fn vocab_size(&self) -> usize {
        Batches::vocab_size(self)
    }

    fn window(&self) -> usize {
        Batches::window(self)
    }

    fn cursor(&self) -> Cursor {
        Batches::cursor(self)
    }

    fn seek(&mut self, cursor: Cursor) {
        Batches::seek(self, cursor);
    }

    fn next(&mut self, count: usize, sample: &mut Sample) -> Result<(), DataError> {
        Batches::next(self, count, sample)
    }
}

impl Batches {
    /// Reads windows of `len` inputs over the whole file, in the order given by `seed`, starting at `cursor`.
    ///
    /// # Errors
    /// [`DataError::Field`] if the file is shorter than one window.
    pub fn new(file: TokenFile, len: usize, seed: u64, cursor: Cursor) -> Result<Self, DataError> {
        let windows = file.len().saturating_sub(1) / (len.max(1) as u64);
        if windows == 0 || len == 0 {
            return Err(DataError::Field {
                file: "data".to_owned(),
                field: "tokens".to_owned(),
                found: format!("{} for windows of {len}", file.len()),
                allowed: "at least one window and the token after it".to_owned(),
            });
        }
        Ok(Batches { file, len, seed, windows, cursor })
    }

    /// Number of windows per epoch.
    pub fn windows(&self) -> u64 {
        self.windows
    }

    /// Number of inputs per window.
    pub fn window(&self) -> usize {
        self.len
    }

    /// Vocabulary size; all ids are below it.
    pub fn vocab_size(&self) -> usize {
        self.file.vocab_size()
    }

    /// Moves to `cursor`.
    pub fn seek(&mut self, cursor: Cursor) {
        self.cursor = cursor;
    }

    /// Returns the current position.
    pub fn cursor(&self) -> Cursor {
        self.cursor
    }

    /// Fills `sample` with the next `count` windows. A batch may span two epochs.
    ///
    /// # Errors
    /// As [`TokenFile::read`]; the cursor then stays unchanged.
    pub fn next(&mut self, count: usize, sample: &mut Sample) -> Result<(), DataError> {
        let mut cursor = self.cursor;
        sample.clear();
        let Sample { tokens, targets, lens } = sample;
        let mut window = Vec::with_capacity(self.len + 1);
        for _ in 0..count {
            if cursor.taken >= self.windows {
                cursor = Cursor { epoch: cursor.epoch + 1, taken: 0 };
            }
            let at = Shuffle::new(self.windows, self.seed, cursor.epoch).at(cursor.taken);
            cursor.taken += 1;
            window.clear();
            self.file.read(at * self.len as u64, self.len + 1, &mut window)?;
            tokens.extend(&window[..self.len]);
            targets.extend(&window[1..]);
            lens.push(self.len);
        }
        self.cursor = cursor;
        Ok(())
    }
}
