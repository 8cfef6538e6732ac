//! Device as published, with what kernels reach of its limits. Rates are dense (without sparsity), in TFLOP/s or TOP/s; memory
//! in GiB, which vendors name GB; bandwidths in TB/s and, of links, in GB/s for each direction.

use std::borrow::Cow;

use super::device::{Device, KernelCost, Maker, Shares, Unit, metal_share};

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
pub(super) const CPU_SHARES: Shares = Shares {
    bandwidth: [0.75, 0.87, 1.0],
    compute: [0.4, 0.5, 0.6],
    source: "fitted on an idle AMD EPYC (Zen 4), 2026-11-26: mantissa help results/plan",
};

/// Costs of mantissa's kernels on AVX-512 with VNNI and BF16, from docs/results/speed.md and docs/results/plan.md.
pub(super) const CPU_KERNELS: &[KernelCost] = &[
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

/// Fields that rows of NVIDIA leave as they are.
pub(super) const NVIDIA: Spec = Spec {
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

/// Bytes that driver, context, graphs and libraries of a serving engine take on a GPU.
const GPU_RESERVED: f64 = 0.8e9;

/// Properties that all devices of a maker have in common.
pub(super) struct Habits {
    /// Share of the memory that models may use.
    pub(super) usable: f64,
    /// Bytes taken by driver, context and compiled kernels.
    pub(super) reserved: f64,
    /// Shares of the limits that kernels reach.
    pub(super) shares: Shares,
    /// Measured costs by format.
    pub(super) kernels: &'static [KernelCost],
}

impl Habits {
    /// Returns those of a device with so many bytes of memory.
    pub(super) fn of(maker: Maker, memory: f64) -> Self {
        let gpu = Habits { usable: 1.0, reserved: GPU_RESERVED, shares: GPU_SHARES, kernels: &[] };
        match maker {
            Maker::Apple => {
                Habits { usable: metal_share(memory), reserved: 0.0, shares: APPLE_SHARES, ..gpu }
            }
            Maker::Cpu => Habits { usable: 0.9, reserved: 64e6, shares: CPU_SHARES, kernels: CPU_KERNELS },
            Maker::Nvidia | Maker::Amd | Maker::Intel => gpu,
        }
    }
}

impl Spec {
    /// Returns the device.
    pub fn device(&self) -> Device {
        let memory = self.memory * f64::from(1 << 30);
        let blackwell = self.sm.is_some_and(|sm| sm >= 100);
        let Habits { usable, reserved, shares, kernels } = Habits::of(self.maker, memory);
        Device {
            name: Cow::Borrowed(self.name),
            title: Cow::Borrowed(self.title),
            maker: self.maker,
            sm: self.sm,
            memory,
            usable,
            reserved,
            bandwidth: self.bandwidth * 1e12,
            link: self.link * 1e9,
            peers: self.peers,
            rates: self.rates.iter().map(|(unit, tera)| (*unit, tera * 1e12)).collect(),
            block_scales: blackwell || self.name == "mi355x",
            nvfp4: blackwell,
            fnuz: self.name == "mi300x",
            shares,
            kernels,
            note: self.note,
            source: Cow::Borrowed(self.source),
        }
    }
}
