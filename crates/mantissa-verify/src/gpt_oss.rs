//! Experts that gpt-oss stores stacked in MXFP4, by the description of its layout.

use crate::elements::{float_values, power_of_two};
use crate::scales::Scales;
use crate::tensors::{Fault, Tensors};
use crate::weight::Weight;

/// Elements that share a scale.
const GROUP: usize = 32;

/// One expert of a stack; the projections of an expert are interleaved row by row.
#[derive(Clone, Copy, Debug)]
pub struct Expert<'a> {
    /// Name of the stacked tensor, without `_blocks` and `_scales`.
    pub tensor: &'a str,
    /// Number of experts.
    pub experts: usize,
    /// Index of this expert.
    pub expert: usize,
    /// Number of interleaved projections.
    pub turns: usize,
    /// Index of this projection.
    pub turn: usize,
}

/// Reads the weight `[rows, cols]` of an expert, to be decoded row by row.
///
/// # Errors
/// A missing tensor, or one of another size.
pub fn open_stacked<T: Tensors + ?Sized>(
    tensors: &T,
    stack: &Expert<'_>,
    rows: usize,
    cols: usize,
) -> Result<Weight, T::Error> {
    let groups = cols / GROUP;
    // Row r of the expert's projection among all rows of all experts.
    let part = |suffix: &str, row_bytes: usize| -> Result<Vec<u8>, T::Error> {
        let name = format!("{}_{suffix}", stack.tensor);
        let Some(tensor) = tensors.tensor(&name) else {
            return Err(tensors.error(Fault::Missing { tensor: name }));
        };
        let expected = stack.experts * stack.turns * rows * row_bytes;
        if !matches!(tensor.dtype, "U8" | "F8_E8M0") || tensor.bytes != expected as u64 {
            let got = format!("{} bytes of {}", tensor.bytes, tensor.dtype);
            return Err(tensors.error(Fault::Wrong {
                tensor: name,
                expected: format!("{expected} bytes"),
                got,
            }));
        }
        let mut out = vec![0; rows * row_bytes];
        for (r, out) in out.chunks_exact_mut(row_bytes.max(1)).enumerate() {
            let row = (stack.expert * rows + r) * stack.turns + stack.turn;
            tensors.read(&name, (row * row_bytes) as u64, out)?;
        }
        Ok(out)
    };
    let (codes, scales) = (part("blocks", groups * GROUP / 2)?, part("scales", groups)?);
    let values = scales.into_iter().map(power_of_two).collect();
    let scales = Scales { values, down: rows, across: groups, side: (1, GROUP), flat: None };
    Ok(Weight { scales: Some(scales), ..Weight::new(cols, codes, 4, 8, float_values(2, 1, 1)) })
}
