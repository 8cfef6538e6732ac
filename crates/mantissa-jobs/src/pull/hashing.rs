//! Hashes of files by the two rules of the hub.

use sha1::Sha1;
use sha2::{Digest, Sha256};

use super::listing::FileHash;

/// Running hash of a file.
pub(super) enum Hashing {
    /// SHA-256 of the bytes.
    Sha256(Sha256),
    /// SHA-1 of git's header and the bytes.
    Git(Sha1),
}

impl Hashing {
    /// Starts a hash of the kind of `hash`, of a file with `size` bytes.
    pub fn of(hash: &FileHash, size: u64) -> Self {
        match hash {
            FileHash::Sha256(_) => Hashing::Sha256(Sha256::new()),
            FileHash::Git(_) => Hashing::Git(Sha1::new_with_prefix(format!("blob {size}\0"))),
        }
    }

    /// Adds the next bytes.
    pub fn update(&mut self, bytes: &[u8]) {
        match self {
            Hashing::Sha256(hash) => hash.update(bytes),
            Hashing::Git(hash) => hash.update(bytes),
        }
    }

    /// Returns the digits.
    pub fn finish(self) -> String {
        match self {
            Hashing::Sha256(hash) => hex(&hash.finalize()),
            Hashing::Git(hash) => hex(&hash.finalize()),
        }
    }
}

fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    /// `printf 'hello\n' | git hash-object --stdin`, and its SHA-256.
    #[test]
    fn hashes_are_those_of_git_and_of_sha256() {
        let of = |hash: FileHash| {
            let mut hashing = Hashing::of(&hash, 6);
            hashing.update(b"hel");
            hashing.update(b"lo\n");
            hashing.finish()
        };
        assert_eq!(of(FileHash::Git(String::new())), "ce013625030ba8dba906f756967f9e9ca394464a");
        let sha256 = "5891b5b522d5df086d0ff0b110fbd9d21bb4fc7163af34d08286a2e846f6be03";
        assert_eq!(of(FileHash::Sha256(String::new())), sha256);
    }
}
