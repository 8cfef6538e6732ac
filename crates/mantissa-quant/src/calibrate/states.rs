//! Hidden states of all calibration windows: in memory if small, else in a temporary file. Both give the same bits.

use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::PathBuf;

use mantissa_store::{Error, Scratch, disk};

/// Bytes of states that are kept in memory.
pub(crate) const IN_MEMORY: u64 = 256 << 20;

/// States of windows, `[tokens, hidden]` each.
#[derive(Debug)]
pub struct States(Place);

#[derive(Debug)]
enum Place {
    Memory(Vec<Vec<f32>>),
    File(Spilled),
}

/// States of the windows, one after another in a file.
#[derive(Debug)]
struct Spilled {
    file: File,
    path: PathBuf,
    /// Start of each window in elements, and the total.
    starts: Vec<u64>,
    /// Removes the file.
    _folder: Scratch,
}

impl From<Vec<Vec<f32>>> for States {
    /// Keeps `windows` in memory.
    fn from(windows: Vec<Vec<f32>>) -> Self {
        States(Place::Memory(windows))
    }
}

impl States {
    /// Returns zeros for windows of `lens` elements, in memory up to `in_memory` bytes.
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

    /// Returns the number of windows.
    pub fn len(&self) -> usize {
        match &self.0 {
            Place::Memory(windows) => windows.len(),
            Place::File(spilled) => spilled.starts.len() - 1,
        }
    }

    /// True if there are no windows.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Returns the number of elements of a window; 0 if there is no such window.
    pub fn elements(&self, window: usize) -> usize {
        match &self.0 {
            Place::Memory(windows) => windows.get(window).map_or(0, Vec::len),
            Place::File(Spilled { starts, .. }) => match starts.get(window..window + 2) {
                Some(&[start, end]) => (end - start) as usize,
                _ => 0,
            },
        }
    }

    /// Returns the number of elements of all windows.
    pub fn total(&self) -> usize {
        (0..self.len()).map(|window| self.elements(window)).sum()
    }

    /// Appends the states of a window to `out`.
    ///
    /// # Errors
    /// The file cannot be read.
    pub fn append_to(&self, window: usize, out: &mut Vec<f32>) -> Result<(), Error> {
        match &self.0 {
            Place::Memory(windows) => {
                windows.get(window).into_iter().for_each(|states| out.extend_from_slice(states));
                Ok(())
            }
            Place::File(spilled) => spilled.append_to(window, self.elements(window), out),
        }
    }

    /// Returns the states of a window.
    ///
    /// # Errors
    /// Errors of [`append_to`](Self::append_to).
    pub fn window(&self, window: usize) -> Result<Vec<f32>, Error> {
        let mut states = Vec::with_capacity(self.elements(window));
        self.append_to(window, &mut states)?;
        Ok(states)
    }

    /// Replaces the states of a window by the same number of elements.
    ///
    /// # Errors
    /// The file cannot be written.
    pub(crate) fn put(&mut self, window: usize, states: &[f32]) -> Result<(), Error> {
        match &mut self.0 {
            Place::Memory(windows) => {
                windows.iter_mut().skip(window).take(1).for_each(|old| old.copy_from_slice(states));
                Ok(())
            }
            Place::File(spilled) => spilled.put(window, states),
        }
    }

    /// Returns a copy.
    ///
    /// # Errors
    /// Errors of [`of_lens`](Self::of_lens) and [`append_to`](Self::append_to).
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
