//! Outputs inside other outputs, which are refused: an output folder appears by a rename, which would hide or remove what
//! another process writes inside it, and a finished one holds only the files that its manifest lists.
//!
//! A process takes the lock of its own output first and then looks for others, so if two processes start at
//! once, at least one sees the other. The inner one gives way.

use std::ffi::OsStr;
use std::fs::{OpenOptions, TryLockError};
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};
use std::thread::sleep;
use std::time::Duration;

use rustix::fs::OFlags;

use crate::error::{Error, OutputFault, Result};
use crate::lock_file::{Holder, INSIDE, is_lock, is_own, owner_of, text_of};
use crate::manifest::MANIFEST_NAME;
use crate::target::resolve;

/// Ends of the names of locks: of an output, and of a search whose output is written at its end.
const LOCKS: [&str; 2] = [".mantissa-lock", ".mantissa-fit-lock"];

/// Number and distance of the looks for outputs inside an output: one that has just begun gives way.
const TRIES: u32 = 10;
const WAIT: Duration = Duration::from_millis(50);

/// Form of an output.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Form {
    /// Single file, such as a report, which may lie in a finished output or in the folder of a run.
    File,
    /// Model or run.
    Tree,
}

/// Refuses an output at `path`, links resolved, that lies inside one that another process writes, or, if it is a model or
/// run, inside a finished one. Outputs of this process do not count.
///
/// # Errors
/// [`OutputFault::Nested`].
pub(crate) fn refuse_inside(path: &Path, form: Form) -> Result<()> {
    for outer in path.ancestors().skip(1) {
        let Some(name) = outer.file_name() else { break };
        let beside = LOCKS.iter().map(|end| outer.with_file_name(lock_name(name, end)));
        let inside = outer.join(lock_name(OsStr::new(INSIDE), LOCKS[0]));
        for (lock, is_inside) in beside.map(|lock| (lock, false)).chain([(inside, true)]) {
            let (holder, owner) = match Held::read(&lock) {
                // What lies above was looked at when this process took the lock. A process that has come since waits for
                // the end of this one, which must not give way to it.
                Held::Here if !is_inside => return Ok(()),
                Held::Here | Held::Free => continue,
                Held::Elsewhere(holder, owner) => (holder, owner),
            };
            let counts = match holder {
                // The lock of an output inside `outer` may have the same name.
                Holder::Inside => is_inside && form == Form::Tree,
                Holder::Run => !is_inside && form == Form::Tree,
                Holder::Output => !is_inside,
            };
            if counts {
                return Err(nested(path, "lies inside", outer, &format!("which process {owner} writes")));
            }
        }
        if form == Form::Tree && outer.join(MANIFEST_NAME).is_file() {
            return Err(nested(path, "lies inside", outer, "a finished output"));
        }
    }
    Ok(())
}

/// Refuses an output folder at `path` that contains another output; `files` lists the files in it.
///
/// A process that ends moves its output into place and gives up its lock, maybe between the look at its folder and the
/// look at its lock: nothing is there only if two listings in turn agree.
///
/// # Errors
/// [`OutputFault::Nested`]; errors of `files`.
pub(crate) fn refuse_around(path: &Path, mut files: impl FnMut() -> Result<Vec<String>>) -> Result<()> {
    let mut before = None;
    for tries in 0..=TRIES {
        let names = match files() {
            Err(error) if error.is_gone() && tries < TRIES => continue,
            names => names?,
        };
        match names.iter().find_map(|name| output_of(path, name)) {
            Some((inner, None)) => return Err(nested(path, "contains", &inner, "a finished output")),
            Some((inner, Some(owner))) if tries == TRIES => {
                return Err(nested(path, "contains", &inner, &format!("which process {owner} writes")));
            }
            Some(_) => {
                before = None;
                sleep(WAIT);
            }
            None if before.as_ref() == Some(&names) => break,
            None => before = Some(names),
        }
    }
    Ok(())
}

