//! Mixers against their formulas in f64, token by token, and in any split into passes.

use std::ops::Range;
use std::sync::LazyLock;

use super::frame::*;
use super::*;
use crate::error::ForwardError;
use crate::flow::weights;
use crate::operators::{
    Activations, ExpertChoice, ExtraScratch, IndexRows, MatmulJob, MlpRows, Operators, Sequences,
};
use crate::program::{Buffer, Scope, View};
use mantissa_arch::kinds::{LinearInput, LinearKind, NormKind, SideKind, VectorKind};

const INNER: usize = 12;
const RANK: usize = 3;
const HEAD: usize = 5;
/// Width of the latent of queries of compressed attention.
const LATENT: usize = 4;
/// Longest sequence, for states and angles.
const CONTEXT: usize = 160;
/// Half the rotated width.
const HALF: usize = 2;

/// Cosines and sines by position.
static ANGLES: LazyLock<(Vec<f32>, Vec<f32>)> = LazyLock::new(|| {
    let angle = |i: usize| (i / HALF) as f32 * 0.3_f32.powi((i % HALF) as i32);
    let table = |f: fn(f32) -> f32| (0..CONTEXT * HALF).map(|i| f(angle(i))).collect();
    (table(f32::cos), table(f32::sin))
});

/// Operators whose projections are functions of the token, so that a test can compute them again.
struct Fake {
    vectors: Vec<(VectorKind, Vec<f32>)>,
}

/// Output `column` of projection `kind` for the token with state `x`.
fn projected(kind: usize, x: f32, column: usize) -> f32 {
    ((x * 1.7 + column as f32 * 0.37 + kind as f32).sin() + (column as f32 * 1.3 - x).cos()) * 0.7
}

impl Fake {
    fn of(mixer: &dyn Mixer) -> Self {
        let value = |kind: VectorKind, i: usize| match kind {
            VectorKind::MixNorm => 1.0 + 0.3 * (i as f32).sin(),
            VectorKind::DecayLog => -1.0 + 0.5 * (i as f32).cos(),
            _ => 0.6 * (i as f32 * 0.9).sin(),
        };
        let vector = |(kind, shape): (VectorKind, Vec<usize>)| {
            let len = shape.iter().product();
            (kind, (0..len).map(|i| value(kind, i)).collect())
        };
        Fake { vectors: mixer.vectors().into_iter().map(vector).collect() }
    }

    fn get(&self, kind: VectorKind) -> Vec<f64> {
        self.vector(kind).unwrap().iter().map(|x| f64::from(*x)).collect()
    }
}

impl Operators for Fake {
    fn norm(&mut self, _: NormKind, x: &[f32], out: &mut [f32]) {
        out.copy_from_slice(x);
    }

