//! One block at a time: from its range to a scale, from a value to a code, and from a code to a value.
//!
//! Every operation is one f32 operation, rounded by itself (no fused multiply-add), in the order of the named
//! producer; `golden/README.md` of the reference data has each formula. Solvers such as GPTQ call the same three
//! functions, so no method has its own definition of a format.

mod block;
mod nested;
mod rules;

use crate::e8m0;
use crate::format::{Affine, Blocks, Code, Format, Offset, ScaleTree, Sense};
use crate::minifloat::{E2M1, E4M3, MiniFloat, Overflow, TF32};
use crate::round::Rounding;
use crate::scheme::{Rule, Scheme};

pub use block::{Block, Decoder, Range, Step};
pub use nested::nest;

impl Format {
    /// Element of `code`, before scaling. NaN for a codec or trellis, which have no element codes.
    pub fn element(&self, code: u32) -> f32 {
        match self {
            Format::Affine(a) => a.code.decode(code),
            Format::Table(t) => t.book.level(code),
            Format::Codec(_) | Format::Trellis(_) => f32::NAN,
        }
    }

    /// Maximum error of any rule for a finite value, in units of the scale. It is the largest distance between
    /// adjacent elements or, for power-of-two scales, the distance from the largest element to the next power of two
    /// (OCP's floor rule clips it). Infinite if a rule clips without bound (ternary) or there is no scale (a codec, a
    /// trellis).
    pub fn error_bound(&self) -> f32 {
        let affine = match self {
            Format::Affine(affine) => affine,
            // All negative values become the lowest level, 0.
            Format::Table(t) if t.book.level(0) == 0.0 && t.book.is_state_map() => return 1.0,
            Format::Table(_) => return self.largest_gap(),
            Format::Codec(_) | Format::Trellis(_) => return f32::INFINITY,
        };
        match (affine.code, &affine.scale) {
            (Code::Int(_), _) => 1.0,
            (Code::Ternary, _) => f32::INFINITY,
            (Code::Float(f), Some(ScaleTree { code: Code::E8m0, .. })) => {
                let clipped = crate::minifloat::pow2(f.max_exponent() + 1) as f32 - f.max();
                self.largest_gap().max(clipped)
            }
            (Code::Float(f), _) if f.bits() > 8 => f.max() - f.decode(f.max_code() - 1),
            (Code::F64 | Code::F32, _) => 0.0,
            (Code::Tf32, _) => TF32.max() - TF32.decode(TF32.max_code() - 1),
            _ => self.largest_gap(),
        }
    }

    fn largest_gap(&self) -> f32 {
        let mut elements: Vec<f32> =
            (0..1u32 << self.code_bits()).map(|c| self.element(c)).filter(|v| v.is_finite()).collect();
        elements.sort_by(f32::total_cmp);
        elements.windows(2).map(|w| w[1] - w[0]).fold(0.0, f32::max)
    }

    /// Stored code of the block scale nearest to `multiplier`, for methods that choose scales themselves. A scale
    /// that would round to zero becomes the code's smallest positive value. Negative multipliers keep their sign if
    /// the code has one. `None` for a format without scales, or with scales that are quantized in blocks themselves.
    pub fn nearest_scale(&self, multiplier: f32, outer: Option<f32>) -> Option<u32> {
        let tree = self.scale()?;
        if tree.nested().is_some() {
            return None;
        }
        let scale = match (tree.tensor_wide().map(|tree| tree.sense), outer) {
            (Some(Sense::Divisor), Some(global)) => multiplier * global,
            (Some(Sense::Multiplier), Some(global)) => multiplier / global,
            (Some(Sense::Amax { full_scale }), Some(amax)) => multiplier * (full_scale as f32 / amax),
            _ => multiplier,
        };
        Some(match tree.code {
            Code::E8m0 => match e8m0::nearest(scale.abs()) {
                e8m0::NAN => e8m0::ceil_of_abs(scale).min(e8m0::NAN - 1).into(),
                code => code.into(),
            },
            code => rules::store_scale(code, scale).0,
        })
    }

    /// Decoder of a block with this stored scale, zero point and global scale, without its bias
    /// ([`Decoder::with_bias`]). Blocks under double quantization decode as in
    /// [`Nested::scale`](crate::Nested::scale).
    pub fn decoder(&self, scale: u32, zero: i32, outer: Option<f32>) -> Decoder {
        let Some(tree) = self.scale() else { return Decoder::scaled(1.0) };
        let inner = tree.code.decode(scale);
        let zero = match self {
            Format::Affine(Affine { offset: Offset::Zero, .. }) => zero as f32,
            // The lowest code means the bias itself.
            Format::Affine(Affine { offset, code: Code::Int(bits), .. }) if offset.is_bias() => lowest(*bits),
            _ => 0.0,
        };
        let (inner, tail) = match (tree.tensor_wide().map(|tree| tree.sense), outer) {
            (Some(Sense::Divisor), Some(global)) => (inner / global, None),
            (Some(Sense::Multiplier), Some(global)) => (inner * global, None),
            (Some(Sense::Amax { full_scale }), Some(amax)) => (inner, Some(amax / full_scale as f32)),
            _ => (inner, None),
        };
        Decoder { zero, inner, tail, bias: None }
    }
}

