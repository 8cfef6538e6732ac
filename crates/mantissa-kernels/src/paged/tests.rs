//! Tiles of every format against attention in f64 over the decoded tile.

use super::*;
use crate::Isa;
use crate::Kernels;

const FORMATS: [TileFormat; 6] = [
    TileFormat::F32,
    TileFormat::F16,
    TileFormat::Bf16,
    TileFormat::Fp8E4m3,
    TileFormat::Int8,
    TileFormat::Int4,
];

pub(super) fn noise(n: usize, seed: u32) -> Vec<f32> {
    let mut state = seed.wrapping_mul(2_654_435_761) | 1;
    let mut next = || {
        state ^= state << 13;
        state ^= state >> 17;
        state ^= state << 5;
        state as f32 / u32::MAX as f32 - 0.5
    };
    (0..n).map(|_| (next() + next() + next()) * 2.0).collect()
}

/// Stores `x` `[64, head_dim]` in a tile.
fn tile(format: TileFormat, x: &[f32], head_dim: usize, key: bool) -> Vec<u8> {
    let mut bytes = vec![0; format.tile_bytes(head_dim)];
    for (slot, x) in x.chunks_exact(head_dim).enumerate() {
        let amax = x.iter().fold(0.0f32, |a, x| a.max(x.abs()));
        let (codes, scaled, scale, zero): (Vec<i8>, Vec<f32>, f32, i8) = match format {
            TileFormat::Int8 => {
                let scale = amax / 127.5;
                let code = |x: &f32| (x / scale).round_ties_even().clamp(-128.0, 127.0) as i8;
                (x.iter().map(code).collect(), Vec::new(), scale, 0)
            }
            TileFormat::Int4 => {
                let (scale, zero) = (amax / 8.0, if slot % 3 == 0 { 2 } else { -1 });
                let code = |x: &f32| ((x / scale).round_ties_even() + f32::from(zero)).clamp(-8.0, 7.0) as i8;
                (x.iter().map(code).collect(), Vec::new(), scale, zero)
            }
            _ => {
                let scale = amax / 448.0;
                let element =
                    crate::Element::Float { mantissa_bits: 3, min_normal: 2f32.powi(-6), max: 448.0 };
                (Vec::new(), x.iter().map(|x| element.round(x / scale)).collect(), scale, 0)
            }
        };
        let row = match format {
            TileFormat::Int8 | TileFormat::Int4 => TileRow::Codes(&codes, scale, zero),
            TileFormat::Fp8E4m3 => TileRow::Fp8(&scaled, scale),
            _ => TileRow::Floats(x),
        };
        match key {
            true => format.write_key(&mut bytes, slot, row),
            false => format.write_value(&mut bytes, slot, row),
        }
    }
    bytes
}

/// Attention of each query in f64 over decoded keys and values of `tiles` tiles, causal from `first` on.
fn exact(
    q: &[f32],
    k: &[f32],
    v: &[f32],
    d: usize,
    scale: f32,
    cap: Option<f32>,
    seen: &[usize],
) -> Vec<f64> {
    let mut out = Vec::new();
    for (q, &seen) in q.chunks_exact(d).zip(seen) {
        let scores: Vec<f64> = k
            .chunks_exact(d)
            .take(seen)
            .map(|k| {
                let dot: f64 = k.iter().zip(q).map(|(k, q)| f64::from(*k) * f64::from(*q)).sum();
                let s = dot * f64::from(scale);
                cap.map_or(s, |cap| f64::from(cap) * (s / f64::from(cap)).tanh())
            })
            .collect();
        let max = scores.iter().copied().fold(f64::NEG_INFINITY, f64::max);
        let p: Vec<f64> = scores.iter().map(|s| (s - max).exp()).collect();
        let sum: f64 = p.iter().sum();
        for i in 0..d {
            let values = v.chunks_exact(d).zip(&p);
            out.push(values.map(|(v, p)| f64::from(v[i]) * p).sum::<f64>() / sum);
        }
    }
    out
}

