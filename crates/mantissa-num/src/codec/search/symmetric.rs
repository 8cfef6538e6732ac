//! Types without a minimum: Q3_K, Q6_K, IQ4_XS, whose sub-blocks have a signed integer scale.
//!
//! Codes reach one step further down than up (or unevenly, in IQ4's table), so the sign of a scale matters; both are
//! tried.

use std::marker::PhantomData;

use super::super::iq4::{self, LEVELS};
use super::super::k_quants::{self, SuperBlock};
use super::sub_blocks::{Coder, SubBlocks, nearest};
use super::{INFINITE, LANES, Lanes, MOST, Target, choose_scales, inverse, total, uneven};

/// Value of a code before scaling.
pub(super) trait Element: Copy {
    /// The least and the largest value.
    const RANGE: (f32, f32);
    /// The values nearest to `v`.
    fn nearest<L: Lanes>(l: L, v: L::V) -> L::V;
}

/// Integers from `LOW` to `HIGH`.
#[derive(Clone, Copy)]
pub(super) struct Int<const LOW: i32, const HIGH: i32>;

impl<const LOW: i32, const HIGH: i32> Element for Int<LOW, HIGH> {
    const RANGE: (f32, f32) = (LOW as f32, HIGH as f32);

    #[inline(always)]
    fn nearest<L: Lanes>(l: L, v: L::V) -> L::V {
        nearest(l, v, LOW as f32, HIGH as f32)
    }
}

/// The table of IQ4.
#[derive(Clone, Copy)]
pub(super) struct Table;

impl Element for Table {
    const RANGE: (f32, f32) = (LEVELS[0], LEVELS[15]);

    /// Counts the midpoints below the value.
    #[inline(always)]
    fn nearest<L: Lanes>(l: L, v: L::V) -> L::V {
        let mut level = l.splat(LEVELS[0]);
        for pair in LEVELS.windows(2) {
            level = l.if_less(l.splat((pair[0] + pair[1]) / 2.0), v, l.splat(pair[1]), level);
        }
        level
    }
}

/// Differences between the types with sub-blocks.
struct SymmetricType {
    /// Elements of a sub-block.
    sub: usize,
    /// The least and the largest integer scale.
    scales: (f32, f32),
    /// Spacing of the trial scales for the whole block, in units of the largest integer.
    step: f32,
    /// First guesses of a sub-block's scale, where the fit starts.
    guesses: (f32, f32),
    /// Number of alternations between codes and scales for each guess.
    fits: usize,
    /// Number of block scales tried (all sixteen for an [uneven] block), and of integer choices under each.
    starts: usize,
    rounds: usize,
    /// Distance around the nearest integer to a sub-block's own scale that is tried, first and in later rounds.
    reach: (i32, i32),
    later: (i32, i32),
}

const Q3_K: SymmetricType = SymmetricType {
    sub: 16,
    scales: (-32.0, 31.0),
    step: 0.4,
    guesses: (1.17, 0.06),
    fits: 3,
    starts: 4,
    rounds: 4,
    reach: (-7, 8),
    later: (-7, 8),
};
const Q6_K: SymmetricType = SymmetricType {
    sub: 16,
    scales: (-128.0, 127.0),
    step: 0.4,
    guesses: (1.03, 0.008),
    fits: 1,
    starts: 1,
    rounds: 2,
    reach: (-7, 8),
    later: (-2, 2),
};
const IQ4_XS: SymmetricType = SymmetricType {
    sub: 32,
    scales: (-32.0, 31.0),
    step: 0.4,
    guesses: (1.17, 0.06),
    fits: 2,
    starts: 3,
    rounds: 3,
    reach: (-7, 8),
    later: (-7, 8),
};

/// Guesses of a sub-block's scale.
const GUESSES: usize = 16;

#[inline(always)]
pub(super) fn encode_q3_k<L: Lanes>(l: L, target: &mut Target, block: &mut [u8]) {
    let found = search::<L, Int<-4, 3>>(l, &Q3_K, target);
    k_quants::put_q3_k(&found, block);
}

