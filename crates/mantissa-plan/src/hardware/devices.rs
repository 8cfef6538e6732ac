//! Devices with their figures. Rates are dense (without sparsity), in TFLOP/s or TOP/s; memory in GiB, which vendors
//! name GB; bandwidths in TB/s and, of links, in GB/s for each direction.

use std::borrow::Cow;

use mantissa_num::nearest_list;

use super::device::{Device, KernelCost, Maker, Measured, Shares, Unit};
use Unit::{Bf16, F16, F32, Fp4, Fp6, Fp8, Int4, Int8, Tf32};

/// Device as published.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Spec {
    /// Name for `--hardware`.
    pub name: &'static str,
    /// Other names that people type.
    pub aliases: &'static [&'static str],
    /// Name in tables.
    pub title: &'static str,
    /// Kind.
    pub maker: Maker,
    /// NVIDIA's compute capability times ten.
    pub sm: Option<u32>,
    /// Memory, GiB.
    pub memory: f64,
    /// Read bandwidth, TB/s.
    pub bandwidth: f64,
    /// Bandwidth to all other devices of a node together, GB/s in each direction.
    pub link: f64,
    /// Other devices to which parts of that bandwidth lead alone; 0 where all of it leads anywhere (a switch, one link).
    pub peers: u64,
    /// Dense rates, 10^12 operations/s.
    pub rates: &'static [(Unit, f64)],
    /// Caveat about the figures.
    pub note: &'static str,
    /// Source of the figures.
    pub source: &'static str,
}

/// Shares of GPUs. Measured on an H200 with PyTorch's kernels in a CUDA graph (bench/gpu.py,
/// bench/record/2026-11-26-gpu.md): bf16 decoding .65 to .72 of the bandwidth, prefill .62 to .67 of the peak; FP8
/// prefill .44 to .47 of its peak. Published: llmq 230 of 362 TFLOP/s on an L40S in training (training.md, section 4);
/// Marlin about 90 % of the bandwidth with 4-bit weights (Frantar et al. 2024, arXiv 2408.11743, fig. 1).
const GPU_SHARES: Shares = Shares {
    bandwidth: [0.5, 0.7, 0.88],
    compute: [0.4, 0.6, 0.78],
    source: "bf16 measured on an H200 with PyTorch (.65 to .72 of the bandwidth, .62 to .67 of the peak, 2026-11-26); assumed for other GPUs and kernels",
};

/// Shares of Apple's GPUs.
const APPLE_SHARES: Shares =
    Shares { bandwidth: [0.5, 0.68, 0.85], compute: [0.35, 0.5, 0.7], source: "assumed; not measured by us" };

/// Shares of the bandwidth that mantissa's kernels reach; shares of the peak with formats that [`CPU_KERNELS`] does not
/// list.
const CPU_SHARES: Shares = Shares {
    bandwidth: [0.75, 0.87, 1.0],
    compute: [0.4, 0.5, 0.6],
    source: "fitted on an idle AMD EPYC (Zen 4), 2026-11-26: docs/results/plan.md",
};

/// Costs of mantissa's kernels on AVX-512 with VNNI and BF16, from docs/results/speed.md and docs/results/plan.md.
const CPU_KERNELS: &[KernelCost] = &[
    KernelCost { scheme: "bf16", fixed: 18.7, token: 0.3, prompt: 3.3 },
    KernelCost { scheme: "fp8", fixed: 9.6, token: 1.5, prompt: 3.5 },
    KernelCost { scheme: "q8_0", fixed: 15.9, token: 3.3, prompt: 3.5 },
    KernelCost { scheme: "q6_k", fixed: 22.0, token: 4.2, prompt: 4.1 },
    KernelCost { scheme: "q5_k", fixed: 20.0, token: 4.2, prompt: 4.0 },
    KernelCost { scheme: "q4_k", fixed: 17.8, token: 4.3, prompt: 3.9 },
    KernelCost { scheme: "int8", fixed: 21.0, token: 2.7, prompt: 3.4 },
    KernelCost { scheme: "int4", fixed: 6.2, token: 3.9, prompt: 3.7 },
    KernelCost { scheme: "nf4", fixed: 7.0, token: 3.2, prompt: 3.5 },
];

/// Share of the bf16 peak that mantissa's attention kernels reach on a processor.
pub const CPU_ATTENTION: f64 = 0.18;

const NVIDIA: Spec = Spec {
    name: "",
    aliases: &[],
    title: "",
    maker: Maker::Nvidia,
    sm: None,
    memory: 0.0,
    bandwidth: 0.0,
    link: 0.0,
    peers: 0,
    rates: &[],
    note: "",
    source: "",
};

const AMD: Spec = Spec { maker: Maker::Amd, ..NVIDIA };
const APPLE: Spec = Spec { maker: Maker::Apple, ..NVIDIA };

const HOPPER: &[(Unit, f64)] =
    &[(F32, 66.9), (Tf32, 494.7), (F16, 989.4), (Bf16, 989.4), (Fp8, 1978.9), (Int8, 1978.9)];