struct Case {
    keys: Vec<Vec<u8>>,
    values: Vec<Vec<u8>>,
    q: Vec<f32>,
    d: usize,
    rows: usize,
    formats: (TileFormat, TileFormat),
}

impl Case {
    fn new(formats: (TileFormat, TileFormat), d: usize, rows: usize, tiles: usize) -> Self {
        let make = |format, seed, key| {
            (0..tiles).map(|i| tile(format, &noise(TILE_TOKENS * d, seed + i as u32), d, key)).collect()
        };
        let (keys, values) = (make(formats.0, 7, true), make(formats.1, 1007, false));
        Case { keys, values, q: noise(rows * d, 99), d, rows, formats }
    }

    fn decoded(&self) -> (Vec<f32>, Vec<f32>) {
        let (mut k, mut v) = (Vec::new(), Vec::new());
        for (keys, values) in self.keys.iter().zip(&self.values) {
            let mut rows = vec![0.0; TILE_TOKENS * self.d];
            self.formats.0.read_keys(keys, self.d, 0..TILE_TOKENS, &mut rows, self.d);
            k.extend_from_slice(&rows);
            self.formats.1.read_values(values, self.d, 0..TILE_TOKENS, &mut rows, self.d);
            v.extend_from_slice(&rows);
        }
        (k, v)
    }

    fn run(&self, kernels: &Kernels, seen: &[usize], cap: Option<f32>, scale: f32) -> Vec<f32> {
        let (mut q, mut state) = (Queries::default(), Softmax::default());
        q.prepare(self.q.chunks_exact(self.d), self.d, scale, self.formats.0);
        state.begin(&q);
        for (i, (keys, values)) in self.keys.iter().zip(&self.values).enumerate() {
            let to = |seen: usize| seen.saturating_sub(i * TILE_TOKENS).min(TILE_TOKENS) as u8;
            let visible: Vec<_> = seen.iter().map(|&seen| Visible { from: 0, to: to(seen) }).collect();
            let keys = Tile { format: self.formats.0, bytes: keys };
            let values = Tile { format: self.formats.1, bytes: values };
            kernels.attend_tile(&q, keys, values, &visible, cap, [&[]; 2], &mut state);
        }
        let len = Softmax::partial_len(self.d);
        let mut partial = vec![0.0; self.rows * len];
        state.write_partial(&mut partial);
        let mut out = vec![0.0; self.rows * self.d];
        for (out, partial) in out.chunks_exact_mut(self.d).zip(partial.chunks_exact(len)) {
            combine_partials(std::iter::once(partial), None, out);
        }
        out
    }
}

/// Largest error relative to the largest value that rounding of queries and weights may cost.
fn bound(keys: TileFormat, values: TileFormat) -> f64 {
    let of_keys = match keys {
        TileFormat::Int4 => 1e-2,
        TileFormat::Int8 => 1e-4,
        _ => 5e-6,
    };
    of_keys + if matches!(values, TileFormat::Int4 | TileFormat::Int8) { 2e-4 } else { 0.0 }
}

#[test]
fn every_format_attends_like_f64_over_its_decoded_values() {
    for keys in FORMATS {
        for values in FORMATS {
            for (d, rows, tiles) in [(64, 4, 3), (40, 7, 2), (128, 1, 2), (8, 2, 1)] {
                let case = Case::new((keys, values), d, rows, tiles);
                let seen: Vec<usize> = (0..rows).map(|r| tiles * TILE_TOKENS - 5 * r).collect();
                let cap = (rows == 7).then_some(3.0);
                let scale = 1.0 / (d as f32).sqrt();
                let out = case.run(crate::kernels(), &seen, cap, scale);
                let (k, v) = case.decoded();
                let expected = exact(&case.q, &k, &v, d, scale, cap, &seen);
                let largest = expected.iter().fold(0.0f64, |a, x| a.max(x.abs()));
                let error =
                    out.iter().zip(&expected).fold(0.0f64, |a, (x, e)| a.max((f64::from(*x) - e).abs()));
                assert!(
                    error <= bound(keys, values) * largest,
                    "{keys:?} {values:?} {d}: {:e}",
                    error / largest
                );
            }
        }
    }
}

