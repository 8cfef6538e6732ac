//! Grammars that a reply has to follow: JSON schemas, regular expressions, Lark and GBNF grammars, as constraints of
//! the runtime.
//!
//! The parser is the crate `llguidance`: a derivative-based lexer and an Earley parser over the trie of the
//! vocabulary. A grammar comes from a client, so its size, depth, complexity and compilation time are limited, and one
//! that cannot be used is an error: no reply is generated without the constraint that was asked for.

mod compiler;
mod constraint;
mod gbnf;
mod holder;
mod limits;
mod memory;
mod numbers;
mod process;
mod translate;
mod vocabulary;
mod wire;

use serde::{Deserialize, Serialize};
use serde_json::Value;

pub use self::compiler::Grammars;
pub(crate) use self::compiler::Wanted;
pub(crate) use self::constraint::Meter;
pub use self::holder::fork_server;
pub(crate) use self::limits::options as schema_options;
pub use self::process::Confinement;
pub use self::translate::translate;

/// Grammar of a reply.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Grammar {
    /// Any JSON object.
    JsonObject,
    /// JSON values that a schema accepts.
    JsonSchema(Value),
    /// Texts that match a regular expression as a whole.
    Regex(String),
    /// Grammar in the variant of Lark that llguidance defines.
    Lark(String),
    /// Grammar in GBNF, the format of llama.cpp.
    Gbnf(String),
}

impl Grammar {
    /// Grammar of replies that are one of `texts`.
    pub fn choice(texts: &[String]) -> Self {
        let literals: Vec<String> = texts.iter().map(|text| Value::from(text.as_str()).to_string()).collect();
        Grammar::Lark(format!("start: {}", literals.join(" | ")))
    }
}

/// Error of a grammar.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum GrammarError {
    /// The grammar is too large or nested too deep.
    #[error("expected {allowed}, got {found}")]
    Limit {
        /// Value found.
        found: String,
        /// Values supported.
        allowed: String,
    },
    /// The grammar is not valid, or uses an unsupported feature.
    #[error("expected a grammar that can be used, got: {0}")]
    Invalid(String),
    /// The vocabulary does not tell the text of its tokens.
    #[error("expected a tokenizer for constrained replies, got: {0}")]
    Tokenizer(String),
    /// The process that compiled the grammar refused it, with this message.
    #[error("{0}")]
    Refused(String),
    /// The grammar takes more than a process may.
    #[error(
        "expected a grammar that compiles within {seconds} s of processor time and {} MB of memory, got one that does not; fix: make it simpler",
        .bytes / 1_000_000
    )]
    Excess {
        /// Processor time in seconds.
        seconds: u64,
        /// Memory in bytes.
        bytes: u64,
    },
    /// The server has no memory for grammars.
    #[error(
        "expected a server with {} MB of memory for grammars, got {}; fix: raise its --memory",
        .needed / 1_000_000, .bytes / 1_000_000
    )]
    Memory {
        /// Memory in bytes.
        bytes: u64,
        /// Memory needed in bytes.
        needed: u64,
    },
    /// The process for grammars does not start or answer.
    #[error("the process for grammars failed: {0}")]
    Process(String),
    /// Too many grammars are being compiled.
    #[error("too many grammars are in use; fix: try again")]
    Busy,
    /// Nobody waits for the grammar any more.
    #[error("the request has ended")]
    Unwanted,
}

#[cfg(test)]
#[allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]
pub(crate) mod tests;
