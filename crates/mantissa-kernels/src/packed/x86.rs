//! [`Dot`] for AVX2, AVX-VNNI and AVX-512 with VNNI.

use std::arch::x86_64::*;

use super::ROWS;
use super::dot::{Dot, MiniBits, Quad};
use super::float_code::PairTable;
use super::float_product::PairDot;

/// Implements the methods of a level. Bodies use the level's intrinsics and read or write whole arrays by pointer.
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

/// Proof that AVX-512 F, BW, VL, DQ and VNNI are available.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Avx512Vnni(());

impl Avx512Vnni {
    /// Makes the proof.
    #[inline]
    #[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512vnni")]
    pub(crate) fn new() -> Self {
        Self(())
    }
}

/// Operations of every AVX-512 level.
macro_rules! shared_512 {
    () => {
        type I = __m512i;
        type B = __m512i;
        type F = __m512;

        methods! {
            fn prefetch(self, start: *const u8, bytes: usize) -> () {
                for at in (0..bytes).step_by(64) {
                    _mm_prefetch::<_MM_HINT_T1>(start.wrapping_add(at).cast());
                }
            }
            fn splat_i(self, x: i32) -> __m512i { _mm512_set1_epi32(x) }
            fn add_i(self, a: __m512i, b: __m512i) -> __m512i { _mm512_add_epi32(a, b) }
            fn load(self, x: &Quad) -> __m512i { _mm512_loadu_si512(x.as_ptr().cast()) }
            fn store(self, x: __m512i, out: &mut Quad) -> () { _mm512_storeu_si512(out.as_mut_ptr().cast(), x) }
            // The counts are constants after inlining.
            fn shift(self, x: __m512i, n: i32) -> __m512i {
                match n {
                    0 => x,
                    1.. => _mm512_srl_epi16(x, _mm_cvtsi32_si128(n)),
                    _ => _mm512_sll_epi16(x, _mm_cvtsi32_si128(-n)),
                }
            }
            fn and(self, x: __m512i, mask: u8) -> __m512i { _mm512_and_si512(x, _mm512_set1_epi8(mask as i8)) }
            fn or(self, a: __m512i, b: __m512i) -> __m512i { _mm512_or_si512(a, b) }
            fn look_up(self, x: __m512i, table: &[u8; 16]) -> __m512i {
                _mm512_shuffle_epi8(_mm512_broadcast_i32x4(_mm_loadu_si128(table.as_ptr().cast())), x)
            }
            fn dot(self, sum: __m512i, w: __m512i, x: i32) -> __m512i {
                _mm512_dpbusd_epi32(sum, w, _mm512_set1_epi32(x))
            }
            // Of two operands with a NaN, minimum and maximum return the second. It becomes the integer 2^31, whose low
            // byte is 0.
            fn codes(self, x: &[f32; ROWS], divisor: f32, range: (f32, f32), out: &mut [i8; ROWS]) -> () {{
                let x = _mm512_div_ps(_mm512_loadu_ps(x.as_ptr()), _mm512_set1_ps(divisor));
                let x = _mm512_min_ps(_mm512_set1_ps(range.1), _mm512_max_ps(_mm512_set1_ps(range.0), x));
                let codes = _mm512_cvtepi32_epi8(_mm512_cvtps_epi32(x));
                _mm_storeu_si128(out.as_mut_ptr().cast(), codes);
            }}
            fn to_f32(self, x: __m512i) -> __m512 { _mm512_cvtepi32_ps(x) }
            fn splat(self, x: f32) -> __m512 { _mm512_set1_ps(x) }
            fn load_f32(self, x: &[f32; ROWS]) -> __m512 { _mm512_loadu_ps(x.as_ptr()) }
            fn store_f32(self, x: __m512, out: &mut [f32; ROWS]) -> () { _mm512_storeu_ps(out.as_mut_ptr(), x) }
            fn mul(self, a: __m512, b: __m512) -> __m512 { _mm512_mul_ps(a, b) }
            fn mul_add(self, a: __m512, b: __m512, c: __m512) -> __m512 { _mm512_fmadd_ps(a, b, c) }
            fn wide_f16(self, x: &[u8; 2 * ROWS]) -> __m512 {
                _mm512_cvtph_ps(_mm256_loadu_si256(x.as_ptr().cast()))
            }
            fn wide_bf16(self, x: &[u8; 2 * ROWS]) -> __m512 {{
                let wide = _mm512_cvtepu16_epi32(_mm256_loadu_si256(x.as_ptr().cast()));
                _mm512_castsi512_ps(_mm512_slli_epi32::<16>(wide))
            }}
            fn wide_bf16_pairs(self, x: &Quad) -> [__m512; 2] {{
                let pairs = _mm512_loadu_si512(x.as_ptr().cast());
                let second = _mm512_and_si512(pairs, _mm512_set1_epi32(0xffff_0000_u32 as i32));
                [_mm512_castsi512_ps(_mm512_slli_epi32::<16>(pairs)), _mm512_castsi512_ps(second)]
            }}
            fn wide_i8(self, x: &[u8; ROWS]) -> __m512 {
                _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128(x.as_ptr().cast())))
            }
            fn wide_u8(self, x: &[u8; ROWS]) -> __m512 {
                _mm512_cvtepi32_ps(_mm512_cvtepu8_epi32(_mm_loadu_si128(x.as_ptr().cast())))
            }
            fn powers(self, x: &[u8; ROWS]) -> __m512 {{
                let wide = _mm512_cvtepu8_epi32(_mm_loadu_si128(x.as_ptr().cast()));
                _mm512_castsi512_ps(_mm512_slli_epi32::<23>(wide))
            }}
            fn wide_e4m3(self, x: &[u8; ROWS]) -> __m512 {{
                let wide = _mm256_cvtepu8_epi16(_mm_loadu_si128(x.as_ptr().cast()));
                _mm512_cvtph_ps(_mm256_slli_epi16::<7>(wide))
            }}
            fn wide_f32(self, x: &[u8; 4 * ROWS]) -> __m512 { _mm512_loadu_ps(x.as_ptr().cast()) }
            fn wide_mini(self, x: &[u8; ROWS], bits: MiniBits) -> __m512 {{
                let wide = _mm256_cvtepu8_epi16(_mm_loadu_si128(x.as_ptr().cast()));
                let magnitude = _mm256_and_si256(wide, _mm256_set1_epi16(bits.magnitude.into()));
                let sign = _mm256_and_si256(wide, _mm256_set1_epi16(bits.sign.into()));
                _mm512_cvtph_ps(_mm256_or_si256(
                    _mm256_sll_epi16(magnitude, _mm_cvtsi32_si128(bits.shift as i32)),
                    _mm256_sll_epi16(sign, _mm_cvtsi32_si128(bits.sign_shift as i32)),
                ))
            }}
        }
    };
}

