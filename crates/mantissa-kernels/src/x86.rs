//! Hand-written x86 kernels, only where the compiler cannot find the instruction.
//!
//! One instruction multiplies and adds bf16 pairs; no plain Rust code compiles to it.
//!
//! A 16-entry f32 table fits in registers, and one permutation looks up a register of codes; for `lut[code]` the
//! compiler generates one scalar load per element. The arithmetic (one multiplication) is that of
//! `generic::dequant_lut4`, so the bits are the same.

use crate::MatMut;
use crate::generic::{self, GEMM_DEPTH, Operand, Panels};
use crate::simd::LANES;
use crate::simd::x86::Avx512;
use std::arch::x86_64::*;

/// [`generic::gemm_bf16`] on `VDPBF16PS`, which for each f32 lane and a pair of bf16 from either operand
/// computes `fma(a[0], b[0], fma(a[1], b[1], sum))`, rounding each to nearest even; subnormal operands, sums and
/// results count as zero, whatever MXCSR says (Intel SDM, volume 2). So the bits are those of the widening
/// product wherever nothing is subnormal.
#[target_feature(enable = "avx2,fma,avx512f,avx512bw,avx512vl,avx512dq,avx512bf16")]
pub(crate) fn gemm_bf16_dot(a: Operand<'_, u16>, b: Operand<'_, u16>, c: MatMut<'_>, accumulate: bool) {
    generic::product::<_, 8, 3>(Bf16Pairs::new(), "gemm_bf16", a, b, c, accumulate);
}

/// Panels of bf16 pairs, the even element in the low half. Proves that AVX-512 BF16 is available.
#[derive(Clone, Copy)]
struct Bf16Pairs(Avx512);

impl Bf16Pairs {
    #[inline]
    #[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512bf16")]
    fn new() -> Self {
        Self(Avx512::new())
    }
}

impl Panels for Bf16Pairs {
    type Element = u16;
    type Level = Avx512;
    type Vector = __m512bh;
    const STEPS: usize = 1;
    const PAIRED: bool = false;

    #[inline(always)]
    fn level(self) -> Avx512 {
        self.0
    }

    #[inline(always)]
    fn along_k(self, row: &[u16], out: &mut [u32; GEMM_DEPTH]) {
        let (pairs, odd) = row.as_chunks::<2>();
        for (out, &[low, high]) in out.iter_mut().zip(pairs) {
            *out = u32::from(low) | u32::from(high) << 16;
        }
        if let [last] = odd {
            out[pairs.len()] = u32::from(*last);
        }
    }

    #[inline(always)]
    fn across<const G: usize>(self, low: &[u16; G], high: &[u16; G], _width: usize, out: &mut [u32]) {
        for ((out, &low), &high) in out[..G].iter_mut().zip(low).zip(high) {
            *out = u32::from(low) | u32::from(high) << 16;
        }
    }

    #[inline(always)]
    fn load(self, step: &[u32; LANES]) -> __m512bh {
        // SAFETY: the array has the size of the register; all bit patterns are valid.
        unsafe { std::mem::transmute::<[u32; LANES], __m512bh>(*step) }
    }

    #[inline(always)]
    fn splat(self, step: u32) -> __m512bh {
        // SAFETY: `self` exists only if AVX-512 is available; registers have one size.
        unsafe { std::mem::transmute::<__m512i, __m512bh>(_mm512_set1_epi32(step as i32)) }
    }

    #[inline(always)]
    fn add_product(self, a: __m512bh, b: __m512bh, sum: __m512) -> __m512 {
        // SAFETY: `self` exists only if AVX-512 BF16 is available.
        unsafe { _mm512_dpbf16_ps(sum, a, b) }
    }
}

