//! Scales beside the zero points: what the half-quadratic steps leave as it is.
//!
//! A group's values are `s (q - z)` for codes `q`, and for codes that are given the best `s` and `z` are a regression of the weights on
//! them. So the two take turns, codes to nearest and then `s` and `z` of them, from several beginnings: what the half-quadratic steps
//! found, and the range of the group narrowed by and by. What errs least of all that is met stays, in `Σ |w - s (q - z)|^2.4` as
//! of [`clip`](crate::clip). The regression weighs each value by `|error|^0.4` of the codes before (iteratively reweighted least
//! squares), under which its squares are that sum.
//!
//! Scales are met as they are stored: each is rounded before `z` is found and the error is taken.

use mantissa_kernels::kernels;

use crate::clip::NORM;

/// Shares of its range that a group begins with: 1, 1 - [`SHARE_STEP`], …
const SHARES: usize = 13;

/// From a share to the next.
const SHARE_STEP: f32 = 0.025;

/// Most turns from one beginning; few take more than five.
const TURNS: usize = 10;

/// A group's grid: values are `step · (q - zero)`.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct Grid {
    pub(super) step: f32,
    pub(super) zero: f32,
}

/// The grids that codes can have.
pub(super) struct Grids<'a> {
    /// The highest code; the lowest is 0.
    pub(super) top: f32,
    /// True if zero points are codes themselves.
    pub(super) integer_zero: bool,
    /// The least step.
    pub(super) least_step: f32,
    /// A step as it is stored.
    pub(super) stored: &'a (dyn Fn(f32) -> f32 + Sync),
}

impl Grids<'_> {
    /// The grid of that step and zero point, as they can be stored.
    pub(super) fn grid(&self, step: f32, zero: f32) -> Grid {
        let zero = if self.integer_zero { nearest(zero, self.top) } else { zero };
        Grid { step: (self.stored)(step), zero }
    }

    /// The best grid met for the values `x`, `start` among them.
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
            // About the middle, so that a group on one side of zero stays there; an integer zero point narrows towards zero instead.
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

    /// Takes turns from `grid` as long as they get nearer.
    fn follow(&self, x: &[f32], mut grid: Grid, turn: &mut Turn, best: &mut (f64, Grid)) {
        let mut last = f64::INFINITY;
        for _ in 0..TURNS {
            let error = turn.measure(x, grid, self.top);
            // So far off that turns will not make up for it.
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

    /// The grid of the codes and weights of `turn`; none where the codes are all one.
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
        // An integer zero point stays, and the line goes through it.
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

/// State of a group after one turn.
#[derive(Default)]
pub(super) struct Turn {
    codes: Vec<f32>,
    errors: Vec<f32>,
    /// `|error|^0.4`.
    weights: Vec<f32>,
}

impl Turn {
    /// Finds the codes of `x` on `grid`; their error.
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

/// 1.5·2^23: what is added to it loses its fraction, ties going to even.
const ROUND_MAGIC: f32 = 12_582_912.0;

/// The code from 0 to `top`, at most 255, that is nearest to `v`, ties to even.
pub(super) fn nearest(v: f32, top: f32) -> f32 {
    // Not by a call for each value, as the processors that every build runs on would take.
    (v.clamp(0.0, top) + ROUND_MAGIC) - ROUND_MAGIC
}
