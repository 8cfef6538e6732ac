//! Errors of shared work.

use std::path::PathBuf;

use mantissa_store::{Error, ErrorClass};

/// Result with a [`RankError`].
pub type Result<T, E = RankError> = std::result::Result<T, E>;

/// Two results of one unit.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Disagreement {
    /// Name of the unit.
    pub unit: String,
    /// Worker whose result is in the folder, and the SHA-256 of that result.
    pub stored: (String, String),
    /// Worker that computed it again, and the SHA-256 of its result.
    pub again: (String, String),
}

impl std::fmt::Display for Disagreement {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let Disagreement { unit, stored, again } = self;
        write!(
            f,
            "unit {unit}: expected equal results, got {} of worker {} and {} of worker {}; fix: one of the two machines \
             computes wrongly or reads other inputs: find it, remove the folder of the job, and run it again without it",
            stored.1, stored.0, again.1, again.0
        )
    }
}

/// Error of shared work.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum RankError {
    /// A file cannot be read or written, or holds something else.
    #[error(transparent)]
    Store(#[from] Error),
    /// Two workers computed different bytes for one unit.
    #[error("{}: {_1}", _0.display())]
    Disagrees(PathBuf, Box<Disagreement>),
    /// An input differs from the one that the job was made for.
    #[error(
        "{}: input {input}: expected the file that the job was made for (SHA-256 {expected}), got {got}; fix: copy that file here, or make the job again",
        folder.display()
    )]
    Input {
        /// Folder of the job.
        folder: PathBuf,
        /// The file.
        input: String,
        /// Digest of the job's file.
        expected: String,
        /// Digest of the file that was found, or `no file`.
        got: String,
    },
    /// Numbered units were asked for of work whose units wait for each other.
    #[error(
        "units: expected all of them, got numbers: layers of a calibrated recipe wait for those before them; fix: start the worker without --unit and --units"
    )]
    DependentUnits,
    /// There is no unit of a number.
    #[error(
        "units: expected a number below {count}, got {number}; fix: --json with --engine reports the number of units"
    )]
    NoUnit {
        /// The number.
        number: usize,
        /// Number of units.
        count: usize,
    },
    /// A result is gone or damaged while a worker reads it.
    #[error("unit {_0}: expected its result, got none; fix: start this worker again")]
    Gone(String),
    /// The host asked for a stop.
    #[error("stopped")]
    Interrupted,
    /// Another rank has ended.
    #[error(
        "rank {rank}: expected a message, got its end; fix: its own message says why; the same command resumes the run"
    )]
    Lost {
        /// The rank.
        rank: usize,
    },
    /// A message of another rank is not what was agreed.
    #[error(
        "rank {rank}: expected {expected}, got {got}; fix: start the same version of mantissa, with the same arguments, on every rank"
    )]
    Message {
        /// The sender.
        rank: usize,
        /// Expected message.
        expected: &'static str,
        /// The message.
        got: String,
    },
    /// A rank begins with other weights than rank 0.
    #[error(
        "rank {rank}: expected the initial weights of rank 0 (SHA-256 {expected}), got {got}; fix: give every rank the same files and settings"
    )]
    Weights {
        /// The rank.
        rank: usize,
        /// Digest of the weights of rank 0.
        expected: String,
        /// Digest of its own.
        got: String,
    },
    /// There is no memory for a message.
    #[error(
        "message of another rank: expected {bytes} bytes of memory, got less; fix: start fewer ranks on this machine"
    )]
    Memory {
        /// Bytes of the message.
        bytes: u64,
    },
    /// The library of MPI is missing, or has another ABI.
    #[error(
        "MPI: expected a library with the standard ABI of MPI 5 (libmpi_abi.so.1), got none ({said}); fix: put its folder into LD_LIBRARY_PATH, or its path into MANTISSA_MPI (MPICH 4.3 and later have it)"
    )]
    Library {
        /// Message of the loader.
        said: String,
    },
    /// The library of MPI is not that of the launcher.
    #[error(
        "MPI: expected {expected} processes, as the launcher says, got {got}; fix: put the library of the launcher's own MPI first in LD_LIBRARY_PATH, or start with the mpiexec beside the library"
    )]
    Processes {
        /// Processes that the launcher started.
        expected: usize,
        /// Processes that the library connects.
        got: usize,
    },
    /// A call of MPI failed.
    #[error(
        "MPI: expected {call} to succeed, got error code {code}; fix: see the launcher's messages; the same command resumes the run"
    )]
    Transport {
        /// The call.
        call: &'static str,
        /// Its result.
        code: i32,
    },
    /// A variable of the launcher is no number.
    #[error(
        "environment variable {name}: expected {expected}, got \"{got}\"; fix: start the worker by its launcher, or unset the variable"
    )]
    Launcher {
        /// The variable.
        name: &'static str,
        /// Expected value.
        expected: &'static str,
        /// Its value.
        got: String,
    },
}

impl RankError {
    /// Party that must act on the error.
    pub fn class(&self) -> ErrorClass {
        match self {
            RankError::Store(error) => error.class(),
            RankError::Disagrees(..)
            | RankError::Gone(_)
            | RankError::Interrupted
            | RankError::Lost { .. }
            | RankError::Memory { .. }
            | RankError::Library { .. }
            | RankError::Processes { .. }
            | RankError::Transport { .. } => ErrorClass::Environment,
            RankError::Input { .. }
            | RankError::Message { .. }
            | RankError::Weights { .. }
            | RankError::Launcher { .. }
            | RankError::DependentUnits
            | RankError::NoUnit { .. } => ErrorClass::Input,
        }
    }
}
