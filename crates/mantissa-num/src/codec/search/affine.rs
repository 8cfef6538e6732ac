//! Q2_K, Q4_K, Q5_K: sub-blocks `(d·scale)·q - dmin·min` with small non-negative integers `scale` and `min`.

use super::super::k_quants::{self, SuperBlock};
use super::sub_blocks::{Coder, SubBlocks, nearest};
use super::{INFINITE, LANES, Lanes, MOST, Target, extremes, inverse, least, round, total, uneven};

/// Differences between the types.
struct AffineType {
    /// Elements of a sub-block.
    sub: usize,
    /// The largest code.
    codes: f32,
    /// The largest integer scale and minimum.
    levels: f32,
    /// Offsets of the first guesses. A sub-block's range is divided by `codes + to - i·step` for `i` below `cuts`,
    /// finest first: among equally good cuts, the one with the smaller scale leaves more range to the other
    /// sub-blocks.
    to: f32,
    step: f32,
    cuts: usize,
    /// Number of alternations between codes and scales before anything is rounded.
    fits: usize,
    /// Number of pairs of f16 scales that are tried (sixteen for an [uneven] block), and of integer choices under
    /// each.
    starts: usize,
    rounds: usize,
}

const Q2_K: AffineType = AffineType {
    sub: 16,
    codes: 3.0,
    levels: 15.0,
    to: 1.2,
    step: 0.16,
    cuts: 16,
    fits: 3,
    starts: 3,
    rounds: 5,
};
const Q4_K: AffineType = AffineType {
    sub: 32,
    codes: 15.0,
    levels: 63.0,
    to: 2.2,
    step: 0.36,
    cuts: 12,
    fits: 2,
    starts: 1,
    rounds: 2,
};
const Q5_K: AffineType =
    AffineType { codes: 31.0, to: 4.3, step: 0.5, cuts: 16, fits: 3, starts: 2, rounds: 3, ..Q4_K };

#[inline(always)]
pub(super) fn encode_q2_k<L: Lanes>(l: L, target: &mut Target, block: &mut [u8]) {
    k_quants::put_q2_k(&search(l, &Q2_K, target), block);
}

#[inline(always)]
pub(super) fn encode_q4_k<L: Lanes>(l: L, target: &mut Target, block: &mut [u8]) {
    k_quants::put_q4_k(&search(l, &Q4_K, target), block);
}

#[inline(always)]
pub(super) fn encode_q5_k<L: Lanes>(l: L, target: &mut Target, block: &mut [u8]) {
    k_quants::put_q5_k(&search(l, &Q5_K, target), block);
}

/// Each sub-block's scale and minimum, and the sums of its codes.
#[derive(Clone, Copy)]
struct SubBlockFit<V> {
    s: V,
    m: V,
    /// `sum w q²` and `sum w q`.
    qq: V,
    q: V,
}

/// Sums of each sub-block that are independent of codes.
#[derive(Clone, Copy)]
struct Sums<V> {
    w: V,
    x: V,
}

/// Candidate for the whole block.
#[derive(Clone, Copy)]
struct BlockCandidate<V> {
    d: (u16, f32),
    dmin: (u16, f32),
    scales: V,
    mins: V,
    error: f32,
}

/// Codes `round(x·inv + start)`, which decode to `step·code - offset`.
struct Steps<V> {
    inv: V,
    start: V,
    step: V,
    offset: V,
    /// The largest code.
    most: f32,
}

impl<L: Lanes> Coder<L> for Steps<L::V> {
    #[inline(always)]
    fn code(&self, l: L, x: L::V) -> L::V {
        nearest(l, l.mul_add(x, self.inv, self.start), 0.0, self.most)
    }

    #[inline(always)]
    fn miss(&self, l: L, x: L::V) -> L::V {
        l.sub_mul(self.step, self.code(l, x), l.add(x, self.offset))
    }
}

/// Constant state during the search of a block.
struct BlockSearch<'a, L: Lanes> {
    l: L,
    kind: &'a AffineType,
    target: &'a Target,
    parts: SubBlocks<L>,
    sums: Sums<L::V>,
}

