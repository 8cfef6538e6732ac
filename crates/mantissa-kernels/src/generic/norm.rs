//! RMSNorm (Zhang & Sennrich 2019, "Root Mean Square Layer Normalization", eq. 4) with the order of
//! operations of Llama in f32: `weight * (x * (1 / sqrt(mean(x^2) + eps)))`, every operation rounded.

use super::reduce::dot;
use crate::simd::Simd;

#[inline(always)]
pub(crate) fn rms_norm<S: Simd>(simd: S, x: &[f32], weight: &[f32], eps: f32, out: &mut [f32]) {
    let d = weight.len();
    assert_eq!(x.len(), out.len(), "rms_norm: x and out differ in length");
    if x.is_empty() {
        return;
    }
    assert!(d > 0 && x.len().is_multiple_of(d), "rms_norm: {} values are not rows of {d}", x.len());
    for (x, out) in x.chunks_exact(d).zip(out.chunks_exact_mut(d)) {
        let mean_square = dot(simd, x, x) / d as f32;
        let inverse = 1.0 / (mean_square + eps).sqrt();
        for ((out, x), w) in out.iter_mut().zip(x).zip(weight) {
            *out = w * (x * inverse);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::simd::Portable;

    #[test]
    fn rows_are_normalized_one_by_one() {
        let mut out = [0.0; 4];
        rms_norm(Portable, &[3.0, 4.0, 0.0, 0.0], &[1.0, 2.0], 0.0, &mut out);
        let inverse = 1.0 / 12.5_f32.sqrt();
        assert_eq!(out[..2], [3.0 * inverse, 2.0 * (4.0 * inverse)]);
        assert!(out[2].is_nan(), "0 * inf without eps");
        rms_norm(Portable, &[0.0; 2], &[1.0, 2.0], 1e-5, &mut out[..2]);
        assert_eq!(out[..2], [0.0, 0.0]);
    }
}
