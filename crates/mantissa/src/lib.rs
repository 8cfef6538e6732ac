//! `mantissa`: command-line tool to quantize LLMs, measure the loss, verify the files and run them.
//!
//! The program is [`main`]; another program, such as an interpreter, calls single commands ([`call`]). This crate holds flags, progress, reports and exit codes; the numerics are in the library crates.
//!
//! Exit codes: 0 done; 1 a quality gate failed; 2 bad input or usage; 3 environment (I/O, memory, disk) or
//! internal error; 130 and 143 after an orderly stop by SIGINT and SIGTERM.
#![forbid(unsafe_code)]

// Layer: text, tables and the machine.
mod columns;
mod help;
mod table;
mod terminal;

// Layer: errors, signals and output.
mod error;
mod interrupt;
mod output;
mod program;

// Layer: progress, pages and what commands share.
mod context;
mod progress;
mod report;

// Layer: commands.
mod commands;

// Layer: usage errors.
mod foreign;
mod usage;

// Layer: the command line.
mod app;

pub use app::{Failed, call, main, main_with};
pub use commands::chat_renderer;
pub use error::Exit;
pub use program::starts_with;
