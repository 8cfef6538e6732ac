//! Train loop: steps with their log, validation, samples of text, checkpoints, and the end by steps, by time or
//! for lack of progress. What it remembers beyond a checkpoint is read from the log, so a resumed run decides alike.

use std::path::Path;
use std::time::Instant;

use mantissa_model::{Bos, Tokenizer};
use mantissa_train::config::RunConfig;
use mantissa_train::schedule::{Decay, Schedule};
use mantissa_train::{
    GemmHealth, GemmState, HeldOut, MomentFormat, SampleOptions, StepReport, TrainError, Trainer,
};
use serde::{Deserialize, Serialize};

use super::checkpoints::Checkpoints;
use super::events::Events;
use super::log::{Log, logged_seconds};
use super::ready_run::ReadyRun;
use super::setup::Setup;
use super::start::StartMode;
use crate::error::{JobError, Result, Stopped};
use crate::host::Host;
use crate::learning::{Change, Learning};
use crate::memory;
use crate::progress::{Meter, Unit};
use crate::run_files::{LOG, LogLine, SAMPLES, TELEMETRY};

/// Share of the time left that a decay is planned for; the rest is for the last checkpoint and the export.
const PLANNED: f64 = 0.95;

/// Run in progress.
pub(crate) struct TrainLoop<'a> {
    pub(crate) trainer: Trainer,
    pub(crate) checkpoints: Checkpoints,
    settings: &'a RunConfig,
    tokenizer: &'a Tokenizer,
    resolved: String,
    held_out: Option<HeldOut>,
    /// Prompts with their tokens.
    prompts: Vec<(String, Vec<u32>)>,
    end: Option<u32>,
    log: Log,
    telemetry: Log,
    /// Log of the samples, if there are prompts.
    samples: Option<Log>,
    /// Event file of TensorBoard, if there is one.
    events: Option<Events>,
    past: Past,
    /// Last line of the log, if its step is not validated and sampled yet.
    pending: Option<LogLine>,
    /// Step of the newest checkpoint.
    saved: Option<u64>,
    begin: Instant,
    /// Matmuls with the lowest SQNR of their results in the last step with telemetry.
    pub(crate) worst_gemms: Vec<GemmHealth>,
    /// Warning of what ceased to learn in the last step.
    warning: Option<String>,
}

/// State of a run as its log records it.
#[derive(Clone, Debug, Default)]
pub(crate) struct Past {
    pub(crate) last: Option<LogLine>,
    /// Step and loss of the best validation.
    pub(crate) best: Option<(u64, f64)>,
    /// Validations since then.
    since: u64,
    /// Step at which the decay of a timed run begins, and its last step.
    decay: Option<(u64, u64)>,
    pub(crate) learning: Learning,
}

impl Past {
    /// Adds the next line of the log.
    pub(crate) fn add(&mut self, line: LogLine) {
        line.tell(&mut self.learning);
        if let Some(loss) = line.validation_loss {
            let better = self.best.is_none_or(|(_, best)| loss < best);
            (self.best, self.since) =
                if better { (Some((line.step, loss)), 0) } else { (self.best, self.since + 1) };
        }
        if let Some(last) = line.last_step {
            self.decay = Some((line.step, last));
        }
        self.last = Some(line);
    }

    fn seconds(&self) -> f64 {
        self.last.as_ref().map_or(0.0, |line| line.seconds)
    }
}

/// Text sampled during training.
#[derive(Serialize, Deserialize)]
struct SampleLine<'a> {
    step: u64,
    prompt: &'a str,
    text: String,
}

