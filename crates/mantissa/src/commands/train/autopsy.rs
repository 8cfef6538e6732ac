//! `mantissa train --autopsy`: replays the step of a run that went wrong and names the matmul operand at fault.
//! Reads the run's folder and changes nothing in it.

use std::fmt::Write as _;
use std::io::{self, Write};
use std::path::{Path, PathBuf};

use anyhow::Result;
use mantissa_store::{Paths, json, sealed};
use mantissa_train::autopsy::{Autopsy, Culprit, Verdict};
use mantissa_train::config::RunConfig;
use mantissa_train::{TrainError, Trainer};
use serde::Serialize;

use super::super::report::lines;
use super::folder::{self, LogLine, RunFile, steps_of};
use super::owned::{CHECKPOINTS, How, TOKENS};
use super::setup::Setup;
use super::source;
use super::train_loop::decaying;
use crate::context::Context;
use crate::error::BadInput;
use crate::output::{Align, Table, labelled, number};
use crate::progress::Unit;

/// Maximum size of `run.json` in bytes.
const MAX_FILE: u64 = 1 << 20;

/// Rise of the loss over its exponential mean that counts as a spike: so many standard deviations of such rises.
const SPIKE: f64 = 6.0;

#[derive(Serialize)]
struct Done<'a> {
    run: &'a Path,
    /// Checkpoint from which the run was replayed; absent if it was its beginning.
    checkpoint: Option<PathBuf>,
    /// Reason for the choice of the step.
    chosen: &'a str,
    #[serde(flatten)]
    autopsy: &'a Autopsy,
    /// The verdict in a sentence.
    summary: String,
}

/// Adds the paths that the command reads.
pub(super) fn paths(run: &Path, paths: &mut Paths) {
    for name in [folder::CONFIG, folder::LOG, folder::RUN, TOKENS] {
        paths.read(run.join(name));
    }
    checkpoints(run).into_iter().for_each(|(_, path)| paths.read(path));
}

/// Runs the command.
///
/// # Errors
/// A folder that holds no run, files of the run that are damaged or missing, too little memory, I/O.
pub(super) fn run(run: &Path, step: Option<u64>, context: &Context) -> Result<()> {
    let config = run.join(folder::CONFIG);
    if !config.is_file() {
        let found = format!("no {}", folder::CONFIG);
        return Err(BadInput::new(run.display().to_string(), found, "the folder of a training run").into());
    }
    let name = config.display().to_string();
    let settings = RunConfig::parse(&name, &super::super::text::read_settings(&config)?, &[])?;
    let base = base(run, &settings)?;
    let chosen = Chosen::new(run, step)?;
    let setup = Setup::new(&settings, &name, &base, How::Resume, context)?;
    let needs = setup.memory.iter().map(|(_, bytes)| bytes).sum::<u64>() + setup.autopsy_bytes();
    context.require_memory("train --autopsy", needs + needs / 20)?;
    let mut trainer = Setup::trainer(setup.model(&settings)?, &settings, source::begun(run, &settings)?)?;
    if let Some(teacher) = setup.teacher()? {
        trainer.set_teacher(teacher)?;
    }
    if let Some(decay) = chosen.decay {
        trainer.set_schedule(decaying(&settings, decay));
    }
    let checkpoint = load(run, chosen.step, &mut trainer, &settings, context)?;
    replay(&mut trainer, chosen.step, context)?;
    let progress = context.progress(0, Unit::Items("replays"));
    progress.message("autopsy");
    let autopsy = trainer.autopsy(&mut |n| progress.set(n as u64));
    progress.finish();
    let autopsy = autopsy?;
    let done = Done { run, checkpoint, chosen: &chosen.why, summary: autopsy.to_string(), autopsy: &autopsy };
    context.report(&done, |out| human(out, &done))
}

/// Finds the folder that the settings' paths are relative to: that of the settings file, which the run's folder lies
/// in, or the working directory.
fn base(run: &Path, settings: &RunConfig) -> Result<PathBuf> {
    let out = Path::new(&settings.out);
    let full = run.canonicalize().unwrap_or_else(|_| run.to_owned());
    let parts = out.components().filter(|part| matches!(part, std::path::Component::Normal(_))).count();
    let above = full.ancestors().nth(parts).filter(|_| full.ends_with(out) && out.is_relative());
    let candidates = [above.map(Path::to_owned), Some(PathBuf::new())];
    let inline = settings.model.architecture.is_some();
    let holds = |base: &PathBuf| inline || settings.model_config(base).is_file();
    candidates.into_iter().flatten().find(holds).ok_or_else(|| {
        let what = format!("{}: model.config", run.join(folder::CONFIG).display());
        let error = BadInput::new(what, "no such file", "the model's config.json");
        error.with_fix("run the command in the folder of the run's settings file").into()
    })
}

