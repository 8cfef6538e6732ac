//! [`TileSimd`] for AVX2 (pairs of 8-lane registers) and for AVX-512 with VNNI.

use super::{LANES, TileSimd};
use std::arch::x86_64::*;

/// Proof that AVX2, FMA and F16C are available.
#[derive(Clone, Copy, Debug)]
pub(in crate::paged) struct Avx2(());

impl Avx2 {
    #[inline]
    #[target_feature(enable = "avx2,fma,f16c")]
    pub(in crate::paged) fn new() -> Self {
        Self(())
    }
}

/// Proof that AVX-512 F, BW, VL, DQ and VNNI (and AVX2, FMA and F16C) are available.
#[derive(Clone, Copy, Debug)]
pub(in crate::paged) struct Avx512Vnni(());

impl Avx512Vnni {
    #[inline]
    #[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512vnni")]
    pub(in crate::paged) fn new() -> Self {
        Self(())
    }
}

/// Implements the methods of one level. Each body may use that level's intrinsics and reads or writes whole arrays by
/// pointer.
macro_rules! methods {
    ($(fn $name:ident($self:ident $(, $arg:ident: $ty:ty)*) -> $ret:ty { $body:expr })*) => {
        $(
            #[inline(always)]
            fn $name($self $(, $arg: $ty)*) -> $ret {
                // SAFETY: `self` exists only if the level's features are available, and pointers come from references
                // to arrays of exactly the bytes that the body reads or writes, without alignment requirements.
                unsafe { $body }
            }
        )*
    };
}

/// The 128 bits at an offset of an array.
#[inline]
#[target_feature(enable = "sse2")]
unsafe fn load_128<const N: usize>(x: &[u8; N], at: usize) -> __m128i {
    assert!(at + 16 <= N);
    // SAFETY: the 16 bytes are inside the array, as just checked.
    unsafe { _mm_loadu_si128(x.as_ptr().add(at).cast()) }
}

/// The 256 bits at an offset of an array.
#[inline]
#[target_feature(enable = "avx")]
unsafe fn load_256<const N: usize>(x: &[u8; N], at: usize) -> __m256i {
    assert!(at + 32 <= N);
    // SAFETY: the 32 bytes are inside the array, as just checked.
    unsafe { _mm256_loadu_si256(x.as_ptr().add(at).cast()) }
}

/// Sum of the products of unsigned bytes and signed bytes, in i16 pairs that do not saturate, by fours.
#[inline]
#[target_feature(enable = "avx2")]
fn dot_256(sum: __m256i, unsigned: __m256i, signed: __m256i) -> __m256i {
    let pairs = _mm256_maddubs_epi16(unsigned, signed);
    _mm256_add_epi32(sum, _mm256_madd_epi16(pairs, _mm256_set1_epi16(1)))
}

impl TileSimd for Avx2 {
    const WIDE: bool = false;
    const CODE_OFFSET: i32 = 0;

    type F32 = [__m256; 2];
    type I32 = [__m256i; 2];
    type Bytes = [__m256i; 2];
    type Words = [__m256i; 2];

