//! A second decoder of the block types that are written, to GGUF or to the native container, from the descriptions of `ggml-common.h`: values come from
//! arithmetic in f64 and are rounded once. And how far nearest rounding may miss, from the source's own values.

use mantissa_store::gguf::GgmlType;

use super::gguf_super::{self, Element};
use super::independent::float_values;

/// Decodes blocks. One for all threads.
pub(super) struct Blocks {
    /// The value of every f16.
    half: Vec<f32>,
}

/// How a type's bytes become values: a block of so many elements, so many bytes.
struct Layout {
    elements: usize,
    bytes: usize,
    decode: fn(&Blocks, &[u8], &mut [f32]),
}

fn layout(ty: GgmlType) -> Option<Layout> {
    let of = |elements, bytes, decode| Some(Layout { elements, bytes, decode });
    match ty {
        GgmlType::F32 => of(1, 4, |_, b, out| out[0] = f32::from_le_bytes([b[0], b[1], b[2], b[3]])),
        GgmlType::F16 => of(1, 2, |all, b, out| out[0] = all.half(b, 0)),
        GgmlType::BF16 => of(1, 2, |_, b, out| out[0] = f32::from_le_bytes([0, 0, b[0], b[1]])),
        GgmlType::Q8_0 => of(32, 34, |all, b, out| {
            let d = all.half(b, 0);
            (0..32).for_each(|i| out[i] = level(f64::from(b[2 + i] as i8), d, 0.0));
        }),
        GgmlType::Q4_0 => of(32, 18, |all, b, out| {
            let d = all.half(b, 0);
            (0..32).for_each(|i| out[i] = level(nibble(&b[2..], i) - 8.0, d, 0.0));
        }),
        GgmlType::Q4_1 => of(32, 20, |all, b, out| {
            let (d, m) = (all.half(b, 0), all.half(b, 2));
            (0..32).for_each(|i| out[i] = level(nibble(&b[4..], i), d, m));
        }),
        GgmlType::Q5_0 => of(32, 22, |all, b, out| {
            let d = all.half(b, 0);
            (0..32).for_each(|i| out[i] = level(nibble(&b[6..], i) + fifth(&b[2..], i) - 16.0, d, 0.0));
        }),
        GgmlType::Q5_1 => of(32, 24, |all, b, out| {
            let (d, m) = (all.half(b, 0), all.half(b, 2));
            (0..32).for_each(|i| out[i] = level(nibble(&b[8..], i) + fifth(&b[4..], i), d, m));
        }),
        GgmlType::MXFP4 => of(32, 17, |_, b, out| {
            // A byte of 255 is a number here: 2^128, past what an f32 holds, but for the elements below 1.
            let scale = 2f64.powi(i32::from(b[0]) - 127);
            (0..32).for_each(|i| out[i] = (e2m1(nibble(&b[1..], i)) * scale) as f32);
        }),
        GgmlType::NVFP4 => of(64, 36, |all, b, out| all.nvfp4(b, 1.0, out)),
        GgmlType::Q1_0 => of(128, 18, |all, b, out| {
            let d = all.half(b, 0);
            (0..128).for_each(|i| out[i] = if b[2 + i / 8] >> (i % 8) & 1 == 1 { d } else { -d });
        }),
        // Codes in their order, four to the byte.
        GgmlType::Q2_0 => of(64, 18, |all, b, out| {
            let d = all.half(b, 0);
            (0..64).for_each(|i| out[i] = level(f64::from(b[2 + i / 4] >> (i % 4 * 2) & 3) - 1.0, d, 0.0));
        }),
        // A scale, the sum of the elements for dot products, and the elements.
        GgmlType::Q8_1 => of(32, 36, |all, b, out| {
            let d = all.half(b, 0);
            (0..32).for_each(|i| out[i] = level(f64::from(b[4 + i] as i8), d, 0.0));
        }),
        // The scale is an f32; sums of 16 elements follow.
        GgmlType::Q8_K => of(256, 292, |_, b, out| {
            let d = f32::from_le_bytes([b[0], b[1], b[2], b[3]]);
            (0..256).for_each(|i| out[i] = level(f64::from(b[4 + i] as i8), d, 0.0));
        }),
        GgmlType::TQ1_0 => of(256, 54, |all, b, out| {
            let d = all.half(b, 52);
            (0..256).for_each(|i| out[i] = level(trit(b, i), d, 0.0));
        }),
        GgmlType::TQ2_0 => of(256, 66, |all, b, out| {
            let d = all.half(b, 64);
            // Four 2-bit codes to the byte, 32 elements apart.
            let code = |i: usize| b[i / 128 * 32 + i % 32] >> (i / 32 % 4 * 2) & 3;
            (0..256).for_each(|i| out[i] = level(f64::from(code(i)) - 1.0, d, 0.0));
        }),
        GgmlType::Q2_K => of(256, 84, |all, b, out| all.elements(b, gguf_super::q2_k, out)),
        GgmlType::Q3_K => of(256, 110, |all, b, out| all.elements(b, gguf_super::q3_k, out)),
        GgmlType::Q4_K => of(256, 144, |all, b, out| all.elements(b, gguf_super::q4_k, out)),
        GgmlType::Q5_K => of(256, 176, |all, b, out| all.elements(b, gguf_super::q5_k, out)),
        GgmlType::Q6_K => of(256, 210, |all, b, out| all.elements(b, gguf_super::q6_k, out)),
        GgmlType::IQ4_NL => of(32, 18, |all, b, out| all.elements(b, gguf_super::iq4_nl, out)),
        GgmlType::IQ4_XS => of(256, 136, |all, b, out| all.elements(b, gguf_super::iq4_xs, out)),
        GgmlType::IQ2_XXS => of(256, 66, |all, b, out| all.elements(b, gguf_super::iq2_xxs, out)),
        GgmlType::IQ2_XS => of(256, 74, |all, b, out| all.elements(b, gguf_super::iq2_xs, out)),
        GgmlType::IQ2_S => of(256, 82, |all, b, out| all.elements(b, gguf_super::iq2_s, out)),
        GgmlType::IQ3_XXS => of(256, 98, |all, b, out| all.elements(b, gguf_super::iq3_xxs, out)),
        GgmlType::IQ3_S => of(256, 110, |all, b, out| all.elements(b, gguf_super::iq3_s, out)),
        GgmlType::IQ1_S => of(256, 50, |all, b, out| all.elements(b, gguf_super::iq1_s, out)),
        GgmlType::IQ1_M => of(256, 56, |all, b, out| all.elements(b, gguf_super::iq1_m, out)),
        _ => None,
    }
}

