//! Lease of a unit: a file that says who computes it. It ends with its holder: a process of this machine that is gone
//! has lost it at once, one of another machine when its beat, a byte appended every few seconds, has stopped. No clock
//! is compared with that of another machine: the one who waits measures how long the length stays.
//!
//! A lease that is taken from a process that still runs costs a second computation of the unit, and nothing else.

use std::collections::HashMap;
use std::fs::File;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Condvar, Mutex, OnceLock, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use mantissa_store::{Error, FileDigest, disk, regular};

use crate::error::Result;

/// Distance of the beats of a holder.
pub(crate) const BEAT: Duration = Duration::from_secs(2);

/// Time without a beat after which a lease has ended.
pub(crate) const SILENCE: Duration = Duration::from_secs(30);

/// First word of a lease.
const WORD: &str = "mantissa-lease";

/// Longest lease that is read. Its beats are a byte each: enough for months.
const MAX_LEASE: u64 = 8 << 20;

/// Process that computes units.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Worker {
    /// Name of the machine.
    host: String,
    /// Start of the machine's system and namespace of its process ids, in which ids are comparable; empty if unknown.
    system: String,
    pid: u32,
    /// Start of the process in clock ticks after that of the system: ids are used again.
    start: u64,
}

impl Worker {
    /// Describes this process.
    pub(crate) fn this() -> &'static Self {
        static THIS: OnceLock<(u32, Worker)> = OnceLock::new();
        let pid = std::process::id();
        &THIS.get_or_init(|| (pid, Worker::with_id(pid))).1
    }

    fn with_id(pid: u32) -> Self {
        let proc = |path: &str| {
            let text = regular::read_text(Path::new(path), 4096, "a file of the system").ok()?;
            let word = text.split_whitespace().next()?;
            // Words are separated by spaces in a lease.
            Some(word.chars().filter(char::is_ascii_graphic).take(100).collect::<String>())
        };
        let host = proc("/proc/sys/kernel/hostname").filter(|host| !host.is_empty());
        let namespace = std::fs::read_link("/proc/self/ns/pid").ok();
        let namespace =
            namespace.map(|link| link.to_string_lossy().replace(|c: char| !c.is_ascii_graphic(), ""));
        let system = proc("/proc/sys/kernel/random/boot_id").zip(namespace);
        Worker {
            host: host.unwrap_or_else(|| "unknown-host".to_owned()),
            system: system.map_or_else(String::new, |(boot, namespace)| format!("{boot}/{namespace}")),
            pid,
            start: start_of(pid).unwrap_or(0),
        }
    }

    /// Name for messages and records: machine and process id.
    pub(crate) fn name(&self) -> String {
        format!("{}:{}-{}", self.host, self.pid, self.start)
    }

    /// Returns eight digits that differ between machines.
    pub(crate) fn host_digits(&self) -> String {
        FileDigest::of(format!("{} {}", self.host, self.system).as_bytes()).hex()[..8].to_owned()
    }

    fn to_line(&self) -> String {
        let system = if self.system.is_empty() { "-" } else { &self.system };
        format!("{WORD} {} {system} {} {}\n", self.host, self.pid, self.start)
    }

    fn from_line(line: &str) -> Option<Self> {
        let mut words = line.split(' ');
        let (word, host, system) = (words.next()?, words.next()?, words.next()?);
        let (pid, start) = (words.next()?.parse().ok()?, words.next()?.parse().ok()?);
        let system = if system == "-" { "" } else { system };
        let known = word == WORD && words.next().is_none();
        known.then(|| Worker { host: host.to_owned(), system: system.to_owned(), pid, start })
    }

    /// True if the process is known to be gone: one of this system that no longer runs.
    fn is_gone(&self) -> bool {
        let here = Self::this();
        !self.system.is_empty() && self.system == here.system && start_of(self.pid) != Some(self.start)
    }
}

/// Start of a process in clock ticks after that of the system, field 22 of `/proc/PID/stat` (`man 5 proc`); `None` if it
/// does not run or waits for its parent to notice that it has ended.
fn start_of(pid: u32) -> Option<u64> {
    let path = PathBuf::from(format!("/proc/{pid}/stat"));
    let text = regular::read_text(&path, 4096, "a file of the system").ok()?;
    // The name before may contain spaces and parentheses.
    let mut fields = text.rsplit_once(')')?.1.split_whitespace();
    let state = fields.next()?;
    (!matches!(state, "Z" | "X")).then(|| fields.nth(18)?.parse().ok()).flatten()
}

