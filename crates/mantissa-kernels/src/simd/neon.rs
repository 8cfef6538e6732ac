//! [`Simd`] for AArch64 (groups of 4-lane registers), and instructions that other modules share.
//!
//! The intrinsics of dot products, f16 and prefetches are not stable in the oldest supported compiler, so that those
//! instructions are inline assembly.

use super::{LANES, Portable, Simd};
use mantissa_num::lanes::{Lanes, Work};
use std::arch::aarch64::*;
use std::arch::asm;

/// Four registers: 16 lanes of 32 bits, or 64 bytes.
pub(crate) type Four<T> = [T; 4];

/// Sixteen lanes of f64.
type Eight = [float64x2_t; 8];

/// Implements the methods of a level. Bodies use the level's instructions and read or write whole arrays by pointer.
macro_rules! methods {
    ($(fn $name:ident($self:ident $(, $arg:ident: $ty:ty)*) -> $ret:ty { $body:expr })*) => {
        $(
            #[inline(always)]
            fn $name($self $(, $arg: $ty)*) -> $ret {
                // SAFETY: `self` exists only if the level's features are available, and pointers come from references
                // to arrays of exactly the elements that the body reads or writes, without alignment requirements.
                unsafe { $body }
            }
        )*
    };
}
pub(crate) use methods;

/// Evaluates an expression for each of four registers.
macro_rules! four {
    ($i:ident => $body:expr) => {
        [four!(@ 0, $i, $body), four!(@ 1, $i, $body), four!(@ 2, $i, $body), four!(@ 3, $i, $body)]
    };
    (@ $at:literal, $i:ident, $body:expr) => {{
        const $i: usize = $at;
        $body
    }};
}
pub(crate) use four;

/// Evaluates an expression for each of eight registers.
macro_rules! eight {
    ($i:ident => $body:expr) => {
        [
            four!(@ 0, $i, $body), four!(@ 1, $i, $body), four!(@ 2, $i, $body), four!(@ 3, $i, $body),
            four!(@ 4, $i, $body), four!(@ 5, $i, $body), four!(@ 6, $i, $body), four!(@ 7, $i, $body),
        ]
    };
}
pub(crate) use eight;

/// Adds to four i32 the products of four signed bytes each of `w` and the four in `x`. As f32 these are loaded into a
/// vector register, of which the instruction takes a lane.
#[inline]
#[target_feature(enable = "neon,dotprod")]
pub(crate) fn sdot(sum: int32x4_t, w: uint8x16_t, x: f32) -> int32x4_t {
    let mut sum = sum;
    // SAFETY: an instruction on registers, which the processor has.
    unsafe {
        asm!("sdot {sum:v}.4s, {w:v}.16b, {x:v}.4b[0]", sum = inout(vreg) sum, w = in(vreg) w, x = in(vreg) x,
            options(pure, nomem, nostack, preserves_flags));
    }
    sum
}

/// [`sdot`] of unsigned bytes in `w` and signed ones in `x`.
#[inline]
#[target_feature(enable = "neon,i8mm")]
pub(crate) fn usdot(sum: int32x4_t, w: uint8x16_t, x: f32) -> int32x4_t {
    let mut sum = sum;
    // SAFETY: an instruction on registers, which the processor has.
    unsafe {
        asm!("usdot {sum:v}.4s, {w:v}.16b, {x:v}.4b[0]", sum = inout(vreg) sum, w = in(vreg) w, x = in(vreg) x,
            options(pure, nomem, nostack, preserves_flags));
    }
    sum
}

/// Widens four f16.
#[inline]
#[target_feature(enable = "neon")]
fn half_f32(x: uint16x4_t) -> float32x4_t {
    let wide;
    // SAFETY: an instruction on registers, which the processor has.
    unsafe {
        asm!("fcvtl {wide:v}.4s, {x:v}.4h", wide = lateout(vreg) wide, x = in(vreg) x,
            options(pure, nomem, nostack, preserves_flags));
    }
    wide
}

/// Rounds to four f16, to nearest with ties to even.
#[inline]
#[target_feature(enable = "neon")]
fn f32_half(x: float32x4_t) -> uint16x4_t {
    let half;
    // SAFETY: an instruction on registers, which the processor has.
    unsafe {
        asm!("fcvtn {half:v}.4h, {x:v}.4s", half = lateout(vreg) half, x = in(vreg) x,
            options(pure, nomem, nostack, preserves_flags));
    }
    half
}

/// Widens 16 f16.
#[inline]
#[target_feature(enable = "neon")]
pub(crate) fn halves_f32([low, high]: [uint16x8_t; 2]) -> Four<float32x4_t> {
    [
        half_f32(vget_low_u16(low)),
        half_f32(vget_high_u16(low)),
        half_f32(vget_low_u16(high)),
        half_f32(vget_high_u16(high)),
    ]
}