#[inline(always)]
pub(super) fn encode_q6_k<L: Lanes>(l: L, target: &mut Target, block: &mut [u8]) {
    let found = search::<L, Int<-32, 31>>(l, &Q6_K, target);
    k_quants::put_q6_k(&found, block);
}

#[inline(always)]
pub(super) fn encode_iq4_xs<L: Lanes>(l: L, target: &mut Target, block: &mut [u8]) {
    let found = search::<L, Table>(l, &IQ4_XS, target);
    iq4::put_iq4_xs(&found, block);
}

/// Each sub-block's scale, and `sum w q²`.
#[derive(Clone, Copy)]
struct SubBlockFit<V> {
    s: V,
    qq: V,
}

/// Candidate for the whole block.
#[derive(Clone, Copy)]
struct BlockCandidate<V> {
    d: (u16, f32),
    scales: V,
    error: f32,
}

/// Codes nearest to `x·inv`; their values are multiplied by `step`.
struct Steps<E, V> {
    step: V,
    inv: V,
    element: PhantomData<E>,
}

impl<E: Element, V: Copy> Steps<E, V> {
    #[inline(always)]
    fn new(step: V, inv: V) -> Self {
        Steps { step, inv, element: PhantomData }
    }
}

impl<E: Element, L: Lanes> Coder<L> for Steps<E, L::V> {
    #[inline(always)]
    fn code(&self, l: L, x: L::V) -> L::V {
        E::nearest(l, l.mul(x, self.inv))
    }

    #[inline(always)]
    fn miss(&self, l: L, x: L::V) -> L::V {
        l.sub_mul(self.step, self.code(l, x), x)
    }
}

/// Constant state during the search of a block.
struct BlockSearch<'a, L: Lanes> {
    l: L,
    kind: &'a SymmetricType,
    target: &'a Target,
    parts: SubBlocks<L>,
}

#[inline(always)]
fn search<L: Lanes, E: Element>(l: L, kind: &SymmetricType, target: &Target) -> SuperBlock {
    let subs = MOST / kind.sub;
    if target.beyond(target.amax, -E::RANGE.0 * -kind.scales.0) {
        return SuperBlock { d: INFINITE, ..SuperBlock::ZERO };
    }
    let job = BlockSearch { l, kind, target, parts: SubBlocks::new(l, target, kind.sub) };
    let fit = job.fit::<E>();
    let (s, qq) = (l.to_array(fit.s), l.to_array(fit.qq));
    let mut starts = [0.0; LANES];
    let starts = &mut starts[..if uneven(&s[..subs]) { LANES } else { kind.starts }];
    choose_scales(l, &s[..subs], &qq[..subs], kind.scales.0, -kind.step, starts);
    let mut best = BlockCandidate { d: (0, 0.0), scales: l.splat(0.0), error: f32::INFINITY };
    for d in starts {
        let choice = job.descend::<E>(target.half((*d).into()), fit.s);
        if choice.error < best.error {
            best = choice;
        }
    }
    SuperBlock {
        d: best.d.0,
        scales: l.to_array(best.scales).map(|scale| scale as i8),
        codes: job.parts.codes(l, &job.steps::<E>(&best)),
        ..SuperBlock::ZERO
    }
}

