//! What can be wrong, by the part of the input or output that is at fault.

use std::path::PathBuf;

use super::{Shown, ShownPath};
use crate::dtype::Dtype;

/// What is wrong with a safetensors file as a whole.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum HeaderFault {
    /// Fewer than the 8 bytes of the header length.
    #[error("file: found {found} bytes, allowed at least 8 and a header; the file is empty or truncated")]
    TooShort {
        /// Bytes of the file.
        found: u64,
    },
    /// The stated header length exceeds the cap.
    #[error("header length: found {found}, allowed at most {cap}; the file is not safetensors or is corrupt")]
    TooLong {
        /// The stated length.
        found: u64,
        /// The cap.
        cap: u64,
    },
    /// The stated header length exceeds the file.
    #[error(
        "header length: found {found}, allowed at most the {available} bytes that follow it; the file is truncated or corrupt"
    )]
    PastEnd {
        /// The stated length.
        found: u64,
        /// Bytes after the length field.
        available: u64,
    },
    /// The header is not UTF-8.
    #[error("header: found a byte that is not UTF-8 at header byte {position}, allowed JSON text")]
    NotUtf8 {
        /// Position from the start of the header.
        position: usize,
    },
    /// The header is not the JSON it should be.
    #[error("header: found at header byte {position}: {}, allowed a JSON object of tensor entries", Shown(.message))]
    Json {
        /// Position from the start of the header.
        position: usize,
        /// The parser's message.
        message: String,
    },
    /// `__metadata__` is not an object of strings.
    #[error("__metadata__: found at header byte {position}: {}, allowed an object of strings", Shown(.message))]
    Metadata {
        /// Position from the start of the header.
        position: usize,
        /// The parser's message.
        message: String,
    },
    /// `__metadata__` occurs twice.
    #[error("__metadata__: found twice, allowed once")]
    DuplicateMetadata,
    /// A key of `__metadata__` occurs twice.
    #[error("__metadata__: found key \"{}\" twice, allowed once", Shown(.key))]
    DuplicateMetadataKey {
        /// The key.
        key: String,
    },
    /// Bytes that belong to no tensor follow the last one.
    #[error(
        "file: found {found} bytes of data, allowed the {used} that tensors cover; trailing bytes are not allowed"
    )]
    TrailingBytes {
        /// Bytes after the header.
        found: u64,
        /// Bytes that the tensors cover.
        used: u64,
    },
}

/// What is wrong with one tensor's header entry.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum TensorFault {
    /// The name occurs twice in one file.
    #[error("name: found twice, allowed once")]
    Duplicate,
    /// The entry is not the JSON it should be.
    #[error("found at header byte {position}: {}, allowed {{\"dtype\", \"shape\", \"data_offsets\"}}", Shown(.message))]
    Entry {
        /// Position from the start of the header.
        position: usize,
        /// The parser's message.
        message: String,
    },
    /// A field of the entry is missing.
    #[error("{field}: found nothing, allowed a value")]
    MissingField {
        /// The field.
        field: &'static str,
    },
    /// A field of the entry occurs twice.
    #[error("{field}: found twice, allowed once")]
    DuplicateField {
        /// The field.
        field: &'static str,
    },
    /// A field that the format does not define, and whose meaning could change how the tensor is read.
    #[error("found unknown field \"{}\", allowed dtype shape data_offsets", Shown(.field))]
    UnknownField {
        /// The field.
        field: String,
    },
    /// The dtype is not one of the format's.
    #[error("dtype: found \"{}\", allowed {}", Shown(.found), Dtype::known())]
    UnknownDtype {
        /// The dtype's name.
        found: String,
    },
    /// A dimension is negative, fractional or too large.
    #[error("shape: found dimension {found}, allowed an integer from 0 to 2^63-1")]
    Dimension {
        /// The number.
        found: String,
    },
    /// The element or byte count does not fit in 63 bits.
    #[error("shape: found {shape} whose size overflows, allowed at most 2^63-1 bits")]
    Overflow {
        /// The shape, as text.
        shape: String,
    },
    /// A sub-byte dtype ends within a byte.
    #[error("shape: found {shape} of {dtype} ({bits} bits), allowed a whole number of bytes")]
    PartialByte {
        /// The shape, as text.
        shape: String,
        /// The dtype.
        dtype: Dtype,
        /// Bits of the tensor.
        bits: u64,
    },
    /// An offset is not a non-negative integer.
    #[error("data_offsets: found {found}, allowed two integers [begin, end]")]
    Offset {
        /// The number, or the count of numbers.
        found: String,
    },
    /// The end lies before the beginning.
    #[error("data_offsets: found [{start}, {end}], allowed begin <= end")]
    Reversed {
        /// First byte.
        start: u64,
        /// Byte after the last.
        end: u64,
    },
    /// The range and the shape disagree.
    #[error("data_offsets: found {found} bytes, allowed the {expected} of its dtype and shape")]
    Size {
        /// Bytes of the range.
        found: u64,
        /// Bytes by dtype and shape.
        expected: u64,
    },
    /// The range begins before the previous tensor ends.
    #[error("data_offsets: found begin {start}, allowed {end} where tensor \"{}\" ends; the two overlap", Shown(.previous))]
    Overlap {
        /// First byte.
        start: u64,
        /// End of the previous tensor.
        end: u64,
        /// The previous tensor.
        previous: String,
    },
    /// Bytes that belong to no tensor come before this one.
    #[error(
        "data_offsets: found begin {start}, allowed {end} where the tensor before ends; holes are not allowed"
    )]
    Hole {
        /// First byte.
        start: u64,
        /// End of the previous tensor, or 0.
        end: u64,
    },
    /// The range reaches beyond the file.
    #[error(
        "data_offsets: found end {end}, allowed at most the {available} bytes of data in the file; the file is truncated or corrupt"
    )]
    PastEnd {
        /// Byte after the last.
        end: u64,
        /// Bytes after the header.
        available: u64,
    },
}

