//! Block scales from the range of a block, by rule.
//!
//! One group per family of formats. The formulas follow `golden/README.md`, one f32 operation at a time.

use super::block::{Block, Range, Step};
use crate::e8m0;
use crate::format::{Code, Offset, ScaleTree, Sense, Table};
use crate::minifloat::{E2M1, E4M3, pow2};
use crate::scheme::{Rule, ScaleFloor};

/// Lowest and highest code of an integer of `bits` bits.
pub(super) fn int_limits(rule: Rule, bits: u32) -> (f32, f32) {
    let high = ((1i32 << (bits - 1)) - 1) as f32;
    (if rule == Rule::Restricted { -high } else { -high - 1.0 }, high)
}

pub(super) fn symmetric(rule: Rule, floor: ScaleFloor, range: Range, bits: u32, tree: &ScaleTree) -> Block {
    let (low, high) = int_limits(rule, bits);
    let raw = match rule {
        Rule::Restricted if floor == ScaleFloor::KvCache => (range.amax() / high).max(1e-8),
        Rule::Restricted if floor == ScaleFloor::Training => range.amax().max(1e-12) / high,
        Rule::Restricted => range.amax().max(1e-5) / high,
        Rule::NoClippingErr => {
            let (min, max) = range.with_zero();
            (min / low).max(max / high)
        }
        Rule::Clip(hundredths) => range.amax() * (f32::from(hundredths) / 100.0) / ((high - low) / 2.0),
        _ => range.amax() / ((high - low) / 2.0),
    };
    let (scale, value) = store_scale(tree.code, raw.min(largest_scale(-low)));
    Block::new(scale, int_step(rule, value))
}

pub(super) fn asymmetric(rule: Rule, range: Range, bits: u32, tree: &ScaleTree) -> Block {
    let (low, high) = int_limits(rule, bits);
    let (min, max) = range.with_zero();
    let levels = high - low;
    let raw = spread(min, max, levels);
    // No code may decode to infinity. |code - zero| is at most `levels` for a one-sided range, and half of it,
    // rounded up, for a balanced one. Only ranges within a code of f32's limit are affected.
    let reach = (max.max(-min) / raw).ceil().clamp(1.0, levels);
    let (scale, value) = store_scale(tree.code, raw.min(largest_scale((reach + 1.0).min(levels))));
    let zero = match rule {
        // For an all-zero group this is the lowest code, 0 in torchao's unsigned domain.
        Rule::Torchao => (low - (min / value).round_ties_even()).clamp(low, high),
        _ if min == 0.0 && max == 0.0 => 0.0,
        _ => (low - min / value).clamp(low, high).round_ties_even(),
    };
    Block { zero: zero as i32, ..Block::new(scale, int_step(rule, value)) }
}

/// [`Rule::MinMax`]. A block that spans more than f32's largest value is clipped.
pub(super) fn biased(range: Range, bits: u32, tree: &ScaleTree, offset: Offset) -> Block {
    let levels = ((1u32 << bits) - 1) as f32;
    // An empty block has no minimum.
    let (min, max) = if range.count == 0 { (0.0, 0.0) } else { (range.min, range.max) };
    let raw = spread(min, max, levels).max(1e-8);
    let (scale, value) = store_scale(tree.code, raw.min(largest_scale(levels)));
    Block { bias: offset.nearest_bias(min), ..Block::new(scale, Step::Divide(value)) }
}

/// `(max - min) / levels`, without overflow of the difference.
fn spread(min: f32, max: f32, levels: f32) -> f32 {
    let spread = (max - min) / levels;
    if spread.is_finite() { spread } else { max / levels - min / levels }
}

fn int_step(rule: Rule, scale: f32) -> Step {
    match rule {
        Rule::Torchao | Rule::NoClippingErr => Step::Multiply(1.0 / scale),
        _ => Step::Divide(scale),
    }
}

pub(super) fn ternary(rule: Rule, range: Range, tree: &ScaleTree) -> Block {
    if rule == Rule::AbsMean {
        let (scale, value) = store_scale(tree.code, range.abs_mean().max(1e-5));
        return Block::new(scale, Step::Multiply(1.0 / value));
    }
    let (scale, value) = store_scale(tree.code, range.amax());
    Block::new(scale, Step::Divide(value))
}

