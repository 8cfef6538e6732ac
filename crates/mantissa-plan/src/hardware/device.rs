//! A device: what its memory holds, how fast it reads it, and how fast it multiplies.

use std::borrow::Cow;
use std::fmt;

use serde::{Deserialize, Serialize};

use super::Gpu;

/// Operands of a matrix product that a device has an instruction for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Unit {
    /// f32.
    F32,
    /// f32 rounded to 10 mantissa bits.
    Tf32,
    /// f16 with sums in f32.
    F16,
    /// bf16 with sums in f32.
    Bf16,
    /// 8-bit floats with sums in f32.
    Fp8,
    /// 6-bit floats.
    Fp6,
    /// E2M1.
    Fp4,
    /// 8-bit integers.
    Int8,
    /// 4-bit integers.
    Int4,
}

impl Unit {
    /// Returns the name for reports.
    pub fn name(self) -> &'static str {
        match self {
            Unit::F32 => "f32",
            Unit::Tf32 => "tf32",
            Unit::F16 => "f16",
            Unit::Bf16 => "bf16",
            Unit::Fp8 => "fp8",
            Unit::Fp6 => "fp6",
            Unit::Fp4 => "fp4",
            Unit::Int8 => "int8",
            Unit::Int4 => "int4",
        }
    }
}

impl fmt::Display for Unit {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// Kind of device, which decides what kernels do.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Maker {
    /// NVIDIA GPU.
    Nvidia,
    /// AMD GPU.
    Amd,
    /// Intel Gaudi.
    Intel,
    /// Apple silicon: GPU and processor share the memory.
    Apple,
    /// Processor, running mantissa's own kernels.
    Cpu,
}

/// Low, middle and high estimate of a share.
pub type Interval = [f64; 3];

/// Shares of the limits that kernels reach.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct Shares {
    /// Of the read bandwidth, in decoding.
    pub bandwidth: Interval,
    /// Of the peak, in products of many tokens.
    pub compute: Interval,
    /// Source, or the statement that they are assumed.
    pub source: &'static str,
}

/// Measured cost of mantissa's kernels with one format: operations at the peak of the unit for each weight of a step, two of
/// which would be the products of one token.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct KernelCost {
    /// Beginning of the scheme's name.
    pub scheme: &'static str,
    /// Cost of a step of any number of tokens: reading and decoding the weight.
    pub fixed: f64,
    /// Cost of each token of a step with few.
    pub token: f64,
    /// Cost of each token of a prompt.
    pub prompt: f64,
}

/// Device.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Device {
    /// Name for `--hardware`.
    pub name: Cow<'static, str>,
    /// Name in tables.
    pub title: Cow<'static, str>,
    /// Kind.
    pub maker: Maker,
    /// NVIDIA's compute capability times ten.
    pub sm: Option<u32>,
    /// Memory in bytes. Vendors name GiB as GB.
    pub memory: f64,
    /// Share of it that models may use.
    pub usable: f64,
    /// Bytes taken by driver, context and compiled kernels.
    pub reserved: f64,
    /// Read bandwidth, bytes/s.
    pub bandwidth: f64,
    /// Bandwidth to all other devices of a node together, bytes/s in each direction; 0 without.
    pub link: f64,
    /// Other devices to which parts of that bandwidth lead alone; 0 where all of it leads anywhere.
    pub peers: u64,
    /// Dense rates, operations/s.
    pub rates: Vec<(Unit, f64)>,
    /// True if matrix instructions apply scales of blocks (MX formats).
    pub block_scales: bool,
    /// True if they apply NVFP4's E4M3 scales.
    pub nvfp4: bool,
    /// True if FP8 is in the `fnuz` encodings, not OCP's.
    pub fnuz: bool,
    /// Shares of the limits that kernels reach.
    pub shares: Shares,
    /// Measured costs by format, in place of [`Shares::compute`].
    pub kernels: &'static [KernelCost],
    /// Caveat about the figures.
    pub note: &'static str,
    /// Source of the figures.
    pub source: Cow<'static, str>,
}

