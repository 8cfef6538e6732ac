//! Slots of the linear layers of one half of a decoder layer, whose operands are alive together.

/// Matmuls of one half of a layer whose operands are alive together
/// ([`LinearKind::slot`](mantissa_model::LinearKind::slot)).
pub(crate) const SLOTS: usize = 3;
