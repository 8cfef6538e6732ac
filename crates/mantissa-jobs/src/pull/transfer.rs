//! One file from the hub to its place: continued where it ended, checked, and only then put in place.

use std::fs::{self, File};
use std::io::Read;
use std::path::{Path, PathBuf};
use std::thread::sleep;
use std::time::Duration;

use mantissa_store::{Error, disk};

use super::address::{Address, encoded, encoded_part};
use super::client::{Again, Answer, Client, Patience, RequestFault, shown};
use super::hashing::Hashing;
use super::layout::{Place, Wanted, hash_into};
use super::listing::{Asked, FileHash, RemoteFile};
use crate::error::{JobError, Result};
use crate::host::Host;
use crate::progress::Meter;
use crate::pull_fault::PullFault;

/// Bytes read at once.
const PIECE: usize = 256 << 10;

/// Time between two questions for a lock.
const LOCKED: Duration = Duration::from_millis(200);

/// Fetches the files of a model at a commit.
pub(super) struct Transfers<'a> {
    /// Connection.
    pub client: &'a Client,
    /// Model at the commit.
    pub asked: Asked<'a>,
    /// Place of the files.
    pub place: &'a Place,
    /// Host of the job.
    pub host: &'a Host,
    /// Display of all bytes.
    pub meter: &'a Meter,
    /// Bytes of all files that are done.
    pub done: u64,
}

/// Bytes of a file that are on the disk, and their hash.
struct Begun {
    path: PathBuf,
    file: File,
    length: u64,
    hashing: Hashing,
}

/// Kinds of ends of an attempt.
enum Ended {
    Again(Again),
    Final(JobError),
}

impl<E: Into<JobError>> From<E> for Ended {
    fn from(error: E) -> Self {
        Ended::Final(error.into())
    }
}

