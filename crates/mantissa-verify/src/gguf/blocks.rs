//! Block types of GGUF files and of the native format, from the descriptions in `ggml-common.h`. Values are computed
//! in f64 and rounded once. Also bounds the error of rounding to nearest, given the source's values.

use super::super_blocks::{self, Element};
use crate::elements::float_values;

/// Tensor types that ggml defines, under ggml's names and numbers (`ggml.h`).
#[allow(non_camel_case_types)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum BlockType {
    /// ggml's F32.
    F32 = 0,
    /// ggml's F16.
    F16 = 1,
    /// ggml's Q4_0.
    Q4_0 = 2,
    /// ggml's Q4_1.
    Q4_1 = 3,
    /// ggml's Q5_0.
    Q5_0 = 6,
    /// ggml's Q5_1.
    Q5_1 = 7,
    /// ggml's Q8_0.
    Q8_0 = 8,
    /// ggml's Q8_1.
    Q8_1 = 9,
    /// ggml's Q2_K.
    Q2_K = 10,
    /// ggml's Q3_K.
    Q3_K = 11,
    /// ggml's Q4_K.
    Q4_K = 12,
    /// ggml's Q5_K.
    Q5_K = 13,
    /// ggml's Q6_K.
    Q6_K = 14,
    /// ggml's Q8_K.
    Q8_K = 15,
    /// ggml's IQ2_XXS.
    IQ2_XXS = 16,
    /// ggml's IQ2_XS.
    IQ2_XS = 17,
    /// ggml's IQ3_XXS.
    IQ3_XXS = 18,
    /// ggml's IQ1_S.
    IQ1_S = 19,
    /// ggml's IQ4_NL.
    IQ4_NL = 20,
    /// ggml's IQ3_S.
    IQ3_S = 21,
    /// ggml's IQ2_S.
    IQ2_S = 22,
    /// ggml's IQ4_XS.
    IQ4_XS = 23,
    /// ggml's I8.
    I8 = 24,
    /// ggml's I16.
    I16 = 25,
    /// ggml's I32.
    I32 = 26,
    /// ggml's I64.
    I64 = 27,
    /// ggml's F64.
    F64 = 28,
    /// ggml's IQ1_M.
    IQ1_M = 29,
    /// ggml's BF16.
    BF16 = 30,
    /// ggml's TQ1_0.
    TQ1_0 = 34,
    /// ggml's TQ2_0.
    TQ2_0 = 35,
    /// ggml's MXFP4.
    MXFP4 = 39,
    /// ggml's NVFP4.
    NVFP4 = 40,
    /// ggml's Q1_0.
    Q1_0 = 41,
    /// ggml's Q2_0.
    Q2_0 = 42,
}

impl BlockType {
    const ALL: [Self; 35] = [
        Self::F32,
        Self::F16,
        Self::Q4_0,
        Self::Q4_1,
        Self::Q5_0,
        Self::Q5_1,
        Self::Q8_0,
        Self::Q8_1,
        Self::Q2_K,
        Self::Q3_K,
        Self::Q4_K,
        Self::Q5_K,
        Self::Q6_K,
        Self::Q8_K,
        Self::IQ2_XXS,
        Self::IQ2_XS,
        Self::IQ3_XXS,
        Self::IQ1_S,
        Self::IQ4_NL,
        Self::IQ3_S,
        Self::IQ2_S,
        Self::IQ4_XS,
        Self::I8,
        Self::I16,
        Self::I32,
        Self::I64,
        Self::F64,
        Self::IQ1_M,
        Self::BF16,
        Self::TQ1_0,
        Self::TQ2_0,
        Self::MXFP4,
        Self::NVFP4,
        Self::Q1_0,
        Self::Q2_0,
    ];

    /// The type with this number in a file.
    pub fn from_id(id: u32) -> Option<Self> {
        Self::ALL.into_iter().find(|ty| *ty as u32 == id)
    }