    fn linears(
        &mut self,
        _: LinearInput,
        x: &[f32],
        _: usize,
        jobs: &mut [MatmulJob<'_>],
    ) -> Result<(), ForwardError> {
        for job in jobs {
            match job.kind {
                LinearKind::QB => fill_from(x, job.out, LATENT, 13),
                kind => fill(x, job.out, linear(kind)),
            }
        }
        Ok(())
    }

    fn side(&mut self, kind: SideKind, x: &[f32], out: &mut [f32]) {
        match kind {
            // Projections inside the mixer read what it computed.
            SideKind::Selection => fill_from(x, out, INNER, 5),
            SideKind::Step => fill_from(x, out, RANK, 6),
            SideKind::DecayLatent => fill(x, out, 9),
            SideKind::Decay => fill_from(x, out, HEAD, 10),
            SideKind::GateLatent => fill(x, out, 11),
            SideKind::Gate => fill_from(x, out, HEAD, 12),
            SideKind::IndexQueries => fill_from(x, out, LATENT, 14),
            _ => fill(x, out, 2 + usize::from(kind == SideKind::DecayRate)),
        }
    }

    fn side_rows(&mut self, _: SideKind, rows: Range<usize>, x: &[f32], out: &mut [f32]) {
        let width = x.len() / (out.len() / rows.len());
        fill_from(x, out, width, 15 + rows.start);
    }

    fn vector(&self, kind: VectorKind) -> Option<&[f32]> {
        self.vectors.iter().find(|(of, _)| *of == kind).map(|(_, values)| values.as_slice())
    }
}

/// Number of a linear layer's projection.
fn linear(kind: LinearKind) -> usize {
    match kind {
        LinearKind::MixGate => 1,
        LinearKind::MixK => 7,
        LinearKind::MixV => 8,
        _ => 0,
    }
}

/// Projects the sum of each row of `width` values.
fn fill_from(x: &[f32], out: &mut [f32], width: usize, kind: usize) {
    let sums: Vec<f32> = x.chunks_exact(width).map(|x| x.iter().sum()).collect();
    fill(&sums, out, kind);
}

/// Projects tokens of one value each.
fn fill(x: &[f32], out: &mut [f32], kind: usize) {
    let width = out.len() / x.len();
    for (x, out) in x.iter().zip(out.chunks_exact_mut(width)) {
        out.iter_mut().enumerate().for_each(|(column, out)| *out = projected(kind, *x, column));
    }
}

/// Mixes the tokens `x` of sequences of `lens`, which begin at `starts`.
fn mix(
    mixer: &dyn Mixer,
    x: &[f32],
    seqs: &Sequences<'_>,
    states: Option<States<'_>>,
    threads: usize,
) -> Vec<f32> {
    let mut operators = Fake::of(mixer);
    let mut scratch = vec![f32::NAN; seqs.rows * mixer.scratch()];
    let mut out = vec![f32::NAN; seqs.rows * mixer.width()];
    let mut padded = x.to_vec();
    padded.resize(seqs.rows, 0.0);
    let (mut ops, scope) = (Vec::new(), Scope { rows: 0..seqs.rows, tokens: x.len(), all: seqs.rows });
    mixer.project(View::new(Buffer::Normed, 1), &mut ops);
    let mut choices = Vec::new();
    let mut a = activations(&mut padded, &mut scratch, &mut choices);
    for op in &ops {
        weights::run(op, &mut operators, (seqs, &scope), 1, &mut a).unwrap();
    }
    let rows = MixRows {
        seqs,
        states,
        threads,
        scratch: &mut scratch,
        out: &mut out,
        cos: &ANGLES.0,
        sin: &ANGLES.1,
    };
    mixer.mix(&mut operators, rows);
    assert!(out[x.len() * mixer.width()..].iter().all(|x| *x == 0.0), "padding");
    out.truncate(x.len() * mixer.width());
    out
}

/// Buffers of a pass with normed states and scratch alone.
fn activations<'a>(
    normed: &'a mut [f32],
    wide: &'a mut [f32],
    choices: &'a mut Vec<ExpertChoice>,
) -> Activations<'a> {
    Activations {
        residual: &mut [],
        normed,
        q: &mut [],
        k: &mut [],
        v: &mut [],
        attended: &mut [],
        lse: None,
        gate: &mut [],
        up: &mut [],
        inner: &mut [],
        mlp: MlpRows { most: 1, keep: false },
        scores: &mut [],
        cos: &[],
        sin: &[],
        layer_input: &[],
        streams: &mut [],
        extra: ExtraScratch {
            wide,
            logits: &mut [],
            gathered: &mut [],
            result: &mut [],
            sum: &mut [],
            choices,
            index: IndexRows::default(),
        },
    }
}

fn tokens(n: usize, seed: usize) -> Vec<f32> {
    (0..n).map(|i| ((i * 7 + seed * 13) % 31) as f32 * 0.21).collect()
}

fn delta(joined: bool) -> GatedDelta {
    GatedDelta {
        hidden: 1,
        key_heads: 2,
        value_heads: 4,
        key_dim: 6,
        value_dim: 5,
        kernel: 4,
        eps: 1e-5,
        joined,
    }
}

fn state_space() -> StateSpace {
    StateSpace {
        hidden: 1,
        heads: 6,
        head_dim: 5,
        groups: 3,
        state: 4,
        kernel: 4,
        convolution_bias: true,
        bias: false,
        factors: None,
        norm: ResultNorm::AfterGate,
        steps: (0.3, 1.0),
        eps: 1e-5,
    }
}

