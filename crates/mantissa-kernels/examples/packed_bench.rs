//! Times the packed products on data larger than the caches: decoding in GB/s of weights beside the read bandwidth,
//! prefill in Gop/s.
//!
//! cargo run --release -p mantissa-kernels --example packed_bench [threads [rows [formats [decode]]]]
//!
//! `rows` of 256 stay in the second-level cache; `formats` are names of the first column, separated by commas; `decode`
//! leaves out the prefill.
#![allow(clippy::unwrap_used)]

use mantissa_kernels::packed::{
    Activations, Grid, PackedLevel, PanelFormat, PanelJob, Panels, ScaleCode, multiply,
};
use mantissa_kernels::{PeakLoop, ReadProbe, kernels};

/// Seconds. With one thread, of its processor time: other work on the machine counts less.
fn now() -> f64 {
    let one = std::env::args().nth(1).is_some_and(|n| n == "1");
    let clock = if one { rustix::time::ClockId::ThreadCPUTime } else { rustix::time::ClockId::Monotonic };
    let time = rustix::time::clock_gettime(clock);
    time.tv_sec as f64 + time.tv_nsec as f64 * 1e-9
}

fn best(reps: usize, mut f: impl FnMut()) -> f64 {
    f();
    (0..reps)
        .map(|_| {
            let start = now();
            f();
            now() - start
        })
        .fold(f64::MAX, f64::min)
}

fn main() {
    let threads: usize = std::env::args().nth(1).map_or(2, |n| n.parse().unwrap());
    println!("level {}, {threads} threads", PackedLevel::best().name());
    let memory = ReadProbe::new().unwrap();
    let mut bytes = 0.0;
    let read = best(8, || bytes = memory.run(threads));
    println!("read {:.1} GB/s", bytes / read / 1e9);
    for (name, peak) in [
        ("int8", PeakLoop::int8(kernels())),
        ("bf16", PeakLoop::bf16(kernels())),
        ("f32", PeakLoop::f32(kernels())),
    ] {
        let Some(peak) = peak else { continue };
        let mut operations = 0.0;
        let seconds = best(5, || operations = peak.run(threads));
        println!("{name} {:.0} Gop/s", operations / seconds / 1e9);
    }
    for (name, group, unit) in [("16", 16, 16), ("32", 32, 32), ("a token", usize::MAX, 2048)] {
        let (tokens, cols) = (512, 2048);
        let x: Vec<f32> = (0..tokens * cols).map(|i| (i as f32 * 0.37).sin()).collect();
        let mut quantized = Activations::default();
        let seconds = best(9, || quantized.quantize(&x, cols, Grid { group, ..Grid::BLOCKS }, unit, threads));
        println!(
            "quantization of activations by {name}: {:.1} values/ns",
            (tokens * cols) as f64 / seconds / 1e9
        );
    }
    let plain = PanelFormat {
        bits: 4,
        levels: None,
        zero: 8,
        group: 32,
        unit: 32,
        scales: ScaleCode::F16,
        mins: ScaleCode::Absent,
        factor: 1.0,
    };
    let table = Some([1u8; 16]);
    let formats = [
        ("q4_0", plain.clone()),
        (
            "q4_k",
            PanelFormat { zero: 0, scales: ScaleCode::Integer, mins: ScaleCode::Integer, ..plain.clone() },
        ),
        ("int4-g128", PanelFormat { group: 128, unit: 128, ..plain.clone() }),
        ("int4-g128, activations by 32", PanelFormat { group: 128, ..plain.clone() }),
        (
            "nvfp4",
            PanelFormat {
                levels: table,
                zero: 128,
                group: 16,
                unit: 16,
                scales: ScaleCode::E4m3,
                ..plain.clone()
            },
        ),
        ("mxfp4", PanelFormat { levels: table, zero: 128, scales: ScaleCode::Exponent, ..plain.clone() }),
        (
            "q2_k",
            PanelFormat {
                bits: 2,
                zero: 0,
                group: 16,
                unit: 16,
                scales: ScaleCode::Integer,
                mins: ScaleCode::Integer,
                ..plain.clone()
            },
        ),
        ("int3-g128", PanelFormat { bits: 3, zero: 4, group: 128, unit: 128, ..plain.clone() }),
        ("q5_0", PanelFormat { bits: 5, zero: 16, ..plain.clone() }),
        (
            "q6_k",
            PanelFormat {
                bits: 6,
                zero: 32,
                group: 16,
                unit: 16,
                scales: ScaleCode::Integer,
                ..plain.clone()
            },
        ),
        ("q8_0", PanelFormat { bits: 8, zero: 128, ..plain.clone() }),
        (
            "int8-channel + int8-token",
            PanelFormat { bits: 8, zero: 128, group: 2048, unit: 2048, scales: ScaleCode::F32, ..plain },
        ),
    ];
    let rows = std::env::args().nth(2).map_or(8192 * 12, |n| n.parse().unwrap());
    let cols = 2048;
    let only = std::env::args().nth(3);
    for (name, format) in formats {
        if only.as_ref().is_some_and(|only| !only.split(',').any(|o| o == name)) {
            continue;
        }
        let unit = format.unit;
        let panels = Panels::pack(format, rows, cols, threads, |r, row| {
            row.codes.iter_mut().enumerate().for_each(|(i, c)| *c = ((i * 7 + r) % 4) as u8);
            row.scales.fill(1.0);
        })
        .unwrap();
        print!("{name:30} {:4} MB", panels.bytes() >> 20);
        for tokens in [1, 4, 8] {
            let x: Vec<f32> = (0..tokens * cols).map(|i| (i as f32 * 0.37).sin()).collect();
            let mut quantized = Activations::default();
            quantized.quantize(&x, cols, Grid { group: unit.max(32), ..Grid::BLOCKS }, unit, threads);
            let mut out = vec![0.0; tokens * rows];
            let seconds = best(5, || {
                multiply(
                    [PanelJob { panels: &panels, x: &quantized, out: &mut out, accumulate: false }]
                        .into_iter(),
                    threads,
                );
            });
            print!("  {tokens}: {:5.1} GB/s", panels.bytes() as f64 / seconds / 1e9);
        }
        let small = Panels::pack(panels.format().clone(), 4096, cols, threads, |_, row| row.scales.fill(1.0))
            .unwrap();
        for tokens in [16, 64, 512].into_iter().filter(|_| std::env::args().nth(4).is_none()) {
            let x: Vec<f32> = (0..tokens * cols).map(|i| (i as f32 * 0.37).sin()).collect();
            let mut quantized = Activations::default();
            let mut out = vec![0.0; tokens * 4096];
            let seconds = best(5, || {
                quantized.quantize(&x, cols, Grid { group: unit.max(32), ..Grid::BLOCKS }, unit, threads);
                multiply(
                    [PanelJob { panels: &small, x: &quantized, out: &mut out, accumulate: false }]
                        .into_iter(),
                    threads,
                );
            });
            print!("  {tokens}: {:5.0} Gop/s", 2.0 * (tokens * 4096 * cols) as f64 / seconds / 1e9);
        }
        println!();
    }
}
