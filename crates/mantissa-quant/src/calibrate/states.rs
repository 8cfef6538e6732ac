//! Hidden states of all windows of a calibration: in memory while they are small, in a file of a temporary folder where they are
//! not. A window is read and written whole, and has the same bits in both.

use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::PathBuf;

use mantissa_store::{Error, Scratch, disk};

/// Bytes of states that stay in memory.
pub(crate) const IN_MEMORY: u64 = 256 << 20;

/// States of windows, `[tokens, hidden]` each.
#[derive(Debug)]
pub struct States(Place);

#[derive(Debug)]
enum Place {
    Memory(Vec<Vec<f32>>),
    File(Spilled),
}

/// Windows one after another in a file.
#[derive(Debug)]
struct Spilled {
    file: File,
    path: PathBuf,
    /// Elements before each window, and of all.
    starts: Vec<u64>,
    /// Removes the file.
    _folder: Scratch,
}

impl From<Vec<Vec<f32>>> for States {
    /// In memory.
    fn from(windows: Vec<Vec<f32>>) -> Self {
        States(Place::Memory(windows))
    }
}

impl States {
    /// Zeros for windows of these numbers of elements: in memory up to `in_memory` bytes.
    ///
    /// # Errors
    /// The temporary folder (`TMPDIR`) has no room for them.
    pub(crate) fn of_lens(lens: impl IntoIterator<Item = usize>, in_memory: u64) -> Result<Self, Error> {
        let lens: Vec<usize> = lens.into_iter().collect();
        let mut starts = vec![0u64];
        starts.extend(lens.iter().scan(0, |sum, &len| {
            *sum += len as u64;
            Some(*sum)
        }));
        let bytes = 4 * starts.last().copied().unwrap_or(0);
        if bytes <= in_memory {
            return Ok(lens.into_iter().map(|len| vec![0.0; len]).collect::<Vec<_>>().into());
        }
        let folder = Scratch::new()?;
        let path = folder.path().join("states");
        let io =
            |error| Error::Io { path: path.clone(), operation: "create (states of the calibration)", error };
        let file = disk::create_new(&path).map_err(io)?;
        disk::set_len(&file, &path, bytes).map_err(io)?;
        Ok(States(Place::File(Spilled { file, path, starts, _folder: folder })))
    }

    /// Windows.
    pub fn len(&self) -> usize {
        match &self.0 {
            Place::Memory(windows) => windows.len(),
            Place::File(spilled) => spilled.starts.len() - 1,
        }
    }

    /// True if there are none.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Elements of a window; 0 of one that there is not.
    pub fn elements(&self, window: usize) -> usize {
        match &self.0 {
            Place::Memory(windows) => windows.get(window).map_or(0, Vec::len),
            Place::File(Spilled { starts, .. }) => match starts.get(window..window + 2) {
                Some(&[start, end]) => (end - start) as usize,
                _ => 0,
            },
        }
    }

    /// Elements of all windows.
    pub fn total(&self) -> usize {
        (0..self.len()).map(|window| self.elements(window)).sum()
    }

    /// Appends a window to `out`.
    ///
    /// # Errors
    /// It cannot be read back.
    pub fn append_to(&self, window: usize, out: &mut Vec<f32>) -> Result<(), Error> {
        match &self.0 {
            Place::Memory(windows) => {
                windows.get(window).into_iter().for_each(|states| out.extend_from_slice(states));
                Ok(())
            }
            Place::File(spilled) => spilled.append_to(window, self.elements(window), out),
        }
    }

    /// A window.
    ///
    /// # Errors
    /// As [`append_to`](Self::append_to).
    pub fn window(&self, window: usize) -> Result<Vec<f32>, Error> {
        let mut states = Vec::with_capacity(self.elements(window));
        self.append_to(window, &mut states)?;
        Ok(states)
    }

    /// Replaces a window by as many elements.
    ///
    /// # Errors
    /// It cannot be written.
    pub(crate) fn put(&mut self, window: usize, states: &[f32]) -> Result<(), Error> {
        match &mut self.0 {
            Place::Memory(windows) => {
                windows.iter_mut().skip(window).take(1).for_each(|old| old.copy_from_slice(states));
                Ok(())
            }
            Place::File(spilled) => spilled.put(window, states),
        }
    }

    /// The same once more.
    ///
    /// # Errors
    /// As [`of_lens`](Self::of_lens) and [`append_to`](Self::append_to).
    pub(crate) fn copy(&self, in_memory: u64) -> Result<Self, Error> {
        let mut copy = Self::of_lens((0..self.len()).map(|window| self.elements(window)), in_memory)?;
        for window in 0..self.len() {
            copy.put(window, &self.window(window)?)?;
        }
        Ok(copy)
    }
}

impl Spilled {
    fn io(&self, operation: &'static str) -> impl FnOnce(std::io::Error) -> Error {
        let path = self.path.clone();
        move |error| Error::Io { path, operation, error }
    }

    fn append_to(&self, window: usize, elements: usize, out: &mut Vec<f32>) -> Result<(), Error> {
        let Some(start) = self.starts.get(window) else { return Ok(()) };
        let mut bytes = vec![0; 4 * elements];
        self.file
            .read_exact_at(&mut bytes, 4 * start)
            .map_err(self.io("read (states of the calibration)"))?;
        out.extend(bytes.as_chunks::<4>().0.iter().map(|b| f32::from_le_bytes(*b)));
        Ok(())
    }

    fn put(&self, window: usize, states: &[f32]) -> Result<(), Error> {
        let Some(start) = self.starts.get(window) else { return Ok(()) };
        let bytes: Vec<u8> = states.iter().flat_map(|v| v.to_le_bytes()).collect();
        disk::write_at(&self.file, &self.path, &bytes, 4 * start)
            .map_err(self.io("write (states of the calibration)"))
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    #[test]
    fn a_file_holds_what_memory_holds() {
        let windows: Vec<Vec<f32>> =
            [3usize, 0, 7, 1].map(|len| (0..len).map(|i| (i as f32 - 2.5).exp()).collect()).to_vec();
        for in_memory in [0, IN_MEMORY] {
            let mut states = States::of_lens(windows.iter().map(Vec::len), in_memory).unwrap();
            assert_eq!(states.window(2).unwrap(), [0.0; 7]);
            windows.iter().enumerate().for_each(|(i, window)| states.put(i, window).unwrap());
            let copy = states.copy(in_memory).unwrap();
            states.put(2, &[f32::NAN; 7]).unwrap();
            assert_eq!((copy.len(), copy.total(), copy.elements(2), copy.elements(9)), (4, 11, 7, 0));
            for (i, window) in windows.iter().enumerate() {
                assert_eq!(&copy.window(i).unwrap(), window);
            }
            let mut joined = vec![1.0];
            copy.append_to(3, &mut joined).unwrap();
            assert_eq!(joined, [1.0, windows[3][0]]);
            assert_eq!(matches!(copy.0, Place::File(_)), in_memory == 0);
            assert!(States::from(windows.clone()).window(0).unwrap() == windows[0]);
        }
    }
}
