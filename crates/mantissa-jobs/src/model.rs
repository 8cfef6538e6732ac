//! Opens a model for a job: files, notes, and the tokenizer within the memory ceiling.

use std::path::{Path, PathBuf};

use mantissa_kernels::give_back_memory;
use mantissa_model::{Tokenizer, config_notes, load_config};
use mantissa_store::adapter::{CONFIG_NAME, WEIGHTS_NAME};
use mantissa_store::convention::ModelFiles;
use mantissa_store::gguf::is_part_of;
use mantissa_store::shard_plan::SINGLE_NAME;
use mantissa_store::shards::MAX_CONFIG_BYTES;
use mantissa_store::{Checkpoint, Error, INDEX_NAME, Shown, disk, interrupted_publication, json};
use serde::{Deserialize, Deserializer, Serialize, Serializer};

use crate::embedded;
use crate::error::{BadInput, InPlace, Result};
use crate::host::Host;
use crate::hub;
use crate::run_names::{ADAPTER, MANIFEST, MODEL};

/// Opens the files of a model and shows its notes.
///
/// # Errors
/// As [`ModelFiles::open`]; if the host is strict and there are notes.
pub fn open(path: &Path, host: &Host) -> Result<ModelFiles> {
    let files = open_quietly(path)?;
    // Names are counted after the headers are read: those of a hundred thousand tensors take memory.
    host.require_more_memory(&path.display().to_string(), 0)?;
    // Patterns that take too many steps are noted once they were tried.
    let differences = config_notes(&files);
    let notes: Vec<_> = interrupted(path)
        .into_iter()
        .chain(files.notes())
        .chain(differences)
        .chain(files.checkpoint().warnings().iter().cloned())
        .collect();
    host.warn_all(&notes)?;
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

/// Opens the files of a model without showing its notes.
///
/// # Errors
/// As [`ModelFiles::open`].
pub fn open_quietly(path: &Path) -> Result<ModelFiles> {
    if let Some(error) = no_result(path).or_else(|| no_adapter(path)) {
        return Err(error.into());
    }
    let opened = ModelFiles::open(path);
    let reason = |error| no_model(path, error).or_else(|| explained(path, error));
    if let Some(error) = opened.as_ref().err().and_then(reason) {
        return Err(error.into());
    }
    match interrupted(path).filter(|_| opened.is_err()) {
        Some(warning) => opened.at(warning),
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

/// Returns an error that says more than `error` of opening `path`: names near to one that is not there, or the GGUF files
/// of a folder.
pub(crate) fn explained(path: &Path, error: &Error) -> Option<BadInput> {
    missing(path, error).or_else(|| several_gguf(path))
}

/// Returns the error for a path that is not there, with the names near to it.
fn missing(path: &Path, error: &Error) -> Option<BadInput> {
    let Error::Missing { path: file, .. } = error else { return None };
    let (shown, fix) = (path.to_string_lossy(), hub::fix_of_missing(path, hub::cache().as_deref()));
    let allowed = "a model folder, or a .gguf or .safetensors file";
    let error = BadInput::new(Shown(&shown).to_string(), "no such file or folder", allowed);
    (file == path).then(|| error.with_fix(fix))
}

/// Returns the error for a folder of GGUF files, one of which is to be named.
fn several_gguf(path: &Path) -> Option<BadInput> {
    let files = hub::gguf_files(path);
    let first = files.first().filter(|_| !path.join("config.json").exists())?;
    let found = format!("a folder with {} GGUF files", files.len());
    let fix = format!("name one of them, such as {}", first.display());
    Some(BadInput::new(path.display().to_string(), found, "one model").with_fix(fix))
}

/// Memory of the process beyond models and buffers: code tables, tokenizer, allocator.
pub const BASE: u64 = 8 << 20;

/// Loads the tokenizer of a model, if memory holds it.
///
/// # Errors
/// As [`Tokenizer::load`]; not enough memory.
pub fn load_tokenizer(files: &ModelFiles, host: &Host) -> Result<Tokenizer> {
    let what = format!("{}: tokenizer", files.dir().display());
    host.require_more_memory(&what, Tokenizer::bytes_to_load(files.dir()))?;
    let loaded = Tokenizer::load(files.dir());
    // Reading it takes several times what is kept, in small blocks that the allocator holds.
    give_back_memory();
    Ok(loaded?)
}

/// Returns the context length of a model in tokens.
///
/// # Errors
/// As [`load_config`].
pub fn context_length(files: &ModelFiles) -> Result<usize> {
    Ok(load_config(files)?.max_position_embeddings)
}

/// Returns the vocabulary size of a model.
///
/// # Errors
/// As [`load_config`].
pub fn vocabulary(files: &ModelFiles) -> Result<usize> {
    Ok(load_config(files)?.vocab_size)
}

/// Returns the model folder that `file` is the weight file or index of, if it has a config.
fn folder_of(file: &Path) -> Option<&Path> {
    let dir = disk::folder_of(file);
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
    let model = run.join(MODEL);
    (is_run(run) && model.join("config.json").is_file()).then_some(model)
}

/// True for the folder of a training run.
fn is_run(dir: &Path) -> bool {
    dir.join(MANIFEST).is_file() && !dir.join("config.json").exists()
}

/// Returns the error for the folder of a run that wrote no model.
fn no_result(run: &Path) -> Option<BadInput> {
    if !is_run(run) {
        return None;
    }
    let adapter = run.join(ADAPTER);
    match adapter.join(CONFIG_NAME).is_file() {
        true => Some(adapter_given(run, "a training run that wrote an adapter", &adapter)),
        false => Some(
            BadInput::new(run.display().to_string(), "a training run that wrote no model yet", "a model")
                .with_fix("finish it with --resume"),
        ),
    }
}

/// Returns the error for an adapter in place of a model: its folder, or the weights in it.
pub fn no_adapter(path: &Path) -> Option<BadInput> {
    let is_weights = path.file_name().is_some_and(|name| name == WEIGHTS_NAME);
    let dir = if is_weights { path.parent()? } else { path };
    // A folder with a config of its own is a model with an adapter beside it.
    let alone = dir.join(CONFIG_NAME).is_file() && !dir.join("config.json").is_file();
    alone.then(|| adapter_given(path, "an adapter", dir))
}

/// Returns the error for `named`, which is `found`: the adapter in `adapter`.
fn adapter_given(named: &Path, found: &str, adapter: &Path) -> BadInput {
    let settings = json::read_strict(&adapter.join(CONFIG_NAME), MAX_CONFIG_BYTES, "an adapter").ok();
    let base = settings.and_then(|settings| Some(settings["base_model_name_or_path"].as_str()?.to_owned()));
    let base = match base.filter(|base| !base.is_empty()) {
        Some(base) => Shown(&base).to_string(),
        None => "the model that it was trained on".to_owned(),
    };
    let adapter = adapter.display();
    BadInput::new(named.display().to_string(), found, "a model").with_fix(format!(
        "give {base} as the model, with --adapter {adapter} (run, serve, eval, bench); for other commands merge it first (finetune --merge, or merge_and_unload of PEFT)"
    ))
}

/// Model as a user names it, and its location: a folder, a file, or a model inside the program. A weight file of a model
/// folder stands for the folder, the folder of a training run for the model that it wrote, and a name on the Hugging Face
/// hub for its snapshot in the cache of this machine. Serialized by its name.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ModelPath {
    named: PathBuf,
    at: PathBuf,
    embedded: bool,
}

impl ModelPath {
    /// Finds the model that `named` stands for; [`embedded::NAME`] is the model inside the program, which is unpacked,
    /// unless there is such a file or model folder.
    ///
    /// # Errors
    /// No folder for temporary files.
    pub fn find(named: impl Into<PathBuf>) -> Result<Self, Error> {
        let named = named.into();
        if named.as_os_str() == embedded::NAME && !named.is_file() && !named.join("config.json").exists() {
            return Ok(ModelPath { named, at: embedded::folder()?, embedded: true });
        }
        Ok(ModelPath::new(named))
    }

    /// Finds the model in the files at `named`.
    pub fn new(named: impl Into<PathBuf>) -> Self {
        let named = named.into();
        let folder = folder_of(&named).map(Path::to_owned);
        let at = folder.or_else(|| trained_model(&named)).or_else(|| hub::location(&named, hub::cache));
        let at = at.unwrap_or_else(|| named.clone());
        ModelPath { named, at, embedded: false }
    }

    /// Returns the path for commands that accept a single weight file: the named file, or else the model's
    /// location.
    pub fn as_file(&self) -> &Path {
        if self.named.is_file() { &self.named } else { &self.at }
    }

    /// Returns the files and folders of the model; none for an embedded model.
    pub fn inputs(&self) -> Vec<PathBuf> {
        if self.embedded {
            return Vec::new();
        }
        let mut inputs = vec![self.at.clone()];
        let Some(name) = self.at.file_name() else { return inputs };
        if !self.at.is_file() {
            return inputs;
        }
        // The other files of a split GGUF model, and the files next to it.
        let name = name.to_string_lossy();
        let stem = name.rsplit_once("-00001-of-").map_or(&*name, |(stem, _)| stem);
        for entry in std::fs::read_dir(disk::folder_of(&self.at)).into_iter().flatten().flatten() {
            let other = entry.file_name();
            let other = other.to_string_lossy();
            if is_part_of(stem, &other)
                || other.strip_prefix(&*name).is_some_and(|rest| rest.starts_with('.'))
            {
                inputs.push(entry.path());
            }
        }
        inputs
    }

    /// Returns the model's location as a user types it: its name, a folder, or a GGUF file.
    pub fn typed(&self) -> &Path {
        if self.named.is_file() { &self.at } else { &self.named }
    }

    /// Returns the location for reports: the name of a model inside the program.
    pub fn shown(&self) -> &Path {
        if self.embedded { &self.named } else { &self.at }
    }

    /// True for a model inside the program.
    pub fn is_embedded(&self) -> bool {
        self.embedded
    }

    /// True if texts can be tokenized: by a file of the folder, or by the keys of a GGUF file.
    pub fn has_tokenizer(&self) -> bool {
        self.at.is_file() || self.at.join("tokenizer.json").is_file()
    }

    /// True if no model is named.
    pub fn is_unnamed(&self) -> bool {
        self.named.as_os_str().is_empty()
    }

    /// Returns the name that the user gave.
    pub fn named(&self) -> &Path {
        &self.named
    }

    /// Returns the location of the files.
    pub fn location(&self) -> &Path {
        &self.at
    }
}

impl std::ops::Deref for ModelPath {
    type Target = Path;

    fn deref(&self) -> &Path {
        &self.at
    }
}

impl Serialize for ModelPath {
    fn serialize<S: Serializer>(&self, serializer: S) -> std::result::Result<S::Ok, S::Error> {
        self.named.serialize(serializer)
    }
}

impl<'de> Deserialize<'de> for ModelPath {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> std::result::Result<Self, D::Error> {
        ModelPath::find(PathBuf::deserialize(deserializer)?).map_err(serde::de::Error::custom)
    }
}