#[inline(always)]
fn search<L: Lanes>(l: L, kind: &AffineType, target: &Target) -> SuperBlock {
    let subs = MOST / kind.sub;
    let (low, high) = extremes(l, &target.x);
    if target.beyond(high, kind.levels * kind.codes) || target.beyond(-low, kind.levels) {
        return SuperBlock { d: INFINITE, ..SuperBlock::ZERO };
    }
    let parts = SubBlocks::new(l, target, kind.sub);
    let (w, x) = parts.sums(l);
    let job = BlockSearch { l, kind, target, parts, sums: Sums { w, x } };
    let fit = job.fit();
    let (s, m) = (l.to_array(fit.s), l.to_array(fit.m));
    let mut starts = [(0.0, 0.0); LANES];
    let many = uneven(&s[..subs]) || uneven(&m[..subs]);
    let starts = &mut starts[..if many { LANES } else { kind.starts }];
    job.choose_scales(&fit, starts);
    let mut best: Option<BlockCandidate<L::V>> = None;
    for &mut (d, dmin) in starts {
        let choice = job.descend((target.half(d.into()), target.half(dmin.into())), (fit.s, fit.m));
        if best.is_none_or(|best| choice.error < best.error) {
            best = Some(choice);
        }
    }
    let Some(best) = best else { return SuperBlock::ZERO };
    SuperBlock {
        d: best.d.0,
        dmin: best.dmin.0,
        scales: l.to_array(best.scales).map(|scale| scale as i8),
        mins: l.to_array(best.mins).map(|min| min as u8),
        codes: job.parts.codes(l, &job.steps(&best)),
    }
}

