//! Decodes quantized weights a second time, from the format descriptions instead of the writers.
//!
//! The crate depends only on [`mantissa_num`], for code books, grids and trellis books. The value of each code is
//! computed once per tensor in f64. Codes are extracted from the bytes by their bit positions.
//!
//! - [`open()`] reads a weight of a checkpoint folder through [`Tensors`], which provides bytes with dtypes and shapes.
//! - [`open_stacked`] reads one expert of gpt-oss' stacked MXFP4.
//! - [`trellis::open`] reads QTIP and EXL3 weights, which have rotations around their codes.
//! - [`gguf`] reads GGUF files: container, block types and reordered rows.
#![forbid(unsafe_code)]

// Layer: tensors and elements.
mod elements;
mod tensors;

// Layer: readers.
pub mod gguf;
mod reader;

// Layer: parts of weights.
mod outliers;
mod scales;
pub mod trellis;

// Layer: weights.
mod weight;

// Layer: formats.
mod bitsandbytes;
mod compressed_tensors;
mod exl2;
mod fp8;
mod gpt_oss;
mod gptq;
mod hqq;
mod mlx;
mod modelopt;
mod native;
mod onnx;
mod quanto;

pub use gpt_oss::{Expert, open_stacked};
pub use tensors::{Fault, Tensor, Tensors, WordOrder, Words};
pub use weight::Weight;

use reader::Reader;

/// Reads the weight of linear layer `module` (`[rows, cols]`), to be decoded row by row.
///
/// # Errors
/// A missing tensor, or one with too few bytes; the errors of [`Tensors::read`].
pub fn open<T: Tensors + ?Sized>(
    tensors: &T,
    module: &str,
    rows: usize,
    cols: usize,
) -> Result<Weight, T::Error> {
    let reader = Reader { tensors, module, rows, cols };
    match tensors.convention() {
        "modelopt" => reader.modelopt(),
        "bitsandbytes" => reader.bitsandbytes(),
        "fp8" => reader.fp8_blocks(),
        "mlx" => reader.mlx(),
        "onnx" => reader.onnx(),
        "hqq" => reader.hqq(),
        "quanto" => reader.quanto(),
        // Other formats are told apart by the names of their tensors; some layers may be dense.
        _ if reader.has("weight.packed") => reader.native(),
        _ if reader.has("qweight") => reader.gptq(),
        _ if reader.has("q_weight") => reader.exl2(),
        _ => reader.compressed_tensors(),
    }
}