fn selective() -> SelectiveScan {
    SelectiveScan {
        hidden: 1,
        inner: INNER,
        state: 4,
        rank: RANK,
        kernel: 4,
        convolution_bias: true,
        bias: false,
        eps: 1e-5,
    }
}

fn channel_delta() -> ChannelDelta {
    ChannelDelta { hidden: 1, heads: 3, head_dim: HEAD, kernel: 4, eps: 1e-5 }
}

fn compressed(compression: Option<Compression>) -> CompressedAttention {
    CompressedAttention {
        hidden: 1,
        heads: 4,
        head_dim: 6,
        rotated: 2 * HALF,
        q_rank: LATENT,
        groups: 2,
        group_rank: 3,
        window: 7,
        index: CompressedIndex { heads: 2, dim: 5, chosen: 4 },
        compression,
        eps: 1e-5,
    }
}

fn all() -> Vec<Recurrent> {
    vec![
        Recurrent::CompressedAttention(compressed(None)),
        Recurrent::CompressedAttention(compressed(Some(Compression { ratio: 5, overlaps: false }))),
        Recurrent::CompressedAttention(compressed(Some(Compression { ratio: 3, overlaps: true }))),
        Recurrent::ChannelDelta(channel_delta()),
        Recurrent::GatedDelta(delta(false)),
        Recurrent::GatedDelta(delta(true)),
        Recurrent::StateSpace(state_space()),
        Recurrent::StateSpace(StateSpace {
            norm: ResultNorm::None,
            factors: Some([0.5; 5]),
            ..state_space()
        }),
        Recurrent::SelectiveScan(selective()),
        Recurrent::ShortConvolution(ShortConvolution { hidden: 1, kernel: 3, bias: true }),
    ]
}

#[test]
fn every_architecture_names_a_mixer_of_the_list() {
    for row in mantissa_arch::Architecture::all() {
        assert!(row.recurrent.is_none_or(|name| Rules::find(name).is_some()), "{row:?}");
    }
}

#[test]
fn pieces_and_batches_have_the_bits_of_a_whole_sequence() {
    for recurrent in all() {
        let mixer = recurrent.mixer();
        let shape = mixer.state(CONTEXT);
        let (a, b) = (tokens(150, 1), tokens(70, 2));
        let whole = |x: &[f32], threads| {
            mix(mixer, x, &Sequences { lens: &[x.len()], starts: &[], rows: x.len() + 3 }, None, threads)
        };
        let expected = [whole(&a, 1), whole(&b, 1)];
        assert!(expected[0].iter().all(|x| x.is_finite()), "{recurrent:?}");
        assert!(expected[0] == whole(&a, 3), "{recurrent:?}: threads");
        let batch = [&a[..], &b].concat();
        let seqs = Sequences { lens: &[150, 0, 70], starts: &[], rows: 220 };
        assert!(mix(mixer, &batch, &seqs, None, 2) == expected.concat(), "{recurrent:?}: batch");

        // Slots of other sequences, which hold the end of an older one.
        let mut tails = vec![7.0; 4 * shape.tail];
        let mut heads = vec![7.0; 4 * shape.heads * shape.head];
        let mut found = [Vec::new(), Vec::new()];
        let mut at = [0, 0];
        for lens in [[1, 3], [2, 1], [64, 0], [83, 66]] {
            let part = |x: &[f32], i: usize| x[at[i]..at[i] + lens[i]].to_vec();
            let x = [part(&a, 0), part(&b, 1)].concat();
            let states = States { tails: &mut tails, heads: &mut heads, slots: 4, of: &[3, 1] };
            let seqs = Sequences { lens: &lens, starts: &at.clone(), rows: x.len() };
            let out = mix(mixer, &x, &seqs, Some(states), 2);
            let (first, second) = out.split_at(lens[0] * mixer.width());
            found[0].extend_from_slice(first);
            found[1].extend_from_slice(second);
            at = [at[0] + lens[0], at[1] + lens[1]];
        }
        assert!(found == expected, "{recurrent:?}: pieces");
        assert!(tails[..shape.tail].iter().all(|x| *x == 7.0), "{recurrent:?}: another slot");
    }
}

