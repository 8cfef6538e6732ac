//! Teacher of a run: its files, and the checks that it predicts the tokens that the model does.

use std::path::Path;

use mantissa_model::{ModelConfig, Tokenizer, load_config};
use mantissa_store::convention::ModelFiles;
use mantissa_train::SoftTargets;
use mantissa_train::config::RunConfig;

use crate::error::{BadInput, Result};
use crate::host::Host;
use crate::model::{load_tokenizer, open, open_quietly};

/// Opens the teacher of `[distill]`, `model.init` without a name; returns it with its weight and temperature, or `None`
/// without the table. `config` and `tokenizer` are those of the model that learns.
///
/// # Errors
/// A teacher that cannot be read, has another vocabulary or tokenizer, or a context shorter than the windows.
pub(crate) fn open_teacher(
    settings: &RunConfig,
    base: &Path,
    (config, tokenizer): (&ModelConfig, &Tokenizer),
    host: &Host,
) -> Result<Option<(ModelFiles, SoftTargets)>> {
    let Some(distill) = &settings.distill else { return Ok(None) };
    let (path, files) = match (&distill.teacher, &settings.model.init) {
        (Some(path), _) => (path, open(&base.join(path), host)?),
        // Its notes are those of the model that is trained.
        (None, Some(init)) => (init, open_quietly(&base.join(init))?),
        (None, None) => return Ok(None),
    };
    let theirs = load_config(&files)?;
    let name = format!("teacher {path}");
    if theirs.vocab_size != config.vocab_size {
        let (found, allowed) = (theirs.vocab_size, config.vocab_size);
        let error = BadInput::new(
            name,
            format!("a vocabulary of {found} tokens"),
            format!("{allowed}, as the student"),
        );
        return Err(error.into());
    }
    let (needed, allowed) = (settings.data.length, theirs.max_position_embeddings);
    if needed > allowed {
        let found = format!("a context of {allowed} tokens");
        let error = BadInput::new(name, found, format!("at least {needed} (data.length)"));
        return Err(error.with_fix(format!("--length {allowed}, in settings data.length")).into());
    }
    if distill.teacher.is_some() {
        let other = load_tokenizer(&files, host)?;
        if let Some((id, [own, other])) = tokenizer.first_difference(&other, config.vocab_size) {
            let allowed = format!("the tokenizer of the student, where it is {own:?}");
            return Err(BadInput::new(name, format!("token {id} is {other:?}"), allowed).into());
        }
    }
    Ok(Some((files, distill.soft_targets())))
}
