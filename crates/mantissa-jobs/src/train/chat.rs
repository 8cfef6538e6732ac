//! Conversations of a run: JSON Lines rendered with the chat template of the initial model, with the loss on answers
//! only, made once and kept in the files of the run's tokens.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use mantissa_model::Tokenizer;
use mantissa_store::{Error, Output, sealed};
use mantissa_train::HeldOut;
use mantissa_train::config::RunConfig;
use mantissa_train::data::chat::{ChatBatches, Conversations, DefaultTemplate, Render};
use mantissa_train::data::{Cursor, DataError, HoldOut};
use serde_json::Value;

use super::run_folder::RunFolder;
use super::setup::Setup;
use super::tokens::made_from;
use crate::data_report::{ChatReport, chat_warnings};
use crate::error::{BadInput, JobError, Result};
use crate::host::Host;
use crate::run_fault::RunFault;
use crate::run_files::{HELD_OUT, MADE_FROM, TOKENS};

/// Conversations of a run, before they are in its folder.
pub(crate) struct Chat {
    /// Hash of the sources.
    pub(crate) made_from: String,
    /// Files of the conversations to train on and of those held out.
    paths: [PathBuf; 2],
    lines: Conversations,
    held_out: Option<Conversations>,
    is_written: bool,
}

impl Chat {
    /// Reuses the run's conversations, or makes them from the data. A resumed run must have its original ones.
    ///
    /// # Errors
    /// Data that cannot be read, [`RunFault::Tokens`]; I/O; if the host is strict, conversations that are cut or left out.
    pub(crate) fn prepare(
        run: &RunFolder,
        settings: &RunConfig,
        base: &Path,
        setup: &Setup,
        host: &Host,
    ) -> Result<Self> {
        let paths = [TOKENS, HELD_OUT].map(|name| run.dir().join(name));
        let now = made_from(settings, base, setup)?;
        let begun = run.begun_from();
        let from = begun.map_or_else(|| now.clone(), str::to_owned);
        let found = match open(&paths, settings) {
            _ if !paths[0].exists() => "none",
            Ok((lines, held_out, made_from)) if made_from.as_ref() == Some(&from) => {
                if from != now {
                    run.require_request()?;
                    let resumes = "resuming with the conversations that the run began with";
                    host.warn_all(&[format!(
                        "data.files: the data or the tokenizer have changed; {resumes}"
                    )])?;
                }
                let chat = Chat { made_from: from, paths, lines, held_out, is_written: true };
                chat.warn(settings, setup, host)?;
                return Ok(chat);
            }
            Ok(_) => "others",
            Err(DataError::Store(error)) if sealed::is_damage(&error) => "a damaged file",
            Err(DataError::Store(Error::Missing { .. })) => "none held out",
            // A token file of an older run, which --restart replaces.
            Err(_) => "others",
        };
        if from != now {
            let [path, _] = paths;
            return Err(RunFault::Tokens { path, found }.into());
        }
        let (lines, held_out) = read(settings, base, setup, host)?;
        if let Some(template) = setup.dialogue.as_ref().filter(|_| lines.counts.rendered > 0) {
            let model = setup.vocabulary.dir.display();
            let (about, with) = (template.about, "written with the results as chat_template.jinja");
            host.warn_all(&[format!("{model}: has no chat template; using the default ({about}), {with}")])?;
        }
        let chat = Chat { made_from: from, paths, lines, held_out, is_written: false };
        chat.warn(settings, setup, host)?;
        Ok(chat)
    }

    /// Tells what is cut or left out.
    fn warn(&self, settings: &RunConfig, setup: &Setup, host: &Host) -> Result<()> {
        let lengths = (settings.data.length, setup.replica.config.max_position_embeddings);
        let mut warnings = chat_warnings("data.files", &self.lines, lengths);
        let held_out = self.held_out.as_ref().filter(|_| !settings.validation.files.is_empty());
        warnings.extend(held_out.iter().flat_map(|lines| chat_warnings("validation.files", lines, lengths)));
        Ok(host.warn_all(&warnings)?)
    }

    /// Returns the conversations in numbers.
    pub(crate) fn report(&self, settings: &RunConfig) -> ChatReport {
        let held_out = self.held_out.as_ref().map_or(0, Conversations::len);
        ChatReport::new(&self.lines, held_out, settings.data.length)
    }

