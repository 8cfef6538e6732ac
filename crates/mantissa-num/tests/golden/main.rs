//! Golden reference data: every case of these families, with the tolerance stated in the data's README.
//!
//! Runs on the committed subset, and on the whole set if `../shared/golden` exists beside the checkout.
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
