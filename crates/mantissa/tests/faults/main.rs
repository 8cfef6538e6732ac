//! Fault injection: every writing command is killed, failed and starved of disk space at each change it makes
//! to the disk, and run next to a second process of itself. Nothing may be lost.
//!
//! Commands are the rows of [`table`]; [`harness`] runs a row under faults and checks the result. Faults are
//! set through the environment (`MANTISSA_FAULT`), with change numbers from a traced run (`MANTISSA_TRACE`);
//! see `crates/mantissa-store/src/failpoint.rs`. [`power`] simulates a power cut at every fsync.
//!
//! `cargo test --profile ci -p mantissa --test faults -- --nocapture` prints tries and failures per command
//! and fault.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

mod completeness;
mod harness;
mod nested;
mod power;
mod rows;
#[path = "../cli/support.rs"]
#[allow(dead_code)]
mod support;
mod tree;
mod twin;
