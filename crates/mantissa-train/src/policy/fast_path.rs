//! Fast path of rounding: which schemes the vectorised loops round, and what a matmul takes out of their values.

use mantissa_kernels::ElementGrid;
use mantissa_num::{Affine, Blocks, Code, Format, Offset, Rounding, Rule, ScaleTree, Scheme};

use super::operands::{GemmPolicy, OperandPolicy};

/// Place of the scales that are taken out of the rounded values and multiply the product instead.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Factors {
    /// One for the tensor.
    Tensor,
    /// One for each line.
    Line,
    /// None but the tensor-wide scale: a block's own scale has few bits, so that its values still fit bf16.
    Block,
    /// None: f32 values.
    None,
}

impl Factors {
    /// Returns the place for a scheme with the fast path; `None` without.
    pub(crate) fn of(scheme: &Scheme) -> Option<Self> {
        let (affine, _) = fast_path(scheme)?;
        let tree = affine.scale.as_ref()?;
        Some(match affine.blocks {
            Blocks::Tensor => Factors::Tensor,
            Blocks::Row => Factors::Line,
            _ if has_few_bits(tree) => Factors::Block,
            _ => Factors::None,
        })
    }

    /// True if bf16 holds the values without these factors.
    pub(crate) fn fit_bf16(self) -> bool {
        self != Factors::None
    }
}

impl OperandPolicy {
    /// True if vectorised loops round the scheme, whose scales can then be changed.
    pub(crate) fn has_fast_path(&self) -> bool {
        Factors::of(&self.scheme).is_some()
    }

    /// True if all values of the rounded operand fit bf16 once a factor per line and one of the tensor are taken off.
    pub(crate) fn fits_bf16(&self) -> bool {
        let Format::Affine(affine) = &self.scheme.format else { return false };
        match (affine.code, &affine.scale) {
            (Code::Float(float), None) => float == mantissa_num::minifloat::BF16,
            _ => Factors::of(&self.scheme).is_some_and(Factors::fit_bf16),
        }
    }
}

/// True if the product of element and block scale fits bf16: E8M0, or E4M3 under a scale of the tensor that is
/// multiplied last.
fn has_few_bits(tree: &ScaleTree) -> bool {
    use mantissa_num::Sense;
    match tree.code {
        Code::E8m0 => true,
        Code::Float(float) if float.bits() <= 8 => {
            tree.tensor_wide().is_none_or(|outer| matches!(outer.sense, Sense::Amax { .. }))
        }
        _ => false,
    }
}

/// Returns format and grid of a scheme that the vectorised loops round.
pub(crate) fn fast_path(scheme: &Scheme) -> Option<(&Affine, ElementGrid)> {
    let Format::Affine(affine) = &scheme.format else { return None };
    let tree = affine.scale.as_ref()?;
    let rounding = scheme.encoder.rounding;
    // Four-over-six weighs the error of its candidates under the rounding itself.
    let drawn = matches!(rounding, Rounding::Stochastic { .. }) && scheme.encoder.rule != Rule::FourOverSix;
    let known = (rounding == Rounding::NearestEven || drawn)
        && affine.offset == Offset::None
        && tree.nested().is_none()
        && !matches!(affine.blocks, Blocks::Flat(_))
        && !matches!(scheme.encoder.rule, Rule::DeepGemm);
    let grid = match affine.code {
        Code::Int(bits) => {
            let (low, high) = int_range(scheme, bits);
            ElementGrid::int(low, high)
        }
        Code::Ternary => ElementGrid::int(-1.0, 1.0),
        Code::Float(float) if float.bits() <= 8 => {
            ElementGrid::float(float.mantissa_bits, float.min_normal(), float.max())
        }
        _ => return None,
    };
    known.then_some((affine, grid))
}

/// Returns the number of values under one scale of a scheme whose elements are integers of at most 8 bits, or floats of
/// at most 8 bits: `None` inside if a line has only one. `None` for other schemes.
fn units_of(scheme: &Scheme, integers: bool) -> Option<Option<usize>> {
    let (affine, _) = fast_path(scheme)?;
    let fits = match affine.code {
        Code::Int(_) | Code::Ternary => integers,
        _ => !integers,
    };
    let unit = match affine.blocks {
        Blocks::Tensor | Blocks::Row => None,
        Blocks::Group(g) => Some(g as usize),
        Blocks::Tile { cols, .. } => Some(cols as usize),
        _ => return None,
    };
    fits.then_some(unit)
}

/// Returns the smallest and largest element of a scheme of integers of `bits` bits.
pub(crate) fn int_range(scheme: &Scheme, bits: u32) -> (f32, f32) {
    let high = ((1i32 << (bits - 1)) - 1) as f32;
    (if scheme.encoder.rule == Rule::Restricted { -high } else { -high - 1.0 }, high)
}

/// Returns the unit that both operands can be stored in, as integers or as elements of floats: the unit of the
/// operand with scales along the line, if there is one. `None` if they differ or an operand has neither.
pub(crate) fn common_unit(both: [&OperandPolicy; 2], integers: bool) -> Option<Option<usize>> {
    match both.map(|operand| units_of(&operand.scheme, integers)) {
        [Some(a), Some(b)] if a.is_none() || b.is_none() || a == b => Some(a.or(b)),
        _ => None,
    }
}

/// True if an emulated accumulator can multiply the operands.
pub(crate) fn accumulates(gemm: &GemmPolicy) -> bool {
    let unit = common_unit([&gemm.left, &gemm.right], false);
    unit.is_some_and(|unit| {
        unit.is_none_or(|unit| unit.is_multiple_of(mantissa_num::accumulate::HOPPER_STEP))
    })
}