impl Dot for Avx512Vnni {
    shared_512!();
}

/// Proof that AVX-512 BF16 and VBMI are available, with all of [`Avx512Vnni`].
#[derive(Clone, Copy, Debug)]
pub(crate) struct Avx512Bf16(());

impl Avx512Bf16 {
    /// Makes the proof.
    #[inline]
    #[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512vnni,avx512bf16,avx512vbmi")]
    pub(crate) fn new() -> Self {
        Self(())
    }
}

impl Dot for Avx512Bf16 {
    shared_512!();
}

impl PairDot for Avx512Bf16 {
    methods! {
        fn dot_pairs(self, sum: __m512, w: __m512i, x: u32) -> __m512 {{
            let x = _mm512_set1_epi32(x as i32);
            let halves = |a| std::mem::transmute::<__m512i, __m512bh>(a);
            _mm512_dpbf16_ps(sum, halves(w), halves(x))
        }}
        fn wide_pairs(self, x: &Quad, table: &PairTable) -> [__m512i; 2] {{
            let x = _mm512_loadu_si512(x.as_ptr().cast());
            // The index is the low 7 bits of a code.
            let half = |of: &[Quad; 2]| {
                let [first, second] = of.each_ref().map(|part| _mm512_loadu_si512(part.as_ptr().cast()));
                _mm512_permutex2var_epi8(first, x, second)
            };
            let (low, high) = (half(&table.low), half(&table.high));
            let high = _mm512_or_si512(high, _mm512_and_si512(x, _mm512_set1_epi8(-128)));
            [_mm512_unpacklo_epi8(low, high), _mm512_unpackhi_epi8(low, high)]
        }}
    }
}

