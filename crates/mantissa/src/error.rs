//! Errors of the command line, and whose fault an error is.

use std::io;
use std::process::ExitCode;

use mantissa_model::LoadError;
use mantissa_store::ErrorClass;

use crate::output::bytes;

/// How the process ends.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Exit {
    /// The work is done.
    Done = 0,
    /// It ran, and a quality gate failed.
    Gate = 1,
    /// Bad input or usage: the same command fails again.
    Input = 2,
    /// I/O, memory, disk, or a bug of ours.
    Environment = 3,
}

impl From<Exit> for ExitCode {
    fn from(exit: Exit) -> Self {
        ExitCode::from(exit as u8)
    }
}

/// A quality gate that the user set was not passed.
#[derive(Debug, thiserror::Error)]
#[error("{0}")]
pub struct GateFailed(String);

impl GateFailed {
    /// `message` says what was found and what was allowed.
    pub fn new(message: impl Into<String>) -> Self {
        GateFailed(message.into())
    }
}

/// An option or a file that cannot be used.
#[derive(Debug, thiserror::Error)]
#[error("{what}: found {found}, allowed {allowed}")]
pub struct BadInput {
    what: String,
    found: String,
    allowed: String,
}

impl BadInput {
    /// `what` names the option, or the file and the tensor.
    pub fn new(what: impl Into<String>, found: impl Into<String>, allowed: impl Into<String>) -> Self {
        BadInput { what: what.into(), found: found.into(), allowed: allowed.into() }
    }
}

/// The work does not fit under `--memory`.
#[derive(Debug, thiserror::Error)]
#[error("{what}: needs {}, --memory allows {}; raise it or use fewer --threads", bytes(*.needs), bytes(*.allowed))]
pub struct OverMemory {
    /// The work.
    pub what: String,
    /// Bytes it needs.
    pub needs: u64,
    /// Bytes allowed.
    pub allowed: u64,
}

/// Standard output cannot be written.
#[derive(Debug, thiserror::Error)]
#[error("standard output: found I/O error `{0}`, allowed a stream that can be written")]
pub struct StdoutError(pub io::Error);

/// How the process ends after `error`: by the first error of its chain that says so, else as bad input, which is what the
/// libraries' other errors are about.
pub fn exit_of(error: &anyhow::Error) -> Exit {
    error.chain().find_map(class).unwrap_or(Exit::Input)
}

fn class(error: &(dyn std::error::Error + 'static)) -> Option<Exit> {
    if error.is::<GateFailed>() {
        return Some(Exit::Gate);
    }
    if error.is::<OverMemory>() || error.is::<io::Error>() {
        return Some(Exit::Environment);
    }
    if let Some(StdoutError(error)) = error.downcast_ref() {
        // Whoever reads has seen enough, as with `| head`.
        return Some(if error.kind() == io::ErrorKind::BrokenPipe { Exit::Done } else { Exit::Environment });
    }
    if let Some(error) = error.downcast_ref::<mantissa_store::Error>() {
        return Some(of_store(error));
    }
    match error.downcast_ref::<LoadError>()? {
        LoadError::Store(error) => Some(of_store(error)),
        LoadError::Memory { .. } => Some(Exit::Environment),
        _ => None,
    }
}

fn of_store(error: &mantissa_store::Error) -> Exit {
    match error.class() {
        ErrorClass::Input => Exit::Input,
        ErrorClass::Environment => Exit::Environment,
    }
}

/// `text` on one line.
pub fn one_line(text: &str) -> String {
    text.split(['\n', '\r']).map(str::trim).filter(|line| !line.is_empty()).collect::<Vec<_>>().join(" ")
}

#[cfg(test)]
mod tests {
    use super::*;
    use anyhow::Context;
    use std::path::Path;

    #[test]
    fn each_kind_of_error_has_its_exit_code() {
        let io = || io::Error::from(io::ErrorKind::StorageFull);
        let store_input = mantissa_store::Error::field(Path::new("config.json"), "a", "b", "c", "");
        let store_io = mantissa_store::Error::Io { path: "p".into(), operation: "read", error: io() };
        let wrapped =
            LoadError::Store(mantissa_store::Error::Io { path: "p".into(), operation: "read", error: io() });
        let cases: [(anyhow::Error, Exit); 8] = [
            (GateFailed::new("kl").into(), Exit::Gate),
            (BadInput::new("a", "b", "c").into(), Exit::Input),
            (OverMemory { what: "w".into(), needs: 2, allowed: 1 }.into(), Exit::Environment),
            (StdoutError(io()).into(), Exit::Environment),
            (StdoutError(io::ErrorKind::BrokenPipe.into()).into(), Exit::Done),
            (store_input.into(), Exit::Input),
            (store_io.into(), Exit::Environment),
            (wrapped.into(), Exit::Environment),
        ];
        for (error, exit) in cases {
            assert_eq!(exit_of(&error), exit, "{error}");
            let chained = Err::<(), _>(error).context("while working").err();
            assert_eq!(chained.map(|e| exit_of(&e)), Some(exit));
        }
    }
}
