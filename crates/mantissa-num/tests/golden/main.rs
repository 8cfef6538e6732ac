//! Golden reference data: every case of these families, with the tolerance that the data's README states.
//!
//! Runs on the committed subset, and on the whole set where `../shared/golden` stands beside the checkout.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

mod activations;
mod books;
mod elements;
mod fp8;
mod gguf;
mod hadamard;
mod ints;
mod kv;
mod mx;
mod nvfp4;
mod stochastic;
mod support;
