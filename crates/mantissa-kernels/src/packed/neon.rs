//! [`Dot`] for AArch64: NEON, NEON with the signed dot product (`SDOT`), and with that of unsigned and signed bytes
//! (`USDOT`).
//!
//! The intrinsics of both dot products and of f16 are not stable in the oldest supported compiler, so that those
//! instructions are inline assembly. It assembles because every method is inlined into a function that enables the
//! level's features.

use std::arch::aarch64::*;
use std::arch::asm;

use super::ROWS;
use super::dot::{Dot, MiniBits, Quad};

/// Four registers: 64 bytes or 16 lanes of 32 bits.
type Four<T> = [T; 4];

/// Implements the methods of a level. Bodies use the level's instructions and read or write whole arrays by pointer.
macro_rules! methods {
    ($(fn $name:ident($self:ident $(, $arg:ident: $ty:ty)*) -> $ret:ty { $body:expr })*) => {
        $(
            #[inline(always)]
            // Every AArch64 target has NEON, so that only pointers and assembly are unsafe.
            #[allow(unused_unsafe)]
            fn $name($self $(, $arg: $ty)*) -> $ret {
                // SAFETY: `self` exists only if the level's features are available, and pointers come from references
                // to arrays of exactly the elements that the body reads or writes, without alignment requirements.
                unsafe { $body }
            }
        )*
    };
}

/// Applies a function to four registers, without the call that `map` would be in a build without optimization.
macro_rules! four {
    ($i:ident => $body:expr) => {{
        [
            {
                const $i: usize = 0;
                $body
            },
            {
                const $i: usize = 1;
                $body
            },
            {
                const $i: usize = 2;
                $body
            },
            {
                const $i: usize = 3;
                $body
            },
        ]
    }};
}

/// Adds to four i32 the products of four signed bytes each of `w` and the four in `x`.
///
/// # Safety
/// The processor has the dot product.
#[inline(always)]
unsafe fn sdot(sum: int32x4_t, w: uint8x16_t, x: f32) -> int32x4_t {
    let mut sum = sum;
    // SAFETY: an instruction on registers, which the caller knows to exist.
    unsafe {
        asm!("sdot {sum:v}.4s, {w:v}.16b, {x:v}.4b[0]", sum = inout(vreg) sum, w = in(vreg) w, x = in(vreg) x,
            options(pure, nomem, nostack, preserves_flags));
    }
    sum
}

/// Adds to four i32 the products of four unsigned bytes each of `w` and the four signed in `x`.
///
/// # Safety
/// The processor has the extension for 8-bit integer matrices.
#[inline(always)]
unsafe fn usdot(sum: int32x4_t, w: uint8x16_t, x: f32) -> int32x4_t {
    let mut sum = sum;
    // SAFETY: an instruction on registers, which the caller knows to exist.
    unsafe {
        asm!("usdot {sum:v}.4s, {w:v}.16b, {x:v}.4b[0]", sum = inout(vreg) sum, w = in(vreg) w, x = in(vreg) x,
            options(pure, nomem, nostack, preserves_flags));
    }
    sum
}

/// Widens four f16.
#[inline(always)]
fn half_f32(x: uint16x4_t) -> float32x4_t {
    let wide;
    // SAFETY: an instruction on registers that every AArch64 processor has.
    unsafe {
        asm!("fcvtl {wide:v}.4s, {x:v}.4h", wide = lateout(vreg) wide, x = in(vreg) x,
            options(pure, nomem, nostack, preserves_flags));
    }
    wide
}

/// Widens 16 f16.
#[inline(always)]
fn halves_f32(x: [uint16x8_t; 2]) -> Four<float32x4_t> {
    // SAFETY: every AArch64 target has NEON.
    #[allow(unused_unsafe)]
    unsafe {
        [
            half_f32(vget_low_u16(x[0])),
            half_f32(vget_high_u16(x[0])),
            half_f32(vget_low_u16(x[1])),
            half_f32(vget_high_u16(x[1])),
        ]
    }
}

/// Widens 16 bytes to 16 bits.
#[inline(always)]
fn wide_bytes(x: &[u8; ROWS]) -> [uint16x8_t; 2] {
    // SAFETY: reads the 16 bytes of the array; every AArch64 target has NEON.
    unsafe {
        let x = vld1q_u8(x.as_ptr());
        [vmovl_u8(vget_low_u8(x)), vmovl_u8(vget_high_u8(x))]
    }
}

/// Widens 16 integers of 16 bits to 32.
#[inline(always)]
fn wide_words(x: [uint16x8_t; 2]) -> Four<uint32x4_t> {
    // SAFETY: every AArch64 target has NEON.
    #[allow(unused_unsafe)]
    unsafe {
        [
            vmovl_u16(vget_low_u16(x[0])),
            vmovl_u16(vget_high_u16(x[0])),
            vmovl_u16(vget_low_u16(x[1])),
            vmovl_u16(vget_high_u16(x[1])),
        ]
    }
}

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

    // As f32 the four bytes are loaded into a vector register, of which the instruction takes a lane.
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
        fn splat_i(self, x: i32) -> [int32x4_t; 8] { [vsetq_lane_s32::<2>(x, vsetq_lane_s32::<0>(x, vdupq_n_s32(0))); 8] }
        fn add_i(self, a: [int32x4_t; 8], b: [int32x4_t; 8]) -> [int32x4_t; 8] {{
            let [low, high] = [four!(I => vaddq_s32(a[I], b[I])), four!(I => vaddq_s32(a[I + 4], b[I + 4]))];
            [low[0], low[1], low[2], low[3], high[0], high[1], high[2], high[3]]
        }}
        fn to_f32(self, x: [int32x4_t; 8]) -> Four<float32x4_t> {
            four!(I => vcvtq_f32_s32(vpaddq_s32(x[2 * I], x[2 * I + 1])))
        }
        fn dot(self, sum: [int32x4_t; 8], w: Four<uint8x16_t>, x: i32) -> [int32x4_t; 8] {{
            let x = vreinterpretq_s8_s32(vdupq_n_s32(x));
            let rows = four!(I => {
                let w = vreinterpretq_s8_u8(w[I]);
                let [low, high] = [vmull_s8(vget_low_s8(w), vget_low_s8(x)), vmull_high_s8(w, x)];
                [vpadalq_s16(sum[2 * I], low), vpadalq_s16(sum[2 * I + 1], high)]
            });
            let [[a, b], [c, d], [e, f], [g, h]] = rows;
            [a, b, c, d, e, f, g, h]
        }}
    }
}
