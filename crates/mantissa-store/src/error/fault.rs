//! Faults, grouped by the part of the input or output.

use std::path::PathBuf;

use crate::dtype::Dtype;
use crate::shown::{Shown, ShownPath};

/// Fault of a safetensors file as a whole.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum HeaderFault {
    /// Fewer than the 8 bytes of the header length.
    #[error(
        "file: expected at least 8 bytes and a header, got {found} bytes; the file is empty or truncated"
    )]
    TooShort {
        /// Bytes of the file.
        found: u64,
    },
    /// The stated header length exceeds the cap.
    #[error("header length: expected at most {cap}, got {found}; the file is not safetensors or is corrupt")]
    TooLong {
        /// The stated length.
        found: u64,
        /// The cap.
        cap: u64,
    },
    /// The stated header length exceeds the file.
    #[error(
        "header length: expected at most the {available} bytes that follow it, got {found}; the file is truncated or corrupt"
    )]
    PastEnd {
        /// The stated length.
        found: u64,
        /// Bytes after the length field.
        available: u64,
    },
    /// Header is not UTF-8.
    #[error("header: expected JSON text, got invalid UTF-8 at header byte {position}")]
    NotUtf8 {
        /// Position from the start of the header.
        position: usize,
    },
    /// Header is not the JSON it should be.
    #[error("header: expected a JSON object of tensor entries, got {} at header byte {position}", Shown(.message))]
    Json {
        /// Position from the start of the header.
        position: usize,
        /// The parser's message.
        message: String,
    },
    /// `__metadata__` is not an object of strings.
    #[error("__metadata__: expected an object of strings, got {} at header byte {position}", Shown(.message))]
    Metadata {
        /// Position from the start of the header.
        position: usize,
        /// The parser's message.
        message: String,
    },
    /// `__metadata__` occurs twice.
    #[error("__metadata__: expected one, got two")]
    DuplicateMetadata,
    /// A key of `__metadata__` occurs twice.
    #[error("__metadata__: expected each key once, got \"{}\" twice", Shown(.key))]
    DuplicateMetadataKey {
        /// The key.
        key: String,
    },
    /// Bytes that belong to no tensor follow the last one.
    #[error(
        "file: expected {used} bytes of data (those of the tensors), got {found}; trailing bytes are not allowed"
    )]
    TrailingBytes {
        /// Bytes after the header.
        found: u64,
        /// Bytes that the tensors cover.
        used: u64,
    },
}

/// Fault of one tensor's header entry.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum TensorFault {
    /// The name occurs twice in one file.
    #[error("name: expected a unique name, got a second tensor of this name")]
    Duplicate,
    /// The entry is not the JSON it should be.
    #[error("expected an object {{\"dtype\", \"shape\", \"data_offsets\"}}, got {} at header byte {position}", Shown(.message))]
    Entry {
        /// Position from the start of the header.
        position: usize,
        /// The parser's message.
        message: String,
    },
    /// A field of the entry is missing.
    #[error("{field}: expected a value, got nothing")]
    MissingField {
        /// The field.
        field: &'static str,
    },
    /// A field of the entry occurs twice.
    #[error("{field}: expected one, got two")]
    DuplicateField {
        /// The field.
        field: &'static str,
    },
    /// A field that the format does not define, and whose meaning could change how the tensor is read.
    #[error("expected the fields dtype, shape and data_offsets, got \"{}\"", Shown(.field))]
    UnknownField {
        /// The field.
        field: String,
    },
    /// Dtype is not one of the format's.
    #[error("dtype: expected {}, got \"{}\"", Dtype::known(), Shown(.found))]
    UnknownDtype {
        /// The dtype's name.
        found: String,
    },
    /// A dimension is negative, fractional or too large.
    #[error("shape: expected dimensions from 0 to 2^63-1, got {found}")]
    Dimension {
        /// The number.
        found: String,
    },
    /// The element or byte count does not fit in 63 bits.
    #[error("shape: expected at most 2^63-1 bits, got {shape}, whose size overflows")]
    Overflow {
        /// The shape, as text.
        shape: String,
    },
    /// A sub-byte dtype ends within a byte.
    #[error("shape: expected a whole number of bytes, got {shape} of {dtype} ({bits} bits)")]
    PartialByte {
        /// The shape, as text.
        shape: String,
        /// The dtype.
        dtype: Dtype,
        /// Bits of the tensor.
        bits: u64,
    },
    /// An offset is not a non-negative integer.
    #[error("data_offsets: expected two integers [begin, end], got {found}")]
    Offset {
        /// The number, or the count of numbers.
        found: String,
    },
    /// The end lies before the beginning.
    #[error("data_offsets: expected begin <= end, got [{start}, {end}]")]
    Reversed {
        /// First byte.
        start: u64,
        /// Byte after the last.
        end: u64,
    },
    /// The range and the shape disagree.
    #[error("data_offsets: expected {expected} bytes for its dtype and shape, got {found}")]
    Size {
        /// Bytes of the range.
        found: u64,
        /// Bytes by dtype and shape.
        expected: u64,
    },
    /// The range begins before the previous tensor ends.
    #[error("data_offsets: expected begin {end}, where tensor \"{}\" ends, got {start}; the two overlap", Shown(.previous))]
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
        "data_offsets: expected begin {end}, where the tensor before ends, got {start}; holes are not allowed"
    )]
    Hole {
        /// First byte.
        start: u64,
        /// End of the previous tensor, or 0.
        end: u64,
    },
    /// The range reaches beyond the file.
    #[error(
        "data_offsets: expected end at most {available}, the bytes of data in the file, got {end}; the file is truncated or corrupt"
    )]
    PastEnd {
        /// Byte after the last.
        end: u64,
        /// Bytes after the header.
        available: u64,
    },
}