/// Step to examine.
#[derive(Debug, PartialEq)]
struct Chosen {
    step: u64,
    why: String,
    /// Steps at which the planned decay of a timed run begins and ends.
    decay: Option<(u64, u64)>,
}

impl Chosen {
    fn new(run: &Path, step: Option<u64>) -> Result<Self> {
        let mut log = Vec::new();
        let path = run.join(folder::LOG);
        if path.is_file() {
            lines::read(&path, |line: LogLine| {
                log.push(line);
                Ok(())
            })?;
        }
        let last = log.last().map_or(0, |line| line.step);
        if let Some(step) = step {
            if step == 0 || step > last + 1 {
                let allowed = format!("1 to {}, the steps of the run and the one after", last + 1);
                return Err(BadInput::new("--step", step.to_string(), allowed).into());
            }
            return Ok(Chosen { step, why: "--step".to_owned(), decay: decay_of(&log) });
        }
        let about = run.join(folder::RUN);
        let outcome = match about.is_file() {
            true => {
                serde_json::from_value::<RunFile>(json::read_strict(&about, MAX_FILE, "a run's run.json")?)
                    .map(|about| about.outcome)
                    .unwrap_or_default()
            }
            false => String::new(),
        };
        Self::find(&log, &outcome).ok_or_else(|| {
            let found = format!("{last} steps without a divergence, a skipped step or a loss spike");
            let error = BadInput::new(run.display().to_string(), found, "a run that went wrong");
            error.with_fix("name the step with --step").into()
        })
    }

    /// Finds the step that went wrong: the one that ended the run, else the last skipped one, else the largest spike
    /// of the loss.
    fn find(log: &[LogLine], outcome: &str) -> Option<Self> {
        let decay = decay_of(log);
        // The message of a divergence begins with its step.
        let diverged = outcome.strip_prefix("step ").and_then(|rest| rest.split(':').next()?.parse().ok());
        if let Some(step) = diverged {
            return Some(Chosen { step, why: format!("the run ended: {outcome}"), decay });
        }
        if let Some(line) = log.iter().rev().find(|line| line.grad_norm.is_none()) {
            let why = format!("skipped: a gradient overflowed at loss scale {:e}", line.loss_scale);
            return Some(Chosen { step: line.step, why, decay });
        }
        let rises: Vec<f64> = log.windows(2).map(|pair| pair[1].loss - pair[0].smoothed_loss).collect();
        let (at, rise) = rises.iter().copied().enumerate().max_by(|a, b| a.1.total_cmp(&b.1))?;
        let others = rises.iter().enumerate().filter(|(i, _)| *i != at).map(|(_, rise)| rise * rise);
        let deviation = (others.sum::<f64>() / (rises.len() as f64 - 1.0).max(1.0)).sqrt();
        let (before, spike) = (&log[at], &log[at + 1]);
        (rise > SPIKE * deviation && rise > 0.05 * before.smoothed_loss).then(|| Chosen {
            step: spike.step,
            why: format!("loss spike: {:.3} after {:.3} (smoothed)", spike.loss, before.smoothed_loss),
            decay,
        })
    }
}

/// Returns the steps at which the planned decay of a timed run begins and ends, from its log.
fn decay_of(log: &[LogLine]) -> Option<(u64, u64)> {
    log.iter().rev().find_map(|line| Some((line.step, line.last_step?)))
}

/// Returns the checkpoints of the run with their steps, oldest first.
fn checkpoints(run: &Path) -> Vec<(u64, PathBuf)> {
    let entries = std::fs::read_dir(run.join(CHECKPOINTS)).into_iter().flatten().flatten();
    let mut all: Vec<_> = entries
        .filter_map(|entry| Some((steps_of(&entry.file_name().to_string_lossy())?, entry.path())))
        .collect();
    all.sort();
    all
}

