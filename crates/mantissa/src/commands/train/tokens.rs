//! Token file of a run, made once from its data and tokenizer.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use anyhow::Result;
use mantissa_model::{Bos, Tokenizer};
use mantissa_store::{FileDigest, Output, hash_file, sealed};
use mantissa_train::config::RunConfig;
use mantissa_train::data::{DataError, TokenFile, TokenWriter, documents_within};

use super::owned::{How, MADE_FROM, RunFault, RunFolder, TOKENS};
use super::setup::Setup;
use super::vocabulary::MADE_BY;
use crate::context::Context;
use crate::error::BadInput;

/// Tokens of a run, before anything is written.
pub(super) struct Tokens {
    /// Hash of the sources.
    pub(super) made_from: String,
    path: PathBuf,
    made: Made,
}

enum Made {
    Before(TokenFile),
    Now(TokenWriter, BTreeMap<String, String>),
}

impl Tokens {
    /// Reuses the run's token file, or makes the tokens from the data. A resumed run must have its original
    /// tokens.
    ///
    /// # Errors
    /// Data or a tokenizer that cannot be read, too few tokens, [`RunFault::Tokens`]; I/O.
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
        let made_from = begun.map_or_else(|| now.clone(), str::to_owned);
        let found = match TokenFile::open(&path) {
            _ if !path.exists() => "none",
            // The manifest with this hash is written before the tokens. If the token file fits the current
            // data but not the hash, the manifest is damaged.
            Ok(file) if [&made_from, &now].map(Some).contains(&file.about().get(MADE_FROM)) => {
                let made_from = file.about().get(MADE_FROM).cloned().unwrap_or_default();
                require_window(file.len(), settings)?;
                if made_from != now {
                    let resumes = "resuming with the tokens that the run began with";
                    context.warn(&format!("data.files: the data or the tokenizer have changed; {resumes}"));
                }
                return Ok(Tokens { made_from, path, made: Made::Before(file) });
            }
            Ok(_) => "others",
            Err(DataError::Store(error)) if sealed::is_damage(&error) => "a damaged file",
            Err(error) => return Err(error.into()),
        };
        if made_from != now {
            return Err(RunFault::Tokens { path, found }.into());
        }
        if found == "a damaged file" {
            context.warn(&format!("{}: is damaged; made again from the data", path.display()));
        }
        let (writer, documents) = make(settings, base, setup)?;
        require_window(writer.len() as u64, settings)?;
        let about = [(MADE_FROM, made_from.clone()), ("documents", documents.to_string())];
        let about = about.into_iter().chain(setup.vocabulary.hash()?.map(|hash| (MADE_BY, hash)));
        let about = about.map(|(key, value)| (key.to_owned(), value)).collect();
        Ok(Tokens { made_from, path, made: Made::Now(writer, about) })
    }

    /// Writes the token file into the run's folder, unless it exists.
    ///
    /// # Errors
    /// I/O.
    pub(super) fn write(self) -> Result<TokenFile> {
        match self.made {
            Made::Before(file) => Ok(file),
            Made::Now(writer, about) => {
                writer.finish(&Output::owned(&self.path), about)?;
                Ok(TokenFile::open(&self.path)?)
            }
        }
    }
}

/// True if a data file holds tokens instead of text.
pub(super) fn is_token_file(file: &Path) -> bool {
    file.extension().is_some_and(|extension| extension == "safetensors")
}

/// Refuses data with fewer tokens than one window.
fn require_window(count: u64, settings: &RunConfig) -> Result<()> {
    let length = settings.data.length;
    if count > length as u64 {
        return Ok(());
    }
    let allowed = format!("more than {length} tokens, the length of a window (data.length)");
    Err(BadInput::new("data.files", format!("{count} tokens"), allowed).into())
}

/// Tokenizes the data; returns the tokens and the number of documents.
fn make(settings: &RunConfig, base: &Path, setup: &Setup) -> Result<(TokenWriter, usize)> {
    let mut writer = TokenWriter::new(setup.config.vocab_size);
    let mut count = 0;
    for file in &settings.data.files {
        let file = base.join(file);
        let within = setup.text_memory;
        count += documents_within(&file, &settings.format_of(&file), within, |document| {
            let needs = (document.len() as u64).saturating_mul(Tokenizer::ENCODING) + writer.bytes();
            if needs > within {
                return Err(DataError::Memory { file: file.display().to_string(), needs, allowed: within });
            }
            let mut ids = setup.tokenizer.encode(document, Bos::Auto).map_err(DataError::from)?;
            ids.extend(setup.config.eos_token_ids.first());
            writer.push(&ids)
        })?;
    }
    Ok((writer, count))
}

/// Hashes the sources of the tokens: data files, document options, tokenizer, and the model's token settings.
fn made_from(settings: &RunConfig, base: &Path, setup: &Setup) -> Result<String> {
    let (vocab, end) = (setup.config.vocab_size, setup.config.eos_token_ids.first());
    let mut text = format!("{:?} {} {vocab} {end:?}", settings.data.split, settings.data.field);
    for file in &settings.data.files {
        let file = base.join(file);
        text += &format!(" {:?} {}", settings.format_of(&file), hash_file(&file)?.hex());
    }
    for name in ["tokenizer.json", "tokenizer_config.json", "config.json"] {
        let file = setup.vocabulary.dir.join(name);
        let hash = if file.is_file() { hash_file(&file)?.hex() } else { "none".to_owned() };
        text += &format!(" {name} {hash}");
    }
    Ok(FileDigest::of(text.as_bytes()).hex())
}
