//! Failures of a download that are not the fault of what was asked.

use std::path::PathBuf;
use std::time::Duration;

use crate::text::bytes;

/// Download that failed.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum PullFault {
    /// A server cannot be reached, or its answer ends early, after all attempts.
    #[error("{address}: expected an answer, got {found}; fix: {}", network_fix(found))]
    Network {
        /// Address without its query.
        address: String,
        /// Failure.
        found: String,
    },
    /// A server answers with an unexpected status.
    #[error("{address}: expected status 200, got {found}; fix: rerun the same command {}, which resumes", later(*after))]
    Status {
        /// Address without its query.
        address: String,
        /// Status with the server's message.
        found: String,
        /// Wait that the server asks for.
        after: Option<Duration>,
    },
    /// A server's answer is none that the hub gives.
    #[error("{address}: {field}: expected {expected}, got {found}; fix: check HF_ENDPOINT")]
    Answer {
        /// Address without its query.
        address: String,
        /// Header or field.
        field: &'static str,
        /// Accepted values.
        expected: &'static str,
        /// Value found.
        found: String,
    },
    /// A file arrived with other bytes than the hub's listing names.
    #[error(
        "{file}: expected {expected}, got {found}; fix: rerun the same command, which fetches the file again; if it fails again, a proxy or mirror changes files: unset HF_ENDPOINT or the proxy"
    )]
    Content {
        /// Name of the file.
        file: String,
        /// Hash or size.
        expected: String,
        /// Hash or size found.
        found: String,
    },
    /// The disk has not the space for the files.
    #[error(
        "{}: expected {} free, got {}; fix: set HF_HUB_CACHE to a folder of a larger disk, or take fewer files with --include", path.display(), bytes(*.needs), bytes(*.free)
    )]
    Space {
        /// Cache or output folder.
        path: PathBuf,
        /// Bytes that are missing.
        needs: u64,
        /// Bytes free.
        free: u64,
    },
    /// No certificates, or no cryptography for this processor.
    #[error("{what}: expected {expected}, got {found}; fix: {fix}")]
    Trust {
        /// Subject.
        what: String,
        /// Accepted values.
        expected: &'static str,
        /// Value found.
        found: String,
        /// Remedy.
        fix: &'static str,
    },
    /// The host asked for a stop.
    #[error("{0}: Interrupted. Rerun the same command to resume.")]
    Stopped(String),
}

impl PullFault {
    /// True if the host's wish to stop ended the download.
    pub fn is_stop(&self) -> bool {
        matches!(self, PullFault::Stopped(_))
    }

    /// Adds the wait that a server asks for.
    #[must_use]
    pub(crate) fn after(self, asked: Option<Duration>) -> Self {
        match self {
            PullFault::Status { address, found, .. } => PullFault::Status { address, found, after: asked },
            other => other,
        }
    }

    /// Returns place and failure without what is expected, for a note.
    pub(crate) fn brief(&self) -> String {
        match self {
            PullFault::Network { address, found } | PullFault::Status { address, found, .. } => {
                format!("{address}: {found}")
            }
            other => other.to_string(),
        }
    }
}

/// Names the time of a later attempt.
fn later(after: Option<Duration>) -> String {
    after.map_or_else(|| "later".to_owned(), |wait| format!("in {} s", wait.as_secs()))
}

/// Says what to do about a connection that fails with `found`.
fn network_fix(found: &str) -> &'static str {
    if found.contains("certificate") || found.contains("UnknownIssuer") {
        "set SSL_CERT_FILE to the PEM file of the certificates that your network uses"
    } else {
        "check the network, HTTPS_PROXY and HF_ENDPOINT, then rerun the same command, which resumes"
    }
}
