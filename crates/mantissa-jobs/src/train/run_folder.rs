//! Ownership of files in a run's folder: a manifest tells the run's files from foreign ones.
//!
//! The manifest [`MANIFEST`] is written first and lists every file before it is created. Only listed files
//! are ever replaced or removed. A file with one of the run's names that is not listed stops the run before
//! it changes anything.

use std::collections::BTreeSet;
use std::fs;
use std::io;
use std::path::{Path, PathBuf};

use mantissa_store::{
    Error, JobKey, Lock, MANIFEST_NAME, Manifest, Output, disk, json, sealed, work, write_file_atomic,
};
use mantissa_train::data::TokenFile;
use serde::{Deserialize, Serialize};

use super::log::logged_steps;
use super::start::StartMode;
use crate::error::{JobError, Result};
use crate::run_fault::RunFault;
use crate::run_files::{
    ADAPTER, BASE, CHECKPOINTS, CONFIG, HELD_OUT, LOG, MADE_FROM, MANIFEST, MODEL, QUANTIZED, RUN, SAMPLES,
    TELEMETRY, TOKENIZER, TOKENIZER_FILES, TOKENS, steps_of,
};

/// Files of every run.
const FILES: [&str; 9] = [
    CONFIG,
    LOG,
    TELEMETRY,
    RUN,
    TOKENS,
    HELD_OUT,
    SAMPLES,
    "tokenizer/tokenizer.json",
    "tokenizer/tokenizer_config.json",
];
/// Folders of results, whose own manifests list their files.
const RESULTS: [&str; 4] = [MODEL, BASE, ADAPTER, QUANTIZED];
/// First field of the manifest, which identifies it.
const TOOL: &str = "mantissa train";
/// Maximum manifest size in bytes.
const MAX_MANIFEST: u64 = 16 << 20;

/// Manifest of a run.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct Listing {
    tool: String,
    about: String,
    /// Hash of the sources of the tokens.
    tokens_from: String,
    /// File names relative to the folder; `model` stands for the files in its own manifest.
    files: BTreeSet<String>,
}

/// Folder of a run, locked by this process for the lifetime of this value.
pub struct RunFolder {
    dir: PathBuf,
    how: StartMode,
    listing: Option<Listing>,
    rebuilt: bool,
    _lock: Lock,
}

impl RunFolder {
    /// Locks the run at `dir`, and refuses its content unless it may be resumed, replaced or removed. Changes
    /// nothing but the lock.
    ///
    /// # Errors
    /// [`RunFault`]; an output fault with process id and start time of the run's owner; I/O.
    pub fn open(dir: &Path, how: StartMode) -> Result<Self> {
        let lock = Lock::of(dir)?;
        let is_damaged = |error: &JobError| matches!(error, JobError::Run(RunFault::Damaged(_)));
        let (listing, rebuilt) = match Listing::read(&dir.join(MANIFEST)) {
            Err(error) if how == StartMode::Resume && is_damaged(&error) => {
                (Some(Listing::rebuild(dir)?), true)
            }
            listing => (listing?, false),
        };
        let folder = RunFolder { dir: dir.to_owned(), how, listing, rebuilt, _lock: lock };
        folder.refuse_strangers()?;
        folder.refuse_state()?;
        Ok(folder)
    }

    /// Returns the folder.
    pub fn dir(&self) -> &Path {
        &self.dir
    }

    /// Returns the mode of starting.
    pub fn how(&self) -> StartMode {
        self.how
    }

    /// Returns the hash of the token sources that the run began with, if it is resumed.
    pub fn begun_from(&self) -> Option<&str> {
        self.listing.as_ref().filter(|_| self.how.resumes()).map(|listing| &*listing.tokens_from)
    }

    /// Returns the hash of the token sources of the run at `dir`.
    ///
    /// # Errors
    /// [`RunFault::Damaged`]; I/O.
    pub(crate) fn tokens_from(dir: &Path) -> Result<Option<String>> {
        Ok(Listing::read(&dir.join(MANIFEST))?.map(|listing| listing.tokens_from))
    }

    /// Refuses to go on with the tokens that the run began with, though the data have changed, unless that is requested.
    ///
    /// # Errors
    /// [`RunFault::OtherData`].
    pub fn require_request(&self) -> Result<(), RunFault> {
        match self.how {
            StartMode::Continue => Err(RunFault::OtherData { run: self.dir.clone() }),
            _ => Ok(()),
        }
    }