impl Transfers<'_> {
    /// Fetches `file`, if it is not there; returns the number of bytes that were fetched.
    ///
    /// # Errors
    /// A refusal of the hub; a failure after all attempts; a wrong hash or size; I/O; a stop.
    pub fn fetch(&mut self, file: &Wanted) -> Result<u64> {
        let _lock = self.locked(file)?;
        let fetched = if self.place.has(file)? { 0 } else { self.fetch_missing(file)? };
        self.done += file.size;
        self.meter.set(self.done);
        Ok(fetched)
    }

    /// Waits until no other process fetches the same file.
    fn locked(&self, file: &Wanted) -> Result<File> {
        let mut told = false;
        loop {
            if let Some(lock) = self.place.lock(file)? {
                return Ok(lock);
            }
            if !std::mem::replace(&mut told, true) {
                self.host.note(&format!(
                    "{}: another process fetches it; waiting",
                    crate::escape::line(&file.name)
                ));
            }
            self.refuse_stop()?;
            sleep(LOCKED);
        }
    }

    fn fetch_missing(&self, file: &Wanted) -> Result<u64> {
        let mut begun = Begun::open(&self.place.partial(file), file)?;
        // What an earlier run left may be damaged: then the file is fetched once more, whole.
        let mut resumed = begun.length > 0;
        let mut fetched = 0;
        loop {
            fetched += self.complete(file, &mut begun)?;
            let found = begun.digest(file)?;
            if found == file.hash.hex() {
                disk::sync(&begun.file, &begun.path).map_err(|e| begun.failed("sync", e))?;
                self.place.publish(file)?;
                return Ok(fetched);
            }
            if !std::mem::take(&mut resumed) {
                disk::remove_file(&begun.path).map_err(|e| begun.failed("remove", e))?;
                let kind = match file.hash {
                    FileHash::Sha256(_) => "SHA-256",
                    FileHash::Git(_) => "git's id",
                };
                let expected = format!("{kind} {}", file.hash.hex());
                return Err(
                    PullFault::Content { file: crate::escape::line(&file.name), expected, found }.into()
                );
            }
            begun.restart(file)?;
        }
    }

    /// Fetches what is missing of the bytes; returns the number of bytes that were fetched.
    fn complete(&self, file: &Wanted, begun: &mut Begun) -> Result<u64> {
        let mut patience = Patience::default();
        let mut fetched = 0;
        while begun.length < file.size {
            let before = begun.length;
            match self.attempt(file, begun, &mut fetched) {
                Ok(()) => {}
                Err(Ended::Final(error)) => return Err(error),
                Err(Ended::Again(again)) => {
                    if begun.length > before {
                        patience = Patience::default();
                    }
                    patience.wait(again, self.host)?;
                }
            }
        }
        Ok(fetched)
    }

    fn attempt(&self, file: &Wanted, begun: &mut Begun, fetched: &mut u64) -> Result<(), Ended> {
        let address = self.address(&file.name);
        let mut answer = match self.client.attempt(&address, begun.length, false) {
            Ok(answer) => answer,
            Err(RequestFault::Again(again)) => return Err(Ended::Again(again)),
            Err(RequestFault::Final(fault)) => return Err(fault.into()),
        };
        self.check_hash(file, &answer)?;
        match answer.status {
            206 if starts_at(&answer, begun.length) => {}
            // The server cannot continue files, or says that there is no more than is here.
            200 => begun.restart(file)?,
            206 | 416 => {
                begun.restart(file)?;
                let found = "an answer that does not continue the file".to_owned();
                let fault = PullFault::Network { address: answer.at.to_string(), found };
                return Err(Ended::Again(Again { fault, after: None }));
            }
            _ => {
                return Err(Ended::Final(self.asked.refused(
                    &mut answer,
                    Some(&file.name),
                    self.client,
                    self.host,
                )));
            }
        }
        let at = answer.at.to_string();
        self.copy(&mut answer.into_reader(), &at, file, begun, fetched)
    }

    /// Appends the bytes of an answer of `at` to the file.
    fn copy(
        &self,
        reader: &mut impl Read,
        at: &str,
        file: &Wanted,
        begun: &mut Begun,
        fetched: &mut u64,
    ) -> Result<(), Ended> {
        let mut piece = vec![0; PIECE];
        let broken = |found: String| {
            let fault = PullFault::Network { address: at.to_owned(), found };
            Ended::Again(Again { fault, after: None })
        };
        loop {
            let read = match reader.read(&mut piece) {
                Ok(0) if begun.length == file.size => return Ok(()),
                Ok(0) => return Err(broken(format!("{} of {} bytes", begun.length, file.size))),
                Ok(read) => read,
                Err(error) => return Err(broken(shown(&error))),
            };
            if begun.length + read as u64 > file.size {
                disk::remove_file(&begun.path).map_err(|e| begun.failed("remove", e))?;
                let (expected, found) = (format!("{} bytes", file.size), "more bytes".to_owned());
                return Err(
                    PullFault::Content { file: crate::escape::line(&file.name), expected, found }.into()
                );
            }
            begun.append(&piece[..read])?;
            *fetched += read as u64;
            self.meter.set(self.done + begun.length);
            self.refuse_stop()?;
        }
    }

    /// Refuses an answer that names another content than the listing.
    fn check_hash(&self, file: &Wanted, answer: &Answer) -> Result<(), PullFault> {
        let linked = answer.hub_header("x-linked-etag").or_else(|| answer.hub_header("etag"));
        match linked.and_then(FileHash::parse).filter(|found| *found != file.hash) {
            None => Ok(()),
            Some(found) => Err(PullFault::Content {
                file: crate::escape::line(&file.name),
                expected: format!("hash {}", file.hash.hex()),
                found: format!("one with hash {}", found.hex()),
            }),
        }
    }

    fn refuse_stop(&self) -> Result<(), PullFault> {
        let place = || format!("{}: {} bytes", self.asked.repository, self.done);
        if self.host.stops() { Err(PullFault::Stopped(place())) } else { Ok(()) }
    }

    /// Returns the address of a file at the commit.
    fn address(&self, name: &str) -> Address {
        let Asked { repository, revision } = self.asked;
        let path = format!("/{}/resolve/{}/{}", encoded(repository), encoded_part(revision), encoded(name));
        self.client.endpoint.below(&path)
    }

    /// Completes what the listing says of a file by asking for the file itself.
    ///
    /// # Errors
    /// A refusal of the hub; an answer without a hash or size.
    pub fn wanted(&self, file: &RemoteFile) -> Result<Wanted> {
        if let (Some(size), Some(hash)) = (file.size, file.hash.clone()) {
            return Ok(Wanted { name: file.name.clone(), size, hash });
        }
        let address = self.address(&file.name);
        let mut answer = self.client.request(&address, true, self.host)?;
        if answer.status != 200 {
            return Err(self.asked.refused(&mut answer, Some(&file.name), self.client, self.host));
        }
        let etag = answer.hub_header("x-linked-etag").or_else(|| answer.hub_header("etag"));
        let hash = file.hash.clone().or_else(|| etag.and_then(FileHash::parse));
        // The length of a redirect is that of its own text.
        let length = answer.header("content-length").filter(|_| answer.header("location").is_none());
        let size = answer.hub_header("x-linked-size").or(length);
        let size = file.size.or_else(|| size.and_then(|text| text.parse().ok()));
        let wrong = |field, expected| PullFault::Answer {
            address: address.to_string(),
            field,
            expected,
            found: "none".to_owned(),
        };
        let hash = hash.ok_or_else(|| wrong("ETag", "a SHA-256 or an id of git"))?;
        let size = size.ok_or_else(|| wrong("Content-Length", "the size of the file"))?;
        Ok(Wanted { name: file.name.clone(), size, hash })
    }
}