/// What is wrong with a JSON file.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum JsonFault {
    /// The file exceeds the cap for its kind.
    #[error("file: found {found} bytes, allowed at most {cap}")]
    TooLarge {
        /// Bytes of the file.
        found: u64,
        /// The cap.
        cap: u64,
    },
    /// The text is not UTF-8.
    #[error("found a byte that is not UTF-8 at byte {position}, allowed JSON text")]
    NotUtf8 {
        /// Byte position.
        position: usize,
    },
    /// The text is not JSON, or nests deeper than 128.
    #[error("found at line {line} column {column}: {}, allowed strict JSON at most 128 deep", Shown(.message))]
    Syntax {
        /// Line, from 1.
        line: usize,
        /// Column, from 1.
        column: usize,
        /// The parser's message.
        message: String,
    },
    /// A key occurs twice in one object.
    #[error("found key \"{}\" twice in one object at line {line} column {column}, allowed once", Shown(.key))]
    Duplicate {
        /// The key.
        key: String,
        /// Line, from 1.
        line: usize,
        /// Column, from 1.
        column: usize,
    },
}

/// Where the index of a sharded checkpoint and its shards disagree.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum IndexFault {
    /// A shard is named by something other than a file name inside the folder.
    #[error("weight_map[\"{}\"]: found \"{}\", allowed the name of a .safetensors file in the same folder", Shown(.tensor), Shown(.shard))]
    ShardName {
        /// The tensor.
        tensor: String,
        /// The name given.
        shard: String,
    },
    /// A shard does not exist.
    #[error("weight_map[\"{}\"]: found no file \"{}\", allowed a file in the folder; download the missing shard", Shown(.tensor), Shown(.shard))]
    MissingShard {
        /// The tensor.
        tensor: String,
        /// The shard.
        shard: String,
    },
    /// A shard lacks a tensor that the index puts there.
    #[error("weight_map[\"{}\"]: found no such tensor in \"{}\", allowed a tensor of that shard", Shown(.tensor), Shown(.shard))]
    LacksTensor {
        /// The tensor.
        tensor: String,
        /// The shard.
        shard: String,
    },
    /// Two shards hold one tensor.
    #[error("tensor \"{}\": found in \"{}\" and \"{}\", allowed in one shard", Shown(.tensor), Shown(.first), Shown(.second))]
    TwoShards {
        /// The tensor.
        tensor: String,
        /// One shard.
        first: String,
        /// The other.
        second: String,
    },
    /// A shard holds a tensor that the index does not list.
    #[error("tensor \"{}\": found in \"{}\" but not in weight_map, allowed only listed tensors", Shown(.tensor), Shown(.shard))]
    Unlisted {
        /// The tensor.
        tensor: String,
        /// The shard.
        shard: String,
    },
}

