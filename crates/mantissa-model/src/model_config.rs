//! Configuration of a model as its files state it and its tensors show it.

use mantissa_arch::wrapper::TEXT_CONFIG;
use mantissa_store::convention::ModelFiles;
use serde_json::Value;

use crate::config::{ModelConfig, read_json};
use crate::end_tokens;
use crate::error::LoadError;
use crate::source::WeightSource;

/// Field that says whether the head is the embedding.
const TIED: &str = "tie_word_embeddings";

/// Reads the configuration of the model that `source` describes: `config.json`, with the token ids that any of its files
/// states. A stored head whose values differ from the embedding's is not tied, whatever the config says.
///
/// # Errors
/// [`LoadError::NoConfig`], [`LoadError::Config`] for the field that is wrong, or an error of reading the head.
pub fn load_config(source: &dyn WeightSource) -> Result<ModelConfig, LoadError> {
    let mut config = named(source)?;
    if let Some(dir) = source.dir() {
        let path = dir.join("generation_config.json");
        let (mut ends, file) = (Vec::new(), path.display().to_string());
        if let Some(value) = read_json(&path)? {
            config.apply_generation_config(&value, &file)?;
            ends = ModelConfig::end_tokens(&value, &file)?;
        }
        config.eos_token_ids = end_tokens::with_generation(dir, &config.eos_token_ids, &ends).ids();
    }
    Ok(config)
}

/// Parses the configuration and decides what the tensors show: their names, and a head of its own.
fn named(source: &dyn WeightSource) -> Result<ModelConfig, LoadError> {
    let no_config = || LoadError::NoConfig { location: source.location() };
    let value = source.config().ok_or_else(no_config)?;
    let mut config = ModelConfig::from_json(value, &file_of(source))?;
    config.find_names(|name| source.has(name));
    find_head(&mut config, source)?;
    Ok(config)
}

/// Name of the configuration in messages.
fn file_of(source: &dyn WeightSource) -> String {
    let path = source.dir().map(|dir| dir.join("config.json"));
    path.map_or_else(|| source.location(), |path| path.display().to_string())
}

/// Unties the head of `config` if the tensors of `source` have one with other values than the embedding, as transformers
/// 5 does (`tie_weights`).
///
/// # Errors
/// A tensor cannot be read.
pub fn find_head(config: &mut ModelConfig, source: &dyn WeightSource) -> Result<(), LoadError> {
    let head = config.head_module();
    if config.tie_word_embeddings && source.has_linear(head) {
        config.tie_word_embeddings = source.stores_alike(head, &config.embedding_module())?;
    }
    Ok(())
}

/// Checks that `source` has the head that `config` asks for.
///
/// # Errors
/// [`LoadError::NoHead`].
pub fn require_head(config: &ModelConfig, source: &dyn WeightSource) -> Result<(), LoadError> {
    let head = config.head_module();
    if config.tie_word_embeddings || source.has_linear(head) {
        return Ok(());
    }
    let stated = |fields: Option<&Value>| fields.and_then(|fields| fields.get(TIED)).map(Value::to_string);
    let fields = source.config();
    let found = stated(fields).or_else(|| stated(fields.and_then(|fields| fields.get(TEXT_CONFIG))));
    let default = || format!("nothing, which is false in {}", config.architecture.name);
    Err(LoadError::NoHead {
        file: file_of(source),
        tensor: format!("{head}.weight"),
        found: found.unwrap_or_else(default),
    })
}

/// Layers of the decoder on which configuration and tensors differ.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Unlisted {
    /// The first of them.
    pub first: String,
    /// Number of them.
    pub count: usize,
    /// True if they are stored unquantized and the configuration quantizes them; false for the reverse.
    pub dense: bool,
}

impl Unlisted {
    /// Returns what is stored and stated.
    pub fn shown(&self) -> String {
        let (stored, stated) = match self.dense {
            true => ("stored unquantized", "does not leave out"),
            false => ("stored quantized", "leaves out"),
        };
        format!("{} layers {stored} that the config {stated}, the first is {}", self.count, self.first)
    }
}

/// Finds the decoder's linear layers that are unquantized where the configuration quantizes them, and the reverse. Lists
/// that spell a name otherwise than the tensors count as silent on it.
pub fn unlisted_layers(files: &ModelFiles, config: &ModelConfig) -> Vec<Unlisted> {
    let mut found: [Option<Unlisted>; 2] = [None, None];
    let quantized = files.is_quantized() && files.gguf().is_none();
    for info in config.decoder_linears().filter(|_| quantized) {
        let Some(dense) = files.unlisted(&info.module) else { continue };
        let place = &mut found[usize::from(dense)];
        place.get_or_insert_with(|| Unlisted { first: info.module, count: 0, dense }).count += 1;
    }
    found.into_iter().flatten().collect()
}

/// Returns notes on what the tensors of a model contradict in its configuration. None for a model that cannot be read,
/// which [`load_config`] reports.
pub fn config_notes(files: &ModelFiles) -> Vec<String> {
    let Ok(config) = named(files) else { return Vec::new() };
    let path = files.config_path();
    let layers = unlisted_layers(files, &config);
    let layers = layers
        .iter()
        .map(Unlisted::shown)
        .map(|shown| format!("{}: quantization_config: {shown}; the tensors are followed", path.display()));
    head_note(&config).map(|note| format!("{}: {note}", path.display())).into_iter().chain(layers).collect()
}

/// Returns a note on a head that differs from the embedding in spite of the configuration.
fn head_note(config: &ModelConfig) -> Option<String> {
    let (head, embedding) = (config.head_module(), config.embedding_module());
    (config.states_tied && !config.tie_word_embeddings).then(|| {
        format!(
            "{TIED}: expected false, got true, but {head} differs from {embedding}; {head} is used, as in transformers 5; fix: set every {TIED} in this file to false"
        )
    })
}

/// Sets the flag of `config`, the contents of `config.json`, for a head of its own, wherever it is stated.
pub fn untie(config: &mut Value) {
    let Value::Object(fields) = config else { return };
    fields.insert(TIED.to_owned(), Value::Bool(false));
    if let Some(Value::Object(text)) = fields.get_mut(TEXT_CONFIG)
        && text.contains_key(TIED)
    {
        text.insert(TIED.to_owned(), Value::Bool(false));
    }
}
