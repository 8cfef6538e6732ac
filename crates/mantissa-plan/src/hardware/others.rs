//! GPUs of AMD, and Intel's Gaudi.

use super::device::Maker;
use super::device::Unit::{Bf16, F16, F32, Fp4, Fp6, Fp8, Int4, Int8, Tf32};
use super::spec::{NVIDIA, Spec};

const AMD: Spec = Spec { maker: Maker::Amd, ..NVIDIA };

/// Every device of AMD and Intel with figures.
pub(super) const ROWS: &[Spec] = &[
    Spec {
        name: "mi250",
        title: "MI250",
        memory: 128.0,
        bandwidth: 3.277,
        link: 300.0,
        rates: &[(F32, 45.3), (F16, 362.1), (Bf16, 362.1), (Int8, 362.1)],
        note: "two dies that appear as two devices of 64 GB; no FP8",
        source: "AMD Instinct MI250 data sheet (6 links of 100 GB/s in both directions)",
        ..AMD
    },
    Spec {
        name: "mi300x",
        title: "MI300X",
        memory: 192.0,
        bandwidth: 5.3,
        link: 448.0,
        peers: 7,
        rates: &[(F32, 163.4), (Tf32, 653.7), (F16, 1307.4), (Bf16, 1307.4), (Fp8, 2614.9), (Int8, 2614.9)],
        note: "FP8 in the fnuz encodings: OCP's codes mean half as much, 240 is the largest of E4M3",
        source: "AMD Instinct MI300X data sheet (7 links of 128 GB/s in both directions, 896 GB/s in all); CDNA 3 whitepaper",
        ..AMD
    },
    Spec {
        name: "mi355x",
        title: "MI355X",
        memory: 288.0,
        bandwidth: 8.0,
        link: 537.6,
        peers: 7,
        rates: &[
            (F32, 157.3),
            (F16, 2516.6),
            (Bf16, 2516.6),
            (Fp8, 5033.2),
            (Fp6, 10_066.3),
            (Fp4, 10_066.3),
            (Int8, 5033.2),
        ],
        note: "scales of MX blocks in hardware, not NVFP4's; FP8 in OCP's encodings",
        source: "AMD Instinct MI355X data sheet (7 links of 153.6 GB/s in both directions, 1075 GB/s in all); CDNA 4 whitepaper",
        ..AMD
    },
    Spec {
        name: "rx7900xtx",
        aliases: &["7900xtx"],
        title: "Radeon RX 7900 XTX",
        memory: 24.0,
        bandwidth: 0.960,
        link: 32.0,
        rates: &[(F32, 61.4), (F16, 122.8), (Bf16, 122.8), (Int8, 122.8), (Int4, 245.6)],
        note: "matrix instructions (WMMA) of f16, bf16 and int8 at one rate; no FP8",
        source: "AMD product page (24 GB, 960 GB/s, 61.4 TFLOP/s f32, 122.8 f16); rates of WMMA: RDNA 3 instruction set, 512 operations per clock and compute unit",
        ..AMD
    },
    Spec {
        name: "gaudi3",
        title: "Gaudi 3 (HL-325L)",
        maker: Maker::Intel,
        memory: 128.0,
        bandwidth: 3.7,
        link: 525.0,
        rates: &[(F32, 14.3), (Bf16, 1678.0), (F16, 1678.0), (Fp8, 1678.0)],
        note: "FP8 has the rate of bf16; the whitepaper of 2024 states 1835 TFLOP/s for both; int8 is not documented",
        source: "Intel Gaudi 3 product brief (HL-325L) and whitepaper",
        ..NVIDIA
    },
];