/// Leases of others as they were last seen: length, and since when it is the same.
#[derive(Debug, Default)]
pub(crate) struct Seen(HashMap<PathBuf, (u64, Instant)>);

impl Seen {
    /// True if the lease at `path` has ended, and may be taken.
    fn has_ended(&mut self, path: &Path) -> Result<bool> {
        let Some(bytes) = regular::read_optional(path, MAX_LEASE, "a lease")? else { return Ok(true) };
        let line = bytes.split_inclusive(|byte| *byte == b'\n').next().unwrap_or_default();
        // A holder that was killed, or is about to write, has no line yet.
        let holder =
            line.strip_suffix(b"\n").and_then(|line| Worker::from_line(std::str::from_utf8(line).ok()?));
        if holder.is_some_and(|holder| holder.is_gone()) {
            return Ok(true);
        }
        let (now, len) = (Instant::now(), bytes.len() as u64);
        let seen = self.0.entry(path.to_owned()).or_insert((len, now));
        if seen.0 != len {
            *seen = (len, now);
        }
        Ok(now.duration_since(seen.1) >= SILENCE)
    }
}

/// Lease that this process holds.
pub(crate) struct Lease<'a> {
    path: PathBuf,
    heart: &'a Heart,
}

impl<'a> Lease<'a> {
    /// Takes the lease at `path`; `None` if another process holds it.
    ///
    /// # Errors
    /// I/O.
    pub(crate) fn take(path: &Path, seen: &mut Seen, heart: &'a Heart) -> Result<Option<Self>> {
        if let Some(lease) = Self::create(path, heart)? {
            return Ok(Some(lease));
        }
        if !seen.has_ended(path)? {
            return Ok(None);
        }
        seen.0.remove(path);
        let io = |error| Error::Io { path: path.to_owned(), operation: "end a lease", error };
        // Of several processes that see its end one moves it away; the others find no lease, or that of the first.
        let ended = path.with_extension(format!("{}.ended", Worker::this().name().replace('/', "-")));
        match disk::rename(path, &ended) {
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => {}
            moved => {
                moved.map_err(io)?;
                disk::remove_file_if_there(&ended).map_err(io)?;
            }
        }
        Self::create(path, heart)
    }

    fn create(path: &Path, heart: &'a Heart) -> Result<Option<Self>> {
        let io = |operation| move |error| Error::Io { path: path.to_owned(), operation, error };
        let file = match disk::create_new(path) {
            Ok(file) => file,
            Err(error) if error.kind() == std::io::ErrorKind::AlreadyExists => return Ok(None),
            Err(error) => return Err(io("create a lease")(error).into()),
        };
        let lease = Lease { path: path.to_owned(), heart };
        let line = Worker::this().to_line();
        // Other machines must see it: a client of NFS keeps what is not synced.
        disk::write_at(&file, path, line.as_bytes(), 0).map_err(io("write a lease"))?;
        disk::sync_data(&file, path).map_err(io("sync a lease"))?;
        heart.hold(Held { file, path: path.to_owned(), len: line.len() as u64 });
        Ok(Some(lease))
    }
}

impl Drop for Lease<'_> {
    fn drop(&mut self) {
        self.heart.release(&self.path);
        // Another process may have taken it because this one was silent. A lease that stays ends by itself.
        let own = Worker::this().to_line();
        let bytes =
            regular::read_optional(&self.path, MAX_LEASE, "a lease").ok().flatten().unwrap_or_default();
        if bytes.starts_with(own.as_bytes()) {
            let _ = disk::remove_file_if_there(&self.path);
        }
    }
}

/// Lease that beats.
struct Held {
    file: File,
    path: PathBuf,
    len: u64,
}

/// State of the thread that beats: the leases, and whether it ends.
#[derive(Default)]
struct Pulse {
    held: Mutex<(Vec<Held>, bool)>,
    changed: Condvar,
}

/// Thread that appends a beat to the leases that the process holds. It starts with the first lease.
#[derive(Default)]
pub(crate) struct Heart {
    pulse: Arc<Pulse>,
    thread: Mutex<Option<JoinHandle<()>>>,
}

