//! Tests of the crate, as one program: they are linked once and run side by side.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

mod adapters;
#[path = "../common/mod.rs"]
mod common;
mod model;
mod recurrent;
mod requests;
mod session;
mod sparse;
mod speculate;
