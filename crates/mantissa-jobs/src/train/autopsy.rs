//! Autopsy of a training run: replays the step that went wrong and names the matmul operand at fault. Reads the run's
//! folder and changes nothing in it.

use std::path::{Path, PathBuf};

use mantissa_store::{json, sealed};
use mantissa_train::autopsy::Autopsy;
use mantissa_train::config::RunConfig;
use mantissa_train::{LostOperand, TrainError, Trainer, UpdateSize};
use serde::{Deserialize, Serialize};

use super::ranks::Ranks;
use super::setup::Setup;
use super::source;
use super::start::StartMode;
use super::train_loop::{decaying, examinable};
use crate::embedded;
use crate::error::{BadInput, Result};
use crate::host::Host;
use crate::job::{Job, JobOutput};
use crate::json_lines;
use crate::learning::Learning;
use crate::progress::Unit;
use crate::run_files::{CHECKPOINTS, CONFIG, LOG, LogLine, RUN, RunFile, TOKENS, steps_of};
use crate::settings::read_settings;

/// Maximum size of `run.json` in bytes.
const MAX_FILE: u64 = 1 << 20;

/// Rise of the loss over its exponential mean that counts as a spike: so many standard deviations of such rises.
const SPIKE: f64 = 6.0;

/// Updates before the step that are measured.
const UPDATES: u64 = 10;

/// Steps that are replayed from the beginning for lack of a checkpoint from which an update before the step can be measured.
const REPLAYED: u64 = 200;

/// Autopsy of a step of a run.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct TrainAutopsy {
    /// Folder of the run.
    pub run: PathBuf,
    /// Step to examine; `None` for the one that failed, or in which something ceased to learn.
    pub step: Option<u64>,
}

/// Findings of an autopsy.
#[derive(Debug, Serialize)]
pub struct AutopsyReport {
    /// Folder of the run.
    pub run: PathBuf,
    /// Checkpoint from which the run was replayed; absent if it was its beginning.
    pub checkpoint: Option<PathBuf>,
    /// Reason for the choice of the step.
    pub chosen: String,
    /// Losses, verdict and culprits.
    #[serde(flatten)]
    pub autopsy: Autopsy,
    /// The verdict in a sentence.
    pub summary: String,
}

/// Run and step of an autopsy, ready to be replayed.
struct Subject {
    settings: RunConfig,
    chosen: Chosen,
    setup: Setup,
}

impl TrainAutopsy {
    fn subject(&self, host: &Host) -> Result<Subject> {
        let config = self.run.join(CONFIG);
        if !config.is_file() {
            let found = format!("no {CONFIG}");
            let run = self.run.display().to_string();
            return Err(BadInput::new(run, found, "the folder of a training run").into());
        }
        let name = config.display().to_string();
        let settings = RunConfig::parse(&name, &read_settings(&config)?, &[])?;
        self.require_examinable(&settings)?;
        let base = base(&self.run, &settings)?;
        let chosen = Chosen::new(&self.run, self.step)?;
        let setup = Setup::new(&settings, &name, &base, (StartMode::Resume, &Ranks::default()), host)?;
        Ok(Subject { settings, chosen, setup })
    }
}

impl TrainAutopsy {
    /// Refuses a run whose step cannot be replayed, before anything is; the fix begins with the operand that its log names.
    fn require_examinable(&self, settings: &RunConfig) -> Result<()> {
        if examinable(settings) {
            return Ok(());
        }
        let (field, found, allowed, other) = if settings.adapter.is_some() {
            (
                "adapter",
                "an adapter on frozen weights",
                "a run that trains all weights, because a step is replayed with all weights in f32",
                "rerun it with --adapter none, and examine that run",
            )
        } else if settings.distill.is_some() {
            (
                "distill",
                "the loss on a teacher's predictions",
                "a run on the tokens of a text, whose loss a step is replayed with",
                "run mantissa finetune --adapter none on the same data and policy, and examine that run",
            )
        } else if settings.parallel().is_some_and(|parallel| !parallel.is_plain()) {
            (
                "parallel",
                "several leaves, or gradients in few bits",
                "a run of one leaf, because a step is replayed on one rank",
                "rerun it without [parallel], and examine that run",
            )
        } else {
            (
                "precision.fprop.w.scales",
                "learned scales",
                "scales that follow from the weights, because a step is replayed with operands apart",
                "rerun it with a scheme whose scales are not learned, and examine that run",
            )
        };
        let mut learning = Learning::default();
        read_log(&self.run)?.iter().for_each(|line| line.tell(&mut learning));
        let fix = match learning.first_lost() {
            Some(LostOperand { linear, operand, .. }) => format!(
                "--set 'precision.{}=\"bf16\"', as {operand} of {linear} lost its signal; or {other}",
                operand.replace(' ', ".")
            ),
            None => other.to_owned(),
        };
        let what = format!("{}: {field}", self.run.display());
        Err(BadInput::new(what, found, allowed).with_fix(fix).into())
    }
}

