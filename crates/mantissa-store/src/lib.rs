//! Reads untrusted model files as typed tensors, and writes outputs atomically.
//!
//! Reading: [`SafeTensors`] opens one file with stricter checks than the format's own reader, and [`Checkpoint`]
//! opens a Hugging Face folder. Both read headers only. Tensors are read on demand, whole or in panels, with
//! positioned reads (never mmap: truncating a mapped file raises SIGBUS).
//!
//! Writing: [`SafetensorsWriter`] and [`ShardedWriter`] fill files in any order and track missing bytes. [`Staging`]
//! and [`StagedFile`] make an output appear only when it is complete, with a [`Manifest`] of hashes written last.
//!
//! Every error names its file and its tensor or field, and [`Error::class`] attributes it to the input or the
//! environment. The crate requires Unix (positioned I/O, advisory locks, atomic exchange).
#![forbid(unsafe_code)]

// Layer: types, errors and checksums.
pub mod checksum;
pub mod dtype;
pub mod error;
mod finite;
mod protobuf;
pub mod shown;

// Layer: files and bounded readers.
pub mod disk;
mod ending;
#[doc(hidden)]
pub mod failpoint;
pub mod hash;
pub mod json;
mod reader;
pub mod regular;
pub mod text;

// Layer: tensor files.
pub mod end_tokens;
pub mod gguf;
mod header_json;
pub mod safetensors;
pub mod sealed;
mod trail;
mod view;
mod widen;
pub mod writer;

// Layer: outputs and their publication.
pub mod commit;
pub mod event_file;
pub mod journal;
pub mod lock;
mod lock_file;
pub mod manifest;
mod mark;
mod nested;
pub mod output;
pub mod paths;
mod scratch;
pub mod target;
mod unpublished;
pub mod work;

// Layer: models and their formats.
pub mod adapter;
pub mod convention;
pub mod quantization;
pub mod shard_plan;
pub mod shards;

pub use adapter::{Adapter, AdapterFiles, AdapterModule};
pub use checksum::Checksum;
pub use commit::{
    Committed, FileSet, StagedFile, StagedSet, Staging, interrupted_publication, take_others,
    write_file_atomic,
};
pub use dtype::Dtype;
pub use error::{Error, ErrorClass, Result};
pub use event_file::EventFile;
pub use finite::FiniteScan;
pub use gguf::{Gguf, GgufWriter};
pub use hash::{FileDigest, hash_file, hash_file_while};
pub use journal::{JOURNAL_NAME, Journal};
pub use lock::Lock;
pub use manifest::{
    MANIFEST_NAME, Manifest, Mismatch, Seal, TOOL, beside, companion_path, manifest_path, verify_manifest,
};
pub use nested::writer_of;
pub use output::{JobKey, Output};
pub use paths::{Kind, Paths, Permits};
pub use safetensors::{Header, SafeTensors, TensorMeta};
pub use scratch::Scratch;
pub use shard_plan::{DEFAULT_SHARD_BYTES, INDEX_NAME, Shard, ShardPlan, ShardedWriter};
pub use shards::Checkpoint;
pub use shown::Shown;
pub use target::refuse_overlap;
pub use text::{TextFile, TextPart};
pub use unpublished::abandon_unpublished;
pub use work::WorkFolder;
pub use writer::{SafetensorsWriter, TensorSpec};
