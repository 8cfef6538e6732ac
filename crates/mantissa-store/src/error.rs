//! Errors of files and paths, classified by who must act on them.
//!
//! Every message is one line, `<file>: <tensor or field>: expected X, got Y; <cause or fix>`. Text from a file is
//! escaped and cut to 200 characters, so that a hostile name can neither forge a line nor flood a log.

use std::io;
use std::path::{Path, PathBuf};

use crate::dtype::Dtype;
use crate::shown::{Shown, ShownPath};

mod fault;
pub(crate) mod gguf_fault;

pub use fault::{HeaderFault, IndexFault, JsonFault, OutputFault, TensorFault, WriteFault};
pub use gguf_fault::GgufFault;

/// Result of every fallible function of this crate.
pub type Result<T> = std::result::Result<T, Error>;

/// Party that must act on an error. The binary maps `Input` to exit code 2 and `Environment` to 3.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ErrorClass {
    /// The files or paths given are at fault; running again gives the same error.
    Input,
    /// I/O, memory, disk space or another process is at fault; the same command can succeed later.
    Environment,
}

/// An error that names its file and its tensor or field.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// A path that the caller named does not exist.
    #[error("{}: expected {expected}, got no such file or folder; fix: check the path", ShownPath(.path))]
    Missing {
        /// The path.
        path: PathBuf,
        /// The file or folder that was expected.
        expected: &'static str,
    },
    /// A path is a folder, device or pipe where something else is needed.
    #[error("{}: expected {expected}, got {found}", ShownPath(.path))]
    WrongKind {
        /// The path.
        path: PathBuf,
        /// Its kind.
        found: &'static str,
        /// The expected kind.
        expected: &'static str,
    },
    /// The operating system refused an operation.
    // Not a `source`: the text is in the message already and a chain printer would repeat it.
    #[error("{}: {operation}: I/O error `{error}`{}", ShownPath(.path), io_hint(.error))]
    Io {
        /// The path operated on.
        path: PathBuf,
        /// The failed operation, for example `read header`.
        operation: &'static str,
        /// The system's answer.
        error: io::Error,
    },
    /// An allocation failed.
    #[error(
        "{}: {}: expected {bytes} bytes of free memory, got none; fix: raise the memory limit or use a smaller model",
        ShownPath(.path), Shown(.what)
    )]
    Memory {
        /// The file being read.
        path: PathBuf,
        /// Tensor or part of the file.
        what: String,
        /// Bytes requested.
        bytes: u64,
    },
    /// File is something else, recognised by its first bytes or its name.
    #[error("{}: expected safetensors weights, got {}; {}", ShownPath(.path), kind.found(), kind.hint())]
    Foreign {
        /// The file or folder.
        path: PathBuf,
        /// Its kind.
        kind: ForeignKind,
    },
    /// A safetensors header is malformed as a whole.
    #[error("{}: {fault}", ShownPath(.path))]
    Header {
        /// The file.
        path: PathBuf,
        /// The fault.
        fault: HeaderFault,
    },
    /// A GGUF file is malformed.
    #[error("{}: {fault}", ShownPath(.path))]
    Gguf {
        /// The file.
        path: PathBuf,
        /// The fault.
        fault: Box<GgufFault>,
    },
    /// One tensor's entry in a safetensors header is malformed.
    #[error("{}: tensor \"{}\": {fault}", ShownPath(.path), Shown(.tensor))]
    Tensor {
        /// The file.
        path: PathBuf,
        /// The tensor's name, as in the file.
        tensor: String,
        /// The fault.
        fault: TensorFault,
    },
    /// A JSON file is malformed.
    #[error("{}: {fault}", ShownPath(.path))]
    Json {
        /// The file.
        path: PathBuf,
        /// The fault.
        fault: JsonFault,
    },
    /// A field of a JSON file, or of a header's metadata, has an unexpected value.
    #[error(transparent)]
    Field(Box<FieldFault>),
    /// The index of a sharded checkpoint and its shards disagree.
    #[error("{}: {fault}", ShownPath(.path))]
    Index {
        /// The index file.
        path: PathBuf,
        /// The fault.
        fault: IndexFault,
    },
    /// A folder holds several weight files, and it is unclear which to read.
    #[error(
        "{}: expected model.safetensors or model.safetensors.index.json, got {count} .safetensors files and no index; fix: name one file",
        ShownPath(.path)
    )]
    Ambiguous {
        /// The folder.
        path: PathBuf,
        /// Number of weight files.
        count: usize,
    },
    /// A folder holds no weights in any known format.
    #[error("{}: expected a folder with model.safetensors or model.safetensors.index.json, got no weights", ShownPath(.path))]
    NoWeights {
        /// The folder.
        path: PathBuf,
    },
    /// A requested tensor does not exist.
    #[error("{}: tensor \"{}\": expected a tensor of this name, got none", ShownPath(.path), Shown(.tensor))]
    NoTensor {
        /// File or folder.
        path: PathBuf,
        /// Name requested.
        tensor: String,
    },
    /// A requested tensor is not a float.
    #[error("{}: tensor \"{}\": expected dtype F64, F32, F16 or BF16, got {dtype}", ShownPath(.path), Shown(.tensor))]
    NotFloat {
        /// The file.
        path: PathBuf,
        /// The tensor.
        tensor: String,
        /// Its dtype.
        dtype: Dtype,
    },
    /// A weight or scale holds non-finite values.
    #[error(
        "{}: tensor \"{}\": expected finite values, got {count} non-finite values, the first ({value}) at element {index}; the file is damaged or its training diverged",
        ShownPath(.path), Shown(.tensor)
    )]
    NonFinite {
        /// The file.
        path: PathBuf,
        /// The tensor.
        tensor: String,
        /// Number of non-finite values.
        count: u64,
        /// Flat index of the first.
        index: u64,
        /// The first.
        value: f32,
    },
    /// A read exceeds its tensor.
    #[error("{}: tensor \"{}\": expected a read within {size} bytes, got {len} bytes at byte {offset}", ShownPath(.path), Shown(.tensor))]
    Range {
        /// The file.
        path: PathBuf,
        /// The tensor.
        tensor: String,
        /// First byte, from the tensor's start.
        offset: u64,
        /// Bytes requested.
        len: u64,
        /// Bytes of the tensor.
        size: u64,
    },
    /// A tensor cannot be written as requested.
    #[error("{}: tensor \"{}\": {fault}", ShownPath(.path), Shown(.tensor))]
    Write {
        /// The file.
        path: PathBuf,
        /// The tensor.
        tensor: String,
        /// The fault.
        fault: WriteFault,
    },
    /// An output path cannot be used.
    #[error("{}: {fault}", ShownPath(.path))]
    Output {
        /// The output path.
        path: PathBuf,
        /// The fault.
        fault: OutputFault,
    },
}

