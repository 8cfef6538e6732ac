//! Reader for the sequential part of a file: bounded by the file, with a memory budget.

use std::path::Path;

use super::MAX_METADATA_BYTES;
use crate::error::GgufFault;
use crate::error::{Error, Result};
use crate::reader::{RegularFile, reserve};

/// Bytes read ahead.
const WINDOW: u64 = 64 << 10;

/// Source of the bytes.
pub(super) enum Input<'a> {
    File(&'a RegularFile),
    Bytes(&'a Path, &'a [u8]),
}

impl Input<'_> {
    fn len(&self) -> u64 {
        match self {
            Input::File(source) => source.len(),
            Input::Bytes(_, bytes) => bytes.len() as u64,
        }
    }

    fn path(&self) -> &Path {
        match self {
            Input::File(source) => source.path(),
            Input::Bytes(path, _) => path,
        }
    }

    /// Fills `buf` from byte `at`; the caller has checked both against the length.
    fn fill(&self, at: u64, buf: &mut [u8]) -> Result<()> {
        match self {
            Input::File(source) => source.read_exact(at, buf, "read header"),
            Input::Bytes(_, bytes) => {
                let start = usize::try_from(at).unwrap_or(usize::MAX);
                let from = bytes.get(start..).and_then(|rest| rest.get(..buf.len()));
                buf.copy_from_slice(from.unwrap_or(&vec![0; buf.len()]));
                Ok(())
            }
        }
    }
}

/// A position in the input.
pub(super) struct Cursor<'a> {
    input: Input<'a>,
    at: u64,
    window: Vec<u8>,
    window_start: u64,
    charged: u64,
}

impl<'a> Cursor<'a> {
    pub(super) fn new(input: Input<'a>) -> Self {
        Self { input, at: 0, window: Vec::new(), window_start: 0, charged: 0 }
    }

    pub(super) fn path(&self) -> &Path {
        self.input.path()
    }

    pub(super) fn at(&self) -> u64 {
        self.at
    }

    pub(super) fn len(&self) -> u64 {
        self.input.len()
    }

    pub(super) fn remaining(&self) -> u64 {
        self.len().saturating_sub(self.at)
    }

    pub(super) fn fault(&self, fault: GgufFault) -> Error {
        Error::Gguf { path: self.path().to_owned(), fault: Box::new(fault) }
    }

    /// Charges `bytes` of memory for `part`.
    pub(super) fn charge(&mut self, bytes: u64, part: impl Fn() -> String) -> Result<()> {
        self.charged = self.charged.saturating_add(bytes);
        if self.charged <= MAX_METADATA_BYTES {
            return Ok(());
        }
        Err(self.fault(GgufFault::Budget { part: part(), allowed: MAX_METADATA_BYTES }))
    }

    /// Refuses a count of elements of at least `min_bytes` each that the rest of the file cannot hold.
    pub(super) fn check_count(&self, count: u64, min_bytes: u64, field: impl Fn() -> String) -> Result<()> {
        let remaining = self.remaining();
        let allowed = remaining / min_bytes;
        if count <= allowed {
            return Ok(());
        }
        Err(self.fault(GgufFault::Count { field: field(), found: count, allowed, remaining }))
    }

    pub(super) fn array<const N: usize>(&mut self, part: impl Fn() -> String) -> Result<[u8; N]> {
        self.require(N as u64, part)?;
        let start = self.at.wrapping_sub(self.window_start);
        if start.saturating_add(N as u64) > self.window.len() as u64 || self.at < self.window_start {
            self.refill()?;
        }
        let start = usize::try_from(self.at - self.window_start).unwrap_or(0);
        let mut bytes = [0; N];
        bytes.copy_from_slice(&self.window[start..start + N]);
        self.at += N as u64;
        Ok(bytes)
    }

    pub(super) fn u32(&mut self, part: impl Fn() -> String) -> Result<u32> {
        Ok(u32::from_le_bytes(self.array(part)?))
    }

    pub(super) fn u64(&mut self, part: impl Fn() -> String) -> Result<u64> {
        Ok(u64::from_le_bytes(self.array(part)?))
    }

    /// A length, and that many bytes of UTF-8.
    pub(super) fn string(&mut self, part: impl Fn() -> String) -> Result<String> {
        let len = self.u64(&part)?;
        self.check_count(len, 1, || format!("length of {}", part()))?;
        self.charge(len.saturating_add(size_of::<String>() as u64), &part)?;
        let bytes = self.bytes(len, &part)?;
        String::from_utf8(bytes).map_err(|_| self.fault(GgufFault::NotUtf8 { part: part() }))
    }

    fn bytes(&mut self, len: u64, part: impl Fn() -> String) -> Result<Vec<u8>> {
        let mut bytes = reserve(self.path(), &part(), len, len)?;
        let inside =
            self.at >= self.window_start && self.at - self.window_start + len <= self.window.len() as u64;
        if !inside && len < WINDOW {
            self.refill()?;
        }
        if len < WINDOW {
            let start = usize::try_from(self.at - self.window_start).unwrap_or(0);
            bytes.extend_from_slice(&self.window[start..start + usize::try_from(len).unwrap_or(0)]);
        } else {
            bytes.resize(usize::try_from(len).unwrap_or(0), 0);
            self.input.fill(self.at, &mut bytes)?;
        }
        self.at += len;
        Ok(bytes)
    }

    fn require(&self, needed: u64, part: impl Fn() -> String) -> Result<()> {
        if needed <= self.remaining() {
            return Ok(());
        }
        let (at, available) = (self.at, self.remaining());
        Err(self.fault(GgufFault::Truncated { part: part(), at, available, needed }))
    }

    /// Moves the window to begin here.
    fn refill(&mut self) -> Result<()> {
        let len = WINDOW.min(self.remaining());
        self.window.resize(usize::try_from(len).unwrap_or(0), 0);
        self.window_start = self.at;
        self.input.fill(self.at, &mut self.window)
    }
}
