//! Post-training quantization methods: pure functions on matrices, one file or folder per paper.
#![forbid(unsafe_code)]

pub mod awq;
pub mod clip;
pub mod dequantize;
pub mod error_stats;
pub mod gptq;
pub mod hqq;
pub mod judge;
pub mod metric;
pub mod orthogonal;
pub mod qtip;
pub mod rtn;
pub mod smooth;
pub mod solved;
pub mod source;
pub mod spqr;
#[cfg(test)]
mod testing;

pub use error_stats::{ErrorReport, ErrorStats};
pub use solved::Solved;