/// Widens 16 bytes to 16 bits.
#[inline]
#[target_feature(enable = "neon")]
pub(crate) fn wide_bytes(x: &[u8; LANES]) -> [uint16x8_t; 2] {
    // SAFETY: reads the 16 bytes of the array, without alignment requirements.
    let x = unsafe { vld1q_u8(x.as_ptr()) };
    [vmovl_u8(vget_low_u8(x)), vmovl_high_u8(x)]
}

/// Widens 16 integers of 16 bits to 32.
#[inline]
#[target_feature(enable = "neon")]
pub(crate) fn wide_words([low, high]: [uint16x8_t; 2]) -> Four<uint32x4_t> {
    [vmovl_u16(vget_low_u16(low)), vmovl_high_u16(low), vmovl_u16(vget_low_u16(high)), vmovl_high_u16(high)]
}

/// `if b > a { b } else { a }` in every lane. (The instruction for a maximum returns NaN if one of the values is.)
#[inline]
#[target_feature(enable = "neon")]
pub(crate) fn greater(a: float32x4_t, b: float32x4_t) -> float32x4_t {
    vbslq_f32(vcgtq_f32(b, a), b, a)
}

/// `if b < a { b } else { a }` in every lane.
#[inline]
#[target_feature(enable = "neon")]
fn lesser(a: float32x4_t, b: float32x4_t) -> float32x4_t {
    vbslq_f32(vcltq_f32(b, a), b, a)
}

/// Proof that NEON is available.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Neon(());

impl Neon {
    #[inline]
    #[target_feature(enable = "neon")]
    pub(crate) fn new() -> Self {
        Self(())
    }
}

impl Simd for Neon {
    type F32 = Four<float32x4_t>;
    type F64 = Eight;

    // 32 registers, but of four lanes.
    const WIDE: bool = false;

    methods! {
        fn splat(self, x: f32) -> Four<float32x4_t> { [vdupq_n_f32(x); 4] }
        fn load(self, x: &[f32; LANES]) -> Four<float32x4_t> { four!(I => vld1q_f32(x.as_ptr().add(4 * I))) }
        fn to_array(self, a: Four<float32x4_t>) -> [f32; LANES] { std::mem::transmute(a) }
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
        fn lesser(self, a: Four<float32x4_t>, b: Four<float32x4_t>) -> Four<float32x4_t> {
            four!(I => lesser(a[I], b[I]))
        }
        fn max_abs(self, a: Four<float32x4_t>, b: Four<float32x4_t>) -> Four<float32x4_t> {
            four!(I => vreinterpretq_f32_u32(vmaxq_u32(
                vreinterpretq_u32_f32(a[I]),
                vreinterpretq_u32_f32(vabsq_f32(b[I])),
            )))
        }
        fn max_lane(self, a: Four<float32x4_t>) -> f32 {{
            let bits = four!(I => vreinterpretq_u32_f32(a[I]));
            f32::from_bits(vmaxvq_u32(vmaxq_u32(vmaxq_u32(bits[0], bits[1]), vmaxq_u32(bits[2], bits[3]))))
        }}
        fn splat_f64(self, x: f64) -> Eight { [vdupq_n_f64(x); 8] }
        fn load_f64(self, x: &[f64; LANES]) -> Eight { eight!(I => vld1q_f64(x.as_ptr().add(2 * I))) }
        fn load_wide(self, x: &[f32; LANES]) -> Eight { eight!(I => vcvt_f64_f32(vld1_f32(x.as_ptr().add(2 * I)))) }
        fn sub_f64(self, a: Eight, b: Eight) -> Eight { eight!(I => vsubq_f64(a[I], b[I])) }
        fn mul_f64(self, a: Eight, b: Eight) -> Eight { eight!(I => vmulq_f64(a[I], b[I])) }
        fn max_abs_f64(self, a: Eight, b: Eight) -> Eight {
            eight!(I => {
                let b = vabsq_f64(b[I]);
                vbslq_f64(vcgtq_f64(b, a[I]), b, a[I])
            })
        }
        fn add_f64(self, a: Eight, b: Eight) -> Eight { eight!(I => vaddq_f64(a[I], b[I])) }
        fn sub_mul_f64(self, a: Eight, b: Eight, c: Eight) -> Eight { eight!(I => vfmsq_f64(c[I], a[I], b[I])) }
        fn to_array_f64(self, a: Eight) -> [f64; LANES] { std::mem::transmute(a) }
        fn prefetch(self, x: &[f32]) -> () {
            asm!("prfm pstl1keep, [{x}]", x = in(reg) x.as_ptr(), options(nostack, preserves_flags))
        }
    }

