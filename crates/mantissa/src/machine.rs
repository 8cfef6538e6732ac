//! The machine a process runs on, for records.

use std::fs;

use serde::{Deserialize, Serialize};

use crate::memory::kib_field;

/// What a record says of a machine.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Machine {
    /// The processor, as it calls itself; `unknown` where the system does not say.
    pub cpu: String,
    /// Threads that run at once.
    pub threads: usize,
    /// The instruction set that the kernels use.
    pub isa: String,
    /// Bytes of memory; absent where the system does not say.
    pub memory: Option<u64>,
    /// Operating system and architecture.
    pub system: String,
}

impl Machine {
    /// This one.
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

/// The largest anonymous memory that this process has had, bytes: the largest resident memory without the pages of files, of
/// which only the present number is known.
pub fn peak_anonymous() -> Option<u64> {
    let status = fs::read_to_string("/proc/self/status").ok()?;
    Some(kib_field(&status, "VmHWM:")?.saturating_sub(kib_field(&status, "RssFile:")?))
}