    methods! {
        fn splat(self, x: f32) -> [__m256; 2] { [_mm256_set1_ps(x); 2] }
        fn load(self, x: &[f32; LANES]) -> [__m256; 2] {
            [_mm256_loadu_ps(x.as_ptr()), _mm256_loadu_ps(x.as_ptr().add(8))]
        }
        fn store(self, a: [__m256; 2], x: &mut [f32; LANES]) -> () {{
            _mm256_storeu_ps(x.as_mut_ptr(), a[0]);
            _mm256_storeu_ps(x.as_mut_ptr().add(8), a[1]);
        }}
        fn add(self, a: [__m256; 2], b: [__m256; 2]) -> [__m256; 2] {
            [_mm256_add_ps(a[0], b[0]), _mm256_add_ps(a[1], b[1])]
        }
        fn mul(self, a: [__m256; 2], b: [__m256; 2]) -> [__m256; 2] {
            [_mm256_mul_ps(a[0], b[0]), _mm256_mul_ps(a[1], b[1])]
        }
        fn mul_add(self, a: [__m256; 2], b: [__m256; 2], c: [__m256; 2]) -> [__m256; 2] {
            [_mm256_fmadd_ps(a[0], b[0], c[0]), _mm256_fmadd_ps(a[1], b[1], c[1])]
        }
        // The instruction returns its second operand unless the first is greater.
        fn greater(self, a: [__m256; 2], b: [__m256; 2]) -> [__m256; 2] {
            [_mm256_max_ps(b[0], a[0]), _mm256_max_ps(b[1], a[1])]
        }
        fn add_exponent(self, a: [__m256; 2], n: [__m256; 2]) -> [__m256; 2] {
            [add_exponent_256(a[0], n[0]), add_exponent_256(a[1], n[1])]
        }
        fn max_lane(self, a: [__m256; 2]) -> f32 { max_256(_mm256_max_ps(a[1], a[0])) }
        fn sum_lanes(self, a: [__m256; 2]) -> f32 { sum_256(_mm256_add_ps(a[0], a[1])) }
        fn f32(self, x: &[u8; 64]) -> [__m256; 2] {
            [_mm256_castsi256_ps(load_256(x, 0)), _mm256_castsi256_ps(load_256(x, 32))]
        }
        fn f16(self, x: &[u8; 32]) -> [__m256; 2] {
            [_mm256_cvtph_ps(load_128(x, 0)), _mm256_cvtph_ps(load_128(x, 16))]
        }
        fn bf16(self, x: &[u8; 32]) -> [__m256; 2] {
            [bf16_256(load_128(x, 0)), bf16_256(load_128(x, 16))]
        }
        fn e4m3(self, x: &[u8; 16]) -> [__m256; 2] {{
            let half = e4m3_to_f16(load_128(x, 0));
            [_mm256_cvtph_ps(_mm256_castsi256_si128(half)), _mm256_cvtph_ps(_mm256_extracti128_si256::<1>(half))]
        }}
        fn unsigned(self, x: &[u8; 16]) -> [__m256; 2] {{
            let x = load_128(x, 0);
            let high = _mm_unpackhi_epi64(x, x);
            [_mm256_cvtepi32_ps(_mm256_cvtepu8_epi32(x)), _mm256_cvtepi32_ps(_mm256_cvtepu8_epi32(high))]
        }}
        fn zero(self) -> [__m256i; 2] { [_mm256_setzero_si256(); 2] }
        fn to_f32(self, a: [__m256i; 2]) -> [__m256; 2] {
            [_mm256_cvtepi32_ps(a[0]), _mm256_cvtepi32_ps(a[1])]
        }
        fn minus(self, a: [__m256i; 2], x: i32) -> [__m256i; 2] {
            [_mm256_sub_epi32(a[0], _mm256_set1_epi32(x)), _mm256_sub_epi32(a[1], _mm256_set1_epi32(x))]
        }
        fn bytes(self, x: &[u8; 64]) -> [__m256i; 2] { [load_256(x, 0), load_256(x, 32)] }
        fn low_nibbles(self, a: [__m256i; 2]) -> [__m256i; 2] {
            [_mm256_and_si256(a[0], _mm256_set1_epi8(15)), _mm256_and_si256(a[1], _mm256_set1_epi8(15))]
        }
        fn high_nibbles(self, a: [__m256i; 2]) -> [__m256i; 2] {
            [
                _mm256_and_si256(_mm256_srli_epi16::<4>(a[0]), _mm256_set1_epi8(15)),
                _mm256_and_si256(_mm256_srli_epi16::<4>(a[1]), _mm256_set1_epi8(15)),
            ]
        }
        // Magnitudes of signed codes are at most 128, of `q` at most 127: a pair of products stays below
        // 2^15.
        fn dot_codes(self, sum: [__m256i; 2], codes: [__m256i; 2], q: i32) -> [__m256i; 2] {{
            let q = _mm256_set1_epi32(q);
            let sign = _mm256_set1_epi8(-128);
            let codes = [_mm256_xor_si256(codes[0], sign), _mm256_xor_si256(codes[1], sign)];
            [
                dot_256(sum[0], _mm256_abs_epi8(codes[0]), _mm256_sign_epi8(q, codes[0])),
                dot_256(sum[1], _mm256_abs_epi8(codes[1]), _mm256_sign_epi8(q, codes[1])),
            ]
        }}
        fn dot_nibbles(self, sum: [__m256i; 2], codes: [__m256i; 2], q: i32) -> [__m256i; 2] {{
            let q = _mm256_set1_epi32(q);
            [dot_256(sum[0], codes[0], q), dot_256(sum[1], codes[1], q)]
        }}
        fn words(self, x: &[u8; 32]) -> [__m256i; 2] {
            [_mm256_cvtepi8_epi16(load_128(x, 0)), _mm256_cvtepi8_epi16(load_128(x, 16))]
        }
        fn dot_words(self, sum: [__m256i; 2], a: [__m256i; 2], w: i32) -> [__m256i; 2] {{
            let w = _mm256_set1_epi32(w);
            [
                _mm256_add_epi32(sum[0], _mm256_madd_epi16(a[0], w)),
                _mm256_add_epi32(sum[1], _mm256_madd_epi16(a[1], w)),
            ]
        }}
        fn prefetch(self, x: &[u8]) -> () {{
            for line in x.chunks(64) {
                _mm_prefetch::<_MM_HINT_T1>(line.as_ptr().cast());
            }
        }}
    }

