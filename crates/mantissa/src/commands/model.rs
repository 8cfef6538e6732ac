//! Opens a model for a command: files, notes, and the decoder within the memory ceiling.

use std::ffi::OsString;
use std::ops::Deref;
use std::path::{Path, PathBuf};
use std::str::FromStr;

use anyhow::{Context as _, Result};
use clap::builder::{TypedValueParser, ValueParserFactory};
use mantissa_model::Tokenizer;
use mantissa_quant::model_config;
use mantissa_store::adapter::CONFIG_NAME;
use mantissa_store::convention::ModelFiles;
use mantissa_store::gguf::is_part_of;
use mantissa_store::shard_plan::SINGLE_NAME;
use mantissa_store::shards::MAX_CONFIG_BYTES;
use mantissa_store::{Checkpoint, Error, INDEX_NAME, Paths, Shown, interrupted_publication, json};
use serde::{Serialize, Serializer};

use super::train::owned;
use crate::context::Context;
use crate::embedded;
use crate::error::BadInput;

/// Opens the files of a model and prints its notes.
///
/// # Errors
/// As [`ModelFiles::open`]; under `--strict`, if there are notes.
pub fn open(path: &Path, context: &Context) -> Result<ModelFiles> {
    let files = open_quietly(path)?;
    // Names are counted after the headers are read: those of a hundred thousand tensors take memory.
    context.require_more_memory(&path.display().to_string(), 0)?;
    let notes: Vec<_> = interrupted(path)
        .into_iter()
        .chain(files.notes())
        .chain(files.checkpoint().warnings().iter().cloned())
        .collect();
    context.warn_all(&notes)?;
    Ok(files)
}

/// Returns a warning if a kill interrupted the publication of the GGUF files at `path`.
pub fn interrupted(path: &Path) -> Option<String> {
    let work = interrupted_publication(path)?;
    let what = "was not put in place completely; fix: rerun the command that wrote it";
    Some(format!(
        "{}: expected all files of the model, got a part of them: {} {what}",
        path.display(),
        work.display()
    ))
}

/// Opens the files of a model without printing its notes.
///
/// # Errors
/// As [`ModelFiles::open`].
pub fn open_quietly(path: &Path) -> Result<ModelFiles> {
    if let Some(error) = no_result(path) {
        return Err(error.into());
    }
    let opened = ModelFiles::open(path);
    if let Some(error) = opened.as_ref().err().and_then(|error| no_model(path, error)) {
        return Err(error.into());
    }
    match interrupted(path).filter(|_| opened.is_err()) {
        Some(warning) => Ok(opened.context(warning)?),
        None => Ok(opened?),
    }
}

/// Returns the error for a file that is neither GGUF nor safetensors, by name and content; its faults as a safetensors
/// file would mislead.
fn no_model(path: &Path, error: &Error) -> Option<BadInput> {
    let Error::Header { path: file, .. } = error else { return None };
    let named = path.extension().is_some_and(|extension| extension.eq_ignore_ascii_case("safetensors"));
    let allowed = "a model folder with safetensors weights, or a GGUF file";
    (file == path && !named)
        .then(|| BadInput::new(path.display().to_string(), "a file that is neither", allowed))
}

/// Memory of the process beyond models and buffers: code tables, tokenizer, allocator.
pub const BASE: u64 = 8 << 20;

/// Loads the tokenizer of a model, if memory holds it.
///
/// # Errors
/// As [`Tokenizer::load`]; not enough memory.
pub fn load_tokenizer(files: &ModelFiles, context: &Context) -> Result<Tokenizer> {
    let what = format!("{}: tokenizer", files.dir().display());
    context.require_more_memory(&what, Tokenizer::bytes_to_load(files.dir()))?;
    Ok(Tokenizer::load(files.dir())?)
}

/// Returns the context length of a model in tokens.
///
/// # Errors
/// As [`model_config`].
pub fn context_length(files: &ModelFiles) -> Result<usize> {
    Ok(model_config(files)?.max_position_embeddings)
}

/// Returns the vocabulary size of a model.
///
/// # Errors
/// As [`model_config`].
pub fn vocabulary(files: &ModelFiles) -> Result<usize> {
    Ok(model_config(files)?.vocab_size)
}

/// Returns the model folder that `file` is the weight file or index of, if it has a config.
fn folder_of(file: &Path) -> Option<&Path> {
    let dir = match file.parent()? {
        parent if parent == Path::new("") => Path::new("."),
        parent => parent,
    };
    if !file.is_file() || !dir.join("config.json").is_file() {
        return None;
    }
    let name = file.file_name()?;
    // The folder may hold other weight files, such as the source; only the folder's own file stands for it.
    let checkpoint = Checkpoint::open(dir).ok()?;
    let index = name == INDEX_NAME && checkpoint.files().all(|file| !file.ends_with(SINGLE_NAME));
    (index || checkpoint.files().any(|file| file.file_name() == Some(name))).then_some(dir)
}