    /// The type with this name, in any case.
    pub fn from_name(name: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|ty| format!("{ty:?}").eq_ignore_ascii_case(name))
    }

    /// Elements and bytes of a block; one element of a plain type.
    pub fn block(self) -> (usize, usize) {
        match self {
            Self::I8 => (1, 1),
            Self::I16 => (1, 2),
            Self::I32 => (1, 4),
            Self::I64 | Self::F64 => (1, 8),
            _ => layout(self).map_or((1, 1), |layout| (layout.elements, layout.bytes)),
        }
    }

    /// True if a block holds more than one element.
    pub fn is_blocks(self) -> bool {
        self.block().0 > 1
    }

    /// True if [`Blocks`] decodes the type: all but f64 and integers of other than 32 bits.
    pub fn is_decoded(self) -> bool {
        layout(self).is_some()
    }

    /// Bytes of a row of `cols` elements; `None` if blocks do not divide it, or on overflow.
    pub(crate) fn row_bytes(self, cols: usize) -> Option<usize> {
        let (elements, bytes) = self.block();
        if cols.is_multiple_of(elements) { (cols / elements).checked_mul(bytes) } else { None }
    }
}

/// Decoder of blocks; one serves all threads.
pub struct Blocks {
    /// Value of every f16.
    half: Vec<f32>,
}

/// Size of a block, and the function that decodes it.
struct Layout {
    elements: usize,
    bytes: usize,
    decode: fn(&Blocks, &[u8], &mut [f32]),
}

fn layout(ty: BlockType) -> Option<Layout> {
    floats(ty)
        .or_else(|| bytes(ty))
        .or_else(|| fours_and_fives(ty))
        .or_else(|| narrow(ty))
        .or_else(|| super_block(ty))
}

/// Floats, alone and in blocks under a scale.
fn floats(ty: BlockType) -> Option<Layout> {
    let of = |elements, bytes, decode| Some(Layout { elements, bytes, decode });
    match ty {
        BlockType::F32 => of(1, 4, |_, b, out| out[0] = f32::from_le_bytes([b[0], b[1], b[2], b[3]])),
        // Numbers of experts, which f32 holds.
        BlockType::I32 => of(1, 4, |_, b, out| out[0] = i32::from_le_bytes([b[0], b[1], b[2], b[3]]) as f32),
        BlockType::F16 => of(1, 2, |all, b, out| out[0] = all.half(b, 0)),
        BlockType::BF16 => of(1, 2, |_, b, out| out[0] = f32::from_le_bytes([0, 0, b[0], b[1]])),
        BlockType::MXFP4 => of(32, 17, |_, b, out| {
            // Byte 255 is a number here: 2^128, beyond f32 except for elements below 1.
            let scale = 2f64.powi(i32::from(b[0]) - 127);
            (0..32).for_each(|i| out[i] = (e2m1(nibble(&b[1..], i)) * scale) as f32);
        }),
        BlockType::NVFP4 => of(64, 36, |all, b, out| all.nvfp4(b, 1.0, out)),
        _ => None,
    }
}

/// Codes of 8 bits.
fn bytes(ty: BlockType) -> Option<Layout> {
    let of = |elements, bytes, decode| Some(Layout { elements, bytes, decode });
    match ty {
        BlockType::Q8_0 => of(32, 34, |all, b, out| {
            let d = all.half(b, 0);
            (0..32).for_each(|i| out[i] = level(f64::from(b[2 + i] as i8), d, 0.0));
        }),
        // A scale, the sum of the elements for dot products, and the elements.
        BlockType::Q8_1 => of(32, 36, |all, b, out| {
            let d = all.half(b, 0);
            (0..32).for_each(|i| out[i] = level(f64::from(b[4 + i] as i8), d, 0.0));
        }),
        // The scale is an f32; sums of 16 elements follow.
        BlockType::Q8_K => of(256, 292, |_, b, out| {
            let d = f32::from_le_bytes([b[0], b[1], b[2], b[3]]);
            (0..256).for_each(|i| out[i] = level(f64::from(b[4 + i] as i8), d, 0.0));
        }),
        _ => None,
    }
}

