//! File operations that fail on demand, so that tests can inject a fault or a kill at each of them.
//!
//! Every change of a file or folder goes through [`crate::disk`], and so through `change`; reads go through `read`.
//! There are two ways to arm a fault:
//!
//! - [`failing`], in the process: for one call and its thread.
//! - The environment, for a whole process, so that a test can run any command under it: `MANTISSA_FAULT=kill:N` kills
//!   the process (SIGKILL) instead of its change number N, `stop:N` stops it (SIGSTOP) before that change until it is
//!   continued, `error:N` fails that change with EIO, `full:N` fails it and all later ones that take space with
//!   ENOSPC, `panic:N` panics before it, as a bug would. `MANTISSA_TRACE=FILE` appends one line per change to FILE, and the bytes written to `FILE.data`.
//!
//! The environment affects only its own process. Unarmed, the cost is one thread-local load and one atomic load per
//! system call.

use std::cell::Cell;
use std::fs::File;
use std::io::{self, Write};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, OnceLock, PoisonError};

use rustix::process::{Signal, getpid, kill_process};

use crate::ending::stop_if_ending;

/// Operations that can be made to fail.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Operation {
    /// Opening, looking up and reading.
    Read,
    /// Creating, writing, reserving, syncing, renaming and removing.
    Write,
}

/// Numbers of the operations of one kind that fail, counted from 0.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Failing {
    /// Only this one.
    Once(u64),
    /// This one and all later ones except removals, as on a full disk.
    From(u64),
}

