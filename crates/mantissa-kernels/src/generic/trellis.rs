//! Cheapest path through a trellis: Viterbi's algorithm (1967) over the states of [`mantissa_num::trellis`].
//!
//! With `k` bits per weight, the 2^k possible predecessors of a state share the 16 - k bits that it begins with, its
//! *group*. So only one cost per group is stored between two weights, and a weight takes one addition and one
//! comparison per state. A state is `x · 2^(16-k) + g`: its group is `g` afterwards, reached from group `state >> k`
//! by the bits `x` that drop out.

use crate::simd::LANES;

/// Groups are numbered `a · 2^k + n`. If 2^k does not fill the lanes, lanes run along `a`, and values and results are
/// stored with `n` outermost.
const WIDE: usize = LANES;

/// Values of the 65 536 states in the order in which [`crate::Kernels::trellis_step`] reads them.
#[derive(Clone, Debug)]
pub struct TrellisValues {
    bits: u32,
    values: Vec<f32>,
}

impl TrellisValues {
    /// Prepares a search over `table`, the value of each state, for codes of `bits`; `None` unless there are 65 536
    /// values and 1 to 8 bits.
    pub fn new(bits: u32, table: &[f32]) -> Option<Self> {
        if table.len() != 1 << 16 || !(1..=8).contains(&bits) {
            return None;
        }
        let (n, a) = (1usize << bits, 1usize << (16 - 2 * bits));
        let values = match n < WIDE {
            false => table.to_vec(),
            true => (0..n * n * a).map(|at| table[(at / a % n * a + at % a) * n + at / (n * a)]).collect(),
        };
        Some(TrellisValues { bits, values })
    }

    /// Number of groups of states.
    pub fn groups(&self) -> usize {
        1 << (16 - self.bits)
    }

    /// Bits of a code.
    pub fn bits(&self) -> u32 {
        self.bits
    }

    /// State of the path that ends in group `group`, given the back-pointers `from` of its step.
    pub fn state(&self, from: &[u8], group: usize) -> u16 {
        let n = 1usize << self.bits;
        let at = if n < WIDE { group % n * (self.groups() / n) + group / n } else { group };
        (usize::from(from[at]) << (16 - self.bits) | group) as u16
    }
}

#[inline(always)]
pub(crate) fn trellis_step(
    values: &TrellisValues,
    target: f32,
    costs: &[f32],
    scratch: &mut [f32],
    next: &mut [f32],
    from: &mut [u8],
) {
    let groups = values.groups();
    let lengths = [costs.len(), scratch.len(), next.len(), from.len()];
    assert!(lengths == [groups; 4], "trellis_step: {lengths:?} values for {groups} groups");
    let v = values.values.as_slice();
    match values.bits {
        1 => along::<2>(v, target, costs, scratch, next, from),
        2 => along::<4>(v, target, costs, scratch, next, from),
        3 => along::<8>(v, target, costs, scratch, next, from),
        4 => across::<16>(v, target, costs, next, from),
        5 => across::<32>(v, target, costs, next, from),
        6 => across::<64>(v, target, costs, next, from),
        7 => across::<128>(v, target, costs, next, from),
        _ => across::<256>(v, target, costs, next, from),
    }
}

/// Least `cost + (target - value)²` so far, and its origin.
#[derive(Clone, Copy)]
struct Best {
    cost: [f32; LANES],
    from: [u32; LANES],
}

impl Best {
    const NONE: Self = Best { cost: [f32::INFINITY; LANES], from: [0; LANES] };

    /// Takes the smaller one; for ties, the first.
    #[inline(always)]
    fn take(&mut self, target: f32, costs: &[f32; LANES], values: &[f32; LANES], x: u32) {
        for lane in 0..LANES {
            let d = target - values[lane];
            let cost = costs[lane] + d * d;
            let less = cost < self.cost[lane];
            self.cost[lane] = if less { cost } else { self.cost[lane] };
            self.from[lane] = if less { x } else { self.from[lane] };
        }
    }

    #[inline(always)]
    fn put(&self, cost: &mut [f32], from: &mut [u8]) {
        cost.copy_from_slice(&self.cost);
        from.iter_mut().zip(self.from).for_each(|(out, x)| *out = x as u8);
    }
}

#[inline(always)]
fn lanes(x: &[f32], at: usize) -> &[f32; LANES] {
    x[at..].first_chunk().unwrap_or(&[0.0; LANES])
}

/// Groups `a · N + n` for adjacent `a`: values are `[n][x][a]`, results `[n][a]`, which are transposed at the end.
#[inline(always)]
fn along<const N: usize>(
    values: &[f32],
    target: f32,
    costs: &[f32],
    scratch: &mut [f32],
    next: &mut [f32],
    from: &mut [u8],
) {
    let across = costs.len() / N;
    let costs: [&[f32]; N] = std::array::from_fn(|x| &costs[x * across..(x + 1) * across]);
    for n in 0..N {
        let values: [&[f32]; N] =
            std::array::from_fn(|x| &values[(n * N + x) * across..(n * N + x + 1) * across]);
        let scratch = &mut scratch[n * across..(n + 1) * across];
        let from = &mut from[n * across..(n + 1) * across];
        for a in 0..across {
            let (mut best, mut arg) = (f32::INFINITY, 0);
            for x in 0..N {
                let d = target - values[x][a];
                let cost = costs[x][a] + d * d;
                let less = cost < best;
                best = if less { cost } else { best };
                arg = if less { x as u32 } else { arg };
            }
            scratch[a] = best;
            from[a] = arg as u8;
        }
    }
    let turned: [&[f32]; N] = std::array::from_fn(|n| &scratch[n * across..(n + 1) * across]);
    for (a, next) in next.as_chunks_mut::<N>().0.iter_mut().enumerate().take(across) {
        for n in 0..N {
            next[n] = turned[n][a];
        }
    }
}

/// Groups `a · N + n` for adjacent `n`: values follow the states in order.
#[inline(always)]
fn across<const N: usize>(values: &[f32], target: f32, costs: &[f32], next: &mut [f32], from: &mut [u8]) {
    let down = costs.len() / N;
    for a in 0..down {
        for n in (0..N).step_by(LANES) {
            let mut best = Best::NONE;
            for x in 0..N {
                let group = x * down + a;
                best.take(target, &[costs[group]; LANES], lanes(values, group * N + n), x as u32);
            }
            let at = a * N + n..a * N + n + LANES;
            best.put(&mut next[at.clone()], &mut from[at]);
        }
    }
}
