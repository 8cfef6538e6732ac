//! Measured figures, with their models and pages.

use mantissa_num::page_command;

use super::super::value::{Args, Compute, Fault, Value};
use crate::figures::{Experiment, Figure, PAGE, experiment, figure, losses};
use crate::precision::Precision;

/// Values from the tables of records.
pub(super) const VALUES: &[(&str, Compute)] = &[
    ("kl", |_, a| Ok(Value::number(a.precision(0)?.measured_kl()))),
    ("kv_kl", |_, a| Ok(Value::number(a.kv(0)?.kl))),
    ("measured", |_, a| Ok(Value::text(measured(a)))),
    ("losses", |_, a| {
        let recipes: Vec<&str> = a.texts_from(1).collect();
        Ok(Value::text(losses(a.text(0)?, &recipes)))
    }),
    // Fields of a measured recipe (argument 1) on a model (argument 0).
    ("recipe_kl", |_, a| Ok(Value::Number(row(a)?.kl))),
    ("recipe_top1", |_, a| Ok(Value::number(row(a)?.top1))),
    ("recipe_seconds", |_, a| Ok(Value::number(row(a)?.seconds))),
    ("page", |_, _| Ok(Value::text(page_command(PAGE)))),
    // Figure of an experiment, with what was published of it, and its source.
    ("figure", |_, a| Ok(Value::text(record(a)?.figure()))),
    ("source", |_, a| Ok(Value::text(record(a)?.source()))),
];

/// States the measured losses of precisions.
fn measured(args: &Args<'_>) -> String {
    let of = |name: &str| {
        let kl = Precision::named(name).and_then(|p| p.measured_kl());
        kl.map_or_else(|| format!("{name}: not measured"), |kl| format!("{name} {kl:.4}"))
    };
    args.texts_from(0).map(of).collect::<Vec<_>>().join(", ")
}

/// Returns the measured recipe.
fn row(args: &Args<'_>) -> Result<&'static Figure, Fault> {
    figure(args.text(0)?, args.text(1)?, None).ok_or_else(|| args.fault(1, "a measured recipe"))
}

/// Returns the experiment that the first argument names.
fn record(args: &Args<'_>) -> Result<Experiment, Fault> {
    let found = experiment(args.text(0)?);
    if found.id.is_empty() { Err(args.fault(0, "an experiment")) } else { Ok(found) }
}