    fn begun(&self, fix: &'static str) -> RunFault {
        RunFault::Begun { run: self.dir.clone(), fix }
    }

    /// Returns the path of the manifest if it was damaged and rebuilt from the folder's content.
    pub fn rebuilt(&self) -> Option<PathBuf> {
        self.rebuilt.then(|| self.dir.join(MANIFEST))
    }

    /// Returns the output of a result, such as [`MODEL`]. An existing one is replaced only if its manifest lists
    /// every file.
    pub fn result(&self, name: &str) -> Output {
        Output::of_job(self.dir.join(name), JobKey::of(TOOL), true)
    }

    /// Returns the run's existing checkpoints with their steps, oldest first.
    pub fn checkpoints(&self) -> Vec<(u64, PathBuf)> {
        let files = self.listing.iter().flat_map(|listing| &listing.files);
        let named = files.filter_map(|file| Some((checkpoint_steps(file)?, self.dir.join(file))));
        let mut there: Vec<_> = named.filter(|(_, path)| path.is_file()).collect();
        there.sort();
        there
    }

    /// Prepares the folder: removes partial files of dead processes and, unless resuming, the files of the
    /// old run. After a kill at any point, the same command can prepare the folder again. Returns foreign
    /// files, which stay.
    ///
    /// # Errors
    /// I/O.
    pub fn begin(&mut self, tokens_from: &str) -> Result<Vec<String>> {
        create_folder(&self.dir)?;
        let checkpoints = self.dir.join(CHECKPOINTS);
        work::sweep(&self.dir, |name| FILES.contains(&name) || name == MANIFEST || RESULTS.contains(&name))?;
        let tokenizer = self.dir.join(TOKENIZER);
        if tokenizer.is_dir() {
            work::sweep(&tokenizer, |name| TOKENIZER_FILES.contains(&name))?;
        }
        if checkpoints.is_dir() {
            work::sweep(&checkpoints, |name| steps_of(name).is_some())?;
        }
        if !self.how.resumes() {
            self.remove_run()?;
            let files = FILES.into_iter().chain(RESULTS).map(str::to_owned).collect();
            self.write(Listing::new(tokens_from, files))?;
        } else if let Some(listing) = self.listing.take_if(|_| self.rebuilt) {
            self.write(Listing::new(tokens_from, listing.files))?;
        }
        create_folder(&checkpoints)?;
        self.others()
    }

    /// Returns the path of the checkpoint of `steps`, after listing it in the manifest.
    ///
    /// # Errors
    /// I/O.
    pub fn checkpoint(&mut self, steps: u64) -> Result<PathBuf> {
        let file = format!("{CHECKPOINTS}/step-{steps:010}.safetensors");
        let path = self.dir.join(&file);
        let Some(mut listing) = self.listing.clone() else { return Ok(path) };
        if listing.files.insert(file.clone()) {
            // Checkpoints removed since then are dropped from the list.
            listing.files.retain(|name| {
                *name == file || checkpoint_steps(name).is_none() || self.dir.join(name).is_file()
            });
            self.write(listing)?;
        }
        Ok(path)
    }

    fn write(&mut self, listing: Listing) -> Result<()> {
        let text = serde_json::to_string_pretty(&listing)? + "\n";
        write_file_atomic(&Output::owned(self.dir.join(MANIFEST)), text.as_bytes())?;
        self.listing = Some(listing);
        Ok(())
    }

    fn lists(&self, file: &str) -> bool {
        self.listing.as_ref().is_some_and(|listing| listing.files.contains(file))
    }

    /// Refuses foreign files with the run's names.
    fn refuse_strangers(&self) -> Result<()> {
        for file in FILES {
            self.refuse_stranger(file)?;
        }
        let checkpoints = self.dir.join(CHECKPOINTS);
        for name in entries(&checkpoints)?.unwrap_or_default() {
            if steps_of(&name).is_some() {
                self.refuse_stranger(&format!("{CHECKPOINTS}/{name}"))?;
            }
        }
        RESULTS.into_iter().try_for_each(|name| self.refuse_result(name))
    }

