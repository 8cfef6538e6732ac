//! Tokenizer of a run: a folder that the settings name, or one trained on the run's data and kept in its folder.

use std::path::{Path, PathBuf};

use mantissa_store::{Output, SafeTensors, Scratch, disk, hash_file, json, regular, write_file_atomic};
use mantissa_train::config::RunConfig;
use mantissa_train::data::{WordCounts, learn_bpe_at_most};

use super::start::StartMode;
use crate::error::{BadInput, Result};
use crate::host::Host;
use crate::run_files::{TOKENIZER, TOKENIZER_FILES, TOKENS, is_token_file};

/// Metadata key of the token file: the hash of the run's own tokenizer.
pub(crate) const MADE_BY: &str = "tokenizer";
/// Maximum size of `tokenizer.json` in bytes.
const MAX_FILE: u64 = 1 << 30;

/// Folder with a tokenizer.
pub(crate) struct Vocabulary {
    pub(crate) dir: PathBuf,
    /// Number of tokens of the run's own tokenizer.
    pub(crate) size: Option<usize>,
    /// Tokenizer that was trained now, to be kept in the run's folder.
    made: Option<Scratch>,
}

impl Vocabulary {
    /// Finds the tokenizer of the run at `run`, or trains one of at most `most` tokens on the data. Writes nothing into
    /// the run's folder.
    ///
    /// # Errors
    /// Data that cannot be read, or too much memory for their words.
    pub(crate) fn find(
        settings: &RunConfig,
        base: &Path,
        (run, how): (&Path, StartMode),
        most: usize,
        host: &Host,
    ) -> Result<Self> {
        if let Some(dir) = settings.model.tokenizer.as_ref().or(settings.model.init.as_ref()) {
            return Ok(Vocabulary { dir: base.join(dir), size: None, made: None });
        }
        let own = run.join(TOKENIZER);
        if how.resumes() && is_whole(run) {
            let size = Some(tokens_of(&own)?);
            return Ok(Vocabulary { dir: own, size, made: None });
        }
        let (made, size) = train(settings, base, most, host)?;
        Ok(Vocabulary { dir: made.path().to_owned(), size: Some(size), made: Some(made) })
    }

    /// Returns the hash of the run's own tokenizer.
    ///
    /// # Errors
    /// I/O.
    pub(crate) fn hash(&self) -> Result<Option<String>> {
        let file = self.dir.join(TOKENIZER_FILES[0]);
        self.size.map(|_| Ok(mantissa_store::hash_file(&file)?.hex())).transpose()
    }

    /// Writes a tokenizer that was trained now into the run's folder.
    ///
    /// # Errors
    /// I/O.
    pub(crate) fn keep(&self, run: &Path) -> Result<()> {
        let Some(made) = &self.made else { return Ok(()) };
        let dir = run.join(TOKENIZER);
        let io = |path: &Path, operation, error| mantissa_store::Error::Io {
            path: path.to_owned(),
            operation,
            error,
        };
        disk::create_folders(&dir).map_err(|error| io(&dir, "create folder", error))?;
        for file in TOKENIZER_FILES {
            let from = made.path().join(file);
            let bytes = regular::read(&from, MAX_FILE, "a file of the tokenizer")?;
            write_file_atomic(&Output::owned(dir.join(file)), &bytes)?;
        }
        Ok(())
    }
}

/// True if the tokenizer of the run at `run` is the one that its tokens were made by.
fn is_whole(run: &Path) -> bool {
    let Ok(digest) = hash_file(&run.join(TOKENIZER).join(TOKENIZER_FILES[0])) else { return false };
    let tokens = SafeTensors::open(&run.join(TOKENS)).ok();
    let stated = tokens.and_then(|file| file.metadata().get(MADE_BY).cloned());
    stated.is_none_or(|stated| stated == digest.hex())
}

/// Counts the tokens of the byte-level BPE tokenizer in `dir`.
fn tokens_of(dir: &Path) -> Result<usize> {
    let path = dir.join(TOKENIZER_FILES[0]);
    let value = json::read_strict(&path, MAX_FILE, "a tokenizer.json")?;
    let vocab = value["model"]["vocab"].as_object().map(serde_json::Map::len);
    Ok(vocab.ok_or_else(|| BadInput::new(path.display().to_string(), "no model.vocab", "a BPE tokenizer"))?)
}

/// Trains a tokenizer on the data into a temporary folder; returns it with its number of tokens.
fn train(settings: &RunConfig, base: &Path, most: usize, host: &Host) -> Result<(Scratch, usize)> {
    let mut words = WordCounts::new(host.threads, host.memory_left());
    for file in &settings.data.files {
        let file = base.join(file);
        if is_token_file(&file) {
            let what = "model.tokenizer";
            let found = format!("none, with the token file {}", file.display());
            return Err(BadInput::new(what, found, "the folder of the tokenizer that made the tokens").into());
        }
        words.add_file(&file, &settings.format_of(&file))?;
    }
    let (trained, size) = learn_bpe_at_most(words, most)?;
    let scratch = Scratch::new()?;
    for (file, text) in TOKENIZER_FILES.into_iter().zip([&trained.tokenizer, &trained.config]) {
        write_file_atomic(&Output::owned(scratch.path().join(file)), text.as_bytes())?;
    }
    Ok((scratch, size))
}