/// The lowest two's complement integer of `bits` bits.
fn lowest(bits: u32) -> f32 {
    -((1i32 << (bits - 1)) as f32)
}

impl Scheme {
    /// Global scale as stored, from the tensor's amax. `None` if the format has at most one level.
    pub fn outer_scale(&self, amax: f32) -> Option<f32> {
        match self.format.scale()?.tensor_wide()?.sense {
            Sense::Amax { .. } => Some(amax),
            // torchao divides zero by zero in an all-zero tensor.
            Sense::Multiplier if amax == 0.0 => Some(f32::MIN_POSITIVE),
            Sense::Multiplier => Some((amax / 2688.0).max(f32::from_bits(1))),
            // `generate_gparam`: amax clamped to the smallest normal, infinity replaced by 1.
            _ => {
                let scale = 2688.0 / amax.max(f32::MIN_POSITIVE);
                Some(if scale.is_finite() { scale } else { 1.0 })
            }
        }
    }

    /// Chooses scale, zero point and bias of a block. `short` is true if the block has fewer elements than the
    /// format's block size (matters only for code books); `outer` is the global scale as stored.
    /// [`Rule::FourOverSix`] needs the values themselves: [`block_of`](Self::block_of). A codec or trellis has no
    /// such block and gets one that does nothing.
    pub fn block(&self, range: Range, short: bool, outer: Option<f32>) -> Block {
        let rule = self.encoder.rule;
        let floor = self.encoder.floor;
        match &self.format {
            Format::Codec(_) | Format::Trellis(_) | Format::Affine(Affine { scale: None, .. }) => {
                Block::new(0, Step::Unit)
            }
            Format::Table(table) => rules::table(rule, table, range, short),
            Format::Affine(Affine { code, blocks, scale: Some(tree), offset }) => {
                match (code, offset, tree.code) {
                    (Code::Int(bits), Offset::None, _) => rules::symmetric(rule, floor, range, *bits, tree),
                    (Code::Int(bits), offset, _) if offset.is_bias() => {
                        rules::biased(range, *bits, tree, *offset)
                    }
                    (Code::Int(bits), ..) => rules::asymmetric(rule, range, *bits, tree),
                    (Code::Ternary, ..) => rules::ternary(rule, range, tree),
                    (_, _, Code::E8m0) if *blocks == Blocks::Group(32) && rule != Rule::DeepGemm => {
                        rules::microscaled(rule, range, *code)
                    }
                    (Code::Float(E2M1), _, Code::Float(E4M3)) => {
                        rules::nvfp4(rule, range, tree, outer.unwrap_or(1.0))
                    }
                    _ => rules::scaled_float(rule, floor, range, *code, tree),
                }
            }
        }
    }

    /// Factor m of a scheme whose block scales are E4M3 of `amax · m` (NVFP4 by [`Rule::Te`]) under the global scale
    /// `outer` as stored. `None` for other schemes. [`block_of_scale`](Self::block_of_scale) makes the block.
    pub fn scale_of_amax(&self, outer: Option<f32>) -> Option<f32> {
        let Format::Affine(Affine {
            code: Code::Float(E2M1), scale: Some(tree), offset: Offset::None, ..
        }) = &self.format
        else {
            return None;
        };
        let by_transformer_engine = self.encoder.rule == Rule::Te && tree.code == Code::Float(E4M3);
        by_transformer_engine.then(|| rules::factor_of_amax(tree, outer.unwrap_or(1.0)))
    }

    /// Block of a scheme with [`scale_of_amax`](Self::scale_of_amax) with this stored scale.
    pub fn block_of_scale(&self, scale: u32, outer: Option<f32>) -> Block {
        rules::with_scale(scale, rules::encode_scale(self.format.scale(), outer.unwrap_or(1.0)))
    }

    /// [`block`](Self::block) of the block `x`, under every rule.
    pub fn block_of(&self, x: &[f32], short: bool, outer: Option<f32>) -> Block {
        let range = Range::of(x);
        match self.candidates(range, outer) {
            Some([six, four]) => {
                let error = |candidate: &(Block, f32)| self.squared_error(x, candidate);
                if error(&four) < error(&six) { four.0 } else { six.0 }
            }
            None => self.block(range, short, outer),
        }
    }

