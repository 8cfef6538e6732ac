//! Operand dtype of the products of linear layers.

/// Rows of a weight per bf16 product.
pub(crate) const BF16_PANEL: usize = 1024;

/// Dtype that the operands of a linear layer's products are rounded to. Sums are f32.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Products {
    /// No rounding.
    #[default]
    F32,
    /// bf16 inputs and weights: 8 bits of mantissa, 0 below 2^-50. Faster on processors with AMX tiles; the same bits
    /// on all.
    Bf16,
}

impl Products {
    /// Name: `f32` or `bf16`.
    pub const fn name(self) -> &'static str {
        match self {
            Products::F32 => "f32",
            Products::Bf16 => "bf16",
        }
    }

    /// Bytes that [`Linear::forward`](crate::Linear::forward) of up to `cols` inputs takes for `tokens` tokens, not
    /// counting its scratch.
    pub const fn bytes_needed(self, tokens: usize, cols: usize) -> u64 {
        match self {
            Products::F32 => 0,
            Products::Bf16 => (2 * (tokens + BF16_PANEL + 2)) as u64 * cols as u64,
        }
    }
}
