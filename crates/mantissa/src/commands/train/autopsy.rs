//! `mantissa train --autopsy`: replays the step of a run that went wrong and names the matmul operand at fault.
//! Reads the run's folder and changes nothing in it.

use std::fmt::Write as _;
use std::io::{self, Write};
use std::path::Path;

use anyhow::Result;
use mantissa_jobs::Job;
use mantissa_jobs::train::{AutopsyReport, TrainAutopsy};
use mantissa_store::Paths;
use mantissa_train::UpdateSize;
use mantissa_train::autopsy::{Autopsy, Culprit, Verdict};

use crate::context::Context;
use crate::output::{Align, Table, labelled, number};

/// Adds the paths that the command reads.
pub(super) fn paths(run: &Path, paths: &mut Paths) {
    let job = TrainAutopsy { run: run.to_owned(), step: None };
    job.inputs().into_iter().for_each(|path| paths.read(path));
}

/// Runs the command.
///
/// # Errors
/// As [`TrainAutopsy`].
pub(super) fn run(run: &Path, step: Option<u64>, context: &Context) -> Result<()> {
    let done = TrainAutopsy { run: run.to_owned(), step }.run(context)?;
    context.report(&done, |out| human(out, &done))
}

/// Definition of the error of a step's gradient, which is not that of its norm.
const ROOT: &str = "the root mean square of the tensors' relative errors";

fn human(out: &mut dyn Write, done: &AutopsyReport) -> io::Result<()> {
    let autopsy = &done.autopsy;
    let from = done.checkpoint.as_ref().and_then(|path| path.file_stem());
    let from = from.map_or_else(|| "the beginning".to_owned(), |name| name.to_string_lossy().into_owned());
    labelled(out, "step", &format!("{} ({}), replayed from {from}", autopsy.step, done.chosen))?;
    let both =
        |run: Option<f64>, f32: Option<f64>| format!("{} in the run, {} in f32", figure(run), figure(f32));
    labelled(out, "loss", &both(autopsy.loss.run, autopsy.loss.f32))?;
    let norm = both(autopsy.grad_norm.run, autopsy.grad_norm.f32);
    labelled(out, "gradient", &format!("norm {norm}; error {}, {ROOT}", percent(autopsy.error)))?;
    labelled(out, "verdict", &done.summary)?;
    for culprit in &autopsy.culprits {
        of_culprit(out, culprit)?;
    }
    if let Some(hint) = hint(autopsy) {
        labelled(out, "next", &hint)?;
    }
    labelled(out, "replays", &format!("{} of {} operands", autopsy.replays, autopsy.operands))?;
    if autopsy.switched.is_empty() {
        return Ok(());
    }
    writeln!(out)?;
    let columns = [
        ("operands in the run's format, others f32", Align::Left),
        ("gradient error", Align::Right),
        ("share", Align::Right),
    ];
    let mut table = Table::new(columns);
    for switched in &autopsy.switched {
        table.row([switched.operands.clone(), percent(switched.error), share(switched.share)]);
    }
    table.write(out)
}

fn of_culprit(out: &mut dyn Write, culprit: &Culprit) -> io::Result<()> {
    let Culprit { tensor, format, error, share: of_all, error_without, health, remedy, .. } = culprit;
    let mut text = format!("{tensor}, {format}");
    if let Some(health) = health {
        let amax = health.amax.map_or_else(|| "not finite".to_owned(), |amax| number(Some(amax.into()), 4));
        let _ = write!(
            text,
            ": largest {amax}, {} become 0, {} clipped",
            percent(Some(health.underflowed)),
            percent(Some(health.saturated))
        );
        if let Some(sqnr) = health.sqnr_db {
            let _ = write!(text, ", SQNR {sqnr:.1} dB");
        }
    }
    labelled(out, "tensor", &text)?;
    let effect = format!(
        "error {} alone ({} of all), {} without it",
        percent(*error),
        share(*of_all),
        percent(*error_without)
    );
    labelled(out, "effect", &effect)?;
    let set: Vec<_> = remedy.set.iter().map(|set| format!("--set '{set}'")).collect();
    let with =
        remedy.error.map_or_else(String::new, |error| format!(" (error {} alone)", percent(Some(error))));
    labelled(out, "fix", &format!("{}: {}{with}", set.join(" "), remedy.why))
}

/// Norm of an update over that of the weights at which small models learn.
const USUAL: f64 = 0.01;

/// Names what to do where no operand is at fault.
fn hint(autopsy: &Autopsy) -> Option<String> {
    let before = autopsy.step.checked_sub(1).filter(|step| *step > 0);
    match autopsy.verdict {
        Verdict::Rate => autopsy.update.map(|UpdateSize { lr, ratio, .. }| {
            format!("lower the learning rate: --set optimizer.lr={}", number(Some(lr * USUAL / ratio), 1))
        }),
        Verdict::Sound | Verdict::NotPrecision => Some(match before {
            Some(step) => format!(
                "lower optimizer.lr, or look at the step before, whose update led here: --step {step}"
            ),
            None => "lower model.std or optimizer.lr".to_owned(),
        }),
        Verdict::Spread => Some(
            "all operands together are too coarse: a policy of more bits, --set precision.policy=bf16, or fp32 if it is that"
                .to_owned(),
        ),
        _ => None,
    }
}

fn figure(value: Option<f64>) -> String {
    value.map_or_else(|| "not finite".to_owned(), |value| number(Some(value), 4))
}

fn percent(value: Option<f64>) -> String {
    value.map_or_else(|| "not finite".to_owned(), |value| format!("{} %", number(Some(100.0 * value), 3)))
}

/// Formats a share, which is unknown where the whole is not finite.
fn share(value: Option<f64>) -> String {
    value.map_or_else(|| "-".to_owned(), |value| format!("{} %", number(Some(100.0 * value), 3)))
}