/// Fault of a JSON file.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum JsonFault {
    /// The file exceeds the cap for its kind.
    #[error("file: expected at most {cap} bytes, got {found}")]
    TooLarge {
        /// Bytes of the file.
        found: u64,
        /// The cap.
        cap: u64,
    },
    /// Text is not UTF-8.
    #[error("expected JSON text, got invalid UTF-8 at byte {position}")]
    NotUtf8 {
        /// Byte position.
        position: usize,
    },
    /// Text is not JSON, or nests deeper than 128.
    #[error("expected strict JSON at most 128 levels deep, got {} at line {line} column {column}", Shown(.message))]
    Syntax {
        /// Line, from 1.
        line: usize,
        /// Column, from 1.
        column: usize,
        /// The parser's message.
        message: String,
    },
    /// A key occurs twice in one object.
    #[error("expected each key once, got \"{}\" twice in one object at line {line} column {column}", Shown(.key))]
    Duplicate {
        /// The key.
        key: String,
        /// Line, from 1.
        line: usize,
        /// Column, from 1.
        column: usize,
    },
}

/// Contradiction between the index of a sharded checkpoint and its shards.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum IndexFault {
    /// A shard is named by something other than a file name inside the folder.
    #[error("weight_map[\"{}\"]: expected the name of a .safetensors file in the same folder, got \"{}\"", Shown(.tensor), Shown(.shard))]
    ShardName {
        /// The tensor.
        tensor: String,
        /// The name given.
        shard: String,
    },
    /// A shard does not exist.
    #[error("weight_map[\"{}\"]: expected file \"{}\" in the folder, got none; fix: download the missing shard", Shown(.tensor), Shown(.shard))]
    MissingShard {
        /// The tensor.
        tensor: String,
        /// The shard.
        shard: String,
    },
    /// A shard lacks a tensor that the index puts there.
    #[error("weight_map[\"{}\"]: expected this tensor in \"{}\", got none", Shown(.tensor), Shown(.shard))]
    LacksTensor {
        /// The tensor.
        tensor: String,
        /// The shard.
        shard: String,
    },
    /// Two shards hold one tensor.
    #[error("tensor \"{}\": expected one shard with it, got \"{}\" and \"{}\"", Shown(.tensor), Shown(.first), Shown(.second))]
    TwoShards {
        /// The tensor.
        tensor: String,
        /// One shard.
        first: String,
        /// The other.
        second: String,
    },
    /// A shard holds a tensor that the index does not list.
    #[error("tensor \"{}\": expected an entry in weight_map, got none; \"{}\" holds the tensor", Shown(.tensor), Shown(.shard))]
    Unlisted {
        /// The tensor.
        tensor: String,
        /// The shard.
        shard: String,
    },
}