/// Change of the file system.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Change<'a> {
    /// A file is created empty.
    Create(&'a Path),
    /// A folder is created.
    Folder(&'a Path),
    /// Bytes are written at an offset, or appended.
    Write(&'a Path, Option<u64>, &'a [u8]),
    /// A file gets a length.
    Length(&'a Path, u64),
    /// A file or folder gets the attribute that names its job.
    Mark(&'a Path, &'a str),
    /// A file or folder is made durable.
    Sync(&'a Path),
    /// A name is moved; a file at the new name is replaced.
    Rename(&'a Path, &'a Path),
    /// A symbolic link with a text is created at a path.
    Link(&'a Path, &'a Path),
    /// Two names are exchanged.
    Exchange(&'a Path, &'a Path),
    /// A file is removed.
    RemoveFile(&'a Path),
    /// An empty folder is removed.
    RemoveFolder(&'a Path),
}

impl Change<'_> {
    /// True for removals, which a full disk never refuses.
    fn is_removal(self) -> bool {
        matches!(self, Change::RemoveFile(_) | Change::RemoveFolder(_))
    }

    /// True for changes that take space.
    fn takes_space(self) -> bool {
        matches!(
            self,
            Change::Create(_)
                | Change::Folder(_)
                | Change::Write(..)
                | Change::Length(..)
                | Change::Mark(..)
                | Change::Link(..)
        )
    }
}

#[derive(Clone, Copy)]
struct Armed {
    operation: Operation,
    failing: Failing,
    errno: i32,
    seen: u64,
}

thread_local! {
    static ARMED: Cell<Option<Armed>> = const { Cell::new(None) };
}

/// Runs `work` while the operations named by `failing` fail with `errno`. Returns its result and the number of
/// operations of that kind.
pub fn failing<T>(
    operation: Operation,
    failing: Failing,
    errno: rustix::io::Errno,
    work: impl FnOnce() -> T,
) -> (T, u64) {
    let armed = Armed { operation, failing, errno: errno.raw_os_error(), seen: 0 };
    let before = ARMED.replace(Some(armed));
    let result = work();
    let after = ARMED.replace(before);
    (result, after.map_or(0, |armed| armed.seen))
}

/// Runs a read, unless a fault is armed for it.
pub(crate) fn read<T>(operation: impl FnOnce() -> io::Result<T>) -> io::Result<T> {
    check(Operation::Read, true)?;
    operation()
}

/// Runs a change, unless a fault is armed for it, and records it where changes are traced.
pub(crate) fn change<T>(change: Change<'_>, operation: impl FnOnce() -> io::Result<T>) -> io::Result<T> {
    stop_if_ending();
    check(Operation::Write, !change.is_removal())?;
    let Some(process) = process() else { return operation() };
    process.fault(change)?;
    let done = operation()?;
    process.record(change)?;
    Ok(done)
}

/// `full` is true for operations that a full disk can refuse.
fn check(operation: Operation, full: bool) -> io::Result<()> {
    let Some(mut armed) = ARMED.get().filter(|armed| armed.operation == operation) else { return Ok(()) };
    let at = armed.seen;
    armed.seen += 1;
    ARMED.set(Some(armed));
    let fails = match armed.failing {
        Failing::Once(n) => at == n,
        Failing::From(n) => at >= n && full,
    };
    if fails { Err(io::Error::from_raw_os_error(armed.errno)) } else { Ok(()) }
}

/// Fault armed by the environment for the process.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Fault {
    Kill(u64),
    Stop(u64),
    Error(u64),
    Full(u64),
    Panic(u64),
}

impl Fault {
    fn parse(text: &str) -> Option<Self> {
        let (kind, number) = text.split_once(':')?;
        let number = number.parse().ok()?;
        match kind {
            "kill" => Some(Fault::Kill(number)),
            "stop" => Some(Fault::Stop(number)),
            "error" => Some(Fault::Error(number)),
            "full" => Some(Fault::Full(number)),
            "panic" => Some(Fault::Panic(number)),
            _ => None,
        }
    }
}

/// The state of faults and traces of the process.
struct Process {
    fault: Option<Fault>,
    seen: AtomicU64,
    trace: Option<Mutex<Trace>>,
}

struct Trace {
    lines: File,
    data: File,
    written: u64,
}

fn process() -> Option<&'static Process> {
    static PROCESS: OnceLock<Option<Process>> = OnceLock::new();
    PROCESS.get_or_init(Process::from_environment).as_ref()
}

impl Process {
    fn from_environment() -> Option<Self> {
        let fault = std::env::var("MANTISSA_FAULT").ok().and_then(|text| Fault::parse(&text));
        let trace = std::env::var_os("MANTISSA_TRACE").and_then(|path| Trace::open(&path.into()).ok());
        let process = Process { fault, seen: AtomicU64::new(0), trace: trace.map(Mutex::new) };
        (process.fault.is_some() || process.trace.is_some()).then_some(process)
    }

    // A panic is one of the faults that a test asks for.
    #[allow(clippy::panic)]
    fn fault(&self, change: Change<'_>) -> io::Result<()> {
        let at = self.seen.fetch_add(1, Ordering::SeqCst);
        let error = |errno: rustix::io::Errno| Err(io::Error::from_raw_os_error(errno.raw_os_error()));
        match self.fault {
            Some(Fault::Kill(n)) if at == n => {
                let _ = kill_process(getpid(), Signal::KILL);
                error(rustix::io::Errno::IO)
            }
            Some(Fault::Stop(n)) if at == n => {
                let _ = kill_process(getpid(), Signal::STOP);
                Ok(())
            }
            Some(Fault::Error(n)) if at == n => error(rustix::io::Errno::IO),
            Some(Fault::Panic(n)) if at == n => std::panic::panic_any("injected fault"),
            Some(Fault::Full(n)) if at >= n && change.takes_space() => error(rustix::io::Errno::NOSPC),
            _ => Ok(()),
        }
    }

    fn record(&self, change: Change<'_>) -> io::Result<()> {
        match &self.trace {
            Some(trace) => trace.lock().unwrap_or_else(PoisonError::into_inner).record(change),
            None => Ok(()),
        }
    }
}

impl Trace {
    fn open(path: &PathBuf) -> io::Result<Self> {
        let mut data = path.clone().into_os_string();
        data.push(".data");
        let options = || {
            let mut options = File::options();
            options.append(true).create(true);
            options
        };
        let data = options().open(data)?;
        let written = data.metadata()?.len();
        Ok(Trace { lines: options().open(path)?, data, written })
    }

    /// Appends a line: the kind, then its path or paths and numbers, between tabs.
    fn record(&mut self, change: Change<'_>) -> io::Result<()> {
        let line = match change {
            Change::Create(path) => format!("create\t{}", path.display()),
            Change::Folder(path) => format!("mkdir\t{}", path.display()),
            Change::Write(path, at, bytes) => {
                let at = at.map_or_else(|| "end".to_owned(), |at| at.to_string());
                let line = format!("write\t{}\t{at}\t{}\t{}", path.display(), self.written, bytes.len());
                self.data.write_all(bytes)?;
                self.written += bytes.len() as u64;
                line
            }
            Change::Length(path, len) => format!("length\t{}\t{len}", path.display()),
            Change::Mark(path, text) => format!("mark\t{}\t{text}", path.display()),
            Change::Sync(path) => format!("sync\t{}", path.display()),
            Change::Rename(from, to) => format!("rename\t{}\t{}", from.display(), to.display()),
            Change::Link(target, path) => format!("link\t{}\t{}", target.display(), path.display()),
            Change::Exchange(a, b) => format!("exchange\t{}\t{}", a.display(), b.display()),
            Change::RemoveFile(path) => format!("unlink\t{}", path.display()),
            Change::RemoveFolder(path) => format!("rmdir\t{}", path.display()),
        };
        self.lines.write_all(format!("{line}\n").as_bytes())
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]
mod tests {
    use super::*;
    use rustix::io::Errno;

    fn try_write() -> io::Result<()> {
        change(Change::Sync(Path::new("x")), || Ok(()))
    }

    #[test]
    fn the_named_operations_fail_and_no_others() {
        let run = |which| {
            let attempt = || (0..4).map(|_| try_write().is_ok()).collect::<Vec<_>>();
            failing(Operation::Write, which, Errno::NOSPC, attempt)
        };
        assert_eq!(run(Failing::Once(1)), (vec![true, false, true, true], 4));
        assert_eq!(run(Failing::From(2)), (vec![true, true, false, false], 4));
        let (other, seen) = failing(Operation::Read, Failing::From(0), Errno::IO, || try_write().is_ok());
        assert_eq!((other, seen), (true, 0));
        assert!(try_write().is_ok() && read(|| Ok(())).is_ok(), "disarmed");
        let full = failing(Operation::Write, Failing::Once(0), Errno::NOSPC, try_write).0.unwrap_err();
        assert_eq!(full.kind(), io::ErrorKind::StorageFull);
    }

    #[test]
    fn faults_of_a_process_are_spelt_with_a_number() {
        assert_eq!(Fault::parse("kill:3"), Some(Fault::Kill(3)));
        assert_eq!(Fault::parse("full:0"), Some(Fault::Full(0)));
        assert_eq!(Fault::parse("stop:1"), Some(Fault::Stop(1)));
        for wrong in ["kill", "kill:", "kill:x", "halt:1", ""] {
            assert_eq!(Fault::parse(wrong), None, "{wrong}");
        }
    }
}
