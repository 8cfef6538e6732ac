//! Error of rendering a conversation.

/// Error of rendering a conversation. The template or the conversation is at fault in every case.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum ChatError {
    /// The template is too large or nested too deep.
    #[error("expected {allowed}, got {found}")]
    Limit {
        /// Value found.
        found: String,
        /// Values supported.
        allowed: String,
    },
    /// The template is not valid Jinja, or uses an unsupported feature.
    #[error("line {line}: expected a Jinja chat template without includes, got `{message}`")]
    Template {
        /// Line in the template, from 1.
        line: usize,
        /// Message of the template engine.
        message: String,
    },
    /// The template refuses the conversation.
    #[error("expected a conversation that the template accepts, got: {0}")]
    Refused(String),
    /// No thread could be started.
    #[error("expected a thread to render in, got: {0}")]
    Thread(String),
}