    #[inline(always)]
    fn transpose_8x8(self, rows: [&[u32; 8]; 8]) -> [[u32; 8]; 8] {
        Portable.transpose_8x8(rows)
    }
}

impl Lanes for Neon {
    type V = Four<float32x4_t>;

    #[inline(always)]
    fn call<W: Work>(self, work: W) -> W::Out {
        #[inline(never)]
        fn apart<W: Work>(l: Neon, work: W) -> W::Out {
            work.run(l)
        }
        apart(self, work)
    }

    #[inline(always)]
    fn swap_halves(self, a: Four<float32x4_t>) -> Four<float32x4_t> {
        [a[2], a[3], a[0], a[1]]
    }

    methods! {
        fn splat(self, x: f32) -> Four<float32x4_t> { [vdupq_n_f32(x); 4] }
        fn load(self, x: &[f32; LANES]) -> Four<float32x4_t> { four!(I => vld1q_f32(x.as_ptr().add(4 * I))) }
        fn to_array(self, a: Four<float32x4_t>) -> [f32; LANES] { std::mem::transmute(a) }
        fn add(self, a: Four<float32x4_t>, b: Four<float32x4_t>) -> Four<float32x4_t> {
            four!(I => vaddq_f32(a[I], b[I]))
        }
        fn sub(self, a: Four<float32x4_t>, b: Four<float32x4_t>) -> Four<float32x4_t> {
            four!(I => vsubq_f32(a[I], b[I]))
        }
        fn mul(self, a: Four<float32x4_t>, b: Four<float32x4_t>) -> Four<float32x4_t> {
            four!(I => vmulq_f32(a[I], b[I]))
        }
        fn mul_add(self, a: Four<float32x4_t>, b: Four<float32x4_t>, c: Four<float32x4_t>) -> Four<float32x4_t> {
            four!(I => vfmaq_f32(c[I], a[I], b[I]))
        }
        fn sub_mul(self, a: Four<float32x4_t>, b: Four<float32x4_t>, c: Four<float32x4_t>) -> Four<float32x4_t> {
            four!(I => vfmsq_f32(c[I], a[I], b[I]))
        }
        fn div(self, a: Four<float32x4_t>, b: Four<float32x4_t>) -> Four<float32x4_t> {
            four!(I => vdivq_f32(a[I], b[I]))
        }
        fn abs(self, a: Four<float32x4_t>) -> Four<float32x4_t> { four!(I => vabsq_f32(a[I])) }
        fn trunc(self, a: Four<float32x4_t>) -> Four<float32x4_t> { four!(I => vrndq_f32(a[I])) }
        fn greater(self, a: Four<float32x4_t>, b: Four<float32x4_t>) -> Four<float32x4_t> {
            four!(I => greater(a[I], b[I]))
        }
        fn lesser(self, a: Four<float32x4_t>, b: Four<float32x4_t>) -> Four<float32x4_t> {
            four!(I => lesser(a[I], b[I]))
        }
        fn if_less(
            self, a: Four<float32x4_t>, b: Four<float32x4_t>, x: Four<float32x4_t>, y: Four<float32x4_t>
        ) -> Four<float32x4_t> {
            four!(I => vbslq_f32(vcltq_f32(a[I], b[I]), x[I], y[I]))
        }
        fn least(self, a: Four<float32x4_t>) -> (usize, f32) {{
            let least = vminvq_f32(vminq_f32(vminq_f32(a[0], a[1]), vminq_f32(a[2], a[3])));
            let places: [u32; LANES] = std::array::from_fn(|i| i as u32);
            let none = vdupq_n_u32(LANES as u32 - 1);
            let first = four!(I => vbslq_u32(
                vceqq_f32(a[I], vdupq_n_f32(least)),
                vld1q_u32(places.as_ptr().add(4 * I)),
                none,
            ));
            let first = vminq_u32(vminq_u32(first[0], first[1]), vminq_u32(first[2], first[3]));
            (vminvq_u32(first) as usize, least)
        }}
        fn greatest(self, a: Four<float32x4_t>) -> f32 {
            vmaxvq_f32(vmaxq_f32(vmaxq_f32(a[0], a[1]), vmaxq_f32(a[2], a[3])))
        }
        fn bytes(self, a: Four<float32x4_t>) -> [u8; LANES] {{
            let words = four!(I => vmovn_s32(vcvtq_s32_f32(a[I])));
            let low = vmovn_s16(vcombine_s16(words[0], words[1]));
            std::mem::transmute(vcombine_s8(low, vmovn_s16(vcombine_s16(words[2], words[3]))))
        }}
        fn halves(self, a: Four<float32x4_t>) -> [u16; LANES] { std::mem::transmute(four!(I => f32_half(a[I]))) }
    }
}
