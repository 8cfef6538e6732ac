//! Tests of the crate, as one program: they are linked once and run side by side.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

mod adapters;
mod common;
mod kv;
mod layers;
mod peers;
mod recurrent;
mod stacked;
mod tiny;
