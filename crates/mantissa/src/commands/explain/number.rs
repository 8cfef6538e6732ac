//! The anatomy of a number in several formats.

use std::io::{self, Write};

use anyhow::Result;
use mantissa_num::Scheme;
use mantissa_plan::explain::{Anatomy, anatomy};
use serde::Serialize;

use crate::context::Context;
use crate::error::BadInput;
use crate::output::{Align, Table, number, paragraph};

/// Formats without `--as`.
const USUAL: [&str; 10] =
    ["f32", "tf32", "f16", "bf16", "fp8-e4m3", "fp8-e5m2", "int8-g32", "int4-g32", "mxfp4", "nvfp4"];

#[derive(Serialize)]
struct Report {
    number: f64,
    amax: f32,
    tensor_amax: f32,
    formats: Vec<Anatomy>,
}

/// Shows `x` under every scheme.
///
/// # Errors
/// A number that no f32 is, but for f64 alone; formats without codes of single elements.
pub fn run(x: f64, schemes: &[Scheme], [amax, tensor]: [Option<f32>; 2], context: &Context) -> Result<()> {
    let doubles = !schemes.is_empty() && schemes.iter().all(|scheme| scheme.format.code_bits() == 64);
    let single = if doubles { 0.0 } else { x as f32 };
    if !single.is_finite() || !x.is_finite() {
        return Err(BadInput::new("NUMBER", x.to_string(), "a finite number within the range of f32").into());
    }
    let amax = amax.unwrap_or_else(|| single.abs());
    if !amax.is_finite() || amax < 0.0 || (amax == 0.0 && single != 0.0) {
        return Err(BadInput::new("--amax", amax.to_string(), "a finite number above 0").into());
    }
    let tensor_amax = tensor.unwrap_or(amax);
    if !tensor_amax.is_finite() || tensor_amax < amax {
        let allowed = format!("a number of at least {amax}, the largest magnitude of the block");
        return Err(BadInput::new("--tensor-amax", tensor_amax.to_string(), allowed).into());
    }
    let usual: Vec<Scheme>;
    let schemes = if schemes.is_empty() {
        usual = USUAL.iter().filter_map(|name| name.parse().ok()).collect();
        &usual
    } else {
        schemes
    };
    let formats = schemes.iter().map(|scheme| anatomy(x, scheme, amax, tensor_amax));
    let formats = formats.collect::<Result<Vec<_>, _>>()?;
    let report = Report { number: x, amax, tensor_amax, formats };
    context.report(&report, |out| print(&report, out))
}

fn print(report: &Report, out: &mut dyn Write) -> io::Result<()> {
    let right = Align::Right;
    let mut table = Table::new([
        ("format", Align::Left),
        ("bits", Align::Left),
        ("stored value", right),
        ("error", right),
        ("below", right),
        ("above", right),
        ("scale", right),
    ])
    .optional(["scale"]);
    let exact = |value: Option<f64>| number(value, 9);
    for format in &report.formats {
        let bits = format.bits.iter().map(|(_, bits)| bits.as_str()).collect::<Vec<_>>().join(" ");
        let error =
            format.relative_error.map_or_else(|| "-".to_owned(), |error| format!("{:.2} %", 100.0 * error));
        table.row([
            format.scheme.clone(),
            bits,
            exact(Some(format.value)),
            error,
            exact(format.below),
            exact(format.above),
            exact(format.scale),
        ]);
    }
    table.write(out)?;
    writeln!(out)?;
    for format in &report.formats {
        if let Some(note) = &format.note {
            paragraph(out, 2, &format!("{}: {note}", format.scheme))?;
        }
    }
    if let Some(text) = integer_rule(&report.formats) {
        paragraph(out, 0, &text)?;
    }
    let scaled = report.formats.iter().any(|format| format.scale.is_some());
    if scaled {
        let text = format!(
            "Scaled formats: the scale comes from a block whose largest magnitude is {} (--amax; a number alone in its block is its largest); what lies beyond it is clipped, as under a static scale. NVFP4: a tensor whose largest is {} (--tensor-amax).",
            report.amax, report.tensor_amax
        );
        paragraph(out, 0, &text)?;
    }
    paragraph(
        out,
        0,
        "Bits of floats: sign, exponent, mantissa. Below and above: the nearest representable values.",
    )?;
    let example = report.formats.last().map_or("bf16", |format| format.scheme.as_str());
    paragraph(
        out,
        2,
        &format!("measure it: mantissa cast weights.safetensors --scheme {example} --out out.safetensors"),
    )
}

/// Says how the default rule scales symmetric integers, whose largest value is none of the block's.
fn integer_rule(formats: &[Anatomy]) -> Option<String> {
    let bits = |format: &Anatomy| {
        let symmetric = !format.scheme.contains("-asym") && !format.scheme.contains(':');
        let rest = format.scheme.strip_prefix("int").filter(|_| symmetric && format.scale.is_some())?;
        rest.split('-').next()?.parse::<u32>().ok()
    };
    let scales: Vec<_> = formats.iter().filter_map(bits).filter(|bits| (2..=8).contains(bits)).collect();
    let shown = |less: f64| {
        let of = |bits: &u32| format!("amax/{} (int{bits})", (f64::from(1u32 << bits) - less) / 2.0);
        scales.iter().map(of).collect::<Vec<_>>().join(", ")
    };
    (!scales.is_empty()).then(|| {
        format!(
            "Integers: the default rule, full, takes the scale {}, so that both ends of the range are used and the block's largest value lies half a step beyond its code; :restricted takes {}.",
            shown(1.0),
            shown(2.0)
        )
    })
}
