//! [`Dot`] for AArch64: NEON, NEON with the signed dot product (`SDOT`), and with the dot product of unsigned and
//! signed bytes (`USDOT`).

use std::arch::aarch64::*;

use super::ROWS;
use super::dot::{Dot, MiniBits, Quad};
use crate::simd::neon::{Four, eight, four, halves_f32, methods, sdot, usdot, wide_bytes, wide_words};

/// Operations that all levels share.
macro_rules! shared {
    () => {
        type B = Four<uint8x16_t>;
        type F = Four<float32x4_t>;

        methods! {
            fn load(self, x: &Quad) -> Four<uint8x16_t> { four!(I => vld1q_u8(x.as_ptr().add(16 * I))) }
            fn store(self, x: Four<uint8x16_t>, out: &mut Quad) -> () {{
                four!(I => vst1q_u8(out.as_mut_ptr().add(16 * I), x[I]));
            }}
            // The counts are constants after inlining; a negative one shifts right.
            fn shift(self, x: Four<uint8x16_t>, n: i32) -> Four<uint8x16_t> {{
                let n = vdupq_n_s16(-n as i16);
                four!(I => vreinterpretq_u8_u16(vshlq_u16(vreinterpretq_u16_u8(x[I]), n)))
            }}
            fn and(self, x: Four<uint8x16_t>, mask: u8) -> Four<uint8x16_t> {
                four!(I => vandq_u8(x[I], vdupq_n_u8(mask)))
            }
            fn or(self, a: Four<uint8x16_t>, b: Four<uint8x16_t>) -> Four<uint8x16_t> {
                four!(I => vorrq_u8(a[I], b[I]))
            }
            fn look_up(self, x: Four<uint8x16_t>, table: &[u8; 16]) -> Four<uint8x16_t> {{
                let table = vld1q_u8(table.as_ptr());
                four!(I => vqtbl1q_u8(table, x[I]))
            }}
            // A NaN passes through minimum and maximum and becomes 0.
            fn codes(self, x: &[f32; ROWS], divisor: f32, range: (f32, f32), out: &mut [i8; ROWS]) -> () {{
                let wide: Four<int32x4_t> = four!(I => {
                    let x = vdivq_f32(vld1q_f32(x.as_ptr().add(4 * I)), vdupq_n_f32(divisor));
                    vcvtnq_s32_f32(vminq_f32(vmaxq_f32(x, vdupq_n_f32(range.0)), vdupq_n_f32(range.1)))
                });
                let low = vcombine_s16(vmovn_s32(wide[0]), vmovn_s32(wide[1]));
                let high = vcombine_s16(vmovn_s32(wide[2]), vmovn_s32(wide[3]));
                vst1q_s8(out.as_mut_ptr(), vcombine_s8(vmovn_s16(low), vmovn_s16(high)));
            }}
            fn wide_bf16_pairs(self, x: &Quad) -> [Four<float32x4_t>; 2] {{
                let pairs: Four<uint32x4_t> = four!(I => vld1q_u32(x.as_ptr().cast::<u32>().add(4 * I)));
                let high = vdupq_n_u32(0xffff_0000);
                [
                    four!(I => vreinterpretq_f32_u32(vshlq_n_u32::<16>(pairs[I]))),
                    four!(I => vreinterpretq_f32_u32(vandq_u32(pairs[I], high))),
                ]
            }}
            fn splat(self, x: f32) -> Four<float32x4_t> { [vdupq_n_f32(x); 4] }
            fn load_f32(self, x: &[f32; ROWS]) -> Four<float32x4_t> { four!(I => vld1q_f32(x.as_ptr().add(4 * I))) }
            fn store_f32(self, x: Four<float32x4_t>, out: &mut [f32; ROWS]) -> () {{
                four!(I => vst1q_f32(out.as_mut_ptr().add(4 * I), x[I]));
            }}
            fn mul(self, a: Four<float32x4_t>, b: Four<float32x4_t>) -> Four<float32x4_t> {
                four!(I => vmulq_f32(a[I], b[I]))
            }
            fn mul_add(self, a: Four<float32x4_t>, b: Four<float32x4_t>, c: Four<float32x4_t>) -> Four<float32x4_t> {
                four!(I => vfmaq_f32(c[I], a[I], b[I]))
            }
            fn wide_f16(self, x: &[u8; 2 * ROWS]) -> Four<float32x4_t> {{
                let [low, high] = [vld1q_u8(x.as_ptr()), vld1q_u8(x.as_ptr().add(16))];
                halves_f32([vreinterpretq_u16_u8(low), vreinterpretq_u16_u8(high)])
            }}
            fn wide_bf16(self, x: &[u8; 2 * ROWS]) -> Four<float32x4_t> {{
                let [low, high] = [vld1q_u8(x.as_ptr()), vld1q_u8(x.as_ptr().add(16))];
                let wide = wide_words([vreinterpretq_u16_u8(low), vreinterpretq_u16_u8(high)]);
                four!(I => vreinterpretq_f32_u32(vshlq_n_u32::<16>(wide[I])))
            }}
            fn wide_i8(self, x: &[u8; ROWS]) -> Four<float32x4_t> {{
                let x = vld1q_s8(x.as_ptr().cast());
                let [low, high] = [vmovl_s8(vget_low_s8(x)), vmovl_s8(vget_high_s8(x))];
                [
                    vcvtq_f32_s32(vmovl_s16(vget_low_s16(low))),
                    vcvtq_f32_s32(vmovl_s16(vget_high_s16(low))),
                    vcvtq_f32_s32(vmovl_s16(vget_low_s16(high))),
                    vcvtq_f32_s32(vmovl_s16(vget_high_s16(high))),
                ]
            }}
            fn wide_u8(self, x: &[u8; ROWS]) -> Four<float32x4_t> {{
                let wide = wide_words(wide_bytes(x));
                four!(I => vcvtq_f32_u32(wide[I]))
            }}
            fn powers(self, x: &[u8; ROWS]) -> Four<float32x4_t> {{
                let wide = wide_words(wide_bytes(x));
                four!(I => vreinterpretq_f32_u32(vshlq_n_u32::<23>(wide[I])))
            }}
            fn wide_e4m3(self, x: &[u8; ROWS]) -> Four<float32x4_t> {{
                let [low, high] = wide_bytes(x);
                halves_f32([vshlq_n_u16::<7>(low), vshlq_n_u16::<7>(high)])
            }}
            fn wide_f32(self, x: &[u8; 4 * ROWS]) -> Four<float32x4_t> {
                four!(I => vreinterpretq_f32_u8(vld1q_u8(x.as_ptr().add(16 * I))))
            }
            fn wide_mini(self, x: &[u8; ROWS], bits: MiniBits) -> Four<float32x4_t> {{
                let place = |x, mask: u8, shift: u32| {
                    vshlq_u16(vandq_u16(x, vdupq_n_u16(mask.into())), vdupq_n_s16(shift as i16))
                };
                let half = |x| {
                    vorrq_u16(place(x, bits.magnitude, bits.shift), place(x, bits.sign, bits.sign_shift))
                };
                let [low, high] = wide_bytes(x);
                halves_f32([half(low), half(high)])
            }}
        }
    };
}

