//! [`CodeDot`] for AVX2, AVX-VNNI, AVX-512 and AVX-512 VNNI. AVX2 and AVX-512 multiply pairs of 16-bit codes
//! (`VPMADDWD`), the others four bytes (`VPDPBUSD`), in one instruction per 8 or 16 sums.

use std::arch::x86_64::*;

use crate::generic::{CodeDot, Codes, multiply_codes};
use crate::simd::LANES;
use crate::simd::x86::{Avx2, Avx512};
use crate::{Isa, MatMut};

/// A product of codes.
pub(crate) type Product = unsafe fn(Codes<'_>, Codes<'_>, MatMut<'_>, bool);

/// Returns the product of codes of level `isa` on this processor, if it is better than the product that the level's
/// features give.
pub(crate) fn best(isa: Isa) -> Option<Product> {
    match isa {
        Isa::Avx512 | Isa::Amx if is_x86_feature_detected!("avx512vnni") => Some(avx512_vnni),
        Isa::Avx2 if is_x86_feature_detected!("avxvnni") => Some(avx_vnni),
        _ => None,
    }
}

/// Declares a level: its integer operations on registers, and its product.
macro_rules! level {
    (
        $(#[$doc:meta])* $name:ident($level:ident), codes $codes:literal, excess $excess:literal,
        tile $rows:literal $scaled:literal $vectors:literal, $product:ident, features $features:literal,
        type $int:ty; splat($x:ident) $splat:expr; load($from:ident) $load:expr;
        dot($sum:ident, $b:ident, $a:ident) $dot:expr; to_f32($ints:ident) $to_f32:expr
    ) => {
        $(#[$doc])*
        #[derive(Clone, Copy)]
        struct $name($level);

        impl CodeDot for $name {
            type Level = $level;
            type Int = $int;
            const CODES: usize = $codes;
            const EXCESS: bool = $excess;

            #[inline(always)]
            fn level(self) -> $level {
                self.0
            }

            #[inline(always)]
            fn splat(self, $x: u32) -> $int {
                // SAFETY: made only in functions that enable the level's features.
                unsafe { $splat }
            }

            #[inline(always)]
            fn load(self, $from: &[u32; LANES]) -> $int {
                // SAFETY: as in `splat`; reads the 64 bytes of the array, without alignment.
                unsafe { $load }
            }

            #[inline(always)]
            fn dot(self, $sum: $int, $b: $int, $a: $int) -> $int {
                // SAFETY: as in `splat`.
                unsafe { $dot }
            }

            #[inline(always)]
            fn to_f32(self, $ints: $int) -> <$level as crate::simd::Simd>::F32 {
                // SAFETY: as in `splat`.
                unsafe { $to_f32 }
            }
        }

        /// The product of codes of the level.
        #[target_feature(enable = $features)]
        pub(crate) fn $product(a: Codes<'_>, b: Codes<'_>, c: MatMut<'_>, accumulate: bool) {
            multiply_codes::<_, $rows, $scaled, $vectors>($name($level::new()), a, b, c, accumulate);
        }
    };
}

level!(
    /// Sums of AVX-512 VNNI.
    Vnni512(Avx512), codes 4, excess true, tile 8 4 3, avx512_vnni,
    features "avx2,fma,avx512f,avx512bw,avx512vl,avx512dq,avx512vnni",
    type __m512i;
    splat(x) _mm512_set1_epi32(x as i32);
    load(x) _mm512_loadu_si512(x.as_ptr().cast());
    dot(sum, b, a) _mm512_dpbusd_epi32(sum, b, a);
    to_f32(x) _mm512_cvtepi32_ps(x)
);

level!(
    /// Sums of AVX-512 BW.
    Words512(Avx512), codes 2, excess false, tile 8 4 3, avx512,
    features "avx2,fma,avx512f,avx512bw,avx512vl,avx512dq",
    type __m512i;
    splat(x) _mm512_set1_epi32(x as i32);
    load(x) _mm512_loadu_si512(x.as_ptr().cast());
    dot(sum, b, a) _mm512_add_epi32(sum, _mm512_madd_epi16(b, a));
    to_f32(x) _mm512_cvtepi32_ps(x)
);

level!(
    /// Sums of AVX-VNNI.
    Vnni256(Avx2), codes 4, excess true, tile 6 3 1, avx_vnni, features "avx2,fma,avxvnni",
    type [__m256i; 2];
    splat(x) [_mm256_set1_epi32(x as i32); 2];
    load(x) [_mm256_loadu_si256(x.as_ptr().cast()), _mm256_loadu_si256(x.as_ptr().add(8).cast())];
    dot(sum, b, a) [_mm256_dpbusd_avx_epi32(sum[0], b[0], a[0]), _mm256_dpbusd_avx_epi32(sum[1], b[1], a[1])];
    to_f32(x) [_mm256_cvtepi32_ps(x[0]), _mm256_cvtepi32_ps(x[1])]
);

level!(
    /// Sums of AVX2.
    Words256(Avx2), codes 2, excess false, tile 6 3 1, avx2, features "avx2,fma",
    type [__m256i; 2];
    splat(x) [_mm256_set1_epi32(x as i32); 2];
    load(x) [_mm256_loadu_si256(x.as_ptr().cast()), _mm256_loadu_si256(x.as_ptr().add(8).cast())];
    dot(sum, b, a) [
        _mm256_add_epi32(sum[0], _mm256_madd_epi16(b[0], a[0])),
        _mm256_add_epi32(sum[1], _mm256_madd_epi16(b[1], a[1])),
    ];
    to_f32(x) [_mm256_cvtepi32_ps(x[0]), _mm256_cvtepi32_ps(x[1])]
);

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Kernels, MatRef};

    /// Every product that the processor has gives the bits of the definition, with and without scales.
    #[test]
    fn products_agree_bit_for_bit() {
        let mut all: Vec<(&str, Product)> = Vec::new();
        if Isa::Avx2.is_available() {
            all.push(("avx2", avx2));
            if is_x86_feature_detected!("avxvnni") {
                all.push(("avx-vnni", avx_vnni));
            }
        }
        if Isa::Avx512.is_available() {
            all.push(("avx512", avx512));
            all.extend(best(Isa::Avx512).map(|product| ("avx512-vnni", product)));
        }
        let plain = Kernels::new(Isa::Scalar).unwrap_or(*crate::kernels());
        let bytes =
            |n: usize, by: usize| -> Vec<i8> { (0..n).map(|i| (i * i * 31 + i * by) as u8 as i8).collect() };
        let waves =
            |n: usize, by: f32| -> Vec<f32> { (0..n).map(|i| 1.0 + 0.5 * (i as f32 * by).sin()).collect() };
        for (m, n, k, unit) in
            [(1, 1, 1, 0), (9, 50, 37, 0), (33, 17, 128, 32), (20, 97, 75, 10), (70, 64, 1100, 0)]
        {
            let (a, b) = (bytes(m * k, 7), bytes(n * k, 3));
            let units = k.div_ceil(if unit == 0 { k } else { unit });
            let (scales_a, scales_b) = (waves(m * units, 0.3), waves(n * units, 0.7));
            let (lines_a, lines_b) = (waves(m, 0.11), waves(n, 0.9));
            let codes = |codes, rows, scales, factors| Codes {
                scales: (unit > 0).then_some((unit, scales)),
                factors: Some(factors),
                factor: 0.75,
                ..Codes::new(MatRef::new(codes, rows, k))
            };
            let (a, b) = (codes(&a, m, &scales_a, &lines_a), codes(&b, n, &scales_b, &lines_b));
            for accumulate in [false, true] {
                let mut expected = vec![0.25; m * n];
                plain.gemm_codes(a, b, MatMut::new(&mut expected, m, n), accumulate);
                for (name, product) in &all {
                    let mut found = vec![0.25; m * n];
                    // SAFETY: only products of features that were detected are in the list.
                    unsafe { product(a, b, MatMut::new(&mut found, m, n), accumulate) };
                    assert!(
                        found.iter().zip(&expected).all(|(x, y)| x.to_bits() == y.to_bits()),
                        "{name} [{m}, {n}, {k}] units of {unit}"
                    );
                }
            }
        }
    }
}
