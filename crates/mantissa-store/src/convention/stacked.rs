//! Experts stacked in one tensor, as in gpt-oss.

use super::files::ModelFiles;
use super::weight::Weight;
use crate::{Dtype, Result};

/// Place of one expert's weight `[rows, cols]` in the stacked tensor `[experts, cols, turns · rows]`: element (row,
/// col) is element `[expert, col, turns · row + turn]`. Its bias has the same place in `{tensor}_bias` `[experts,
/// turns · rows]`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Stack {
    /// Name of the tensor.
    pub tensor: String,
    /// Number of experts in it.
    pub experts: usize,
    /// Index of the expert.
    pub expert: usize,
    /// Number of projections interleaved in it: two if gate and up are fused.
    pub turns: usize,
    /// Index of the projection.
    pub turn: usize,
}

impl Stack {
    /// Shape of the dense stacked tensor.
    pub fn shape(&self, rows: usize, cols: usize) -> [usize; 3] {
        [self.experts, cols, self.turns * rows]
    }

    /// Extracts the expert's values from the whole tensor, as `[rows, cols]`.
    pub fn part_of<T: Copy>(&self, values: &[T], rows: usize, cols: usize) -> Vec<T> {
        let size = self.turns * rows * cols;
        self.turned(&values[self.expert * size..(self.expert + 1) * size], rows, cols)
    }

    /// Reorders `[cols, turns · rows]` values of the expert to `[rows, cols]`.
    fn turned<T: Copy>(&self, values: &[T], rows: usize, cols: usize) -> Vec<T> {
        let width = self.turns * rows;
        let at = |row: usize, col: usize| values[col * width + self.turns * row + self.turn];
        (0..rows)
            .flat_map(|row| (0..cols).map(move |col| (row, col)))
            .map(|(row, col)| at(row, col))
            .collect()
    }
}

impl ModelFiles {
    /// True if linear layer `module` has its own tensors, unquantized or quantized, in any format.
    pub fn has_linear(&self, module: &str) -> bool {
        let codes = self.opened().code_tensors().iter().map(|(codes, _)| *codes);
        codes.chain(["weight"]).any(|name| self.has(&format!("{module}.{name}")))
    }

    /// True if a tensor of this name is stored in floats of at least 16 bits: values, not codes.
    pub fn is_dense(&self, tensor: &str) -> bool {
        let dtype = self.checkpoint().get(tensor).map(|meta| meta.dtype);
        matches!(dtype, Some(Dtype::F64 | Dtype::F32 | Dtype::F16 | Dtype::BF16))
    }

    /// Weight `[rows, cols]` of a stacked expert: unquantized, or in MXFP4 ([`gpt_oss`](super::gpt_oss)). Reads only
    /// its part of the tensor.
    ///
    /// # Errors
    /// A tensor is missing, has another dtype or shape, or holds non-finite values.
    pub fn expert(&self, stack: &Stack, rows: usize, cols: usize) -> Result<Weight> {
        let quantized = self.opened().expert_tensors(&stack.tensor).is_some();
        if quantized && !self.has(&stack.tensor) {
            return self.opened().expert(self, stack, rows, cols).map(Weight::Quantized);
        }
        let name = &stack.tensor;
        let meta = self.meta(name)?;
        self.expect_shape(meta, &stack.shape(rows, cols))?;
        let size = stack.turns * rows * cols;
        if !matches!(meta.dtype, Dtype::F16 | Dtype::BF16) {
            let values = self.checkpoint().read_elements_f32(name, stack.expert * size, size)?;
            crate::finite::require_finite(&values, self.path_of(name), name)?;
            return Ok(Weight::F32(stack.turned(&values, rows, cols)));
        }
        let mut bytes = vec![0; 2 * size];
        self.checkpoint().read_range(name, (stack.expert * 2 * size) as u64, &mut bytes)?;
        self.expect_finite(name, meta.dtype, &bytes)?;
        let words: Vec<u16> = bytes.as_chunks::<2>().0.iter().map(|b| u16::from_le_bytes(*b)).collect();
        let words = stack.turned(&words, rows, cols);
        Ok(if meta.dtype == Dtype::F16 { Weight::F16(words) } else { Weight::Bf16(words) })
    }
}