    #[inline(always)]
    fn nibble_words<const N: u32>(self, a: [__m256i; 2]) -> [__m256i; 2] {
        // SAFETY: `self` exists only if AVX2 is available.
        unsafe {
            let shift = _mm_cvtsi32_si128(4 * N as i32);
            let low = _mm256_set1_epi16(15);
            [
                _mm256_and_si256(_mm256_srl_epi16(a[0], shift), low),
                _mm256_and_si256(_mm256_srl_epi16(a[1], shift), low),
            ]
        }
    }
}

#[inline]
#[target_feature(enable = "avx2")]
fn add_exponent_256(a: __m256, n: __m256) -> __m256 {
    let n = _mm256_slli_epi32::<23>(_mm256_castps_si256(n));
    _mm256_castsi256_ps(_mm256_add_epi32(_mm256_castps_si256(a), n))
}

#[inline]
#[target_feature(enable = "avx2")]
fn bf16_256(x: __m128i) -> __m256 {
    _mm256_castsi256_ps(_mm256_slli_epi32::<16>(_mm256_cvtepu16_epi32(x)))
}

/// The f16 of 2^-8 times the value of each E4M3: the sign stays on top, the rest moves by seven bits.
#[inline]
#[target_feature(enable = "avx2")]
fn e4m3_to_f16(x: __m128i) -> __m256i {
    let wide = _mm256_slli_epi16::<7>(_mm256_cvtepi8_epi16(x));
    _mm256_and_si256(wide, _mm256_set1_epi16(0b1_01111_1110000000_u16 as i16))
}

/// The greatest of 8 lanes.
#[inline]
#[target_feature(enable = "avx2")]
fn max_256(a: __m256) -> f32 {
    let four = _mm_max_ps(_mm256_extractf128_ps::<1>(a), _mm256_castps256_ps128(a));
    let two = _mm_max_ps(_mm_movehl_ps(four, four), four);
    _mm_cvtss_f32(_mm_max_ss(_mm_movehdup_ps(two), two))
}

/// The sum of 8 lanes: lane `i` takes lane `i + 4`, then `i + 2`, `i + 1`.
#[inline]
#[target_feature(enable = "avx2")]
fn sum_256(a: __m256) -> f32 {
    let four = _mm_add_ps(_mm256_castps256_ps128(a), _mm256_extractf128_ps::<1>(a));
    let two = _mm_add_ps(four, _mm_movehl_ps(four, four));
    _mm_cvtss_f32(_mm_add_ss(two, _mm_movehdup_ps(two)))
}

impl TileSimd for Avx512Vnni {
    const WIDE: bool = true;
    const CODE_OFFSET: i32 = 128;

    type F32 = __m512;
    type I32 = __m512i;
    type Bytes = __m512i;
    type Words = __m512i;

