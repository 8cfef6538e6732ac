//! Post-training quantization methods: pure functions on matrices, one file or folder per paper.
#![forbid(unsafe_code)]

pub mod autoround;
pub mod awq;
pub mod clip;
pub mod dequantize;
mod error;
pub mod error_stats;
pub mod gptq;
pub mod hqq;
pub mod judge;
pub mod method;
pub mod metric;
pub mod options;
pub mod orthogonal;
pub mod qtip;
pub mod registry;
pub mod rotate;
pub mod rtn;
pub mod smooth;
pub mod solved;
pub mod source;
pub mod spin;
pub mod spqr;
#[cfg(test)]
mod testing;
pub mod transform;

pub use error::{BoxedError, MethodError};
pub use error_stats::{ErrorReport, ErrorStats};
pub use method::Method;
pub use registry::{METHODS, TRANSFORMS};
pub use solved::Solved;
pub use transform::Transform;
