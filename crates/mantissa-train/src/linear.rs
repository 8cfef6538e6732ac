//! Linear layer in training: the places of its parameters, and the operand dtypes of its policy.

mod matmul;

use std::ops::Range;

use crate::error::TrainError;
use crate::form::LinearRules;
use crate::policy::{Gemm, GemmPolicy, LinearPolicy};
use crate::store::Precision;

/// Linear layer. Its weight `[rows, cols]` = `[out, in]` and bias `[rows]` lie in an arena.
#[derive(Clone, Debug)]
pub(crate) struct LinearOp {
    weight: Range<usize>,
    bias: Option<Range<usize>>,
    /// Learned scales of the weight.
    scales: Option<Range<usize>>,
    rows: usize,
    cols: usize,
    operands: Operands,
    /// Rules of quantized operands; `None` if all are plain float dtypes.
    rules: Option<Box<LinearRules>>,
    /// Index of a packed frozen weight, which has no range in the arenas.
    packed: Option<usize>,
    adapter: Option<Box<AdapterOp>>,
    /// Number of linear layers of the decoder before it.
    place: usize,
}

/// Left and right operand dtype of each matmul.
#[derive(Clone, Copy, Debug)]
struct Operands {
    fprop: (Precision, Precision),
    dgrad: (Precision, Precision),
    wgrad: (Precision, Precision),
}

impl LinearOp {
    /// Makes the operator for a weight and bias at these ranges of the arenas. `module` is its name in
    /// errors.
    ///
    /// # Errors
    /// [`TrainError::Policy`] for a scheme that cannot hold the operand.
    ///
    /// # Panics
    /// If the ranges do not match the shape.
    pub(crate) fn new(
        module: &str,
        (rows, cols): (usize, usize),
        weight: Range<usize>,
        bias: Option<Range<usize>>,
        policy: &LinearPolicy,
    ) -> Result<Self, TrainError> {
        assert!(
            (weight.len() == rows * cols || weight.is_empty())
                && bias.as_ref().is_none_or(|bias| bias.len() == rows),
            "linear {module}: not the places of a weight [{rows}, {cols}]"
        );
        let of = |gemm: &GemmPolicy| gemm.precisions().unwrap_or_default();
        let operands =
            Operands { fprop: of(&policy.fprop), dgrad: of(&policy.dgrad), wgrad: of(&policy.wgrad) };
        let rules = if policy.is_plain() {
            None
        } else {
            LinearRules::check(policy, module, (rows, cols))?;
            Some(Box::new(LinearRules::new(policy)))
        };
        let (scales, packed, adapter, place) = (None, None, None, 0);
        Ok(LinearOp { weight, bias, scales, rows, cols, operands, rules, packed, adapter, place })
    }

    /// Takes the packed frozen weight with this index, and an adapter.
    pub(crate) fn tuned(self, packed: Option<usize>, adapter: Option<AdapterOp>) -> Self {
        LinearOp { packed, adapter: adapter.map(Box::new), ..self }
    }

    /// Returns the index of its packed frozen weight.
    pub(crate) fn packed(&self) -> Option<usize> {
        self.packed
    }

    /// Returns its adapter.
    pub(crate) fn adapter(&self) -> Option<&AdapterOp> {
        self.adapter.as_deref()
    }

    /// Sets its place among the linear layers of the decoder, by which random numbers and histories are kept.
    pub(crate) fn at_place(self, place: usize) -> Self {
        LinearOp { place, ..self }
    }

    /// Takes the place of the learned scales of its weight, if it has any.
    pub(crate) fn with_scales(self, scales: Option<Range<usize>>) -> Self {
        LinearOp { scales, ..self }
    }

    /// Returns the place of the learned scales of its weight.
    pub(crate) fn scales(&self) -> Option<&Range<usize>> {
        self.scales.as_ref()
    }

    /// Returns the number of linear layers of the decoder before it.
    pub(crate) fn place(&self) -> usize {
        self.place
    }

    /// Number of input features.
    pub(crate) fn cols(&self) -> usize {
        self.cols
    }

    /// Number of output features.
    pub(crate) fn rows(&self) -> usize {
        self.rows
    }

    /// Returns the operand dtypes of a matmul without quantized operands.
    pub(crate) fn precisions(&self, gemm: Gemm) -> (Precision, Precision) {
        match gemm {
            Gemm::Fprop => self.operands.fprop,
            Gemm::Dgrad => self.operands.dgrad,
            Gemm::Wgrad => self.operands.wgrad,
        }
    }

    /// Returns the same layer with the operands of `policy`.
    ///
    /// # Errors
    /// As [`new`](Self::new).
    pub(crate) fn with_policy(&self, policy: &LinearPolicy) -> Result<Self, TrainError> {
        LinearOp::new("", (self.rows, self.cols), self.weight.clone(), self.bias.clone(), policy)
    }

    /// Replaces the rules of its operands, with which all of them become quantized operands.
    pub(crate) fn set_rules(&mut self, rules: LinearRules) {
        self.rules = Some(Box::new(rules));
    }

    /// Returns the rules of quantized operands.
    pub(crate) fn rules(&self) -> Option<&LinearRules> {
        self.rules.as_deref()
    }

    /// Passes the layer without its bias to `run`.
    pub(crate) fn without_bias(&self, run: impl FnOnce(&LinearOp)) {
        let LinearOp { weight, rows, cols, operands, packed, place, .. } = self.clone();
        run(&LinearOp {
            weight,
            bias: None,
            scales: None,
            rows,
            cols,
            operands,
            rules: None,
            packed,
            adapter: None,
            place,
        });
    }

    /// True if it has a bias.
    pub(crate) fn has_bias(&self) -> bool {
        self.bias.is_some()
    }

    /// Returns the range of the weight in the arenas.
    pub(crate) fn weight(&self) -> Range<usize> {
        self.weight.clone()
    }
}

/// Adapter of a linear layer.
#[derive(Clone, Debug)]
pub(crate) struct AdapterOp {
    /// Number among all adapters.
    pub(crate) index: usize,
    /// A, `[rank, in]`.
    pub(crate) a: LinearOp,
    /// B, `[out, rank]`.
    pub(crate) b: LinearOp,
    /// DoRA's magnitudes, `[out]`.
    pub(crate) magnitude: Option<Range<usize>>,
    /// Factor of `B A`.
    pub(crate) scale: f32,
    /// Share of the inputs set to 0 in training.
    pub(crate) dropout: f64,
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;
    use crate::policy::OperandPolicy;

    #[test]
    fn operands_that_cannot_be_had_are_named() {
        for (scheme, expected) in [
            ("q8_0", "blocks of 32"),
            ("fp8-e4m3-tensor@static", "no calibrated scales"),
            ("nf4", "flat blocks would mix tokens"),
        ] {
            let mut policy = LinearPolicy::f32();
            policy.wgrad.left = OperandPolicy::new(scheme.parse().unwrap());
            let error = LinearOp::new("model.q", (2, 3), 0..6, None, &policy).unwrap_err().to_string();
            assert!(
                error.contains("model.q") && error.contains("wgrad.dy") && error.contains(expected),
                "{error}"
            );
        }
    }
}