    methods! {
        fn splat(self, x: f32) -> __m512 { _mm512_set1_ps(x) }
        fn load(self, x: &[f32; LANES]) -> __m512 { _mm512_loadu_ps(x.as_ptr()) }
        fn store(self, a: __m512, x: &mut [f32; LANES]) -> () { _mm512_storeu_ps(x.as_mut_ptr(), a) }
        fn add(self, a: __m512, b: __m512) -> __m512 { _mm512_add_ps(a, b) }
        fn mul(self, a: __m512, b: __m512) -> __m512 { _mm512_mul_ps(a, b) }
        fn mul_add(self, a: __m512, b: __m512, c: __m512) -> __m512 { _mm512_fmadd_ps(a, b, c) }
        // The instruction returns its second operand unless the first is greater.
        fn greater(self, a: __m512, b: __m512) -> __m512 { _mm512_max_ps(b, a) }
        fn add_exponent(self, a: __m512, n: __m512) -> __m512 {{
            let n = _mm512_slli_epi32::<23>(_mm512_castps_si512(n));
            _mm512_castsi512_ps(_mm512_add_epi32(_mm512_castps_si512(a), n))
        }}
        fn max_lane(self, a: __m512) -> f32 {
            max_256(_mm256_max_ps(_mm512_extractf32x8_ps::<1>(a), _mm512_castps512_ps256(a)))
        }
        fn sum_lanes(self, a: __m512) -> f32 {
            sum_256(_mm256_add_ps(_mm512_castps512_ps256(a), _mm512_extractf32x8_ps::<1>(a)))
        }
        fn f32(self, x: &[u8; 64]) -> __m512 { _mm512_loadu_ps(x.as_ptr().cast()) }
        fn f16(self, x: &[u8; 32]) -> __m512 { _mm512_cvtph_ps(load_256(x, 0)) }
        fn bf16(self, x: &[u8; 32]) -> __m512 {
            _mm512_castsi512_ps(_mm512_slli_epi32::<16>(_mm512_cvtepu16_epi32(load_256(x, 0))))
        }
        fn e4m3(self, x: &[u8; 16]) -> __m512 { _mm512_cvtph_ps(e4m3_to_f16(load_128(x, 0))) }
        fn unsigned(self, x: &[u8; 16]) -> __m512 { _mm512_cvtepi32_ps(_mm512_cvtepu8_epi32(load_128(x, 0))) }
        fn zero(self) -> __m512i { _mm512_setzero_si512() }
        fn to_f32(self, a: __m512i) -> __m512 { _mm512_cvtepi32_ps(a) }
        fn minus(self, a: __m512i, x: i32) -> __m512i { _mm512_sub_epi32(a, _mm512_set1_epi32(x)) }
        fn bytes(self, x: &[u8; 64]) -> __m512i { _mm512_loadu_si512(x.as_ptr().cast()) }
        fn low_nibbles(self, a: __m512i) -> __m512i { _mm512_and_si512(a, _mm512_set1_epi8(15)) }
        fn high_nibbles(self, a: __m512i) -> __m512i {
            _mm512_and_si512(_mm512_srli_epi16::<4>(a), _mm512_set1_epi8(15))
        }
        fn dot_codes(self, sum: __m512i, codes: __m512i, q: i32) -> __m512i {
            _mm512_dpbusd_epi32(sum, codes, _mm512_set1_epi32(q))
        }
        fn dot_nibbles(self, sum: __m512i, codes: __m512i, q: i32) -> __m512i {
            _mm512_dpbusd_epi32(sum, codes, _mm512_set1_epi32(q))
        }
        fn words(self, x: &[u8; 32]) -> __m512i { _mm512_cvtepi8_epi16(load_256(x, 0)) }
        fn dot_words(self, sum: __m512i, a: __m512i, w: i32) -> __m512i {
            _mm512_dpwssd_epi32(sum, a, _mm512_set1_epi32(w))
        }
        fn prefetch(self, x: &[u8]) -> () {{
            for line in x.chunks(64) {
                _mm_prefetch::<_MM_HINT_T1>(line.as_ptr().cast());
            }
        }}
    }

    #[inline(always)]
    fn nibble_words<const N: u32>(self, a: __m512i) -> __m512i {
        // SAFETY: `self` exists only if AVX-512 BW is available.
        unsafe {
            let shifted = if N == 0 { a } else { _mm512_srl_epi16(a, _mm_cvtsi32_si128(4 * N as i32)) };
            if N == 3 { shifted } else { _mm512_and_si512(shifted, _mm512_set1_epi16(15)) }
        }
    }
}