impl Subject {
    fn needs(&self) -> u64 {
        self.setup.needs() + self.setup.autopsy_bytes()
    }
}

impl Job for TrainAutopsy {
    const NAME: &'static str = "train-autopsy";
    const VERSION: u32 = 1;
    type Report = AutopsyReport;

    fn inputs(&self) -> Vec<PathBuf> {
        let files = [CONFIG, LOG, RUN, TOKENS].map(|name| self.run.join(name));
        files.into_iter().chain(checkpoints(&self.run).into_iter().map(|(_, path)| path)).collect()
    }

    fn outputs(&self) -> Vec<JobOutput> {
        Vec::new()
    }

    fn memory(&self, host: &Host) -> Result<u64> {
        Ok(self.subject(host)?.needs())
    }

    /// Replays the step, then in f32 and with single operands in the run's format.
    ///
    /// # Errors
    /// A folder that holds no run, files of the run that are damaged or missing, too little memory, I/O.
    fn run(&self, host: &Host) -> Result<AutopsyReport> {
        let subject = self.subject(host)?;
        let needs = subject.needs();
        host.require_memory("train --autopsy", needs + needs / 20)?;
        let Subject { settings, chosen, setup } = subject;
        let data = source::begun(&self.run, &settings)?;
        let mut trainer = Setup::trainer(setup.replica.model(&settings, (0, 1))?, &settings, data)?;
        if let Some(teacher) = setup.teacher()? {
            trainer.set_teacher(teacher)?;
        }
        if let Some(decay) = chosen.decay {
            trainer.set_schedule(decaying(&settings, decay));
        }
        let checkpoint = load(&self.run, chosen.step, &mut trainer, &settings, host)?;
        let update = replay(&mut trainer, chosen.step, host)?;
        let progress = host.progress(0, Unit::Items("replays"));
        progress.message("autopsy");
        let autopsy = trainer.autopsy_after(update, &mut |n| progress.set(n as u64));
        progress.finish();
        let autopsy = autopsy?;
        let summary = autopsy.to_string();
        Ok(AutopsyReport { run: self.run.clone(), checkpoint, chosen: chosen.why, autopsy, summary })
    }
}