    fn refuse_stranger(&self, file: &str) -> Result<()> {
        let path = self.dir.join(file);
        match fs::symlink_metadata(&path) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(()),
            Err(error) => Err(fault(&path, "look up")(error)),
            Ok(found) if found.is_file() && self.lists(file) => Ok(()),
            Ok(_) => Err(RunFault::NotOurs(path).into()),
        }
    }

    /// Refuses a model that the run did not write or that holds foreign files: it could not be replaced at
    /// the end.
    fn refuse_result(&self, name: &str) -> Result<()> {
        let path = self.dir.join(name);
        let not_ours = || Err(RunFault::NotOurs(path.clone()).into());
        if fs::symlink_metadata(&path).is_ok_and(|found| !found.is_dir()) {
            return not_ours();
        }
        if entries(&path)?.unwrap_or_default().is_empty() {
            return Ok(());
        }
        if !self.lists(name) {
            return not_ours();
        }
        self.result(name).require_folder_writable()?;
        match Manifest::read(&path)?.run.get("command") {
            Some(command) if command == "train" => Ok(()),
            Some(_) if name == QUANTIZED => Ok(()),
            _ => not_ours(),
        }
    }

    /// Refuses to start if a run exists, and to resume if none does.
    fn refuse_state(&self) -> Result<()> {
        let run = self.dir.clone();
        let checkpoints = !self.checkpoints().is_empty();
        match self.how {
            StartMode::New if checkpoints => Err(self.begun("--resume or --restart").into()),
            StartMode::New if self.has_results()? => Err(self.begun("--restart").into()),
            StartMode::Resume | StartMode::Continue if !checkpoints => {
                let fix = if self.has_results()? { "--restart" } else { "neither --resume nor --restart" };
                Err(RunFault::NoCheckpoint { run, fix }.into())
            }
            _ => Ok(()),
        }
    }

    /// True if the folder holds more than a run leaves that was killed before its first checkpoint.
    fn has_results(&self) -> Result<bool> {
        let mut model = false;
        for name in RESULTS {
            model |= !entries(&self.dir.join(name))?.unwrap_or_default().is_empty();
        }
        Ok(model || logged_steps(&self.dir.join(LOG))? > 1)
    }

    /// Removes the old run's files, checkpoints first: as long as one exists, the run can be resumed with its
    /// whole log. The token file stays; it is checked against the data.
    fn remove_run(&mut self) -> Result<()> {
        let remove = |path: &Path| disk::remove_file_if_there(path).map_err(fault(path, "remove"));
        let there = self.checkpoints();
        for (_, path) in &there {
            remove(path)?;
        }
        if !there.is_empty() {
            // Removed durably before they leave the list.
            let folder = self.dir.join(CHECKPOINTS);
            disk::sync_path(&folder).map_err(fault(&folder, "fsync folder"))?;
        }
        RESULTS.into_iter().try_for_each(|name| self.remove_result(name))?;
        for file in [LOG, TELEMETRY, SAMPLES, RUN, CONFIG].into_iter().filter(|file| self.lists(file)) {
            remove(&self.dir.join(file))?;
        }
        Ok(())
    }

    /// Removes the files of a result listed in its manifest, then the manifest, then the folder.
    fn remove_result(&self, name: &str) -> Result<()> {
        let model = self.dir.join(name);
        if !self.lists(name) || !model.is_dir() {
            return Ok(());
        }
        let manifest = model.join(MANIFEST_NAME);
        if manifest.is_file() {
            for file in Manifest::read(&model)?.files.keys().map(|name| model.join(name)).chain([manifest]) {
                disk::remove_file_if_there(&file).map_err(fault(&file, "remove"))?;
            }
        }
        match disk::remove_folder(&model) {
            Err(error) if error.kind() == io::ErrorKind::DirectoryNotEmpty => Ok(()),
            result => result.map_err(fault(&model, "remove folder")),
        }
    }

    /// Returns foreign files in the run's folders, except its report.
    fn others(&self) -> Result<Vec<String>> {
        let known = [
            MANIFEST,
            CHECKPOINTS,
            MODEL,
            ADAPTER,
            QUANTIZED,
            TOKENIZER,
            "report.html",
            ".run.mantissa-lock",
        ];
        let top = entries(&self.dir)?.unwrap_or_default().into_iter();
        let mut others: Vec<_> =
            top.filter(|name| !FILES.contains(&&**name) && !known.contains(&&**name)).collect();
        let checkpoints = entries(&self.dir.join(CHECKPOINTS))?.unwrap_or_default().into_iter();
        others.extend(
            checkpoints.filter(|name| steps_of(name).is_none()).map(|name| format!("{CHECKPOINTS}/{name}")),
        );
        Ok(others)
    }
}

