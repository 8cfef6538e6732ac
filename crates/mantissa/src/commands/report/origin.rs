//! Source and files of a quantized model.

use std::path::Path;

use mantissa_model::chat;
use mantissa_quant::{Digests, Quality};
use mantissa_store::{Manifest, hash_file, manifest_path};

use super::texts::name;
use crate::commands::model::{self, ModelPath};
use crate::commands::next_steps::quoted;
use mantissa_jobs::embedded;

/// Names the source of the model at `path`: the given one, the embedded one, the name in the GGUF file, or else the
/// architecture and the hash of the source's first weight file.
pub fn source(path: &Path, quality: &Quality, reference: Option<&ModelPath>) -> String {
    if let Some(reference) = reference {
        return name(reference.named());
    }
    if embedded::is_source(&quality.hashes.source) {
        return format!("{} (built in)", embedded::NAME);
    }
    let files = model::open_quietly(path).ok();
    let stated =
        files.as_ref().and_then(|files| files.gguf()?.metadata().text("general.name").ok().flatten());
    if let Some(name) = stated.filter(|name| !name.is_empty()) {
        return name.to_owned();
    }
    let architecture = files.as_ref().and_then(|files| files.config()?["architectures"][0].as_str());
    let weights = quality.hashes.source.iter().find(|(name, _)| !name.ends_with(".json"));
    let hash = weights.map(|(name, digest)| format!("{name} with SHA-256 {:.12}…", digest.hex()));
    let known: Vec<_> = architecture.map(str::to_owned).into_iter().chain(hash).collect();
    if known.is_empty() { "not recorded".to_owned() } else { known.join(", ") }
}

/// Returns the source of the model in commands: its path, `demo`, or the word SOURCE if it is not known.
pub fn reference(quality: &Quality, reference: Option<&ModelPath>) -> String {
    match reference {
        Some(reference) => quoted(reference.named()),
        None if embedded::is_source(&quality.hashes.source) => embedded::NAME.to_owned(),
        None => "SOURCE".to_owned(),
    }
}

/// Returns the digests of all files of the model at `path`: those of its manifest, and of the manifest itself. Without a
/// manifest, those of the quality report.
pub fn files(path: &Path, quality: &Quality) -> Digests {
    let at = manifest_path(path);
    let (Ok(manifest), Ok(digest)) = (Manifest::read_file(&at), hash_file(&at)) else {
        return quality.hashes.weights.clone();
    };
    let own = at.file_name().map(|name| (name.to_string_lossy().into_owned(), digest));
    manifest.files.into_iter().chain(own).collect()
}

/// Returns the time at which the model at `path` was written, as HTTP writes dates; `None` if its file does not tell.
pub fn written(path: &Path) -> Option<String> {
    let at = [manifest_path(path), path.to_owned()].into_iter().find(|at| at.exists())?;
    let time = std::fs::metadata(at).ok()?.modified().ok()?.duration_since(std::time::UNIX_EPOCH).ok()?;
    chat::date("%a, %d %b %Y %T GMT", time.as_secs()).ok()
}
