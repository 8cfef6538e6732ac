//! One block at a time: from its range to a scale, from a value to a code, from a code back to a value.
//!
//! Every operation is one f32 operation, rounded by itself (no fused multiply-add), in the order that the named producer
//! uses; `golden/README.md` of the reference data states each formula. Solvers (GPTQ and its kin) call these same three
//! functions, so no method has a private idea of a format.

use crate::e8m0;
use crate::format::{Affine, Code, Format, Offset, ScaleTree, Sense, Table};
use crate::minifloat::{E4M3, MiniFloat, Overflow};
use crate::scheme::{Rule, Scheme};

/// What a block's scale depends on.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Range {
    /// Smallest value, NaN aside.
    pub min: f32,
    /// Largest value, NaN aside.
    pub max: f32,
    /// Whether a NaN was seen.
    pub nan: bool,
}

impl Range {
    /// Of no values.
    pub const EMPTY: Range = Range { min: f32::INFINITY, max: f32::NEG_INFINITY, nan: false };

    /// Of `x`.
    pub fn of(x: &[f32]) -> Self {
        x.iter().fold(Self::EMPTY, |range, &v| range.with(v))
    }

    /// The range widened by one value.
    pub fn with(self, v: f32) -> Self {
        // f32::min and max ignore NaN.
        Range { min: self.min.min(v), max: self.max.max(v), nan: self.nan | v.is_nan() }
    }

    /// The union of two ranges.
    pub fn union(self, other: Self) -> Self {
        Range { min: self.min.min(other.min), max: self.max.max(other.max), nan: self.nan | other.nan }
    }

    /// Largest magnitude; 0 of no values.
    pub fn amax(self) -> f32 {
        if self.min > self.max { 0.0 } else { self.min.abs().max(self.max.abs()) }
    }

    /// The range widened to hold 0, as integer grids require.
    fn with_zero(self) -> (f32, f32) {
        (self.min.min(0.0), self.max.max(0.0))
    }
}

/// Turns elements into values: `(element - zero) · inner`, times `tail` where the format multiplies twice.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Decoder {
    zero: f32,
    inner: f32,
    tail: Option<f32>,
}

impl Decoder {
    /// The value of an element (see [`Format::element`]).
    pub fn value(&self, element: f32) -> f32 {
        let scaled = (element - self.zero) * self.inner;
        self.tail.map_or(scaled, |tail| scaled * tail)
    }

    /// (`zero`, `inner`, `tail`) of the formula, for loops over many elements. `inner` is 1 in a format without scales.
    pub const fn parts(&self) -> (f32, f32, Option<f32>) {
        (self.zero, self.inner, self.tail)
    }
}

/// A block's chosen parameters.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Block {
    /// Code of the scale as stored (bit pattern for an f32 scale). 0 where the format has none.
    pub scale: u32,
    /// Zero point in the signed domain; 0 where the format has none.
    pub zero: i32,
    step: Step,
}

impl Block {
    /// How a value is brought to the element's grid, for loops over many elements.
    pub const fn step(&self) -> Step {
        self.step
    }
}

/// How a value is brought to the element's grid.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Step {
    /// As it is.
    Unit,
    /// Divided by this.
    Divide(f32),
    /// Multiplied by this.
    Multiply(f32),
}

impl Step {
    fn apply(self, x: f32) -> f32 {
        match self {
            Step::Unit => x,
            Step::Divide(scale) => x / scale,
            Step::Multiply(inverse) => x * inverse,
        }
    }
}

impl Format {
    /// The element that `code` stands for, before scaling.
    pub fn element(&self, code: u32) -> f32 {
        match self {
            Format::Affine(a) => a.code.decode(code),
            Format::Table(t) => t.book.levels().get(code as usize).copied().unwrap_or(f32::NAN),
        }
    }

