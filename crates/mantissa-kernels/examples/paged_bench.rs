//! Speed of attention over the packed cache, compared with this machine's read bandwidth: `cargo run --release
//! --example paged_bench [threads [format]]`.
//!
//! One decode step reads the keys and values of 16 layers, 8 key/value heads with 4 query heads each, at several
//! depths. Every figure is the median of several steps, in processor time of the process divided by the threads if the
//! system reports it (Unix); formats take turns, so that load on the machine hits all.
#![allow(clippy::unwrap_used, clippy::expect_used)]

use mantissa_kernels::paged::{Queries, Softmax, TILE_TOKENS, Tile, TileFormat, TileRow, Visible};
use mantissa_kernels::{for_each_with, kernels};
use std::hint::black_box;
use std::time::Duration;

const LAYERS: usize = 16;
const KV_HEADS: usize = 8;
const GROUP: usize = 4;
/// Tiles of a piece: 512 tokens.
const PIECE: usize = 8;
const RUNS: usize = 9;
const FORMATS: [TileFormat; 5] =
    [TileFormat::F16, TileFormat::Bf16, TileFormat::Int8, TileFormat::Int4, TileFormat::Fp8E4m3];

fn main() {
    let threads = std::env::args().nth(1).map_or(2, |n| n.parse().expect("a number of threads"));
    let wanted = std::env::args().nth(2).unwrap_or_default();
    let formats: Vec<_> = FORMATS.into_iter().filter(|f| format!("{f:?}").contains(&wanted)).collect();
    println!("{}, {threads} threads; read bandwidth {:.1} GB/s", kernels().isa(), read_bandwidth(threads));
    for head_dim in [64, 128] {
        print!("head_dim {head_dim:3} in cache:");
        for format in &formats {
            let cache = Cache::new(*format, head_dim, TILE_TOKENS);
            print!("  {format:?} {:.2} ns per token and head", cache.in_cache());
        }
        println!();
        for depth in [1024, 4096, 8192, 16384] {
            let caches: Vec<Cache> =
                formats.iter().map(|&format| Cache::new(format, head_dim, depth)).collect();
            let mut times = vec![Vec::new(); formats.len()];
            let mut limits = Vec::new();
            for _ in 0..RUNS {
                for (cache, times) in caches.iter().zip(&mut times) {
                    times.push(cache.step(threads));
                }
                limits.push(read_bandwidth_of(&caches[0].bytes, threads));
            }
            let limit = median(&mut limits);
            print!("head_dim {head_dim:3} depth {depth:5} (read {limit:4.1} GB/s):");
            for (cache, times) in caches.iter().zip(&mut times) {
                let seconds = median(times);
                let rate = cache.bytes.len() as f64 / seconds * 1e-9;
                let share = 100.0 * rate / limit;
                print!("  {:?} {:6.0} tok/s {rate:4.1} GB/s {share:3.0} %", cache.format, 1.0 / seconds);
            }
            println!();
        }
    }
}

fn median(times: &mut [f64]) -> f64 {
    times.sort_by(f64::total_cmp);
    times[times.len() / 2]
}

/// Processor time of this process.
#[cfg(unix)]
fn now() -> Duration {
    let time = rustix::time::clock_gettime(rustix::time::ClockId::ProcessCPUTime);
    Duration::try_from(time).expect("processor time is not negative")
}

/// Time since the first call.
#[cfg(not(unix))]
fn now() -> Duration {
    use std::{sync::OnceLock, time::Instant};
    static START: OnceLock<Instant> = OnceLock::new();
    START.get_or_init(Instant::now).elapsed()
}

/// GB/s of a fresh buffer of 256 MiB.
fn read_bandwidth(threads: usize) -> f64 {
    let bytes = vec![1u8; 256 << 20];
    median(&mut (0..RUNS).map(|_| read_bandwidth_of(&bytes, threads)).collect::<Vec<_>>())
}

fn read_bandwidth_of(bytes: &[u8], threads: usize) -> f64 {
    let start = now();
    for_each_with(
        threads,
        || 0u64,
        bytes.chunks(1 << 20),
        |sum, chunk| {
            // Eight independent chains, which the compiler vectorizes.
            let mut sums = [0u64; 32];
            for line in chunk.as_chunks::<256>().0 {
                for (sum, word) in sums.iter_mut().zip(line.as_chunks::<8>().0) {
                    *sum = sum.wrapping_add(u64::from_le_bytes(*word));
                }
            }
            *sum = black_box(sums.iter().fold(*sum, |a, b| a.wrapping_add(*b)));
        },
    );
    bytes.len() as f64 / (now() - start).as_secs_f64() * threads as f64 * 1e-9
}

