//! `mantissa`: the precision of language models, on the command line.
//!
//! Flags, progress, reports and exit codes; the numbers come from the library crates.
//!
//! Exit codes: 0 done; 1 it ran and a quality gate failed; 2 bad input or usage; 3 the environment (I/O, memory, disk) or an
//! internal error; 130 and 143 after an orderly stop by SIGINT and SIGTERM.
#![forbid(unsafe_code)]

mod app;
mod commands;
mod embedded;
mod error;
mod interrupt;
mod machine;
mod memory;
mod output;
mod progress;
mod report;
mod tensors;

use std::process::ExitCode;

fn main() -> ExitCode {
    app::main()
}