/// [`generic::dequant_lut4`] with the table in two 8-lane registers, selected by bit 3 of the code.
#[target_feature(enable = "avx2")]
pub(crate) fn dequant_lut4_avx2(
    codes: &[u8],
    lut: &[f32; 16],
    scales: &[f32],
    group: usize,
    out: &mut [f32],
) {
    // SAFETY: both loads read 8 of the table's 16 floats; loadu needs no alignment.
    let (low, high) = unsafe { (_mm256_loadu_ps(lut.as_ptr()), _mm256_loadu_ps(lut.as_ptr().add(8))) };
    let look_up = |codes: __m128i| {
        let index = _mm256_cvtepu8_epi32(codes);
        // The permutation reads bits 0-2 of the index; the blend reads the sign, to which the shift moves bit 3.
        let upper_half = _mm256_castsi256_ps(_mm256_slli_epi32::<28>(index));
        _mm256_blendv_ps(
            _mm256_permutevar8x32_ps(low, index),
            _mm256_permutevar8x32_ps(high, index),
            upper_half,
        )
    };
    by_sixteen(codes, lut, scales, group, out, |bytes, scale, out| {
        let codes = split_nibbles(bytes);
        let scale = _mm256_set1_ps(scale);
        let first = _mm256_mul_ps(look_up(codes), scale);
        let second = _mm256_mul_ps(look_up(_mm_unpackhi_epi64(codes, codes)), scale);
        // SAFETY: the two stores write 8 of the 16 floats of `out` each; storeu needs no alignment.
        unsafe {
            _mm256_storeu_ps(out.as_mut_ptr(), first);
            _mm256_storeu_ps(out.as_mut_ptr().add(8), second);
        }
    });
}

/// [`generic::dequant_lut4`] with the table in one 16-lane register.
#[target_feature(enable = "avx2,avx512f,avx512bw,avx512vl,avx512dq")]
pub(crate) fn dequant_lut4_avx512(
    codes: &[u8],
    lut: &[f32; 16],
    scales: &[f32],
    group: usize,
    out: &mut [f32],
) {
    // SAFETY: reads the 16 floats of the table; loadu needs no alignment.
    let table = unsafe { _mm512_loadu_ps(lut.as_ptr()) };
    by_sixteen(codes, lut, scales, group, out, |bytes, scale, out| {
        // The permutation reads only bits 0-3 of the index.
        let index = _mm512_cvtepu8_epi32(split_nibbles(bytes));
        let values = _mm512_mul_ps(_mm512_permutexvar_ps(index, table), _mm512_set1_ps(scale));
        // SAFETY: writes the 16 floats of `out`; storeu needs no alignment.
        unsafe { _mm512_storeu_ps(out.as_mut_ptr(), values) };
    });
}

/// Sixteen bytes whose low nibbles are the codes of `bytes` in order; their high nibbles are undefined.
#[inline]
#[target_feature(enable = "sse2")]
fn split_nibbles(bytes: [u8; 8]) -> __m128i {
    let low = _mm_cvtsi64_si128(i64::from_le_bytes(bytes));
    _mm_unpacklo_epi8(low, _mm_srli_epi16::<4>(low))
}

/// Passes every whole run of 16 codes within a group to `decode`, and handles the rest one by one.
#[inline(always)]
fn by_sixteen(
    codes: &[u8],
    lut: &[f32; 16],
    scales: &[f32],
    group: usize,
    out: &mut [f32],
    decode: impl Fn([u8; 8], f32, &mut [f32; 16]),
) {
    generic::check4("dequant_lut4", codes, scales, group, out);
    if !group.is_multiple_of(2) {
        return generic::dequant_lut4(codes, lut, scales, group, out);
    }
    for ((codes, out), &scale) in codes.chunks(group / 2).zip(out.chunks_mut(group)).zip(scales) {
        let (out_runs, out_rest) = out.as_chunks_mut::<16>();
        let (runs, rest) = codes.split_at(out_runs.len() * 8);
        for (&bytes, out) in runs.as_chunks::<8>().0.iter().zip(out_runs) {
            decode(bytes, scale, out);
        }
        for (i, out) in out_rest.iter_mut().enumerate() {
            *out = lut[usize::from(rest[i / 2] >> (4 * (i % 2)) & 15)] * scale;
        }
    }
}