/// Why a tensor cannot be written.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum WriteFault {
    /// The name is not among the specs given at creation.
    #[error("found no such tensor, allowed the names given when the file was created")]
    Unknown,
    /// The name is given twice.
    #[error("name: found twice, allowed once")]
    Duplicate,
    /// The name is the format's own key.
    #[error("name: found the reserved key, allowed any other name")]
    Reserved,
    /// Dtype and shape give no byte length.
    #[error("shape: found {shape} of {dtype}, allowed a whole number of bytes below 2^60")]
    Size {
        /// The shape, as text.
        shape: String,
        /// The dtype.
        dtype: Dtype,
    },
    /// The name is longer than readers of the format accept.
    #[error("name: found {found} bytes, allowed {allowed}")]
    NameTooLong {
        /// Bytes of the name.
        found: usize,
        /// The most allowed.
        allowed: usize,
    },
    /// The type's blocks do not fit the shape.
    #[error("{what}")]
    Blocks {
        /// What was found and what is allowed.
        what: String,
    },
    /// A write reaches beyond the tensor or is not all of it.
    #[error("found a write of {len} bytes at byte {offset}, allowed {allowed}")]
    Length {
        /// First byte, from the tensor's start.
        offset: u64,
        /// Bytes given.
        len: u64,
        /// What would be right.
        allowed: String,
    },
    /// Bytes are written a second time.
    #[error("found a second write to byte {offset}, allowed one")]
    Twice {
        /// First byte that was written before.
        offset: u64,
    },
    /// The file is finished before the tensor is complete.
    #[error("found {written} bytes written, allowed to finish at {size}")]
    Incomplete {
        /// Bytes written.
        written: u64,
        /// Bytes of the tensor.
        size: u64,
    },
}

/// Why an output path cannot be used.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum OutputFault {
    /// Another process writes the same output.
    #[error(
        "output: found process {owner} writing it, allowed one writer; wait for it or choose another path"
    )]
    Busy {
        /// Process id of the owner, or `unknown`.
        owner: String,
    },
    /// The path has no name to write to, such as `/`.
    #[error("output: found no file name, allowed a path that ends in a name")]
    NoName,
    /// Something is there that this job did not write.
    #[error(
        "output: expected nothing at this path, got {what} that this job did not write; fix: choose another path, or replace it with --overwrite"
    )]
    Exists {
        /// `a file` or `a folder`.
        what: &'static str,
    },
    /// The target has changed since the work began.
    #[error(
        "output: expected what was there when the work began, got something that changed since; fix: look at it, then choose another path or run again"
    )]
    Changed,
    /// A publication was interrupted, and its files were changed or removed since.
    #[error("output: expected the files of an interrupted publication as it left them, got others; fix: take what you need from {}, then remove that folder and run again", ShownPath(.work))]
    Stuck {
        /// The work folder with the other files.
        work: PathBuf,
    },
    /// The existing folder holds a file that its manifest does not list.
    #[error("output: expected only files that its mantissa-manifest.json lists, got \"{}\"; fix: move that file away or choose another path", Shown(.entry))]
    NotOurs {
        /// The first such file.
        entry: String,
    },
    /// The existing folder holds files but no manifest.
    #[error(
        "output: expected a folder that mantissa wrote, got one without mantissa-manifest.json; fix: choose another path, or remove the folder yourself"
    )]
    NoManifest,
    /// A file of somebody else has the name of a lock.
    #[error(
        "lock: expected a lock file of mantissa or nothing, got another file of this name; fix: move that file away"
    )]
    NotALock,
    /// All names for a work folder are taken.
    #[error(
        "work folder: expected a free name, got 64 that are taken; fix: remove what killed processes left there"
    )]
    NoFreeName,
    /// Two outputs of one command have the same path, or one lies inside the other.
    #[error(
        "{option}: expected a path of its own, got one that {relation} that of {other}; fix: choose another path"
    )]
    Twice {
        /// The option.
        option: String,
        /// `is` or `lies inside`.
        relation: &'static str,
        /// The other option.
        other: String,
    },
    /// Files of a GGUF model in another number of parts lie beside the output.
    #[error("output: expected no other files of this model, got \"{}\"; fix: remove it, or replace it with --overwrite", Shown(.entry))]
    OtherParts {
        /// The first of them.
        entry: String,
    },
    /// Output and input are the same, or one holds the other.
    #[error("output: found that it {relation} the input \"{}\", allowed a path apart from it; choose another path", Shown(.input))]
    Overlap {
        /// `is`, `lies inside` or `contains`.
        relation: &'static str,
        /// The input.
        input: String,
    },
    /// A finished header exceeds what readers accept.
    #[error("header: found {found} bytes, allowed at most {cap}; write fewer tensors to one file")]
    HeaderTooLong {
        /// Bytes of the header.
        found: u64,
        /// The cap.
        cap: u64,
    },
}