impl<'a> TrainLoop<'a> {
    /// Continues the logs of a run that is ready; `tensorboard` is the folder for event files.
    ///
    /// # Errors
    /// I/O; a prompt that cannot be encoded; event files of another run.
    pub(crate) fn new(
        ready: ReadyRun,
        settings: &'a RunConfig,
        setup: &'a Setup,
        tensorboard: Option<&Path>,
    ) -> Result<Self> {
        let ReadyRun { trainer, resolved, mut checkpoints, held_out, .. } = ready;
        let (steps, run) = (trainer.progress().steps, checkpoints.folder.dir());
        let (mut past, mut pending) = (Past::default(), None);
        let seconds = if tensorboard.is_some() { logged_seconds(&run.join(LOG), steps)? } else { 0.0 };
        let events = tensorboard.map(|dir| Events::open(dir, run, &resolved, steps, seconds));
        let mut events = events.transpose()?;
        let mut written = Ok(());
        let log = Log::open(&run.join(LOG), steps, |line: LogLine| match line.pending {
            true => pending = Some(line),
            false => {
                // Steps of a run that had no event files, or lost their last ones.
                if let Some(events) = events.as_mut().filter(|events| events.lacks(line.step))
                    && written.is_ok()
                {
                    written = events.write(&line);
                }
                past.add(line);
            }
        })?;
        written?;
        let telemetry = Log::open(&run.join(TELEMETRY), steps, |_: serde::de::IgnoredAny| {})?;
        // The samples of a pending step are taken again.
        let sampled = steps - u64::from(pending.is_some());
        let samples = || Log::open(&run.join(SAMPLES), sampled, |_: serde::de::IgnoredAny| {});
        let samples = (!settings.samples.prompts.is_empty()).then(samples).transpose()?;
        checkpoints.best = past.best.map(|(step, _)| step).filter(|_| settings.checkpoint.best);
        let encode = |prompt: &String| Ok((prompt.clone(), setup.tokenizer.encode(prompt, Bos::Auto)?));
        let prompts = settings.samples.prompts.iter().map(encode).collect::<Result<_>>()?;
        let (tokenizer, end) = (&setup.tokenizer, setup.replica.config.eos_token_ids.first().copied());
        let saved = checkpoints.folder.how().resumes().then_some(steps);
        let begin = Instant::now();
        let mut train_loop = TrainLoop {
            trainer,
            checkpoints,
            settings,
            tokenizer,
            resolved,
            held_out,
            prompts,
            end,
            log,
            telemetry,
            samples,
            events,
            past,
            pending,
            saved,
            begin,
            worst_gemms: Vec::new(),
            warning: None,
        };
        train_loop.set_decay();
        Ok(train_loop)
    }

    /// Step and loss of the best validation.
    pub(crate) fn best(&self) -> Option<(u64, f64)> {
        self.past.best
    }

    /// Parts that did not learn.
    pub(crate) fn learning(&self) -> &Learning {
        &self.past.learning
    }

    /// Loads the checkpoint with the least validation loss, if it is another than the last; returns a warning if it is
    /// lost.
    ///
    /// # Errors
    /// I/O.
    pub(crate) fn take_best(&mut self) -> Result<Option<String>> {
        let Some(step) = self.checkpoints.best.filter(|step| *step != self.trainer.progress().steps) else {
            return Ok(None);
        };
        let last = self.trainer.progress().steps;
        if self.checkpoints.load(step, &mut self.trainer, &self.resolved)? {
            return Ok(None);
        }
        self.checkpoints.load(last, &mut self.trainer, &self.resolved)?;
        let dir = self.checkpoints.folder.dir().display();
        Ok(Some(format!(
            "{dir}: the checkpoint of step {step}, the best, is lost or damaged; exporting step {last}"
        )))
    }

    /// Runs the remaining steps; returns the last loss.
    pub(crate) fn run(&mut self, host: &Host) -> Result<Option<f64>> {
        let timed = self.settings.schedule.minutes > 0.0;
        let (total, unit) = match timed {
            true => ((60.0 * self.settings.schedule.minutes) as u64, Unit::Items("seconds")),
            false => (self.settings.schedule.steps, Unit::Items("steps")),
        };
        let at = |train_loop: &Self| {
            if timed { train_loop.seconds() as u64 } else { train_loop.trainer.progress().steps }
        };
        let progress = host.progress_with_status(total, unit);
        progress.message("training");
        progress.begin_at(at(self));
        let done = self.trainer.progress().steps;
        if self.checkpoints.folder.how().resumes() {
            let of = if timed { String::new() } else { format!(" of {}", self.settings.schedule.steps) };
            host.note(&format!("resumed at step {done}{of}: {}", self.checkpoints.folder.dir().display()));
        }
        self.begin = Instant::now();
        let (before, mut loss) = (self.seconds(), None);
        while self.pending.is_some() || !self.is_over() {
            let due = match self.advance(before, &progress) {
                Err(JobError::Train(TrainError::Stopped)) => return self.stop(&progress),
                due => due?,
            };
            let line = self.past.last.as_ref();
            loss = line.map(|line| line.loss);
            line.iter().for_each(|line| progress.status(status(line)));
            progress.set(at(self));
            if let Some(warning) = self.warning.take()
                && let Err(error) = host.warn_all(&[warning + &self.hint()])
            {
                self.checkpoint()?;
                progress.finish();
                return Err(error.into());
            }
            if host.stops() {
                return self.stop(&progress);
            }
            if due {
                self.checkpoint()?;
            }
        }
        progress.finish();
        Ok(loss)
    }