/// Output that the file `name` below `path` tells of, with its owner if it is being written: its lock or its manifest.
fn output_of(path: &Path, name: &str) -> Option<(PathBuf, Option<String>)> {
    let file = path.join(name);
    if let Some(named) = name.strip_suffix(MANIFEST_NAME) {
        // In a folder, or beside a GGUF file.
        let inner = named.strip_suffix(['/', '.']).filter(|inner| !inner.is_empty())?;
        return Some((path.join(inner), None));
    }
    let last = file.file_name()?.to_str()?.strip_prefix('.')?;
    let named = LOCKS.iter().find_map(|end| last.strip_suffix(end))?;
    let Held::Elsewhere(holder, owner) = Held::read(&file) else { return None };
    let inner = match holder {
        Holder::Inside => file.parent()?.to_owned(),
        Holder::Output | Holder::Run => file.with_file_name(named),
    };
    Some((inner, Some(owner)))
}

/// Returns the process that writes the run at `path`, for messages: its id and start. `None` if no process does.
///
/// # Errors
/// A path that cannot be resolved.
pub fn writer_of(path: &Path) -> Result<Option<String>> {
    let path = resolve(path)?;
    let beside = path.file_name().map(|name| path.with_file_name(lock_name(name, LOCKS[0])));
    let inside = path.join(lock_name(OsStr::new(INSIDE), LOCKS[0]));
    Ok(beside.into_iter().chain([inside]).find_map(|lock| match Held::read(&lock) {
        Held::Free => None,
        Held::Here => Some(std::process::id().to_string()),
        Held::Elsewhere(_, owner) => Some(owner),
    }))
}

/// Holder of a lock file.
enum Held {
    /// Nobody: there is no lock, or a dead process has left it.
    Free,
    /// This process.
    Here,
    /// Another process, by its subject and its name for messages.
    Elsewhere(Holder, String),
}

impl Held {
    /// Looks up who holds the lock file at `path`.
    fn read(path: &Path) -> Self {
        let mut options = OpenOptions::new();
        // Do not follow a planted link, and do not wait for a pipe.
        options.read(true).custom_flags((OFlags::NOFOLLOW | OFlags::NONBLOCK).bits().cast_signed());
        let Ok(mut file) = options.open(path) else { return Held::Free };
        let text = text_of(&mut file);
        if is_own(&text) {
            return Held::Here;
        }
        if !is_lock(&text) || !matches!(file.try_lock_shared(), Err(TryLockError::WouldBlock)) {
            return Held::Free;
        }
        // The process may be about to write its name.
        let owner = owner_of(&mut file, text);
        let text = text_of(&mut file);
        if is_own(&text) { Held::Here } else { Held::Elsewhere(Holder::of(&text), owner) }
    }
}

fn lock_name(name: &OsStr, end: &str) -> std::ffi::OsString {
    let mut lock = std::ffi::OsString::from(".");
    lock.push(name);
    lock.push(end);
    lock
}

fn nested(path: &Path, relation: &'static str, other: &Path, state: &str) -> Error {
    let (other, state) = (other.to_string_lossy().into_owned(), state.to_owned());
    Error::output(path, OutputFault::Nested { relation, other, state })
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Lists the folder as a process sees it whose listings fall before, between and after the steps by which another ends.
    fn refused(listings: &[Option<&[&str]>]) -> (String, usize) {
        let mut looks = 0;
        let files = || {
            let names = listings[looks.min(listings.len() - 1)];
            looks += 1;
            let gone =
                || Error::io(Path::new("o/.n.work"), "list folder", std::io::ErrorKind::NotFound.into());
            names.map(|names| names.iter().map(|name| (*name).to_owned()).collect()).ok_or_else(gone)
        };
        let said = refuse_around(Path::new("o"), files).err().map(|error| error.to_string());
        (said.unwrap_or_default(), looks)
    }

    #[test]
    fn an_output_that_ends_during_the_look_is_seen() {
        let ended: &[&str] = &["n/a.safetensors", "n/mantissa-manifest.json"];
        // The work folder was renamed after its parent was listed, and the lock released before it was read.
        for listings in
            [[Some(&[".n.mantissa-lock"][..]), Some(ended)], [None, Some(ended)], [Some(&[]), Some(ended)]]
        {
            let (said, _) = refused(&listings);
            assert!(said.contains("a finished output"), "{said}");
        }
    }

    #[test]
    fn a_folder_at_rest_is_listed_twice() {
        assert_eq!(refused(&[Some(&["notes.txt"])]), (String::new(), 2));
        let (said, looks) = refused(&[None]);
        assert!(said.contains("list folder"), "{said}");
        assert_eq!(looks, TRIES as usize + 1);
    }
}