/// Convolves channel `channel` of `x(t)` in f64 with the weights as loaded.
fn convolved(fake: &Fake, x: &dyn Fn(usize) -> f64, t: usize, channel: usize, channels: usize) -> f64 {
    convolved_by(VectorKind::Convolution, fake, x, t, channel, channels)
}

fn convolved_by(
    kind: VectorKind,
    fake: &Fake,
    x: &dyn Fn(usize) -> f64,
    t: usize,
    channel: usize,
    channels: usize,
) -> f64 {
    let weight = fake.get(kind);
    let bias = fake.vector(VectorKind::ConvolutionBias).map_or(0.0, |bias| f64::from(bias[channel]));
    let kernel = weight.len() / channels;
    (0..kernel)
        .filter(|j| t + j + 1 >= kernel)
        .map(|j| weight[j * channels + channel] * x(t + j + 1 - kernel))
        .sum::<f64>()
        + bias
}

fn silu(x: f64) -> f64 {
    x / (1.0 + (-x).exp())
}

#[test]
fn gated_delta_net_agrees_with_its_formula() {
    for joined in [false, true] {
        let m = delta(joined);
        let (x, fake) = (tokens(20, 4), Fake::of(&m));
        let (dk, dv, group) = (m.key_dim, m.value_dim, m.value_heads / m.key_heads);
        let (channels, keys) = (2 * m.key_heads * dk + m.value_heads * dv, m.key_heads * dk);
        // Column of the joined projection that holds channel `c` of q, k and v.
        let place = |c: usize| match joined {
            false => c,
            true => {
                let each = 2 * dk + 2 * group * dv;
                match c {
                    c if c < keys => c / dk * each + c % dk,
                    c if c < 2 * keys => (c - keys) / dk * each + dk + c % dk,
                    c => {
                        let (head, i) = ((c - 2 * keys) / (group * dv), (c - 2 * keys) % (group * dv));
                        head * each + 2 * dk + i
                    }
                }
            }
        };
        let gate = |t: usize, c: usize| {
            f64::from(match joined {
                false => projected(1, x[t], c),
                true => projected(0, x[t], place(2 * keys + c) + group * dv),
            })
        };
        let rate = |t: usize, head: usize, decay: usize| {
            f64::from(match joined {
                false => projected(2 + decay, x[t], head),
                true => projected(2, x[t], head / group * 2 * group + decay * group + head % group),
            })
        };
        let found = mix(&m, &x, &Sequences { lens: &[20], starts: &[], rows: 20 }, None, 1);
        let (log, bias) = (fake.get(VectorKind::DecayLog), fake.get(VectorKind::StepBias));
        let weight = fake.get(VectorKind::MixNorm);
        for head in 0..m.value_heads {
            let mut state = vec![vec![0f64; dv]; dk];
            for t in 0..x.len() {
                let channel = |c: usize| {
                    let input = |t: usize| f64::from(projected(0, x[t], place(c)));
                    silu(convolved(&fake, &input, t, c, channels))
                };
                let vector = |first: usize, n: usize| (0..n).map(|i| channel(first + i)).collect::<Vec<_>>();
                let unit = |v: Vec<f64>| {
                    let length = (v.iter().map(|v| v * v).sum::<f64>() + 1e-6).sqrt();
                    v.into_iter().map(|v| v / length).collect::<Vec<_>>()
                };
                let key = head / group * dk;
                let (q, k) = (unit(vector(key, dk)), unit(vector(keys + key, dk)));
                let v = vector(2 * keys + head * dv, dv);
                let step = (1.0 + (rate(t, head, 1) + bias[head]).exp()).ln();
                let (decay, beta) =
                    ((-log[head].exp() * step).exp(), 1.0 / (1.0 + (-rate(t, head, 0)).exp()));
                state.iter_mut().flatten().for_each(|s| *s *= decay);
                let read = |state: &[Vec<f64>], x: &[f64], j: usize| {
                    x.iter().zip(state).map(|(x, row)| x * row[j]).sum::<f64>()
                };
                let change: Vec<f64> = (0..dv).map(|j| beta * (v[j] - read(&state, &k, j))).collect();
                for (row, k) in state.iter_mut().zip(&k) {
                    row.iter_mut().zip(&change).for_each(|(s, change)| *s += k * change);
                }
                let o: Vec<f64> = (0..dv).map(|j| read(&state, &q, j) / (dk as f64).sqrt()).collect();
                let mean = o.iter().map(|o| o * o).sum::<f64>() / dv as f64;
                for j in 0..dv {
                    let expected = weight[j] * o[j] / (mean + 1e-5).sqrt() * silu(gate(t, head * dv + j));
                    let found = f64::from(found[t * m.value_heads * dv + head * dv + j]);
                    assert!((found - expected).abs() < 1e-4, "{joined} {head} {t} {j}: {found} {expected}");
                }
            }
        }
    }
}

