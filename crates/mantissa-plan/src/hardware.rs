//! Hardware as data: GPU generations that decide which kernels are available, and [`Device`]s with memory, bandwidth and
//! rates.

// Layer: what a device is.
mod device;
mod spec;

// Layer: rows.
mod apple;
mod geforce;
mod nvidia;
mod others;

// Layer: lists and searches.
mod devices;
mod execution;
mod figures;

use std::fmt;

pub use device::{Device, KernelCost, Maker, Measured, Shares, Unit};
pub use devices::{HardwareError, devices};
pub use execution::Execution;
pub use figures::{FiguresError, Host};
pub use spec::CPU_ATTENTION;

/// GPU with its compute capability.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Gpu {
    /// Name as given, or the first known name with this capability.
    pub name: &'static str,
    /// Compute capability times ten: 89 is 8.9.
    pub sm: u32,
}

/// GPUs known by name. Compute capabilities from NVIDIA's list (developer.nvidia.com/cuda-gpus).
pub const GPUS: [Gpu; 33] = [
    Gpu { name: "v100", sm: 70 },
    Gpu { name: "t4", sm: 75 },
    Gpu { name: "a100", sm: 80 },
    Gpu { name: "a30", sm: 80 },
    Gpu { name: "a10", sm: 86 },
    Gpu { name: "a40", sm: 86 },
    Gpu { name: "rtx3060", sm: 86 },
    Gpu { name: "rtx3070", sm: 86 },
    Gpu { name: "rtx3080", sm: 86 },
    Gpu { name: "rtx3090", sm: 86 },
    Gpu { name: "rtx-a6000", sm: 86 },
    Gpu { name: "l4", sm: 89 },
    Gpu { name: "l40s", sm: 89 },
    Gpu { name: "rtx4060", sm: 89 },
    Gpu { name: "rtx4070", sm: 89 },
    Gpu { name: "rtx4080", sm: 89 },
    Gpu { name: "rtx4090", sm: 89 },
    Gpu { name: "rtx6000-ada", sm: 89 },
    Gpu { name: "h100", sm: 90 },
    Gpu { name: "h200", sm: 90 },
    Gpu { name: "h20", sm: 90 },
    Gpu { name: "h100-pcie", sm: 90 },
    Gpu { name: "b200", sm: 100 },
    Gpu { name: "gb200", sm: 100 },
    Gpu { name: "b300", sm: 103 },
    Gpu { name: "gb300", sm: 103 },
    Gpu { name: "rtx5090", sm: 120 },
    Gpu { name: "rtx5060", sm: 120 },
    Gpu { name: "rtx5070", sm: 120 },
    Gpu { name: "rtx5080", sm: 120 },
    Gpu { name: "rtx5070ti", sm: 120 },
    Gpu { name: "rtx-pro-6000", sm: 120 },
    Gpu { name: "gb10", sm: 121 },
];

/// Words that people add to the name of a device or leave out; a longer one before those that it contains.
const ADDED: [&str; 15] = [
    "nvidia",
    "geforce",
    "radeon",
    "apple",
    "amd",
    "rtx",
    "rx",
    "macbookpro",
    "macbookair",
    "macbook",
    "macmini",
    "macstudio",
    "macpro",
    "imac",
    "mac",
];

/// Variants that have the capability of the GPU they are called after.
const VARIANTS: [&str; 4] = ["laptop", "super", "ti", "d"];

/// Returns the part of a name that devices are told apart by: `RTX 4090`, `rtx4090` and `NVIDIA GeForce RTX 4090` are `4090`.
fn plain(name: &str) -> String {
    let name = name.to_lowercase().replace(['-', '_', ' '], "");
    ADDED.iter().fold(name, |name, word| name.replace(word, ""))
}

impl Gpu {
    /// Parses a GPU name as people type it (`4090`, `RTX 4090`, `NVIDIA GeForce RTX 4070 Ti`), or a capability such as `sm90`, in
    /// any case.
    pub fn parse(text: &str) -> Option<Self> {
        let wanted = plain(text);
        let named = |wanted: &str| GPUS.into_iter().find(|gpu| plain(gpu.name) == wanted);
        if wanted.is_empty() {
            return None;
        }
        if let Some(sm) = wanted.strip_prefix("sm").and_then(|sm| sm.parse::<u32>().ok()) {
            return GPUS.into_iter().find(|gpu| gpu.sm == sm);
        }
        let mut rest = &*wanted;
        loop {
            if let Some(gpu) = named(rest) {
                return Some(gpu);
            }
            rest = VARIANTS.iter().find_map(|variant| rest.strip_suffix(variant))?;
        }
    }
}

impl fmt::Display for Gpu {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} (SM {}.{})", self.name, self.sm / 10, self.sm % 10)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn gpus_have_names_and_capabilities() {
        assert_eq!(Gpu::parse("h100").map(|gpu| gpu.to_string()), Some("h100 (SM 9.0)".to_owned()));
        assert_eq!(Gpu::parse("H100").map(|gpu| gpu.sm), Some(90));
        assert_eq!(Gpu::parse("sm89").map(|gpu| gpu.sm), Some(89));
        assert_eq!((Gpu::parse("sm42"), Gpu::parse("H101"), Gpu::parse("")), (None, None, None));
        for (typed, name) in [
            ("4090", "rtx4090"),
            ("RTX 4090", "rtx4090"),
            ("NVIDIA GeForce RTX 4070 Ti SUPER", "rtx4070"),
            ("rtx-4090-d", "rtx4090"),
            ("a6000", "rtx-a6000"),
            ("5070 Ti", "rtx5070ti"),
            ("sm_120", "rtx5090"),
        ] {
            assert_eq!(Gpu::parse(typed).map(|gpu| gpu.name), Some(name), "{typed}");
        }
        assert_eq!((Gpu::parse("rtx"), Gpu::parse("ti"), Gpu::parse("9999")), (None, None, None));
    }
}
