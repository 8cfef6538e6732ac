//! Forms of tensors that hold all experts of a layer: as in gpt-oss, as transformers 5 holds them, and as in Llama 4.

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

impl StackForm {
    /// Shape of a fused tensor of `experts` experts with `turns` projections `[rows, cols]` each.
    pub fn shape(self, experts: usize, turns: usize, rows: usize, cols: usize) -> [usize; 3] {
        match self {
            StackForm::Rows => [experts, turns * rows, cols],
            StackForm::Interleaved | StackForm::Columns => [experts, cols, turns * rows],
        }
    }
}