/// Codes of 4 and 5 bits in blocks of 32.
fn fours_and_fives(ty: BlockType) -> Option<Layout> {
    let of = |elements, bytes, decode| Some(Layout { elements, bytes, decode });
    match ty {
        BlockType::Q4_0 => of(32, 18, |all, b, out| {
            let d = all.half(b, 0);
            (0..32).for_each(|i| out[i] = level(nibble(&b[2..], i) - 8.0, d, 0.0));
        }),
        BlockType::Q4_1 => of(32, 20, |all, b, out| {
            let (d, m) = (all.half(b, 0), all.half(b, 2));
            (0..32).for_each(|i| out[i] = level(nibble(&b[4..], i), d, m));
        }),
        BlockType::Q5_0 => of(32, 22, |all, b, out| {
            let d = all.half(b, 0);
            (0..32).for_each(|i| out[i] = level(nibble(&b[6..], i) + fifth(&b[2..], i) - 16.0, d, 0.0));
        }),
        BlockType::Q5_1 => of(32, 24, |all, b, out| {
            let (d, m) = (all.half(b, 0), all.half(b, 2));
            (0..32).for_each(|i| out[i] = level(nibble(&b[8..], i) + fifth(&b[4..], i), d, m));
        }),
        _ => None,
    }
}

/// Codes of 1 and 2 bits, and ternary ones.
fn narrow(ty: BlockType) -> Option<Layout> {
    let of = |elements, bytes, decode| Some(Layout { elements, bytes, decode });
    match ty {
        BlockType::Q1_0 => of(128, 18, |all, b, out| {
            let d = all.half(b, 0);
            (0..128).for_each(|i| out[i] = if b[2 + i / 8] >> (i % 8) & 1 == 1 { d } else { -d });
        }),
        // Consecutive codes, four per byte.
        BlockType::Q2_0 => of(64, 18, |all, b, out| {
            let d = all.half(b, 0);
            (0..64).for_each(|i| out[i] = level(f64::from(b[2 + i / 4] >> (i % 4 * 2) & 3) - 1.0, d, 0.0));
        }),
        BlockType::TQ1_0 => of(256, 54, |all, b, out| {
            let d = all.half(b, 52);
            (0..256).for_each(|i| out[i] = level(trit(b, i), d, 0.0));
        }),
        BlockType::TQ2_0 => of(256, 66, |all, b, out| {
            let d = all.half(b, 64);
            // Four 2-bit codes per byte, 32 elements apart.
            let code = |i: usize| b[i / 128 * 32 + i % 32] >> (i / 32 % 4 * 2) & 3;
            (0..256).for_each(|i| out[i] = level(f64::from(code(i)) - 1.0, d, 0.0));
        }),
        _ => None,
    }
}

