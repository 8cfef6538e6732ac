//! Precision of the products of a linear layer, as data.
//!
//! A linear layer has three products: `fprop` `Y = X Wᵀ`, `dgrad` `dX = dY W` and `wgrad` `dW = dYᵀ X`. For each, a
//! policy names how its two operands are stored when they are multiplied. [`LinearOp`](crate::LinearOp) is the only
//! reader.

use mantissa_num::{Code, Scheme};

/// How the operands of one product are stored.
#[derive(Clone, Debug, PartialEq)]
pub struct GemmPolicy {
    /// `X` of fprop, `dY` of dgrad and wgrad.
    pub left: Scheme,
    /// `W` of fprop and dgrad, `X` of wgrad.
    pub right: Scheme,
}

/// How the operands of a linear layer's products are stored.
#[derive(Clone, Debug, PartialEq)]
pub struct LinearPolicy {
    /// `Y = X Wᵀ`.
    pub fprop: GemmPolicy,
    /// `dX = dY W`.
    pub dgrad: GemmPolicy,
    /// `dW = dYᵀ X`.
    pub wgrad: GemmPolicy,
}

impl GemmPolicy {
    /// Both operands f32.
    pub fn f32() -> Self {
        GemmPolicy { left: Scheme::plain(Code::F32), right: Scheme::plain(Code::F32) }
    }
}

impl LinearPolicy {
    /// All operands f32.
    pub fn f32() -> Self {
        LinearPolicy { fprop: GemmPolicy::f32(), dgrad: GemmPolicy::f32(), wgrad: GemmPolicy::f32() }
    }

    /// Every operand with its name.
    pub(crate) fn operands(&self) -> [(&'static str, &Scheme); 6] {
        [
            ("fprop.left", &self.fprop.left),
            ("fprop.right", &self.fprop.right),
            ("dgrad.left", &self.dgrad.left),
            ("dgrad.right", &self.dgrad.right),
            ("wgrad.left", &self.wgrad.left),
            ("wgrad.right", &self.wgrad.right),
        ]
    }
}

impl Default for LinearPolicy {
    fn default() -> Self {
        Self::f32()
    }
}