    /// Candidates for a block with this range under [`Rule::FourOverSix`], each with the scale at which the reference
    /// weighs its error (code · scale, each step in f32); the second if its squared error is smaller. `None` for
    /// other rules.
    pub fn candidates(&self, range: Range, outer: Option<f32>) -> Option<[(Block, f32); 2]> {
        let tree = self.format.scale().filter(|_| self.encoder.rule == Rule::FourOverSix)?;
        let encode = rules::encode_scale(Some(tree), outer.unwrap_or(1.0));
        let blocks = [self.block(range, false, outer), rules::four(range, tree, outer.unwrap_or(1.0))];
        Some(blocks.map(|block| (block, tree.code.decode(block.scale) * (1.0 / encode))))
    }

    fn squared_error(&self, x: &[f32], (block, scale): &(Block, f32)) -> f32 {
        let error = |v: &f32| self.format.element(self.encode(*v, block, 0)) * scale - v;
        x.iter().map(error).fold(0.0, |sum, e| sum + e * e)
    }

    /// Block with a precomputed scale and no zero point: a static activation scale.
    pub fn block_with_scale(&self, scale: f32) -> Block {
        match self.format.scale() {
            None => Block::new(0, Step::Unit),
            Some(tree) => {
                let (stored, value) = rules::store_scale(tree.code, scale);
                Block::new(stored, Step::Divide(value))
            }
        }
    }

    /// Code of `x` in `block`. `index` is the element's position in its tensor, the counter of stochastic rounding. 0
    /// for a codec, which has no element codes.
    pub fn encode(&self, x: f32, block: &Block, index: u64) -> u32 {
        match &self.format {
            Format::Affine(affine) => self.encode_affine(x, block, affine, index),
            Format::Table(table) => {
                let v = block.step.apply(x).clamp(-1.0, 1.0);
                if self.encoder.rule == Rule::Cpu {
                    table.book.encode_by_table(v)
                } else {
                    table.book.encode(v)
                }
            }
            Format::Codec(_) | Format::Trellis(_) => 0,
        }
    }

    fn encode_affine(&self, x: f32, block: &Block, affine: &Affine, index: u64) -> u32 {
        let rounding = self.encoder.rounding;
        match affine.code {
            Code::F64 | Code::F32 => x.to_bits(),
            Code::Tf32 => TF32.encode(x, Overflow::Special, rounding, index) << (32 - TF32.bits()),
            Code::Float(element) if self.encoder.rule == Rule::DeepGemm => {
                encode_half_down(element, block.step.apply(x), rounding, index)
            }
            Code::Float(element) => {
                let overflow = overflow_of(&element, affine.scale.is_some());
                element.encode(block.step.apply(x), overflow, rounding, index)
            }
            Code::Fixed64 => {
                let k = rounding.integer(block.step.apply(x) * 64.0, index).clamp(-127.0, 127.0);
                u32::from(k as i8 as u8)
            }
            Code::Int(bits) if affine.offset.is_bias() => {
                let q = rounding.integer(block.step.apply(x - block.bias), index);
                u32::from((q.clamp(0.0, -2.0 * lowest(bits) - 1.0) + lowest(bits)) as i8 as u8)
            }
            Code::Int(bits) => u32::from(self.encode_int(x, block, bits, index) as u8),
            Code::Ternary => {
                u32::from(rounding.integer(block.step.apply(x).clamp(-1.0, 1.0), index) as i8 as u8)
            }
            Code::Book(book) => book.encode(block.step.apply(x)),
            Code::E8m0 => u32::from(e8m0::nearest(x)),
        }
    }

    fn encode_int(&self, x: f32, block: &Block, bits: u32, index: u64) -> i8 {
        let rounding = self.encoder.rounding;
        let (low, high) = rules::int_limits(self.encoder.rule, bits);
        let scaled = block.step.apply(x);
        let zero = block.zero as f32;
        let q = match self.encoder.rule {
            // The zero point is added before rounding (compressed-tensors) or after (torchao).
            Rule::Torchao => (rounding.integer(scaled, index) + zero).clamp(low, high),
            _ => rounding.integer((scaled + zero).clamp(low, high), index),
        };
        q as i8
    }
}

/// DeepGEMM's FP4: halves round toward zero, and there is no negative zero.
fn encode_half_down(element: MiniFloat, x: f32, rounding: Rounding, index: u64) -> u32 {
    let rounding = if rounding == Rounding::NearestEven { Rounding::NearestDown } else { rounding };
    let code = element.encode(x, Overflow::Saturate, rounding, index);
    if element.decode(code) == 0.0 { 0 } else { code }
}

/// f16 and bf16 overflow to infinity as in IEEE 754; narrower or scaled elements saturate.
fn overflow_of(element: &MiniFloat, scaled: bool) -> Overflow {
    if element.bits() == 16 && !scaled { Overflow::Special } else { Overflow::Saturate }
}
