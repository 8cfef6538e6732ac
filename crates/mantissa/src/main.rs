//! `mantissa`: command-line tool to quantize LLMs, measure the loss, verify the files and run them.
//!
//! This crate holds flags, progress, reports and exit codes; the numerics are in the library crates.
//!
//! Exit codes: 0 done; 1 a quality gate failed; 2 bad input or usage; 3 environment (I/O, memory, disk) or
//! internal error; 130 and 143 after an orderly stop by SIGINT and SIGTERM.
#![forbid(unsafe_code)]

mod app;
mod columns;
mod commands;
mod context;
mod embedded;
mod error;
mod help;
mod interrupt;
mod machine;
mod memory;
mod notes;
mod output;
mod progress;
mod report;
mod table;
mod tensors;

use std::process::ExitCode;

// glibc's allocator needs no replacement.
#[cfg(target_env = "musl")]
#[global_allocator]
static ALLOCATOR: dlmalloc::GlobalDlmalloc = dlmalloc::GlobalDlmalloc;

fn main() -> ExitCode {
    app::main()
}