/// Operations that AVX2 and AVX-VNNI share.
macro_rules! shared_256 {
    () => {
        type I = [__m256i; 2];
        type B = [__m256i; 2];
        type F = [__m256; 2];

        methods! {
            fn prefetch(self, start: *const u8, bytes: usize) -> () {
                for at in (0..bytes).step_by(64) {
                    _mm_prefetch::<_MM_HINT_T1>(start.wrapping_add(at).cast());
                }
            }
            fn splat_i(self, x: i32) -> [__m256i; 2] { [_mm256_set1_epi32(x); 2] }
            fn add_i(self, a: [__m256i; 2], b: [__m256i; 2]) -> [__m256i; 2] {
                [_mm256_add_epi32(a[0], b[0]), _mm256_add_epi32(a[1], b[1])]
            }
            fn load(self, x: &Quad) -> [__m256i; 2] {
                [_mm256_loadu_si256(x.as_ptr().cast()), _mm256_loadu_si256(x.as_ptr().add(32).cast())]
            }
            fn store(self, x: [__m256i; 2], out: &mut Quad) -> () {{
                _mm256_storeu_si256(out.as_mut_ptr().cast(), x[0]);
                _mm256_storeu_si256(out.as_mut_ptr().add(32).cast(), x[1]);
            }}
            fn shift(self, x: [__m256i; 2], n: i32) -> [__m256i; 2] {
                match n {
                    0 => x,
                    1.. => x.map(|x| _mm256_srl_epi16(x, _mm_cvtsi32_si128(n))),
                    _ => x.map(|x| _mm256_sll_epi16(x, _mm_cvtsi32_si128(-n))),
                }
            }
            fn and(self, x: [__m256i; 2], mask: u8) -> [__m256i; 2] {
                x.map(|x| _mm256_and_si256(x, _mm256_set1_epi8(mask as i8)))
            }
            fn or(self, a: [__m256i; 2], b: [__m256i; 2]) -> [__m256i; 2] {
                [_mm256_or_si256(a[0], b[0]), _mm256_or_si256(a[1], b[1])]
            }
            fn look_up(self, x: [__m256i; 2], table: &[u8; 16]) -> [__m256i; 2] {{
                let table = _mm256_broadcastsi128_si256(_mm_loadu_si128(table.as_ptr().cast()));
                x.map(|x| _mm256_shuffle_epi8(table, x))
            }}
            // As at the wider level; the bytes are picked, since packing instructions saturate.
            fn codes(self, x: &[f32; ROWS], divisor: f32, range: (f32, f32), out: &mut [i8; ROWS]) -> () {{
                let bytes = _mm256_setr_epi8(
                    0, 4, 8, 12, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1,
                    0, 4, 8, 12, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1,
                );
                for (x, out) in x.as_chunks::<8>().0.iter().zip(out.as_chunks_mut::<8>().0) {
                    let x = _mm256_div_ps(_mm256_loadu_ps(x.as_ptr()), _mm256_set1_ps(divisor));
                    let x = _mm256_min_ps(_mm256_set1_ps(range.1), _mm256_max_ps(_mm256_set1_ps(range.0), x));
                    let codes = _mm256_shuffle_epi8(_mm256_cvtps_epi32(x), bytes);
                    let (low, high) = (_mm256_castsi256_si128(codes), _mm256_extracti128_si256::<1>(codes));
                    _mm_storel_epi64(out.as_mut_ptr().cast(), _mm_unpacklo_epi32(low, high));
                }
            }}
            fn to_f32(self, x: [__m256i; 2]) -> [__m256; 2] { x.map(|x| _mm256_cvtepi32_ps(x)) }
            fn splat(self, x: f32) -> [__m256; 2] { [_mm256_set1_ps(x); 2] }
            fn load_f32(self, x: &[f32; ROWS]) -> [__m256; 2] {
                [_mm256_loadu_ps(x.as_ptr()), _mm256_loadu_ps(x.as_ptr().add(8))]
            }
            fn store_f32(self, x: [__m256; 2], out: &mut [f32; ROWS]) -> () {{
                _mm256_storeu_ps(out.as_mut_ptr(), x[0]);
                _mm256_storeu_ps(out.as_mut_ptr().add(8), x[1]);
            }}
            fn mul(self, a: [__m256; 2], b: [__m256; 2]) -> [__m256; 2] {
                [_mm256_mul_ps(a[0], b[0]), _mm256_mul_ps(a[1], b[1])]
            }
            fn mul_add(self, a: [__m256; 2], b: [__m256; 2], c: [__m256; 2]) -> [__m256; 2] {
                [_mm256_fmadd_ps(a[0], b[0], c[0]), _mm256_fmadd_ps(a[1], b[1], c[1])]
            }
            fn wide_f16(self, x: &[u8; 2 * ROWS]) -> [__m256; 2] {
                [
                    _mm256_cvtph_ps(_mm_loadu_si128(x.as_ptr().cast())),
                    _mm256_cvtph_ps(_mm_loadu_si128(x.as_ptr().add(16).cast())),
                ]
            }
            fn wide_bf16(self, x: &[u8; 2 * ROWS]) -> [__m256; 2] {
                [0, 16].map(|at| {
                    let wide = _mm256_cvtepu16_epi32(_mm_loadu_si128(x.as_ptr().add(at).cast()));
                    _mm256_castsi256_ps(_mm256_slli_epi32::<16>(wide))
                })
            }
            fn wide_bf16_pairs(self, x: &Quad) -> [[__m256; 2]; 2] {{
                let pairs = self.load(x);
                let high = _mm256_set1_epi32(0xffff_0000_u32 as i32);
                [
                    [_mm256_castsi256_ps(_mm256_slli_epi32::<16>(pairs[0])), _mm256_castsi256_ps(_mm256_slli_epi32::<16>(pairs[1]))],
                    [_mm256_castsi256_ps(_mm256_and_si256(pairs[0], high)), _mm256_castsi256_ps(_mm256_and_si256(pairs[1], high))],
                ]
            }}
            fn wide_i8(self, x: &[u8; ROWS]) -> [__m256; 2] {
                [0, 8].map(|at| {
                    _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64(x.as_ptr().add(at).cast())))
                })
            }
            fn wide_u8(self, x: &[u8; ROWS]) -> [__m256; 2] {
                [0, 8].map(|at| {
                    _mm256_cvtepi32_ps(_mm256_cvtepu8_epi32(_mm_loadl_epi64(x.as_ptr().add(at).cast())))
                })
            }
            fn powers(self, x: &[u8; ROWS]) -> [__m256; 2] {
                [0, 8].map(|at| {
                    let wide = _mm256_cvtepu8_epi32(_mm_loadl_epi64(x.as_ptr().add(at).cast()));
                    _mm256_castsi256_ps(_mm256_slli_epi32::<23>(wide))
                })
            }
            fn wide_e4m3(self, x: &[u8; ROWS]) -> [__m256; 2] {
                [0, 8].map(|at| {
                    let wide = _mm_cvtepu8_epi16(_mm_loadl_epi64(x.as_ptr().add(at).cast()));
                    _mm256_cvtph_ps(_mm_slli_epi16::<7>(wide))
                })
            }
            fn wide_f32(self, x: &[u8; 4 * ROWS]) -> [__m256; 2] {
                [_mm256_loadu_ps(x.as_ptr().cast()), _mm256_loadu_ps(x.as_ptr().add(32).cast())]
            }
            fn wide_mini(self, x: &[u8; ROWS], bits: MiniBits) -> [__m256; 2] {
                [0, 8].map(|at| {
                    let wide = _mm_cvtepu8_epi16(_mm_loadl_epi64(x.as_ptr().add(at).cast()));
                    let magnitude = _mm_and_si128(wide, _mm_set1_epi16(bits.magnitude.into()));
                    let sign = _mm_and_si128(wide, _mm_set1_epi16(bits.sign.into()));
                    _mm256_cvtph_ps(_mm_or_si128(
                        _mm_sll_epi16(magnitude, _mm_cvtsi32_si128(bits.shift as i32)),
                        _mm_sll_epi16(sign, _mm_cvtsi32_si128(bits.sign_shift as i32)),
                    ))
                })
            }
        }
    };
}

