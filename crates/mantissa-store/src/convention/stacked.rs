//! Experts fused in one tensor: as in gpt-oss, as transformers 5 holds them, and as in Llama 4.

use super::files::ModelFiles;
use super::weight::Weight;
use crate::{Dtype, Result};

/// Order of the values of experts that are fused in one tensor. `turns` projections of `rows` outputs and `cols` inputs
/// share it: two if gate and up are fused.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum StackForm {
    /// `[experts, cols, turns · rows]`, the projections interleaved: element (row, col) of projection `turn` is
    /// `[expert, col, turns · row + turn]` (gpt-oss).
    Interleaved,
    /// `[experts, turns · rows, cols]`, one projection after the other: element (row, col) of projection `turn` is
    /// `[expert, turn · rows + row, col]` (transformers 5, Qwen3.5, Gemma 4).
    Rows,
    /// `[experts, cols, turns · rows]`, one projection after the other: element (row, col) of projection `turn` is
    /// `[expert, col, turn · rows + row]` (Llama 4).
    Columns,
}

/// Place of one expert's weight `[rows, cols]` in a fused tensor. Its bias has the same place in `{tensor}_bias`
/// `[experts, turns · rows]`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Stack {
    /// Name of the tensor.
    pub tensor: String,
    /// Order of its values.
    pub form: StackForm,
    /// Number of experts in it.
    pub experts: usize,
    /// Index of the expert.
    pub expert: usize,
    /// Number of projections in it: two if gate and up are fused.
    pub turns: usize,
    /// Index of the projection.
    pub turn: usize,
}

impl StackForm {
    /// Shape of a fused tensor of `experts` experts with `turns` projections `[rows, cols]` each.
    pub fn shape(self, experts: usize, turns: usize, rows: usize, cols: usize) -> [usize; 3] {
        match self {
            StackForm::Rows => [experts, turns * rows, cols],
            StackForm::Interleaved | StackForm::Columns => [experts, cols, turns * rows],
        }
    }
}

impl Stack {
    /// Shape of the dense fused tensor.
    pub fn shape(&self, rows: usize, cols: usize) -> [usize; 3] {
        self.form.shape(self.experts, self.turns, rows, cols)
    }

    /// Extracts the expert's values from the whole tensor, as `[rows, cols]`.
    pub fn part_of<T: Copy>(&self, values: &[T], rows: usize, cols: usize) -> Vec<T> {
        let size = self.turns * rows * cols;
        self.turned(&values[self.expert * size..(self.expert + 1) * size], rows, cols)
    }

    /// Index of the first of the `rows · cols` consecutive values of the weight, in the order `[rows, cols]`; `None` if
    /// they are not consecutive.
    pub fn first(&self, rows: usize, cols: usize) -> Option<usize> {
        let first = (self.expert * self.turns + self.turn) * rows * cols;
        (self.form == StackForm::Rows).then_some(first)
    }

    /// Extracts the weight `[rows, cols]` from the values of all projections of its expert.
    fn turned<T: Copy>(&self, values: &[T], rows: usize, cols: usize) -> Vec<T> {
        let (width, turn) = (self.turns * rows, self.turn);
        let at = |row: usize, col: usize| match self.form {
            StackForm::Interleaved => values[col * width + self.turns * row + turn],
            StackForm::Rows => values[(turn * rows + row) * cols + col],
            StackForm::Columns => values[col * width + turn * rows + row],
        };
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
        // The consecutive values of the weight, or those of all projections of its expert.
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_form_gives_the_same_weights() {
        let (experts, turns, rows, cols) = (2, 2, 3, 4);
        let value = |e: usize, turn: usize, row: usize, col: usize| 1000 * e + 100 * turn + 10 * row + col;
        for form in [StackForm::Interleaved, StackForm::Rows, StackForm::Columns] {
            let shape = form.shape(experts, turns, rows, cols);
            let mut values = vec![0; shape.iter().product()];
            for (e, turn, row, col) in (0..experts * turns * rows * cols)
                .map(|i| (i / (turns * rows * cols), i / (rows * cols) % turns, i / cols % rows, i % cols))
            {
                let (at, long) = match form {
                    StackForm::Interleaved => (col, turns * row + turn),
                    StackForm::Rows => (turn * rows + row, col),
                    StackForm::Columns => (col, turn * rows + row),
                };
                values[(e * shape[1] + at) * shape[2] + long] = value(e, turn, row, col);
            }
            for (expert, turn) in [(0, 0), (0, 1), (1, 0), (1, 1)] {
                let stack = Stack { tensor: String::new(), form, experts, expert, turns, turn };
                let part = stack.part_of(&values, rows, cols);
                let expected = (0..rows * cols).map(|i| value(expert, turn, i / cols, i % cols));
                assert_eq!(part, expected.collect::<Vec<_>>(), "{form:?} {expert} {turn}");
                if let Some(first) = stack.first(rows, cols) {
                    assert_eq!(part, values[first..first + rows * cols]);
                }
            }
        }
    }
}
