//! Block with its sub-blocks side by side. A candidate is tried on all of them at once, and comparing candidates
//! needs no gather across lanes.

use super::{LANES, Lanes, MOST, ROUND, Target, round};

/// Chooses the code of an element and computes its error. This is a trait because closures are not reliably inlined;
/// outside of the function that enables an instruction set, each intrinsic would be a call.
pub(super) trait Coder<L: Lanes> {
    /// The code of an element.
    fn code(&self, l: L, x: L::V) -> L::V;
    /// Element minus its decoded value.
    fn miss(&self, l: L, x: L::V) -> L::V;
}

/// Elements of a lane.
const DEEP: usize = MOST / LANES;

/// Elements and weights of a block. With sub-blocks of 16, lane `i` holds sub-block `i`. With sub-blocks of 32 it
/// holds the first half of sub-block `i`, and lane `i + 8` the second. [`fold`](Self::fold) makes both hold the same.
pub(super) struct SubBlocks<L: Lanes> {
    pub(super) x: [L::V; DEEP],
    pub(super) w: [L::V; DEEP],
    halves: bool,
}

impl<L: Lanes> SubBlocks<L> {
    /// Starts on sub-blocks of `sub` elements: 16 or 32.
    #[inline(always)]
    pub(super) fn new(l: L, target: &Target, sub: usize) -> Self {
        let halves = sub == 2 * DEEP;
        let x = across(l, &target.x, halves);
        let w = if target.weighted { across(l, &target.w, halves) } else { [l.splat(1.0); DEEP] };
        SubBlocks { x, w, halves }
    }

    /// Sums over sub-blocks from sums over lanes.
    #[inline(always)]
    pub(super) fn fold(&self, l: L, a: L::V) -> L::V {
        if self.halves { l.add(a, l.swap_halves(a)) } else { a }
    }

    /// Smallest of the elements and 0, and the largest element, by sub-block.
    #[inline(always)]
    pub(super) fn extremes(&self, l: L) -> (L::V, L::V) {
        let (mut low, mut high) = (l.splat(0.0), l.splat(f32::MIN));
        for &x in &self.x {
            (low, high) = (l.lesser(low, x), l.greater(high, x));
        }
        if self.halves {
            (low, high) = (l.lesser(low, l.swap_halves(low)), l.greater(high, l.swap_halves(high)));
        }
        (low, high)
    }

    /// `sum w` and `sum w x` of each sub-block.
    #[inline(always)]
    pub(super) fn sums(&self, l: L) -> (L::V, L::V) {
        let (mut ww, mut wx) = (l.splat(0.0), l.splat(0.0));
        for (&x, &w) in self.x.iter().zip(&self.w) {
            ww = l.add(ww, w);
            wx = l.mul_add(w, x, wx);
        }
        (self.fold(l, ww), self.fold(l, wx))
    }

    /// `sum w q`, `sum w q²` and `sum w x q` of each sub-block, for the codes `q` of `x`.
    #[inline(always)]
    pub(super) fn moments(&self, l: L, coder: &impl Coder<L>) -> (L::V, L::V, L::V) {
        let (mut sq, mut sqq, mut sxq) = (l.splat(0.0), l.splat(0.0), l.splat(0.0));
        for (&x, &w) in self.x.iter().zip(&self.w) {
            let q = coder.code(l, x);
            let wq = l.mul(w, q);
            sq = l.add(sq, wq);
            sqq = l.mul_add(wq, q, sqq);
            sxq = l.mul_add(wq, x, sxq);
        }
        (self.fold(l, sq), self.fold(l, sqq), self.fold(l, sxq))
    }

    /// `sum w (x - y)²` of each sub-block.
    #[inline(always)]
    pub(super) fn error(&self, l: L, coder: &impl Coder<L>) -> L::V {
        let mut error = l.splat(0.0);
        for (&x, &w) in self.x.iter().zip(&self.w) {
            let miss = coder.miss(l, x);
            error = l.mul_add(l.mul(w, miss), miss, error);
        }
        self.fold(l, error)
    }

    /// Codes of all elements, in block order.
    #[inline(always)]
    pub(super) fn codes(&self, l: L, coder: &impl Coder<L>) -> [i8; MOST] {
        let mut rows = [[0.0; LANES]; DEEP];
        for (row, &x) in rows.iter_mut().zip(&self.x) {
            *row = l.to_array(coder.code(l, x));
        }
        let mut out = [0; MOST];
        for lane in 0..LANES {
            let to = place(lane, self.halves);
            for i in 0..DEEP {
                out[to + i] = small(rows[i][lane]);
            }
        }
        out
    }
}

/// Low byte of an integer of at most 22 bits; a cast would check the range.
#[inline(always)]
fn small(integer: f32) -> i8 {
    (integer + ROUND).to_bits() as i8
}

/// Position in the block of a lane's first element.
#[inline(always)]
fn place(lane: usize, halves: bool) -> usize {
    DEEP * if halves { lane % 8 * 2 + lane / 8 } else { lane }
}

#[inline(always)]
fn across<L: Lanes>(l: L, block: &[f32; MOST], halves: bool) -> [L::V; DEEP] {
    let mut rows = [[0.0; LANES]; DEEP];
    for lane in 0..LANES {
        let from = place(lane, halves);
        for i in 0..DEEP {
            rows[i][lane] = block[from + i];
        }
    }
    let mut out = [l.splat(0.0); DEEP];
    for (out, row) in out.iter_mut().zip(&rows) {
        *out = l.load(row);
    }
    out
}

/// The nearest integer from `low` to `high`.
#[inline(always)]
pub(super) fn nearest<L: Lanes>(l: L, v: L::V, low: f32, high: f32) -> L::V {
    round(l, l.lesser(l.greater(v, l.splat(low)), l.splat(high)))
}
