//! Post-training quantization methods: pure functions on matrices, one file or folder per paper, one value per method.
//!
//! GPTQ and GPTAQ are in [`gptq`], AWQ in [`awq`], SmoothQuant in [`smooth`], AutoRound in [`autoround`], RTN in [`rtn`] (with searched
//! clipping in [`clip`]), HQQ in [`hqq`], SpQR in [`spqr`], QTIP in [`qtip`], QuaRot in [`rotate`], SpinQuant in [`spin`], end-to-end
//! training of scales in [`e2e`].
//!
//! To add a method:
//! 1. Write one file with the functions of the paper, and a struct of its options that implements [`Method`] and the trait of its unit
//!    of work: [`SolveWeight`](method::SolveWeight) (no text) or [`SolveInput`](method::SolveInput) (from the Hessian of an input). A
//!    method that learns a decoder layer implements [`LearnsLayers`](learned::LearnsLayers) instead.
//! 2. Declare the file here, and add one row to [`METHODS`].
//! 3. Add a section to `docs/explain/methods.md`. Recipes, memory estimates, coverage, reports and help read the value.
//!
//! A transform is the same with [`Transform`] and [`TRANSFORMS`].
#![forbid(unsafe_code)]

// Layer: options, errors and values.
pub mod dequantize;
mod error;
pub mod error_stats;
pub mod options;
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