impl<L: Lanes> BlockSearch<'_, L> {
    /// Alternates from two f16 scales: the sub-blocks' integers, then the f16 scales by least squares, while the
    /// error falls.
    #[inline(always)]
    fn descend(
        &self,
        (mut d, mut dmin): ((u16, f32), (u16, f32)),
        (mut s, mut m): (L::V, L::V),
    ) -> BlockCandidate<L::V> {
        let zero = self.l.splat(0.0);
        let mut best = BlockCandidate { d, dmin, scales: zero, mins: zero, error: f32::INFINITY };
        for round in 1..=self.kind.rounds {
            let next = self.choose_integers(d, dmin, s, m);
            if next.error >= best.error {
                break;
            }
            best = next;
            if round == self.kind.rounds {
                break;
            }
            let (scale, min) = self.refit(&best);
            (d, dmin) = (self.target.half(scale), self.target.half(min));
            if (d.0, dmin.0) == (best.d.0, best.dmin.0) {
                break;
            }
            s = self.l.mul(best.scales, self.l.splat(best.d.1));
            m = self.l.mul(best.mins, self.l.splat(best.dmin.1));
        }
        best
    }

    /// Fills `best` with candidates of the two f16 scales, best first. Sixteen candidates map the largest scale to
    /// `levels` or slightly below; sixteen do the same for the largest minimum. Each scale is paired with the minimum
    /// scale whose integers fit all scales and minima best. With errors `ds` and `dm`, the loss of a sub-block grows
    /// by `ds² sum w q² - 2 ds dm sum w q + dm² sum w`.
    #[inline(always)]
    fn choose_scales(&self, fit: &SubBlockFit<L::V>, best: &mut [(f32, f32)]) {
        let (l, subs) = (self.l, MOST / self.kind.sub);
        let (s, m) = (l.to_array(fit.s), l.to_array(fit.m));
        let (qq, q) = (l.to_array(fit.qq), l.to_array(fit.q));
        let largest = |of: &[f32; LANES]| of.iter().fold(0f32, |max, &v| max.max(v));
        let (scale, min) = (largest(&s), largest(&m));
        let steps: [f32; LANES] = std::array::from_fn(|i| self.kind.levels * (1.0 - i as f32 / 160.0));
        let d = l.div(l.splat(scale), l.load(&steps));
        let inv = inverse(l, d);
        // For each candidate of `d`: the loss of the sub-blocks, and the factor of a minimum's error in it.
        let (mut own, mut factors) = (l.splat(0.0), [l.splat(0.0); LANES]);
        for i in 0..subs {
            let s = l.splat(s[i]);
            let miss = l.sub(l.mul(round(l, l.mul(s, inv)), d), s);
            own = l.mul_add(l.mul(miss, miss), l.splat(qq[i]), own);
            factors[i] = l.mul(miss, l.splat(-2.0 * q[i]));
        }
        let (mut least_cost, mut dmins) = (l.splat(f32::MAX), l.splat(0.0));
        for step in steps {
            let dmin = min / step;
            let inverse = if dmin == 0.0 { 0.0 } else { 1.0 / dmin };
            // One lane per sub-block.
            let miss = round(l, l.mul(fit.m, l.splat(inverse)));
            let miss = l.sub(l.mul(miss, l.splat(dmin)), fit.m);
            let squares = l.mul(l.mul(miss, miss), self.sums.w);
            let (miss, squares) = (l.to_array(miss), l.to_array(squares));
            let mut cost = l.add(own, l.splat(squares[..subs].iter().sum()));
            for i in 0..subs {
                cost = l.mul_add(factors[i], l.splat(miss[i]), cost);
            }
            dmins = l.if_less(cost, least_cost, l.splat(dmin), dmins);
            least_cost = l.lesser(least_cost, cost);
        }
        let (d, dmins, mut cost) = (l.to_array(d), l.to_array(dmins), l.to_array(least_cost));
        for best in best {
            let lane = least(l, l.load(&cost)).0;
            cost[lane] = f32::INFINITY;
            *best = (d[lane], dmins[lane]);
        }
    }

    /// Codes for several cuts of the range; then for each the scale and minimum by least squares, then the codes
    /// again.
    #[inline(always)]
    fn fit(&self) -> SubBlockFit<L::V> {
        let (l, kind) = (self.l, self.kind);
        let zero = l.splat(0.0);
        let (low, high) = self.parts.extremes(l);
        let least = l.sub(zero, low);
        let unit = inverse(l, l.greater(zero, l.sub(high, low)));
        let mut best = SubBlockFit { s: zero, m: least, qq: zero, q: zero };
        // The gain of a sub-block with equal elements is never compared.
        let mut gain = l.if_less(zero, unit, l.splat(-f32::MAX), l.splat(f32::MAX));
        for cut in 0..kind.cuts {
            let cuts = kind.codes + kind.to - cut as f32 * kind.step;
            let (mut inv, mut m) = (l.mul(l.splat(cuts), unit), least);
            for pass in 1..=kind.fits {
                let (fit, gained) = self.least_squares(inv, m);
                // Among cuts with equal gain the first wins, independent of last-bit differences.
                let gained = l.mul(gained, l.splat(1.0 - cut as f32 * f32::EPSILON));
                best = SubBlockFit {
                    s: l.if_less(gain, gained, fit.s, best.s),
                    m: l.if_less(gain, gained, fit.m, best.m),
                    qq: l.if_less(gain, gained, fit.qq, best.qq),
                    q: l.if_less(gain, gained, fit.q, best.q),
                };
                gain = l.if_less(gain, gained, gained, gain);
                if pass < kind.fits {
                    (inv, m) = (inverse(l, fit.s), fit.m);
                }
            }
        }
        best
    }

    /// Scale and minimum by least squares for the codes `round((x + m)·inv)`, and the reduction from `sum w x²` to
    /// `sum w (x - y)²`.
    #[inline(always)]
    fn least_squares(&self, inv: L::V, m: L::V) -> (SubBlockFit<L::V>, L::V) {
        let (l, zero, tiny) = (self.l, self.l.splat(0.0), self.l.splat(1e-30));
        let Sums { w, x } = self.sums;
        let (q, qq, xq) = self.parts.moments(
            l,
            &Steps { inv, start: l.mul(m, inv), step: zero, offset: zero, most: self.kind.codes },
        );
        let det = l.greater(tiny, l.sub(l.mul(w, qq), l.mul(q, q)));
        let above = l.sub(l.mul(qq, x), l.mul(q, xq));
        // A positive offset becomes 0.
        let over = l.if_less(zero, above, l.greater(tiny, qq), det);
        let scaled = l.if_less(zero, above, xq, l.sub(l.mul(w, xq), l.mul(x, q)));
        let one_over = l.div(l.splat(1.0), over);
        let s = l.greater(zero, l.mul(scaled, one_over));
        let offset = l.mul(l.lesser(zero, above), one_over);
        let gained = l.add(l.mul(s, xq), l.mul(offset, x));
        (SubBlockFit { s, m: l.sub(zero, offset), qq, q }, gained)
    }

    /// Integers of every sub-block for given f16 scales: of four times four around `s / d` and `m / dmin`, those with
    /// the least decoding error.
    #[inline(always)]
    fn choose_integers(&self, d: (u16, f32), dmin: (u16, f32), s: L::V, m: L::V) -> BlockCandidate<L::V> {
        let (l, kind) = (self.l, self.kind);
        let scale = below(l, s, d.1, kind.levels);
        let min = below(l, m, dmin.1, kind.levels);
        let (mut scales, mut mins, mut error) = (scale, min, l.splat(f32::MAX));
        for across in -1..=2 {
            let scale = within(l, l.add(scale, l.splat(across as f32)), kind.levels);
            let step = l.mul(l.splat(d.1), scale);
            let inv = inverse(l, step);
            for down in -1..=2 {
                let min = within(l, l.add(min, l.splat(down as f32)), kind.levels);
                let offset = l.mul(l.splat(dmin.1), min);
                let found = self
                    .parts
                    .error(l, &Steps { inv, start: l.mul(offset, inv), step, offset, most: kind.codes });
                scales = l.if_less(found, error, scale, scales);
                mins = l.if_less(found, error, min, mins);
                error = l.if_less(found, error, found, error);
            }
        }
        BlockCandidate { d, dmin, scales, mins, error: total(l, error) }
    }

    /// Codes under a candidate.
    #[inline(always)]
    fn steps(&self, choice: &BlockCandidate<L::V>) -> Steps<L::V> {
        let l = self.l;
        let step = l.mul(l.splat(choice.d.1), choice.scales);
        let offset = l.mul(l.splat(choice.dmin.1), choice.mins);
        let inv = inverse(l, step);
        Steps { inv, start: l.mul(offset, inv), step, offset, most: self.kind.codes }
    }

    /// The two f16 scales by least squares for fixed integers and codes: `x ~ d·(L q) - dmin·M`.
    #[inline(always)]
    fn refit(&self, choice: &BlockCandidate<L::V>) -> (f64, f64) {
        let l = self.l;
        let (q, qq, xq) = self.parts.moments(l, &self.steps(choice));
        let (q, qq, xq) = (l.to_array(q), l.to_array(qq), l.to_array(xq));
        let (w, x) = (l.to_array(self.sums.w), l.to_array(self.sums.x));
        let (scales, mins) = (l.to_array(choice.scales), l.to_array(choice.mins));
        let (mut aa, mut ab, mut bb, mut ax, mut bx) = (0f64, 0f64, 0f64, 0f64, 0f64);
        for i in 0..MOST / self.kind.sub {
            let (scale, min) = (f64::from(scales[i]), f64::from(mins[i]));
            aa += scale * scale * f64::from(qq[i]);
            ax += scale * f64::from(xq[i]);
            ab -= scale * min * f64::from(q[i]);
            bb += min * min * f64::from(w[i]);
            bx -= min * f64::from(x[i]);
        }
        let det = aa * bb - ab * ab;
        if bb == 0.0 || det <= 1e-12 * aa * bb {
            return (if aa > 0.0 { ax / aa } else { 0.0 }, choice.dmin.1.into());
        }
        (((ax * bb - bx * ab) / det).max(0.0), ((bx * aa - ax * ab) / det).max(0.0))
    }
}

/// Integer below `v / unit`, clamped to -1 and `levels`.
#[inline(always)]
fn below<L: Lanes>(l: L, v: L::V, unit: f32, levels: f32) -> L::V {
    let inverse = if unit == 0.0 { 0.0 } else { (1.0 / unit).min(f32::MAX) };
    nearest(l, l.sub(l.mul(v, l.splat(inverse)), l.splat(0.5)), -1.0, levels)
}

#[inline(always)]
fn within<L: Lanes>(l: L, v: L::V, levels: f32) -> L::V {
    l.lesser(l.greater(v, l.splat(0.0)), l.splat(levels))
}
