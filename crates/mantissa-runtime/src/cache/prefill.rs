//! Attention of many queries: blocks of queries against chunks of keys that are decoded to f32, by matrix products,
//! with the softmax carried from chunk to chunk (Dao et al. 2022, "FlashAttention", algorithm 1).

use mantissa_kernels::{CausalAttention, MatMut, MatRef, kernels};

use super::pass::Pass;
use super::scratch::Span;
use super::side::Codes;

/// Positions of a task: their queries share the decoded keys.
pub(super) const POSITIONS: usize = 256;

/// Tokens of a chunk of keys.
const CHUNK: usize = 256;

/// Buffers of a thread.
#[derive(Default)]
pub(super) struct Prefill {
    queries: Vec<f32>,
    keys: Vec<f32>,
    values: Vec<f32>,
    scores: Vec<f32>,
    max: Vec<f32>,
    sum: Vec<f32>,
}

/// Attends with the queries of one key/value head at block `block` of a span's positions; writes `out` `[positions,
/// group, head_dim]`.
pub(super) fn attend_block(
    pass: &Pass<'_>,
    span: &Span,
    block: usize,
    head: usize,
    (codes, prefill): (&mut Codes, &mut Prefill),
    out: &mut [f32],
) {
    let (d, group, width) = (pass.shape.head_dim, pass.group(), pass.shape.heads * pass.shape.head_dim);
    let positions = out.len() / (group * d);
    let row = span.row + block * POSITIONS;
    let start = span.start + block * POSITIONS;
    let sides = pass.sides(span);
    let Prefill { queries, keys, values, scores, max, sum } = prefill;
    queries.clear();
    for q in pass.q[row * width..].chunks_exact(width).take(positions) {
        queries.extend_from_slice(&q[head * group * d..][..group * d]);
    }
    for (state, fill) in [(&mut *max, f32::NEG_INFINITY), (&mut *sum, 0.0)] {
        state.clear();
        state.resize(positions * group, fill);
    }
    out.fill(0.0);
    let (first, end) = (pass.seen(start).start, start + positions);
    for chunk in (first / CHUNK * CHUNK..end).step_by(CHUNK) {
        let tokens = chunk.max(first)..(chunk + CHUNK).min(end);
        for (side, rows) in sides.iter().zip([&mut *keys, &mut *values]) {
            rows.resize(tokens.len() * d, 0.0);
            side.read(tokens.clone(), head..head + 1, rows, codes);
        }
        for at in (0..positions).step_by(CausalAttention::QUERY_BLOCK) {
            let part = at..positions.min(at + CausalAttention::QUERY_BLOCK);
            let seen = pass.seen(start + part.start).start..start + part.end;
            if seen.end <= tokens.start || seen.start >= tokens.end {
                continue;
            }
            let rows = part.start * group..part.end * group;
            scores.resize(rows.len() * tokens.len(), 0.0);
            let q = MatRef::new(&queries[rows.start * d..], rows.len(), d);
            let k = MatRef::new(keys, tokens.len(), d);
            kernels().gemm_nt(q, k, MatMut::new(scores, rows.len(), tokens.len()), false);
            for (r, scores) in rows.clone().zip(scores.chunks_exact_mut(tokens.len())) {
                let seen = pass.seen(start + r / group);
                let visible = seen.start.clamp(tokens.start, tokens.end) - tokens.start
                    ..seen.end.clamp(tokens.start, tokens.end) - tokens.start;
                let shift = (pass.shape.scale, pass.rules.softcap);
                weigh(shift, scores, visible, &mut max[r], &mut sum[r], &mut out[r * d..][..d]);
            }
            let p = MatRef::new(scores, rows.len(), tokens.len());
            let v = MatRef::new(values, tokens.len(), d);
            kernels().gemm_nn(p, v, MatMut::new(&mut out[rows.start * d..], rows.len(), d), true);
        }
    }
    for (r, out) in out.chunks_exact_mut(d).enumerate() {
        let mut total = sum[r];
        if let Some(sinks) = pass.rules.sinks {
            // If this is infinite, the sink is so much larger that the values' weights are correctly 0.
            let mut sink = [sinks[head * group + r % group] - max[r]];
            kernels().exp_inplace(&mut sink);
            total += sink[0];
        }
        out.iter_mut().for_each(|x| *x /= total);
    }
}

/// Replaces the scores of a row, with this scale and soft cap, by weights relative to the largest score so far, and
/// rescales what was summed before.
pub(super) fn weigh(
    (scale, softcap): (f32, Option<f32>),
    scores: &mut [f32],
    visible: std::ops::Range<usize>,
    max: &mut f32,
    sum: &mut f32,
    acc: &mut [f32],
) {
    scores[..visible.start].fill(0.0);
    scores[visible.end..].fill(0.0);
    let row = &mut scores[visible];
    if row.is_empty() {
        return;
    }
    let (total, top) = match softcap {
        None => kernels().softmax_numerators_max(row, scale),
        Some(cap) => {
            kernels().softcap(row, scale, cap);
            kernels().softmax_numerators_max(row, 1.0)
        }
    };
    let new = if top > *max { top } else { *max };
    let mut factors = [*max - new, top - new];
    kernels().exp_inplace(&mut factors);
    let [before, here] = factors;
    if before != 1.0 && *sum > 0.0 {
        acc.iter_mut().for_each(|x| *x *= before);
        *sum *= before;
    }
    if here != 1.0 {
        row.iter_mut().for_each(|p| *p *= here);
    }
    *max = new;
    *sum += total * here;
}
