//! Hardware of a plan: a named device, this CPU by measurement, or a saved report of `bench`.

use std::path::Path;

use anyhow::Result;
use mantissa_jobs::machine::Machine;
use mantissa_kernels::packed::PackedLevel;
use mantissa_plan::hardware::{Device, Measured};
use mantissa_runtime::measure::{Limits, Probe};
use mantissa_store::json;

use crate::context::Context;
use crate::error::BadInput;

/// Largest report of `bench` that is read.
const MAX_REPORT: u64 = 16 << 20;

/// Name of the processor that runs this.
pub const THIS: &str = "this";

/// Finds or measures the hardware of this name, or describes it by its figures.
///
/// # Errors
/// An unknown name; a figure that cannot be used; a report without limits; not enough memory to measure.
pub fn device(name: &str, context: &Context) -> Result<Device> {
    if name.eq_ignore_ascii_case(THIS) {
        return this(MEASUREMENTS, context);
    }
    known(name)
}

/// As [`device`], for answers that depend on the units of the hardware and not on its speed: this CPU is measured once.
///
/// # Errors
/// As [`device`].
pub fn units_of(name: &str, context: &Context) -> Result<Device> {
    if name.eq_ignore_ascii_case(THIS) { this(1, context) } else { known(name) }
}

/// Finds the hardware of this name, or describes it by its figures.
fn known(name: &str) -> Result<Device> {
    if Device::is_figures(name) {
        return Ok(Device::from_figures(name)?);
    }
    if Path::new(name).extension().is_some_and(|extension| extension.eq_ignore_ascii_case("json")) {
        return saved(name);
    }
    Ok(Device::named(name)?)
}

/// Measures this CPU so many times.
fn this(measurements: usize, context: &Context) -> Result<Device> {
    let machine = Machine::this();
    let probe = Probe::new(context.threads)?;
    let runs: Vec<_> = (0..measurements).map(|_| probe.run()).collect();
    let found = best(&runs);
    spread(&runs).iter().for_each(|told| context.note(told));
    let giga = |rate: Option<f64>| rate.map(|rate| rate / 1e9);
    let limits = Measured {
        threads: context.threads,
        level: PackedLevel::best().name().to_owned(),
        machine_read_gb_per_s: found.read / 1e9,
        machine_int8_gops: giga(found.int8),
        machine_bf16_gflops: giga(found.bf16),
        machine_f32_gflops: giga(found.f32),
    };
    let memory = machine.memory.unwrap_or(0);
    Ok(Device::measured(&machine.cpu, memory, &limits, "measured now".to_owned()))
}

/// Measurements of this CPU: other work on the machine slows some of them.
const MEASUREMENTS: usize = 5;

/// Ratio of the largest and the least measured bandwidth from which the measurements are called disturbed.
const DISTURBED: f64 = 1.3;

/// Returns the largest of each measured limit.
fn best(runs: &[Limits]) -> Limits {
    let most = |a: Option<f64>, b: Option<f64>| match (a, b) {
        (Some(a), Some(b)) => Some(a.max(b)),
        (a, b) => a.or(b),
    };
    let none = Limits { read: 0.0, int8: None, bf16: None, f32: None };
    runs.iter().fold(none, |best, run| Limits {
        read: best.read.max(run.read),
        int8: most(best.int8, run.int8),
        bf16: most(best.bf16, run.bf16),
        f32: most(best.f32, run.f32),
    })
}

/// Says that other work disturbed the measurements, if it did.
fn spread(runs: &[Limits]) -> Option<String> {
    let most = runs.iter().map(|run| run.read).fold(0.0, f64::max);
    let least = runs.iter().map(|run| run.read).fold(f64::INFINITY, f64::min);
    (least * DISTURBED < most).then(|| {
        format!(
            "this CPU read {:.1} to {:.1} GB/s in {} measurements, the largest is used: other work slows it; a later plan may differ, and --hardware FILE of bench --json=FILE keeps the figures",
            least / 1e9,
            most / 1e9,
            runs.len()
        )
    })
}

/// Reads the limits in a report of `bench`.
fn saved(file: &str) -> Result<Device> {
    let value = json::read_strict(Path::new(file), MAX_REPORT, "a report of mantissa bench")?;
    let limits: Measured = serde_json::from_value(value).map_err(|error| {
        BadInput::new(file, error.to_string(), "the JSON report of mantissa bench")
            .with_fix(format!("mantissa bench demo --json={file}"))
    })?;
    if !(limits.machine_read_gb_per_s > 0.0 && limits.machine_read_gb_per_s < 1e6) {
        let found = limits.machine_read_gb_per_s.to_string();
        return Err(
            BadInput::new(format!("{file}: machine_read_gb_per_s"), found, "a bandwidth in GB/s").into()
        );
    }
    let memory = Machine::this().memory.unwrap_or(0);
    Ok(Device::measured("CPU of the report", memory, &limits, format!("mantissa bench, {file}")))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_best_of_disturbed_measurements_is_used_and_told() {
        let run = |read, int8| Limits { read, int8, bf16: None, f32: Some(read) };
        let runs = [run(6e9, None), run(16e9, Some(2.0)), run(13e9, Some(3.0))];
        let found = best(&runs);
        assert_eq!((found.read, found.int8, found.bf16, found.f32), (16e9, Some(3.0), None, Some(16e9)));
        assert!(spread(&runs).is_some_and(|told| told.contains("6.0 to 16.0 GB/s in 3 measurements")));
        assert_eq!(spread(&runs[1..]), None);
    }
}