const APPLE_SOURCE: &str = "memory and bandwidth: Apple newsroom and technical specifications; Apple states no rates since M2: those of f32 are cores × 128 lanes × 2 × clock, f16 alike";

/// Every device.
pub const DEVICES: [Spec; 22] = [
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
        name: "rtx3090",
        title: "RTX 3090",
        sm: Some(86),
        memory: 24.0,
        bandwidth: 0.936,
        link: 56.25,
        rates: &[(F32, 35.6), (Tf32, 35.6), (F16, 71.0), (Bf16, 71.0), (Int8, 284.0), (Int4, 568.0)],
        note: "f16 with sums in f32; twice as fast with sums in f16; the link is an NVLink bridge of two, without it PCIe 4 (32 GB/s)",
        source: "NVIDIA GA102 whitepaper v2, table 9; third-generation NVLink, 4 links: 112.5 GB/s in both directions",
        ..NVIDIA
    },
    Spec {
        name: "rtx4090",
        title: "RTX 4090",
        sm: Some(89),
        memory: 24.0,
        bandwidth: 1.008,
        link: 32.0,
        rates: &[
            (F32, 82.6),
            (Tf32, 82.6),
            (F16, 165.2),
            (Bf16, 165.2),
            (Fp8, 330.3),
            (Int8, 660.6),
            (Int4, 1321.2),
        ],
        note: "FP8 with sums in f32; int8 is twice as fast",
        source: "NVIDIA Ada GPU architecture whitepaper v2, appendix A; llmq src/utilities/sol.cpp",
        ..NVIDIA
    },
    Spec {
        name: "rtx5090",
        title: "RTX 5090",
        sm: Some(120),
        memory: 32.0,
        bandwidth: 1.792,
        link: 64.0,
        rates: &[
            (F32, 104.8),
            (Tf32, 104.8),
            (F16, 209.5),
            (Bf16, 209.5),
            (Fp8, 419.0),
            (Fp6, 419.0),
            (Fp4, 1676.0),
            (Int8, 838.0),
        ],
        note: "FP8 with sums in f32; int8 is twice as fast",
        source: "NVIDIA RTX Blackwell GPU architecture whitepaper v1.1, appendix A; llmq src/utilities/sol.cpp",
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
    Spec {
        name: "m1-max",
        title: "Apple M1 Max, 64 GB",
        memory: 64.0,
        bandwidth: 0.400,
        rates: &[(F32, 10.4), (F16, 10.4)],
        note: "the GPU may use about three quarters of the memory",
        source: "Apple newsroom 2021-10-18 (400 GB/s, 10.4 TFLOP/s)",
        ..APPLE
    },
    Spec {
        name: "m2-ultra",
        title: "Apple M2 Ultra, 192 GB",
        memory: 192.0,
        bandwidth: 0.800,
        rates: &[(F32, 27.2), (F16, 27.2)],
        note: "the GPU may use about three quarters of the memory",
        source: "Apple newsroom 2023-06-05 (800 GB/s); 27.2 TFLOP/s: 76 cores at 1.4 GHz",
        ..APPLE
    },
    Spec {
        name: "m3-ultra",
        title: "Apple M3 Ultra, 512 GB",
        memory: 512.0,
        bandwidth: 0.819,
        rates: &[(F32, 28.2), (F16, 28.2)],
        note: "the GPU may use about three quarters of the memory",
        source: APPLE_SOURCE,
        ..APPLE
    },
    Spec {
        name: "m4-max",
        title: "Apple M4 Max, 128 GB",
        memory: 128.0,
        bandwidth: 0.546,
        rates: &[(F32, 16.4), (F16, 16.4)],
        note: "the GPU may use about three quarters of the memory",
        source: APPLE_SOURCE,
        ..APPLE
    },
    Spec {
        name: "m4-pro",
        title: "Apple M4 Pro, 64 GB",
        memory: 64.0,
        bandwidth: 0.273,
        rates: &[(F32, 8.2), (F16, 8.2)],
        note: "the GPU may use about three quarters of the memory",
        source: APPLE_SOURCE,
        ..APPLE
    },
];

/// Bytes that driver, context, graphs and libraries of a serving engine take on a GPU.
const GPU_RESERVED: f64 = 0.8e9;

impl Spec {
    /// Returns the device.
    pub fn device(&self) -> Device {
        let apple = self.maker == Maker::Apple;
        let blackwell = self.sm.is_some_and(|sm| sm >= 100);
        Device {
            name: Cow::Borrowed(self.name),
            title: Cow::Borrowed(self.title),
            maker: self.maker,
            sm: self.sm,
            memory: self.memory * f64::from(1 << 30),
            usable: if apple { 0.75 } else { 1.0 },
            reserved: if apple { 0.0 } else { GPU_RESERVED },
            bandwidth: self.bandwidth * 1e12,
            link: self.link * 1e9,
            peers: self.peers,
            rates: self.rates.iter().map(|(unit, tera)| (*unit, tera * 1e12)).collect(),
            block_scales: blackwell || self.name == "mi355x",
            nvfp4: blackwell,
            fnuz: self.name == "mi300x",
            shares: if apple { APPLE_SHARES } else { GPU_SHARES },
            kernels: &[],
            note: self.note,
            source: Cow::Borrowed(self.source),
        }
    }
}

