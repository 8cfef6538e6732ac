//! Opens one linear layer in any checkpoint format.

use crate::reader::Reader;
use crate::tensors::Tensors;
use crate::weight::Weight;

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
