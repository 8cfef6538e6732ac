//! Tests of the crate, as one program: they are linked once and run side by side.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

mod checkpoint;
mod commit;
#[path = "../common/mod.rs"]
mod common;
mod conventions;
mod group_int;
mod hostile_header;
mod kv_levels;
mod quantized;
mod round_trip;