/// True if the answer continues a file at the byte `from`.
fn starts_at(answer: &Answer, from: u64) -> bool {
    let range = answer.header("content-range").and_then(|text| text.trim().strip_prefix("bytes"));
    let start = range.and_then(|text| text.trim_start_matches(['=', ' ']).split_once('-'));
    start.is_some_and(|(start, _)| start.parse() == Ok(from))
}

/// Returns the number of bytes of `file` that an earlier run left.
pub(super) fn left_over(place: &Place, file: &Wanted) -> u64 {
    fs::symlink_metadata(place.partial(file)).map_or(0, |found| found.len().min(file.size))
}

impl Begun {
    /// Opens what is there of a file, and hashes it.
    fn open(path: &Path, file: &Wanted) -> Result<Self, Error> {
        let mut hashing = Hashing::of(&file.hash, file.size);
        let length = match fs::symlink_metadata(path) {
            // Longer than the file, or no file that could be continued.
            Ok(found) if !found.is_file() || found.len() > file.size => {
                disk::remove_all(path).map_err(|error| Error::Io {
                    path: path.into(),
                    operation: "remove",
                    error,
                })?;
                0
            }
            Ok(_) => hash_into(path, &mut hashing)?,
            Err(_) => 0,
        };
        let opened = disk::open_append(path);
        let opened = opened.map_err(|error| Error::Io { path: path.into(), operation: "create", error })?;
        Ok(Begun { path: path.to_owned(), file: opened, length, hashing })
    }

    fn append(&mut self, bytes: &[u8]) -> Result<(), Error> {
        disk::append(&self.file, &self.path, bytes).map_err(|e| self.failed("write", e))?;
        self.hashing.update(bytes);
        self.length += bytes.len() as u64;
        Ok(())
    }

    /// Drops all bytes.
    fn restart(&mut self, file: &Wanted) -> Result<(), Error> {
        if self.length > 0 {
            disk::set_len(&self.file, &self.path, 0).map_err(|e| self.failed("truncate", e))?;
        }
        self.length = 0;
        self.hashing = Hashing::of(&file.hash, file.size);
        Ok(())
    }

    /// Returns the digits of the hash of all bytes.
    fn digest(&mut self, file: &Wanted) -> Result<String, Error> {
        let started = Hashing::of(&file.hash, file.size);
        Ok(std::mem::replace(&mut self.hashing, started).finish())
    }

    fn failed(&self, operation: &'static str, error: std::io::Error) -> Error {
        Error::Io { path: self.path.clone(), operation, error }
    }
}
