//! Reading of experts fused in one tensor.

use super::files::ModelFiles;
use super::stacked::Stack;
use super::weight::Weight;
use crate::{Dtype, Result};

impl ModelFiles {
    /// Weight `[rows, cols]` of a fused expert: unquantized, or in MXFP4 ([`gpt_oss`](super::gpt_oss)). Reads only its
    /// part of the tensor.
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
        // The consecutive values of the weight, or of all projections of its expert.
        let all = stack.turns * rows * cols;
        let (first, count) = match stack.first(rows, cols) {
            Some(first) => (first, rows * cols),
            None => (stack.expert * all, all),
        };
        if !matches!(meta.dtype, Dtype::F16 | Dtype::BF16) {
            let values = self.checkpoint().read_elements_f32(name, first, count)?;
            crate::finite::require_finite(&values, self.path_of(name), name)?;
            let values = if count == all { stack.turned(&values, rows, cols) } else { values };
            return Ok(Weight::F32(values));
        }
        let mut bytes = vec![0; 2 * count];
        self.checkpoint().read_range(name, (2 * first) as u64, &mut bytes)?;
        self.expect_finite(name, meta.dtype, &bytes)?;
        let words: Vec<u16> = bytes.as_chunks::<2>().0.iter().map(|b| u16::from_le_bytes(*b)).collect();
        let words = if count == all { stack.turned(&words, rows, cols) } else { words };
        Ok(if meta.dtype == Dtype::F16 { Weight::F16(words) } else { Weight::Bf16(words) })
    }
}