impl Error {
    /// Class of the error: input or environment.
    pub fn class(&self) -> ErrorClass {
        match self {
            Self::Io { .. } | Self::Memory { .. } | Self::Output { fault: OutputFault::Busy { .. }, .. } => {
                ErrorClass::Environment
            }
            _ => ErrorClass::Input,
        }
    }

    /// A value that is not allowed in `field` of the file at `path`.
    pub fn field(
        path: &Path,
        field: impl Into<String>,
        found: impl Into<String>,
        allowed: impl Into<String>,
        hint: impl Into<String>,
    ) -> Self {
        Self::Field(Box::new(FieldFault {
            path: path.to_owned(),
            field: field.into(),
            found: found.into(),
            allowed: allowed.into(),
            hint: hint.into(),
        }))
    }

    /// Classifies a failed `operation` on a file that the caller named: a missing file or a folder is bad input;
    /// anything else is the environment's fault. `expected` describes the file.
    pub fn opening(path: &Path, expected: &'static str, operation: &'static str, error: io::Error) -> Self {
        let path = path.to_owned();
        match error.kind() {
            io::ErrorKind::NotFound | io::ErrorKind::NotADirectory => Self::Missing { path, expected },
            io::ErrorKind::IsADirectory => Self::WrongKind { path, found: "a folder", expected },
            _ => Self::Io { path, operation, error },
        }
    }

