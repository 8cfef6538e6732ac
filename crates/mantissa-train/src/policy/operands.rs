//! Operands of a linear layer's three matmuls: scheme, rounding, source and rotation of each.
//!
//! Every operand is a matrix `[lines, k]` whose rows run along the contraction axis, and the blocks of its scheme
//! lie along k: `token` or `channel` is a scale per line, `g32` are 32 values of a line, `t1x128` too, `t128x128` are
//! 128 lines by 128 values. So X is `[tokens, in]` in fprop and `[in, tokens]` in wgrad, dY `[tokens, out]` in dgrad
//! and `[out, tokens]` in wgrad, W `[out, in]` in fprop and `[in, out]` in dgrad.

use mantissa_num::{Accumulator, Blocks, Code, Format, Rounding, Rule, ScaleFloor, Scheme};

use crate::store::Precision;

/// Values from which an operand of the backward is rounded.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum OperandSource {
    /// Values in full precision.
    #[default]
    Exact,
    /// Values as the forward's matmul saw them. With scheme `f32` this is the straight-through estimator (Bengio et
    /// al. 2013, arXiv 1308.3432).
    Forward,
}

/// Operand of a matmul.
#[derive(Clone, Debug, PartialEq)]
pub struct OperandPolicy {
    /// Scheme, with its rounding and the source of its scales.
    pub scheme: Scheme,
    /// Values that are rounded.
    pub source: OperandSource,
    /// Factor by which scales exceed what the rule gives, so that stochastic rounding clips nothing: 17/16 covers the
    /// error of an E4M3 scale rounded down, 4/3 the range that an exponent rounded down cuts off FP4. 1 for none.
    pub headroom: f32,
    /// Choice of the block scales.
    pub scales: ScaleChoice,
    /// True if gradients of values that the forward clips are 0, not passed on: of those whose magnitude under the
    /// scale reaches the largest element.
    pub mask: bool,
}

/// Choice of block scales.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum ScaleChoice {
    /// By the scheme's rule.
    #[default]
    Rule,
    /// By the scheme's rule, rounded up to powers of two.
    PowerOfTwo,
    /// The power of two at or below `2.92247856 / 6 · deviation + 1e-8`, for the standard deviation of the block: the
    /// scale of least squared error of a normal distribution in E2M1 (Castro et al. 2025, "Quartet", arXiv 2505.14669).
    Deviation,
    /// NVFP4 by MS-EDEN: elements to nearest, scales corrected for the whole run of the rotation and rounded
    /// stochastically (Panferov et al. 2026, "Quartet II", arXiv 2601.22813).
    Eden,
    /// Parameters that the optimizer trains, one per block: learned step size (Esser et al. 2020, arXiv 1902.08153).
    Learned,
}

impl OperandPolicy {
    /// Rounds to `scheme` from full precision.
    pub fn new(mut scheme: Scheme) -> Self {
        if scheme.encoder.rule == Rule::Restricted {
            scheme.encoder.floor = ScaleFloor::Training;
        }
        OperandPolicy {
            scheme,
            source: OperandSource::Exact,
            headroom: 1.0,
            scales: ScaleChoice::Rule,
            mask: false,
        }
    }

    /// Uses a plain float dtype, rounded to nearest.
    pub fn plain(precision: Precision) -> Self {
        Self::new(precision.scheme())
    }

    /// Returns the dtype of an operand that is only cast to it, to nearest.
    pub(crate) fn precision(&self) -> Option<Precision> {
        let cast =
            self.scheme.encoder.rounding == Rounding::NearestEven && self.source == OperandSource::Exact;
        Precision::of(&self.scheme.format).filter(|_| cast && self.headroom == 1.0)
    }

    /// True if values are rounded to one of their neighbours at random.
    pub fn is_stochastic(&self) -> bool {
        matches!(self.scheme.encoder.rounding, Rounding::Stochastic { .. })
    }

    /// True if the scheme is FP4 in blocks of one line with power-of-two scales.
    pub(crate) fn takes_deviations(&self) -> bool {
        let Format::Affine(affine) = &self.scheme.format else { return false };
        let power = affine.scale.as_ref().is_some_and(|tree| tree.code == Code::E8m0);
        power
            && affine.code == Code::Float(mantissa_num::minifloat::E2M1)
            && matches!(affine.blocks, Blocks::Group(_))
    }

    /// True if the scheme is NVFP4 whose largest block scale is 256, which leaves room for a correction.
    pub(crate) fn takes_eden(&self) -> bool {
        self.scheme.encoder.rule == Rule::FourOverSix && !self.is_stochastic()
    }
}