impl Listing {
    fn new(tokens_from: &str, files: BTreeSet<String>) -> Self {
        let about = "files of this training run, which --restart removes; written by mantissa train";
        Listing { tool: TOOL.to_owned(), about: about.to_owned(), tokens_from: tokens_from.to_owned(), files }
    }

    /// Rebuilds a damaged manifest: the files of every run, and the sound checkpoints.
    fn rebuild(dir: &Path) -> Result<Self> {
        let mut files: BTreeSet<_> = FILES.into_iter().chain(RESULTS).map(str::to_owned).collect();
        for name in entries(&dir.join(CHECKPOINTS))?.unwrap_or_default() {
            let file = format!("{CHECKPOINTS}/{name}");
            if steps_of(&name).is_some() && sealed::check(&dir.join(&file)).is_ok() {
                files.insert(file);
            }
        }
        let tokens = TokenFile::open(&dir.join(TOKENS)).ok();
        let tokens_from = tokens.and_then(|tokens| tokens.about().get(MADE_FROM).cloned());
        Ok(Listing::new(&tokens_from.unwrap_or_default(), files))
    }

    /// Reads the manifest at `path`; `None` if there is none.
    fn read(path: &Path) -> Result<Option<Self>> {
        match fs::symlink_metadata(path) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
            Err(error) if error.kind() == io::ErrorKind::NotADirectory => {
                let run = path.parent().unwrap_or(path).to_owned();
                return Err(
                    Error::WrongKind { path: run, found: "a file", expected: "a folder or nothing" }.into()
                );
            }
            Ok(found) if !found.is_file() => return Err(RunFault::NotOurs(path.to_owned()).into()),
            _ => {}
        }
        let damaged = || RunFault::Damaged(path.to_owned());
        let value = match json::read_strict(path, MAX_MANIFEST, "a run's mantissa-run.json") {
            Err(Error::Json { .. }) => return Err(damaged().into()),
            value => value?,
        };
        let listing: Listing = serde_json::from_value(value).map_err(|_| damaged())?;
        // Whatever the file lists, only files that a run can write are ever removed.
        let known = |file: &String| {
            FILES.contains(&&**file) || RESULTS.contains(&&**file) || checkpoint_steps(file).is_some()
        };
        if listing.tool != TOOL || !listing.files.iter().all(known) {
            return Err(damaged().into());
        }
        Ok(Some(listing))
    }
}

/// Returns the steps of the checkpoint listed as `file`.
fn checkpoint_steps(file: &str) -> Option<u64> {
    steps_of(file.strip_prefix(CHECKPOINTS)?.strip_prefix('/')?)
}

/// Returns the sorted names in a folder; `None` if there is no folder.
fn entries(dir: &Path) -> Result<Option<Vec<String>>> {
    let entries = match fs::read_dir(dir) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
        Err(error) if error.kind() == io::ErrorKind::NotADirectory => {
            return Err(RunFault::NotOurs(dir.to_owned()).into());
        }
        entries => entries.map_err(fault(dir, "list folder"))?,
    };
    let name = |entry: io::Result<fs::DirEntry>| {
        Ok(entry.map_err(fault(dir, "list folder"))?.file_name().to_string_lossy().into_owned())
    };
    let mut names = entries.map(name).collect::<Result<Vec<_>>>()?;
    names.sort();
    Ok(Some(names))
}

/// Creates a folder durably.
fn create_folder(path: &Path) -> Result<()> {
    if path.is_dir() {
        return Ok(());
    }
    disk::create_folders(path).map_err(fault(path, "create folder"))?;
    let parent = disk::folder_of(path);
    disk::sync_path(parent).map_err(fault(parent, "fsync folder"))
}

fn fault(path: &Path, operation: &'static str) -> impl Fn(io::Error) -> JobError {
    let path = path.to_owned();
    move |error| Error::Io { path: path.clone(), operation, error }.into()
}