/// Operations on sums of the levels with a dot product, one lane per row.
macro_rules! sums_by_row {
    () => {
        type I = Four<int32x4_t>;

        methods! {
            fn splat_i(self, x: i32) -> Four<int32x4_t> { [vdupq_n_s32(x); 4] }
            fn add_i(self, a: Four<int32x4_t>, b: Four<int32x4_t>) -> Four<int32x4_t> {
                four!(I => vaddq_s32(a[I], b[I]))
            }
            fn to_f32(self, x: Four<int32x4_t>) -> Four<float32x4_t> { four!(I => vcvtq_f32_s32(x[I])) }
        }
    };
}

/// Bytes less 128, as signed bytes.
macro_rules! signed_bytes {
    () => {
        const SIGNED: bool = true;

        methods! {
            fn less_128(self, x: Four<uint8x16_t>) -> Four<uint8x16_t> {
                four!(I => veorq_u8(x[I], vdupq_n_u8(128)))
            }
        }
    };
}

/// Proof that NEON, the dot product and the extension for 8-bit integer matrices are available.
#[derive(Clone, Copy, Debug)]
pub(crate) struct NeonI8mm(());

impl NeonI8mm {
    /// Makes the proof.
    #[inline]
    #[target_feature(enable = "neon,dotprod,i8mm")]
    pub(crate) fn new() -> Self {
        Self(())
    }
}

impl Dot for NeonI8mm {
    shared!();
    sums_by_row!();

    methods! {
        fn dot(self, sum: Four<int32x4_t>, w: Four<uint8x16_t>, x: i32) -> Four<int32x4_t> {{
            let x = f32::from_bits(x as u32);
            four!(I => usdot(sum[I], w[I], x))
        }}
    }
}

/// Proof that NEON and the dot product are available.
#[derive(Clone, Copy, Debug)]
pub(crate) struct NeonDotprod(());

impl NeonDotprod {
    /// Makes the proof.
    #[inline]
    #[target_feature(enable = "neon,dotprod")]
    pub(crate) fn new() -> Self {
        Self(())
    }
}

impl Dot for NeonDotprod {
    shared!();
    sums_by_row!();
    signed_bytes!();

    methods! {
        fn dot(self, sum: Four<int32x4_t>, w: Four<uint8x16_t>, x: i32) -> Four<int32x4_t> {{
            let x = f32::from_bits(x as u32);
            four!(I => sdot(sum[I], w[I], x))
        }}
    }
}

/// Proof that NEON is available.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Neon(());

impl Neon {
    /// Makes the proof.
    #[inline]
    #[target_feature(enable = "neon")]
    pub(crate) fn new() -> Self {
        Self(())
    }
}

impl Dot for Neon {
    /// Each lane pair holds the sums of a row's even and odd pairs of columns: so every product takes two
    /// instructions, and no sum of 16 bits overflows (two products of -128 and -128 would).
    type I = [int32x4_t; 8];

    shared!();
    signed_bytes!();

    methods! {
        fn splat_i(self, x: i32) -> [int32x4_t; 8] { [vreinterpretq_s32_u64(vdupq_n_u64(u64::from(x as u32))); 8] }
        fn add_i(self, a: [int32x4_t; 8], b: [int32x4_t; 8]) -> [int32x4_t; 8] { eight!(I => vaddq_s32(a[I], b[I])) }
        fn to_f32(self, x: [int32x4_t; 8]) -> Four<float32x4_t> {
            four!(I => vcvtq_f32_s32(vpaddq_s32(x[2 * I], x[2 * I + 1])))
        }
        fn dot(self, sum: [int32x4_t; 8], w: Four<uint8x16_t>, x: i32) -> [int32x4_t; 8] {{
            let x = vreinterpretq_s8_s32(vdupq_n_s32(x));
            eight!(I => {
                let w = vreinterpretq_s8_u8(w[I / 2]);
                let products = match I % 2 {
                    0 => vmull_s8(vget_low_s8(w), vget_low_s8(x)),
                    _ => vmull_high_s8(w, x),
                };
                vpadalq_s16(sum[I], products)
            })
        }}
    }
}
