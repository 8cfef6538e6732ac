//! Event files of TensorBoard: records of TFRecord, each an `Event` of Protocol Buffers with scalars of a step.
//!
//! A record is its length (u64), a masked CRC32C of the length, the bytes, and a masked CRC32C of the bytes, little-endian
//! (tensorflow/core/lib/io/record_writer.cc). Fields of `Event` and `Summary` are those of tensorboard/compat/proto/event.proto
//! and summary.proto. Files are written by appending; one that is opened again continues after a step, so that no step is
//! written twice.

use std::fs::File;
use std::path::{Path, PathBuf};

use crate::commit::write_file_atomic;
use crate::disk;
use crate::error::{Error, OutputFault, Result};
use crate::output::Output;
use crate::protobuf::{Field, Message, fields};
use crate::regular;

/// Version that TensorBoard expects in the first event.
const VERSION: &str = "brain.Event:2";

/// Tag of the text that names the run of a file.
const RUN: &str = "run";

/// Largest event file that is continued, in bytes.
const MAX_FILE: u64 = 4 << 30;

/// Bytes of a record around its content.
const AROUND: usize = 16;

/// Event file that is open for appending.
#[derive(Debug)]
pub struct EventFile {
    path: PathBuf,
    file: File,
    /// Last step in the file.
    last: Option<u64>,
}

impl EventFile {
    /// Opens the event file at `path` of the run named `run`: a new one with `texts` (tag and text) as its first events, or the
    /// existing one without the events after `steps`, which begins anew without steps. `time` is in seconds since 1970.
    ///
    /// # Errors
    /// [`OutputFault::Exists`] if the file is that of another run, or none of mantissa; I/O.
    pub fn open(path: &Path, run: &str, texts: &[(&str, &str)], steps: u64, time: f64) -> Result<Self> {
        let before = regular::read_optional(path, MAX_FILE, "an event file of TensorBoard")?;
        let (mut last, mut kept) = (None, 0);
        if let Some(bytes) = before.as_ref().filter(|bytes| !bytes.is_empty()) {
            let mut records = Records { bytes, at: 0 };
            let header =
                records.next().is_some_and(|record| texts_of(record, 3).first() == Some(&VERSION.as_bytes()));
            if !header || !records.next().is_some_and(|record| is_run(record, run)) {
                return Err(Error::output(path, OutputFault::Exists { what: "events" }));
            }
            kept = records.at;
            while let Some(record) = records.next().filter(|_| steps > 0) {
                match step_of(record) {
                    Some(step) if step > steps => break,
                    Some(step) => last = last.max(Some(step)),
                    None => {}
                }
                kept = records.at;
            }
        }
        let file = match before.filter(|_| kept > 0 && steps > 0) {
            Some(bytes) => {
                let file = disk::open_append(path).map_err(|error| Error::io(path, "open", error))?;
                if kept < bytes.len() {
                    disk::set_len(&file, path, kept as u64).map_err(|error| Error::io(path, "cut", error))?;
                }
                file
            }
            None => {
                let named = [(RUN, run)];
                let texts = named.iter().chain(texts).map(|(tag, text)| text_event(time, tag, text));
                let begin = std::iter::once(version_event(time)).chain(texts);
                let bytes: Vec<u8> = begin.flat_map(|event| record(&event.into_bytes())).collect();
                write_file_atomic(&Output::owned(path), &bytes)?;
                disk::open_append(path).map_err(|error| Error::io(path, "open", error))?
            }
        };
        Ok(EventFile { path: path.to_owned(), file, last })
    }

    /// Returns the last step in the file.
    pub fn last_step(&self) -> Option<u64> {
        self.last
    }

    /// Appends the scalars of a step, by tag; a step that is in the file already is left out.
    ///
    /// # Errors
    /// I/O.
    pub fn scalars(&mut self, step: u64, time: f64, scalars: &[(&str, f64)]) -> Result<()> {
        if self.last.is_some_and(|last| step <= last) {
            return Ok(());
        }
        let mut summary = Message::default();
        for (tag, value) in scalars {
            let mut entry = Message::default();
            entry.text(1, tag);
            entry.float(2, *value as f32);
            summary.message(1, entry);
        }
        let event = event(time, step, summary);
        disk::append(&self.file, &self.path, &record(&event.into_bytes()))
            .map_err(|error| Error::io(&self.path, "write", error))?;
        self.last = Some(step);
        Ok(())
    }

