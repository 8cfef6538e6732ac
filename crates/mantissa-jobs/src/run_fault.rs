//! Reasons for refusing to use the folder of a training run.

use std::path::PathBuf;

/// Reason for refusing to use the folder of a run.
#[derive(Debug, thiserror::Error)]
pub enum RunFault {
    /// A path that the run needs exists, and the run did not write it.
    #[error(
        "{}: expected nothing or a file that this run wrote, got another of this name; fix: move it away, or choose another `out`",
        .0.display()
    )]
    NotOurs(PathBuf),
    /// The run's manifest is malformed.
    #[error(
        "{}: expected the list of the run's files, got a damaged one; fix: choose another `out`, or remove the old run yourself",
        .0.display()
    )]
    Damaged(PathBuf),
    /// A run exists already.
    #[error("{}: expected no run, got one that has begun; fix: rerun with {fix}", .run.display())]
    Begun {
        /// Folder of the run.
        run: PathBuf,
        /// Options that help.
        fix: &'static str,
    },
    /// A run exists already that is finished or has other settings: it cannot be resumed.
    #[error(
        "{}: expected no run, or an unfinished one of the same settings, got {found}; fix: {out} for another run, or --restart to replace this one{further}",
        .run.display()
    )]
    Other {
        /// Folder of the run.
        run: PathBuf,
        /// State of the run, and the keys that differ.
        found: String,
        /// Option of the command that names another folder.
        out: &'static str,
        /// Way to train the model of a finished run further, or nothing.
        further: String,
    },
    /// An unfinished run began with other data, and neither option tells whether to keep them.
    #[error(
        "{}: expected the data and the tokenizer that the unfinished run began with, got others; fix: restore them, rerun with --resume to keep the tokens of the run, or with --restart",
        .run.display()
    )]
    OtherData {
        /// Folder of the run.
        run: PathBuf,
    },
    /// There is no checkpoint to resume from.
    #[error("{}: expected a run with a checkpoint, got no checkpoint; fix: rerun with {fix}", .run.display())]
    NoCheckpoint {
        /// Folder of the run.
        run: PathBuf,
        /// Options that help.
        fix: &'static str,
    },
    /// Every checkpoint is damaged.
    #[error("{}: expected a sound checkpoint, got {count} damaged; fix: rerun with --restart", .run.display())]
    NoSound {
        /// Folder of the run.
        run: PathBuf,
        /// Number of checkpoints.
        count: usize,
    },
    /// The token file is lost and the data have changed.
    #[error(
        "{}: expected the tokens that the run began with, got {found}, and the data or the tokenizer have changed since; fix: restore them, or rerun with --restart",
        .path.display()
    )]
    Tokens {
        /// Path of the token file.
        path: PathBuf,
        /// Reason.
        found: &'static str,
    },
}
