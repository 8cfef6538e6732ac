//! Token file of a run, made once from its data and tokenizer.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use mantissa_model::{Bos, Tokenizer};
use mantissa_store::{Error, FileDigest, Output, hash_file, sealed};
use mantissa_train::config::RunConfig;
use mantissa_train::data::{
    DataError, Found, HoldOut, TextFormat, TokenFile, TokenWriter, pieces_within, record_word,
};

use super::run_folder::RunFolder;
use super::setup::Setup;
use super::vocabulary::MADE_BY;
use crate::data_report::{TextReport, text_warnings};
use crate::error::{BadInput, Result};
use crate::generated;
use crate::host::Host;
use crate::run_fault::RunFault;
use crate::run_files::{HELD_OUT, MADE_FROM, TOKENS, is_token_file};

/// Largest piece of a document that is tokenized at a time, in bytes.
const PIECE: usize = 64 << 10;
/// Sizes of the parts of a text without separator that are held out: at most, at least, and parts of a text at least.
const PART: (u64, u64, u64) = (16 << 10, 1 << 10, 128);
/// Metadata keys of the token file: documents, empty records, and the place of the first of these.
const DOCUMENTS: &str = "documents";
const EMPTY: &str = "empty_records";
const FIRST_EMPTY: &str = "first_empty_record";
/// Tokens of a token file that are read, and held out, at a time.
const TOKENS_READ: usize = 8192;

/// Tokens of a run, before they are in its folder.
pub(crate) struct Tokens {
    /// Hash of the sources.
    pub(crate) made_from: String,
    /// Files of the tokens to train on and of those held out.
    paths: [PathBuf; 2],
    made: Made,
}

/// Token files to train on, and held out for validation.
pub(crate) struct TokenFiles {
    pub(crate) train: TokenFile,
    pub(crate) held_out: Option<TokenFile>,
}

enum Made {
    Before(Box<TokenFiles>),
    Now(Box<Split>, BTreeMap<String, String>),
}

