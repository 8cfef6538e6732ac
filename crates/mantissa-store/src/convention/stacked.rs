//! Experts fused in one tensor: as in gpt-oss, as transformers 5 holds them, and as in Llama 4.

use mantissa_arch::StackForm;

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
    pub(super) fn turned<T: Copy>(&self, values: &[T], rows: usize, cols: usize) -> Vec<T> {
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
