//! Work folders: places beside an output where it is made, left behind by killed processes.
//!
//! A work folder is created with a fresh name by mkdir and marked by our file [`MARK_NAME`], which names the output,
//! the plan and the process. Only a folder with our mark for the same output is ever resumed or removed, and only if
//! it has the same plan or is empty. A name alone proves nothing, because anybody can use it.

use std::fs;
use std::io;
use std::path::{Path, PathBuf};

use crate::disk;
use crate::error::{Error, OutputFault, Result};
use crate::lock::Lock;
use crate::lock_file::Holder;
pub use crate::mark::MARK_NAME;
use crate::mark::{Marked, read_mark, remove_marked, sorted_entries, write_mark};
use crate::nested::{Form, refuse_inside};
use crate::target::Target;
use crate::unpublished::Unpublished;

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
        let lock = Lock::acquire_as(&target, &format!("{purpose}-lock"), Holder::Output)?;
        refuse_inside(&target.path(), Form::Tree)?;
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
