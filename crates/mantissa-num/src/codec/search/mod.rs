//! Searches of the encoders of K- and IQ-types for the bytes with the least error.
//!
//! The search minimizes `sum w (x - y)²` over a block. `y` are the decoded values and `w` the importance of each
//! column: 1 if none is given, else the mean square of the layer's input, as in llama.cpp's importance matrix. That
//! makes it the expected squared error of the layer's output under independent inputs.
//!
//! All searches have the same steps:
//! 1. Try sixteen candidates of a sub-block's scale, for all sub-blocks at once, one per [lane](crate::lanes). (For
//!    lattices and single-scale blocks the lanes hold sixteen candidates.) For each, choose the codes, then the best
//!    scale (and minimum) for those codes by least squares.
//! 2. Choose the block's f16 scale so that the sub-blocks' small integers fit their scales best.
//! 3. With that scale as stored, try the integers around each sub-block's scale, each with new codes, by the
//!    decoder's actual error. Refit the f16 scale and repeat this step while the error falls.
//!
//! Blocks are first scaled by a power of two to magnitudes near 1, so that nothing overflows.

mod affine;
mod dispatch;
mod lattice;
mod single;
mod span;
mod sub_blocks;
mod symmetric;
mod ternary_lattice;

pub(super) use dispatch::encode_block;

use crate::lanes::{LANES, Lanes};
use crate::minifloat::{F16, pow2};

/// Elements of the largest block.
const MOST: usize = 256;

/// The largest f16.
const LARGEST_HALF: f64 = 65504.0;

/// Smallest weight.
const LEAST: f32 = 1e-8;

/// Block to encode, in units of a power of two.
struct Target {
    x: [f32; MOST],
    /// Weights, at most 1 and never 0, so that columns without importance are still fitted where that is free.
    w: [f32; MOST],
    /// True if not all weights are 1.
    weighted: bool,
    /// The largest `|x|`: 1 or more, below 2; or 0.
    amax: f32,
    /// The unit is `2^exponent`.
    exponent: i32,
}

impl Target {
    #[inline(always)]
    fn new<L: Lanes>(l: L, values: &[f32], importance: Option<&[f32]>) -> Self {
        let (low, high) = extremes(l, values);
        let amax = high.max(-low);
        let exponent = crate::e8m0::floor_log2(amax).unwrap_or(0);
        let mut target = Target { x: [0.0; MOST], w: [1.0; MOST], weighted: false, amax: 0.0, exponent };
        let unit = pow2(-exponent);
        let in_f32 = unit as f32;
        if in_f32.is_normal() {
            target.x.iter_mut().zip(values).for_each(|(x, v)| *x = v * in_f32);
        } else {
            target.x.iter_mut().zip(values).for_each(|(x, v)| *x = (f64::from(*v) * unit) as f32);
        }
        target.amax = (f64::from(amax) * unit) as f32;
        if let Some(importance) = importance {
            let most = extremes(l, importance).1;
            if most > 0.0 && most.is_finite() {
                target.weighted = true;
                for (w, v) in target.w.iter_mut().zip(importance) {
                    *w = (v / most).max(LEAST);
                }
            }
        }
        target
    }

    /// Multiplies the weights of columns that have an importance by `sqrt(mean x² + x²)`, as llama.cpp does in its
    /// searches.
    ///
    /// Importance is only the diagonal of a layer's Hessian, so its minimum is not the minimum of the model's loss.
    /// At two bits this factor lowers the KL of ref-8m by 8 % (`docs/explain/gguf-search.md`), although the error
    /// weighted by importance alone grows by 2 to 3 %.
    fn favour_large(&mut self) {
        if !self.weighted {
            return;
        }
        let mean = self.x.iter().map(|x| x * x).sum::<f32>() / MOST as f32;
        let mut most = 0f32;
        for (w, x) in self.w.iter_mut().zip(&self.x) {
            *w *= (mean + x * x).sqrt();
            most = most.max(*w);
        }
        self.w.iter_mut().for_each(|w| *w = (*w / most).max(LEAST));
    }

    /// f16 nearest to a scale: its bits, and its value in units.
    #[inline(always)]
    fn half(&self, scale: f64) -> (u16, f32) {
        let real = (scale * pow2(self.exponent)).clamp(-LARGEST_HALF, LARGEST_HALF);
        self.half_of(F16.encode_saturating(real as f32) as u16)
    }

    /// The bits of an f16, and its value in units.
    #[inline(always)]
    fn half_of(&self, code: u16) -> (u16, f32) {
        (code, (f64::from(F16.decode(code.into())) * pow2(-self.exponent)) as f32)
    }