    /// The most, in units of the scale, by which any rule here may miss a finite value: the largest distance between
    /// neighbouring elements, or, under power-of-two scales, what lies between the largest element and the next power of
    /// two (OCP's floor rule clips it).
    pub fn error_bound(&self) -> f32 {
        let Format::Affine(affine) = self else { return self.largest_gap() };
        match (affine.code, &affine.scale) {
            (Code::Int(_), _) => 1.0,
            (Code::Float(f), Some(ScaleTree { code: Code::E8m0, .. })) => {
                let clipped = crate::minifloat::pow2(f.max_exponent() + 1) as f32 - f.max();
                self.largest_gap().max(clipped)
            }
            (Code::Float(f), _) if f.bits() > 8 => f.max() - f.decode(f.max_code() - 1),
            (Code::F32, _) => 0.0,
            _ => self.largest_gap(),
        }
    }

    fn largest_gap(&self) -> f32 {
        let mut elements: Vec<f32> =
            (0..1u32 << self.code_bits()).map(|c| self.element(c)).filter(|v| v.is_finite()).collect();
        elements.sort_by(f32::total_cmp);
        elements.windows(2).map(|w| w[1] - w[0]).fold(0.0, f32::max)
    }

    /// How a block with this stored scale, zero point and outer scale decodes.
    pub fn decoder(&self, scale: u32, zero: i32, outer: Option<f32>) -> Decoder {
        let Some(tree) = self.scale() else { return Decoder { zero: 0.0, inner: 1.0, tail: None } };
        let inner = tree.code.decode(scale);
        let zero = if self.has_zero() { zero as f32 } else { 0.0 };
        match (tree.outer.as_ref().map(|(_, tree)| tree.sense), outer) {
            (Some(Sense::Divisor), Some(global)) => Decoder { zero, inner: inner / global, tail: None },
            (Some(Sense::Multiplier), Some(global)) => Decoder { zero, inner: inner * global, tail: None },
            (Some(Sense::Amax { full_scale }), Some(amax)) => {
                Decoder { zero, inner, tail: Some(amax / full_scale as f32) }
            }
            _ => Decoder { zero, inner, tail: None },
        }
    }
}

impl Scheme {
    /// The tensor-wide scale as stored, from the tensor's amax. `None` where the format has one level or none.
    pub fn outer_scale(&self, amax: f32) -> Option<f32> {
        let (_, tree) = self.format.scale()?.outer.as_ref()?;
        match tree.sense {
            Sense::Amax { .. } => Some(amax),
            // `generate_gparam`: amax clamped to the smallest normal, infinity replaced by 1.
            _ => {
                let scale = 2688.0 / amax.max(f32::MIN_POSITIVE);
                Some(if scale.is_finite() { scale } else { 1.0 })
            }
        }
    }

    /// Chooses scale and zero point of a block. `short` says that the block has fewer elements than the format's block
    /// size (only code books care); `outer` is the tensor-wide scale as stored.
    pub fn block(&self, range: Range, short: bool, outer: Option<f32>) -> Block {
        match &self.format {
            Format::Affine(Affine { scale: None, .. }) => Block { scale: 0, zero: 0, step: Step::Unit },
            Format::Affine(Affine { code, scale: Some(tree), offset, .. }) => match (code, tree) {
                (Code::Int(bits), _) if *offset == Offset::Zero => self.asymmetric(range, *bits, tree),
                (Code::Int(bits), _) => self.symmetric(range, *bits, tree),
                (_, ScaleTree { code: Code::E8m0, .. }) => self.microscaled(range, *code),
                (_, ScaleTree { outer: Some(_), .. }) => self.two_level(range, *code, outer.unwrap_or(1.0)),
                _ => {
                    let (scale, value) =
                        store_scale(tree.code, (range.amax() / code.max()).min(largest_scale(code.max())));
                    Block { scale, zero: 0, step: Step::Divide(value) }
                }
            },
            Format::Table(table) => table_block(table, range, short),
        }
    }

    /// A block with a scale that was taken beforehand and no zero point: a static activation scale.
    pub fn block_with_scale(&self, scale: f32) -> Block {
        match self.format.scale() {
            None => Block { scale: 0, zero: 0, step: Step::Unit },
            Some(tree) => {
                let (stored, value) = store_scale(tree.code, scale);
                Block { scale: stored, zero: 0, step: Step::Divide(value) }
            }
        }
    }