    /// Names what to do about a part that does not learn.
    fn hint(&self) -> String {
        let run = self.checkpoints.folder.dir().display();
        match self.past.learning.first_lost() {
            _ if !self.past.learning.has_ceased() => format!("; fix: {}", self.fix_of_updates()),
            // What the loss destroyed, no format restores.
            _ if self.past.learning.rise().is_some() => format!("; {}", self.fix_of_rate()),
            _ if examinable(self.settings) => {
                format!("; fix: mantissa train --autopsy {run} names the cause")
            }
            Some(lost) => format!("; fix: --set 'precision.{}=\"bf16\"'", lost.operand.replace(' ', ".")),
            None => match self.settings.policy().map(|policy| policy.name) {
                Some(name) if name == "fp32" => format!("; {}", self.fix_of_rate()),
                Some(name) if name == "bf16" => "; fix: --set precision.policy=fp32".to_owned(),
                _ => "; fix: --set precision.policy=bf16".to_owned(),
            },
        }
    }

    /// Names a lower rate, and how far the loss rose.
    fn fix_of_rate(&self) -> String {
        let rise = self.past.learning.rise();
        let rise = rise.map_or_else(String::new, |(first, last)| {
            format!("the loss rose from {first:.3} to {last:.3} (smoothed); ")
        });
        let lower = self.settings.optimizer.common.lr / 10.0;
        format!("{rise}fix: a lower rate, such as --set optimizer.lr={lower:?}")
    }

    /// Names what makes updates change weights that they do not change now: a master copy if they are lost in rounding; f32 moments
    /// if they are 0, or a higher rate if the moments are in f32 already.
    fn fix_of_updates(&self) -> String {
        let (rounded, zero) = self.past.learning.lost_updates();
        let optimizer = &self.settings.optimizer;
        let master = (rounded > 0).then(|| "--set 'precision.master=\"f32\"'".to_owned());
        let update = (zero > 0).then(|| match optimizer.moments() {
            MomentFormat::F32 => format!("an optimizer.lr above {:?}", optimizer.common.lr),
            _ => "--set optimizer.moments=f32".to_owned(),
        });
        [master, update].into_iter().flatten().collect::<Vec<_>>().join(" and ")
    }

    /// Runs a step, unless the last one is pending, and finishes it; returns true if a checkpoint is due. `before` are the
    /// seconds of earlier processes.
    ///
    /// # Errors
    /// [`TrainError::Stopped`] between two steps, of which the first may be pending.
    fn advance(&mut self, before: f64, progress: &Meter) -> Result<bool> {
        if self.pending.is_none() {
            let mut line = self.step()?;
            line.seconds = before + self.begin.elapsed().as_secs_f64();
            self.plan_decay(&mut line);
            return self.finish_step(line, progress);
        }
        let Some(line) = self.pending.clone() else { return Ok(false) };
        self.finish_step(line, progress)
    }

    /// Validates, samples and logs after a step, as far as they are due; returns true if a checkpoint is.
    ///
    /// # Errors
    /// [`TrainError::Stopped`]; the line is then in the log as pending.
    fn finish_step(&mut self, mut line: LogLine, progress: &Meter) -> Result<bool> {
        let (step, first) = (line.step, line.step == 1);
        let last = self.ends_with(step, line.seconds);
        let texts = match self.measure(&mut line, last, progress) {
            Err(error) if matches!(error, JobError::Train(TrainError::Stopped)) => {
                if self.pending.is_none() {
                    line = LogLine { pending: true, validation_loss: None, ..line };
                    self.log.write(&line)?;
                    self.pending = Some(line);
                }
                return Err(error);
            }
            texts => texts?,
        };
        let decided = line.last_step.is_some();
        for ((prompt, _), text) in self.prompts.iter().zip(texts) {
            if let Some(log) = &mut self.samples {
                log.write(&SampleLine { step, prompt, text })?;
            }
        }
        match self.pending.take() {
            None => self.log.write(&line)?,
            Some(_) => {
                // The checkpoint of this step exists, so the samples must be durable before its line.
                self.samples.iter().try_for_each(Log::sync)?;
                line.pending = false;
                self.log.replace_last(&line)?;
            }
        }
        if let Some(events) = &mut self.events {
            events.write(&line)?;
        }
        self.past.add(line);
        self.set_decay();
        let improved = self.settings.checkpoint.best && self.past.best.is_some_and(|(best, _)| best == step);
        if improved {
            self.checkpoints.best = Some(step);
        }
        Ok(first
            || improved
            || decided
            || self.is_over()
            || step.is_multiple_of(self.settings.checkpoint.every))
    }

