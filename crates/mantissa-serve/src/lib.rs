//! Serves models over HTTP, for clients of OpenAI's API.
//!
//! [`engine`] steps a model on a thread of its own and queues requests fairly; `text` turns tokens into text; `grammar`
//! constrains it, `reasoning` separates thoughts from it, and `tools` finds calls in it; `api` holds
//! the endpoints, a file per family; `http` accepts connections, with limits. No numerics: those are in
//! `mantissa-runtime`.
//!
//! Untrusted input: request bodies, headers and slow or vanishing clients. A request reaches no file; limits are checked
//! before anything is queued.
#![forbid(unsafe_code)]

mod api;
pub mod engine;
pub mod grammar;
mod http;
mod metrics;
mod options;
mod reasoning;
mod score;
mod shadow;
mod text;
pub mod tools;

pub use api::{Artifact, Render, RenderError};
pub use engine::{Engine, EngineOptions, Turns};
pub use http::{Cors, KeyError, Keys, Loaded, Server};
pub use options::{Limits, Options, Reasoning};
pub use shadow::ShadowOptions;