/// Loads the last sound checkpoint before `step`; without one the run is replayed from its beginning.
fn load(
    run: &Path,
    step: u64,
    trainer: &mut Trainer,
    settings: &RunConfig,
    context: &Context,
) -> Result<Option<PathBuf>> {
    let resolved = settings.resolved();
    for (_, path) in checkpoints(run).into_iter().rev().filter(|(steps, _)| *steps < step) {
        match trainer.load(&path, &resolved) {
            Ok(()) => return Ok(Some(path)),
            Err(TrainError::Store(error)) if sealed::is_damage(&error) => {
                context.warn(&format!("{}: is damaged; going back to the one before", path.display()));
            }
            Err(error) => return Err(error.into()),
        }
    }
    if step > 1 {
        let more = step - 1;
        context.note(&format!("no checkpoint before step {step}: replaying {more} steps from the beginning"));
    }
    Ok(None)
}

/// Runs the steps before `step`, or up to the one that diverges.
fn replay(trainer: &mut Trainer, step: u64, context: &Context) -> Result<()> {
    let first = trainer.progress().steps;
    let progress = context.progress(step.saturating_sub(1 + first), Unit::Items("steps"));
    progress.message("replaying");
    while trainer.progress().steps + 1 < step {
        match trainer.step() {
            Ok(_) => progress.set(trainer.progress().steps - first),
            Err(TrainError::Diverged { .. }) => break,
            Err(error) => return Err(error.into()),
        }
    }
    progress.finish();
    Ok(())
}

fn human(out: &mut dyn Write, done: &Done<'_>) -> io::Result<()> {
    let autopsy = done.autopsy;
    let from = done.checkpoint.as_ref().and_then(|path| path.file_stem());
    let from = from.map_or_else(|| "the beginning".to_owned(), |name| name.to_string_lossy().into_owned());
    labelled(out, "step", &format!("{} ({}), replayed from {from}", autopsy.step, done.chosen))?;
    let both =
        |run: Option<f64>, f32: Option<f64>| format!("{} in the run, {} in f32", figure(run), figure(f32));
    labelled(out, "loss", &both(autopsy.loss.run, autopsy.loss.f32))?;
    let norm = both(autopsy.grad_norm.run, autopsy.grad_norm.f32);
    labelled(out, "gradient", &format!("norm {norm}; error {}", percent(autopsy.error)))?;
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

/// Names what to do where no operand is at fault.
fn hint(autopsy: &Autopsy) -> Option<String> {
    let before = autopsy.step.checked_sub(1).filter(|step| *step > 0);
    match autopsy.verdict {
        Verdict::Sound | Verdict::NotPrecision => Some(match before {
            Some(step) => format!(
                "lower optimizer.lr, or look at the step before, whose update led here: --step {step}"
            ),
            None => "lower model.std or optimizer.lr".to_owned(),
        }),
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

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    fn log(losses: &[f64]) -> Vec<LogLine> {
        let mut smoothed = losses[0];
        let line = |(i, loss): (usize, &f64)| {
            smoothed = 0.9 * smoothed + 0.1 * loss;
            let value = serde_json::json!({
                "step": i + 1, "loss": loss, "smoothed_loss": smoothed, "grad_norm": 1.0, "lr": 1e-3, "loss_scale": 1.0,
                "skipped": 0, "tokens": 1, "tokens_per_s": 1.0, "memory": null
            });
            serde_json::from_value(value).unwrap()
        };
        losses.iter().enumerate().map(line).collect()
    }

    #[test]
    fn the_step_that_went_wrong_is_found() {
        let falling: Vec<f64> =
            (0..40).map(|i| 4.0 - 0.03 * f64::from(i) + 0.02 * f64::from(i % 3)).collect();
        assert_eq!(Chosen::find(&log(&falling), "done"), None);
        let mut spiked = falling.clone();
        spiked[24] = 5.5;
        assert_eq!(Chosen::find(&log(&spiked), "done").unwrap().step, 25);
        let mut skipped = log(&falling);
        skipped[9].grad_norm = None;
        assert_eq!(Chosen::find(&skipped, "done").unwrap().step, 10);
        let diverged = "step 41: expected finite values, got loss NaN, first non-finite tensor lm_head";
        assert_eq!(Chosen::find(&skipped, diverged).unwrap().step, 41);
        assert_eq!(Chosen::find(&log(&falling), "runs/a: Interrupted after step 40. Rerun"), None);
        assert_eq!(Chosen::find(&[], ""), None);
    }
}