/// A name that no device has.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("--hardware: expected {known}, this, or a JSON report of mantissa bench; got \"{found}\"")]
pub struct HardwareError {
    found: String,
    known: String,
}

impl Device {
    /// Finds a device by name, in any case, with or without hyphens and `rtx`.
    ///
    /// # Errors
    /// [`HardwareError`] with the nearest names.
    pub fn named(name: &str) -> Result<Self, HardwareError> {
        let plain = |name: &str| name.to_lowercase().replace(['-', '_', ' '], "").replace("rtx", "");
        let wanted = plain(name);
        let found = DEVICES.iter().find(|spec| {
            plain(spec.name) == wanted || spec.aliases.iter().any(|alias| plain(alias) == wanted)
        });
        found.map(Spec::device).ok_or_else(|| HardwareError {
            found: name.to_owned(),
            known: nearest_list(name, DEVICES.iter().map(|spec| spec.name)),
        })
    }

    /// Describes a processor whose limits were measured.
    pub fn measured(name: &str, memory: u64, limits: &Measured, source: String) -> Self {
        let rate = |unit, giga: Option<f64>| giga.map(|giga| (unit, giga * 1e9));
        let rates = [
            rate(Unit::F32, limits.machine_f32_gflops),
            rate(Unit::Bf16, limits.machine_bf16_gflops),
            rate(Unit::Int8, limits.machine_int8_gops),
        ];
        Device {
            name: Cow::Borrowed("this"),
            title: Cow::Owned(format!("{name}, {} threads, {}", limits.threads, limits.level)),
            maker: Maker::Cpu,
            sm: None,
            memory: memory as f64,
            usable: 0.9,
            reserved: 64e6,
            bandwidth: limits.machine_read_gb_per_s * 1e9,
            link: 0.0,
            peers: 0,
            rates: rates.into_iter().flatten().collect(),
            block_scales: false,
            nvfp4: false,
            fnuz: false,
            shares: CPU_SHARES,
            kernels: CPU_KERNELS,
            note: "",
            source: Cow::Owned(source),
        }
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    #[test]
    fn every_row_has_a_source_and_plausible_figures() {
        for spec in DEVICES {
            assert!(spec.source.len() > 10 && !spec.title.is_empty(), "{}", spec.name);
            assert!((8.0..600.0).contains(&spec.memory) && (0.1..10.0).contains(&spec.bandwidth));
            assert!(spec.rates.iter().all(|(_, rate)| (5.0..2e4).contains(rate)), "{}", spec.name);
            assert_eq!((spec.maker == Maker::Nvidia), spec.sm.is_some(), "{}", spec.name);
            let device = Device::named(spec.name).unwrap();
            assert_eq!(device.title, spec.title);
            assert_eq!(device.gpu().is_some(), spec.sm.is_some(), "{}", spec.name);
        }
    }

    /// Each from its source: 275,040 MiB × 2^20; NVLink bridge of a 3090: 112.5 / 2; MI300X 896 / 2, MI355X 1075.2 / 2: seven
    /// links, one to each other GPU of eight.
    #[test]
    fn figures_that_were_wrong() {
        let of = |name: &str| Device::named(name).unwrap();
        assert_eq!(of("B300").memory, 275_040.0 * 1_048_576.0);
        for (name, link) in
            [("rtx3090", 56.25e9), ("mi300x", 448e9), ("mi355x", 537.6e9), ("h100", 450e9), ("b200", 900e9)]
        {
            assert_eq!(of(name).link, link, "{name}");
        }
        // Two MI300X have one link between them, eight all seven; NVIDIA's switch gives two H100 all of it.
        let among = |name: &str, n| of(name).link_among(n);
        assert_eq!([among("mi300x", 2.0), among("mi300x", 8.0), among("mi300x", 16.0)], [64e9, 448e9, 448e9]);
        assert_eq!(among("h100", 2.0), 450e9);
        let (b300, gb300) = (of("b300"), of("gb300"));
        assert_ne!(b300.name, gb300.name);
        for unit in [Bf16, Fp8, Fp4, Int8] {
            let ratio = gb300.rate(unit).unwrap() / b300.rate(unit).unwrap();
            assert!((ratio - 10.0 / 9.0).abs() < 0.02, "{unit}: {ratio}");
        }
        // int8 is slower than bf16 on both, so a plan says so.
        assert!([b300, gb300].iter().all(|device| device.rate(Int8) < device.rate(Bf16)));
    }

    #[test]
    fn devices_are_found_as_people_type_them() {
        for (typed, name) in [
            ("H100", "h100"),
            ("4090", "rtx4090"),
            ("RTX 5090", "rtx5090"),
            ("M4 Max", "m4-max"),
            ("GB300", "gb300"),
        ] {
            assert_eq!(Device::named(typed).unwrap().name, name);
        }
        let error = Device::named("h10").err().unwrap().to_string();
        assert!(error.contains("h100") && error.contains("\"h10\""), "{error}");
    }
}