    /// True if a file or folder went away between two looks at it.
    pub(crate) fn is_gone(&self) -> bool {
        matches!(self, Self::Io { error, .. } if error.kind() == io::ErrorKind::NotFound)
    }

    /// Makes the error of a text that is no UTF-8 from the byte `at` on.
    pub(crate) fn not_utf8(path: &Path, at: u64) -> Self {
        let found = format!("invalid UTF-8 at byte {at}");
        Self::field(path, "text", found, "a UTF-8 text", "convert it with iconv")
    }

    /// Expected file and what was found in its place, for messages that have a form of their own.
    pub fn expected_and_found(&self) -> (String, String) {
        match self {
            Self::WrongKind { found, expected, .. } => ((*expected).to_owned(), (*found).to_owned()),
            Self::Json { fault: JsonFault::TooLarge { found, cap }, .. } => {
                (format!("at most {cap} bytes"), found.to_string())
            }
            Self::Io { error, .. } => ("a readable file".to_owned(), format!("the I/O error `{error}`")),
            other => ("a readable file".to_owned(), other.to_string()),
        }
    }

    pub(crate) fn io(path: &Path, operation: &'static str, error: io::Error) -> Self {
        Self::Io { path: path.to_owned(), operation, error }
    }

    pub(crate) fn header(path: &Path, fault: HeaderFault) -> Self {
        Self::Header { path: path.to_owned(), fault }
    }

    pub(crate) fn tensor(path: &Path, tensor: &str, fault: TensorFault) -> Self {
        Self::Tensor { path: path.to_owned(), tensor: tensor.to_owned(), fault }
    }

    pub(crate) fn index(path: &Path, fault: IndexFault) -> Self {
        Self::Index { path: path.to_owned(), fault }
    }

    pub(crate) fn write(path: &Path, tensor: &str, fault: WriteFault) -> Self {
        Self::Write { path: path.to_owned(), tensor: tensor.to_owned(), fault }
    }

    pub(crate) fn output(path: &Path, fault: OutputFault) -> Self {
        Self::Output { path: path.to_owned(), fault }
    }
}

/// Payload of [`Error::Field`].
#[derive(Debug, thiserror::Error)]
#[error("{}: {}: expected {}, got {}{}{}", ShownPath(.path), Shown(.field), .allowed, Shown(.found),
    if .hint.is_empty() { "" } else { "; " }, .hint)]
pub struct FieldFault {
    /// The file.
    pub path: PathBuf,
    /// The field, dotted from the root.
    pub field: String,
    /// Its value, or what is wrong with it.
    pub found: String,
    /// The values allowed.
    pub allowed: String,
    /// Cause or fix; may be empty.
    pub hint: String,
}

/// Files that are often found where safetensors weights should be.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum ForeignKind {
    /// A GGUF model.
    Gguf,
    /// The text pointer that git leaves when LFS is not installed.
    GitLfsPointer,
    /// A web page.
    Html,
    /// A Python pickle.
    Pickle,
    /// A zip archive, which is how PyTorch stores pickles.
    Zip,
    /// An array that numpy saved, which may hold pickled objects.
    Numpy,
    /// A model in a format of llama.cpp before GGUF.
    Ggml,
    /// A `.bin` file that is no pickle.
    Bin,
}

impl ForeignKind {
    /// Recognises a file by its first bytes (64 are enough).
    pub fn sniff(head: &[u8]) -> Option<Self> {
        let text = head.trim_ascii_start();
        if head.starts_with(b"GGUF") {
            Some(Self::Gguf)
        } else if head.starts_with(b"version https://git-lfs") {
            Some(Self::GitLfsPointer)
        } else if head.starts_with(b"PK\x03\x04") || head.starts_with(b"PK\x05\x06") {
            Some(Self::Zip)
        } else if head.starts_with(b"\x93NUMPY") {
            Some(Self::Numpy)
        } else if matches!(head, [0x80, 2..=5, ..]) {
            Some(Self::Pickle)
        } else if [b"lmgg", b"tjgg", b"fmgg", b"algg"].iter().any(|magic| head.starts_with(*magic)) {
            Some(Self::Ggml)
        } else if text.starts_with(b"<") {
            Some(Self::Html)
        } else {
            None
        }
    }

