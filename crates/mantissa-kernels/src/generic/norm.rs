//! RMSNorm (Zhang & Sennrich 2019, "Root Mean Square Layer Normalization", eq. 4) with the order of
//! operations of Llama in f32: `weight * (x * (1 / sqrt(mean(x^2) + eps)))`, every operation rounded. LayerNorm (Ba et
//! al. 2016, eq. 3) with the mean summed in f64.

use super::reduce::{dot, dot3, sum_terms_f64};
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

#[inline(always)]
pub(crate) fn layer_norm<S: Simd>(
    simd: S,
    x: &[f32],
    weight: &[f32],
    bias: &[f32],
    eps: f32,
    out: &mut [f32],
) {
    let d = weight.len();
    assert!(x.len() == out.len() && bias.len() == d, "layer_norm: lengths differ");
    if x.is_empty() {
        return;
    }
    assert!(d > 0 && x.len().is_multiple_of(d), "layer_norm: {} values are not rows of {d}", x.len());
    for (x, out) in x.chunks_exact(d).zip(out.chunks_exact_mut(d)) {
        let mean = (sum_terms_f64(simd, x, f64::from) / d as f64) as f32;
        for (out, x) in out.iter_mut().zip(x) {
            *out = x - mean;
        }
        let variance = dot(simd, out, out) / d as f32;
        let inverse = 1.0 / (variance + eps).sqrt();
        for ((out, w), b) in out.iter_mut().zip(weight).zip(bias) {
            *out = *out * inverse * w + b;
        }
    }
}

/// With `i = 1 / sqrt(mean(x²) + eps)` and `g = dy · w`: `dw += dy · x · i` and
/// `dx += i · g - x · (i³ / d) · Σ g x`, the derivative of eq. 4.
#[inline(always)]
pub(crate) fn rms_norm_backward<S: Simd>(
    simd: S,
    x: &[f32],
    weight: &[f32],
    eps: f32,
    dy: &[f32],
    dx: &mut [f32],
    dweight: &mut [f32],
) {
    let d = weight.len();
    assert!(
        x.len() == dy.len() && x.len() == dx.len() && dweight.len() == d,
        "rms_norm_backward: lengths differ"
    );
    if x.is_empty() {
        return;
    }
    assert!(d > 0 && x.len().is_multiple_of(d), "rms_norm_backward: {} values are not rows of {d}", x.len());
    for ((x, dy), dx) in x.chunks_exact(d).zip(dy.chunks_exact(d)).zip(dx.chunks_exact_mut(d)) {
        let inverse = 1.0 / (dot(simd, x, x) / d as f32 + eps).sqrt();
        let along = dot3(simd, dy, weight, x) * (inverse * inverse * inverse) / d as f32;
        for i in 0..d {
            dweight[i] += dy[i] * (x[i] * inverse);
            dx[i] += (dy[i] * weight[i]) * inverse - x[i] * along;
        }
    }
}

/// Values centered at a time in [`layer_norm_backward`].
const CHUNK: usize = 64;

