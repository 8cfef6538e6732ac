//! Work folders: places beside an output where it is made, left behind by killed processes.
//!
//! A work folder is created with a fresh name by mkdir and marked by our file [`MARK_NAME`], which names the output,
//! the plan and the process. Only a folder with our mark for the same output is ever resumed or removed, and only if
//! it has the same plan or is empty. A name alone proves nothing, because anybody can use it.

use std::ffi::OsStr;
use std::fs;
use std::io::{self, Read};
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};

use rustix::fs::OFlags;
use serde_json::{Value, json};

use crate::disk;
use crate::error::{Error, OutputFault, Result};
use crate::failpoint;
use crate::lock::Lock;
use crate::target::Target;
use crate::unpublished::Unpublished;

/// Name of the mark within a work folder. It is created first and removed last.
pub const MARK_NAME: &str = "mantissa-work.json";

/// Longest mark read, in bytes.
const MAX_MARK: u64 = 64 << 10;

/// Names tried for a new work folder.
const TRIES: u32 = 64;

/// A work folder of this process.
#[derive(Debug)]
pub(crate) struct Work {
    path: PathBuf,
}

/// Work folder left by a dead process.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Left {
    /// The folder.
    pub(crate) path: PathBuf,
    /// Key of its plan; `None` if the process was killed before it wrote the mark, and the folder is empty.
    pub(crate) key: Option<String>,
}

impl Work {
    /// Creates the folder `.NAME.mantissa-PURPOSE-PID` beside `target`, with a number appended if the name is taken.
    /// A signal removes it while the second value lives.
    pub(crate) fn create(target: &Target, purpose: &str, key: &str) -> Result<(Self, Unpublished)> {
        let name = format!("{purpose}-{}", std::process::id());
        for n in 0..TRIES {
            let name = if n == 0 { name.clone() } else { format!("{name}-{n}") };
            let path = target.sibling(&name);
            match Unpublished::create(&path, || disk::create_folder(&path)) {
                Ok(unpublished) => {
                    let work = Work { path };
                    let marked = write_mark(&work.path, &target.name(), key);
                    return match marked {
                        Ok(()) => Ok((work, unpublished)),
                        Err(error) => {
                            // It holds at most a part of the mark; the first error matters more.
                            let _ = work.remove();
                            Err(error)
                        }
                    };
                }
                Err(error) if error.kind() == io::ErrorKind::AlreadyExists => {}
                Err(error) => return Err(Error::io(&path, "create folder", error)),
            }
        }
        Err(Error::output(&target.sibling(&name), OutputFault::NoFreeName))
    }

    /// Takes over a folder left by a dead process. The caller holds the lock of its output.
    pub(crate) fn adopt(left: Left) -> Self {
        Work { path: left.path }
    }

    /// The folder.
    pub(crate) fn path(&self) -> &Path {
        &self.path
    }

    /// Removes the folder: its content first, its mark last. After a kill in between, the folder is still recognised
    /// as ours, or is empty.
    pub(crate) fn remove(&self) -> Result<()> {
        remove_marked(&self.path)
    }
}

/// Folder beside an output for files that are needed until the output is complete. If the process dies, it stays, and
/// the next process with the same plan takes it over.
#[derive(Debug)]
pub struct WorkFolder {
    work: Work,
    others: Vec<PathBuf>,
    _lock: Lock,
}

impl WorkFolder {
    /// Takes over the folder for `purpose` beside `output` left by a dead process with the same `key`, or creates
    /// one.
    ///
    /// # Errors
    /// [`Error::Output`] if another process works there, [`Error::Io`].
    pub fn begin(output: &Path, purpose: &'static str, key: &str) -> Result<Self> {
        let target = Target::prepare(output)?;
        let lock = Lock::acquire_as(&target, &format!("{purpose}-lock"))?;
        let (mut taken, mut others) = (None, Vec::new());
        for left in left(&target, purpose)? {
            match &left.key {
                Some(of) if of == key && taken.is_none() => taken = Some(left),
                Some(of) if of != key => others.push(left.path),
                _ => remove_marked(&left.path)?,
            }
        }
        let work = match taken {
            Some(left) => Work::adopt(left),
            // Its content is kept, even when a signal ends the process.
            None => Work::create(&target, purpose, key)?.0,
        };
        Ok(WorkFolder { work, others, _lock: lock })
    }

    /// The folder.
    pub fn path(&self) -> &Path {
        self.work.path()
    }

    /// Folders left by processes with other plans for the same output. They are never removed.
    pub fn others(&self) -> &[PathBuf] {
        &self.others
    }

    /// Removes the folder.
    ///
    /// # Errors
    /// [`Error::Io`]; the next process with the same key removes what is left.
    pub fn remove(self) -> Result<()> {
        self.work.remove()
    }
}

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

/// Work folders for `purpose` that dead processes left beside `target`, sorted by name, without unmarked ones. The
/// caller holds the lock of `target`, so their processes are dead.
pub(crate) fn left(target: &Target, purpose: &str) -> Result<Vec<Left>> {
    let mut found = Vec::new();
    for path in target.siblings(purpose)? {
        match read_mark(&path, &target.name())? {
            Marked::Ours(key) => found.push(Left { path, key: Some(key) }),
            Marked::Empty => found.push(Left { path, key: None }),
            Marked::NotOurs => {}
        }
    }
    Ok(found)
}

