//! Checksum of a whole safetensors file in its own metadata, which detects a single flipped bit anywhere.
//!
//! The checksum is the XXH64 of the file with the digits of the checksum as zeros, stored under [`KEY`] as 16
//! hexadecimal digits.

use std::collections::BTreeMap;
use std::fs::File;
use std::path::Path;

use crate::checksum::Checksum;
use crate::disk;
use crate::error::{Error, Result};
use crate::failpoint;
use crate::reader::RegularFile;
use crate::safetensors::MAX_HEADER_BYTES;

/// Metadata key of the checksum.
pub const KEY: &str = "mantissa-xxh64";

/// Value of the key while the checksum is computed.
const ZEROS: &str = "0000000000000000";

/// Bytes read at a time.
const PIECE: usize = 1 << 20;

/// Adds room for the checksum to the metadata of a file that will be [sealed](seal).
pub fn reserve(metadata: &mut BTreeMap<String, String>) {
    metadata.insert(KEY.to_owned(), ZEROS.to_owned());
}

/// Writes the checksum into the finished file at `path`, whose metadata must [`reserve`] space for it, and makes it
/// durable.
///
/// # Errors
/// [`Error::Field`] without reserved space, [`Error::Io`].
pub fn seal(path: &Path) -> Result<()> {
    let (sum, at, _) = sum(path)?;
    let file =
        failpoint::read(|| File::options().write(true).open(path)).map_err(|e| Error::io(path, "open", e))?;
    disk::write_at(&file, path, format!("{sum:016x}").as_bytes(), at)
        .map_err(|e| Error::io(path, "write", e))?;
    disk::sync(&file, path).map_err(|e| Error::io(path, "fsync", e))
}

/// Checks the file at `path` against its checksum.
///
/// # Errors
/// [`Error::Field`] if it has none or another, which means damage; [`Error::Missing`], [`Error::Io`].
pub fn check(path: &Path) -> Result<()> {
    let (sum, _, stated) = sum(path)?;
    if stated == format!("{sum:016x}") {
        return Ok(());
    }
    let allowed = format!("{stated}, as its metadata say");
    Err(Error::field(path, KEY, format!("a file with checksum {sum:016x}"), allowed, "the file is damaged"))
}

/// True if `error` is a missing or wrong checksum: this file is damaged, while copies may be intact.
pub fn is_damage(error: &Error) -> bool {
    matches!(error, Error::Field(fault) if fault.field == KEY)
}

/// Checksum of a file, the position of its digits, and the stored digits.
fn sum(path: &Path) -> Result<(u64, u64, String)> {
    let source = RegularFile::open(path, "a safetensors file")?;
    let missing = || Error::field(path, KEY, "no checksum", "16 hexadecimal digits", "the file is damaged");
    let header = header_text(&source)?.ok_or_else(missing)?;
    let key = format!("\"{KEY}\":\"");
    let start = header.windows(key.len()).position(|window| window == key.as_bytes()).ok_or_else(missing)?;
    let at = start + key.len();
    let stated = header.get(at..at + ZEROS.len()).ok_or_else(missing)?;
    let stated = String::from_utf8_lossy(stated).into_owned();
    let at = 8 + at as u64;
    let mut sum = Checksum::default();
    let mut piece = vec![0; PIECE];
    let mut done = 0u64;
    while done < source.len() {
        let n = piece.len().min(usize::try_from(source.len() - done).unwrap_or(PIECE));
        source.read_exact(done, &mut piece[..n], "read to check")?;
        for digit in at.max(done)..(at + ZEROS.len() as u64).min(done + n as u64) {
            piece[(digit - done) as usize] = b'0';
        }
        sum.update(&piece[..n]);
        done += n as u64;
    }
    Ok((sum.finish(), at, stated))
}

/// Header after its length field; `None` if the length is invalid.
fn header_text(source: &RegularFile) -> Result<Option<Vec<u8>>> {
    if source.len() < 8 {
        return Ok(None);
    }
    let mut len = [0; 8];
    source.read_exact(0, &mut len, "read header")?;
    let len = u64::from_le_bytes(len);
    if len > MAX_HEADER_BYTES || len > source.len() - 8 {
        return Ok(None);
    }
    source.read_vec(8, len, "header", "read header").map(Some)
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;
    use crate::dtype::Dtype;
    use crate::writer::{SafetensorsWriter, TensorSpec};

    #[test]
    fn every_flipped_bit_is_found() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("a.safetensors");
        let mut metadata = BTreeMap::from([("about".to_owned(), "x".to_owned())]);
        reserve(&mut metadata);
        let specs = vec![TensorSpec::new("t", Dtype::U8, [40])];
        let mut writer = SafetensorsWriter::create(&path, specs, metadata).unwrap();
        writer.write("t", &[7; 40]).unwrap();
        writer.finish().unwrap();
        assert!(check(&path).is_err(), "not sealed yet");
        seal(&path).unwrap();
        check(&path).unwrap();
        let whole = std::fs::read(&path).unwrap();
        for bit in 0..8 * whole.len() {
            let mut damaged = whole.clone();
            damaged[bit / 8] ^= 1 << (bit % 8);
            std::fs::write(&path, damaged).unwrap();
            assert!(is_damage(&check(&path).unwrap_err()), "bit {bit}");
        }
    }
}
