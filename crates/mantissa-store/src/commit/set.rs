//! Several files as one output: the parts of a GGUF model and the files beside them.

use std::fs;
use std::path::{Path, PathBuf};

use super::begun::Begun;
use super::durable::{sync_file, sync_folders, write_new};
use super::intent::{Intent, inode_of};
use crate::error::{Error, OutputFault, Result};
use crate::manifest::{MANIFEST_NAME, Manifest, companion_path};
use crate::mark::remove_marked;
use crate::nested::Form;
use crate::output::{Found, Output};

/// Names of the files of an output, all in the folder of the output's path.
#[derive(Clone, Debug)]
pub struct FileSet {
    /// Parts, useful only together; the first is the one that is opened.
    pub parts: Vec<String>,
    /// Files that describe the parts; moved into place after them.
    pub beside: Vec<String>,
}

/// Files of an output being written. Dropping it without [`Self::publish`] removes what was written.
#[derive(Debug)]
pub struct StagedSet {
    begun: Begun,
    set: FileSet,
    /// Files of an older output with another number of parts, to be removed; the first is the one that is opened.
    obsolete: Vec<String>,
    before: Vec<(String, Found)>,
}

impl StagedSet {
    /// Begins writing the files `set` of `output`. Replaces old files of the same names if `output` allows it. Also
    /// removes the files that `obsolete` lists (an older output with another number of parts, the one that is opened
    /// first), if their own manifest lists them. `obsolete` is called after the output is locked and an interrupted
    /// publication is completed.
    ///
    /// # Errors
    /// As [`super::StagedFile::begin`]; [`OutputFault::OtherParts`] for an obsolete file that may not be removed.
    pub fn begin(output: &Output, set: FileSet, obsolete: &dyn Fn() -> Result<Vec<String>>) -> Result<Self> {
        let begun = Begun::new(output, Form::Tree, output.key(), &mut |_| false)?;
        let mut staged = StagedSet { begun, set, obsolete: Vec::new(), before: Vec::new() };
        staged.obsolete = obsolete()?;
        staged.begun.create_new_folder()?;
        staged.before = staged.check()?;
        Ok(staged)
    }

    /// Folder in which the files are written, under their names.
    pub fn path(&self) -> PathBuf {
        self.begun.new_path()
    }

    /// The final path of a file.
    pub fn place(&self, name: &str) -> PathBuf {
        self.begun.target.parent().join(name)
    }

    /// Writes a file of the set, which must not exist yet, and makes it durable.
    ///
    /// # Errors
    /// [`Error::Io`].
    pub fn write(&self, name: &str, bytes: &[u8]) -> Result<()> {
        write_new(&self.path().join(name), bytes)
    }

    /// Makes every file durable. The set is then complete and can be opened and verified before [`Self::publish`].
    ///
    /// # Errors
    /// [`Error::Io`] if one is missing or cannot be made durable.
    pub fn seal(&self) -> Result<()> {
        for name in self.names() {
            let path = self.path().join(name);
            self.begun.output.mark_file(&path)?;
            sync_file(&path)?;
        }
        sync_folders(&self.path())
    }

    /// Moves the sealed files into place. A single part is exchanged with the old one in one step. With several
    /// parts, the old first part is moved away first and the new first part comes last. So a kill in between leaves a
    /// model that does not open, never parts of two, and the next start completes it.
    ///
    /// # Errors
    /// [`Error::Output`] if a target changed since the work began, [`Error::Io`]. The old files are then restored.
    pub fn publish(self) -> Result<Option<PathBuf>> {
        let Begun { output, target, unpublished, .. } = &self.begun;
        for (name, before) in &self.before {
            output.require_unchanged(&self.place(name), before)?;
        }
        let work = self.begun.work.path().to_owned();
        let intent = self.intent();
        intent.write(&work)?;
        unpublished.publish(|| intent.carry_out(target.parent(), &work))?;
        Ok(remove_marked(&work).is_err().then_some(work))
    }

    fn names(&self) -> impl Iterator<Item = &String> {
        self.set.parts.iter().chain(&self.set.beside)
    }

    /// Looks up what may be replaced at each name.
    fn check(&self) -> Result<Vec<(String, Found)>> {
        let output = &self.begun.output;
        let mut before = Vec::new();
        for name in self.names() {
            before.push((name.clone(), output.check_file(&self.place(name))?));
        }
        for name in &self.obsolete {
            let path = self.place(name);
            let other = || Error::output(output.path(), OutputFault::OtherParts { entry: name.clone() });
            let found = output.check_file(&path).map_err(|error| match error {
                Error::Output { fault: OutputFault::Exists { .. }, .. } => other(),
                error => error,
            })?;
            // Another process of the same job may have changed files after the names were listed and before the lock
            // was taken.
            if !found.there {
                continue;
            }
            if !output.wrote_file(&path) && !self.is_listed(name) {
                return Err(other());
            }
            before.push((name.clone(), found));
        }
        Ok(before)
    }

    /// True if the manifest of an older output lists an obsolete file.
    fn is_listed(&self, name: &str) -> bool {
        let manifests = self.obsolete.iter().map(|first| companion_path(&self.place(first), MANIFEST_NAME));
        let own = |path: &Path| path.file_name().is_some_and(|own| own.to_string_lossy() == name);
        manifests.into_iter().any(|path| {
            let listed = Manifest::read_file(&path).is_ok_and(|manifest| manifest.files.contains_key(name));
            listed || (own(&path) && Manifest::read_file(&path).is_ok())
        })
    }

    fn intent(&self) -> Intent {
        let inode = |path: &Path| inode_of(path).unwrap_or(0);
        let (FileSet { parts, beside }, obsolete) = (&self.set, &self.obsolete);
        // Remove the old manifest and quality.json first, so that they are never beside the new weights.
        let first = parts.first().filter(|_| parts.len() > 1);
        let going = beside.iter().rev().chain(obsolete).chain(first);
        let there = |name: &&String| fs::symlink_metadata(self.place(name)).is_ok();
        let retired = going.filter(there).map(|name| (name.clone(), inode(&self.place(name))));
        let retired: Vec<_> = retired.collect();
        let old = |name: &String| {
            let stays = retired.iter().all(|(gone, _)| gone != name);
            inode_of(&self.place(name)).filter(|_| stays)
        };
        let new = self.path();
        let files = parts.iter().rev().chain(beside);
        let files = files.map(|name| (name.clone(), inode(&new.join(name)), old(name))).collect();
        Intent { retired, files }
    }
}

impl Drop for StagedSet {
    fn drop(&mut self) {
        // Drop cannot report errors; the next start removes leftovers. A publication that has begun is left alone: an
        // error has undone it, or the next start completes it.
        if !self.begun.is_publishing() {
            let _ = self.begun.work.remove();
        }
    }
}