/// Super-blocks of K- and IQ-quants.
fn super_block(ty: BlockType) -> Option<Layout> {
    let of = |elements, bytes, decode| Some(Layout { elements, bytes, decode });
    match ty {
        BlockType::Q2_K => of(256, 84, |all, b, out| all.elements(b, super_blocks::q2_k, out)),
        BlockType::Q3_K => of(256, 110, |all, b, out| all.elements(b, super_blocks::q3_k, out)),
        BlockType::Q4_K => of(256, 144, |all, b, out| all.elements(b, super_blocks::q4_k, out)),
        BlockType::Q5_K => of(256, 176, |all, b, out| all.elements(b, super_blocks::q5_k, out)),
        BlockType::Q6_K => of(256, 210, |all, b, out| all.elements(b, super_blocks::q6_k, out)),
        BlockType::IQ4_NL => of(32, 18, |all, b, out| all.elements(b, super_blocks::iq4_nl, out)),
        BlockType::IQ4_XS => of(256, 136, |all, b, out| all.elements(b, super_blocks::iq4_xs, out)),
        BlockType::IQ2_XXS => of(256, 66, |all, b, out| all.elements(b, super_blocks::iq2_xxs, out)),
        BlockType::IQ2_XS => of(256, 74, |all, b, out| all.elements(b, super_blocks::iq2_xs, out)),
        BlockType::IQ2_S => of(256, 82, |all, b, out| all.elements(b, super_blocks::iq2_s, out)),
        BlockType::IQ3_XXS => of(256, 98, |all, b, out| all.elements(b, super_blocks::iq3_xxs, out)),
        BlockType::IQ3_S => of(256, 110, |all, b, out| all.elements(b, super_blocks::iq3_s, out)),
        BlockType::IQ1_S => of(256, 50, |all, b, out| all.elements(b, super_blocks::iq1_s, out)),
        BlockType::IQ1_M => of(256, 56, |all, b, out| all.elements(b, super_blocks::iq1_m, out)),
        _ => None,
    }
}

impl Blocks {
    /// Computes the table of f16 values.
    #[allow(clippy::new_without_default)]
    pub fn new() -> Self {
        Blocks { half: float_values(5, 10, 15) }
    }

    /// Decodes whole blocks of `ty`; `factor` multiplies the scales of NVFP4 and is ignored for other types.
    pub fn decode(&self, ty: BlockType, bytes: &[u8], factor: Option<f32>, out: &mut [f32]) {
        let Some(layout) = layout(ty) else { return };
        for (block, out) in bytes.chunks_exact(layout.bytes).zip(out.chunks_exact_mut(layout.elements)) {
            match factor {
                Some(factor) => self.nvfp4(block, factor, out),
                None => (layout.decode)(self, block, out),
            }
        }
    }

    fn half(&self, bytes: &[u8], at: usize) -> f32 {
        self.half[usize::from(u16::from_le_bytes([bytes[at], bytes[at + 1]]))]
    }

    fn elements(&self, b: &[u8], element: Element, out: &mut [f32]) {
        let half = |bits: u16| f64::from(self.half[usize::from(bits)]);
        out.iter_mut().enumerate().for_each(|(i, out)| *out = element(b, i, &half) as f32);
    }

    /// Four scales, then four times 16 elements. The product of scale and factor is rounded to f32.
    fn nvfp4(&self, b: &[u8], factor: f32, out: &mut [f32]) {
        for (sub, out) in out.chunks_exact_mut(16).enumerate() {
            let scale = (ue4m3(b[sub]) * f64::from(factor)) as f32;
            let nibbles = &b[4 + 8 * sub..][..8];
            for (i, out) in out.iter_mut().enumerate() {
                let code = if i < 8 { nibbles[i] & 15 } else { nibbles[i - 8] >> 4 };
                *out = (e2m1(code.into()) * f64::from(scale)) as f32;
            }
        }
    }
}

/// Computes `code · d + m`, exact up to the rounding to f32, because both factors are short.
fn level(code: f64, d: f32, m: f32) -> f32 {
    (code * f64::from(d) + f64::from(m)) as f32
}

/// Element `i` of 32 nibbles: the low ones of 16 bytes, then the high ones.
fn nibble(bytes: &[u8], i: usize) -> f64 {
    f64::from(if i < 16 { bytes[i] & 15 } else { bytes[i - 16] >> 4 })
}

/// The fifth bit of element `i`.
fn fifth(bytes: &[u8], i: usize) -> f64 {
    f64::from((bytes[i / 8] >> (i % 8) & 1) * 16)
}

/// Sign, two bits of exponent (bias 1), one bit of mantissa.
fn e2m1(code: f64) -> f64 {
    const MAGNITUDES: [f64; 8] = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0];
    let code = code as usize;
    if code < 8 { MAGNITUDES[code] } else { -MAGNITUDES[code - 8] }
}

