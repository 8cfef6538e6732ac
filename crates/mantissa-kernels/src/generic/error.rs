//! How far an approximation is from its source, and the range of each group.

use super::reduce::{amax, min_max};
use super::tree;
use crate::simd::{LANES, Simd};

/// Sums over the elements of two slices.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct ErrorSums {
    /// `sum (x - y)²`, the difference and the square in f64, in 16 lanes.
    pub squared_error: f64,
    /// `sum x²`, likewise.
    pub squared_value: f64,
    /// The greatest `|x - y|` as f32: NaN if any is NaN.
    pub max_error: f32,
}

/// Elements whose terms are computed together before they are added to the lanes.
const BLOCK: usize = 128;

#[inline(always)]
pub(crate) fn error_sums<S: Simd>(simd: S, x: &[f32], y: &[f32]) -> ErrorSums {
    assert_eq!(x.len(), y.len(), "error_sums: lengths differ");
    let (mut errors, mut values) = (simd.splat_f64(0.0), simd.splat_f64(0.0));
    let mut max = simd.splat(0.0);
    let mut terms = Terms { error: [0.0; BLOCK], value: [0.0; BLOCK], magnitude: [0.0; BLOCK] };
    for (x, y) in x.chunks(BLOCK).zip(y.chunks(BLOCK)) {
        let used = x.len().div_ceil(LANES);
        terms.fill(x, y);
        for chunk in &terms.error.as_chunks::<LANES>().0[..used] {
            errors = simd.add_f64(errors, simd.load_f64(chunk));
        }
        for chunk in &terms.value.as_chunks::<LANES>().0[..used] {
            values = simd.add_f64(values, simd.load_f64(chunk));
        }
        for chunk in &terms.magnitude.as_chunks::<LANES>().0[..used] {
            max = simd.max_abs(max, simd.load(chunk));
        }
    }
    ErrorSums {
        squared_error: tree(simd.to_array_f64(errors), |a, b| a + b),
        squared_value: tree(simd.to_array_f64(values), |a, b| a + b),
        max_error: simd.max_lane(max),
    }
}

struct Terms {
    error: [f64; BLOCK],
    value: [f64; BLOCK],
    magnitude: [f32; BLOCK],
}

impl Terms {
    /// What a short block leaves over is 0, which changes no sum.
    #[inline(always)]
    fn fill(&mut self, x: &[f32], y: &[f32]) {
        let n = x.len();
        let terms = self.error.iter_mut().zip(&mut self.value).zip(&mut self.magnitude);
        for (((error, value), magnitude), (&x, &y)) in terms.zip(x.iter().zip(y)) {
            let difference = f64::from(x) - f64::from(y);
            *error = difference * difference;
            *value = f64::from(x) * f64::from(x);
            *magnitude = difference as f32;
        }
        self.error[n..].fill(0.0);
        self.value[n..].fill(0.0);
        self.magnitude[n..].fill(0.0);
    }
}

#[inline(always)]
pub(crate) fn group_amax<S: Simd>(simd: S, x: &[f32], group: usize, out: &mut [f32]) {
    check("group_amax", x, group, out.len());
    for (x, out) in x.chunks(group).zip(out) {
        *out = amax(simd, x);
    }
}

#[inline(always)]
pub(crate) fn group_min_max<S: Simd>(simd: S, x: &[f32], group: usize, low: &mut [f32], high: &mut [f32]) {
    check("group_min_max", x, group, low.len());
    assert_eq!(low.len(), high.len(), "group_min_max: low and high differ in length");
    for (x, (low, high)) in x.chunks(group).zip(low.iter_mut().zip(high)) {
        (*low, *high) = min_max(simd, x);
    }
}

#[inline(always)]
fn check(kernel: &str, x: &[f32], group: usize, out: usize) {
    assert!(group > 0, "{kernel}: group size 0");
    let groups = x.len().div_ceil(group);
    assert_eq!(out, groups, "{kernel}: {out} results for {groups} groups");
}
