//! SHA-256 of files, streamed.

use std::fmt::Write as _;
use std::path::Path;

use sha2::{Digest, Sha256};

use crate::error::Result;
use crate::reader::Source;

/// Bytes per read: large enough that the hash, not the system call, is the cost.
const CHUNK: usize = 1 << 20;

/// Length and SHA-256 of a file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct FileDigest {
    /// Bytes of the file.
    pub len: u64,
    /// SHA-256 of its content.
    pub sha256: [u8; 32],
}

impl FileDigest {
    /// Digest of bytes in memory.
    pub fn of(bytes: &[u8]) -> Self {
        Self { len: bytes.len() as u64, sha256: Sha256::digest(bytes).into() }
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

/// Digest of the bytes now on disk at `path`, in 1 MiB of memory.
///
/// # Errors
/// [`crate::Error::Missing`], [`crate::Error::WrongKind`] or [`crate::Error::Io`] when it cannot be read.
pub fn hash_file(path: &Path) -> Result<FileDigest> {
    let source = Source::open(path, "a file to hash")?;
    let mut hasher = Sha256::new();
    let mut buf = vec![0; CHUNK];
    let mut at = 0;
    while at < source.len() {
        let n = CHUNK.min(usize::try_from(source.len() - at).unwrap_or(CHUNK));
        source.read_exact(at, &mut buf[..n], "read to hash")?;
        hasher.update(&buf[..n]);
        at += n as u64;
    }
    Ok(FileDigest { len: source.len(), sha256: hasher.finalize().into() })
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
    fn a_file_hashes_as_its_bytes_do() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("f");
        for len in [0, 1, CHUNK - 1, CHUNK, 2 * CHUNK + 17] {
            let bytes: Vec<u8> = (0..len).map(|i| (i % 251) as u8).collect();
            std::fs::write(&path, &bytes).unwrap();
            assert_eq!(hash_file(&path).unwrap(), FileDigest::of(&bytes));
        }
    }
}