#[test]
fn kimi_delta_attention_agrees_with_its_formula() {
    let m = channel_delta();
    let (x, fake, d) = (tokens(20, 4), Fake::of(&m), m.head_dim);
    let inner = m.heads * d;
    let found = mix(&m, &x, &Sequences { lens: &[20], starts: &[], rows: 20 }, None, 1);
    let (log, bias) = (fake.get(VectorKind::DecayLog), fake.get(VectorKind::StepBias));
    let weight = fake.get(VectorKind::MixNorm);
    let parts = [
        (VectorKind::QueryConvolution, LinearKind::MixQ),
        (VectorKind::KeyConvolution, LinearKind::MixK),
        (VectorKind::ValueConvolution, LinearKind::MixV),
    ];
    for head in 0..m.heads {
        let mut state = vec![vec![0f64; d]; d];
        for t in 0..x.len() {
            // A low-rank projection: the second reads the sum of the first.
            let low_rank = |first: usize, second: usize, c: usize| {
                let latent: f32 = (0..d).map(|c| projected(first, x[t], c)).sum();
                f64::from(projected(second, latent, c))
            };
            let x = &x;
            let [q, k, v] = parts.map(|(kind, kind_of_linear)| {
                let input = |c: usize| move |t: usize| f64::from(projected(linear(kind_of_linear), x[t], c));
                let value = |c: usize| silu(convolved_by(kind, &fake, &input(c), t, c, inner));
                (head * d..(head + 1) * d).map(value).collect::<Vec<_>>()
            });
            let unit = |v: Vec<f64>| {
                let length = (v.iter().map(|v| v * v).sum::<f64>() + 1e-6).sqrt();
                v.into_iter().map(|v| v / length).collect::<Vec<_>>()
            };
            let (q, k) = (unit(q), unit(k));
            let beta = 1.0 / (1.0 + (-f64::from(projected(2, x[t], head))).exp());
            for (i, row) in state.iter_mut().enumerate() {
                let channel = head * d + i;
                let step = (1.0 + (low_rank(9, 10, channel) + bias[channel]).exp()).ln();
                row.iter_mut().for_each(|s| *s *= (-log[head].exp() * step).exp());
            }
            let read = |state: &[Vec<f64>], x: &[f64], j: usize| {
                x.iter().zip(state).map(|(x, row)| x * row[j]).sum::<f64>()
            };
            let change: Vec<f64> = (0..d).map(|j| beta * (v[j] - read(&state, &k, j))).collect();
            for (row, k) in state.iter_mut().zip(&k) {
                row.iter_mut().zip(&change).for_each(|(s, change)| *s += k * change);
            }
            let o: Vec<f64> = (0..d).map(|j| read(&state, &q, j) / (d as f64).sqrt()).collect();
            let mean = o.iter().map(|o| o * o).sum::<f64>() / d as f64;
            for j in 0..d {
                let gate = 1.0 / (1.0 + (-low_rank(11, 12, head * d + j)).exp());
                let expected = weight[j] * o[j] / (mean + 1e-5).sqrt() * gate;
                let found = f64::from(found[t * inner + head * d + j]);
                assert!((found - expected).abs() < 1e-4, "{head} {t} {j}: {found} {expected}");
            }
        }
    }
}

