//! Operations on values, without products of weights.

use mantissa_kernels::kernels;

use crate::experts::sigmoid;
use crate::operators::{Activations, Operators, Sequences};
use crate::program::{Columns, Gating, Op, Scope, memory};
use crate::rope::split_pairs;
use crate::streams::{correct_streams, match_squares, mix_streams};

/// Runs an operation that reads no matrix of weights and no cache.
pub(super) fn run(
    op: &Op,
    operators: &dyn Operators,
    (seqs, scope): (&Sequences<'_>, &Scope),
    threads: usize,
    a: &mut Activations<'_>,
) {
    let angles = (a.cos, a.sin);
    let memory = memory(a);
    match op {
        Op::Copy { x, out } => {
            let [x, out] = memory.views(scope, [*x, *out]);
            out.copy_from_slice(x);
        }
        Op::CopyColumns(columns) => {
            let [x, out] = memory.views(scope, [columns.x, columns.out]);
            copy_columns(columns, x, out);
        }
        Op::ClearColumns { out, groups, from } => {
            let width = out.width / groups;
            let [out] = memory.views(scope, [*out]);
            out.chunks_exact_mut(width).for_each(|group| group[*from..].fill(0.0));
        }
        Op::SplitPairs { x, head, rotated, scratch } => {
            let [x, scratch] = memory.views(scope, [*x, *scratch]);
            for head in x.chunks_exact_mut(*head) {
                let (pairs, rotated) = (&mut scratch[..*rotated], &mut head[..*rotated]);
                pairs.copy_from_slice(rotated);
                split_pairs(pairs, rotated);
            }
        }
        Op::VectorNorm { weight, eps, x, out } => {
            let [x, out] = memory.views(scope, [*x, *out]);
            match operators.vector(*weight) {
                Some(weight) => kernels().rms_norm(x, weight, *eps, out),
                // The program asks only for vectors in the config, and those were loaded.
                None => out.copy_from_slice(x),
            }
        }
        Op::Fill { out, value } => memory.views(scope, [*out])[0].fill(*value),
        Op::Clip { x, limit } => {
            memory.views(scope, [*x])[0].iter_mut().for_each(|x| *x = x.clamp(-limit, *limit));
        }
        Op::Scale { x, factor } => memory.views(scope, [*x])[0].iter_mut().for_each(|x| *x *= factor),
        Op::Divide { x, by } => memory.views(scope, [*x])[0].iter_mut().for_each(|x| *x /= by),
        Op::ScaleByVector { x, vector } => {
            let width = x.width;
            let [x] = memory.views(scope, [*x]);
            match operators.vector(*vector) {
                Some([factor]) => x.iter_mut().for_each(|x| *x *= factor),
                Some(factors) => x.chunks_exact_mut(width).for_each(|row| {
                    row.iter_mut().zip(factors).for_each(|(x, factor)| *x *= factor);
                }),
                None => {}
            }
        }
        Op::Grow { x, growth } => {
            let width = x.width;
            let [x] = memory.views(scope, [*x]);
            let mut rows = x.chunks_exact_mut(width);
            for (i, len) in seqs.lens.iter().enumerate() {
                for (position, row) in (seqs.start(i)..).zip(rows.by_ref().take(*len)) {
                    let factor = growth.at(position);
                    if factor != 1.0 {
                        row.iter_mut().for_each(|x| *x *= factor);
                    }
                }
            }
        }
        Op::Rotate { x, head, half } => {
            let width = x.width;
            rotate(seqs, angles, [width, *head, *half], memory.views(scope, [*x])[0]);
        }
        Op::Add { x, out } => {
            let [x, out] = memory.views(scope, [*x, *out]);
            kernels().axpy(1.0, x, out);
        }
        Op::AddGated { gates, x, out } => {
            let width = x.width;
            let [gates, x, out] = memory.views(scope, [*gates, *x, *out]);
            sigmoid(gates);
            for ((gate, x), out) in gates.iter().zip(x.chunks_exact(width)).zip(out.chunks_exact_mut(width)) {
                kernels().axpy(*gate, x, out);
            }
        }
        op => run_gates(op, operators, scope, threads, memory),
    }
}

/// Runs an operation with a nonlinearity, or on parallel streams.
fn run_gates(
    op: &Op,
    operators: &dyn Operators,
    scope: &Scope,
    threads: usize,
    memory: crate::program::Memory<'_>,
) {
    match op {
        Op::ActMul { gating, gate, up: Some(up), out } => {
            let [g, u, o] = memory.views(scope, [*gate, *up, *out]);
            gating.run((threads, numbers(gating, operators)), gate.width, g, u, o);
        }
        Op::ActMul { gating, gate, up: None, out } => {
            let rows = scope.rows.start * gate.width..scope.rows.end * gate.width;
            let up = &memory.layer_input[rows];
            let [g, o] = memory.views(scope, [*gate, *out]);
            gating.run((threads, numbers(gating, operators)), gate.width, g, up, o);
        }
        Op::CutOff { x, deviations } => {
            let width = x.width;
            cut_off(width, *deviations, memory.views(scope, [*x])[0]);
        }
        Op::GateHeads { gates, x, head } => {
            let len = scope.tokens * x.width;
            let [gates, x] = memory.views(scope, [*gates, *x]);
            for (x, gate) in x[..len].chunks_exact_mut(*head).zip(gates.chunks_exact(2 * head)) {
                kernels().sigmoid_mul(&gate[*head..], x);
            }
        }
        Op::Tanh { x, divisor } => {
            let [x] = memory.views(scope, [*x]);
            x.iter_mut().for_each(|x| *x = (f64::from(*x) / divisor).tanh() as f32);
        }
        Op::MatchSquares { like, x } => {
            let width = x.width;
            let [like, x] = memory.views(scope, [*like, *x]);
            match_squares(width, like, x);
        }
        Op::MixStreams { matrices, first } => {
            let n = matrices.width.isqrt();
            let ([matrices], streams) = memory.with_streams(scope, [*matrices]);
            mix_streams(matrices, n, (scope.rows.start, first.width), streams);
        }
        Op::CorrectStreams { shares, first, changed } => {
            let n = shares.width;
            let ([shares, changed], streams) = memory.with_streams(scope, [*shares, *changed]);
            correct_streams(shares, n, (scope.rows.start, first.width), changed, streams);
        }
        // Those of `Pass::step`.
        _ => {}
    }
}

/// Rotates the heads of each sequence's rows `[rows, width]` by the angles of their positions.
fn rotate(
    seqs: &Sequences<'_>,
    (cos, sin): (&[f32], &[f32]),
    [width, head, half]: [usize; 3],
    mut x: &mut [f32],
) {
    for (i, len) in seqs.lens.iter().enumerate() {
        let (rows, rest) = x.split_at_mut(len * width);
        let angles = seqs.start(i) * half..(seqs.start(i) + len) * half;
        kernels().rope_rotate(rows, width / head, head, &cos[angles.clone()], &sin[angles]);
        x = rest;
    }
}

fn copy_columns(columns: &Columns, x: &[f32], out: &mut [f32]) {
    let Columns { from, to, groups, count, pairs, .. } = *columns;
    let rows = x.chunks_exact(columns.x.width).zip(out.chunks_exact_mut(columns.out.width));
    for (x, out) in rows {
        for group in 0..groups {
            let x = &x[from.0 + group * from.1..][..count];
            let out = &mut out[to.0 + group * to.1..][..count];
            if pairs {
                split_pairs(x, out);
            } else {
                out.copy_from_slice(x);
            }
        }
    }
}

/// Subtracts a threshold from the gate of each token, `[tokens, width]`, and cuts it off at 0: its mean and `deviations`
/// standard deviations (Gemma 3n).
fn cut_off(width: usize, deviations: f32, gate: &mut [f32]) {
    for gate in gate.chunks_exact_mut(width) {
        let mean = gate.iter().map(|x| f64::from(*x)).sum::<f64>() / width as f64;
        let variance = gate.iter().map(|x| (f64::from(*x) - mean).powi(2)).sum::<f64>() / width as f64;
        let threshold = (mean + variance.sqrt() * f64::from(deviations)) as f32;
        gate.iter_mut().for_each(|x| *x = (*x - threshold).max(0.0));
    }
}

/// Numbers of an activation from the vectors of its layer.
fn numbers(gating: &Gating, operators: &dyn Operators) -> [f32; 4] {
    gating.numbers(|kind| operators.vector(kind)?.first().copied())
}