impl Tokens {
    /// Reuses the run's token files, or makes the tokens from the data. A resumed run must have its original
    /// tokens.
    ///
    /// # Errors
    /// Data or a tokenizer that cannot be read, too few tokens, [`RunFault::Tokens`]; I/O; if the host is strict, records and
    /// tokens that are left out.
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
        let made_from = begun.map_or_else(|| now.clone(), str::to_owned);
        let found = match open(&paths, settings) {
            _ if !paths[0].exists() => "none",
            // The manifest with this hash is written before the tokens. If the token file fits the current
            // data but not the hash, the manifest is damaged.
            Ok(files) if [&made_from, &now].map(Some).contains(&files.train.about().get(MADE_FROM)) => {
                let made_from = files.train.about().get(MADE_FROM).cloned().unwrap_or_default();
                require_window(files.train.len(), settings)?;
                require_held_out(files.held_out.as_ref().map(TokenFile::len), settings)?;
                if made_from != now {
                    run.require_request()?;
                    let resumes = "resuming with the tokens that the run began with";
                    host.warn_all(&[format!(
                        "data.files: the data or the tokenizer have changed; {resumes}"
                    )])?;
                }
                let tokens = Tokens { made_from, paths, made: Made::Before(Box::new(files)) };
                tokens.warn(settings, setup, host)?;
                return Ok(tokens);
            }
            Ok(_) => "others",
            Err(DataError::Store(error)) if sealed::is_damage(&error) => "a damaged file",
            Err(DataError::Store(Error::Missing { .. })) => "none held out",
            Err(error) => return Err(error.into()),
        };
        if made_from != now {
            let [path, _] = paths;
            return Err(RunFault::Tokens { path, found }.into());
        }
        if found == "a damaged file" {
            host.warn(&format!("{}: is damaged; made again from the data", paths[0].display()));
        }
        let (split, found) = make(settings, base, run.dir(), setup, host)?;
        require_window(split.train.len() as u64, settings)?;
        require_held_out(split.held_out.as_ref().map(|writer| writer.len() as u64), settings)?;
        let AllFound { found, first_empty } = found;
        let about = [(MADE_FROM, made_from.clone()), (DOCUMENTS, found.documents.to_string())];
        let about = about.into_iter().chain(setup.vocabulary.hash()?.map(|hash| (MADE_BY, hash)));
        let about = about.chain((found.empty > 0).then(|| (EMPTY, found.empty.to_string())));
        let about = about.chain(first_empty.map(|place| (FIRST_EMPTY, place)));
        let about = about.map(|(key, value)| (key.to_owned(), value)).collect();
        let tokens = Tokens { made_from, paths, made: Made::Now(Box::new(split), about) };
        tokens.warn(settings, setup, host)?;
        Ok(tokens)
    }

    /// Numbers of tokens to train on and held out, and the metadata.
    fn counts(&self) -> (u64, u64, &BTreeMap<String, String>) {
        match &self.made {
            Made::Before(files) => {
                let held_out = files.held_out.as_ref().map_or(0, TokenFile::len);
                (files.train.len(), held_out, files.train.about())
            }
            Made::Now(split, about) => {
                let held_out = split.held_out.as_ref().map_or(0, TokenWriter::len);
                (split.train.len() as u64, held_out as u64, about)
            }
        }
    }

    /// Returns the text in numbers.
    pub(crate) fn report(&self, settings: &RunConfig) -> TextReport {
        let (tokens, held_out, about) = self.counts();
        let number = |key: &str| about.get(key).and_then(|text| text.parse().ok()).unwrap_or(0);
        let found = Found { documents: number(DOCUMENTS), empty: number(EMPTY), first_empty: None };
        TextReport::new(found, tokens, held_out, settings.data.length)
    }

    /// Tells what is left out.
    fn warn(&self, settings: &RunConfig, setup: &Setup, host: &Host) -> Result<()> {
        let (report, (.., about)) = (self.report(settings), self.counts());
        let generated = settings.distill.as_ref().map_or(0, |distill| distill.generated) as u64;
        let generated = if setup.teacher_files().is_some() { generated * report.length } else { 0 };
        let first = about.get(FIRST_EMPTY).map(String::as_str);
        let context = setup.replica.config.max_position_embeddings;
        Ok(host.warn_all(&text_warnings(&report, first, generated, context))?)
    }

    /// Writes the token files into the run's folder, unless they exist.
    ///
    /// # Errors
    /// I/O.
    pub(crate) fn write(self) -> Result<TokenFiles> {
        let (split, about) = match self.made {
            Made::Before(files) => return Ok(*files),
            Made::Now(split, about) => (*split, about),
        };
        let [path, held_path] = &self.paths;
        let held_out = split.held_out.map(|writer| {
            writer.finish(&Output::owned(held_path), about.clone())?;
            TokenFile::open(held_path)
        });
        let held_out = held_out.transpose()?;
        split.train.finish(&Output::owned(path), about)?;
        Ok(TokenFiles { train: TokenFile::open(path)?, held_out })
    }
}