    /// Makes the events durable.
    ///
    /// # Errors
    /// I/O.
    pub fn sync(&self) -> Result<()> {
        disk::sync_data(&self.file, &self.path).map_err(|error| Error::io(&self.path, "fsync", error))
    }
}

fn version_event(time: f64) -> Message {
    let mut event = Message::default();
    event.double(1, time);
    event.text(3, VERSION);
    event
}

/// Makes an event of one step.
fn event(time: f64, step: u64, summary: Message) -> Message {
    let mut event = Message::default();
    event.double(1, time);
    if step > 0 {
        event.number(2, step);
    }
    event.message(5, summary);
    event
}

/// Makes an event with a text, which TensorBoard shows on its page of texts: a tensor of one string.
fn text_event(time: f64, tag: &str, text: &str) -> Message {
    let (mut plugin, mut metadata) = (Message::default(), Message::default());
    plugin.text(1, "text");
    metadata.message(1, plugin);
    let (mut size, mut shape, mut tensor) = (Message::default(), Message::default(), Message::default());
    size.number(1, 1);
    shape.message(2, size);
    // DT_STRING.
    tensor.number(1, 7);
    tensor.message(2, shape);
    tensor.text(8, text);
    let (mut value, mut summary) = (Message::default(), Message::default());
    value.text(1, tag);
    value.message(8, tensor);
    value.message(9, metadata);
    summary.message(1, value);
    event(time, 0, summary)
}

/// Frames a record.
fn record(content: &[u8]) -> Vec<u8> {
    let length = (content.len() as u64).to_le_bytes();
    let mut bytes = Vec::with_capacity(content.len() + AROUND);
    bytes.extend_from_slice(&length);
    bytes.extend_from_slice(&masked(&length).to_le_bytes());
    bytes.extend_from_slice(content);
    bytes.extend_from_slice(&masked(content).to_le_bytes());
    bytes
}

/// Records of a file, up to the first that is cut off or damaged.
struct Records<'b> {
    bytes: &'b [u8],
    /// Place after the last record.
    at: usize,
}

impl<'b> Records<'b> {
    fn next(&mut self) -> Option<&'b [u8]> {
        let (length, rest) = self.bytes.get(self.at..)?.split_first_chunk::<8>()?;
        let (sum, rest) = rest.split_first_chunk::<4>()?;
        let size = usize::try_from(u64::from_le_bytes(*length)).ok()?;
        let content = rest.get(..size)?;
        let end = rest.get(size..)?.first_chunk::<4>()?;
        let sound = u32::from_le_bytes(*sum) == masked(length) && u32::from_le_bytes(*end) == masked(content);
        self.at = self.at.checked_add(size)?.checked_add(AROUND)?;
        sound.then_some(content)
    }
}

/// Returns the contents of a field of a message.
fn texts_of(message: &[u8], number: u32) -> Vec<&[u8]> {
    let found = fields(message).filter_map(|(field, value)| match value {
        Field::Bytes(bytes) if field == number => Some(bytes),
        _ => None,
    });
    found.collect()
}

/// True if an event holds the text that names the run.
fn is_run(event: &[u8], run: &str) -> bool {
    let values = texts_of(event, 5).into_iter().flat_map(|summary| texts_of(summary, 1));
    values.into_iter().any(|value| {
        let tensors = texts_of(value, 8);
        let texts = tensors.into_iter().flat_map(|tensor| texts_of(tensor, 8));
        texts_of(value, 1) == [RUN.as_bytes()] && texts.into_iter().any(|text| text == run.as_bytes())
    })
}

/// Returns the step of an event; `None` for one without a step.
fn step_of(event: &[u8]) -> Option<u64> {
    fields(event).find_map(|(field, value)| match value {
        Field::Number(step) if field == 2 => Some(step),
        _ => None,
    })
}