    /// Validates and samples after a step, as far as they are due; returns the texts.
    ///
    /// # Errors
    /// [`TrainError::Stopped`].
    fn measure(&mut self, line: &mut LogLine, last: bool, progress: &Meter) -> Result<Vec<String>> {
        let held_out = self.held_out.as_ref().filter(|_| self.settings.validation.is_due(line.step, last));
        line.validation_loss = held_out.map(|held_out| self.trainer.validate(held_out)).transpose()?;
        match self.settings.samples.is_due(line.step, last) {
            true => self.sample(progress),
            false => Ok(Vec::new()),
        }
    }

    /// True if no step is left.
    fn is_over(&self) -> bool {
        let patience = self.settings.validation.patience;
        self.ends_with(self.trainer.progress().steps, self.past.seconds())
            || (patience > 0 && self.past.since >= patience)
    }

    /// True if the run ends with `step`, `seconds` after its begin.
    fn ends_with(&self, step: u64, seconds: f64) -> bool {
        let minutes = self.settings.schedule.minutes;
        match self.past.decay {
            _ if minutes == 0.0 => step >= self.settings.schedule.steps,
            Some((_, last)) => step >= last || seconds >= 60.0 * minutes,
            None => seconds >= 60.0 * minutes,
        }
    }

    /// Plans the decay of a timed run when its time has come: the steps that fit into the time left, at the mean speed
    /// so far. The plan is in the log, and a checkpoint follows, so that a resumed run keeps to it.
    fn plan_decay(&self, line: &mut LogLine) {
        let all = 60.0 * self.settings.schedule.minutes;
        let begins = (1.0 - self.settings.schedule.decay_share) * all;
        if all > 0.0 && self.past.decay.is_none() && line.seconds >= begins {
            let left = PLANNED * (all - line.seconds).max(0.0);
            let steps = left / (line.seconds / line.step as f64).max(1e-9);
            line.last_step = Some(line.step + steps as u64);
        }
    }

    /// Gives the trainer the schedule of a planned decay.
    fn set_decay(&mut self) {
        let Some(decay) = self.past.decay else { return };
        self.trainer.set_schedule(decaying(self.settings, decay));
    }

    /// Continues the prompts and shows the texts.
    fn sample(&mut self, progress: &Meter) -> Result<Vec<String>> {
        let samples = &self.settings.samples;
        let step = self.trainer.progress().steps;
        let options = SampleOptions {
            tokens: samples.tokens,
            temperature: samples.temperature as f32,
            seed: self.settings.seed ^ step,
            end: self.end,
        };
        let mut texts = Vec::new();
        for (prompt, ids) in &self.prompts {
            let new = self.trainer.sample(ids, options)?;
            let text = self.tokenizer.decode(&new)?;
            progress.note(format!("step {step}: {prompt}{text}"));
            texts.push(text);
        }
        Ok(texts)
    }

    /// Runs one step, with telemetry if it is due.
    fn step(&mut self) -> Result<LogLine> {
        let begin = Instant::now();
        let (step, every) = (self.trainer.progress().steps + 1, self.settings.telemetry.every);
        let report = if every > 0 && (step == 1 || step.is_multiple_of(every)) {
            let (report, health) = self.trainer.measured_step()?;
            self.telemetry.write(&health)?;
            self.worst_gemms = worst(health.gemms);
            report
        } else {
            self.trainer.step()?
        };
        let observe = |signals| self.past.learning.observe(report.step, signals);
        let Change { not_learning, unused, warning } =
            self.trainer.signals().map(observe).unwrap_or_default();
        self.warning = warning;
        let line = log_line(&report, &self.trainer, begin, self.past.last.as_ref());
        Ok(LogLine { not_learning, unused_experts: unused, ..line })
    }

    /// Makes the logs durable, and writes a checkpoint unless there is one of this step.
    fn checkpoint(&mut self) -> Result<()> {
        // A log line that a checkpoint counts must be durable before it.
        self.log.sync()?;
        self.telemetry.sync()?;
        self.samples.iter().try_for_each(Log::sync)?;
        self.events.iter().try_for_each(Events::sync)?;
        let steps = Some(self.trainer.progress().steps);
        if self.saved != steps {
            self.checkpoints.write(&mut self.trainer, &self.resolved)?;
            self.saved = steps;
        }
        Ok(())
    }

    /// Ends the run between two steps, with a checkpoint.
    fn stop<T>(&mut self, progress: &Meter) -> Result<T> {
        self.checkpoint()?;
        progress.finish();
        let restarts = self.checkpoints.folder.how() == StartMode::Restart;
        let (steps, run) = (self.trainer.progress().steps, self.settings.out.clone());
        Err(Stopped { steps, run, restarts }.into())
    }

