//! Reductions over one slice, and the two vector updates of BLAS level 1.

use super::{padded, tree};
use crate::simd::{LANES, Simd};

/// Elements whose f64 terms are computed together before they are added to the lanes.
const BLOCK: usize = 256;

#[inline(always)]
pub(crate) fn dot<S: Simd>(simd: S, a: &[f32], b: &[f32]) -> f32 {
    assert_eq!(a.len(), b.len(), "dot: lengths differ");
    let (a_chunks, a_tail) = a.as_chunks::<LANES>();
    let (b_chunks, b_tail) = b.as_chunks::<LANES>();
    let mut lanes = simd.splat(0.0);
    for (a, b) in a_chunks.iter().zip(b_chunks) {
        lanes = simd.add(lanes, simd.mul(simd.load(a), simd.load(b)));
    }
    if !a_tail.is_empty() {
        let (a, b) = (simd.load(&padded(a_tail, 0.0)), simd.load(&padded(b_tail, 0.0)));
        lanes = simd.add(lanes, simd.mul(a, b));
    }
    tree(simd.to_array(lanes), |a, b| a + b)
}

/// `sum (a[i] * b[i]) * c[i]` of slices of one length.
#[inline(always)]
pub(crate) fn dot3<S: Simd>(simd: S, a: &[f32], b: &[f32], c: &[f32]) -> f32 {
    let (a_chunks, a_tail) = a.as_chunks::<LANES>();
    let (b_chunks, b_tail) = b.as_chunks::<LANES>();
    let (c_chunks, c_tail) = c.as_chunks::<LANES>();
    let product = |a: &_, b: &_, c: &_| simd.mul(simd.mul(simd.load(a), simd.load(b)), simd.load(c));
    let mut lanes = simd.splat(0.0);
    for ((a, b), c) in a_chunks.iter().zip(b_chunks).zip(c_chunks) {
        lanes = simd.add(lanes, product(a, b, c));
    }
    if !a_tail.is_empty() {
        let tail = product(&padded(a_tail, 0.0), &padded(b_tail, 0.0), &padded(c_tail, 0.0));
        lanes = simd.add(lanes, tail);
    }
    tree(simd.to_array(lanes), |a, b| a + b)
}

#[inline(always)]
pub(crate) fn sum_squares_f64<S: Simd>(simd: S, x: &[f32]) -> f64 {
    sum_terms_f64(simd, x, |x| f64::from(x) * f64::from(x))
}

#[inline(always)]
pub(crate) fn axpy(alpha: f32, x: &[f32], y: &mut [f32]) {
    assert_eq!(x.len(), y.len(), "axpy: lengths differ");
    for (y, x) in y.iter_mut().zip(x) {
        *y += alpha * x;
    }
}

/// The sum of all elements, in 16 lanes.
#[inline(always)]
pub(crate) fn sum<S: Simd>(simd: S, x: &[f32]) -> f32 {
    let lanes = fold(simd, x, 0.0, 0.0, |lanes, x| simd.add(lanes, x));
    tree(simd.to_array(lanes), |a, b| a + b)
}

#[inline(always)]
pub(crate) fn sum_f64<S: Simd>(simd: S, x: &[f32]) -> f64 {
    sum_terms_f64(simd, x, f64::from)
}

/// The sum in f64, in 16 lanes, of `term` of every element.
#[inline(always)]
pub(crate) fn sum_terms_f64<S: Simd>(simd: S, x: &[f32], term: impl Fn(f32) -> f64) -> f64 {
    let mut lanes = simd.splat_f64(0.0);
    let mut terms = [0.0_f64; BLOCK];
    for block in x.chunks(BLOCK) {
        for (t, &x) in terms.iter_mut().zip(block) {
            *t = term(x);
        }
        // Only the last block can be short; its missing elements add nothing.
        terms[block.len()..].fill(0.0);
        let used = block.len().div_ceil(LANES);
        for chunk in &terms.as_chunks::<LANES>().0[..used] {
            lanes = simd.add_f64(lanes, simd.load_f64(chunk));
        }
    }
    tree(simd.to_array_f64(lanes), |a, b| a + b)
}

#[inline(always)]
pub(crate) fn amax<S: Simd>(simd: S, x: &[f32]) -> f32 {
    let lanes = fold(simd, x, 0.0, 0.0, |lanes, x| simd.max_abs(lanes, x));
    simd.max_lane(lanes)
}

