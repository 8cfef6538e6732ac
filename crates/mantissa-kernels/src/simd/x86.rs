//! [`Simd`] for AVX2 (pairs of 8-lane registers) and AVX-512 (16-lane registers).

use super::{LANES, Simd};
use mantissa_num::lanes::{Lanes, Work};
use std::arch::x86_64::*;

/// Proof that AVX2 and FMA are available.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Avx2(());

impl Avx2 {
    #[inline]
    #[target_feature(enable = "avx2,fma")]
    pub(crate) fn new() -> Self {
        Self(())
    }
}

/// Proof that AVX-512 F, BW, VL and DQ (and with them AVX2 and FMA) are available.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Avx512(());

impl Avx512 {
    #[inline]
    #[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq")]
    pub(crate) fn new() -> Self {
        Self(())
    }
}

/// Implements the methods of one level. Each body may use that level's intrinsics and reads or writes whole arrays by
/// pointer.
macro_rules! methods {
    ($($(#[$doc:meta])* fn $name:ident($self:ident $(, $arg:ident: $ty:ty)*) -> $ret:ty { $body:expr })*) => {
        $(
            #[inline(always)]
            fn $name($self $(, $arg: $ty)*) -> $ret {
                // SAFETY: `self` exists only if the level's features are available, and pointers come from references
                // to arrays of exactly the 16 elements that the body reads or writes, without alignment requirements.
                unsafe { $body }
            }
        )*
    };
}

impl Simd for Avx2 {
    type F32 = [__m256; 2];
    type F64 = [__m256d; 4];

    const WIDE: bool = false;

    methods! {
        fn splat(self, x: f32) -> [__m256; 2] { [_mm256_set1_ps(x); 2] }
        fn load(self, x: &[f32; LANES]) -> [__m256; 2] {
            [_mm256_loadu_ps(x.as_ptr()), _mm256_loadu_ps(x.as_ptr().add(8))]
        }
        fn to_array(self, a: [__m256; 2]) -> [f32; LANES] { std::mem::transmute(a) }
        fn add(self, a: [__m256; 2], b: [__m256; 2]) -> [__m256; 2] {
            [_mm256_add_ps(a[0], b[0]), _mm256_add_ps(a[1], b[1])]
        }
        fn mul(self, a: [__m256; 2], b: [__m256; 2]) -> [__m256; 2] {
            [_mm256_mul_ps(a[0], b[0]), _mm256_mul_ps(a[1], b[1])]
        }
        fn mul_add(self, a: [__m256; 2], b: [__m256; 2], c: [__m256; 2]) -> [__m256; 2] {
            [_mm256_fmadd_ps(a[0], b[0], c[0]), _mm256_fmadd_ps(a[1], b[1], c[1])]
        }
        // The instructions return their second operand unless the first is greater (less).
        fn greater(self, a: [__m256; 2], b: [__m256; 2]) -> [__m256; 2] {
            [_mm256_max_ps(b[0], a[0]), _mm256_max_ps(b[1], a[1])]
        }
        fn lesser(self, a: [__m256; 2], b: [__m256; 2]) -> [__m256; 2] {
            [_mm256_min_ps(b[0], a[0]), _mm256_min_ps(b[1], a[1])]
        }
        fn max_abs(self, a: [__m256; 2], b: [__m256; 2]) -> [__m256; 2] {
            [max_abs_256(a[0], b[0]), max_abs_256(a[1], b[1])]
        }
        fn max_lane(self, a: [__m256; 2]) -> f32 { max_lane_256(a) }
        fn splat_f64(self, x: f64) -> [__m256d; 4] { [_mm256_set1_pd(x); 4] }
        fn load_f64(self, x: &[f64; LANES]) -> [__m256d; 4] {
            [
                _mm256_loadu_pd(x.as_ptr()),
                _mm256_loadu_pd(x.as_ptr().add(4)),
                _mm256_loadu_pd(x.as_ptr().add(8)),
                _mm256_loadu_pd(x.as_ptr().add(12)),
            ]
        }
        fn load_wide(self, x: &[f32; LANES]) -> [__m256d; 4] {
            [
                _mm256_cvtps_pd(_mm_loadu_ps(x.as_ptr())),
                _mm256_cvtps_pd(_mm_loadu_ps(x.as_ptr().add(4))),
                _mm256_cvtps_pd(_mm_loadu_ps(x.as_ptr().add(8))),
                _mm256_cvtps_pd(_mm_loadu_ps(x.as_ptr().add(12))),
            ]
        }
        fn sub_f64(self, a: [__m256d; 4], b: [__m256d; 4]) -> [__m256d; 4] {
            [
                _mm256_sub_pd(a[0], b[0]),
                _mm256_sub_pd(a[1], b[1]),
                _mm256_sub_pd(a[2], b[2]),
                _mm256_sub_pd(a[3], b[3]),
            ]
        }
        fn mul_f64(self, a: [__m256d; 4], b: [__m256d; 4]) -> [__m256d; 4] {
            [
                _mm256_mul_pd(a[0], b[0]),
                _mm256_mul_pd(a[1], b[1]),
                _mm256_mul_pd(a[2], b[2]),
                _mm256_mul_pd(a[3], b[3]),
            ]
        }
        // The instruction returns its second operand where one is NaN.
        fn max_abs_f64(self, a: [__m256d; 4], b: [__m256d; 4]) -> [__m256d; 4] {
            [
                _mm256_max_pd(_mm256_andnot_pd(_mm256_set1_pd(-0.0), b[0]), a[0]),
                _mm256_max_pd(_mm256_andnot_pd(_mm256_set1_pd(-0.0), b[1]), a[1]),
                _mm256_max_pd(_mm256_andnot_pd(_mm256_set1_pd(-0.0), b[2]), a[2]),
                _mm256_max_pd(_mm256_andnot_pd(_mm256_set1_pd(-0.0), b[3]), a[3]),
            ]
        }
        fn add_f64(self, a: [__m256d; 4], b: [__m256d; 4]) -> [__m256d; 4] {
            [
                _mm256_add_pd(a[0], b[0]),
                _mm256_add_pd(a[1], b[1]),
                _mm256_add_pd(a[2], b[2]),
                _mm256_add_pd(a[3], b[3]),
            ]
        }
        fn sub_mul_f64(self, a: [__m256d; 4], b: [__m256d; 4], c: [__m256d; 4]) -> [__m256d; 4] {
            [
                _mm256_fnmadd_pd(a[0], b[0], c[0]),
                _mm256_fnmadd_pd(a[1], b[1], c[1]),
                _mm256_fnmadd_pd(a[2], b[2], c[2]),
                _mm256_fnmadd_pd(a[3], b[3], c[3]),
            ]
        }
        fn to_array_f64(self, a: [__m256d; 4]) -> [f64; LANES] { std::mem::transmute(a) }
        fn prefetch(self, x: &[f32]) -> () { _mm_prefetch::<_MM_HINT_T0>(x.as_ptr().cast()) }
        fn transpose_8x8(self, rows: [&[u32; 8]; 8]) -> [[u32; 8]; 8] { transpose_8x8(rows) }
    }
}

#[inline]
#[target_feature(enable = "avx2")]
fn max_abs_256(a: __m256, b: __m256) -> __m256 {
    let magnitude = _mm256_and_si256(_mm256_castps_si256(b), _mm256_set1_epi32(0x7fff_ffff));
    _mm256_castsi256_ps(_mm256_max_epi32(_mm256_castps_si256(a), magnitude))
}

/// The greatest of 16 lanes, none negative, whose bits are then ordered as integers.
#[inline]
#[target_feature(enable = "avx2")]
fn max_lane_256(a: [__m256; 2]) -> f32 {
    let eight = _mm256_max_epi32(_mm256_castps_si256(a[0]), _mm256_castps_si256(a[1]));
    let four = _mm_max_epi32(_mm256_castsi256_si128(eight), _mm256_extracti128_si256::<1>(eight));
    let two = _mm_max_epi32(four, _mm_shuffle_epi32::<0b01_00_11_10>(four));
    let one = _mm_max_epi32(two, _mm_shuffle_epi32::<0b10_11_00_01>(two));
    f32::from_bits(_mm_cvtsi128_si32(one) as u32)
}

/// Transposes in three rounds of exchanges, at distances 1, 2 and 4.
#[inline]
#[target_feature(enable = "avx2")]
fn transpose_8x8(rows: [&[u32; 8]; 8]) -> [[u32; 8]; 8] {
    // SAFETY: each load reads the 8 elements of an array; loadu needs no alignment.
    let r = rows.map(|row| unsafe { _mm256_loadu_si256(row.as_ptr().cast()) });
    // Within each half of 4 lanes: (r0.0 r1.0 r0.1 r1.1), (r0.2 r1.2 r0.3 r1.3), and so on for each two rows.
    let pair = |i: usize| (_mm256_unpacklo_epi32(r[i], r[i + 1]), _mm256_unpackhi_epi32(r[i], r[i + 1]));
    let (p0, p2, p4, p6) = (pair(0), pair(2), pair(4), pair(6));
    let quad = |a: (__m256i, __m256i), b: (__m256i, __m256i)| {
        [
            _mm256_unpacklo_epi64(a.0, b.0),
            _mm256_unpackhi_epi64(a.0, b.0),
            _mm256_unpacklo_epi64(a.1, b.1),
            _mm256_unpackhi_epi64(a.1, b.1),
        ]
    };
    // `upper[j]`: column j of rows 0 to 3, then column j + 4 of them; `lower[j]` of rows 4 to 7.
    let (upper, lower) = (quad(p0, p2), quad(p4, p6));
    let low = |j: usize| _mm256_permute2x128_si256::<0x20>(upper[j], lower[j]);
    let high = |j: usize| _mm256_permute2x128_si256::<0x31>(upper[j], lower[j]);
    let columns = [low(0), low(1), low(2), low(3), high(0), high(1), high(2), high(3)];
    // SAFETY: 8 registers of 8 lanes are 64 u32; all bit patterns are valid.
    unsafe { std::mem::transmute::<[__m256i; 8], [[u32; 8]; 8]>(columns) }
}

impl Simd for Avx512 {
    type F32 = __m512;
    type F64 = [__m512d; 2];

    const WIDE: bool = true;

    methods! {
        fn splat(self, x: f32) -> __m512 { _mm512_set1_ps(x) }
        fn load(self, x: &[f32; LANES]) -> __m512 { _mm512_loadu_ps(x.as_ptr()) }
        fn to_array(self, a: __m512) -> [f32; LANES] { std::mem::transmute(a) }
        fn add(self, a: __m512, b: __m512) -> __m512 { _mm512_add_ps(a, b) }
        fn mul(self, a: __m512, b: __m512) -> __m512 { _mm512_mul_ps(a, b) }
        fn mul_add(self, a: __m512, b: __m512, c: __m512) -> __m512 { _mm512_fmadd_ps(a, b, c) }
        // The instructions return their second operand unless the first is greater (less).
        fn greater(self, a: __m512, b: __m512) -> __m512 { _mm512_max_ps(b, a) }
        fn lesser(self, a: __m512, b: __m512) -> __m512 { _mm512_min_ps(b, a) }
        fn max_abs(self, a: __m512, b: __m512) -> __m512 { max_abs_512(a, b) }
        fn max_lane(self, a: __m512) -> f32 {
            f32::from_bits(_mm512_reduce_max_epi32(_mm512_castps_si512(a)) as u32)
        }
        fn splat_f64(self, x: f64) -> [__m512d; 2] { [_mm512_set1_pd(x); 2] }
        fn load_f64(self, x: &[f64; LANES]) -> [__m512d; 2] {
            [_mm512_loadu_pd(x.as_ptr()), _mm512_loadu_pd(x.as_ptr().add(8))]
        }
        fn load_wide(self, x: &[f32; LANES]) -> [__m512d; 2] {
            [
                _mm512_cvtps_pd(_mm256_loadu_ps(x.as_ptr())),
                _mm512_cvtps_pd(_mm256_loadu_ps(x.as_ptr().add(8))),
            ]
        }
        fn sub_f64(self, a: [__m512d; 2], b: [__m512d; 2]) -> [__m512d; 2] {
            [_mm512_sub_pd(a[0], b[0]), _mm512_sub_pd(a[1], b[1])]
        }
        fn mul_f64(self, a: [__m512d; 2], b: [__m512d; 2]) -> [__m512d; 2] {
            [_mm512_mul_pd(a[0], b[0]), _mm512_mul_pd(a[1], b[1])]
        }
        // The instruction returns its second operand where one is NaN.
        fn max_abs_f64(self, a: [__m512d; 2], b: [__m512d; 2]) -> [__m512d; 2] {
            [_mm512_max_pd(_mm512_abs_pd(b[0]), a[0]), _mm512_max_pd(_mm512_abs_pd(b[1]), a[1])]
        }
        fn add_f64(self, a: [__m512d; 2], b: [__m512d; 2]) -> [__m512d; 2] {
            [_mm512_add_pd(a[0], b[0]), _mm512_add_pd(a[1], b[1])]
        }
        fn sub_mul_f64(self, a: [__m512d; 2], b: [__m512d; 2], c: [__m512d; 2]) -> [__m512d; 2] {
            [_mm512_fnmadd_pd(a[0], b[0], c[0]), _mm512_fnmadd_pd(a[1], b[1], c[1])]
        }
        fn to_array_f64(self, a: [__m512d; 2]) -> [f64; LANES] { std::mem::transmute(a) }
        fn prefetch(self, x: &[f32]) -> () { _mm_prefetch::<_MM_HINT_T0>(x.as_ptr().cast()) }
        fn transpose_8x8(self, rows: [&[u32; 8]; 8]) -> [[u32; 8]; 8] { transpose_8x8(rows) }
    }
}

#[inline]
#[target_feature(enable = "avx512f")]
fn max_abs_512(a: __m512, b: __m512) -> __m512 {
    let magnitude = _mm512_and_si512(_mm512_castps_si512(b), _mm512_set1_epi32(0x7fff_ffff));
    _mm512_castsi512_ps(_mm512_max_epi32(_mm512_castps_si512(a), magnitude))
}

impl Lanes for Avx2 {
    type V = [__m256; 2];

    #[inline(always)]
    fn call<W: Work>(self, work: W) -> W::Out {
        #[inline(never)]
        #[target_feature(enable = "avx2,fma")]
        fn apart<W: Work>(l: Avx2, work: W) -> W::Out {
            super::align_frame();
            work.run(l)
        }
        // SAFETY: a value of this type proves that the processor has these features.
        unsafe { apart(self, work) }
    }

    #[inline(always)]
    fn swap_halves(self, a: [__m256; 2]) -> [__m256; 2] {
        [a[1], a[0]]
    }

    methods! {
        fn splat(self, x: f32) -> [__m256; 2] { [_mm256_set1_ps(x); 2] }
        fn load(self, x: &[f32; LANES]) -> [__m256; 2] {
            [_mm256_loadu_ps(x.as_ptr()), _mm256_loadu_ps(x.as_ptr().add(8))]
        }
        fn to_array(self, a: [__m256; 2]) -> [f32; LANES] { std::mem::transmute(a) }
        fn add(self, a: [__m256; 2], b: [__m256; 2]) -> [__m256; 2] {
            [_mm256_add_ps(a[0], b[0]), _mm256_add_ps(a[1], b[1])]
        }
        fn sub(self, a: [__m256; 2], b: [__m256; 2]) -> [__m256; 2] {
            [_mm256_sub_ps(a[0], b[0]), _mm256_sub_ps(a[1], b[1])]
        }
        fn mul(self, a: [__m256; 2], b: [__m256; 2]) -> [__m256; 2] {
            [_mm256_mul_ps(a[0], b[0]), _mm256_mul_ps(a[1], b[1])]
        }
        fn mul_add(self, a: [__m256; 2], b: [__m256; 2], c: [__m256; 2]) -> [__m256; 2] {
            [_mm256_fmadd_ps(a[0], b[0], c[0]), _mm256_fmadd_ps(a[1], b[1], c[1])]
        }
        fn sub_mul(self, a: [__m256; 2], b: [__m256; 2], c: [__m256; 2]) -> [__m256; 2] {
            [_mm256_fnmadd_ps(a[0], b[0], c[0]), _mm256_fnmadd_ps(a[1], b[1], c[1])]
        }
        fn div(self, a: [__m256; 2], b: [__m256; 2]) -> [__m256; 2] {
            [_mm256_div_ps(a[0], b[0]), _mm256_div_ps(a[1], b[1])]
        }
        // The instructions return their second operand unless the first is greater (less).
        fn greater(self, a: [__m256; 2], b: [__m256; 2]) -> [__m256; 2] {
            [_mm256_max_ps(b[0], a[0]), _mm256_max_ps(b[1], a[1])]
        }
        fn lesser(self, a: [__m256; 2], b: [__m256; 2]) -> [__m256; 2] {
            [_mm256_min_ps(b[0], a[0]), _mm256_min_ps(b[1], a[1])]
        }
        fn if_less(self, a: [__m256; 2], b: [__m256; 2], x: [__m256; 2], y: [__m256; 2]) -> [__m256; 2] {
            [
                _mm256_blendv_ps(y[0], x[0], _mm256_cmp_ps::<_CMP_LT_OQ>(a[0], b[0])),
                _mm256_blendv_ps(y[1], x[1], _mm256_cmp_ps::<_CMP_LT_OQ>(a[1], b[1])),
            ]
        }
        fn abs(self, a: [__m256; 2]) -> [__m256; 2] {
            [_mm256_andnot_ps(_mm256_set1_ps(-0.0), a[0]), _mm256_andnot_ps(_mm256_set1_ps(-0.0), a[1])]
        }
        fn trunc(self, a: [__m256; 2]) -> [__m256; 2] {
            [_mm256_round_ps::<TOWARD_ZERO>(a[0]), _mm256_round_ps::<TOWARD_ZERO>(a[1])]
        }
        fn least(self, a: [__m256; 2]) -> (usize, f32) { least_256(a) }
        fn greatest(self, a: [__m256; 2]) -> f32 { greatest_256(a) }
        fn bytes(self, a: [__m256; 2]) -> [u8; LANES] { std::mem::transmute(bytes_256(a)) }
    }
}

/// Rounding toward zero, without raising the inexact exception.
const TOWARD_ZERO: i32 = _MM_FROUND_TO_ZERO | _MM_FROUND_NO_EXC;

/// The greatest of 16 lanes; none is NaN.
#[inline]
#[target_feature(enable = "avx2")]
fn greatest_256(a: [__m256; 2]) -> f32 {
    let eight = _mm256_max_ps(a[0], a[1]);
    let four = _mm_max_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps::<1>(eight));
    let two = _mm_max_ps(four, _mm_movehl_ps(four, four));
    _mm_cvtss_f32(_mm_max_ss(two, _mm_movehdup_ps(two)))
}

/// Low bytes of 16 lanes, truncated to integers.
#[inline]
#[target_feature(enable = "avx2")]
fn bytes_256(a: [__m256; 2]) -> __m128i {
    let low = _mm256_set1_epi32(0xff);
    let a = a.map(|a| _mm256_and_si256(_mm256_cvttps_epi32(a), low));
    // Packing takes halves of both operands alternately.
    let words = _mm256_permute4x64_epi64::<0b11_01_10_00>(_mm256_packus_epi32(a[0], a[1]));
    _mm_packus_epi16(_mm256_castsi256_si128(words), _mm256_extracti128_si256::<1>(words))
}

/// First of 16 lanes with the smallest value, and the value; no lane is NaN.
#[inline]
#[target_feature(enable = "avx2")]
fn least_256(a: [__m256; 2]) -> (usize, f32) {
    let eight = _mm256_min_ps(a[0], a[1]);
    let four = _mm_min_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps::<1>(eight));
    let two = _mm_min_ps(four, _mm_movehl_ps(four, four));
    let least = _mm_cvtss_f32(_mm_min_ss(two, _mm_movehdup_ps(two)));
    let splat = _mm256_set1_ps(least);
    let lanes = a.map(|a| _mm256_movemask_ps(_mm256_cmp_ps::<_CMP_EQ_OQ>(a, splat)) as u32);
    ((lanes[0] | lanes[1] << 8).trailing_zeros() as usize & 15, least)
}