/// With the mean m, `i = 1 / sqrt(var(x) + eps)`, `h = (x - m) i` and `g = dy · w`: `dw += dy · h`, `db += dy` and
/// `dx += i (g - mean(g) - h mean(g h))`, the derivative of eq. 3.
#[inline(always)]
pub(crate) fn layer_norm_backward<S: Simd>(
    simd: S,
    x: &[f32],
    weight: &[f32],
    eps: f32,
    dy: &[f32],
    dx: &mut [f32],
    dweight: &mut [f32],
    dbias: &mut [f32],
) {
    let d = weight.len();
    assert!(
        x.len() == dy.len() && x.len() == dx.len() && dweight.len() == d && dbias.len() == d,
        "layer_norm_backward: lengths differ"
    );
    if x.is_empty() {
        return;
    }
    assert!(
        d > 0 && x.len().is_multiple_of(d),
        "layer_norm_backward: {} values are not rows of {d}",
        x.len()
    );
    for ((x, dy), dx) in x.chunks_exact(d).zip(dy.chunks_exact(d)).zip(dx.chunks_exact_mut(d)) {
        let mean = (sum_terms_f64(simd, x, f64::from) / d as f64) as f32;
        let square = |x: f32| f64::from(x - mean) * f64::from(x - mean);
        let inverse = 1.0 / ((sum_terms_f64(simd, x, square) / d as f64) as f32 + eps).sqrt();
        let across = dot(simd, dy, weight) / d as f32;
        // Centered before it is multiplied, so that a large mean does not cancel.
        let (mut along, mut centered) = (0.0, [0.0; CHUNK]);
        for ((x, dy), w) in x.chunks(CHUNK).zip(dy.chunks(CHUNK)).zip(weight.chunks(CHUNK)) {
            let centered = &mut centered[..x.len()];
            centered.iter_mut().zip(x).for_each(|(c, x)| *c = x - mean);
            along += dot3(simd, dy, w, centered);
        }
        let along = along * (inverse * inverse) / d as f32;
        for i in 0..d {
            let centered = x[i] - mean;
            dweight[i] += dy[i] * (centered * inverse);
            dbias[i] += dy[i];
            dx[i] += inverse * (dy[i] * weight[i] - across - centered * along);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::simd::Portable;

    #[test]
    fn layer_norm_centers_and_scales() {
        let mut out = [0.0; 6];
        let x = [1.0, 2.0, 6.0, -5.0, -5.0, -5.0];
        layer_norm(Portable, &x, &[1.0, 2.0, 3.0], &[0.5, 0.0, -1.0], 1e-5, &mut out);
        let deviation = (14.0_f64 / 3.0 + 1e-5).sqrt();
        let exact = [-2.0 / deviation + 0.5, -2.0 / deviation, 9.0 / deviation - 1.0, 0.5, 0.0, -1.0];
        for (out, exact) in out.iter().zip(exact) {
            assert!((f64::from(*out) - exact).abs() < 1e-6, "{out} for {exact}");
        }
    }

    #[test]
    fn gradients_match_central_differences() {
        let (d, rows) = (19, 3);
        let wave = |n: usize, phase: f32| (0..n).map(|i| (i as f32 * 0.7 + phase).sin()).collect::<Vec<_>>();
        let (x, w, dy) = (wave(d * rows, 0.0), wave(d, 1.0), wave(d * rows, 2.0));
        // The loss Σ dy · norm(x) in f64.
        let loss = |x: &[f64], w: &[f64]| -> f64 {
            let row = |(x, dy): (&[f64], &[f32])| -> f64 {
                let inverse = (x.iter().map(|v| v * v).sum::<f64>() / d as f64 + 1e-3).powf(-0.5);
                x.iter().zip(w).zip(dy).map(|((x, w), dy)| f64::from(*dy) * w * x * inverse).sum()
            };
            x.chunks(d).zip(dy.chunks(d)).map(row).sum()
        };
        let (mut dx, mut dw) = (vec![0.5; d * rows], vec![0.25; d]);
        rms_norm_backward(Portable, &x, &w, 1e-3, &dy, &mut dx, &mut dw);
        let wide = |v: &[f32]| v.iter().map(|&v| f64::from(v)).collect::<Vec<_>>();
        let slope = |at: usize, of_weight: bool| {
            let value = |h: f64| {
                let (mut x, mut w) = (wide(&x), wide(&w));
                if of_weight {
                    w[at] += h;
                } else {
                    x[at] += h;
                }
                loss(&x, &w)
            };
            (value(1e-5) - value(-1e-5)) / 2e-5
        };
        for (i, dx) in dx.iter().enumerate() {
            assert!((f64::from(*dx) - 0.5 - slope(i, false)).abs() < 1e-5, "dx[{i}]");
        }
        for (i, dw) in dw.iter().enumerate() {
            assert!((f64::from(*dw) - 0.25 - slope(i, true)).abs() < 1e-5, "dw[{i}]");
        }
    }

    #[test]
    fn gradients_of_layer_norm_match_central_differences() {
        let (d, rows) = (83, 2);
        let wave = |n: usize, phase: f32| (0..n).map(|i| (i as f32 * 0.7 + phase).sin()).collect::<Vec<_>>();
        let (x, w, b, dy) = (wave(d * rows, 0.0), wave(d, 1.0), wave(d, 4.0), wave(d * rows, 2.0));
        // The loss Σ dy · norm(x) in f64.
        let loss = |x: &[f64], w: &[f64], b: &[f64]| -> f64 {
            let row = |(x, dy): (&[f64], &[f32])| -> f64 {
                let mean = x.iter().sum::<f64>() / d as f64;
                let inverse =
                    (x.iter().map(|v| (v - mean).powi(2)).sum::<f64>() / d as f64 + 1e-3).powf(-0.5);
                let normed = x.iter().zip(w).zip(b).map(|((x, w), b)| (x - mean) * inverse * w + b);
                normed.zip(dy).map(|(y, dy)| f64::from(*dy) * y).sum()
            };
            x.chunks(d).zip(dy.chunks(d)).map(row).sum()
        };
        let (mut dx, mut dw, mut db) = (vec![0.5; d * rows], vec![0.25; d], vec![-0.5; d]);
        layer_norm_backward(Portable, &x, &w, 1e-3, &dy, &mut dx, &mut dw, &mut db);
        let wide = |v: &[f32]| v.iter().map(|&v| f64::from(v)).collect::<Vec<_>>();
        let slope = |which: usize, at: usize| {
            let value = |h: f64| {
                let mut all = [wide(&x), wide(&w), wide(&b)];
                all[which][at] += h;
                loss(&all[0], &all[1], &all[2])
            };
            (value(1e-5) - value(-1e-5)) / 2e-5
        };
        for (which, (found, start)) in [(&dx, 0.5), (&dw, 0.25), (&db, -0.5)].into_iter().enumerate() {
            for (i, found) in found.iter().enumerate() {
                let slope = slope(which, i);
                assert!(
                    (f64::from(*found) - start - slope).abs() < 1e-5,
                    "[{which}][{i}]: {found} for {slope}"
                );
            }
        }
    }

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
