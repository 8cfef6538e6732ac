//! Conversations of a run: JSON Lines rendered with the chat template of the initial model, with the loss on answers
//! only, made once and kept in the file of the run's tokens.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use anyhow::Result;
use mantissa_store::{Output, sealed};
use mantissa_train::config::RunConfig;
use mantissa_train::data::chat::{ChatBatches, Conversations};
use mantissa_train::data::{Cursor, DataError};
use serde_json::Value;

use super::owned::{How, MADE_FROM, RunFault, RunFolder, TOKENS};
use super::setup::Setup;
use super::tokens::made_from;
use crate::commands::render_chat;
use crate::context::Context;
use crate::error::BadInput;

/// Conversations of a run, before they are in its folder.
pub(super) struct Chat {
    /// Hash of the sources.
    pub(super) made_from: String,
    path: PathBuf,
    lines: Conversations,
    is_written: bool,
}

impl Chat {
    /// Reuses the run's conversations, or makes them from the data. A resumed run must have its original ones.
    ///
    /// # Errors
    /// Data that cannot be read, a model without chat template, [`RunFault::Tokens`]; I/O.
    pub(super) fn prepare(
        run: &RunFolder,
        settings: &RunConfig,
        base: &Path,
        setup: &Setup,
        context: &Context,
    ) -> Result<Self> {
        let path = run.dir().join(TOKENS);
        let now = made_from(settings, base, setup)?;
        let begun = run.tokens_from().filter(|_| run.how() == How::Resume);
        let from = begun.map_or_else(|| now.clone(), str::to_owned);
        let found = match Conversations::open(&path) {
            _ if !path.exists() => "none",
            Ok((lines, _, about)) if about.get(MADE_FROM) == Some(&from) => {
                if from != now {
                    let resumes = "resuming with the conversations that the run began with";
                    context.warn(&format!("data.files: the data or the tokenizer have changed; {resumes}"));
                }
                return Ok(Chat { made_from: from, path, lines, is_written: true });
            }
            Ok(_) => "others",
            Err(DataError::Store(error)) if sealed::is_damage(&error) => "a damaged file",
            // A token file of an older run, which --restart replaces.
            Err(_) => "others",
        };
        if from != now {
            return Err(RunFault::Tokens { path, found }.into());
        }
        let lines = read(settings, base, setup, context)?;
        Ok(Chat { made_from: from, path, lines, is_written: false })
    }

    /// Writes the conversations into the run's folder, unless they are there, and packs them into windows.
    ///
    /// # Errors
    /// I/O.
    pub(super) fn write(self, settings: &RunConfig, vocab_size: usize) -> Result<ChatBatches> {
        if !self.is_written {
            let about = BTreeMap::from([(MADE_FROM.to_owned(), self.made_from)]);
            self.lines.write(&Output::owned(&self.path), vocab_size, about)?;
        }
        let (length, seed) = (settings.data.length, settings.seed);
        Ok(ChatBatches::new(self.lines, vocab_size, length, seed, Cursor::default())?)
    }
}

/// Reads the conversations of the only data file.
fn read(settings: &RunConfig, base: &Path, setup: &Setup, context: &Context) -> Result<Conversations> {
    let [file] = settings.data.files.as_slice() else {
        let found = format!("{} files", settings.data.files.len());
        return Err(BadInput::new("data.files", found, "one file with data.chat").into());
    };
    conversations(&base.join(file), &setup.vocabulary.dir, &setup.tokenizer, settings.data.length, context)
}

/// Reads conversations for windows of `length` tokens, rendered with the template of the model in `dir`.
///
/// # Errors
/// As [`Conversations::read`].
pub fn conversations(
    file: &Path,
    dir: &Path,
    tokenizer: &mantissa_model::Tokenizer,
    length: usize,
    context: &Context,
) -> Result<Conversations> {
    let template = tokenizer.chat_template();
    let mut failed = None;
    let mut render = |contexts: &[Value]| match template {
        Some(template) => render_chat::render_each(dir, template, contexts).or_else(|error| {
            // The message is kept, because the reader of the data knows no errors of this crate.
            failed = Some(error);
            Ok(contexts.iter().map(|_| Err("the template failed".to_owned())).collect())
        }),
        None => Ok(Vec::new()),
    };
    let memory = context.memory_left();
    let found = match template {
        Some(_) => Conversations::read(file, tokenizer, length, memory, Some(&mut render)),
        None => Conversations::read(file, tokenizer, length, memory, None),
    };
    match failed {
        Some(error) => Err(error),
        None => Ok(found?),
    }
}