impl Blocks {
    pub(super) fn new() -> Self {
        Blocks { half: float_values(5, 10, 15) }
    }

    /// Whether the type is decoded here.
    pub(super) fn decodes(ty: GgmlType) -> bool {
        layout(ty).is_some()
    }

    /// Decodes whole blocks of `ty`; `factor` multiplies the scales of NVFP4. Other types are left as they are.
    pub(super) fn decode(&self, ty: GgmlType, bytes: &[u8], factor: Option<f32>, out: &mut [f32]) {
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

    /// Four scales, then four times 16 elements. A scale times the factor is an f32 of its own.
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

/// `code · d + m`; exact but for the rounding to f32, as both factors are short.
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

/// An E4M3 without sign; the byte that is NaN elsewhere is 0.
fn ue4m3(code: u8) -> f64 {
    let (exponent, fraction) = (i32::from(code >> 3 & 15), f64::from(code & 7) / 8.0);
    match (code, exponent) {
        (0x7f, _) => 0.0,
        (_, 0) => fraction * 2f64.powi(-6),
        _ => (1.0 + fraction) * 2f64.powi(exponent - 7),
    }
}

/// Element `i` of a TQ1_0 block: a byte is a number of five base-3 digits, as a fraction of 256 rounded up. 32 bytes hold
/// digit after digit of 32 elements, 16 bytes of 16, and four bytes of four.
fn trit(block: &[u8], i: usize) -> f64 {
    let (byte, digit) = match i {
        0..160 => (i % 32, i / 32),
        160..240 => (32 + i % 16, (i - 160) / 16),
        _ => (48 + i % 4, (i - 240) / 4),
    };
    let number = u32::from(block[byte]) * 243 / 256;
    f64::from(number / 3u32.pow(4 - digit as u32) % 3) - 1.0
}

/// Elements that are rounded together: a weight's error is bounded by the range of these in the source.
pub(super) fn bound_group(ty: GgmlType) -> usize {
    if ty == GgmlType::NVFP4 { 16 } else { layout(ty).map_or(1, |layout| layout.elements) }
}

/// The most by which rounding the group `x` of the source to nearest may miss an element, under any rule that writes the
/// type: half a step, a whole one where the largest element of the other sign is clipped or steps grow, and what rounding
/// scale and offset to their own formats adds. `factor` is that of the whole tensor. Where the elements were `weighed` by the
/// importance of their columns, the 4- and 5-bit types are searched for too.
pub(super) fn allowed(ty: GgmlType, x: &[f32], factor: f32, weighed: bool) -> f64 {
    let (low, high) =
        x.iter().fold((f64::MAX, f64::MIN), |(low, high), &v| (low.min(v.into()), high.max(v.into())));
    let amax = low.abs().max(high.abs());
    // Of the step, and of scales in f16: half a unit of 2^-11 of the scale, or of 2^-24 where it is subnormal.
    let steps = |step: f64, codes: f64| step * 1.0001 + amax * 2f64.powi(-10) + codes * 2f64.powi(-24);
    match ty {
        GgmlType::F32 => 0.0,
        GgmlType::F16 => amax * 2f64.powi(-10) + 2f64.powi(-24),
        GgmlType::BF16 => amax * 2f64.powi(-7) + 2f64.powi(-133),
        GgmlType::Q8_0 | GgmlType::Q8_1 => steps(amax / 127.0 / 2.0, 127.0),
        GgmlType::Q8_K => steps(amax / 127.0, 0.0),
        GgmlType::Q4_0 if !weighed => steps(amax / 8.0, 8.0),
        GgmlType::Q5_0 if !weighed => steps(amax / 16.0, 16.0),
        GgmlType::Q4_1 if !weighed => steps((high - low) / 15.0 / 2.0, 16.0),
        GgmlType::Q5_1 if !weighed => steps((high - low) / 31.0 / 2.0, 32.0),
        GgmlType::TQ1_0 | GgmlType::TQ2_0 | GgmlType::Q2_0 => steps(amax / 2.0, 1.0),
        // 6 of the scale, the largest element, is at least 6/8 of amax under the rule that clips most; the widest step is 2.
        GgmlType::MXFP4 => amax * 0.5 * 1.0001 + 2f64.powi(-125),
        // The scale is amax/6, or amax/4 by choice, to 1/16 of it or half its smallest step.
        GgmlType::NVFP4 => amax * (2.0 / 6.0 + 1.0 / 16.0) + f64::from(factor.abs()) * 6.0 * 2f64.powi(-9),
        // Searched for, so that one element may give way to others of more importance; but never further than its block.
        _ => 2.0 * amax * 1.0001 + 2f64.powi(-12),
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used, clippy::panic)]
mod tests {
    use super::*;
    use mantissa_num::{CodecId, round::random_u32};
    use mantissa_store::gguf::Storage;

    fn codec_of(ty: GgmlType) -> CodecId {
        match ty.storage {
            Storage::Blocks(id) => id,
            _ => panic!("{} has no blocks", ty.name),
        }
    }

    const TYPES: [GgmlType; 27] = [
        GgmlType::IQ1_S,
        GgmlType::IQ1_M,
        GgmlType::IQ2_XXS,
        GgmlType::IQ2_XS,
        GgmlType::IQ2_S,
        GgmlType::IQ3_XXS,
        GgmlType::IQ3_S,
        GgmlType::Q2_K,
        GgmlType::Q3_K,
        GgmlType::Q4_K,
        GgmlType::Q5_K,
        GgmlType::Q6_K,
        GgmlType::IQ4_NL,
        GgmlType::IQ4_XS,
        GgmlType::Q1_0,
        GgmlType::Q2_0,
        GgmlType::Q8_1,
        GgmlType::Q8_K,
        GgmlType::Q4_0,
        GgmlType::Q4_1,
        GgmlType::Q5_0,
        GgmlType::Q5_1,
        GgmlType::Q8_0,
        GgmlType::MXFP4,
        GgmlType::NVFP4,
        GgmlType::TQ1_0,
        GgmlType::TQ2_0,
    ];

    #[test]
    fn any_bytes_decode_as_the_reference_decodes_them() {
        let blocks = Blocks::new();
        for ty in TYPES {
            let (elements, bytes) = ty.block();
            let codec = codec_of(ty).codec();
            for seed in 0..2000 {
                let block: Vec<u8> = (0..bytes as u64).map(|i| random_u32(seed, i) as u8).collect();
                let (mut ours, mut expected) = (vec![f32::NAN; elements], vec![0.0; elements]);
                blocks.decode(ty, &block, None, &mut ours);
                codec.decode_block(&block, &mut expected);
                for (a, b) in ours.iter().zip(&expected) {
                    assert!(a == b || (a.is_nan() && b.is_nan()), "{}: {a} {b} {block:?}", ty.name);
                }
            }
        }
    }

    #[test]
    fn what_the_writer_rounds_is_within_the_bound_and_a_wrong_scale_is_not() {
        let blocks = Blocks::new();
        // Q1_0 knows signs only, and its error has no bound; what is searched for is bounded by its block alone.
        let bounded = |ty: &&GgmlType| **ty != GgmlType::Q1_0 && !codec_of(**ty).codec().is_searched();
        for &ty in TYPES.iter().filter(bounded) {
            let (elements, bytes) = ty.block();
            let (mut worst, mut doubled) = (0f64, 0f64);
            for seed in 0..500 {
                let size = 2f32.powi((random_u32(seed, 1 << 40) % 40) as i32 - 28);
                let x: Vec<f32> = (0..elements as u64)
                    .map(|i| (random_u32(seed, i) as f32 / u32::MAX as f32 - 0.4) * size)
                    .collect();
                let (mut block, mut out) = (vec![0; bytes], vec![0.0; elements]);
                codec_of(ty).codec().encode_block(&x, &mut block);
                blocks.decode(ty, &block, None, &mut out);
                let group = bound_group(ty);
                for (x, out) in x.chunks(group).zip(out.chunks(group)) {
                    let bound = allowed(ty, x, 1.0, false);
                    let ratio = |factor: f32| {
                        let error = |(x, v): (&f32, &f32)| f64::from((x - factor * v).abs());
                        x.iter().zip(out).map(error).fold(0.0, f64::max) / bound
                    };
                    worst = worst.max(ratio(1.0));
                    if size > 1.0 {
                        doubled = doubled.max(ratio(2.0));
                    }
                }
            }
            assert!(worst <= 1.0 && worst > 0.3, "{}: {worst}", ty.name);
            assert!(doubled > 1.0, "{}: {doubled}", ty.name);
        }
    }
}