/// Floats under an f32 scale (or one narrower float, or, in tiles, E8M0).
pub(super) fn scaled_float(
    rule: Rule,
    floor: ScaleFloor,
    range: Range,
    code: Code,
    tree: &ScaleTree,
) -> Block {
    let (amax, max) = (range.amax(), code.max());
    let least_amax = match rule {
        Rule::Floor1e4 | Rule::DeepSeekV3 | Rule::DeepGemm => 1e-4,
        _ => 0.0,
    };
    let least = if rule == Rule::Amax && floor == ScaleFloor::KvCache { 1e-12 } else { 0.0 };
    let raw = (amax.max(least_amax) / max).max(least).min(largest_scale(max));
    if tree.code == Code::E8m0 {
        let scale = if range.nan { e8m0::NAN } else { e8m0::ceil_of_abs(raw) };
        return Block::new(scale.into(), Step::Divide(e8m0::decode(scale)));
    }
    if rule == Rule::Floor1e12 {
        let inverse = (f64::from(max) / f64::from(amax.max(1e-12))) as f32;
        let (scale, _) = store_scale(tree.code, (1.0 / inverse).min(largest_scale(max)));
        return Block::new(scale, Step::Multiply(inverse));
    }
    let (scale, value) = store_scale(tree.code, raw);
    match rule {
        Rule::Floor1e4 | Rule::DeepGemm => Block::new(scale, Step::Multiply(1.0 / value)),
        _ => Block::new(scale, Step::Divide(value)),
    }
}

pub(super) fn microscaled(rule: Rule, range: Range, code: Code) -> Block {
    if range.nan {
        return Block::new(e8m0::NAN.into(), Step::Divide(f32::NAN));
    }
    let scale = e8m0::from_exponent(shared_exponent(rule, range.amax(), code));
    let unscaled = scale == 0 && rule == Rule::TorchaoRceil;
    Block::new(scale.into(), if unscaled { Step::Unit } else { Step::Divide(e8m0::decode(scale)) })
}

/// Smallest block scale that torchao writes: the smallest normal E4M3.
const TORCHAO_SCALE_FLOOR: f32 = 0.015625;

/// NVFP4 under `outer`, the global scale as stored.
pub(super) fn nvfp4(rule: Rule, range: Range, tree: &ScaleTree, outer: f32) -> Block {
    let amax = range.amax();
    match rule {
        Rule::Te | Rule::FourOverSix => {
            let encode = encode_scale(Some(tree), outer);
            transformer_engine(amax * factor_of_amax(tree, outer), encode)
        }
        Rule::Torchao if tree.tensor_wide().is_some() => {
            let scale = E4M3.encode_saturating((amax / E2M1.max() / outer).max(TORCHAO_SCALE_FLOOR));
            Block::new(scale, Step::Multiply((1.0 / outer) / E4M3.decode(scale)))
        }
        Rule::Torchao => {
            let scale = E4M3.encode_saturating((amax / E2M1.max()).max(TORCHAO_SCALE_FLOOR));
            Block::new(scale, Step::Multiply(1.0 / E4M3.decode(scale)))
        }
        _ => {
            let mut scale = E4M3.encode_saturating(outer * (amax / E2M1.max()));
            if scale == 0 {
                scale = E4M3.encode_saturating(0.125); // torch.finfo(float8_e4m3fn).eps
            }
            Block::new(scale, Step::Divide(E4M3.decode(scale) / outer))
        }
    }
}

/// Second candidate of [`Rule::FourOverSix`]: amax maps to 4, so the scale is 1.5 times larger.
pub(super) fn four(range: Range, tree: &ScaleTree, outer: f32) -> Block {
    let encode = encode_scale(Some(tree), outer);
    transformer_engine(range.amax() * (encode * (1.0 / E2M1.max())) * 1.5, encode)
}

/// Factor by which Transformer Engine multiplies a tensor of amax `outer` before it is cut into blocks.
pub(super) fn encode_scale(tree: Option<&ScaleTree>, outer: f32) -> f32 {
    let full_scale = match tree.and_then(ScaleTree::tensor_wide).map(|tree| tree.sense) {
        Some(Sense::Amax { full_scale }) => full_scale as f32,
        _ => 1.0,
    };
    if outer == 0.0 { 1.0 } else { (full_scale / outer).min(f32::MAX) }
}