impl<L: Lanes> BlockSearch<'_, L> {
    /// Alternates from an f16 scale: the sub-blocks' integers, then the f16 scale for them, while the error falls.
    #[inline(always)]
    fn descend<E: Element>(&self, mut d: (u16, f32), mut s: L::V) -> BlockCandidate<L::V> {
        let mut best = BlockCandidate { d, scales: self.l.splat(0.0), error: f32::INFINITY };
        for round in 1..=self.kind.rounds {
            // Later rounds start from integers that were best for almost the same block scale.
            let (from, to) = if round == 1 { self.kind.reach } else { self.kind.later };
            let next = self.choose_integers::<E>(d, s, from, to);
            if next.error >= best.error {
                break;
            }
            best = next;
            if round == self.kind.rounds {
                break;
            }
            d = self.target.half(self.refit::<E>(&best));
            if d.0 == best.d.0 {
                break;
            }
            s = self.l.mul(best.scales, self.l.splat(best.d.1));
        }
        best
    }

    /// Scale by least squares for the codes of sixteen guesses, then the codes again. Guesses map the largest element
    /// to either end of the codes times `to`, `to - step` …, finest first: among equally good ones the smaller scale
    /// leaves more range to the other sub-blocks.
    #[inline(always)]
    fn fit<E: Element>(&self) -> SubBlockFit<L::V> {
        let (l, (to, step)) = (self.l, self.kind.guesses);
        let (zero, tiny) = (l.splat(0.0), l.splat(1e-30));
        let (low, high) = self.parts.extremes(l);
        let unit = inverse(l, l.if_less(high, l.sub(zero, low), low, high));
        let (mut best, mut gain) = (SubBlockFit { s: zero, qq: zero }, zero);
        for guess in 0..GUESSES {
            // Alternate between both ends of the codes.
            let end = if guess % 2 == 0 { E::RANGE.0 } else { E::RANGE.1 };
            let mut inv = l.mul(l.splat(end * (to - (guess / 2) as f32 * step)), unit);
            for pass in 1..=self.kind.fits {
                let (_, qq, xq) = self.parts.moments(l, &Steps::<E, _>::new(zero, inv));
                let s = l.div(xq, l.greater(tiny, qq));
                // Among guesses with equal gain the first wins, independent of last-bit differences.
                let gained = l.mul(l.mul(s, xq), l.splat(1.0 - guess as f32 * f32::EPSILON));
                best = SubBlockFit {
                    s: l.if_less(gain, gained, s, best.s),
                    qq: l.if_less(gain, gained, qq, best.qq),
                };
                gain = l.greater(gain, gained);
                if pass < self.kind.fits {
                    inv = inverse(l, s);
                }
            }
        }
        best
    }

    /// Integers of every sub-block for a given f16 scale: of those around `s / d`, the one with the least decoding
    /// error.
    #[inline(always)]
    fn choose_integers<E: Element>(
        &self,
        d: (u16, f32),
        s: L::V,
        from: i32,
        to: i32,
    ) -> BlockCandidate<L::V> {
        let (l, (low, high)) = (self.l, self.kind.scales);
        let inverse_d = if d.1 == 0.0 { 0.0 } else { (1.0 / d.1).clamp(-f32::MAX, f32::MAX) };
        let middle = nearest(l, l.mul(s, l.splat(inverse_d)), low, high);
        let (mut scales, mut error) = (middle, l.splat(f32::MAX));
        for by in from..=to {
            let scale = l.add(middle, l.splat(by as f32));
            let scale = l.lesser(l.greater(scale, l.splat(low)), l.splat(high));
            let step = l.mul(l.splat(d.1), scale);
            let inv = inverse(l, step);
            let found = self.parts.error(l, &Steps::<E, _>::new(step, inv));
            scales = l.if_less(found, error, scale, scales);
            error = l.if_less(found, error, found, error);
        }
        BlockCandidate { d, scales, error: total(l, error) }
    }

    /// Codes under a candidate.
    #[inline(always)]
    fn steps<E: Element>(&self, choice: &BlockCandidate<L::V>) -> Steps<E, L::V> {
        let step = self.l.mul(self.l.splat(choice.d.1), choice.scales);
        Steps::new(step, inverse(self.l, step))
    }

    /// f16 scale by least squares for fixed integers and codes.
    #[inline(always)]
    fn refit<E: Element>(&self, choice: &BlockCandidate<L::V>) -> f64 {
        let l = self.l;
        let (_, qq, xq) = self.parts.moments(l, &self.steps::<E>(choice));
        let (scales, qq, xq) = (l.to_array(choice.scales), l.to_array(qq), l.to_array(xq));
        let (mut squares, mut products) = (0f64, 0f64);
        for i in 0..MOST / self.kind.sub {
            let scale = f64::from(scales[i]);
            squares += scale * scale * f64::from(qq[i]);
            products += scale * f64::from(xq[i]);
        }
        if squares > 0.0 { products / squares } else { 0.0 }
    }
}
