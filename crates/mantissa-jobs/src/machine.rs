//! Description of the machine, for records.

use std::fs;

use serde::{Deserialize, Serialize};

use crate::memory::kib_field;

/// Machine that a process runs on.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Machine {
    /// CPU model name; `unknown` if not available.
    pub cpu: String,
    /// Number of hardware threads.
    pub threads: usize,
    /// Instruction set that the kernels use.
    pub isa: String,
    /// Bytes of memory; absent if unknown.
    pub memory: Option<u64>,
    /// Operating system and architecture.
    pub system: String,
}

impl Machine {
    /// Describes this machine.
    pub fn this() -> Self {
        let info = fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
        let name = info.lines().find_map(|line| line.strip_prefix("model name")?.split_once(": "));
        let memory = fs::read_to_string("/proc/meminfo").ok();
        Machine {
            cpu: name.map_or("unknown", |(_, name)| name.trim()).to_owned(),
            threads: mantissa_kernels::available_threads(),
            isa: mantissa_kernels::kernels().isa().to_string(),
            memory: memory.and_then(|text| kib_field(&text, "MemTotal:")),
            system: format!("{} {}", std::env::consts::OS, std::env::consts::ARCH),
        }
    }
}

/// Returns the peak anonymous memory of this process in bytes: peak resident memory minus current file pages
/// (their peak is not known).
pub fn peak_anonymous() -> Option<u64> {
    let status = fs::read_to_string("/proc/self/status").ok()?;
    Some(kib_field(&status, "VmHWM:")?.saturating_sub(kib_field(&status, "RssFile:")?))
}

/// Returns the bytes of file pages that this process has resident: of the program and its libraries.
pub fn resident_files() -> Option<u64> {
    kib_field(&fs::read_to_string("/proc/self/status").ok()?, "RssFile:")
}
