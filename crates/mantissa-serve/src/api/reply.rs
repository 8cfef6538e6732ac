//! Parts of a reply that all APIs share.

use crate::text::Times;

/// Tokens of a request.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Usage {
    /// Tokens of the prompt.
    pub(crate) prompt: usize,
    /// Tokens of the prompt that another request had.
    pub(crate) cached: usize,
    /// Generated tokens.
    pub(crate) new: usize,
    /// Generated tokens of thoughts.
    pub(crate) thought: usize,
    pub(crate) times: Times,
}

/// Reason for the end of a reply.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum End {
    /// An end token, or a complete grammar.
    Stop,
    /// This stop text.
    StopText(String),
    /// The largest number of tokens.
    Length,
}