/// Signs of a random Hadamard transform.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Signs {
    /// All positive.
    Plain,
    /// The fixed 16 signs of Transformer Engine.
    TransformerEngine,
    /// Drawn anew in every step for every linear layer.
    Step,
}

/// Hadamard transform of both operands of a matmul along the contraction axis, run by run. The product is the same,
/// the operands are easier to quantize. Values after the last whole run stay as they are.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Rotation {
    /// Length of a run, a power of two.
    pub order: usize,
    /// Signs before the transform.
    pub signs: Signs,
}

/// Matmul of a linear layer.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(crate) enum Gemm {
    Fprop,
    Dgrad,
    Wgrad,
}

/// Operand of a matmul.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(crate) enum Side {
    Left,
    Right,
}

/// Operands of one matmul.
#[derive(Clone, Debug, PartialEq)]
pub struct GemmPolicy {
    /// `X` of fprop, `dY` of dgrad and wgrad.
    pub left: OperandPolicy,
    /// `W` of fprop and dgrad, `X` of wgrad.
    pub right: OperandPolicy,
    /// Rotation of both.
    pub rotation: Option<Rotation>,
    /// Accumulator of the sums; other than f32 it is emulated, for 8-bit floats.
    pub accumulator: Accumulator,
}

impl GemmPolicy {
    /// Uses one float dtype for both operands.
    pub fn plain(precision: Precision) -> Self {
        let operand = || OperandPolicy::plain(precision);
        GemmPolicy { left: operand(), right: operand(), rotation: None, accumulator: Accumulator::F32 }
    }

    /// Dtypes of operands that are only cast to nearest.
    pub(crate) fn precisions(&self) -> Option<(Precision, Precision)> {
        let both = self.left.precision().zip(self.right.precision());
        both.filter(|_| self.rotation.is_none() && self.accumulator == Accumulator::F32)
    }
}

/// Operands of a linear layer's matmuls.
#[derive(Clone, Debug, PartialEq)]
pub struct LinearPolicy {
    /// `Y = X Wᵀ`.
    pub fprop: GemmPolicy,
    /// `dX = dY W`.
    pub dgrad: GemmPolicy,
    /// `dW = dYᵀ X`.
    pub wgrad: GemmPolicy,
}

impl LinearPolicy {
    /// Uses f32 for all operands.
    pub fn f32() -> Self {
        Self::plain(Precision::F32)
    }

    /// Uses one float dtype for all operands.
    pub fn plain(precision: Precision) -> Self {
        let product = || GemmPolicy::plain(precision);
        LinearPolicy { fprop: product(), dgrad: product(), wgrad: product() }
    }

    /// True if every operand is only cast to a float dtype, to nearest.
    pub fn is_plain(&self) -> bool {
        [&self.fprop, &self.dgrad, &self.wgrad].iter().all(|gemm| gemm.precisions().is_some())
    }

    /// Returns the dtype to which `X` is rounded once for fprop and wgrad; f32 if the two differ, so that
    /// each rounds by itself.
    pub(crate) fn shared_input(&self) -> Precision {
        // Forms are made from the exact values.
        if self.is_plain() { shared(&self.fprop.left, &self.wgrad.right) } else { Precision::F32 }
    }

    /// Returns the dtype to which `dY` is rounded once for dgrad and wgrad, as
    /// [`shared_input`](Self::shared_input).
    pub(crate) fn shared_gradient(&self) -> Precision {
        shared(&self.dgrad.left, &self.wgrad.left)
    }

    /// True if no matmul rounds or widens by itself: all operands are shared, and weights are multiplied in
    /// storage precision.
    pub(crate) fn shares_all(&self, weights: Precision) -> bool {
        let (x, dy) = (self.shared_input(), self.shared_gradient());
        let stored = [x, weights, dy, weights, dy, x];
        let as_stored =
            |((_, operand), stored): ((_, &OperandPolicy), _)| operand.precision() == Some(stored);
        x == weights && dy == weights && self.operands().into_iter().zip(stored).all(as_stored)
    }

    /// Returns every operand with its name in settings.
    pub(crate) fn operands(&self) -> [(&'static str, &OperandPolicy); 6] {
        [
            ("fprop.x", &self.fprop.left),
            ("fprop.w", &self.fprop.right),
            ("dgrad.dy", &self.dgrad.left),
            ("dgrad.w", &self.dgrad.right),
            ("wgrad.dy", &self.wgrad.left),
            ("wgrad.x", &self.wgrad.right),
        ]
    }
}

/// Returns the common precision of both operands; f32 if they differ.
fn shared(a: &OperandPolicy, b: &OperandPolicy) -> Precision {
    a.precision().filter(|precision| b.precision() == Some(*precision)).unwrap_or_default()
}