struct Cache {
    format: TileFormat,
    head_dim: usize,
    tiles: usize,
    /// `[layers, tiles, kv_heads, keys and values]`.
    bytes: Vec<u8>,
    queries: Vec<f32>,
}

impl Cache {
    fn new(format: TileFormat, head_dim: usize, depth: usize) -> Self {
        let (tiles, tile) = (depth / TILE_TOKENS, format.tile_bytes(head_dim));
        let mut pair = vec![0; 2 * tile];
        let (keys, values) = pair.split_at_mut(tile);
        for slot in 0..TILE_TOKENS {
            let x: Vec<f32> = (0..head_dim).map(|i| ((slot * 31 + i * 7) as f32 * 0.37).sin()).collect();
            let codes: Vec<i8> = x.iter().map(|x| (x * 7.0) as i8).collect();
            let whole: Vec<f32> = x.iter().map(|x| (x * 16.0).trunc()).collect();
            let row = match format {
                TileFormat::Int8 | TileFormat::Int4 => TileRow::Codes(&codes, 0.1, 0),
                TileFormat::Fp8E4m3 => TileRow::Fp8(&whole, 0.05),
                _ => TileRow::Floats(&x),
            };
            format.write_key(keys, slot, row);
            format.write_value(values, slot, row);
        }
        let bytes = pair.repeat(LAYERS * tiles * KV_HEADS);
        let queries = (0..KV_HEADS * GROUP * head_dim).map(|i| (i as f32 * 0.61).sin()).collect();
        Cache { format, head_dim, tiles, bytes, queries }
    }

    /// Nanoseconds per token and head with data in the first-level cache.
    fn in_cache(&self) -> f64 {
        let (mut q, mut state) = (Queries::default(), Softmax::default());
        let (d, runs) = (self.head_dim, 20_000);
        q.prepare(self.queries[..GROUP * d].chunks_exact(d), d, 1.0 / (d as f32).sqrt(), self.format);
        state.begin(&q);
        let visible = [Visible { from: 0, to: TILE_TOKENS as u8 }; GROUP];
        let (keys, values) = self.bytes.split_at(self.format.tile_bytes(d));
        let [keys, values] = [keys, values].map(|bytes| Tile { format: self.format, bytes });
        let start = now();
        for _ in 0..runs {
            kernels().attend_tile(&q, keys, values, &visible, None, [&[]; 2], &mut state);
        }
        (now() - start).as_secs_f64() * 1e9 / (runs * TILE_TOKENS) as f64
    }

    /// Seconds of one step.
    fn step(&self, threads: usize) -> f64 {
        let start = now();
        let pieces = self.tiles.div_ceil(PIECE);
        let layers = self.bytes.chunks_exact(self.bytes.len() / LAYERS);
        let work: Vec<_> = layers.flat_map(|layer| (0..pieces).map(move |piece| (layer, piece))).collect();
        let new = || (vec![(Queries::default(), Softmax::default()); KV_HEADS], Vec::new());
        for_each_with(threads, new, work, |(heads, out), (layer, piece)| {
            self.piece(layer, piece, heads, out);
        });
        (now() - start).as_secs_f64() / threads as f64
    }

    fn piece(&self, layer: &[u8], piece: usize, heads: &mut [(Queries, Softmax)], out: &mut Vec<f32>) {
        let (d, tile) = (self.head_dim, self.format.tile_bytes(self.head_dim));
        for (head, (q, state)) in heads.iter_mut().enumerate() {
            let rows = self.queries[head * GROUP * d..][..GROUP * d].chunks_exact(d);
            q.prepare(rows, d, 1.0 / (d as f32).sqrt(), self.format);
            state.begin(q);
        }
        let visible = [Visible { from: 0, to: TILE_TOKENS as u8 }; GROUP];
        let tiles = piece * PIECE * KV_HEADS..(self.tiles * KV_HEADS).min((piece + 1) * PIECE * KV_HEADS);
        let at = |i: usize| match tiles.contains(&i) {
            true => layer[i * 2 * tile..][..2 * tile].split_at(tile),
            false => (&[][..], &[][..]),
        };
        for i in tiles.clone() {
            let [keys, values] = <[_; 2]>::from(at(i)).map(|bytes| Tile { format: self.format, bytes });
            let (q, state) = &mut heads[i % KV_HEADS];
            kernels().attend_tile(q, keys, values, &visible, None, at(i + 1).into(), state);
        }
        out.resize(GROUP * Softmax::partial_len(d), 0.0);
        for (_, state) in heads {
            state.write_partial(out);
            black_box(&out);
        }
    }
}
