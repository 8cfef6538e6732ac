//! What the products of linear layers are made of.

/// Rows of a weight that are multiplied at a time as bf16.
pub(crate) const BF16_PANEL: usize = 1024;

/// What the factors of a linear layer's products are rounded to. Sums are f32 either way.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Products {
    /// Nothing.
    #[default]
    F32,
    /// bf16, inputs and weights: 8 bits of mantissa, 0 below 2^-50. Faster where the processor has AMX tiles, and the same bits
    /// where it has none.
    Bf16,
}

impl Products {
    /// `f32` or `bf16`.
    pub const fn name(self) -> &'static str {
        match self {
            Products::F32 => "f32",
            Products::Bf16 => "bf16",
        }
    }

    /// Bytes that [`Linear::forward`](crate::Linear::forward) of up to `cols` inputs takes for `tokens` tokens beside its scratch.
    pub const fn bytes_needed(self, tokens: usize, cols: usize) -> u64 {
        match self {
            Products::F32 => 0,
            Products::Bf16 => (2 * (tokens + BF16_PANEL + 2)) as u64 * cols as u64,
        }
    }
}