/// Unsigned E4M3; the byte that means NaN elsewhere is 0.
fn ue4m3(code: u8) -> f64 {
    let (exponent, fraction) = (i32::from(code >> 3 & 15), f64::from(code & 7) / 8.0);
    match (code, exponent) {
        (0x7f, _) => 0.0,
        (_, 0) => fraction * 2f64.powi(-6),
        _ => (1.0 + fraction) * 2f64.powi(exponent - 7),
    }
}

/// Element `i` of a TQ1_0 block. A byte holds five base-3 digits as a fraction of 256, rounded up. 32 bytes hold
/// digit after digit of 32 elements, then 16 bytes of 16, and four bytes of four.
fn trit(block: &[u8], i: usize) -> f64 {
    let (byte, digit) = match i {
        0..160 => (i % 32, i / 32),
        160..240 => (32 + i % 16, (i - 160) / 16),
        _ => (48 + i % 4, (i - 240) / 4),
    };
    let number = u32::from(block[byte]) * 243 / 256;
    f64::from(number / 3u32.pow(4 - digit as u32) % 3) - 1.0
}

/// Elements that are rounded together; the error bound depends on their range in the source.
pub fn bound_group(ty: BlockType) -> usize {
    if ty == BlockType::NVFP4 { 16 } else { layout(ty).map_or(1, |layout| layout.elements) }
}

/// Maximum error of an element when the group `x` of the source is rounded to nearest, under any rule that writes the
/// type. It is half a step, or a whole one where the largest element of the other sign is clipped or steps grow, plus
/// the rounding of scale and offset to their own formats. `factor` is the scale of the whole tensor. With `weighed`
/// (importance per column) the 4- and 5-bit types are searched too.
pub fn allowed(ty: BlockType, x: &[f32], factor: f32, weighed: bool) -> f64 {
    let (low, high) =
        x.iter().fold((f64::MAX, f64::MIN), |(low, high), &v| (low.min(v.into()), high.max(v.into())));
    let amax = low.abs().max(high.abs());
    // Relative to the step, and to scales in f16: half a unit of 2^-11 of the scale, or of 2^-24 if it is subnormal.
    let steps = |step: f64, codes: f64| step * 1.0001 + amax * 2f64.powi(-10) + codes * 2f64.powi(-24);
    match ty {
        BlockType::F32 => 0.0,
        BlockType::F16 => amax * 2f64.powi(-10) + 2f64.powi(-24),
        BlockType::BF16 => amax * 2f64.powi(-7) + 2f64.powi(-133),
        BlockType::Q8_0 | BlockType::Q8_1 => steps(amax / 127.0 / 2.0, 127.0),
        BlockType::Q8_K => steps(amax / 127.0, 0.0),
        BlockType::Q4_0 if !weighed => steps(amax / 8.0, 8.0),
        BlockType::Q5_0 if !weighed => steps(amax / 16.0, 16.0),
        BlockType::Q4_1 if !weighed => steps((high - low) / 15.0 / 2.0, 16.0),
        BlockType::Q5_1 if !weighed => steps((high - low) / 31.0 / 2.0, 32.0),
        BlockType::TQ1_0 | BlockType::TQ2_0 | BlockType::Q2_0 => steps(amax / 2.0, 1.0),
        // 6 of the scale, the largest element, is at least 6/8 of amax under the rule that clips most; the widest step is 2.
        BlockType::MXFP4 => amax * 0.5 * 1.0001 + 2f64.powi(-125),
        // The scale is amax/6, or amax/4 by choice, to 1/16 of it or half its smallest step.
        BlockType::NVFP4 => amax * (2.0 / 6.0 + 1.0 / 16.0) + f64::from(factor.abs()) * 6.0 * 2f64.powi(-9),
        // Searched types may give up accuracy in one element for more important ones, but never beyond the block's
        // range.
        _ => 2.0 * amax * 1.0001 + 2f64.powi(-12),
    }
}
