//! Cost of handing work to threads: spawned for each call, and from the process's pool. `cargo run --release --example
//! dispatch_cost [threads]`. Figures are medians in microseconds, over the
//! time of one piece of work, for a call with one piece per thread: nothing to do, and 20 us each.
#![allow(clippy::unwrap_used, clippy::expect_used)]

use std::thread;
use std::time::{Duration, Instant};

use mantissa_kernels::{available_threads, for_each_range};

const RUNS: usize = 2001;

fn main() {
    let threads = std::env::args().nth(1).map_or_else(available_threads, |n| n.parse().expect("a number"));
    println!("{threads} threads; microseconds per call");
    for (name, pause) in [
        ("back to back", Duration::ZERO),
        ("after 100 us", Duration::from_micros(100)),
        ("after 2 ms", Duration::from_millis(2)),
    ] {
        for piece in [Duration::ZERO, Duration::from_micros(20)] {
            let spawned = median(pause, || {
                thread::scope(|scope| {
                    (1..threads).for_each(|_| _ = scope.spawn(|| wait(piece)));
                    wait(piece);
                });
            });
            let pooled = median(pause, || {
                for_each_range(threads, threads, 1, |_| wait(piece));
            });
            let [spawned, pooled] = [spawned, pooled].map(|time| time - piece.as_secs_f64() * 1e6);
            let micros = piece.as_micros();
            println!("{name:>14}, pieces of {micros:2} us: spawn {spawned:8.2}  pool {pooled:8.2}");
        }
    }
}

/// Works for `time`.
fn wait(time: Duration) {
    let begin = Instant::now();
    while begin.elapsed() < time {
        std::hint::spin_loop();
    }
}

/// Median time of `call`, each after a pause of the caller.
fn median(pause: Duration, call: impl Fn()) -> f64 {
    let runs = if pause > Duration::from_millis(1) { RUNS / 10 } else { RUNS };
    let mut times: Vec<f64> = (0..runs)
        .map(|_| {
            wait(pause);
            let start = Instant::now();
            call();
            start.elapsed().as_secs_f64() * 1e6
        })
        .collect();
    times.sort_by(f64::total_cmp);
    times[times.len() / 2]
}