/// CRC32C (Castagnoli), reflected; RFC 3720, appendix B.4.
fn crc32c(bytes: &[u8]) -> u32 {
    !bytes.iter().fold(!0, |sum: u32, byte| TABLE[usize::from((sum as u8) ^ byte)] ^ (sum >> 8))
}

/// Remainders of all bytes.
const TABLE: [u32; 256] = {
    let (mut table, mut i) = ([0; 256], 0);
    while i < 256 {
        let (mut sum, mut bit) = (i as u32, 0);
        while bit < 8 {
            sum = if sum & 1 == 1 { (sum >> 1) ^ 0x82f6_3b78 } else { sum >> 1 };
            bit += 1;
        }
        table[i] = sum;
        i += 1;
    }
    table
};

/// Masks a checksum as TFRecord does, for bytes that hold checksums themselves.
fn masked(bytes: &[u8]) -> u32 {
    crc32c(bytes).rotate_right(15).wrapping_add(0xa282_ead8)
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    /// Written and read back by TensorBoard 2.21 (`EventAccumulator`): tests/data/make_events.py.
    const GOLDEN: &[u8] = include_bytes!("../../../tests/data/events/events.out.tfevents.golden");

    fn write(path: &Path, steps: std::ops::RangeInclusive<u64>, resumed: u64) -> EventFile {
        let texts = [("settings", "seed = 1\n")];
        let mut events = EventFile::open(path, "runs/first", &texts, resumed, 1.7e9).unwrap();
        for step in steps {
            let scalars = [("train/loss", 4.5 / step as f64), ("validation/loss", f64::NAN)];
            events.scalars(step, 1.7e9 + step as f64, &scalars[..1 + usize::from(step % 2 == 0)]).unwrap();
        }
        events
    }

    #[test]
    fn checksums_are_castagnolis() {
        // RFC 3720, appendix B.4, and the usual check value.
        assert_eq!((crc32c(b"123456789"), crc32c(&[0; 32])), (0xe306_9283, 0x8a91_36aa));
    }

    #[test]
    fn bytes_are_those_that_tensorboard_reads() {
        let dir = tempfile::TempDir::new().unwrap();
        let path = dir.path().join("events");
        write(&path, 1..=4, 0);
        assert_eq!(std::fs::read(&path).unwrap(), GOLDEN);
    }

    #[test]
    fn a_resumed_run_writes_no_step_twice() {
        let dir = tempfile::TempDir::new().unwrap();
        let path = dir.path().join("events");
        write(&path, 1..=4, 0);
        // Resumed at step 2, after more had been written; then killed within a record.
        let events = write(&path, 1..=4, 2);
        assert_eq!(events.last_step(), Some(4));
        assert_eq!(std::fs::read(&path).unwrap(), GOLDEN);
        std::fs::write(&path, &GOLDEN[..GOLDEN.len() - 7]).unwrap();
        assert_eq!(write(&path, 4..=4, 4).last_step(), Some(4));
        assert_eq!(std::fs::read(&path).unwrap(), GOLDEN);
        // A restart begins anew.
        let events = write(&path, 1..=1, 0);
        assert_eq!(events.last_step(), Some(1));
        // A damaged record ends the file.
        let mut damaged = GOLDEN.to_vec();
        let middle = damaged.len() - 60;
        damaged[middle] ^= 1;
        std::fs::write(&path, &damaged).unwrap();
        assert_eq!(write(&path, 1..=4, 4).last_step(), Some(4));
        assert_eq!(std::fs::read(&path).unwrap(), GOLDEN);
    }

    #[test]
    fn events_of_others_stay() {
        let dir = tempfile::TempDir::new().unwrap();
        let path = dir.path().join("events");
        for bytes in [&b"a shopping list"[..], &GOLDEN[1..]] {
            std::fs::write(&path, bytes).unwrap();
            assert!(EventFile::open(&path, "runs/first", &[], 0, 0.0).is_err());
            assert_eq!(std::fs::read(&path).unwrap(), bytes);
        }
        std::fs::write(&path, GOLDEN).unwrap();
        let error = EventFile::open(&path, "runs/second", &[], 9, 0.0).unwrap_err().to_string();
        assert!(error.contains("events that this job did not write"), "{error}");
    }
}
