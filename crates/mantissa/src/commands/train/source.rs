//! Data of a run: windows of a text, or packed conversations.

use std::path::Path;

use anyhow::Result;
use mantissa_train::config::RunConfig;
use mantissa_train::data::{Batches, Cursor, Data, TokenFile};

use super::chat::Chat;
use super::owned::RunFolder;
use super::setup::Setup;
use super::tokens::Tokens;
use crate::context::Context;

/// Data of a run, before they are in its folder.
pub(super) enum Source {
    Text(Box<Tokens>),
    Chat(Chat),
}

impl Source {
    /// Reuses or makes what the settings ask for.
    ///
    /// # Errors
    /// As [`Tokens::prepare`] and [`Chat::prepare`].
    pub(super) fn prepare(
        run: &RunFolder,
        settings: &RunConfig,
        base: &Path,
        setup: &Setup,
        context: &Context,
    ) -> Result<Self> {
        Ok(match settings.data.chat {
            true => Source::Chat(Chat::prepare(run, settings, base, setup, context)?),
            false => Source::Text(Box::new(Tokens::prepare(run, settings, base, setup, context)?)),
        })
    }

    /// Returns the hash of the sources.
    pub(super) fn made_from(&self) -> &str {
        match self {
            Source::Text(tokens) => &tokens.made_from,
            Source::Chat(chat) => &chat.made_from,
        }
    }

    /// Writes the data into the run's folder, unless they are there; returns them with the held-out tokens.
    ///
    /// # Errors
    /// I/O.
    pub(super) fn write(
        self,
        settings: &RunConfig,
        vocab_size: usize,
    ) -> Result<(Box<dyn Data>, Option<TokenFile>)> {
        Ok(match self {
            Source::Text(tokens) => {
                let files = tokens.write()?;
                let (length, seed) = (settings.data.length, settings.seed);
                let batches = Batches::new(files.train, length, seed, Cursor::default())?;
                (Box::new(batches), files.held_out)
            }
            Source::Chat(chat) => (Box::new(chat.write(settings, vocab_size)?), None),
        })
    }
}
