//! Mark of a work folder: our file in it, which names the output, the plan and the process.

use std::ffi::OsStr;
use std::fs;
use std::io::Read;
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};

use rustix::fs::OFlags;
use serde_json::{Value, json};

use crate::disk;
use crate::error::{Error, Result};
use crate::failpoint;

/// Name of the mark within a work folder. It is created first and removed last.
pub const MARK_NAME: &str = "mantissa-work.json";

/// Longest mark read, in bytes.
const MAX_MARK: u64 = 64 << 10;

/// Removes a marked folder, its mark last.
pub(crate) fn remove_marked(path: &Path) -> Result<()> {
    let io = |error| Error::io(path, "clean up", error);
    for entry in sorted_entries(path)? {
        if entry.file_name() != Some(OsStr::new(MARK_NAME)) {
            disk::remove_all(&entry).map_err(|e| Error::io(&entry, "clean up", e))?;
        }
    }
    disk::remove_file_if_there(&path.join(MARK_NAME)).map_err(io)?;
    disk::remove_folder(path).map_err(io)
}

/// True if the folder has our mark, for the output `name`.
pub(crate) fn is_marked(folder: &Path, name: &str) -> bool {
    matches!(read_mark(folder, name), Ok(Marked::Ours(_)))
}

pub(crate) fn sorted_entries(dir: &Path) -> Result<Vec<PathBuf>> {
    let io = |error| Error::io(dir, "list folder", error);
    let entries = failpoint::read(|| fs::read_dir(dir)).map_err(io)?;
    let mut paths = entries.map(|entry| Ok(entry.map_err(io)?.path())).collect::<Result<Vec<_>>>()?;
    paths.sort();
    Ok(paths)
}

pub(crate) fn write_mark(folder: &Path, name: &str, key: &str) -> Result<()> {
    let path = folder.join(MARK_NAME);
    let mark = json!({
        "tool": "mantissa",
        "output": name,
        "plan": key,
        "pid": std::process::id(),
        "about": "made by mantissa while it writes an output; a rerun of the same command resumes or removes it",
    });
    let io = |error| Error::io(&path, "create", error);
    let file = disk::create_new(&path).map_err(io)?;
    disk::append(&file, &path, format!("{mark:#}\n").as_bytes()).map_err(io)?;
    // After a power cut a folder without its mark would never be removed.
    disk::sync(&file, &path).map_err(io)
}

#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Marked {
    /// With the key of its plan.
    Ours(String),
    /// Empty, or with an empty mark: the process was killed before it wrote one.
    Empty,
    NotOurs,
}

pub(crate) fn read_mark(folder: &Path, name: &str) -> Result<Marked> {
    let Ok(entries) = sorted_entries(folder) else { return Ok(Marked::NotOurs) };
    let mark = folder.join(MARK_NAME);
    let text = mark_text(&mark);
    let nothing_else = entries.iter().all(|entry| *entry == mark);
    match text {
        None if entries.is_empty() => return Ok(Marked::Empty),
        // Useless under any plan: killed at its start or at the end of its clean-up.
        Some(text) if nothing_else && (text.is_empty() || is_ours(&text, name)) => return Ok(Marked::Empty),
        _ => {}
    }
    let text = text.unwrap_or_default();
    let value: Value = serde_json::from_str(&text).unwrap_or_default();
    Ok(match value["plan"].as_str().filter(|_| is_ours(&text, name)) {
        Some(key) => Marked::Ours(key.to_owned()),
        None => Marked::NotOurs,
    })
}

/// True if the text of a mark names the output `name`.
fn is_ours(text: &str, name: &str) -> bool {
    let value: Value = serde_json::from_str(text).unwrap_or_default();
    value["tool"] == "mantissa" && value["output"] == name
}

/// Text of a mark; `None` if it cannot be read.
fn mark_text(path: &Path) -> Option<String> {
    let mut options = fs::File::options();
    // Do not follow a link, which others can plant in a shared folder, and do not wait for a pipe.
    options.read(true).custom_flags((OFlags::NOFOLLOW | OFlags::NONBLOCK).bits().cast_signed());
    let file = options.open(path).ok()?;
    let mut text = String::new();
    file.take(MAX_MARK).read_to_string(&mut text).ok()?;
    // A power cut may leave zeros where the mark had just been written.
    Some(text.trim_start_matches('\0').to_owned())
}
