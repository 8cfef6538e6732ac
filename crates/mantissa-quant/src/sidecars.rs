//! Files of a model folder that are not weights.

use std::path::Path;

use mantissa_model::chat::ChatTemplates;
use mantissa_model::tokenizer::gguf::folder_files;
use mantissa_store::convention::{Container, ModelFiles, gguf, side_files};
use mantissa_store::{Error, Staging};
use serde_json::Value;

use crate::error::Result;
use crate::quality::QUALITY_NAME;

/// Size limit of a copied file, in bytes.
const MAX_SIDECAR: u64 = 256 << 20;

/// Copies tokenizer, generation settings, licence and other regular files of the source folder. Weights and files that
/// a job writes itself are left out. Names are sorted, so the manifest is always the same.
pub(crate) fn copy_sidecars(from: &Path, staging: &mut Staging) -> Result<()> {
    const WEIGHTS: [&str; 9] = ["safetensors", "bin", "pt", "pth", "ckpt", "gguf", "onnx", "h5", "msgpack"];
    let io = |error| Error::Io { path: from.to_owned(), operation: "list folder", error };
    let entries = std::fs::read_dir(from).map_err(io)?;
    let mut paths = entries.map(|entry| Ok(entry.map_err(io)?.path())).collect::<Result<Vec<_>>>()?;
    paths.sort();
    for path in paths {
        let Some(name) = path.file_name().and_then(|n| n.to_str()) else { continue };
        let extension = path.extension().and_then(|e| e.to_str()).unwrap_or_default();
        let ours = name.ends_with(".index.json")
            || name.starts_with("mantissa-")
            || ["config.json", QUALITY_NAME].contains(&name)
            // These describe how the source's weights are stored, not the output's.
            || side_files().any(|file| file == name);
        let small = std::fs::metadata(&path).is_ok_and(|m| m.is_file() && m.len() <= MAX_SIDECAR);
        if ours || !small || name.starts_with('.') || WEIGHTS.contains(&extension) {
            continue;
        }
        staging.copy(&path, name)?;
    }
    for (name, path) in ChatTemplates::additional(from) {
        staging.copy(&path, &format!("{}/{name}.jinja", ChatTemplates::FOLDER))?;
    }
    Ok(())
}

/// Returns a note on the tokenizer of a GGUF source that a model folder cannot have.
pub(crate) fn note_on_tokenizer(source: &ModelFiles, container: Container) -> Option<String> {
    let model = source.gguf().filter(|_| !container.is_one_file())?;
    let error = folder_files(model.metadata()).err()?;
    Some(format!(
        "the tokenizer in the GGUF metadata is not converted to tokenizer.json ({error}); fix: copy it from the original model"
    ))
}

/// Writes the tokenizer of a GGUF source as the files of a model folder, if it [can be](note_on_tokenizer).
pub(crate) fn write_tokenizer(source: &gguf::Model, staging: &mut Staging) -> Result<()> {
    for (name, content) in folder_files(source.metadata()).unwrap_or_default() {
        write_json(staging, name, &content)?;
    }
    Ok(())
}

/// Writes a JSON file, indented.
pub(crate) fn write_json(staging: &mut Staging, file: &str, value: &Value) -> Result<()> {
    Ok(staging.write(file, format!("{value:#}\n").as_bytes())?)
}