/// Proof that AVX2, FMA and F16C are available.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Avx2(());

impl Avx2 {
    /// Makes the proof.
    #[inline]
    #[target_feature(enable = "avx2,fma,f16c")]
    pub(crate) fn new() -> Self {
        Self(())
    }
}

impl Dot for Avx2 {
    shared_256!();

    // Even and odd bytes widened to 16 bits: `vpmaddubsw` would saturate for codes of more than 6 bits.
    methods! {
        fn dot(self, sum: [__m256i; 2], w: [__m256i; 2], x: i32) -> [__m256i; 2] {{
            let x = _mm256_set1_epi32(x);
            let (even_x, odd_x) =
                (_mm256_srai_epi16::<8>(_mm256_slli_epi16::<8>(x)), _mm256_srai_epi16::<8>(x));
            let low = _mm256_set1_epi16(0xff);
            let add = |sum, w| {
                let even = _mm256_madd_epi16(_mm256_and_si256(w, low), even_x);
                let odd = _mm256_madd_epi16(_mm256_srli_epi16::<8>(w), odd_x);
                _mm256_add_epi32(sum, _mm256_add_epi32(even, odd))
            };
            [add(sum[0], w[0]), add(sum[1], w[1])]
        }}
    }
}

/// Proof that AVX-VNNI, AVX2, FMA and F16C are available (Alder Lake and later, Zen 5).
#[derive(Clone, Copy, Debug)]
pub(crate) struct AvxVnni(());

impl AvxVnni {
    /// Makes the proof.
    #[inline]
    #[target_feature(enable = "avx2,fma,f16c,avxvnni")]
    pub(crate) fn new() -> Self {
        Self(())
    }
}

impl Dot for AvxVnni {
    shared_256!();

    methods! {
        fn dot(self, sum: [__m256i; 2], w: [__m256i; 2], x: i32) -> [__m256i; 2] {{
            let x = _mm256_set1_epi32(x);
            [_mm256_dpbusd_avx_epi32(sum[0], w[0], x), _mm256_dpbusd_avx_epi32(sum[1], w[1], x)]
        }}
    }
}