#[inline(always)]
pub(crate) fn min_max<S: Simd>(simd: S, x: &[f32]) -> (f32, f32) {
    let start = (simd.splat(f32::INFINITY), simd.splat(f32::NEG_INFINITY), simd.splat(0.0));
    let (chunks, tail) = x.as_chunks::<LANES>();
    let (mut low, mut high, mut magnitude) = start;
    for chunk in chunks {
        let x = simd.load(chunk);
        (low, high, magnitude) = (simd.lesser(low, x), simd.greater(high, x), simd.max_abs(magnitude, x));
    }
    if !tail.is_empty() {
        // NaN changes neither extreme, so it can pad the tail; only real elements may report it.
        let x = simd.load(&padded(tail, f32::NAN));
        (low, high) = (simd.lesser(low, x), simd.greater(high, x));
        magnitude = simd.max_abs(magnitude, simd.load(&padded(tail, 0.0)));
    }
    if simd.max_lane(magnitude).is_nan() {
        return (f32::NAN, f32::NAN);
    }
    (tree(simd.to_array(low), lesser), tree(simd.to_array(high), greater))
}

/// Largest value, ignoring NaN; -infinity for an empty slice.
#[inline(always)]
pub(crate) fn max_ignoring_nan<S: Simd>(simd: S, x: &[f32]) -> f32 {
    let lanes = fold(simd, x, f32::NEG_INFINITY, f32::NEG_INFINITY, |lanes, x| simd.greater(lanes, x));
    tree(simd.to_array(lanes), greater)
}

#[inline(always)]
pub(crate) fn argmax<S: Simd>(simd: S, x: &[f32]) -> Option<usize> {
    let max = max_ignoring_nan(simd, x);
    // A whole block at a time: comparing one by one with an early exit does not vectorize.
    let block = x.chunks(BLOCK).position(|block| block.iter().fold(false, |found, &v| found | (v == max)))?;
    let offset = x[block * BLOCK..].iter().position(|&v| v == max)?;
    Some(block * BLOCK + offset)
}

/// Folds whole chunks and then the tail, padded with `fill`, into 16 lanes.
#[inline(always)]
fn fold<S: Simd>(
    simd: S,
    x: &[f32],
    start: f32,
    fill: f32,
    step: impl Fn(S::F32, S::F32) -> S::F32,
) -> S::F32 {
    let (chunks, tail) = x.as_chunks::<LANES>();
    let mut lanes = simd.splat(start);
    for chunk in chunks {
        lanes = step(lanes, simd.load(chunk));
    }
    if !tail.is_empty() {
        lanes = step(lanes, simd.load(&padded(tail, fill)));
    }
    lanes
}

#[inline(always)]
pub(crate) fn lesser(a: f32, b: f32) -> f32 {
    if b < a { b } else { a }
}

#[inline(always)]
pub(crate) fn greater(a: f32, b: f32) -> f32 {
    if b > a { b } else { a }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::simd::Portable as P;

    #[test]
    fn amax_ranks_nan_over_infinity_over_finite() {
        assert_eq!(amax(P, &[]), 0.0);
        assert_eq!(amax(P, &[1.0, -3.0, 2.0]), 3.0);
        assert_eq!(amax(P, &[-1e-45]), 1e-45);
        assert_eq!(amax(P, &[f32::NEG_INFINITY, 2.0]), f32::INFINITY);
        assert!(amax(P, &[f32::NEG_INFINITY, -f32::NAN]).is_nan());
    }

    #[test]
    fn min_max_reports_nan() {
        assert_eq!(min_max(P, &[]), (f32::INFINITY, f32::NEG_INFINITY));
        assert_eq!(min_max(P, &[2.0, -1.0, 0.5]), (-1.0, 2.0));
        let (low, high) = min_max(P, &[2.0, f32::NAN]);
        assert!(low.is_nan() && high.is_nan());
    }

    #[test]
    fn argmax_takes_the_first_of_equals() {
        assert_eq!(argmax(P, &[]), None);
        assert_eq!(argmax(P, &[f32::NAN]), None);
        assert_eq!(argmax(P, &[f32::NEG_INFINITY; 3]), Some(0));
        assert_eq!(argmax(P, &[1.0, f32::NAN, 7.0, 7.0]), Some(2));
        assert_eq!(argmax(P, &[-0.0, 0.0]), Some(0));
    }

    #[test]
    fn sums_agree_with_the_exact_value() {
        let x: Vec<f32> = (0..1000_u16).map(|i| f32::from(i) * 0.1).collect();
        let exact: f64 = x.iter().map(|&v| f64::from(v)).sum();
        assert!((sum_f64(P, &x) - exact).abs() < 1e-9);
        let squares: f64 = x.iter().map(|&v| f64::from(v) * f64::from(v)).sum();
        assert!((sum_squares_f64(P, &x) / squares - 1.0).abs() < 1e-14);
        let ones = vec![2.0; x.len()];
        assert!((f64::from(dot3(P, &x, &ones, &x)) / (2.0 * squares) - 1.0).abs() < 1e-6);
        assert!((f64::from(dot(P, &x, &x)) / squares - 1.0).abs() < 1e-6);
    }
}
