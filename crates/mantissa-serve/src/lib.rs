//! Serves models over HTTP, for clients of OpenAI's API.
//!
//! [`engine`] steps a model on a thread of its own; `fair` shares it, and all else that clients wait for; `text` turns tokens into text; `grammar`
//! constrains it, `reasoning` separates thoughts from it, and `tools` finds calls in it; `api` holds
//! the endpoints, a file per family; `http` accepts connections, with limits. No numerics: those are in
//! `mantissa-runtime`.
//!
//! Untrusted input: request bodies, headers and slow or vanishing clients. A request reaches no file; limits are checked
//! before anything is queued.
#![forbid(unsafe_code)]

// Layer: shares, processes and counters.
pub mod child;
mod fair;
mod metrics;

// Layer: grammars and settings.
pub mod grammar;
mod options;
pub mod tools;

// Layer: models at work.
mod artifact;
pub mod engine;
mod score;
mod shadow;

// Layer: replies and errors.
mod error;
mod reasoning;
mod text;

// Layer: HTTP.
mod api;
mod http;

pub use api::{Render, RenderError};
pub use artifact::Artifact;
pub use engine::{Engine, EngineOptions, Turns};
pub use http::{Cors, KeyError, Keys, Loaded, Server};
pub use options::{Limits, Options, Reasoning};
pub use shadow::ShadowOptions;
