//! Nothing is lost: every command that writes, killed, failed and starved at each change that it makes to the disk, and beside a
//! twin of itself.
//!
//! The commands are the rows of [`table`]; [`harness`] runs a row under faults and says what must hold after each. Faults come from
//! the environment (`MANTISSA_FAULT`), and the numbers of the changes from a run that is traced (`MANTISSA_TRACE`); see
//! `crates/mantissa-store/src/failpoint.rs`. [`power`] cuts the power at every fsync.
//!
//! `cargo test --profile ci -p mantissa --test faults -- --nocapture` prints tries and failures for each command and fault.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

mod completeness;
mod harness;
mod power;
mod rows;
#[path = "../cli/support.rs"]
#[allow(dead_code)]
mod support;
mod tree;
mod twin;