    /// Recognises a file by the extension of its name. Many programs write files that end in `.bin`: their first bytes tell more.
    pub fn from_extension(path: &Path) -> Option<Self> {
        match path.extension()?.to_str()? {
            "bin" | "pt" | "pth" | "ckpt" | "pkl" => Some(Self::Pickle),
            "gguf" => Some(Self::Gguf),
            "npy" | "npz" => Some(Self::Numpy),
            _ => None,
        }
    }

    fn found(self) -> &'static str {
        match self {
            Self::Gguf => "a GGUF model",
            Self::GitLfsPointer => "a git-lfs pointer",
            Self::Html => "a web page",
            Self::Pickle => "a Python pickle",
            Self::Zip => "a zip archive (a PyTorch pickle checkpoint?)",
            Self::Numpy => "a numpy array",
            Self::Ggml => "a GGML model of before GGUF",
            Self::Bin => "a .bin file that is no PyTorch checkpoint",
        }
    }

    fn hint(self) -> &'static str {
        match self {
            Self::Gguf => {
                "fix: give the .gguf file by its own name, or the safetensors model it was made from"
            }
            Self::GitLfsPointer => "fix: run `git lfs install && git lfs pull` in its folder",
            Self::Html => "the download failed (login or missing page); fix: download it again",
            Self::Numpy => {
                "fix: save it with safetensors.numpy.save_file (arrays of objects are pickles and never read)"
            }
            Self::Ggml => {
                "fix: take the model's GGUF file, or convert it with llama.cpp's convert_llama_ggml_to_gguf.py"
            }
            Self::Bin => {
                "fix: take the model's safetensors or GGUF files, or export it with the program that wrote it"
            }
            Self::Pickle | Self::Zip => {
                "pickles can run code and are never read; fix: convert once with transformers, save_pretrained(DIR, safe_serialization=True)"
            }
        }
    }
}

fn io_hint(error: &io::Error) -> &'static str {
    match error.kind() {
        io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded => {
            "; fix: free disk space or write elsewhere"
        }
        io::ErrorKind::PermissionDenied => "; fix: check the permissions",
        io::ErrorKind::ReadOnlyFilesystem => "; fix: write elsewhere",
        io::ErrorKind::AlreadyExists => "; fix: remove it or choose another path",
        io::ErrorKind::UnexpectedEof => "; the file changed while it was read",
        _ => "",
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn classes_follow_the_fault() {
        let path = Path::new("m");
        let full = Error::io(path, "write", io::ErrorKind::StorageFull.into());
        assert_eq!(full.class(), ErrorClass::Environment);
        assert!(full.to_string().contains("free disk space"));
        assert_eq!(Error::header(path, HeaderFault::DuplicateMetadata).class(), ErrorClass::Input);
        let busy = Error::output(path, OutputFault::Busy { owner: "7".into() });
        assert_eq!(busy.class(), ErrorClass::Environment);
    }

    #[test]
    fn foreign_files_are_recognised() {
        for (head, kind) in [
            (&b"GGUF\x03\0\0\0"[..], ForeignKind::Gguf),
            (b"version https://git-lfs.github.com/spec/v1\n", ForeignKind::GitLfsPointer),
            (b"\n<!DOCTYPE html>", ForeignKind::Html),
            (b"PK\x03\x04\0\0\x08\x08", ForeignKind::Zip),
            (b"\x80\x02}q\0.", ForeignKind::Pickle),
            (b"\x93NUMPY\x01\0v\0", ForeignKind::Numpy),
            (b"tjgg\x03\0\0\0", ForeignKind::Ggml),
        ] {
            assert_eq!(ForeignKind::sniff(head), Some(kind));
        }
        assert_eq!(ForeignKind::sniff(b"\x80\0\0\0\0\0\0\0{"), None);
    }
}
