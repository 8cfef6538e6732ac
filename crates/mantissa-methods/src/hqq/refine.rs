//! Scale search for HQQ, beyond the paper.
//!
//! A group's values are `s (q - z)`. For fixed codes `q`, the best `s` and `z` are a linear regression of the weights
//! on the codes. So this search alternates: codes by RTN, then `s` and `z` by regression. It starts from the
//! half-quadratic result and from shrunken ranges of the group, and keeps the grid with the least `Σ |w - s (q -
//! z)|^2.4` (the norm of [`clip`](crate::clip)). The regression weights each value by `|error|^0.4` of the previous
//! codes (iteratively reweighted least squares), so that its squares sum to that norm.
//!
//! Each scale is rounded to its stored precision before `z` and the error are computed.

use mantissa_kernels::kernels;

use crate::clip::NORM;

/// Number of shares of its range that a group starts from: 1, 1 - [`SHARE_STEP`], …
pub(super) const SHARES: usize = 13;

/// Step between shares.
const SHARE_STEP: f32 = 0.025;

/// Most iterations from one start; few take more than five.
const TURNS: usize = 10;

/// Grid of a group: values are `step · (q - zero)`.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct Grid {
    pub(super) step: f32,
    pub(super) zero: f32,
}

/// Constraints on the grids.
pub(super) struct Grids<'a> {
    /// The highest code; the lowest is 0.
    pub(super) top: f32,
    /// True if zero points are codes themselves.
    pub(super) integer_zero: bool,
    /// Smallest step.
    pub(super) least_step: f32,
    /// Rounds a step to its stored precision.
    pub(super) stored: &'a (dyn Fn(f32) -> f32 + Sync),
}

impl Grids<'_> {
    /// Grid of `step` and `zero`, rounded to what can be stored.
    pub(super) fn grid(&self, step: f32, zero: f32) -> Grid {
        let zero = if self.integer_zero { nearest(zero, self.top) } else { zero };
        Grid { step: (self.stored)(step), zero }
    }

    /// Best grid found for the values `x`, at least as good as `start`.
    pub(super) fn refine(&self, x: &[f32], start: Grid, turn: &mut Turn) -> Grid {
        let mut best = (f64::INFINITY, start);
        self.follow(x, start, turn, &mut best);
        let low = x.iter().copied().fold(f32::INFINITY, f32::min);
        let high = x.iter().copied().fold(f32::NEG_INFINITY, f32::max);
        for i in 0..SHARES {
            let share = 1.0 - i as f32 * SHARE_STEP;
            let step = (high - low) * share / self.top;
            if step < self.least_step || !step.is_finite() {
                break;
            }
            // Shrink about the middle, so that a group on one side of zero stays there; with an integer zero point
            // shrink towards zero.
            let first = if self.integer_zero {
                low * share
            } else {
                f32::midpoint(low, high) - step * self.top / 2.0
            };
            let grid = self.grid(step, -first / step);
            self.follow(x, grid, turn, &mut best);
        }
        best.1
    }

    /// Iterates from `grid` while the error falls.
    fn follow(&self, x: &[f32], mut grid: Grid, turn: &mut Turn, best: &mut (f64, Grid)) {
        let mut last = f64::INFINITY;
        for _ in 0..TURNS {
            let error = turn.measure(x, grid, self.top);
            // Too far off to become the best.
            if error > 2.0 * best.0 {
                break;
            }
            if error < best.0 {
                *best = (error, grid);
            }
            if error >= last {
                break;
            }
            last = error;
            match self.regression(x, turn, grid.zero) {
                Some(next) if next != grid => grid = next,
                _ => break,
            }
        }
    }

    /// Regression of `x` on the codes of `turn`; `None` if all codes are equal.
    fn regression(&self, x: &[f32], turn: &Turn, zero: f32) -> Option<Grid> {
        let [mut sw, mut sx, mut sq, mut sxq, mut sqq] = [0.0; 5];
        for ((x, q), w) in x.iter().zip(&turn.codes).zip(&turn.weights) {
            let [x, q, w] = [*x, *q, *w].map(f64::from);
            sw += w;
            sx += w * x;
            sq += w * q;
            sxq += w * x * q;
            sqq += w * q * q;
        }
        // An integer zero point is kept; the line goes through it.
        let z = f64::from(zero);
        let (across, along) = if self.integer_zero {
            (sxq - z * sx, sqq - 2.0 * z * sq + z * z * sw)
        } else {
            (sxq * sw - sx * sq, sqq * sw - sq * sq)
        };
        let step = (across / along) as f32;
        if !(step >= self.least_step && step.is_finite()) {
            return None;
        }
        let step = (self.stored)(step);
        let free = ((sq - sx / f64::from(step)) / sw) as f32;
        Some(Grid { step, zero: if self.integer_zero { zero } else { free } })
    }
}

/// State of a group after one iteration.
#[derive(Default)]
pub(super) struct Turn {
    codes: Vec<f32>,
    errors: Vec<f32>,
    /// `|error|^0.4`.
    weights: Vec<f32>,
}

impl Turn {
    /// Computes the codes of `x` on `grid`; returns their error.
    fn measure(&mut self, x: &[f32], Grid { step, zero }: Grid, top: f32) -> f64 {
        self.codes.resize(x.len(), 0.0);
        self.weights.resize(x.len(), 0.0);
        for ((x, q), w) in x.iter().zip(&mut self.codes).zip(&mut self.weights) {
            *q = nearest(x / step + zero, top);
            *w = (x - step * (*q - zero)).abs();
        }
        self.errors.clone_from(&self.weights);
        kernels().pow_inplace(&mut self.weights, NORM - 2.0);
        self.errors.iter().zip(&self.weights).map(|(error, w)| f64::from(error * error * w)).sum()
    }
}

/// 1.5·2^23: adding and subtracting it rounds to an integer, ties to even.
const ROUND_MAGIC: f32 = 12_582_912.0;

/// Nearest code to `v` from 0 to `top` (at most 255), ties to even.
pub(super) fn nearest(v: f32, top: f32) -> f32 {
    // Avoids `round_ties_even`, which is a function call on baseline x86-64.
    (v.clamp(0.0, top) + ROUND_MAGIC) - ROUND_MAGIC
}