#[test]
fn a_state_space_agrees_with_its_formula() {
    let m = state_space();
    let (x, fake) = (tokens(20, 5), Fake::of(&m));
    let inner = m.heads * m.head_dim;
    let channels = inner + 2 * m.groups * m.state;
    let found = mix(&m, &x, &Sequences { lens: &[20], starts: &[], rows: 20 }, None, 1);
    let [log, bias, skip, weight] =
        [VectorKind::DecayLog, VectorKind::StepBias, VectorKind::Skip, VectorKind::MixNorm]
            .map(|k| fake.get(k));
    let mut gated = vec![vec![0f64; inner]; x.len()];
    for head in 0..m.heads {
        let mut state = vec![vec![0f64; m.head_dim]; m.state];
        for (t, gated) in gated.iter_mut().enumerate() {
            let channel = |c: usize| {
                let input = |t: usize| f64::from(projected(0, x[t], inner + c));
                silu(convolved(&fake, &input, t, c, channels))
            };
            let dt = f64::from(projected(0, x[t], inner + channels + head));
            let step = (1.0 + (dt + bias[head]).exp()).ln().clamp(f64::from(0.3_f32), 1.0);
            let decay = (-log[head].exp() * step).exp();
            let group = head / (m.heads / m.groups) * m.state;
            for (i, row) in state.iter_mut().enumerate() {
                for (j, s) in row.iter_mut().enumerate() {
                    *s = *s * decay + channel(inner + group + i) * step * channel(head * m.head_dim + j);
                }
            }
            for j in 0..m.head_dim {
                let at = head * m.head_dim + j;
                let read = |i: usize| channel(inner + m.groups * m.state + group + i) * state[i][j];
                let y = (0..m.state).map(read).sum::<f64>() + skip[head] * channel(at);
                gated[at] = y * silu(f64::from(projected(0, x[t], at)));
            }
        }
    }
    let group = inner / m.groups;
    for (found, gated) in found.chunks_exact(inner).zip(&gated) {
        for (c, found) in found.iter().enumerate() {
            let of_group = &gated[c / group * group..(c / group + 1) * group];
            let mean = of_group.iter().map(|g| g * g).sum::<f64>() / group as f64;
            let expected = weight[c] * gated[c] / (mean + 1e-5).sqrt();
            assert!((f64::from(*found) - expected).abs() < 1e-4, "{c}: {found} {expected}");
        }
    }
}

#[test]
fn a_selective_scan_agrees_with_its_formula() {
    let m = selective();
    let (x, fake) = (tokens(20, 6), Fake::of(&m));
    let found = mix(&m, &x, &Sequences { lens: &[20], starts: &[], rows: 20 }, None, 1);
    let [log, skip] = [VectorKind::DecayLog, VectorKind::Skip].map(|kind| fake.get(kind));
    let norm = |kind, x: Vec<f64>| {
        let mean = x.iter().map(|x| x * x).sum::<f64>() / x.len() as f64;
        let weight = fake.get(kind);
        x.iter().zip(weight).map(|(x, w)| w * x / (mean + 1e-5).sqrt()).collect::<Vec<_>>()
    };
    let mut state = vec![vec![0f64; m.state]; INNER];
    for t in 0..x.len() {
        let channel = |c: usize| {
            let input = |t: usize| f64::from(projected(0, x[t], c));
            silu(convolved(&fake, &input, t, c, INNER))
        };
        let sum: f64 = (0..INNER).map(channel).sum();
        let selected = |from: usize, n: usize| {
            (from..from + n).map(|c| f64::from(projected(5, sum as f32, c))).collect::<Vec<_>>()
        };
        let delta: f64 = norm(VectorKind::StepNorm, selected(0, RANK)).iter().sum();
        let b = norm(VectorKind::WriteNorm, selected(RANK, m.state));
        let c = norm(VectorKind::ReadNorm, selected(RANK + m.state, m.state));
        for (at, state) in state.iter_mut().enumerate() {
            let step = (1.0 + f64::from(projected(6, delta as f32, at)).exp()).ln();
            let mut y = skip[at] * channel(at);
            for (n, s) in state.iter_mut().enumerate() {
                *s = *s * (-log[at * m.state + n].exp() * step).exp() + b[n] * step * channel(at);
                y += c[n] * *s;
            }
            let expected = y * silu(f64::from(projected(0, x[t], INNER + at)));
            let found = f64::from(found[t * INNER + at]);
            assert!((found - expected).abs() < 1e-4, "{t} {at}: {found} {expected}");
        }
    }
}
