//! SHA-256 of files, streamed.

use std::fmt::Write as _;
use std::path::Path;

use serde::{Deserialize, Serialize};
use sha2::{Digest, Sha256};

use crate::error::Result;
use crate::reader::RegularFile;

/// Bytes per read: large enough to amortize system calls.
const CHUNK: usize = 1 << 20;

/// Length and SHA-256 of a file. As JSON `{"bytes": length, "sha256": "64 hexadecimal digits"}`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(try_from = "Spelt", into = "Spelt")]
pub struct FileDigest {
    /// Bytes of the file.
    pub len: u64,
    /// SHA-256 of its content.
    pub sha256: [u8; 32],
}

/// A [`FileDigest`] as it is spelt in JSON.
#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct Spelt {
    bytes: u64,
    sha256: String,
}

impl From<FileDigest> for Spelt {
    fn from(digest: FileDigest) -> Self {
        Spelt { bytes: digest.len, sha256: digest.hex() }
    }
}

impl TryFrom<Spelt> for FileDigest {
    type Error = String;

    fn try_from(spelt: Spelt) -> std::result::Result<Self, String> {
        let sha256 = Self::parse_hex(&spelt.sha256);
        let sha256 = sha256.ok_or("sha256: expected 64 lower-case hexadecimal digits, got other text")?;
        Ok(Self { len: spelt.bytes, sha256 })
    }
}

impl FileDigest {
    /// Digest of bytes in memory.
    pub fn of(bytes: &[u8]) -> Self {
        Self { len: bytes.len() as u64, sha256: Sha256::digest(bytes).into() }
    }

    /// Digest of pieces of bytes, one after another.
    pub fn of_pieces(pieces: impl IntoIterator<Item = impl AsRef<[u8]>>) -> Self {
        let (mut hasher, mut len) = (Sha256::new(), 0);
        for piece in pieces {
            hasher.update(piece.as_ref());
            len += piece.as_ref().len() as u64;
        }
        Self { len, sha256: hasher.finalize().into() }
    }

    /// The hash as 64 lower-case hexadecimal digits.
    pub fn hex(&self) -> String {
        self.sha256.iter().fold(String::with_capacity(64), |mut text, byte| {
            // Writing to a String cannot fail.
            let _ = write!(text, "{byte:02x}");
            text
        })
    }

    /// The hash that [`Self::hex`] prints, or `None` when the text is not 64 lower-case digits.
    pub(crate) fn parse_hex(text: &str) -> Option<[u8; 32]> {
        let digits = text.as_bytes();
        let mut hash = [0; 32];
        if digits.len() != 64 {
            return None;
        }
        for (byte, pair) in hash.iter_mut().zip(digits.chunks_exact(2)) {
            *byte = hex_digit(pair[0])? << 4 | hex_digit(pair[1])?;
        }
        Some(hash)
    }
}

/// Digest of the file at `path` as it is on disk, in 1 MiB of memory.
///
/// # Errors
/// [`crate::Error::Missing`], [`crate::Error::WrongKind`] or [`crate::Error::Io`] if it cannot be read.
pub fn hash_file(path: &Path) -> Result<FileDigest> {
    let source = RegularFile::open(path, "a file to hash")?;
    let mut hasher = Sha256::new();
    each_piece(&source, &mut vec![0; CHUNK], &mut |piece, _| {
        hasher.update(piece);
        true
    })?;
    Ok(FileDigest { len: source.len(), sha256: hasher.finalize().into() })
}

/// Like [`hash_file`], with the nonempty `buffer`. `go_on` receives the number of bytes hashed and may stop; the
/// result is then `None`.
///
/// # Errors
/// As [`hash_file`].
pub fn hash_file_while(
    path: &Path,
    buffer: &mut [u8],
    go_on: &mut dyn FnMut(u64) -> bool,
) -> Result<Option<FileDigest>> {
    let source = RegularFile::open(path, "a file to hash")?;
    let mut hasher = Sha256::new();
    let whole = each_piece(&source, buffer, &mut |piece, done| {
        hasher.update(piece);
        go_on(done)
    })?;
    Ok(whole.then(|| FileDigest { len: source.len(), sha256: hasher.finalize().into() }))
}

/// Passes a file to `take` piece by piece, with the number of bytes read so far. Returns false if `take` stopped it.
fn each_piece(
    source: &RegularFile,
    buffer: &mut [u8],
    take: &mut dyn FnMut(&[u8], u64) -> bool,
) -> Result<bool> {
    let mut at = 0;
    while at < source.len() {
        let n = buffer.len().min(usize::try_from(source.len() - at).unwrap_or(usize::MAX));
        source.read_exact(at, &mut buffer[..n], "read to hash")?;
        at += n as u64;
        if !take(&buffer[..n], at) {
            return Ok(false);
        }
    }
    Ok(true)
}

fn hex_digit(digit: u8) -> Option<u8> {
    match digit {
        b'0'..=b'9' => Some(digit - b'0'),
        b'a'..=b'f' => Some(digit - b'a' + 10),
        _ => None,
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]
mod tests {
    use super::*;

    /// FIPS 180-4 example: SHA-256("abc").
    const ABC: &str = "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad";

    #[test]
    fn published_vector_and_hex() {
        let digest = FileDigest::of(b"abc");
        assert_eq!(digest.hex(), ABC);
        assert_eq!(FileDigest::parse_hex(ABC), Some(digest.sha256));
        assert_eq!(FileDigest::parse_hex(&ABC.to_uppercase()), None);
        assert_eq!(FileDigest::parse_hex(&ABC[1..]), None);
    }

    #[test]
    fn a_file_hashes_like_its_bytes() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("f");
        for len in [0, 1, CHUNK - 1, CHUNK, 2 * CHUNK + 17] {
            let bytes: Vec<u8> = (0..len).map(|i| (i % 251) as u8).collect();
            std::fs::write(&path, &bytes).unwrap();
            let digest = FileDigest::of(&bytes);
            assert_eq!(hash_file(&path).unwrap(), digest);
            assert_eq!(FileDigest::of_pieces(bytes.chunks(1000)), digest);
            let mut calls = 0;
            let cut = hash_file_while(&path, &mut [0; 4096], &mut |_| {
                calls += 1;
                calls < 3
            });
            assert_eq!(cut.unwrap(), (len <= 2 * 4096).then_some(digest));
        }
    }

    #[test]
    fn json_is_read_back_and_checked() {
        let text = format!("{{\"bytes\":3,\"sha256\":\"{ABC}\"}}");
        let digest = FileDigest::of(b"abc");
        assert_eq!(serde_json::to_string(&digest).unwrap(), text);
        assert_eq!(serde_json::from_str::<FileDigest>(&text).unwrap(), digest);
        assert!(serde_json::from_str::<FileDigest>(&text.replace("ba78", "BA78")).is_err());
    }
}