/// Finds the folder that the settings' paths are relative to: that of the settings file, which the run's folder lies
/// in, or the working directory, or that of the embedded model, if the run started from it.
fn base(run: &Path, settings: &RunConfig) -> Result<PathBuf> {
    let out = Path::new(&settings.out);
    let full = run.canonicalize().unwrap_or_else(|_| run.to_owned());
    let parts = out.components().filter(|part| matches!(part, std::path::Component::Normal(_))).count();
    let above = full.ancestors().nth(parts).filter(|_| full.ends_with(out) && out.is_relative());
    let unpacked = settings.model.init.as_deref() == Some(embedded::NAME);
    let unpacked = unpacked.then(embedded::parent).transpose()?;
    let candidates = [above.map(Path::to_owned), Some(PathBuf::new()), unpacked];
    let inline = settings.model.architecture.is_some();
    let holds = |base: &PathBuf| inline || settings.model_config(base).is_file();
    candidates.into_iter().flatten().find(holds).ok_or_else(|| {
        let what = format!("{}: model.config", run.join(CONFIG).display());
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
        let log = read_log(run)?;
        let last = log.last().map_or(0, |line| line.step);
        if let Some(step) = step {
            if step == 0 || step > last + 1 {
                let allowed = format!("1 to {}, the steps of the run and the one after", last + 1);
                return Err(BadInput::new("--step", step.to_string(), allowed).into());
            }
            return Ok(Chosen { step, why: "--step".to_owned(), decay: decay_of(&log) });
        }
        let about = run.join(RUN);
        let outcome = match about.is_file() {
            true => {
                serde_json::from_value::<RunFile>(json::read_strict(&about, MAX_FILE, "a run's run.json")?)
                    .map(|about| about.outcome)
                    .unwrap_or_default()
            }
            false => String::new(),
        };
        Self::find(&log, &outcome).ok_or_else(|| {
            let found =
                format!("{last} steps in which every parameter got a gradient, none skipped, no loss spike");
            let error = BadInput::new(run.display().to_string(), found, "a run that went wrong");
            error.with_fix("name the step with --step").into()
        })
    }

    /// Finds the step that went wrong: the one that ended the run, else the first in which something ceased to learn, else the
    /// last skipped one, else the largest spike of the loss, else its largest rise if the run ended above its start.
    fn find(log: &[LogLine], outcome: &str) -> Option<Self> {
        let decay = decay_of(log);
        // The message of a divergence begins with its step.
        let diverged = outcome.strip_prefix("step ").and_then(|rest| rest.split(':').next()?.parse().ok());
        if let Some(step) = diverged {
            return Some(Chosen { step, why: format!("the run ended: {outcome}"), decay });
        }
        let mut learning = Learning::default();
        for line in log {
            line.tell(&mut learning);
            if let Some(why) = learning.has_ceased().then(|| learning.summary()).flatten() {
                return Some(Chosen { step: line.step, why, decay });
            }
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
        let is_spike = rise > SPIKE * deviation && rise > 0.05 * before.smoothed_loss;
        let has_risen = learning.rise().is_some();
        let what = if is_spike { "loss spike" } else { "the loss rose" };
        let why = format!("{what}: {:.3} after {:.3} (smoothed)", spike.loss, before.smoothed_loss);
        (is_spike || has_risen).then_some(Chosen { step: spike.step, why, decay })
    }
}

/// Reads the log of a run; empty without one.
fn read_log(run: &Path) -> Result<Vec<LogLine>> {
    let (mut log, path) = (Vec::new(), run.join(LOG));
    if path.is_file() {
        json_lines::read(&path, |line: LogLine| {
            log.push(line);
            Ok(())
        })?;
    }
    Ok(log)
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

/// Loads the last sound checkpoint from which at least one update before `step` is replayed, so that it can be measured, else
/// the last sound one; without any the run is replayed from its beginning.
fn load(
    run: &Path,
    step: u64,
    trainer: &mut Trainer,
    settings: &RunConfig,
    host: &Host,
) -> Result<Option<PathBuf>> {
    let resolved = settings.resolved();
    let before =
        |least: u64| checkpoints(run).into_iter().rev().filter(move |(steps, _)| steps + least < step);
    let mut candidates: Vec<_> = before(1).collect();
    if candidates.is_empty() && step > REPLAYED {
        candidates.extend(before(0));
    }
    for (_, path) in candidates {
        match trainer.load(&path, &resolved) {
            Ok(()) => return Ok(Some(path)),
            Err(TrainError::Store(error)) if sealed::is_damage(&error) => {
                host.warn(&format!("{}: is damaged; going back to the one before", path.display()));
            }
            Err(error) => return Err(error.into()),
        }
    }
    if step > 1 {
        let more = step - 1;
        host.note(&format!("no checkpoint from which an update before step {step} follows: replaying {more} steps from the beginning"));
    }
    Ok(None)
}

/// Runs the steps before `step`, or up to the one that diverges; returns the largest of their last updates.
fn replay(trainer: &mut Trainer, step: u64, host: &Host) -> Result<Option<UpdateSize>> {
    let mut largest: Option<UpdateSize> = None;
    let first = trainer.progress().steps;
    let progress = host.progress(step.saturating_sub(1 + first), Unit::Items("steps"));
    progress.message("replaying");
    while trainer.progress().steps + 1 < step {
        let measures = trainer.progress().steps + 1 + UPDATES >= step;
        let stepped = match measures {
            true => trainer.weighed_step().map(|(_, update)| {
                if largest.is_none_or(|largest| update.ratio > largest.ratio) {
                    largest = Some(update);
                }
            }),
            false => trainer.step().map(drop),
        };
        match stepped {
            Ok(()) => progress.set(trainer.progress().steps - first),
            Err(TrainError::Diverged { .. }) => break,
            Err(error) => return Err(error.into()),
        }
    }
    progress.finish();
    Ok(largest)
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;
    use crate::learning::NotLearning;

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
        // What ceased to learn comes before what was skipped, and after what ended the run.
        let mut dead = skipped.clone();
        dead[4].not_learning = Some(NotLearning {
            parameters: 9,
            without_gradient: 2,
            dead: vec!["b".to_owned(), "a".to_owned()],
            lost: Vec::new(),
            ..NotLearning::default()
        });
        let found = Chosen::find(&dead, "done").unwrap();
        assert_eq!(found.step, 5);
        assert!(found.why.starts_with("2 of 9 parameters stopped learning"), "{}", found.why);
        assert_eq!(Chosen::find(&dead, diverged).unwrap().step, 41);
        // A run that ends far above its start, without a spike of its own.
        let rising: Vec<f64> = (0..9).map(|i| 4.0 + 3.0 * f64::from(i) + 0.1 * f64::from(i % 2)).collect();
        assert!(Chosen::find(&log(&rising), "done").unwrap().why.starts_with("the loss rose"));
    }
}
