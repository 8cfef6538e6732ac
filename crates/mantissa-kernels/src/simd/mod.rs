//! Sixteen lanes of accumulators, the one case that the compiler does not vectorize: from `lanes[i] += a[i] * b[i]`
//! it generates sixteen scalar chains, at every level (measured: a third of the memory bandwidth).
//!
//! A [`Simd`] value proves that its level is available, and the operations are its methods; reducing kernels take it
//! as their first argument. Every operation is the same IEEE operation per lane at every level, so the levels agree
//! bit for bit.

#[cfg(target_arch = "aarch64")]
pub(crate) mod neon;
#[cfg(target_arch = "x86_64")]
pub(crate) mod x86;

pub(crate) use mantissa_num::lanes::Portable;

/// Number of accumulators of every reduction: element `i` of a row belongs to lane `i % LANES`.
pub(crate) const LANES: usize = 16;

/// Aligns the frame of the function that this becomes a part of to cache lines.
///
/// A product needs more registers than there are. The compiler aligns what it puts aside on the stack only if a variable
/// asked for it, and otherwise each second vector crosses a cache line. (AVX2, one thread, products of 16 and more tokens
/// with Q4_0, Q4_K, Q2_K and Q8_0: 1.04 to 1.16 of the rate; where a second thread runs on the core, up to 1.5.)
#[inline(always)]
pub(crate) fn align_frame() {
    #[repr(align(64))]
    struct Line(#[allow(dead_code)] [u8; 64]);
    let line = std::mem::MaybeUninit::<Line>::uninit();
    std::hint::black_box(&line);
}

/// The operations of a level on 16 lanes.
pub(crate) trait Simd: Copy {
    /// True if there are 32 vector registers, so that a tile of a product may hold 24 accumulators.
    const WIDE: bool;

    /// 16 f32 lanes.
    type F32: Copy;
    /// 16 f64 lanes.
    type F64: Copy;

    fn splat(self, x: f32) -> Self::F32;
    fn load(self, x: &[f32; LANES]) -> Self::F32;
    fn to_array(self, a: Self::F32) -> [f32; LANES];
    fn add(self, a: Self::F32, b: Self::F32) -> Self::F32;
    fn mul(self, a: Self::F32, b: Self::F32) -> Self::F32;
    /// `a * b + c`, rounded once: fused at every level, in software if the processor has no FMA.
    fn mul_add(self, a: Self::F32, b: Self::F32, c: Self::F32) -> Self::F32;
    /// `if b > a { b } else { a }`: ignores NaN in `b`.
    fn greater(self, a: Self::F32, b: Self::F32) -> Self::F32;
    /// `if b < a { b } else { a }`: ignores NaN in `b`.
    fn lesser(self, a: Self::F32, b: Self::F32) -> Self::F32;
    /// The maximum, as integers, of the bits of `a` (not negative) and of `|b|`: orders finite < infinite <
    /// NaN.
    fn max_abs(self, a: Self::F32, b: Self::F32) -> Self::F32;
    /// The greatest lane by its bits; no lane is negative.
    fn max_lane(self, a: Self::F32) -> f32;

    fn splat_f64(self, x: f64) -> Self::F64;
    fn load_f64(self, x: &[f64; LANES]) -> Self::F64;
    /// As f64.
    fn load_wide(self, x: &[f32; LANES]) -> Self::F64;
    fn sub_f64(self, a: Self::F64, b: Self::F64) -> Self::F64;
    fn mul_f64(self, a: Self::F64, b: Self::F64) -> Self::F64;
    /// Maximum of `a` and `|b|`: ignores NaN in `b`.
    fn max_abs_f64(self, a: Self::F64, b: Self::F64) -> Self::F64;
    fn add_f64(self, a: Self::F64, b: Self::F64) -> Self::F64;
    /// `c - a * b`, rounded once.
    fn sub_mul_f64(self, a: Self::F64, b: Self::F64, c: Self::F64) -> Self::F64;
    fn to_array_f64(self, a: Self::F64) -> [f64; LANES];

    /// Prefetches the cache line at the start of `x` for writing.
    fn prefetch(self, x: &[f32]);

    /// Element (i, j) of the result is element (j, i) of `rows`.
    fn transpose_8x8(self, rows: [&[u32; 8]; 8]) -> [[u32; 8]; 8];
}

impl Simd for Portable {
    type F32 = [f32; LANES];
    type F64 = [f64; LANES];

    const WIDE: bool = false;

    #[inline(always)]
    fn splat(self, x: f32) -> [f32; LANES] {
        [x; LANES]
    }

    #[inline(always)]
    fn load(self, x: &[f32; LANES]) -> [f32; LANES] {
        *x
    }

    #[inline(always)]
    fn to_array(self, a: [f32; LANES]) -> [f32; LANES] {
        a
    }

    #[inline(always)]
    fn add(self, a: [f32; LANES], b: [f32; LANES]) -> [f32; LANES] {
        std::array::from_fn(|i| a[i] + b[i])
    }

    #[inline(always)]
    fn mul(self, a: [f32; LANES], b: [f32; LANES]) -> [f32; LANES] {
        std::array::from_fn(|i| a[i] * b[i])
    }

    #[inline(always)]
    fn mul_add(self, a: [f32; LANES], b: [f32; LANES], c: [f32; LANES]) -> [f32; LANES] {
        std::array::from_fn(|i| a[i].mul_add(b[i], c[i]))
    }

    #[inline(always)]
    fn greater(self, a: [f32; LANES], b: [f32; LANES]) -> [f32; LANES] {
        std::array::from_fn(|i| if b[i] > a[i] { b[i] } else { a[i] })
    }

    #[inline(always)]
    fn lesser(self, a: [f32; LANES], b: [f32; LANES]) -> [f32; LANES] {
        std::array::from_fn(|i| if b[i] < a[i] { b[i] } else { a[i] })
    }

    #[inline(always)]
    fn max_abs(self, a: [f32; LANES], b: [f32; LANES]) -> [f32; LANES] {
        std::array::from_fn(|i| f32::from_bits(a[i].to_bits().max(b[i].to_bits() & 0x7fff_ffff)))
    }

    #[inline(always)]
    fn max_lane(self, a: [f32; LANES]) -> f32 {
        f32::from_bits(a.into_iter().fold(0, |max, v| v.to_bits().max(max)))
    }

    #[inline(always)]
    fn splat_f64(self, x: f64) -> [f64; LANES] {
        [x; LANES]
    }

    #[inline(always)]
    fn load_f64(self, x: &[f64; LANES]) -> [f64; LANES] {
        *x
    }

    #[inline(always)]
    fn load_wide(self, x: &[f32; LANES]) -> [f64; LANES] {
        x.map(f64::from)
    }

    #[inline(always)]
    fn sub_f64(self, a: [f64; LANES], b: [f64; LANES]) -> [f64; LANES] {
        std::array::from_fn(|i| a[i] - b[i])
    }

    #[inline(always)]
    fn mul_f64(self, a: [f64; LANES], b: [f64; LANES]) -> [f64; LANES] {
        std::array::from_fn(|i| a[i] * b[i])
    }

    #[inline(always)]
    fn max_abs_f64(self, a: [f64; LANES], b: [f64; LANES]) -> [f64; LANES] {
        std::array::from_fn(|i| if b[i].abs() > a[i] { b[i].abs() } else { a[i] })
    }

    #[inline(always)]
    fn add_f64(self, a: [f64; LANES], b: [f64; LANES]) -> [f64; LANES] {
        std::array::from_fn(|i| a[i] + b[i])
    }

    #[inline(always)]
    fn sub_mul_f64(self, a: [f64; LANES], b: [f64; LANES], c: [f64; LANES]) -> [f64; LANES] {
        std::array::from_fn(|i| (-a[i]).mul_add(b[i], c[i]))
    }

    #[inline(always)]
    fn to_array_f64(self, a: [f64; LANES]) -> [f64; LANES] {
        a
    }

    #[inline(always)]
    fn prefetch(self, _: &[f32]) {}

    #[inline(always)]
    fn transpose_8x8(self, rows: [&[u32; 8]; 8]) -> [[u32; 8]; 8] {
        std::array::from_fn(|i| std::array::from_fn(|j| rows[j][i]))
    }
}
