//! Post-training quantization methods: pure functions on matrices, one file or folder per paper, one value per method.
//!
//! GPTQ and GPTAQ are in [`gptq`], AWQ in [`awq`], SmoothQuant in [`smooth`], AutoRound in [`autoround`], RTN in [`rtn`] (with searched
//! clipping in [`clip`]), HQQ in [`hqq`], SpQR in [`spqr`], QTIP in [`qtip`], QuaRot in [`rotate`], SpinQuant in [`spin`], end-to-end
//! training of scales in [`e2e`].
//!
//! A method is a [`Method`] in [`METHODS`], a transform a [`Transform`] in [`TRANSFORMS`]. Recipes, memory estimates, coverage, reports
//! and help read the value. Steps to add one: ARCHITECTURE.md, "To add something".
#![forbid(unsafe_code)]

// Layer: errors and values.
pub mod dequantize;
mod error;
pub mod error_stats;
pub mod orthogonal;
pub mod source;

// Layer: traits of methods, and the solvers that others build on.
pub mod error_gate;
pub mod gptq;
pub mod method;
pub mod metric;
pub mod range;
pub mod reconstruction;
pub mod rtn;
pub mod solved;

// Layer: transforms.
pub mod awq;
pub mod rotate;
pub mod smooth;
pub mod spin;
pub mod transform;

// Layer: methods.
pub mod adaround;
pub mod autoround;
pub mod block_ap;
pub mod brecq;
pub mod clip;
pub mod e2e;
pub mod foem;
pub mod hqq;
pub mod learned;
pub mod omniquant;
pub mod qtip;
pub mod scalesweep;
pub mod soar;
pub mod spqr;

// Layer: their list.
pub mod registry;

#[cfg(test)]
mod testing;

pub use error::{BoxedError, MethodError};
pub use error_stats::{ErrorReport, ErrorStats};
pub use method::Method;
pub use registry::{METHODS, TRANSFORMS};
pub use solved::Solved;
pub use transform::Transform;