    /// True if a value exceeds the largest f16 scale times `reach`.
    #[inline(always)]
    fn beyond(&self, value: f32, reach: f32) -> bool {
        f64::from(value) * pow2(self.exponent) > LARGEST_HALF * f64::from(reach)
    }
}

/// f16 infinity, the scale of a block beyond f16; its decoded values are refused.
const INFINITE: u16 = 0x7c00;

/// 1.5·2^23: adding and subtracting it rounds `|x| <= 2^22` to the nearest integer, ties to even.
const ROUND: f32 = 12_582_912.0;

/// Nearest integer, ties to even, for `|x| <= 2^22`.
#[inline(always)]
fn round<L: Lanes>(l: L, x: L::V) -> L::V {
    let magic = l.splat(ROUND);
    l.sub(l.add(x, magic), magic)
}

/// `1 / s`, and 0 of 0.
#[inline(always)]
fn inverse<L: Lanes>(l: L, s: L::V) -> L::V {
    let zero = l.splat(0.0);
    let inverse = l.div(l.splat(1.0), s);
    l.if_less(zero, l.mul(s, s), inverse, zero)
}

/// Smallest of the values and 0, and the largest of the values; their number is a multiple of [`LANES`].
#[inline(always)]
fn extremes<L: Lanes>(l: L, x: &[f32]) -> (f32, f32) {
    let zero = l.splat(0.0);
    let (mut low, mut high) = (zero, l.splat(f32::MIN));
    for x in x.as_chunks::<LANES>().0 {
        let x = l.load(x);
        (low, high) = (l.lesser(low, x), l.greater(high, x));
    }
    (l.least(low).1, -l.least(l.sub(zero, high)).1)
}

/// 0, 1, 2 … in the lanes.
const COUNT: [f32; LANES] =
    [0.0, 1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0, 8.0, 9.0, 10.0, 11.0, 12.0, 13.0, 14.0, 15.0];

/// Lane of the smallest value, the first among equals; NaN never wins.
#[inline(always)]
fn least<L: Lanes>(l: L, a: L::V) -> (usize, f32) {
    let limit = l.splat(f32::MAX);
    let least = l.least(l.if_less(a, limit, a, limit));
    if least.1 < f32::MAX { least } else { (0, f32::INFINITY) }
}

/// The sum of the lanes, in a fixed tree.
#[inline(always)]
fn total<L: Lanes>(l: L, a: L::V) -> f32 {
    let a = l.to_array(a);
    let eight: [f32; 8] = std::array::from_fn(|i| a[i] + a[i + 8]);
    let four: [f32; 4] = std::array::from_fn(|i| eight[i] + eight[i + 4]);
    (four[0] + four[2]) + (four[1] + four[3])
}

/// True if the scales of sub-blocks differ so much that the exact fit of one decides the error, for example if a
/// single element dominates. Then many block scales are tried.
fn uneven(scales: &[f32]) -> bool {
    const RATIO: f32 = 2.5;
    let most = scales.iter().fold(0f32, |max, s| max.max(s.abs()));
    scales.iter().filter(|s| s.abs() * RATIO < most).count() > scales.len() / 2
}

/// Chooses the f16 scale `d` whose integers `round(s / d)` fit the sub-blocks' scales `s` best. Of sixteen that map
/// the largest scale to `most - i·step`, takes those with the least `sum a (d·round(s/d) - s)²`, where `a` is a
/// sub-block's sensitivity. Fills `best`, best first.
#[inline(always)]
fn choose_scales<L: Lanes>(l: L, s: &[f32], a: &[f32], most: f32, step: f32, best: &mut [f32]) {
    let largest = s.iter().fold(0f32, |max, &v| if v.abs() > max.abs() { v } else { max });
    if largest == 0.0 {
        return best.fill(0.0);
    }
    let steps: [f32; LANES] = std::array::from_fn(|i| most - i as f32 * step);
    let d = l.div(l.splat(largest), l.load(&steps));
    let inverse = inverse(l, d);
    let mut cost = l.splat(0.0);
    for (&s, &a) in s.iter().zip(a) {
        let s = l.splat(s);
        let miss = l.sub(l.mul(round(l, l.mul(s, inverse)), d), s);
        cost = l.add(cost, l.mul(l.splat(a), l.mul(miss, miss)));
    }
    let (d, mut cost) = (l.to_array(d), l.to_array(cost));
    for best in best {
        let lane = least(l, l.load(&cost)).0;
        cost[lane] = f32::INFINITY;
        *best = d[lane];
    }
}