/// Opens the token files of a run.
fn open([path, held_path]: &[PathBuf; 2], settings: &RunConfig) -> Result<TokenFiles, DataError> {
    let train = TokenFile::open(path)?;
    let held_out = settings.validation.is_active().then(|| TokenFile::open(held_path)).transpose()?;
    if held_out.as_ref().is_some_and(|file| file.about().get(MADE_FROM) != train.about().get(MADE_FROM)) {
        let path = held_path.clone();
        return Err(Error::Missing { path, expected: "the held-out tokens of the same data" }.into());
    }
    Ok(TokenFiles { train, held_out })
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

/// Refuses held-out text with fewer tokens than one window.
fn require_held_out(count: Option<u64>, settings: &RunConfig) -> Result<()> {
    let length = settings.data.length;
    let Some(count) = count.filter(|count| *count <= length as u64) else { return Ok(()) };
    let allowed = format!("more than {length} held-out tokens, the length of a window (data.length)");
    let error = BadInput::new("validation", format!("{count} tokens"), allowed);
    Err(error
        .with_fix("raise validation.share, name more validation.files, or set validation.share to 0")
        .into())
}

/// Tokens to train on, and held out.
struct Split {
    train: TokenWriter,
    held_out: Option<TokenWriter>,
    choice: HoldOut,
    /// File that a marker divides which is not its separator, and the marker.
    unsplit: Option<(PathBuf, &'static str)>,
}

/// Markers between documents of public texts.
const MARKERS: [&str; 4] = ["<|endoftext|>", "<|end_of_text|>", "<|endofdoc|>", "<|eot_id|>"];

impl Split {
    /// Keeps the first marker of a text without separator that the tokenizer does not know as one token.
    fn look_for_markers(&mut self, file: &Path, text: &str, tokenizer: &Tokenizer) {
        if self.unsplit.is_some() || !text.contains("<|e") {
            return;
        }
        let is_text =
            |marker: &&str| tokenizer.encode(marker, Bos::Never).is_ok_and(|tokens| tokens.len() > 1);
        let marker = MARKERS.into_iter().filter(|marker| text.contains(marker)).find(is_text);
        self.unsplit = marker.map(|marker| (file.to_owned(), marker));
    }

    /// Warns of a text whose documents are not told apart.
    fn warning(&self) -> Option<String> {
        let (file, marker) = self.unsplit.as_ref()?;
        Some(format!(
            "{}: {marker} is read as text, and what it divides as one document; fix: --set 'data.split=\"{marker}\"'",
            file.display()
        ))
    }

    /// Returns the writer of the next part of the data, which has `len` bytes.
    fn next(&mut self, len: usize) -> &mut TokenWriter {
        match &mut self.held_out {
            Some(writer) if self.choice.takes(len) => writer,
            _ => &mut self.train,
        }
    }
}

/// Documents of all files, and the place of the first empty record.
#[derive(Default)]
struct AllFound {
    found: Found,
    first_empty: Option<String>,
}

impl AllFound {
    /// Adds the documents of `file`.
    fn add(&mut self, file: &Path, other: Found) {
        self.found.documents += other.documents;
        self.found.empty += other.empty;
        let name = || file.file_name().map_or_else(String::new, |name| name.to_string_lossy().into_owned());
        let place = other.first_empty.map(|line| format!("{}: {} {line}", name(), record_word(file)));
        self.first_empty = self.first_empty.take().or(place);
    }
}

/// Tokenizes the data with memory that does not grow with them; returns the tokens and what was found.
fn make(
    settings: &RunConfig,
    base: &Path,
    run: &Path,
    setup: &Setup,
    host: &Host,
) -> Result<(Split, AllFound)> {
    let (vocab, validation) = (setup.replica.config.vocab_size, &settings.validation);
    let held_out = validation.is_active().then(|| TokenWriter::beside(vocab, run, "held-out"));
    let train = TokenWriter::beside(vocab, run, "tokens");
    let mut split = Split { train, held_out, choice: HoldOut::new(validation.share), unsplit: None };
    let mut all = AllFound::default();
    for file in &settings.data.files {
        let file = base.join(file);
        all.add(&file, add_file(&file, settings, setup, &mut split)?);
    }
    let generated = settings.distill.as_ref().map_or(0, |distill| distill.generated);
    if let Some(teacher) = setup.teacher_files().filter(|_| generated > 0) {
        let samples = generated::free(teacher, (generated, settings.data.length), settings.seed, host)?;
        samples.iter().try_for_each(|sample| split.train.push(sample))?;
        // The last window's targets end one token after it.
        samples.first().map_or(Ok(()), |sample| split.train.push(&sample[..1]))?;
        all.found.documents += generated;
    }
    host.warn_all(&split.warning().into_iter().collect::<Vec<_>>())?;
    // All of these files is held out.
    let Split { train, held_out: Some(held_out), choice, unsplit } = split else { return Ok((split, all)) };
    let mut others = Split { train: held_out, held_out: None, choice: HoldOut::default(), unsplit: None };
    for file in &validation.files {
        add_file(&base.join(file), settings, setup, &mut others)?;
    }
    let held_out = others.train;
    if held_out.is_empty() {
        let allowed = "two documents or more; fix: name validation.files, or set validation.share to 0";
        return Err(BadInput::new("validation.share", "one document", allowed).into());
    }
    Ok((Split { train, held_out: Some(held_out), choice, unsplit }, all))
}

/// Adds a file of data; returns the numbers of its documents.
fn add_file(file: &Path, settings: &RunConfig, setup: &Setup, split: &mut Split) -> Result<Found> {
    if is_token_file(file) {
        return Ok(copy(&TokenFile::open_data(file, setup.replica.config.vocab_size)?, split)?);
    }
    let (format, within) = (settings.format_of(file), setup.text_memory);
    let unsplit = format == (TextFormat::Text { split: None });
    // A text without separator is held out part by part, other texts document by document.
    let by_part = unsplit && settings.validation.share > 0.0 && split.held_out.is_some();
    let most = if by_part { part_of(file) } else { PIECE };
    let mut held = false;
    Ok(pieces_within(file, &format, most, within, |piece| {
        let needs = (piece.text.len() as u64).saturating_mul(Tokenizer::ENCODING);
        if needs > within {
            return Err(DataError::Memory { file: file.display().to_string(), needs, allowed: within });
        }
        let bos = if piece.first { Bos::Auto } else { Bos::Never };
        let mut ids = setup.tokenizer.encode(piece.text, bos).map_err(DataError::from)?;
        if unsplit {
            split.look_for_markers(file, piece.text, &setup.tokenizer);
        }
        ids.extend(setup.replica.config.eos_token_ids.first().filter(|_| piece.last));
        let Split { train, held_out, choice, .. } = &mut *split;
        if piece.first || by_part {
            held = held_out.is_some() && choice.takes(piece.text.len());
        }
        match held_out {
            Some(writer) if held => writer.push(&ids),
            _ => train.push(&ids),
        }
    })?)
}

/// Returns the bytes of the parts of a text that are held out.
fn part_of(file: &Path) -> usize {
    let size = std::fs::metadata(file).map_or(0, |file| file.len());
    (size / PART.2).clamp(PART.1, PART.0) as usize
}

/// Copies a token file part by part; returns one document, as it does not tell them apart.
fn copy(file: &TokenFile, split: &mut Split) -> Result<Found, DataError> {
    let mut ids = Vec::with_capacity(TOKENS_READ);
    for first in (0..file.len()).step_by(TOKENS_READ) {
        ids.clear();
        file.read(first, TOKENS_READ.min((file.len() - first) as usize), &mut ids)?;
        split.next(ids.len()).push(&ids)?;
    }
    Ok(Found { documents: 1, ..Found::default() })
}

/// Hashes the sources of the tokens: data files, document options, tokenizer, and the model's token settings.
pub(crate) fn made_from(settings: &RunConfig, base: &Path, setup: &Setup) -> Result<String> {
    let (vocab, end) = (setup.replica.config.vocab_size, setup.replica.config.eos_token_ids.first());
    let mut text = format!("{:?} {} {vocab} {end:?}", settings.data.split, settings.data.field);
    if settings.data.chat {
        text += &format!(" chat {}", settings.data.length);
        text.extend(setup.dialogue.iter().map(|template| format!(" {}", template.text)));
    }
    let validation = &settings.validation;
    if validation.is_active() {
        text += &format!(" {} of {}", validation.share, settings.data.files.len());
    }
    for file in settings.data.files.iter().chain(&validation.files) {
        let file = base.join(file);
        text += &format!(" {:?} {}", settings.format_of(&file), hash_file(&file)?.hex());
    }
    if let Some(distill) = settings.distill.as_ref().filter(|distill| distill.generated > 0) {
        let teacher = setup.teacher_digest()?.unwrap_or_default();
        text += &format!(" {} {} {} {teacher}", distill.generated, settings.data.length, settings.seed);
    }
    let template = settings.data.chat.then_some("chat_template.jinja");
    for name in ["tokenizer.json", "tokenizer_config.json", "config.json"].into_iter().chain(template) {
        let file = setup.vocabulary.dir.join(name);
        let hash = if file.is_file() { hash_file(&file)?.hex() } else { "none".to_owned() };
        text += &format!(" {name} {hash}");
    }
    Ok(FileDigest::of(text.as_bytes()).hex())
}