    /// Writes the conversations into the run's folder, unless they are there, and packs them into windows; returns those
    /// to train on and those held out.
    ///
    /// # Errors
    /// I/O.
    pub(crate) fn write(
        self,
        settings: &RunConfig,
        vocab_size: usize,
    ) -> Result<(ChatBatches, Option<HeldOut>)> {
        let [path, held_path] = &self.paths;
        if !self.is_written {
            let about = BTreeMap::from([(MADE_FROM.to_owned(), self.made_from)]);
            if let Some(held_out) = &self.held_out {
                held_out.write(&Output::owned(held_path), vocab_size, about.clone())?;
            }
            self.lines.write(&Output::owned(path), vocab_size, about)?;
        }
        let (length, batch, seed) = (settings.data.length, settings.data.batch, settings.seed);
        let held_out = self.held_out.map(|lines| {
            HeldOut::of_conversations(lines, vocab_size, length, batch, settings.validation.batches)
        });
        Ok((
            ChatBatches::new(self.lines, vocab_size, length, seed, Cursor::default())?,
            held_out.transpose()?,
        ))
    }
}

/// Conversations to train on, those held out, and the hash of their sources.
type Opened = (Conversations, Option<Conversations>, Option<String>);

/// Opens the conversations of a run.
fn open([path, held_path]: &[PathBuf; 2], settings: &RunConfig) -> Result<Opened, DataError> {
    let (lines, _, mut about) = Conversations::open(path)?;
    let from = about.remove(MADE_FROM);
    if !settings.validation.is_active() {
        return Ok((lines, None, from));
    }
    let (held_out, _, about) = Conversations::open(held_path)?;
    if about.get(MADE_FROM) != from.as_ref() {
        let path = held_path.clone();
        return Err(Error::Missing { path, expected: "the held-out conversations of the same data" }.into());
    }
    Ok((lines, Some(held_out), from))
}

/// Reads the conversations of the data files; returns those to train on and those held out.
fn read(
    settings: &RunConfig,
    base: &Path,
    setup: &Setup,
    host: &Host,
) -> Result<(Conversations, Option<Conversations>)> {
    let all = |files: &[String]| {
        let files: Vec<_> = files.iter().map(|file| base.join(file)).collect();
        let (dir, template) = (&setup.vocabulary.dir, setup.dialogue.as_ref());
        conversations(&files, dir, (&setup.tokenizer, template), settings.data.length, host)
    };
    let (validation, lines) = (&settings.validation, all(&settings.data.files)?);
    if !validation.is_active() {
        return Ok((lines, None));
    }
    if !validation.files.is_empty() {
        return Ok((lines, Some(all(&validation.files)?)));
    }
    let (lines, held_out) = lines.split(&mut HoldOut::new(validation.share));
    if lines.is_empty() || held_out.is_empty() {
        let allowed = "two conversations or more with an answer";
        let error = BadInput::new("validation.share", "one conversation", allowed);
        return Err(error.with_fix("name validation.files, or set validation.share to 0").into());
    }
    Ok((lines, Some(held_out)))
}

/// Reads the conversations of all `files` for windows of `length` tokens, rendered with the template of the model in
/// `dir`, or with the given one if it has none.
///
/// # Errors
/// As [`Conversations::read`] and [`Conversations::require_lines`].
pub fn conversations(
    files: &[PathBuf],
    dir: &Path,
    (tokenizer, default): (&Tokenizer, Option<&DefaultTemplate>),
    length: usize,
    host: &Host,
) -> Result<Conversations> {
    let template = tokenizer.chat_template().or(default.map(|template| &*template.text));
    let mut failed: Option<JobError> = None;
    let mut render = |contexts: &[Value]| match template {
        Some(template) => {
            let rendered = host.chat(dir).and_then(|chat| chat.render_each(dir, template, contexts));
            rendered.or_else(|error| {
                // The message is kept, because the reader of the data knows no errors of this crate.
                failed = Some(error);
                Ok(contexts.iter().map(|_| Err("the template failed".to_owned())).collect())
            })
        }
        None => Ok(Vec::new()),
    };
    let mut all = Conversations::default();
    for file in files {
        let memory = host.memory_left();
        let render: Option<&mut Render<'_>> = if template.is_some() { Some(&mut render) } else { None };
        match Conversations::read(file, tokenizer, length, memory, render) {
            Ok(lines) => all.append(lines),
            Err(error) => return Err(failed.unwrap_or_else(|| error.into())),
        }
    }
    let names: Vec<String> = files.iter().map(|file| file.display().to_string()).collect();
    all.require_lines(&names.join(", "), length)?;
    Ok(all)
}