/// [`least_256`] in one register.
#[inline]
#[target_feature(enable = "avx512f")]
fn least_512(a: __m512) -> (usize, f32) {
    let least = _mm512_reduce_min_ps(a);
    let lanes = _mm512_cmp_ps_mask::<_CMP_EQ_OQ>(a, _mm512_set1_ps(least));
    (lanes.trailing_zeros() as usize & 15, least)
}

impl Lanes for Avx512 {
    type V = __m512;

    #[inline(always)]
    fn call<W: Work>(self, work: W) -> W::Out {
        #[inline(never)]
        #[target_feature(enable = "avx2,fma,avx512f,avx512bw,avx512vl,avx512dq")]
        fn apart<W: Work>(l: Avx512, work: W) -> W::Out {
            super::align_frame();
            work.run(l)
        }
        // SAFETY: a value of this type proves that the processor has these features.
        unsafe { apart(self, work) }
    }

    methods! {
        fn splat(self, x: f32) -> __m512 { _mm512_set1_ps(x) }
        fn load(self, x: &[f32; LANES]) -> __m512 { _mm512_loadu_ps(x.as_ptr()) }
        fn to_array(self, a: __m512) -> [f32; LANES] { std::mem::transmute(a) }
        fn add(self, a: __m512, b: __m512) -> __m512 { _mm512_add_ps(a, b) }
        fn sub(self, a: __m512, b: __m512) -> __m512 { _mm512_sub_ps(a, b) }
        fn mul(self, a: __m512, b: __m512) -> __m512 { _mm512_mul_ps(a, b) }
        fn mul_add(self, a: __m512, b: __m512, c: __m512) -> __m512 { _mm512_fmadd_ps(a, b, c) }
        fn sub_mul(self, a: __m512, b: __m512, c: __m512) -> __m512 { _mm512_fnmadd_ps(a, b, c) }
        fn div(self, a: __m512, b: __m512) -> __m512 { _mm512_div_ps(a, b) }
        // The instructions return their second operand unless the first is greater (less).
        fn greater(self, a: __m512, b: __m512) -> __m512 { _mm512_max_ps(b, a) }
        fn lesser(self, a: __m512, b: __m512) -> __m512 { _mm512_min_ps(b, a) }
        fn if_less(self, a: __m512, b: __m512, x: __m512, y: __m512) -> __m512 {
            _mm512_mask_blend_ps(_mm512_cmp_ps_mask::<_CMP_LT_OQ>(a, b), y, x)
        }
        fn swap_halves(self, a: __m512) -> __m512 { _mm512_shuffle_f32x4::<0b01_00_11_10>(a, a) }
        fn abs(self, a: __m512) -> __m512 { _mm512_abs_ps(a) }
        fn trunc(self, a: __m512) -> __m512 { _mm512_roundscale_ps::<TOWARD_ZERO>(a) }
        fn least(self, a: __m512) -> (usize, f32) { least_512(a) }
        fn greatest(self, a: __m512) -> f32 { _mm512_reduce_max_ps(a) }
        fn bytes(self, a: __m512) -> [u8; LANES] {
            std::mem::transmute(_mm512_cvtepi32_epi8(_mm512_cvttps_epi32(a)))
        }
        fn halves(self, a: __m512) -> [u16; LANES] {
            std::mem::transmute(_mm512_cvtps_ph::<{ _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC }>(a))
        }
    }
}
