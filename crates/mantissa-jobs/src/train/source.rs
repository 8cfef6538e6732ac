//! Data of a run: windows of a text, or packed conversations.

use std::path::Path;

use mantissa_train::HeldOut;
use mantissa_train::config::RunConfig;
use mantissa_train::data::chat::{ChatBatches, Conversations};
use mantissa_train::data::{Batches, Cursor, Data, TokenFile};

use super::chat::Chat;
use super::run_folder::RunFolder;
use super::setup::Setup;
use super::tokens::Tokens;
use crate::data_report::DataReport;
use crate::error::Result;
use crate::host::Host;
use crate::run_files::TOKENS;

/// Data of a run, before they are in its folder.
pub(crate) enum Source {
    Text(Box<Tokens>),
    Chat(Box<Chat>),
}

/// Opens the data that a run at `run` was begun with.
///
/// # Errors
/// A file that is damaged or missing.
pub(crate) fn begun(run: &Path, settings: &RunConfig) -> Result<Box<dyn Data>> {
    let (path, length, seed) = (run.join(TOKENS), settings.data.length, settings.seed);
    if settings.data.chat {
        let (lines, vocab_size, _) = Conversations::open(&path)?;
        return Ok(Box::new(ChatBatches::new(lines, vocab_size, length, seed, Cursor::default())?));
    }
    Ok(Box::new(Batches::new(TokenFile::open(&path)?, length, seed, Cursor::default())?))
}

impl Source {
    /// Reuses or makes what the settings ask for.
    ///
    /// # Errors
    /// As [`Tokens::prepare`] and [`Chat::prepare`].
    pub(crate) fn prepare(
        run: &RunFolder,
        settings: &RunConfig,
        base: &Path,
        setup: &Setup,
        host: &Host,
    ) -> Result<Self> {
        Ok(match settings.data.chat {
            true => Source::Chat(Box::new(Chat::prepare(run, settings, base, setup, host)?)),
            false => Source::Text(Box::new(Tokens::prepare(run, settings, base, setup, host)?)),
        })
    }

    /// Returns the hash of the sources.
    pub(crate) fn made_from(&self) -> &str {
        match self {
            Source::Text(tokens) => &tokens.made_from,
            Source::Chat(chat) => &chat.made_from,
        }
    }

    /// Returns the data in numbers.
    pub(crate) fn report(&self, settings: &RunConfig) -> DataReport {
        match self {
            Source::Text(tokens) => DataReport::Text(tokens.report(settings)),
            Source::Chat(chat) => DataReport::Chat(chat.report(settings)),
        }
    }

    /// Writes the data into the run's folder, unless they are there; returns them with the held-out windows.
    ///
    /// # Errors
    /// I/O.
    pub(crate) fn write(
        self,
        settings: &RunConfig,
        vocab_size: usize,
    ) -> Result<(Box<dyn Data>, Option<HeldOut>)> {
        Ok(match self {
            Source::Text(tokens) => {
                let files = tokens.write()?;
                let (length, batch, seed) = (settings.data.length, settings.data.batch, settings.seed);
                let batches = Batches::new(files.train, length, seed, Cursor::default())?;
                let measured = settings.validation.batches;
                let held_out = files.held_out.map(|file| HeldOut::new(file, length, batch, measured));
                (Box::new(batches), held_out.transpose()?)
            }
            Source::Chat(chat) => {
                let (batches, held_out) = chat.write(settings, vocab_size)?;
                (Box::new(batches), held_out)
            }
        })
    }
}
