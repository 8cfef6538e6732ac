//! Files and folders that are made durable at once.

use std::fs::{self, File};
use std::path::Path;

use crate::disk;
use crate::error::{Error, Result};

/// Creates a file that must not exist, writes it and makes it durable.
pub(crate) fn write_new(path: &Path, bytes: &[u8]) -> Result<()> {
    let file = create_new(path)?;
    disk::append(&file, path, bytes).map_err(|e| Error::io(path, "write", e))?;
    disk::sync(&file, path).map_err(|e| Error::io(path, "fsync", e))
}

pub(super) fn create_new(path: &Path) -> Result<File> {
    disk::create_new(path).map_err(|e| Error::io(path, "create", e))
}

pub(super) fn sync_file(path: &Path) -> Result<()> {
    disk::sync_path(path).map_err(|e| Error::io(path, "fsync", e))
}

pub(super) fn sync_folder(path: &Path) -> Result<()> {
    disk::sync_path(path).map_err(|e| Error::io(path, "fsync folder", e))
}

/// Syncs a folder and every folder below it.
pub(super) fn sync_folders(path: &Path) -> Result<()> {
    for entry in fs::read_dir(path).map_err(|e| Error::io(path, "list folder", e))? {
        let entry = entry.map_err(|e| Error::io(path, "list folder", e))?;
        if entry.file_type().is_ok_and(|kind| kind.is_dir()) {
            sync_folders(&entry.path())?;
        }
    }
    sync_folder(path)
}