impl Heart {
    fn hold(&self, held: Held) {
        self.pulse.held.lock().unwrap_or_else(PoisonError::into_inner).0.push(held);
        let mut thread = self.thread.lock().unwrap_or_else(PoisonError::into_inner);
        if thread.is_none() {
            let pulse = Arc::clone(&self.pulse);
            // Without the thread the lease ends early, which costs a second computation at most.
            *thread = std::thread::Builder::new().name("leases".to_owned()).spawn(move || pulse.run()).ok();
        }
    }

    fn release(&self, path: &Path) {
        self.pulse.held.lock().unwrap_or_else(PoisonError::into_inner).0.retain(|held| held.path != path);
    }
}

impl Drop for Heart {
    fn drop(&mut self) {
        self.pulse.held.lock().unwrap_or_else(PoisonError::into_inner).1 = true;
        self.pulse.changed.notify_all();
        if let Some(thread) = self.thread.get_mut().unwrap_or_else(PoisonError::into_inner).take() {
            // A thread that panicked has nothing to lose.
            let _ = thread.join();
        }
    }
}

impl Pulse {
    fn run(&self) {
        let mut held = self.held.lock().unwrap_or_else(PoisonError::into_inner);
        while !held.1 {
            let (next, waited) =
                self.changed.wait_timeout(held, BEAT).unwrap_or_else(PoisonError::into_inner);
            held = next;
            if !waited.timed_out() {
                continue;
            }
            for held in &mut held.0 {
                // A beat that cannot be written is missed.
                let written = disk::write_at(&held.file, &held.path, b".", held.len);
                if written.and_then(|()| disk::sync_data(&held.file, &held.path)).is_ok() {
                    held.len += 1;
                }
            }
        }
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    #[test]
    fn one_of_two_has_the_lease_until_it_ends() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("a.lease");
        let (heart, other) = (Heart::default(), Heart::default());
        let mut seen = Seen::default();
        let lease = Lease::take(&path, &mut seen, &heart).unwrap().unwrap();
        assert!(Lease::take(&path, &mut seen, &other).unwrap().is_none());
        drop(lease);
        assert!(!path.exists());
        assert!(Lease::take(&path, &mut seen, &other).unwrap().is_some());
    }

    #[test]
    fn a_lease_beats() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("a.lease");
        let heart = Heart::default();
        let lease = Lease::take(&path, &mut Seen::default(), &heart).unwrap().unwrap();
        let len = || std::fs::metadata(&path).unwrap().len();
        let begin = Instant::now();
        let first = len();
        while len() == first {
            assert!(begin.elapsed() < 5 * BEAT);
            std::thread::sleep(BEAT / 20);
        }
        drop(lease);
    }

    #[test]
    fn a_lease_of_a_process_that_is_gone_is_taken_at_once_and_another_after_silence() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("a.lease");
        let heart = Heart::default();
        let mut child = std::process::Command::new("true").spawn().unwrap();
        let gone = Worker { pid: child.id(), start: 1, ..Worker::this().clone() };
        child.wait().unwrap();
        std::fs::write(&path, gone.to_line()).unwrap();
        assert!(Lease::take(&path, &mut Seen::default(), &heart).unwrap().is_some());
        let far = Worker { system: "other".to_owned(), host: "node-b".to_owned(), ..gone };
        for text in [far.to_line(), String::new(), "mantissa-lease half".to_owned()] {
            std::fs::write(&path, text).unwrap();
            let mut seen = Seen::default();
            assert!(Lease::take(&path, &mut seen, &heart).unwrap().is_none());
            let since = &mut seen.0.get_mut(&path).unwrap().1;
            *since = since.checked_sub(SILENCE).unwrap();
            // A beat begins the silence anew.
            std::fs::write(&path, [std::fs::read(&path).unwrap(), b".".to_vec()].concat()).unwrap();
            assert!(Lease::take(&path, &mut seen, &heart).unwrap().is_none());
            let since = &mut seen.0.get_mut(&path).unwrap().1;
            *since = since.checked_sub(SILENCE).unwrap();
            assert!(Lease::take(&path, &mut seen, &heart).unwrap().is_some());
        }
    }

    #[test]
    fn a_worker_is_read_back() {
        let this = Worker::this();
        assert_eq!(Worker::from_line(this.to_line().trim_end()).as_ref(), Some(this));
        assert!(!this.is_gone());
        for line in ["", "mantissa-lease a b c d", "mantissa-lease a b 1 2 3", "other a b 1 2"] {
            assert_eq!(Worker::from_line(line), None, "{line}");
        }
    }
}