/// Factor by which Transformer Engine multiplies the amax of a block to get its scale.
pub(super) fn factor_of_amax(tree: &ScaleTree, outer: f32) -> f32 {
    encode_scale(Some(tree), outer) * (1.0 / E2M1.max())
}

fn transformer_engine(raw: f32, encode: f32) -> Block {
    with_scale(E4M3.encode_saturating(raw), encode)
}

/// Transformer Engine's block with this stored scale.
pub(super) fn with_scale(scale: u32, encode: f32) -> Block {
    let inverse = (1.0 / (E4M3.decode(scale) * (1.0 / encode))).min(f32::MAX);
    Block::new(scale, Step::Multiply(inverse))
}

pub(super) fn table(rule: Rule, table: &Table, range: Range, short: bool) -> Block {
    let (scale, amax) = match table.scale.code {
        Code::F32 | Code::Book(_) => (range.amax().to_bits(), range.amax()),
        code => store_scale(code, range.amax()),
    };
    let inverse = Step::Multiply(1.0 / amax.max(1e-38));
    let step = match rule {
        Rule::Cpu if amax == 0.0 => Step::Constant(-1.0),
        Rule::Cpu | Rule::Nearest => inverse,
        // bitsandbytes multiplies whole blocks by the reciprocal and divides in a short last one.
        _ if short => Step::Divide(amax.max(1e-38)),
        _ => inverse,
    };
    Block::new(scale, step)
}

/// Stored code of a block scale, and its decoded value. A zero scale becomes the f32 epsilon, as in
/// compressed-tensors and torchao, so that division is always defined. A scale that a narrower code would round to
/// zero becomes its smallest positive value.
pub(super) fn store_scale(code: Code, scale: f32) -> (u32, f32) {
    let scale = if scale == 0.0 { f32::EPSILON } else { scale };
    let stored = match code {
        Code::Float(float) => float.encode_saturating(scale).max(1),
        Code::E8m0 => e8m0::ceil_of_abs(scale).into(),
        _ => scale.to_bits(),
    };
    (stored, code.decode(stored))
}

/// Largest scale at which an element of magnitude `reach` still decodes to a finite f32.
fn largest_scale(reach: f32) -> f32 {
    (f32::MAX / reach).next_down()
}

/// Exponent of a Microscaling block before clamping to E8M0's range. `emax` is the exponent of the largest element.
fn shared_exponent(rule: Rule, amax: f32, code: Code) -> i32 {
    let (emax, mantissa_bits) = match code {
        Code::Float(f) => (f.max_exponent(), f.mantissa_bits),
        _ => (0, 6), // k/64: six fraction bits below one
    };
    let field = |bits: u32| (bits >> 23) as i32 - 127;
    let bits = amax.to_bits();
    match rule {
        Rule::Ceil => field(bits) + i32::from(bits & 0x007f_ffff != 0) - emax,
        // Half an ulp of the element's mantissa; a carry moves the exponent up.
        Rule::Even => field(bits + (1 << (22 - mantissa_bits))) - emax,
        // compressed-tensors has one mantissa width per element width: 3 bits for FP6, else the 1 bit of FP4.
        Rule::Ct => {
            let mantissa = if code.bits() == 6 { 3 } else { 1 };
            field(bits + (1 << (22 - mantissa))) - emax
        }
        Rule::Rceil => e8m0::ceil_log2(amax / code.max()).unwrap_or(-127),
        Rule::TorchaoRceil => ceil_log2_rounded(amax / code.max()),
        _ => field(bits) - emax,
    }
}

/// `ceil(log2 x)` with the logarithm first rounded to f32, like an eager f32 `log2`: a quotient just above a power of
/// two is not rounded up.
fn ceil_log2_rounded(x: f32) -> i32 {
    let Some(floor) = e8m0::floor_log2(x) else { return -127 };
    let mantissa = f64::from(x) / pow2(floor);
    // Only mantissas within a few ulps of 1 can round to the integer, where log2(1+d) = d/ln 2 to far below an f32 ulp.
    let excess = (mantissa - 1.0) * std::f64::consts::LOG2_E;
    let rounded = (f64::from(floor) + excess.min(0.5)) as f32;
    if rounded == floor as f32 { floor } else { floor + 1 }
}