/// Reason why a tensor cannot be written.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum WriteFault {
    /// Name is not among the specs given at creation.
    #[error("expected a name given when the file was created, got another")]
    Unknown,
    /// Name is given twice.
    #[error("name: expected a unique name, got a second tensor of this name")]
    Duplicate,
    /// Name is the format's own key.
    #[error("name: expected a name other than the reserved key, got that key")]
    Reserved,
    /// Dtype and shape give no byte length.
    #[error("shape: expected a whole number of bytes below 2^60, got {shape} of {dtype}")]
    Size {
        /// The shape, as text.
        shape: String,
        /// The dtype.
        dtype: Dtype,
    },
    /// Name is longer than readers of the format accept.
    #[error("name: expected at most {allowed} bytes, got {found}")]
    NameTooLong {
        /// Bytes of the name.
        found: usize,
        /// The most allowed.
        allowed: usize,
    },
    /// The type's blocks do not fit the shape.
    #[error("{what}")]
    Blocks {
        /// Message of the block type.
        what: String,
    },
    /// A write reaches beyond the tensor or is not all of it.
    #[error("expected {allowed}, got a write of {len} bytes at byte {offset}")]
    Length {
        /// First byte, from the tensor's start.
        offset: u64,
        /// Bytes given.
        len: u64,
        /// The accepted range.
        allowed: String,
    },
    /// Bytes are written a second time.
    #[error("expected one write to byte {offset}, got a second")]
    Twice {
        /// First byte that was written before.
        offset: u64,
    },
    /// File is finished before the tensor is complete.
    #[error("expected {size} bytes written, got {written}")]
    Incomplete {
        /// Bytes written.
        written: u64,
        /// Bytes of the tensor.
        size: u64,
    },
}

/// Reason why an output path cannot be used.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum OutputFault {
    /// Another process writes the same output.
    #[error(
        "output: expected one writer, got process {owner} writing it; fix: wait for it or choose another path"
    )]
    Busy {
        /// Process id of the owner, or `unknown`.
        owner: String,
    },
    /// The path has no name to write to, such as `/`.
    #[error("output: expected a path that ends in a name, got no file name")]
    NoName,
    /// The path holds something that this job did not write.
    #[error(
        "output: expected nothing at this path, got {what} that this job did not write with these options; fix: choose another path, or replace it with --overwrite"
    )]
    Exists {
        /// `a file` or `a folder`.
        what: &'static str,
    },
    /// The path holds a finished output of another job or from other inputs.
    #[error(
        "output: expected nothing at this path, or the output of this job, got {what} that differs: {}; fix: choose another path, or replace it with --overwrite", Shown(.why)
    )]
    Differs {
        /// `a file` or `a folder`.
        what: &'static str,
        /// First thing that differs.
        why: String,
    },
    /// The target has changed since the work began.
    #[error(
        "output: expected a target unchanged since the work began, got a changed one; fix: check it, then choose another path or run again"
    )]
    Changed,
    /// A publication was interrupted, and its files were changed or removed since.
    #[error("output: expected the unchanged files of an interrupted publication, got others; fix: save what you need from {}, then remove that folder and run again", ShownPath(.work))]
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
        "work folder: expected a free name, got 64 taken names; fix: remove the leftovers of killed processes there"
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
    /// The output lies inside another output, or contains one.
    #[error("output: expected a path that neither lies inside another output nor contains one, got one that {relation} \"{}\", {state}; fix: choose a path apart from it", Shown(.other))]
    Nested {
        /// `lies inside` or `contains`.
        relation: &'static str,
        /// Path of the other output.
        other: String,
        /// The process that writes it, or that it is finished.
        state: String,
    },
    /// Files of the GGUF model in another number of parts are beside the output.
    #[error("output: expected no other files of this model, got \"{}\"; fix: remove it, or replace it with --overwrite", Shown(.entry))]
    OtherParts {
        /// First of them.
        entry: String,
    },
    /// Output and input are the same, or one holds the other.
    #[error("output: expected a path apart from the inputs, got one that {relation} the input \"{}\"; fix: choose another path", Shown(.input))]
    Overlap {
        /// `is`, `lies inside` or `contains`.
        relation: &'static str,
        /// The input.
        input: String,
    },
    /// A finished header exceeds what readers accept.
    #[error("header: expected at most {cap} bytes, got {found}; fix: write fewer tensors to one file")]
    HeaderTooLong {
        /// Bytes of the header.
        found: u64,
        /// The cap.
        cap: u64,
    },
}