/// Returns the model that the training run in the folder `run` wrote.
fn trained_model(run: &Path) -> Option<PathBuf> {
    let model = run.join(owned::MODEL);
    (is_run(run) && model.join("config.json").is_file()).then_some(model)
}

/// True for the folder of a training run.
fn is_run(dir: &Path) -> bool {
    dir.join(owned::MANIFEST).is_file() && !dir.join("config.json").exists()
}

/// Returns the error for the folder of a run that wrote no model.
fn no_result(run: &Path) -> Option<BadInput> {
    if !is_run(run) {
        return None;
    }
    let (named, adapter) = (run.display().to_string(), run.join(owned::ADAPTER));
    let settings = json::read_strict(&adapter.join(CONFIG_NAME), MAX_CONFIG_BYTES, "an adapter").ok();
    let base = settings.and_then(|settings| Some(settings["base_model_name_or_path"].as_str()?.to_owned()));
    let allowed = "a model";
    Some(match base {
        Some(base) => BadInput::new(named, "a training run that wrote an adapter", allowed)
            .with_fix(format!("give {} as the model, with --adapter {}", Shown(&base), adapter.display())),
        None => BadInput::new(named, "a training run that wrote no model yet", allowed)
            .with_fix("finish it with --resume"),
    })
}

/// Model as named on the command line, and its location: a folder, a file, or the embedded model. A weight
/// file of a model folder stands for the folder.
#[derive(Clone, Debug)]
pub struct ModelPath {
    named: PathBuf,
    at: PathBuf,
}

impl ModelPath {
    fn new(named: OsString) -> Result<Self, mantissa_store::Error> {
        let named = PathBuf::from(named);
        // A folder or file called `demo` takes precedence over the embedded model.
        let embedded =
            named.as_os_str() == embedded::NAME && !named.is_file() && !named.join("config.json").exists();
        let at = if embedded {
            embedded::folder()?
        } else {
            let folder = folder_of(&named).map(Path::to_owned);
            folder.or_else(|| trained_model(&named)).unwrap_or_else(|| named.clone())
        };
        Ok(ModelPath { named, at })
    }

    /// Returns the path for commands that accept a single weight file: the named file, or else the model's
    /// location.
    pub fn as_file(&self) -> &Path {
        if self.named.is_file() { &self.named } else { &self.at }
    }

    /// Adds the model's files to the inputs of a command; the embedded model has none.
    pub fn paths(&self, paths: &mut Paths) {
        if self.is_embedded() {
            return;
        }
        paths.read(&self.at);
        let (Some(parent), Some(name)) = (self.at.parent(), self.at.file_name()) else { return };
        if !self.at.is_file() {
            return;
        }
        // The other files of a split GGUF model, and the files next to it.
        let name = name.to_string_lossy();
        let stem = name.rsplit_once("-00001-of-").map_or(&*name, |(stem, _)| stem);
        let parent = if parent.as_os_str().is_empty() { Path::new(".") } else { parent };
        for entry in std::fs::read_dir(parent).into_iter().flatten().flatten() {
            let other = entry.file_name();
            let other = other.to_string_lossy();
            if is_part_of(stem, &other)
                || other.strip_prefix(&*name).is_some_and(|rest| rest.starts_with('.'))
            {
                paths.read(entry.path());
            }
        }
    }

    /// Returns the model's location as a user types it: `demo`, a folder, or a GGUF file.
    pub fn typed(&self) -> &Path {
        if self.named.is_file() { &self.at } else { &self.named }
    }

    /// True for the embedded model.
    pub fn is_embedded(&self) -> bool {
        self.named != self.at && self.named.as_os_str() == embedded::NAME
    }

    /// Returns the name given on the command line.
    pub fn named(&self) -> &Path {
        &self.named
    }
}

impl Deref for ModelPath {
    type Target = Path;

    fn deref(&self) -> &Path {
        &self.at
    }
}

impl FromStr for ModelPath {
    type Err = mantissa_store::Error;

    fn from_str(named: &str) -> Result<Self, Self::Err> {
        ModelPath::new(named.into())
    }
}

impl Serialize for ModelPath {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        self.named.serialize(serializer)
    }
}

impl ValueParserFactory for ModelPath {
    type Parser = clap::builder::ValueParser;

    fn value_parser() -> Self::Parser {
        clap::builder::OsStringValueParser::new().try_map(ModelPath::new).into()
    }
}
