//! Memory available to this process.

use std::fs;

/// Memory of the process before it opens anything: relocated data, arguments, kernel tables, threads. Measured: up to
/// 2.9 MB, and 0.2 MB more than 4 MiB over what texts may take. Every command with a ceiling refuses less.
pub const PROCESS: u64 = 9 << 19;

/// Source of a memory limit.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Limit {
    /// Ceiling that the caller set, `--memory` on the command line.
    Option,
    /// Machine, control group or address space.
    Available,
}

impl Limit {
    /// Returns the name of the limit for messages.
    pub fn name(self) -> &'static str {
        match self {
            Limit::Option => "--memory",
            Limit::Available => "available",
        }
    }

    /// Returns the fix for messages.
    pub fn fix(self) -> &'static str {
        match self {
            Limit::Option => "raise --memory or use fewer --threads",
            Limit::Available => {
                "free memory, use fewer --threads or a shorter context, or set a higher --memory"
            }
        }
    }
}

/// Returns the smallest limit of machine, control group and address space; `None` if unknown.
pub fn available() -> Option<u64> {
    let limits = [machine(), control_group(), address_space()];
    limits.into_iter().flatten().min()
}

/// Memory of the machine that is free or can be freed without swapping.
fn machine() -> Option<u64> {
    kib_field(&fs::read_to_string("/proc/meminfo").ok()?, "MemAvailable:")
}

/// Memory left by the control group (version 2) beyond the anonymous memory of its processes.
fn control_group() -> Option<u64> {
    let groups = fs::read_to_string("/proc/self/cgroup").ok()?;
    let path = groups.lines().find_map(|line| line.strip_prefix("0::"))?;
    let folder = format!("/sys/fs/cgroup{path}");
    let max: u64 = fs::read_to_string(format!("{folder}/memory.max")).ok()?.trim().parse().ok()?;
    let stat = fs::read_to_string(format!("{folder}/memory.stat")).ok()?;
    let anonymous = stat.lines().find_map(|line| line.strip_prefix("anon "))?.trim().parse().ok()?;
    Some(max.saturating_sub(anonymous))
}

/// Address space per thread beyond its allocations: its stack, and glibc's arena, reserved whole.
const PER_THREAD: u64 = (64 + 2) << 20;

/// Address space left by `RLIMIT_AS`.
fn address_space() -> Option<u64> {
    let limits = fs::read_to_string("/proc/self/limits").ok()?;
    let soft =
        limits.lines().find_map(|line| line.strip_prefix("Max address space"))?.split_whitespace().next()?;
    let used = kib_field(&fs::read_to_string("/proc/self/status").ok()?, "VmSize:")?;
    let reserved = PER_THREAD * mantissa_kernels::available_threads() as u64;
    Some(soft.parse::<u64>().ok()?.saturating_sub(used).saturating_sub(reserved))
}

/// Returns the anonymous resident memory of this process in bytes; `None` if unknown.
pub fn anonymous() -> Option<u64> {
    kib_field(&fs::read_to_string("/proc/self/status").ok()?, "RssAnon:")
}

/// Returns the field `name` of a kernel file with `name value kB` lines, in bytes.
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
    fn memory_is_read_where_proc_is() {
        match fs::metadata("/proc/self/status") {
            Ok(_) => assert!(anonymous().unwrap() > 4096),
            Err(_) => println!("skipped: no /proc"),
        }
    }

    #[test]
    fn this_machine_has_some() {
        match machine() {
            Some(machine) => assert!(machine > 1 << 20 && available().unwrap() <= machine),
            None => println!("skipped: no /proc/meminfo"),
        }
    }
}
