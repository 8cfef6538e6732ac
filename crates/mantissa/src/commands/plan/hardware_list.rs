//! `plan --hardware list`: the devices that are known by name.

use anyhow::Result;
use mantissa_plan::hardware::{Device, Unit, devices};
use serde::Serialize;

use crate::context::Context;
use crate::output::{Align, Table, paragraph};

/// Value of `--hardware` that asks for the list.
pub(super) const NAME: &str = "list";

/// Report of the list.
#[derive(Serialize)]
struct Report {
    devices: Vec<Device>,
}

/// Units of the table's columns of rates; the first that a device has stands for each.
const COLUMNS: [&[Unit]; 4] = [&[Unit::Bf16, Unit::F16], &[Unit::Fp8], &[Unit::Int8], &[Unit::Fp4]];

/// Formats a figure with at least two digits.
fn figure(value: f64) -> String {
    if value < 99.5 && value.fract() > 0.05 { format!("{value:.1}") } else { format!("{value:.0}") }
}

/// Returns the table of devices.
fn table(devices: &[Device]) -> Table {
    let right = Align::Right;
    let mut table = Table::new([
        ("name", Align::Left),
        ("GB", right),
        ("GB/s", right),
        ("bf16", right),
        ("fp8", right),
        ("int8", right),
        ("fp4", right),
        ("device", Align::Left),
        ("source", Align::Left),
    ])
    .optional(["device", "fp4", "int8"]);
    for device in devices {
        let rates = COLUMNS.map(|units| {
            let found = units.iter().find_map(|unit| device.rate(*unit));
            found.map_or_else(|| "-".to_owned(), |found| figure(found / 1e12))
        });
        let [half, fp8, int8, fp4] = rates;
        table.row([
            device.name.to_string(),
            figure(device.memory / f64::from(1 << 30)),
            figure(device.bandwidth / 1e9),
            half,
            fp8,
            int8,
            fp4,
            device.title.to_string(),
            device.source.to_string(),
        ]);
    }
    table
}

/// Shows the list.
///
/// # Errors
/// I/O.
pub(super) fn run(context: &Context) -> Result<()> {
    let report = Report { devices: devices().collect() };
    context.report(&report, |out| {
        paragraph(
            out,
            0,
            "Memory as vendors name it (GB of 2^30 bytes); read bandwidth; dense peaks in TFLOP/s and TOP/s, f16 where there is no bf16.",
        )?;
        writeln!(out)?;
        table(&report.devices).write(out)?;
        writeln!(out)?;
        paragraph(out, 0, "Others by their figures: --hardware bandwidth=672GB/s,memory=12GB,bf16=61.7TFLOPS,fp8=123TFLOPS")
    })
}
