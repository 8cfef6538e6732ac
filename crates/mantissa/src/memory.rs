//! Memory that this process may still take.

use std::fs;

use crate::output::bytes;

/// Memory that the process takes before it has opened anything: arguments, tables of the kernels, threads; up to 2.5 MB were
/// measured. Less is refused by every command that has a ceiling.
pub const PROCESS: u64 = 4 << 20;

/// Who limits memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Limit {
    /// `--memory`.
    Option,
    /// The machine, the control group or the address space.
    Available,
}

impl Limit {
    /// What it leaves, for messages.
    pub fn leaves(self, allowed: u64) -> String {
        match self {
            Limit::Option => format!("--memory allows {}", bytes(allowed)),
            Limit::Available => format!("{} available", bytes(allowed)),
        }
    }

    /// What to do about it.
    pub fn hint(self) -> &'static str {
        match self {
            Limit::Option => "raise it or use fewer --threads",
            Limit::Available => {
                "free memory, use fewer --threads or a shorter context, or set --memory to go beyond it"
            }
        }
    }
}

/// The least that the machine, the control group and the address-space limit leave; `None` where the system does not say.
pub fn available() -> Option<u64> {
    let limits = [machine(), control_group(), address_space()];
    limits.into_iter().flatten().min()
}

/// Memory of the machine that is free or can be freed without swapping.
fn machine() -> Option<u64> {
    kib_field(&fs::read_to_string("/proc/meminfo").ok()?, "MemAvailable:")
}

/// What the control group (version 2) of this process leaves beside the anonymous memory that its processes hold.
fn control_group() -> Option<u64> {
    let groups = fs::read_to_string("/proc/self/cgroup").ok()?;
    let path = groups.lines().find_map(|line| line.strip_prefix("0::"))?;
    let folder = format!("/sys/fs/cgroup{path}");
    let max: u64 = fs::read_to_string(format!("{folder}/memory.max")).ok()?.trim().parse().ok()?;
    let stat = fs::read_to_string(format!("{folder}/memory.stat")).ok()?;
    let anonymous = stat.lines().find_map(|line| line.strip_prefix("anon "))?.trim().parse().ok()?;
    Some(max.saturating_sub(anonymous))
}

/// Address space that every thread may take beside what it asks for: its stack, and glibc's heap for it, reserved whole.
const PER_THREAD: u64 = (64 + 2) << 20;

/// What `RLIMIT_AS` leaves of the address space.
fn address_space() -> Option<u64> {
    let limits = fs::read_to_string("/proc/self/limits").ok()?;
    let soft =
        limits.lines().find_map(|line| line.strip_prefix("Max address space"))?.split_whitespace().next()?;
    let used = kib_field(&fs::read_to_string("/proc/self/status").ok()?, "VmSize:")?;
    let reserved = PER_THREAD * mantissa_kernels::available_threads() as u64;
    Some(soft.parse::<u64>().ok()?.saturating_sub(used).saturating_sub(reserved))
}

/// The field `name` of a file of the kernel's `name value kB` lines, in bytes.
pub fn kib_field(text: &str, name: &str) -> Option<u64> {
    let value = text.lines().find_map(|line| line.strip_prefix(name))?;
    value.trim().strip_suffix("kB")?.trim().parse::<u64>().ok()?.checked_mul(1024)
}

#[cfg(test)]
#[allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]
mod tests {
    use super::*;

    #[test]
    fn fields_are_found_in_bytes() {
        let text = "MemTotal:       16 kB\nMemAvailable:   12 kB\nHugePages_Total:       0\n";
        assert_eq!(kib_field(text, "MemAvailable:"), Some(12 * 1024));
        assert_eq!(kib_field(text, "HugePages_Total:"), None);
        assert_eq!(kib_field(text, "Missing:"), None);
    }

    #[test]
    fn this_machine_has_some() {
        match machine() {
            Some(machine) => assert!(machine > 1 << 20 && available().unwrap() <= machine),
            None => println!("skipped: no /proc/meminfo"),
        }
    }
}