    /// Code of `x` in `block`. `index` is the element's position in its tensor, the counter of stochastic rounding.
    pub fn encode(&self, x: f32, block: &Block, index: u64) -> u32 {
        let rounding = self.encoder.rounding;
        match &self.format {
            Format::Affine(Affine { code: Code::F32, .. }) => x.to_bits(),
            Format::Affine(Affine { code: Code::Float(element), scale, .. }) => {
                let overflow = overflow_of(element, scale.is_some());
                element.encode(block.step.apply(x), overflow, rounding, index)
            }
            Format::Affine(Affine { code: Code::Fixed64, .. }) => {
                let k = rounding.integer(block.step.apply(x) * 64.0, index).clamp(-127.0, 127.0);
                u32::from(k as i8 as u8)
            }
            Format::Affine(Affine { code: Code::Int(bits), .. }) => {
                u32::from(self.encode_int(x, block, *bits, index) as u8)
            }
            Format::Affine(Affine { code: Code::E8m0, .. }) => u32::from(e8m0::nearest(x)),
            Format::Table(table) => table.book.encode(block.step.apply(x).clamp(-1.0, 1.0)),
        }
    }

    fn encode_int(&self, x: f32, block: &Block, bits: u32, index: u64) -> i8 {
        let rounding = self.encoder.rounding;
        let (low, high) = self.int_limits(bits);
        let scaled = block.step.apply(x);
        let zero = block.zero as f32;
        let q = match self.encoder.rule {
            // The zero point joins before rounding (compressed-tensors) or after (torchao).
            Rule::Torchao => (rounding.integer(scaled, index) + zero).clamp(low, high),
            _ => rounding.integer((scaled + zero).clamp(low, high), index),
        };
        q as i8
    }

    fn int_limits(&self, bits: u32) -> (f32, f32) {
        let high = ((1i32 << (bits - 1)) - 1) as f32;
        (if self.encoder.rule == Rule::Restricted { -high } else { -high - 1.0 }, high)
    }

    fn symmetric(&self, range: Range, bits: u32, tree: &ScaleTree) -> Block {
        let (low, high) = self.int_limits(bits);
        let raw = match self.encoder.rule {
            Rule::Restricted => range.amax().max(1e-5) / high,
            Rule::NoClippingErr => {
                let (min, max) = range.with_zero();
                (min / low).max(max / high)
            }
            _ => range.amax() / ((high - low) / 2.0),
        };
        let (scale, value) = store_scale(tree.code, raw.min(largest_scale(-low)));
        Block { scale, zero: 0, step: self.int_step(value) }
    }

    fn asymmetric(&self, range: Range, bits: u32, tree: &ScaleTree) -> Block {
        let (low, high) = self.int_limits(bits);
        let (min, max) = range.with_zero();
        let levels = high - low;
        // Where max - min overflows f32, the two quotients do not.
        let spread = (max - min) / levels;
        let raw = if spread.is_finite() { spread } else { max / levels - min / levels };
        // No code may decode to infinity: |code - zero| is at most `levels` where the range is one-sided, and half of it,
        // rounded up, where it is balanced; only ranges within a code of f32's own limit are affected.
        let reach = (max.max(-min) / raw).ceil().clamp(1.0, levels);
        let (scale, value) = store_scale(tree.code, raw.min(largest_scale((reach + 1.0).min(levels))));
        let zero = match self.encoder.rule {
            // Of an all-zero group this is the lowest code, 0 in torchao's unsigned domain.
            Rule::Torchao => (low - (min / value).round_ties_even()).clamp(low, high),
            _ if min == 0.0 && max == 0.0 => 0.0,
            _ => (low - min / value).clamp(low, high).round_ties_even(),
        };
        Block { scale, zero: zero as i32, step: self.int_step(value) }
    }

    fn int_step(&self, scale: f32) -> Step {
        match self.encoder.rule {
            Rule::Torchao | Rule::NoClippingErr => Step::Multiply(1.0 / scale),
            _ => Step::Divide(scale),
        }
    }

