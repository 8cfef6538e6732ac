//! Embedded model `demo`: a Llama of 1.3 million parameters trained by this program, with calibration and
//! evaluation texts. Sources, settings, log and licenses are in `crates/mantissa-jobs/demo`.

use std::path::{Path, PathBuf};
use std::sync::{Mutex, PoisonError};

use mantissa_quant::Digests;
use mantissa_store::{FileDigest, Output, Result, Scratch, disk, write_file_atomic};

/// Name on the command line.
pub const NAME: &str = "demo";

/// Note for a user who talks to the model.
pub const ABOUT: &str =
    "demo is a story model of 1.3 million parameters: it continues your text and answers no questions";

/// Files of the model in Hugging Face layout.
const FILES: [(&str, &[u8]); 4] = [
    ("config.json", include_bytes!("../demo/model/config.json")),
    ("model.safetensors", include_bytes!("../demo/model/model.safetensors")),
    ("tokenizer.json", include_bytes!("../demo/model/tokenizer.json")),
    ("tokenizer_config.json", include_bytes!("../demo/model/tokenizer_config.json")),
];

/// Text domain.
#[derive(Clone, Copy, Debug)]
pub struct Domain {
    /// Name of the domain.
    pub name: &'static str,
    /// Heading of its KL in tables.
    pub kl_heading: &'static str,
    /// Held-out documents, each ended by [`SEPARATOR`].
    pub held_out: &'static str,
}

/// Separator between documents.
pub const SEPARATOR: &str = "<|endoftext|>";

/// Domains that the model was trained on.
pub const DOMAINS: [Domain; 3] = [
    Domain { name: "stories", kl_heading: "KL stories", held_out: include_str!("../demo/text/stories.txt") },
    Domain { name: "prose", kl_heading: "KL prose", held_out: include_str!("../demo/text/prose.txt") },
    Domain { name: "code", kl_heading: "KL code", held_out: include_str!("../demo/text/code.txt") },
];

/// Calibration documents of every domain, from the training text.
pub const CALIBRATION: &str = include_str!("../demo/text/calibration.txt");

/// Folder of the unpacked model, once requested.
static FOLDER: Mutex<Option<Scratch>> = Mutex::new(None);

/// Returns the model as a folder, which is written at the first call and exists until [`remove`].
///
/// # Errors
/// No folder for temporary files.
pub fn folder() -> Result<PathBuf> {
    let mut folder = FOLDER.lock().unwrap_or_else(PoisonError::into_inner);
    if let Some(scratch) = folder.as_ref() {
        return Ok(scratch.path().join(NAME));
    }
    let scratch = Scratch::new()?;
    let path = scratch.path().join(NAME);
    disk::create_folder(&path).map_err(|error| mantissa_store::Error::Io {
        path: path.clone(),
        operation: "create folder",
        error,
    })?;
    for (name, bytes) in FILES {
        write_file_atomic(&Output::owned(path.join(name)), bytes)?;
    }
    *folder = Some(scratch);
    Ok(path)
}

/// Returns the folder that holds the one of [`folder`], under its name.
///
/// # Errors
/// As [`folder`].
pub(crate) fn parent() -> Result<PathBuf> {
    let folder = folder()?;
    Ok(folder.parent().map(Path::to_owned).unwrap_or(folder))
}

/// True if `source`, the digests of a model's files, are those of the embedded model.
pub fn is_source(source: &Digests) -> bool {
    let is_ours = |(name, digest): (&String, &FileDigest)| {
        FILES.iter().any(|(own, bytes)| own == name && FileDigest::of(bytes) == *digest)
    };
    !source.is_empty() && source.iter().all(is_ours)
}

/// Forgets the folder of [`folder`], in a process that was forked: it is the parent's.
pub fn leave() {
    if let Ok(mut folder) = FOLDER.try_lock() {
        std::mem::forget(folder.take());
    }
}

/// Removes the folder of [`folder`]: statics are not dropped at exit.
pub fn remove() {
    FOLDER.lock().unwrap_or_else(PoisonError::into_inner).take();
}