/// Limits of a processor, measured by `bench`; the fields of its JSON report.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Measured {
    /// Number of threads.
    pub threads: usize,
    /// Instruction-set level of the kernels.
    pub level: String,
    /// Read bandwidth, GB/s.
    pub machine_read_gb_per_s: f64,
    /// Peak of 8-bit products, Gop/s.
    #[serde(default)]
    pub machine_int8_gops: Option<f64>,
    /// Peak of bf16 products, GFLOP/s.
    #[serde(default)]
    pub machine_bf16_gflops: Option<f64>,
    /// Peak of f32 products, GFLOP/s.
    #[serde(default)]
    pub machine_f32_gflops: Option<f64>,
}

/// Every kind, as [`Maker::named`] finds it.
pub(super) const MAKERS: [(&str, Maker); 5] = [
    ("nvidia", Maker::Nvidia),
    ("amd", Maker::Amd),
    ("intel", Maker::Intel),
    ("apple", Maker::Apple),
    ("cpu", Maker::Cpu),
];

impl Maker {
    /// Finds a kind by its name, in any case.
    pub fn named(name: &str) -> Option<Self> {
        MAKERS.into_iter().find(|(own, _)| own.eq_ignore_ascii_case(name)).map(|(_, maker)| maker)
    }

    /// True if the memory is that of the processor too, so that nothing can be left to it.
    pub fn shares_memory(self) -> bool {
        matches!(self, Maker::Apple | Maker::Cpu)
    }
}

/// Bytes from which on Metal lets the GPU use 3/4 of the memory.
const METAL_LARGE: f64 = 36e9;

/// Returns the share of the memory of a Mac that its GPU may use: Metal's `recommendedMaxWorkingSetSize`. llama.cpp logs 10,923 of
/// 16,384 MiB and 21,845 of 32,768 (issues 687 of llama-cpp-python, 434 of ollama), 49,152 of 65,536 (issue 1870 of llama.cpp);
/// `sysctl iogpu.wired_limit_mb` raises it.
pub(super) fn metal_share(memory: f64) -> f64 {
    if memory < METAL_LARGE { 2.0 / 3.0 } else { 0.75 }
}

impl Device {
    /// Returns the bytes that a model may use of `memory` bytes in place of the device's own: all, but on a Mac what Metal gives
    /// the GPU.
    pub fn usable_of(&self, memory: f64) -> f64 {
        match self.maker {
            Maker::Apple => memory * metal_share(memory),
            _ => memory,
        }
    }

    /// Returns the rate of a unit, operations/s; `None` if the device has no instruction for it.
    pub fn rate(&self, unit: Unit) -> Option<f64> {
        self.rates.iter().find(|(own, _)| *own == unit).map(|(_, rate)| *rate)
    }

    /// Returns the unit that multiplies 16-bit floats: bf16, else f16, else f32.
    pub fn half(&self) -> Unit {
        [Unit::Bf16, Unit::F16].into_iter().find(|unit| self.rate(*unit).is_some()).unwrap_or(Unit::F32)
    }

    /// Returns the ridge point of a unit, operations for each byte read: below it a product is bound by memory.
    pub fn ridge(&self, unit: Unit) -> Option<f64> {
        self.rate(unit).map(|rate| rate / self.bandwidth)
    }

    /// Returns the bandwidth of a device to the others of `n` devices, bytes/s in each direction.
    pub fn link_among(&self, n: f64) -> f64 {
        if self.peers == 0 { self.link } else { self.link * ((n - 1.0) / self.peers as f64).clamp(0.0, 1.0) }
    }

    /// Returns the bytes that a model may use.
    pub fn available(&self) -> f64 {
        self.memory * self.usable - self.reserved
    }

    /// Returns the GPU as the serving rules name it.
    pub fn gpu(&self) -> Option<Gpu> {
        Gpu::parse(&self.name).or_else(|| Gpu::parse(&format!("sm{}", self.sm?)))
    }
}
