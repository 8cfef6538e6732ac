//! Places of fetched files: the cache of `huggingface_hub`, or a folder.
//!
//! A file is written to a name of its own that ends in `.incomplete`, and renamed when its hash is right. In a cache it is
//! then a blob, named by its hash; the snapshot, which has links to blobs, and the reference of the branch are made
//! when all blobs are there.

use std::fs::{self, File};
use std::io::{self, Read};
use std::path::{Component, Path, PathBuf};

use mantissa_store::{Error, disk, regular};

use super::hashing::Hashing;
use super::listing::FileHash;
use crate::error::{BadInput, Result};
use crate::hub;

/// Ending of files that are not complete.
const PARTIAL: &str = "incomplete";

/// Folder in an output folder for files that are not complete, as `hf download --local-dir` uses it.
const IN_FOLDER: &str = ".cache/huggingface/download";

/// Text of `CACHEDIR.TAG` (<https://bford.info/cachedir/>).
const CACHE_TAG: &str = "Signature: 8a477f597d28d172789f06886806bc55
# This file is a cache directory tag created by mantissa.
# For information about cache directory tags, see:
#\thttps://bford.info/cachedir/
";

/// File to fetch: a path that stays inside its model, with the hash and the size that it must have.
pub(super) struct Wanted {
    /// Path in the model.
    pub name: String,
    /// Size in bytes.
    pub size: u64,
    /// Hash of the content.
    pub hash: FileHash,
}

/// Place of the files of a model.
pub(super) enum Place {
    /// Cache of `huggingface_hub`.
    Cache {
        /// Folder of the cache.
        cache: PathBuf,
        /// Name of the model's folder in it.
        folder: String,
    },
    /// Plain folder.
    Folder(PathBuf),
}

fn failed(path: &Path, operation: &'static str, error: io::Error) -> Error {
    Error::Io { path: path.to_owned(), operation, error }
}

impl Place {
    /// Returns the folder that must have the space.
    pub fn root(&self) -> &Path {
        match self {
            Place::Cache { cache, .. } => cache,
            Place::Folder(folder) => folder,
        }
    }

    /// Creates the folders for files that are not complete, and marks a cache for programs that make backups.
    ///
    /// # Errors
    /// I/O errors.
    pub fn prepare(&self) -> Result<(), Error> {
        let mut folders = vec![self.partial_folder()];
        if let Place::Cache { cache, folder } = self {
            folders.push(cache.join(".locks").join(folder));
        }
        let create = |path: &PathBuf| disk::create_folders(path).map_err(|e| failed(path, "create", e));
        folders.iter().try_for_each(create)?;
        if let Place::Cache { cache, .. } = self {
            // A cache without the mark works.
            let tag = cache.join("CACHEDIR.TAG");
            let _ = disk::create_new(&tag).and_then(|file| disk::append(&file, &tag, CACHE_TAG.as_bytes()));
        }
        Ok(())
    }

    fn partial_folder(&self) -> PathBuf {
        match self {
            Place::Cache { cache, folder } => cache.join(folder).join("blobs"),
            Place::Folder(folder) => folder.join(IN_FOLDER),
        }
    }

    /// Returns the path at which the bytes of a file are collected.
    pub fn partial(&self, file: &Wanted) -> PathBuf {
        self.partial_folder().join(format!("{}.{PARTIAL}", file.hash.hex()))
    }

    /// Locks the file against other processes, by the lock that `huggingface_hub` takes; `None` if another holds it.
    ///
    /// # Errors
    /// I/O errors.
    pub fn lock(&self, file: &Wanted) -> Result<Option<File>, Error> {
        let name = format!("{}.lock", file.hash.hex());
        let path = match self {
            Place::Cache { cache, folder } => cache.join(".locks").join(folder).join(name),
            Place::Folder(_) => self.partial_folder().join(name),
        };
        let lock = disk::open_append(&path).map_err(|e| failed(&path, "create", e))?;
        match lock.try_lock() {
            Ok(()) => Ok(Some(lock)),
            Err(fs::TryLockError::WouldBlock) => Ok(None),
            // A file system without locks.
            Err(fs::TryLockError::Error(_)) => Ok(Some(lock)),
        }
    }

    /// True if the file is complete. A blob is what its name says, if it has the size; a file in a folder is read.
    ///
    /// # Errors
    /// In a folder, another file of that name; I/O errors.
    pub fn has(&self, file: &Wanted) -> Result<bool> {
        let path = self.complete(file);
        // A blob may be a link to one that several models of a cache share.
        let looked_up = match self {
            Place::Cache { .. } => fs::metadata(&path),
            Place::Folder(_) => fs::symlink_metadata(&path),
        };
        let found = match looked_up {
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(false),
            found => found.map_err(|e| failed(&path, "look up", e))?,
        };
        let is_right_size = found.is_file() && found.len() == file.size;
        match self {
            Place::Cache { .. } => Ok(is_right_size),
            Place::Folder(_) if is_right_size && hash_of(&path, file)? == file.hash.hex() => Ok(true),
            Place::Folder(_) => {
                let expected = format!("the file of the model, of {} bytes", file.size);
                let fix = "remove it, or choose another --out";
                Err(BadInput::new(path.display().to_string(), "another file", expected).with_fix(fix).into())
            }
        }
    }

    fn complete(&self, file: &Wanted) -> PathBuf {
        match self {
            Place::Cache { .. } => self.partial_folder().join(file.hash.hex()),
            Place::Folder(folder) => folder.join(&file.name),
        }
    }

