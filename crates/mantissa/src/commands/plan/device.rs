//! Hardware of a plan: a named device, this CPU by measurement, or a saved report of `bench`.

use std::path::Path;

use anyhow::Result;
use mantissa_jobs::machine::Machine;
use mantissa_kernels::packed::PackedLevel;
use mantissa_plan::hardware::{Device, Measured};
use mantissa_runtime::measure::Probe;
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
        return this(context);
    }
    if Device::is_figures(name) {
        return Ok(Device::from_figures(name)?);
    }
    if Path::new(name).extension().is_some_and(|extension| extension.eq_ignore_ascii_case("json")) {
        return saved(name);
    }
    Ok(Device::named(name)?)
}

/// Measures this CPU.
fn this(context: &Context) -> Result<Device> {
    let machine = Machine::this();
    let probe = Probe::new(context.threads)?;
    let found = probe.run();
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