    /// Seconds of training so far, with those of a pending step.
    fn seconds(&self) -> f64 {
        self.pending.as_ref().map_or_else(|| self.past.seconds(), |line| line.seconds)
    }
}

/// Returns the schedule of a timed run whose decay was planned from step `from` to `last`; before it, the rate is the
/// same as without a plan.
pub(crate) fn decaying(settings: &RunConfig, (from, last): (u64, u64)) -> Schedule {
    let Schedule { peak, warmup_steps, .. } = settings.schedule();
    let (min_ratio, decay_steps) = (settings.schedule.min_ratio, last - from);
    let decay = Decay::Stable { decay_steps, min_ratio };
    Schedule { peak, warmup_steps, total_steps: last, decay }
}

/// True if an autopsy replays runs of these settings.
pub(crate) fn examinable(settings: &RunConfig) -> bool {
    let learns = settings.policy().is_some_and(|policy| policy.linear.fprop.right.learns_scales());
    let is_single = settings.parallel().is_some_and(|parallel| parallel.is_plain());
    settings.adapter.is_none() && settings.distill.is_none() && !learns && is_single
}

/// Number of matmuls listed at the end of a run.
const WORST_GEMMS: usize = 5;

/// Returns the matmuls with the lowest SQNR.
fn worst(mut gemms: Vec<GemmHealth>) -> Vec<GemmHealth> {
    // A matmul through which nothing passes is worse than any.
    let key = |gemm: &GemmHealth| match gemm.state {
        Some(GemmState::Dead) => Some(f64::NEG_INFINITY),
        _ => gemm.sqnr_db,
    };
    gemms.retain(|gemm| key(gemm).is_some());
    gemms.sort_by(|a, b| key(a).unwrap_or(0.0).total_cmp(&key(b).unwrap_or(0.0)));
    gemms.truncate(WORST_GEMMS);
    gemms
}

fn log_line(report: &StepReport, trainer: &Trainer, begin: Instant, last: Option<&LogLine>) -> LogLine {
    let seconds = begin.elapsed().as_secs_f64().max(1e-9);
    LogLine {
        step: report.step,
        loss: report.loss,
        smoothed_loss: last.map_or(report.loss, |last| 0.9 * last.smoothed_loss + 0.1 * report.loss),
        grad_norm: report.norm,
        lr: report.lr,
        loss_scale: report.loss_scale,
        skipped: trainer.progress().skipped,
        tokens: trainer.progress().tokens,
        scale_event: report.scale_event,
        tokens_per_s: report.tokens as f64 / seconds,
        seconds: 0.0,
        memory: memory::anonymous(),
        validation_loss: None,
        last_step: None,
        not_learning: None,
        unused_experts: None,
        pending: false,
    }
}

/// Formats the figures of a step for the progress line, which adds step number, remaining time and memory.
fn status(line: &LogLine) -> String {
    let norm = line.grad_norm.map_or_else(|| "overflow".to_owned(), |norm| format!("{norm:.3}"));
    let scale = if line.loss_scale == 1.0 { String::new() } else { format!(", scale {:e}", line.loss_scale) };
    let skipped = if line.skipped == 0 { String::new() } else { format!(", {} skipped", line.skipped) };
    let validation = line.validation_loss.map_or_else(String::new, |loss| format!(", validation {loss:.4}"));
    format!(
        "loss {:.4} (smoothed {:.4}){validation}, gradient norm {norm}, lr {:.2e}, {:.0} tok/s{scale}{skipped}",
        line.loss, line.smoothed_loss, line.lr, line.tokens_per_s
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    fn line(step: u64, validation_loss: Option<f64>) -> LogLine {
        LogLine {
            step,
            loss: 1.0,
            smoothed_loss: 1.0,
            grad_norm: None,
            lr: 0.1,
            loss_scale: 1.0,
            skipped: 0,
            tokens: 0,
            scale_event: None,
            tokens_per_s: 0.0,
            seconds: step as f64,
            memory: None,
            validation_loss,
            last_step: (step == 4).then_some(9),
            not_learning: None,
            unused_experts: None,
            pending: false,
        }
    }

    #[test]
    fn the_log_tells_best_patience_and_decay() {
        let mut past = Past::default();
        for (step, loss) in
            [(1, None), (2, Some(3.0)), (3, Some(2.0)), (4, Some(2.0)), (5, None), (6, Some(f64::NAN))]
        {
            past.add(line(step, loss));
        }
        assert_eq!((past.best, past.since, past.decay), (Some((3, 2.0)), 2, Some((4, 9))));
        assert_eq!(past.seconds(), 6.0);
    }
}
