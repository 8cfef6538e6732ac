//! GPUs of NVIDIA for data centers and workstations.

use super::device::Unit;
use super::device::Unit::{Bf16, F16, F32, Fp4, Fp6, Fp8, Int4, Int8, Tf32};
use super::spec::{NVIDIA, Spec};

/// Rates of a whole Hopper GPU.
const HOPPER: &[(Unit, f64)] =
    &[(F32, 66.9), (Tf32, 494.7), (F16, 989.4), (Bf16, 989.4), (Fp8, 1978.9), (Int8, 1978.9)];

/// Every such GPU with figures, by generation.
pub(super) const ROWS: &[Spec] = &[
    Spec {
        name: "v100",
        title: "V100 SXM2 32 GB",
        sm: Some(70),
        memory: 32.0,
        bandwidth: 0.900,
        link: 150.0,
        rates: &[(F32, 15.7), (F16, 125.0)],
        note: "no bf16 and no matrix instructions of 8 bits",
        source: "NVIDIA V100 datasheet (2020)",
        ..NVIDIA
    },
    Spec {
        name: "t4",
        title: "T4",
        sm: Some(75),
        memory: 15.0,
        bandwidth: 0.320,
        link: 16.0,
        rates: &[(F32, 8.1), (F16, 65.0), (Int8, 130.0), (Int4, 260.0)],
        note: "no bf16; 16 GB less ECC; 70 W hold the clock below its peak",
        source: "NVIDIA T4 datasheet (2019)",
        ..NVIDIA
    },
    Spec {
        name: "a10",
        title: "A10",
        sm: Some(86),
        memory: 24.0,
        bandwidth: 0.600,
        link: 32.0,
        rates: &[(F32, 31.2), (Tf32, 62.5), (F16, 125.0), (Bf16, 125.0), (Int8, 250.0), (Int4, 500.0)],
        note: "no FP8; the A10G of clouds has about half of these rates",
        source: "NVIDIA A10 datasheet (2021)",
        ..NVIDIA
    },
    Spec {
        name: "a100",
        aliases: &["a100-80"],
        title: "A100 SXM 80 GB",
        sm: Some(80),
        memory: 80.0,
        bandwidth: 2.039,
        link: 300.0,
        rates: &[(F32, 19.5), (Tf32, 156.0), (F16, 312.0), (Bf16, 312.0), (Int8, 624.0), (Int4, 1248.0)],
        note: "no FP8; the last data-center GPU of NVIDIA with 4-bit integer instructions",
        source: "NVIDIA A100 datasheet (2021) and GA100 whitepaper, table 3",
        ..NVIDIA
    },
    Spec {
        name: "rtx-a6000",
        aliases: &["a6000"],
        title: "RTX A6000",
        sm: Some(86),
        memory: 48.0,
        bandwidth: 0.768,
        link: 56.25,
        rates: &[(F32, 38.7), (Tf32, 77.4), (F16, 154.8), (Bf16, 154.8), (Int8, 309.7), (Int4, 619.4)],
        note: "no FP8; the link is an NVLink bridge of two, without it PCIe 4 (32 GB/s)",
        source: "NVIDIA RTX A6000 datasheet (halved: it states sparse rates); llmq src/utilities/sol.cpp",
        ..NVIDIA
    },
    Spec {
        name: "l4",
        title: "L4",
        sm: Some(89),
        memory: 24.0,
        bandwidth: 0.300,
        link: 32.0,
        rates: &[
            (F32, 30.3),
            (Tf32, 60.0),
            (F16, 121.0),
            (Bf16, 121.0),
            (Fp8, 242.0),
            (Int8, 242.0),
            (Int4, 484.0),
        ],
        note: "72 W hold the clock below its peak",
        source: "NVIDIA L4 datasheet (2023, halved: it states sparse rates); llmq src/utilities/sol.cpp",
        ..NVIDIA
    },
    Spec {
        name: "l40s",
        title: "L40S",
        sm: Some(89),
        memory: 48.0,
        bandwidth: 0.864,
        link: 32.0,
        rates: &[
            (F32, 91.6),
            (Tf32, 183.0),
            (F16, 362.0),
            (Bf16, 362.0),
            (Fp8, 733.0),
            (Int8, 733.0),
            (Int4, 733.0),
        ],
        note: "llmq measured 230 TFLOP/s in bf16",
        source: "NVIDIA L40S datasheet (2023); llmq src/utilities/sol.cpp",
        ..NVIDIA
    },
    Spec {
        name: "h20",
        title: "H20",
        sm: Some(90),
        memory: 96.0,
        bandwidth: 4.0,
        link: 450.0,
        rates: &[(F32, 44.0), (Tf32, 74.0), (F16, 148.0), (Bf16, 148.0), (Fp8, 296.0), (Int8, 296.0)],
        note: "bandwidth of an H200, a seventh of its rates; a version with 141 GB exists",
        source: "NVIDIA publishes no data sheet; HGX H20 figures as its partners state them (96 GB, 4.0 TB/s, 148 TFLOP/s, NVLink 900 GB/s)",
        ..NVIDIA
    },
    Spec {
        name: "h100-pcie",
        title: "H100 PCIe",
        sm: Some(90),
        memory: 80.0,
        bandwidth: 2.0,
        link: 300.0,
        rates: &[(F32, 51.2), (Tf32, 378.0), (F16, 756.0), (Bf16, 756.0), (Fp8, 1513.0), (Int8, 1513.0)],
        note: "350 W; the link is an NVLink bridge of two, without it PCIe 5 (64 GB/s)",
        source: "NVIDIA H100 datasheet (halved: it states sparse rates) and product brief PB-11133-001 (over 2,000 GB/s); llmq src/utilities/sol.cpp",
        ..NVIDIA
    },
    Spec {
        name: "h100",
        aliases: &["h100-sxm"],
        title: "H100 SXM",
        sm: Some(90),
        memory: 80.0,
        bandwidth: 3.35,
        link: 450.0,
        rates: HOPPER,
        note: "1979 TFLOP/s in bf16, as often quoted, is with sparsity; sums of FP8 products keep about 14 bits",
        source: "NVIDIA H100 datasheet (halved: it states sparse rates); Hopper whitepaper, table 2",
        ..NVIDIA
    },
    Spec {
        name: "h200",
        title: "H200 SXM",
        sm: Some(90),
        memory: 141.0,
        bandwidth: 4.8,
        link: 450.0,
        rates: HOPPER,
        note: "the rates of an H100",
        source: "NVIDIA H200 datasheet (halved: it states sparse rates)",
        ..NVIDIA
    },
    Spec {
        name: "b200",
        title: "B200 (HGX)",
        sm: Some(100),
        memory: 180.0,
        bandwidth: 8.0,
        link: 900.0,
        rates: &[
            (F32, 75.0),
            (Tf32, 1125.0),
            (F16, 2250.0),
            (Bf16, 2250.0),
            (Fp8, 4500.0),
            (Fp6, 4500.0),
            (Fp4, 9000.0),
            (Int8, 4500.0),
        ],
        note: "20 PFLOP/s of FP4, as often quoted, is with sparsity; 7.67 TB/s by the driver's bus width",
        source: "NVIDIA HGX B200 datasheet; llmq src/utilities/sol.cpp",
        ..NVIDIA
    },
    Spec {
        name: "gb200",
        title: "GB200 (one of two GPUs)",
        sm: Some(100),
        memory: 186.0,
        bandwidth: 8.0,
        link: 900.0,
        rates: &[
            (F32, 80.0),
            (Tf32, 1250.0),
            (F16, 2500.0),
            (Bf16, 2500.0),
            (Fp8, 5000.0),
            (Fp6, 5000.0),
            (Fp4, 10_000.0),
            (Int8, 5000.0),
        ],
        source: "NVIDIA GB200 NVL72 datasheet (per superchip, halved for one GPU and for dense rates)",
        ..NVIDIA
    },
    Spec {
        name: "b300",
        title: "B300 (HGX)",
        sm: Some(103),
        memory: 268.59375,
        bandwidth: 8.0,
        link: 900.0,
        rates: &[
            (F32, 75.0),
            (Tf32, 1125.0),
            (F16, 2250.0),
            (Bf16, 2250.0),
            (Fp8, 4500.0),
            (Fp6, 4500.0),
            (Fp4, 13_500.0),
            (Int8, 150.0),
        ],
        note: "275,040 MiB by the driver, which NVIDIA names 288 GB (of 10^9 bytes) and 270 GB; int8 is a thirtieth of B200's, and slower than bf16",
        source: "NVIDIA HGX B300 table (108 PFLOP/s dense FP4; sparse int8 of eight, 2.4 POPS, is rounded to 2); memory and int8 of one: nvidia-smi; verda.com/blog/gb300-nvl72-architecture",
        ..NVIDIA
    },
    Spec {
        name: "gb300",
        title: "GB300 (one of four GPUs)",
        sm: Some(103),
        memory: 279.0,
        bandwidth: 8.0,
        link: 900.0,
        rates: &[
            (F32, 80.0),
            (Tf32, 1250.0),
            (F16, 2500.0),
            (Bf16, 2500.0),
            (Fp8, 5000.0),
            (Fp6, 5000.0),
            (Fp4, 15_000.0),
            (Int8, 165.0),
        ],
        note: "a ninth faster than a B300; int8 is slower than bf16",
        source: "NVIDIA GB300 NVL72 table (1080 PFLOP/s dense FP4, 360 PFLOP/s dense FP8, 20 TB for 72); of one: verda.com/blog/gb300-nvl72-architecture",
        ..NVIDIA
    },
];
