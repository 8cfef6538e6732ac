//! Configuration of a model on disk.

use mantissa_model::{LoadError, ModelConfig, WeightSource, end_tokens};
use mantissa_store::convention::ModelFiles;

use crate::error::Result;

/// Reads the configuration of a model, with the end tokens that any of its files states.
///
/// # Errors
/// [`LoadError`] if there is none or a field is wrong.
pub fn model_config(source: &ModelFiles) -> Result<ModelConfig> {
    let file = source.config_path().display().to_string();
    let no_config = || {
        // A single weight file is named itself: the `config.json` beside it belongs to another model.
        let alone = source.checkpoint().files().next().filter(|_| source.dir().join("config.json").exists());
        LoadError::NoConfig { location: alone.unwrap_or(source.dir()).display().to_string() }
    };
    let mut config =
        ModelConfig::from_json(source.config().ok_or_else(no_config)?, &file).map_err(LoadError::from)?;
    config.find_names(|name| source.has(name));
    if let Some(dir) = WeightSource::dir(source) {
        let tokens = end_tokens::of_folder(dir, &config.eos_token_ids).map_err(LoadError::from)?;
        config.eos_token_ids = tokens.ids();
    }
    Ok(config)
}
