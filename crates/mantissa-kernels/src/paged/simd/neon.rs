//! [`TileSimd`] for NEON, without and with the dot product.

use super::{LANES, TileSimd};
use crate::simd::neon::{Four, four, greater, halves_f32, methods, sdot, wide_bytes, wide_words};
use std::arch::aarch64::*;
use std::arch::asm;

/// Proof that NEON is available.
#[derive(Clone, Copy, Debug)]
pub(in crate::paged) struct Neon(());

impl Neon {
    #[inline]
    #[target_feature(enable = "neon")]
    pub(in crate::paged) fn new() -> Self {
        Self(())
    }
}

/// Proof that NEON and the dot product are available.
#[derive(Clone, Copy, Debug)]
pub(in crate::paged) struct NeonDotprod(());

impl NeonDotprod {
    #[inline]
    #[target_feature(enable = "neon,dotprod")]
    pub(in crate::paged) fn new() -> Self {
        Self(())
    }
}

/// Operations of both levels.
macro_rules! shared {
    () => {
        const WIDE: bool = false;
        const CODE_OFFSET: i32 = 0;

        type F32 = Four<float32x4_t>;
        type I32 = Four<int32x4_t>;
        type Bytes = Four<uint8x16_t>;
        type Words = Four<int16x8_t>;

        methods! {
            fn splat(self, x: f32) -> Four<float32x4_t> { [vdupq_n_f32(x); 4] }
            fn load(self, x: &[f32; LANES]) -> Four<float32x4_t> { four!(I => vld1q_f32(x.as_ptr().add(4 * I))) }
            fn store(self, a: Four<float32x4_t>, x: &mut [f32; LANES]) -> () {{
                four!(I => vst1q_f32(x.as_mut_ptr().add(4 * I), a[I]));
            }}
            fn add(self, a: Four<float32x4_t>, b: Four<float32x4_t>) -> Four<float32x4_t> {
                four!(I => vaddq_f32(a[I], b[I]))
            }
            fn mul(self, a: Four<float32x4_t>, b: Four<float32x4_t>) -> Four<float32x4_t> {
                four!(I => vmulq_f32(a[I], b[I]))
            }
            fn mul_add(self, a: Four<float32x4_t>, b: Four<float32x4_t>, c: Four<float32x4_t>) -> Four<float32x4_t> {
                four!(I => vfmaq_f32(c[I], a[I], b[I]))
            }
            fn greater(self, a: Four<float32x4_t>, b: Four<float32x4_t>) -> Four<float32x4_t> {
                four!(I => greater(a[I], b[I]))
            }
            fn add_exponent(self, a: Four<float32x4_t>, n: Four<float32x4_t>) -> Four<float32x4_t> {
                four!(I => {
                    let n = vshlq_n_u32::<23>(vreinterpretq_u32_f32(n[I]));
                    vreinterpretq_f32_u32(vaddq_u32(vreinterpretq_u32_f32(a[I]), n))
                })
            }
            fn max_lane(self, a: Four<float32x4_t>) -> f32 {
                vmaxvq_f32(vmaxq_f32(vmaxq_f32(a[0], a[1]), vmaxq_f32(a[2], a[3])))
            }
            fn sum_lanes(self, a: Four<float32x4_t>) -> f32 {{
                let four = vaddq_f32(vaddq_f32(a[0], a[2]), vaddq_f32(a[1], a[3]));
                let two = vadd_f32(vget_low_f32(four), vget_high_f32(four));
                vget_lane_f32::<0>(two) + vget_lane_f32::<1>(two)
            }}
            fn f32(self, x: &[u8; 64]) -> Four<float32x4_t> {
                four!(I => vreinterpretq_f32_u8(vld1q_u8(x.as_ptr().add(16 * I))))
            }
            fn f16(self, x: &[u8; 32]) -> Four<float32x4_t> {{
                let [low, high] = [vld1q_u8(x.as_ptr()), vld1q_u8(x.as_ptr().add(16))];
                halves_f32([vreinterpretq_u16_u8(low), vreinterpretq_u16_u8(high)])
            }}
            fn bf16(self, x: &[u8; 32]) -> Four<float32x4_t> {{
                let [low, high] = [vld1q_u8(x.as_ptr()), vld1q_u8(x.as_ptr().add(16))];
                let wide = wide_words([vreinterpretq_u16_u8(low), vreinterpretq_u16_u8(high)]);
                four!(I => vreinterpretq_f32_u32(vshlq_n_u32::<16>(wide[I])))
            }}
            // The f16 of 2^-8 times the value of each E4M3: the sign stays on top, the rest moves by seven bits.
            fn e4m3(self, x: &[u8; 16]) -> Four<float32x4_t> {{
                let x = vld1q_s8(x.as_ptr().cast());
                let half = |x| {
                    let moved = vreinterpretq_u16_s16(vshlq_n_s16::<7>(vmovl_s8(x)));
                    vandq_u16(moved, vdupq_n_u16(0b1_01111_1110000000))
                };
                halves_f32([half(vget_low_s8(x)), half(vget_high_s8(x))])
            }}
            fn unsigned(self, x: &[u8; 16]) -> Four<float32x4_t> {{
                let wide = wide_words(wide_bytes(x));
                four!(I => vcvtq_f32_u32(wide[I]))
            }}
            fn zero(self) -> Four<int32x4_t> { [vdupq_n_s32(0); 4] }
            fn to_f32(self, a: Four<int32x4_t>) -> Four<float32x4_t> { four!(I => vcvtq_f32_s32(a[I])) }
            fn minus(self, a: Four<int32x4_t>, x: i32) -> Four<int32x4_t> {
                four!(I => vsubq_s32(a[I], vdupq_n_s32(x)))
            }
            fn bytes(self, x: &[u8; 64]) -> Four<uint8x16_t> { four!(I => vld1q_u8(x.as_ptr().add(16 * I))) }
            fn low_nibbles(self, a: Four<uint8x16_t>) -> Four<uint8x16_t> {
                four!(I => vandq_u8(a[I], vdupq_n_u8(15)))
            }
            fn high_nibbles(self, a: Four<uint8x16_t>) -> Four<uint8x16_t> { four!(I => vshrq_n_u8::<4>(a[I])) }
            fn dot_codes(self, sum: Four<int32x4_t>, codes: Four<uint8x16_t>, q: i32) -> Four<int32x4_t> {
                self.dot_nibbles(sum, four!(I => veorq_u8(codes[I], vdupq_n_u8(128))), q)
            }
            fn words(self, x: &[u8; 32]) -> Four<int16x8_t> {
                four!(I => vmovl_s8(vld1_s8(x.as_ptr().add(8 * I).cast())))
            }
            fn dot_words(self, sum: Four<int32x4_t>, a: Four<int16x8_t>, w: i32) -> Four<int32x4_t> {{
                let w = vreinterpretq_s16_s32(vdupq_n_s32(w));
                four!(I => {
                    let low = vmull_s16(vget_low_s16(a[I]), vget_low_s16(w));
                    vaddq_s32(sum[I], vpaddq_s32(low, vmull_high_s16(a[I], w)))
                })
            }}
            fn prefetch(self, x: &[u8]) -> () {{
                for line in x.chunks(64) {
                    asm!("prfm pldl2keep, [{line}]", line = in(reg) line.as_ptr(),
                        options(nostack, readonly, preserves_flags));
                }
            }}
        }

        #[inline(always)]
        fn nibble_words<const N: u32>(self, a: Four<uint8x16_t>) -> Four<int16x8_t> {
            // SAFETY: every AArch64 target has NEON.
            unsafe {
                let n = vdupq_n_s16(-(4 * N as i16));
                four!(I => {
                    let moved = vshlq_u16(vreinterpretq_u16_u8(a[I]), n);
                    vreinterpretq_s16_u16(vandq_u16(moved, vdupq_n_u16(15)))
                })
            }
        }
    };
}

impl TileSimd for NeonDotprod {
    shared!();

    methods! {
        fn dot_nibbles(self, sum: Four<int32x4_t>, codes: Four<uint8x16_t>, q: i32) -> Four<int32x4_t> {{
            let q = f32::from_bits(q as u32);
            four!(I => sdot(sum[I], codes[I], q))
        }}
    }
}

impl TileSimd for Neon {
    shared!();

    methods! {
        // Magnitudes of signed codes are at most 128, of `q` at most 127: a pair of products stays below
        // 2^15.
        fn dot_nibbles(self, sum: Four<int32x4_t>, codes: Four<uint8x16_t>, q: i32) -> Four<int32x4_t> {{
            let q = vreinterpretq_s8_s32(vdupq_n_s32(q));
            four!(I => {
                let codes = vreinterpretq_s8_u8(codes[I]);
                let low = vmull_s8(vget_low_s8(codes), vget_low_s8(q));
                vpadalq_s16(sum[I], vpaddq_s16(low, vmull_high_s8(codes, q)))
            })
        }}
    }
}
