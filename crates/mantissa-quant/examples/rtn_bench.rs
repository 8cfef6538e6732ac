//! Speed of RTN with error statistics on one thread, in millions of weights per second. Runs the given schemes, or a
//! list that covers every fast path.
//!
//!     cargo run --release -p mantissa-quant --example rtn_bench [scheme ...]

use std::hint::black_box;
use std::time::Instant;

use mantissa_num::Scheme;
use mantissa_quant::{ErrorStats, rtn};

const ROWS: usize = 512;
const COLS: usize = 2048;
const RUNS: usize = 5;
/// Calls per run, because the system counts in milliseconds.
const CALLS: u32 = 16;
const SCHEMES: [&str; 22] = [
    "int4-g128",
    "int4-g32",
    "int4-g128-asym",
    "int4-g128:torchao",
    "int4-g128:restricted",
    "int8-channel",
    "int8-tensor",
    "int8-t128x128",
    "fp8-e4m3-channel",
    "fp8-e4m3-tensor",
    "fp8-e4m3-t128x128",
    "fp8-e5m2-channel",
    "fp8-e4m3",
    "bf16",
    "f16",
    "mxfp8-e4m3:ct",
    "mxfp6-e2m3",
    "mxfp4:ct",
    "mxint8",
    "nvfp4",
    "nvfp4:te",
    "nf4",
];

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let named: Vec<String> = std::env::args().skip(1).collect();
    let all = if named.is_empty() { SCHEMES.map(str::to_owned).to_vec() } else { named };
    let w: Vec<f32> = (0..ROWS * COLS).map(|i| ((i as f32) * 0.731).sin() * 0.02).collect();
    println!("{:<20} {:>12} {:>12}", "scheme", "Mweights/s", "of it stats");
    for text in all {
        let scheme: Scheme = text.parse()?;
        let (q, _) = rtn::quantize(&scheme, &w, ROWS, COLS, None, 1)?;
        let whole = median(|| rtn::quantize(&scheme, &w, ROWS, COLS, None, 1));
        let stats = median(|| ErrorStats::of(&w, &q));
        println!("{text:<20} {:>12.0} {:>11.0}%", w.len() as f64 / whole / 1e6, 100.0 * stats / whole);
    }
    Ok(())
}

/// Returns the median seconds of a call: CPU time of this process if the system reports it, so that other load matters
/// little.
fn median<T>(mut f: impl FnMut() -> T) -> f64 {
    let mut seconds: Vec<f64> = (0..RUNS)
        .map(|_| {
            let (start, busy) = (Instant::now(), cpu_nanoseconds());
            for _ in 0..CALLS {
                black_box(f());
            }
            match (busy, cpu_nanoseconds()) {
                (Some(before), Some(after)) if after > before => (after - before) as f64 * 1e-9,
                _ => start.elapsed().as_secs_f64(),
            }
        })
        .collect();
    seconds.sort_by(f64::total_cmp);
    seconds[RUNS / 2] / f64::from(CALLS)
}

fn cpu_nanoseconds() -> Option<u64> {
    let text = std::fs::read_to_string("/proc/self/schedstat").ok()?;
    text.split(' ').next()?.parse().ok()
}