/// Removes every work folder in `dir` that a dead process left for an output whose name `ours` accepts; returns them.
/// Only for outputs under a lock that the caller holds, such as the files of a training run. Other processes may
/// write other outputs in the same folder.
///
/// # Errors
/// [`Error::Io`].
pub fn sweep(dir: &Path, ours: impl Fn(&str) -> bool) -> Result<Vec<PathBuf>> {
    let mut swept = Vec::new();
    for path in sorted_entries(dir)? {
        let name = path.file_name().unwrap_or_default().to_string_lossy().into_owned();
        let Some((target, _)) = name.strip_prefix('.').and_then(|name| name.split_once(".mantissa-partial-"))
        else {
            continue;
        };
        if ours(target)
            && fs::symlink_metadata(&path).is_ok_and(|found| found.is_dir())
            && read_mark(&path, target)? != Marked::NotOurs
        {
            remove_marked(&path)?;
            swept.push(path);
        }
    }
    Ok(swept)
}

/// True if the folder has our mark, for the output `name`.
pub(crate) fn is_marked(folder: &Path, name: &str) -> bool {
    matches!(read_mark(folder, name), Ok(Marked::Ours(_)))
}

fn sorted_entries(dir: &Path) -> Result<Vec<PathBuf>> {
    let io = |error| Error::io(dir, "list folder", error);
    let entries = failpoint::read(|| fs::read_dir(dir)).map_err(io)?;
    let mut paths = entries.map(|entry| Ok(entry.map_err(io)?.path())).collect::<Result<Vec<_>>>()?;
    paths.sort();
    Ok(paths)
}

fn write_mark(folder: &Path, name: &str, key: &str) -> Result<()> {
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
enum Marked {
    /// With the key of its plan.
    Ours(String),
    /// Empty, or with an empty mark: the process was killed before it wrote one.
    Empty,
    NotOurs,
}

fn read_mark(folder: &Path, name: &str) -> Result<Marked> {
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

#[cfg(test)]
#[allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]
mod tests {
    use super::*;

    fn target(dir: &Path) -> Target {
        Target::prepare(&dir.join("out")).unwrap()
    }

    #[test]
    fn only_marked_folders_are_found() {
        let dir = tempfile::tempdir().unwrap();
        let target = target(dir.path());
        let at = |name: &str| dir.path().join(name);
        // A foreign folder with that name, one with the mark of another output, an empty one, one whose mark is zeros
        // after a power cut, and ours.
        for name in ["1", "2", "3", "4"] {
            fs::create_dir(at(&format!(".out.mantissa-partial-{name}"))).unwrap();
        }
        fs::write(at(".out.mantissa-partial-1/thesis.tex"), "years").unwrap();
        fs::write(
            at(".out.mantissa-partial-2").join(MARK_NAME),
            r#"{"tool":"mantissa","output":"b","plan":"k"}"#,
        )
        .unwrap();
        fs::write(at(".out.mantissa-partial-4").join(MARK_NAME), [0; 40]).unwrap();
        let work = Work::create(&target, "partial", "key").unwrap().0;
        fs::write(work.path().join("half"), "x").unwrap();
        let found = left(&target, "partial").unwrap();
        let expected = |path: PathBuf, key: Option<&str>| Left { path, key: key.map(str::to_owned) };
        let mut all = vec![
            expected(target.sibling("partial-3"), None),
            expected(target.sibling("partial-4"), None),
            expected(work.path().to_owned(), Some("key")),
        ];
        all.sort_by(|a, b| a.path.cmp(&b.path));
        assert_eq!(found, all);
    }

    #[test]
    fn a_taken_name_is_not_used() {
        let dir = tempfile::tempdir().unwrap();
        let target = target(dir.path());
        let taken = target.sibling(&format!("partial-{}", std::process::id()));
        fs::create_dir(&taken).unwrap();
        fs::write(taken.join("notes"), "mine").unwrap();
        let work = Work::create(&target, "partial", "key").unwrap().0;
        assert_ne!(work.path(), taken);
        assert_eq!(left(&target, "partial").unwrap().len(), 1);
        work.remove().unwrap();
        assert_eq!(fs::read(taken.join("notes")).unwrap(), b"mine");
        assert_eq!(left(&target, "partial").unwrap(), []);
    }

    #[test]
    fn a_run_removes_marked_folders_in_its_folder() {
        let dir = tempfile::tempdir().unwrap();
        let target = target(dir.path());
        let work = Work::create(&target, "partial", "").unwrap().0;
        fs::write(work.path().join("half"), "x").unwrap();
        let stranger = dir.path().join(".x.mantissa-partial-9");
        fs::create_dir(&stranger).unwrap();
        fs::write(stranger.join("notes"), "mine").unwrap();
        assert_eq!(sweep(dir.path(), |name| name == "another").unwrap(), [""; 0].map(PathBuf::from));
        assert_eq!(sweep(dir.path(), |_| true).unwrap(), [work.path().to_owned()]);
        assert!(!work.path().exists() && stranger.join("notes").exists());
    }
}
