//! Program `mantissa`.
#![forbid(unsafe_code)]

use std::process::ExitCode;

// glibc's allocator needs no replacement.
#[cfg(target_env = "musl")]
#[global_allocator]
static ALLOCATOR: dlmalloc::GlobalDlmalloc = dlmalloc::GlobalDlmalloc;

fn main() -> ExitCode {
    mantissa::main()
}