    /// Puts a complete file, whose hash is right and which is durable, in place.
    ///
    /// # Errors
    /// I/O errors.
    pub fn publish(&self, file: &Wanted) -> Result<(), Error> {
        let (from, to) = (self.partial(file), self.complete(file));
        match self {
            // A blob of another size is damaged, and no other content has its name.
            Place::Cache { .. } => disk::rename(&from, &to),
            Place::Folder(folder) => {
                let parent = to.parent().unwrap_or(folder);
                create_inside(folder, parent)?;
                disk::rename_to_free(&from, &to)
            }
        }
        .map_err(|e| failed(&to, "rename", e))
    }

    /// Makes the snapshot of `commit` with `files`, all complete, and the reference of `revision`; returns the folder with
    /// the files.
    ///
    /// # Errors
    /// I/O errors.
    pub fn finish(&self, commit: &str, revision: &str, files: &[Wanted]) -> Result<PathBuf, Error> {
        let (cache, folder) = match self {
            Place::Cache { cache, folder } => (cache, folder),
            Place::Folder(folder) => {
                self.tidy(files);
                return Ok(folder.clone());
            }
        };
        let repository = cache.join(folder);
        let snapshot = repository.join("snapshots").join(commit);
        disk::create_folders(&snapshot).map_err(|e| failed(&snapshot, "create", e))?;
        for file in files {
            let link = snapshot.join(&file.name);
            create_inside(&snapshot, link.parent().unwrap_or(&snapshot))?;
            self.put_link(file, &link)?;
        }
        if revision != commit {
            let reference = repository.join("refs").join(revision);
            write_reference(&reference, commit)?;
        }
        Ok(snapshot)
    }

    /// Makes the entry of a snapshot: a link to the blob, or on a file system without links the blob itself.
    fn put_link(&self, file: &Wanted, link: &Path) -> Result<(), Error> {
        let blob = self.complete(file);
        let up = file.name.split('/').count() + 1;
        let target: PathBuf = std::iter::repeat_n("..", up).chain(["blobs", file.hash.hex()]).collect();
        match fs::read_link(link) {
            Ok(found) if found == target => return Ok(()),
            // A link to the blob of another time.
            Ok(_) => disk::remove_file(link).map_err(|e| failed(link, "remove", e))?,
            // A file that a system without links has here.
            Err(_) if link.is_file() => return Ok(()),
            Err(_) => {}
        }
        match disk::link(&target, link) {
            Ok(()) => Ok(()),
            Err(error) if is_unsupported(&error) => {
                disk::rename_to_free(&blob, link).map_err(|e| failed(link, "rename", e))
            }
            Err(error) if error.kind() == io::ErrorKind::AlreadyExists => Ok(()),
            Err(error) => Err(failed(link, "create", error)),
        }
    }

    /// Removes the locks and the empty folder of an output folder; what stays does no harm.
    fn tidy(&self, files: &[Wanted]) {
        let folder = self.partial_folder();
        for file in files {
            let _ = disk::remove_file_if_there(&folder.join(format!("{}.lock", file.hash.hex())));
        }
        let above = folder.ancestors().take(Path::new(IN_FOLDER).components().count());
        above.for_each(|path| drop(disk::remove_folder(path)));
    }
}

fn is_unsupported(error: &io::Error) -> bool {
    matches!(error.kind(), io::ErrorKind::PermissionDenied | io::ErrorKind::Unsupported)
}

/// Creates `parent`, which lies in `folder`; refuses links on the way, which lead elsewhere.
fn create_inside(folder: &Path, parent: &Path) -> Result<(), Error> {
    let mut path = folder.to_owned();
    let inside = parent.strip_prefix(folder).unwrap_or(Path::new(""));
    for part in inside.components().filter(|part| matches!(part, Component::Normal(_))) {
        path.push(part);
        match fs::symlink_metadata(&path) {
            Ok(found) if found.is_dir() => {}
            Ok(_) => {
                let found = "a file or a link, not a folder";
                return Err(Error::WrongKind { path, found, expected: "a folder of the model" });
            }
            Err(_) => disk::create_folders(&path).map_err(|e| failed(&path, "create", e))?,
        }
    }
    Ok(())
}

/// Writes the commit that a branch has, whole or not at all.
fn write_reference(path: &Path, commit: &str) -> Result<(), Error> {
    if regular::read(path, hub::REVISION, "a revision").is_ok_and(|found| found == commit.as_bytes()) {
        return Ok(());
    }
    let parent = path.parent().unwrap_or(Path::new(""));
    disk::create_folders(parent).map_err(|e| failed(parent, "create", e))?;
    let name = path.file_name().unwrap_or_default().to_string_lossy().into_owned();
    let new = path.with_file_name(format!(".{name}.{}.tmp", std::process::id()));
    disk::remove_file_if_there(&new).map_err(|e| failed(&new, "remove", e))?;
    let write = || {
        let file = disk::create_new(&new)?;
        disk::append(&file, &new, commit.as_bytes())?;
        disk::sync(&file, &new)?;
        disk::rename(&new, path)
    };
    write().map_err(|e| failed(path, "write", e))
}

/// Returns the digits of the hash of the file at `path`, of the kind that `file` has.
pub(super) fn hash_of(path: &Path, file: &Wanted) -> Result<String, Error> {
    let mut hashing = Hashing::of(&file.hash, file.size);
    hash_into(path, &mut hashing)?;
    Ok(hashing.finish())
}

/// Adds the content of the file at `path` to a hash; returns its length.
pub(super) fn hash_into(path: &Path, hashing: &mut Hashing) -> Result<u64, Error> {
    let mut opened = regular::open(path, "a part of a file of a model")?;
    let (mut buffer, mut length) = (vec![0; 1 << 18], 0);
    loop {
        match opened.read(&mut buffer) {
            Ok(0) => return Ok(length),
            Ok(read) => {
                hashing.update(&buffer[..read]);
                length += read as u64;
            }
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) => return Err(failed(path, "read", error)),
        }
    }
}