    fn microscaled(&self, range: Range, code: Code) -> Block {
        if range.nan {
            return Block { scale: u32::from(e8m0::NAN), zero: 0, step: Step::Divide(f32::NAN) };
        }
        let exponent = shared_exponent(self.encoder.rule, range.amax(), code);
        let scale = e8m0::from_exponent(exponent);
        let step = if scale == 0 && self.encoder.rule == Rule::TorchaoRceil {
            Step::Unit
        } else {
            Step::Divide(e8m0::decode(scale))
        };
        Block { scale: u32::from(scale), zero: 0, step }
    }

    fn two_level(&self, range: Range, code: Code, outer: f32) -> Block {
        let amax = range.amax();
        if self.encoder.rule == Rule::Te {
            let encode = if outer == 0.0 { 1.0 } else { (2688.0 / outer).min(f32::MAX) };
            let scale = E4M3.encode_saturating(amax * (encode * (1.0 / code.max())));
            let inverse = (1.0 / (E4M3.decode(scale) * (1.0 / encode))).min(f32::MAX);
            return Block { scale, zero: 0, step: Step::Multiply(inverse) };
        }
        let mut scale = E4M3.encode_saturating(outer * (amax / code.max()));
        if scale == 0 {
            scale = E4M3.encode_saturating(0.125); // torch.finfo(float8_e4m3fn).eps
        }
        Block { scale, zero: 0, step: Step::Divide(E4M3.decode(scale) / outer) }
    }
}

fn table_block(table: &Table, range: Range, short: bool) -> Block {
    let (scale, _) = match table.scale.code {
        Code::F32 => (range.amax().to_bits(), range.amax()),
        code => store_scale(code, range.amax()),
    };
    // bitsandbytes multiplies whole blocks by the reciprocal and divides in a short last one.
    let amax = table.scale.code.decode(scale).max(1e-38);
    let step = if short { Step::Divide(amax) } else { Step::Multiply(1.0 / amax) };
    Block { scale, zero: 0, step }
}

/// f16 and bf16 overflow to infinity as IEEE says; narrower or scaled elements saturate.
fn overflow_of(element: &MiniFloat, scaled: bool) -> Overflow {
    if element.bits() == 16 && !scaled { Overflow::Special } else { Overflow::Saturate }
}

/// The stored code of a block scale and the value it then has. A zero scale becomes the f32 epsilon, as in
/// compressed-tensors and torchao, so that nothing is ever divided by zero; a scale that a narrower code would round to
/// zero becomes its smallest positive value.
fn store_scale(code: Code, scale: f32) -> (u32, f32) {
    let scale = if scale == 0.0 { f32::EPSILON } else { scale };
    let stored = match code {
        Code::Float(float) => float.encode_saturating(scale).max(1),
        _ => scale.to_bits(),
    };
    (stored, code.decode(stored))
}

/// The largest scale under which an element of magnitude `reach` still decodes to a finite f32.
fn largest_scale(reach: f32) -> f32 {
    (f32::MAX / reach).next_down()
}

/// Exponent of a Microscaling block, before it is clamped to E8M0's range. `emax` is the exponent of the largest element.
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
        // compressed-tensors knows one mantissa width per element width: 3 bits for FP6, else the 1 bit of FP4.
        Rule::Ct => {
            let mantissa = if code.bits() == 6 { 3 } else { 1 };
            field(bits + (1 << (22 - mantissa))) - emax
        }
        Rule::Rceil => e8m0::ceil_log2(amax / code.max()).unwrap_or(-127),
        Rule::TorchaoRceil => ceil_log2_rounded(amax / code.max()),
        _ => field(bits) - emax,
    }
}

/// `ceil(log2 x)` where the logarithm is first rounded to f32, as an eager f32 `log2` does: a quotient just above a power
/// of two stays at it.
fn ceil_log2_rounded(x: f32) -> i32 {
    let Some(floor) = e8m0::floor_log2(x) else { return -127 };
    let mantissa = f64::from(x) / crate::minifloat::pow2(floor);
    // Only mantissas within a few ulps of 1 can round to the integer, where log2(1+d) = d/ln 2 to far below an f32 ulp.
    let excess = (mantissa - 1.0) * std::f64::consts::LOG2_E;
    let rounded = (f64::from(floor) + excess.min(0.5)) as f32;
    if rounded == floor as f32 { floor } else { floor + 1 }
}
