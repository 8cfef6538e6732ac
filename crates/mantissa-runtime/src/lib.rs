//! Models over time, at the machine's limit: the *fast* contract of a model.
//!
//! Weights are prepared (repacked) once ([`prepared`]); keys and values live in a paged cache in any scheme
//! ([`cache`]). The computation of a layer is [`mantissa_model::flow::LayerFlow`], as in the reference decoder, so an
//! architecture that runs there runs here.
//!
//! Bits do not depend on the number of threads, and a sequence has the same bits alone and in a batch. They may differ
//! from the reference decoder, whose linear layers are dense f32 products.
#![forbid(unsafe_code)]

// Layer: weights and caches.
pub mod cache;
mod fair;
pub mod prepared;

// Layer: a model and the caches of its sequences.
mod kv;
pub mod model;

// Layer: sequences over time.
pub mod session;
pub mod speculate;

// Layer: measurements.
pub mod footprint;
pub mod measure;

pub use fair::Tags;
pub use model::{Caches, FastBuffers, FastModel};
pub use session::{
    CacheUse, Constraint, ConstraintError, Detached, Event, EventKind, Offer, Phase, Pooling, Request,
    Runtime, RuntimeOptions, SequenceId, SequenceState, Single, TokenMask, Verdict,
};
pub use speculate::{Proposals, Speculation};
