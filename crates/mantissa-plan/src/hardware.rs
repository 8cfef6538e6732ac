//! Hardware as data: GPU generations that decide which kernels are available, and [`Device`]s with memory, bandwidth and
//! rates.

mod device;
mod devices;
mod execution;

use std::fmt;

pub use device::{Device, KernelCost, Maker, Measured, Shares, Unit};
pub use devices::{CPU_ATTENTION, DEVICES, HardwareError};
pub use execution::Execution;

/// GPU with its compute capability.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Gpu {
    /// Name as given, or the first known name with this capability.
    pub name: &'static str,
    /// Compute capability times ten: 89 is 8.9.
    pub sm: u32,
}

/// GPUs known by name. Compute capabilities from NVIDIA's list (developer.nvidia.com/cuda-gpus).
pub const GPUS: [Gpu; 22] = [
    Gpu { name: "v100", sm: 70 },
    Gpu { name: "t4", sm: 75 },
    Gpu { name: "a100", sm: 80 },
    Gpu { name: "a30", sm: 80 },
    Gpu { name: "a10", sm: 86 },
    Gpu { name: "a40", sm: 86 },
    Gpu { name: "rtx3090", sm: 86 },
    Gpu { name: "rtx-a6000", sm: 86 },
    Gpu { name: "l4", sm: 89 },
    Gpu { name: "l40s", sm: 89 },
    Gpu { name: "rtx4090", sm: 89 },
    Gpu { name: "rtx6000-ada", sm: 89 },
    Gpu { name: "h100", sm: 90 },
    Gpu { name: "h200", sm: 90 },
    Gpu { name: "h20", sm: 90 },
    Gpu { name: "b200", sm: 100 },
    Gpu { name: "gb200", sm: 100 },
    Gpu { name: "b300", sm: 103 },
    Gpu { name: "gb300", sm: 103 },
    Gpu { name: "rtx5090", sm: 120 },
    Gpu { name: "rtx-pro-6000", sm: 120 },
    Gpu { name: "gb10", sm: 121 },
];

impl Gpu {
    /// Parses a GPU name, or a capability such as `sm90`, in any case.
    pub fn parse(text: &str) -> Option<Self> {
        let text = &*text.to_lowercase();
        if let Some(gpu) = GPUS.into_iter().find(|gpu| gpu.name == text) {
            return Some(gpu);
        }
        let sm: u32 = text.strip_prefix("sm")?.parse().ok()?;
        GPUS.into_iter().find(|gpu| gpu.sm == sm)
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
    }
}
