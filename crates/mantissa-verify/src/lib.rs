//! Decodes quantized weights a second time, from the format descriptions instead of the writers.
//!
//! The crate depends only on [`mantissa_num`], for code books, grids and trellis books. The value of each code is
//! computed once per tensor in f64. Codes are extracted from the bytes by their bit positions.
//!
//! - [`open`] reads a weight of a checkpoint folder through [`Tensors`], which provides bytes with dtypes and shapes.
//! - [`open_stacked`] reads one expert of gpt-oss' stacked MXFP4.
//! - [`trellis::open`] reads QTIP and EXL3 weights, which have rotations around their codes.
//! - [`gguf`] reads GGUF files: container, block types and reordered rows.
#![forbid(unsafe_code)]

mod bitsandbytes;
mod compressed_tensors;
mod elements;
mod exl2;
mod fp8;
pub mod gguf;
mod gpt_oss;
mod gptq;
mod hqq;
mod mlx;
mod modelopt;
mod native;
mod onnx;
mod open;
mod outliers;
mod quanto;
mod reader;
mod scales;
mod tensors;
pub mod trellis;
mod weight;

pub use gpt_oss::{Expert, open_stacked};
pub use open::open;
pub use tensors::{Fault, Tensor, Tensors, WordOrder, Words};
pub use weight::Weight;
