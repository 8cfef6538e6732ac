//! Macs with Apple silicon, each with the largest memory it is sold with; `--memory` stands for a smaller one.

use super::device::Maker;
use super::device::Unit::{F16, F32};
use super::spec::{NVIDIA, Spec};

const APPLE: Spec = Spec {
    maker: Maker::Apple,
    note: "the GPU may use 3/4 of the memory, 2/3 below 36 GB (Metal's recommended working set)",
    ..NVIDIA
};

const APPLE_SOURCE: &str = "memory and bandwidth: Apple newsroom and technical specifications; Apple states no rates since M2: those of f32 are cores × 128 lanes × 2 × clock, f16 alike";

const M5_SOURCE: &str =
    "memory and bandwidth: Apple newsroom 2025-10-15 (M5) and 2026-03-03 (M5 Pro, M5 Max)";

/// Note on M5.
const M5: &str = "f16 by the matrix units of its cores: four times M4's, as Apple states their peak; f32 as M4's; the GPU may use 3/4 of the memory, 2/3 below 36 GB";

/// Every Mac with figures, by generation.
pub(super) const ROWS: &[Spec] = &[
    Spec {
        name: "m1",
        title: "Apple M1, 16 GB",
        memory: 16.0,
        bandwidth: 0.068,
        rates: &[(F32, 2.6), (F16, 2.6)],
        source: "Apple newsroom 2020-11-10 (2.6 TFLOP/s); 68.3 GB/s: 128 bits of LPDDR4X-4266",
        ..APPLE
    },
    Spec {
        name: "m1-pro",
        title: "Apple M1 Pro, 32 GB",
        memory: 32.0,
        bandwidth: 0.200,
        rates: &[(F32, 5.2), (F16, 5.2)],
        source: "Apple newsroom 2021-10-18 (200 GB/s, 5.2 TFLOP/s)",
        ..APPLE
    },
    Spec {
        name: "m1-max",
        title: "Apple M1 Max, 64 GB",
        memory: 64.0,
        bandwidth: 0.400,
        rates: &[(F32, 10.4), (F16, 10.4)],
        source: "Apple newsroom 2021-10-18 (400 GB/s, 10.4 TFLOP/s)",
        ..APPLE
    },
    Spec {
        name: "m1-ultra",
        title: "Apple M1 Ultra, 128 GB",
        memory: 128.0,
        bandwidth: 0.800,
        rates: &[(F32, 20.8), (F16, 20.8)],
        source: "Apple newsroom 2022-03-08 (800 GB/s, twice M1 Max)",
        ..APPLE
    },
    Spec {
        name: "m2",
        title: "Apple M2, 24 GB",
        memory: 24.0,
        bandwidth: 0.100,
        rates: &[(F32, 3.6), (F16, 3.6)],
        source: "Apple newsroom 2022-06-06 (100 GB/s, 3.6 TFLOP/s)",
        ..APPLE
    },
    Spec {
        name: "m2-pro",
        title: "Apple M2 Pro, 32 GB",
        memory: 32.0,
        bandwidth: 0.200,
        rates: &[(F32, 6.8), (F16, 6.8)],
        source: "Apple newsroom 2023-01-17 (200 GB/s); 6.8 TFLOP/s: 19 cores at 1.4 GHz",
        ..APPLE
    },
    Spec {
        name: "m2-max",
        title: "Apple M2 Max, 96 GB",
        memory: 96.0,
        bandwidth: 0.400,
        rates: &[(F32, 13.6), (F16, 13.6)],
        source: "Apple newsroom 2023-01-17 (400 GB/s); 13.6 TFLOP/s: 38 cores at 1.4 GHz",
        ..APPLE
    },
    Spec {
        name: "m2-ultra",
        title: "Apple M2 Ultra, 192 GB",
        memory: 192.0,
        bandwidth: 0.800,
        rates: &[(F32, 27.2), (F16, 27.2)],
        source: "Apple newsroom 2023-06-05 (800 GB/s); 27.2 TFLOP/s: 76 cores at 1.4 GHz",
        ..APPLE
    },
    Spec {
        name: "m3",
        title: "Apple M3, 24 GB",
        memory: 24.0,
        bandwidth: 0.100,
        rates: &[(F32, 3.6), (F16, 3.6)],
        source: APPLE_SOURCE,
        ..APPLE
    },
    Spec {
        name: "m3-pro",
        title: "Apple M3 Pro, 36 GB",
        memory: 36.0,
        bandwidth: 0.150,
        rates: &[(F32, 6.4), (F16, 6.4)],
        source: APPLE_SOURCE,
        ..APPLE
    },
    Spec {
        name: "m3-max-30core",
        title: "Apple M3 Max, 30 cores, 96 GB",
        memory: 96.0,
        bandwidth: 0.300,
        rates: &[(F32, 10.7), (F16, 10.7)],
        source: APPLE_SOURCE,
        ..APPLE
    },
    Spec {
        name: "m3-max",
        title: "Apple M3 Max, 40 cores, 128 GB",
        memory: 128.0,
        bandwidth: 0.400,
        rates: &[(F32, 14.3), (F16, 14.3)],
        source: APPLE_SOURCE,
        ..APPLE
    },
    Spec {
        name: "m3-ultra",
        title: "Apple M3 Ultra, 512 GB",
        memory: 512.0,
        bandwidth: 0.819,
        rates: &[(F32, 28.2), (F16, 28.2)],
        source: APPLE_SOURCE,
        ..APPLE
    },
    Spec {
        name: "m4",
        title: "Apple M4, 32 GB",
        memory: 32.0,
        bandwidth: 0.120,
        rates: &[(F32, 4.1), (F16, 4.1)],
        source: APPLE_SOURCE,
        ..APPLE
    },
    Spec {
        name: "m4-pro",
        title: "Apple M4 Pro, 64 GB",
        memory: 64.0,
        bandwidth: 0.273,
        rates: &[(F32, 8.2), (F16, 8.2)],
        source: APPLE_SOURCE,
        ..APPLE
    },
    Spec {
        name: "m4-max-32core",
        title: "Apple M4 Max, 32 cores, 36 GB",
        memory: 36.0,
        bandwidth: 0.410,
        rates: &[(F32, 13.1), (F16, 13.1)],
        source: APPLE_SOURCE,
        ..APPLE
    },
    Spec {
        name: "m4-max",
        title: "Apple M4 Max, 128 GB",
        memory: 128.0,
        bandwidth: 0.546,
        rates: &[(F32, 16.4), (F16, 16.4)],
        source: APPLE_SOURCE,
        ..APPLE
    },
    Spec {
        name: "m5",
        title: "Apple M5, 32 GB",
        memory: 32.0,
        bandwidth: 0.153,
        rates: &[(F32, 4.1), (F16, 16.4)],
        note: M5,
        source: M5_SOURCE,
        ..APPLE
    },
    Spec {
        name: "m5-pro",
        title: "Apple M5 Pro, 64 GB",
        memory: 64.0,
        bandwidth: 0.307,
        rates: &[(F32, 8.2), (F16, 32.8)],
        note: M5,
        source: M5_SOURCE,
        ..APPLE
    },
    Spec {
        name: "m5-max",
        title: "Apple M5 Max, 128 GB",
        memory: 128.0,
        bandwidth: 0.614,
        rates: &[(F32, 16.4), (F16, 65.6)],
        note: M5,
        source: M5_SOURCE,
        ..APPLE
    },
];
