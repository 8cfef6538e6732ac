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

pub mod adaround;
pub mod autoround;
pub mod awq;
pub mod block_ap;
pub mod brecq;
pub mod clip;
pub mod dequantize;
pub mod e2e;
mod error;
pub mod error_stats;
pub mod foem;
pub mod gptq;
pub mod hqq;
pub mod judge;
pub mod learned;
pub mod method;
pub mod metric;
pub mod omniquant;
pub mod options;
pub mod orthogonal;
pub mod qtip;
pub mod reconstruction;
pub mod registry;
pub mod rotate;
pub mod rtn;
pub mod scalesweep;
pub mod smooth;
pub mod soar;
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