/// Rounding of queries and weights costs a small part of what storing keys and values has cost already.
#[test]
fn arithmetic_errs_far_less_than_storage() {
    let root_mean_square = |a: &[f64], b: &[f64]| {
        (a.iter().zip(b).map(|(a, b)| (a - b).powi(2)).sum::<f64>() / a.len() as f64).sqrt()
    };
    for (format, least) in [(TileFormat::Int8, 20.0), (TileFormat::Int4, 10.0)] {
        let (d, rows, tiles) = (64, 8, 8);
        let case = Case::new((format, format), d, rows, tiles);
        let original =
            |seed: u32| (0..tiles).flat_map(|i| noise(TILE_TOKENS * d, seed + i as u32)).collect::<Vec<_>>();
        // Queries of a size that gives some tokens most of the weight.
        let seen = vec![tiles * TILE_TOKENS; rows];
        for scale in [0.125, 0.5] {
            let (k, v) = case.decoded();
            let stored = exact(&case.q, &k, &v, d, scale, None, &seen);
            let unstored = exact(&case.q, &original(7), &original(1007), d, scale, None, &seen);
            let out: Vec<f64> =
                case.run(crate::kernels(), &seen, None, scale).into_iter().map(f64::from).collect();
            let ratio = root_mean_square(&stored, &unstored) / root_mean_square(&out, &stored);
            assert!(ratio > least, "{format:?} {scale}: {ratio}");
        }
    }
}

#[test]
fn levels_have_the_same_bits() {
    for format in FORMATS {
        for d in [64, 80] {
            let case = Case::new((format, format), d, 6, 3);
            let seen = [192, 191, 150, 129, 100, 3];
            let all: Vec<_> = Isa::available().filter_map(Kernels::new).collect();
            let results = all.iter().map(|k| case.run(k, &seen, None, 0.2));
            let bits: Vec<Vec<u32>> =
                results.map(|out| out.iter().map(|x: &f32| x.to_bits()).collect()).collect();
            assert!(bits.windows(2).all(|w| w[0] == w[1]), "{format:?} {d}");
        }
    }
}

#[test]
fn a_query_has_the_same_bits_alone_and_among_others() {
    for format in FORMATS {
        let mut case = Case::new((format, format), 64, 7, 2);
        let seen: Vec<usize> = (0..7).map(|i| 128 - i).collect();
        let together = case.run(crate::kernels(), &seen, None, 0.125);
        let q = case.q.clone();
        for row in 0..7 {
            (case.q, case.rows) = (q[row * 64..][..64].to_vec(), 1);
            assert_eq!(case.run(crate::kernels(), &seen[row..=row], None, 0.125), together[row * 64..][..64]);
        }
    }
}

#[test]
fn stored_rows_read_back() {
    for format in FORMATS {
        for key in [true, false] {
            let (d, x) = (24, noise(TILE_TOKENS * 24, 3));
            let bytes = tile(format, &x, d, key);
            let mut back = vec![0.0; x.len()];
            match key {
                true => format.read_keys(&bytes, d, 0..TILE_TOKENS, &mut back, d),
                false => format.read_values(&bytes, d, 0..TILE_TOKENS, &mut back, d),
            }
            let step = match format {
                TileFormat::F32 => 0.0,
                TileFormat::F16 => 2e-3,
                TileFormat::Bf16 | TileFormat::Int8 => 2e-2,
                TileFormat::Fp8E4m3 => 0.15,
                TileFormat::Int4 => 1.1,
            };
            let error = x.iter().zip(&back).fold(0.0f32, |a, (x, b)| a.max((x - b).abs()));
            assert!(error <= step, "{format:?} {key}: {error}");
        }
    }
}
