//! Faults of GGUF files.

use crate::shown::Shown;

/// A fault of a GGUF file, by the part that is at fault.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum GgufFault {
    /// The file ends before a part of it does.
    #[error(
        "{part}: expected at least {needed} bytes at byte {at}, got {available}; the file is truncated or corrupt"
    )]
    Truncated {
        /// The part being read.
        part: String,
        /// Its offset.
        at: u64,
        /// Bytes left.
        available: u64,
        /// Bytes it takes.
        needed: u64,
    },
    /// The magic is another one.
    #[error("magic: expected \"GGUF\", got bytes {0:02x?}; the file is not GGUF", .found)]
    Magic {
        /// The first four bytes.
        found: [u8; 4],
    },
    /// The magic is byte-reversed.
    #[error(
        "magic: expected \"GGUF\", got \"FUGG\"; the bytes are swapped; fix: write the file on a little-endian machine"
    )]
    SwappedMagic,
    /// The version is byte-reversed.
    #[error(
        "version: expected little-endian files, got version {version} in big-endian order; fix: convert it with gguf_convert_endian.py of llama.cpp"
    )]
    BigEndian {
        /// The version, its bytes swapped back.
        version: u32,
    },
    /// Version 0, which never existed.
    #[error("version: expected 3, got 0; the file is corrupt")]
    VersionZero,
    /// Version 1, whose lengths are 32-bit.
    #[error("version: expected 3, got 1; fix: convert the model again with a current llama.cpp")]
    VersionOne,
    /// A version that is not defined yet.
    #[error("version: expected 3, got {found}; the file is newer than this program or corrupt")]
    FutureVersion {
        /// The version.
        found: u32,
    },
    /// A count or length is impossible.
    #[error(
        "{field}: expected at most {allowed} (what the {remaining} bytes after it can hold), got {found}"
    )]
    Count {
        /// The count at fault.
        field: String,
        /// Its value, as an unsigned number.
        found: u64,
        /// Maximum that fits.
        allowed: u64,
        /// Bytes that remain.
        remaining: u64,
    },
    /// Metadata and tensor infos take more memory than any model needs.
    #[error("{part}: expected at most {allowed} bytes of metadata in memory, got more; the file is corrupt")]
    Budget {
        /// The part being read.
        part: String,
        /// The budget.
        allowed: u64,
    },
    /// Arrays within arrays.
    #[error("key \"{}\": expected at most {allowed} levels of nested arrays, got more", Shown(.key))]
    Depth {
        /// The key.
        key: String,
        /// The limit.
        allowed: usize,
    },
    /// A key, name or text is not UTF-8.
    #[error("{part}: expected UTF-8 text, got invalid bytes")]
    NotUtf8 {
        /// The part being read.
        part: String,
    },
    /// A key is empty.
    #[error("key number {index}: expected a name, got an empty key")]
    EmptyKey {
        /// Its position.
        index: u64,
    },
    /// A boolean is neither 0 nor 1.
    #[error("key \"{}\": expected a boolean 0 or 1, got {found}", Shown(.key))]
    Bool {
        /// The key.
        key: String,
        /// The byte.
        found: u8,
    },
    /// Type of a value is not defined.
    #[error("key \"{}\": expected value type 0 to 12, got {found}", Shown(.key))]
    ValueType {
        /// The key.
        key: String,
        /// The number.
        found: u32,
    },
    /// A key has another type than the format defines.
    #[error("key \"{}\": expected {allowed}, got {found}", Shown(.key))]
    KeyType {
        /// The key.
        key: String,
        /// The type found.
        found: String,
        /// Type that it must have.
        allowed: &'static str,
    },
    /// A key occurs twice.
    #[error("key \"{}\": expected one, got a second", Shown(.key))]
    DuplicateKey {
        /// The key.
        key: String,
    },
    /// `general.alignment` is invalid.
    #[error("key \"general.alignment\": expected a power of two up to {allowed}, got {found}")]
    Alignment {
        /// The value.
        found: u64,
        /// The largest allowed.
        allowed: u64,
    },
    /// A tensor info is invalid.
    #[error("tensor \"{}\": {fault}", Shown(.tensor))]
    Tensor {
        /// The tensor.
        tensor: String,
        /// The fault.
        fault: TensorFault,
    },
}

/// A fault of one tensor's info.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum TensorFault {
    /// The name occurs twice.
    #[error("expected one, got a second")]
    Duplicate,
    /// The number of dimensions is invalid.
    #[error("expected 1 to 4 dimensions, got {found}")]
    Dimensions {
        /// The number.
        found: u32,
    },
    /// A dimension is negative as a signed number.
    #[error("expected dimensions from 0 to 2^63 - 1, got {found}")]
    Dimension {
        /// The dimension, as an unsigned number.
        found: u64,
    },
    /// The number of elements or bytes overflows.
    #[error("expected fewer than 2^63 elements and bytes, got shape {shape:?} (fastest first)")]
    Overflow {
        /// Dimensions as in the file.
        shape: Vec<u64>,
    },
    /// Type is not defined.
    #[error("expected type {allowed}, got {found}")]
    Type {
        /// The number.
        found: u32,
        /// Defined types.
        allowed: String,
    },
    /// Blocks do not divide a row.
    #[error("expected rows of a multiple of {block} elements (the block of {ty}), got {found}")]
    Row {
        /// Elements of a row.
        found: u64,
        /// Elements of a block.
        block: usize,
        /// Type.
        ty: &'static str,
    },
    /// The offset is not aligned.
    #[error("expected an offset that is a multiple of {alignment}, got {found}")]
    Unaligned {
        /// The offset.
        found: u64,
        /// The alignment.
        alignment: u64,
    },
    /// The data extend beyond the file.
    #[error(
        "expected data within {available} bytes, got {len} bytes at offset {offset}; the file is truncated or corrupt"
    )]
    PastEnd {
        /// The offset.
        offset: u64,
        /// Bytes of the tensor.
        len: u64,
        /// Bytes of the data section.
        available: u64,
    },
    /// The data overlap another tensor's.
    #[error("expected an offset from {end} on, where \"{}\" ends, got {offset}", Shown(.previous))]
    Overlap {
        /// The offset.
        offset: u64,
        /// End of the one before.
        end: u64,
        /// The one before.
        previous: String,
    },
}
