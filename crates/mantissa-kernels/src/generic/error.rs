//! Error of an approximation against its source, and the range of each group.

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
    /// Largest `|x - y|` as f32: NaN if any is NaN.
    pub max_error: f32,
}

#[inline(always)]
pub(crate) fn error_sums<S: Simd>(simd: S, x: &[f32], y: &[f32]) -> ErrorSums {
    assert_eq!(x.len(), y.len(), "error_sums: lengths differ");
    let mut sums = Running::new(simd);
    sums.add(simd, x, y);
    sums.finish(simd)
}

/// [`ErrorSums`] under accumulation, in lanes.
pub(super) struct Running<S: Simd> {
    error: S::F64,
    value: S::F64,
    /// Largest difference, in f64; rounding to f32 preserves the order.
    max: S::F64,
}

impl<S: Simd> Running<S> {
    #[inline(always)]
    pub(super) fn new(simd: S) -> Self {
        let zero = simd.splat_f64(0.0);
        Running { error: zero, value: zero, max: zero }
    }

    /// Adds elements, the first one in lane 0; all slices except the last have whole lanes.
    #[inline(always)]
    pub(super) fn add(&mut self, simd: S, x: &[f32], y: &[f32]) {
        let ((x, x_rest), (y, y_rest)) = (x.as_chunks::<LANES>(), y.as_chunks::<LANES>());
        for (x, y) in x.iter().zip(y) {
            self.add_lanes(simd, x, y);
        }
        if !x_rest.is_empty() {
            // Missing elements are 0, which changes no sum.
            let (mut x, mut y) = ([0.0; LANES], [0.0; LANES]);
            x[..x_rest.len()].copy_from_slice(x_rest);
            y[..y_rest.len()].copy_from_slice(y_rest);
            self.add_lanes(simd, &x, &y);
        }
    }

    #[inline(always)]
    fn add_lanes(&mut self, simd: S, x: &[f32; LANES], y: &[f32; LANES]) {
        let (x, y) = (simd.load_wide(x), simd.load_wide(y));
        let difference = simd.sub_f64(x, y);
        self.error = simd.add_f64(self.error, simd.mul_f64(difference, difference));
        self.value = simd.add_f64(self.value, simd.mul_f64(x, x));
        self.max = simd.max_abs_f64(self.max, difference);
    }

    #[inline(always)]
    pub(super) fn finish(self, simd: S) -> ErrorSums {
        let squared_error = tree(simd.to_array_f64(self.error), |a, b| a + b);
        let max = simd.to_array_f64(self.max).into_iter().fold(0.0, |max: f64, v| max.max(v));
        ErrorSums {
            squared_error,
            squared_value: tree(simd.to_array_f64(self.value), |a, b| a + b),
            // Squares cannot cancel, so their sum is NaN if a difference is.
            max_error: if squared_error.is_nan() { f32::NAN } else { max as f32 },
        }
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
