//! Batches of windows in a shuffled order.

use super::{DataError, Shuffle, TokenFile};

/// Where a run stands in its data: everything that a checkpoint must hold of it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Cursor {
    /// Times that all windows were seen.
    pub epoch: u64,
    /// Windows of this epoch that were taken.
    pub taken: u64,
}

/// Windows of `len + 1` tokens, neighbours sharing one, so that every token but the first is predicted once in an epoch.
#[derive(Debug)]
pub struct Batches {
    file: TokenFile,
    len: usize,
    seed: u64,
    windows: u64,
    cursor: Cursor,
}

/// A batch: inputs and targets of whole windows, one after another.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Sample {
    /// `[windows, len]` token ids.
    pub tokens: Vec<u32>,
    /// `[windows, len]`: what follows each.
    pub targets: Vec<u32>,
    /// `len` for each window.
    pub lens: Vec<usize>,
}

impl Batches {
    /// Windows of `len` inputs over the whole file, in the order that `seed` gives, from `cursor` on.
    ///
    /// # Errors
    /// [`DataError::Field`] where the file holds no window.
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

    /// Windows of an epoch.
    pub fn windows(&self) -> u64 {
        self.windows
    }

    /// Inputs of a window.
    pub fn window(&self) -> usize {
        self.len
    }

    /// What the ids are below of.
    pub fn vocab_size(&self) -> usize {
        self.file.vocab_size()
    }

    /// Goes on from `cursor`.
    pub fn seek(&mut self, cursor: Cursor) {
        self.cursor = cursor;
    }

    /// Where the run stands.
    pub fn cursor(&self) -> Cursor {
        self.cursor
    }

    /// Fills `sample` with the next `count` windows. An epoch that ends within a batch is followed by the next.
    ///
    /// # Errors
    /// As [`TokenFile::read`]. The cursor then stays.
    pub fn next(&mut self, count: usize, sample: &mut Sample) -> Result<(), DataError> {
        let mut cursor = self.cursor;
        let Sample { tokens, targets, lens } = sample;
        tokens.clear();
        targets.clear();
        lens.clear();
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
