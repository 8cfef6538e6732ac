//! What can be wrong with a GGUF file.

use crate::error::Shown;

/// A fault of a GGUF file, by the part that is at fault.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum GgufFault {
    /// The file ends before a part of it does.
    #[error(
        "{part}: found {available} bytes at byte {at}, allowed at least {needed}; the file is truncated or corrupt"
    )]
    Truncated {
        /// What was being read.
        part: String,
        /// Where it begins.
        at: u64,
        /// Bytes left.
        available: u64,
        /// Bytes it takes.
        needed: u64,
    },
    /// The first bytes are something else.
    #[error("magic: found bytes {0:02x?}, allowed \"GGUF\"; the file is not GGUF", .found)]
    Magic {
        /// The first four bytes.
        found: [u8; 4],
    },
    /// The magic stands backwards.
    #[error(
        "magic: found \"FUGG\", allowed \"GGUF\"; the bytes are swapped: write the file on a little-endian machine"
    )]
    SwappedMagic,
    /// The version reads as a small number with its bytes reversed.
    #[error(
        "version: found {version} in big-endian order, allowed little-endian files; convert it with gguf_convert_endian.py of llama.cpp"
    )]
    BigEndian {
        /// The version, its bytes swapped back.
        version: u32,
    },
    /// Version 0, which never existed.
    #[error("version: found 0, allowed 3; the file is corrupt")]
    VersionZero,
    /// Version 1, whose lengths are 32-bit.
    #[error("version: found 1, allowed 3; convert the model again with a present llama.cpp")]
    VersionOne,
    /// A version that is not defined yet.
    #[error("version: found {found}, allowed 3; the file is newer than this program or corrupt")]
    FutureVersion {
        /// The version.
        found: u32,
    },
    /// A count or length that cannot be.
    #[error(
        "{field}: found {found}, allowed at most {allowed}, what the {remaining} bytes after it can hold"
    )]
    Count {
        /// Which count.
        field: String,
        /// It, as an unsigned number.
        found: u64,
        /// The most that fits.
        allowed: u64,
        /// Bytes that remain.
        remaining: u64,
    },
    /// Metadata and tensor infos take more memory than any model needs.
    #[error(
        "{part}: found more than {allowed} bytes of metadata in memory, allowed up to that; the file is corrupt"
    )]
    Budget {
        /// What was being read.
        part: String,
        /// The budget.
        allowed: u64,
    },
    /// Arrays within arrays.
    #[error("key \"{}\": found arrays nested deeper than {allowed}, allowed up to that", Shown(.key))]
    Depth {
        /// The key.
        key: String,
        /// The limit.
        allowed: usize,
    },
    /// A key, name or text is not UTF-8.
    #[error("{part}: found bytes that are not UTF-8, allowed UTF-8 text")]
    NotUtf8 {
        /// What was being read.
        part: String,
    },
    /// A key has no characters.
    #[error("key number {index}: found an empty key, allowed a name")]
    EmptyKey {
        /// Its position.
        index: u64,
    },
    /// A boolean is neither 0 nor 1.
    #[error("key \"{}\": found a boolean of value {found}, allowed 0 or 1", Shown(.key))]
    Bool {
        /// The key.
        key: String,
        /// The byte.
        found: u8,
    },
    /// The type of a value is not defined.
    #[error("key \"{}\": found value type {found}, allowed 0 to 12", Shown(.key))]
    ValueType {
        /// The key.
        key: String,
        /// The number.
        found: u32,
    },
    /// A key whose type the format defines has another.
    #[error("key \"{}\": found {found}, allowed {allowed}", Shown(.key))]
    KeyType {
        /// The key.
        key: String,
        /// The type found.
        found: String,
        /// The type that it must have.
        allowed: &'static str,
    },
    /// A key stands twice.
    #[error("key \"{}\": found it twice, allowed once", Shown(.key))]
    DuplicateKey {
        /// The key.
        key: String,
    },
    /// `general.alignment` cannot be used.
    #[error("key \"general.alignment\": found {found}, allowed a power of two up to {allowed}")]
    Alignment {
        /// The value.
        found: u64,
        /// The largest allowed.
        allowed: u64,
    },
    /// A tensor's info is at fault.
    #[error("tensor \"{}\": {fault}", Shown(.tensor))]
    Tensor {
        /// The tensor.
        tensor: String,
        /// What is wrong.
        fault: TensorFault,
    },
}

/// A fault of one tensor's info.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum TensorFault {
    /// The name stands twice.
    #[error("found it twice, allowed once")]
    Duplicate,
    /// The number of dimensions.
    #[error("found {found} dimensions, allowed 1 to 4")]
    Dimensions {
        /// The number.
        found: u32,
    },
    /// A dimension is negative, as the format counts.
    #[error("found dimension {found}, allowed 0 to 2^63 - 1")]
    Dimension {
        /// The dimension, as an unsigned number.
        found: u64,
    },
    /// Elements or bytes cannot be counted.
    #[error("found shape {shape:?} (fastest first), allowed fewer than 2^63 elements and bytes")]
    Overflow {
        /// Dimensions as in the file.
        shape: Vec<u64>,
    },
    /// The type is not defined.
    #[error("found type {found}, allowed {allowed}")]
    Type {
        /// The number.
        found: u32,
        /// The types that are.
        allowed: String,
    },
    /// Blocks do not divide a row.
    #[error("found rows of {found} elements, allowed multiples of {block}, the block of {ty}")]
    Row {
        /// Elements of a row.
        found: u64,
        /// Elements of a block.
        block: usize,
        /// Type.
        ty: &'static str,
    },
    /// The offset is not aligned.
    #[error("found offset {found}, allowed multiples of {alignment}")]
    Unaligned {
        /// The offset.
        found: u64,
        /// The alignment.
        alignment: u64,
    },
    /// The data end behind the file.
    #[error(
        "found {len} bytes at offset {offset}, allowed within the {available} bytes of data; the file is truncated or corrupt"
    )]
    PastEnd {
        /// The offset.
        offset: u64,
        /// Bytes of the tensor.
        len: u64,
        /// Bytes of the data section.
        available: u64,
    },
    /// The data lie over another tensor's.
    #[error("found data at offset {offset}, allowed from {end} on, where \"{}\" ends", Shown(.previous))]
    Overlap {
        /// The offset.
        offset: u64,
        /// End of the one before.
        end: u64,
        /// The one before.
        previous: String,
    },
}
