//! Training loop, one step at a time: batches, gradient accumulation, loss scaling, learning rate, update;
//! and the state that a run needs to resume bit-exactly.

use std::path::Path;

use mantissa_model::Batch;
use mantissa_ranks::Traffic;
use serde::Serialize;

use crate::data::{Cursor, Data, Sample};
use crate::error::TrainError;
use crate::form::Draw;
use crate::health::{ExpertHealth, StepHealth, Watch, WeightCounts};
use crate::model::TrainModel;
use crate::optim::Optimizer;
use crate::parallel::{Command, Group, StepOrder};
use crate::param_table::ParamInfo;
use crate::scaling::{LossScaler, ScaleEvent};
use crate::schedule::Schedule;
use crate::signals::StepSignals;
use crate::stop::Stop;
use crate::teacher::Teacher;

/// Consecutive overflows until a run is aborted: the scale has then shrunk by a factor of a million, or
/// cannot shrink.
const MOST_SKIPPED: u64 = 20;

/// Settings of a run other than model, optimizer and data.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct TrainerOptions {
    /// Windows per batch.
    pub batch: usize,
    /// Batches per step (gradient accumulation).
    pub accumulate: usize,
    /// Learning rate schedule.
    pub schedule: Schedule,
}

/// Training run.
#[derive(Debug)]
pub struct Trainer {
    pub(crate) model: TrainModel,
    pub(crate) optimizer: Optimizer,
    pub(crate) scaler: Option<LossScaler>,
    batches: Box<dyn Data>,
    options: TrainerOptions,
    /// Model whose predictions replace the text's tokens in the loss.
    pub(crate) teacher: Option<Teacher>,
    /// This rank among those of the run; `None` for a single one whose steps have one leaf.
    pub(crate) group: Option<Group>,
    /// Batches of a step.
    samples: Vec<Sample>,
    pub(crate) progress: Progress,
    /// What did not learn in the last step; `None` if it was skipped.
    signals: Option<StepSignals>,
    /// True once a step looked for lost updates.
    looked: bool,
}

/// Progress of a run.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Progress {
    /// Steps done, skipped ones included.
    pub steps: u64,
    /// Steps skipped because a scaled gradient overflowed.
    pub skipped: u64,
    /// Skipped steps since the last good one.
    pub skipped_in_a_row: u64,
    /// Tokens predicted.
    pub tokens: u64,
    /// Position in the data.
    pub cursor: Cursor,
}

/// Size of an update.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct UpdateSize {
    /// Step number, from 1.
    pub step: u64,
    /// Learning rate.
    pub lr: f64,
    /// Euclidean norm of the update of all weights over that of the weights before it.
    pub ratio: f64,
}

/// Result of a step.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct StepReport {
    /// Step number, from 1.
    pub step: u64,
    /// Mean loss before the update, nats/token.
    pub loss: f64,
    /// Gradient norm before clipping; absent if it overflowed and the step was skipped.
    pub norm: Option<f64>,
    /// Learning rate.
    pub lr: f64,
    /// Loss scale.
    pub loss_scale: f64,
    /// Tokens predicted.
    pub tokens: u64,
    /// Change of the loss scale after the step, or an overflow that leaves it as it is.
    pub scale_event: Option<ScaleEvent>,
}

impl Trainer {
    /// Starts a run of `model`.
    ///
    /// # Errors
    /// [`TrainError::Tokens`] if the data has a larger vocabulary than the model.
    pub fn new(
        model: TrainModel,
        optimizer: Optimizer,
        batches: impl Data + 'static,
        options: TrainerOptions,
    ) -> Result<Self, TrainError> {
        let (found, allowed) = (batches.vocab_size(), model.config().vocab_size);
        if found > allowed {
            return Err(TrainError::Tokens { found, allowed });
        }
        let scaler = model.options.policy.scaling.map(LossScaler::new);
        let progress = Progress { cursor: batches.cursor(), ..Progress::default() };
        Ok(Trainer {
            model,
            optimizer,
            scaler,
            batches: Box::new(batches),
            options,
            teacher: None,
            group: None,
            samples: Vec::new(),
            progress,
            signals: None,
            looked: false,
        })
    }

    /// Returns what did not learn in the last step; `None` if it was skipped, or before the first.
    pub fn signals(&self) -> Option<&StepSignals> {
        self.signals.as_ref()
    }

    /// Returns the model.
    pub fn model(&self) -> &TrainModel {
        &self.model
    }

    /// Returns the model for computing losses and logits.
    pub fn model_mut(&mut self) -> &mut TrainModel {
        &mut self.model
    }

    /// Creates the file of a paged optimizer state in the folder `dir`; does nothing for other states. Must precede
    /// the first step and [`load`](Self::load).
    ///
    /// # Errors
    /// [`TrainError::Store`] if the file cannot be created, or the disk is too small.
    pub fn open_pages(&self, dir: &Path) -> Result<(), TrainError> {
        self.optimizer.open_pages(dir, 0)
    }

    /// Makes the loss of every step the KL divergence from the predictions of `teacher`. Must precede
    /// [`load`](Self::load).
    ///
    /// # Errors
    /// [`TrainError::Tokens`] if the teacher has another vocabulary than the model.
    pub fn set_teacher(&mut self, teacher: Teacher) -> Result<(), TrainError> {
        let (found, allowed) = (teacher.vocab_size(), self.model.config().vocab_size);
        if found != allowed {
            return Err(TrainError::Tokens { found, allowed });
        }
        self.teacher = Some(teacher);
        Ok(())
    }

    /// Divides the batches of every step over the leaves of `group`, whose rank 0 this is. Must precede the first step and [`load`](Self::load).
    ///
    /// # Errors
    /// [`TrainError::Rank`] if a rank is lost or has other weights.
    ///
    /// # Panics
    /// If the leaves do not divide the batches of a step, or other ranks would need the teacher.
    pub fn set_group(&mut self, mut group: Group) -> Result<(), TrainError> {
        let (accumulate, leaves) = (self.options.accumulate, group.leaves());
        assert!(
            accumulate.is_multiple_of(leaves),
            "Trainer::set_group: {accumulate} batches, {leaves} leaves"
        );
        if group.ranks() > 1 {
            assert!(self.teacher.is_none(), "Trainer::set_group: a teacher");
            group.compare_weights(&self.model)?;
            group.divide_weights(&mut self.model);
        }
        self.group = Some(group);
        Ok(())
    }

    /// Gathers the weights that other ranks hold, to keep them: those of a trained model. No step follows.
    ///
    /// # Errors
    /// [`TrainError::Rank`].
    pub fn gather_weights(&mut self) -> Result<(), TrainError> {
        let Some(remote) = self.model.remote.take() else { return Ok(()) };
        Ok(remote.gather_all(&mut self.model.params)?)
    }

    /// Ends the run on the other ranks; returns what each rank sent and how long it waited, nothing for a single rank. No step
    /// follows.
    ///
    /// # Errors
    /// [`TrainError::Rank`].
    pub fn end_group(&mut self) -> Result<Vec<Traffic>, TrainError> {
        let Some(mut group) = self.group.take_if(|group| group.ranks() > 1) else { return Ok(Vec::new()) };
        self.model.remote = None;
        group.tell_all(&Command::End)?;
        let all = group.traffic_of_all();
        group.leave()?;
        Ok(all)
    }

    /// Ends the links to the other ranks after an error, at whatever place of an exchange they are.
    pub fn abandon_group(&mut self) {
        self.model.remote = None;
        self.group = None;
    }

    /// Returns this rank among those of the run, if there are several or steps have several leaves.
    pub fn group(&self) -> Option<&Group> {
        self.group.as_ref()
    }

    /// Returns the progress.
    pub fn progress(&self) -> Progress {
        self.progress
    }

    /// Replaces the learning rate schedule from the next step on. A schedule is no part of a checkpoint.
    pub fn set_schedule(&mut self, schedule: Schedule) {
        self.options.schedule = schedule;
    }

    /// Asks `stop` between two layers. If it wants to end, [`step`](Self::step), [`validate`](Self::validate) and
    /// [`sample`](Self::sample) fail with [`TrainError::Stopped`] and leave the run as after the previous step.
    pub fn set_stop(&mut self, stop: Stop) {
        self.model.stop = Some(stop);
    }

    /// Runs one step.
    ///
    /// # Errors
    /// [`TrainError::Diverged`] if loss or gradients are not finite and lowering the loss scale cannot help;
    /// it names the first non-finite tensor, and the weights stay as after the last good step.
    /// [`TrainError::Data`], [`TrainError::Stopped`].
    pub fn step(&mut self) -> Result<StepReport, TrainError> {
        self.counted_step(None)
    }

    /// Runs one step with telemetry; bit-identical to [`step`](Self::step).
    ///
    /// # Errors
    /// As [`step`](Self::step).
    pub fn measured_step(&mut self) -> Result<(StepReport, StepHealth), TrainError> {
        let counts: Vec<_> = self.model.params.table().iter().map(|_| WeightCounts::default()).collect();
        self.model.watch = Watch::health();
        let report = self.counted_step(Some(&counts));
        let watch = std::mem::take(&mut self.model.watch);
        let report = report?;
        watch.tell_lost(&self.model.lost);
        let lost = self.model.lost_operands();
        self.signals.iter_mut().for_each(|signals| {
            (signals.measured, signals.lost) = (true, lost.clone());
        });
        let operands = watch.operands(&self.model.options.policy, &self.model.config);
        let gemms = watch.gemms(&self.model.config);
        let updated = report.norm.is_some();
        let of = |(index, (param, counts)): (usize, (&ParamInfo, &WeightCounts))| {
            let n = param.range.len();
            let (amax, squares) = self.model.grad_size(index, &param.range);
            let norm = squares.sqrt() / report.loss_scale;
            counts.health(&param.tensor.name, n, (amax / report.loss_scale as f32, norm))
        };
        let weights =
            self.model.params.table().iter().zip(&counts).enumerate().filter(|_| updated).map(of).collect();
        let routed = self.model.expert_tokens().iter().cloned().enumerate();
        let experts = routed.filter(|(_, tokens)| !tokens.is_empty());
        let experts = experts.map(|(layer, tokens)| ExpertHealth { layer, tokens }).collect();
        Ok((report, StepHealth { step: report.step, weights, operands, gemms, experts }))
    }

    /// Runs one step, bit-identical to [`step`](Self::step), and measures its update.
    ///
    /// # Errors
    /// As [`step`](Self::step).
    pub fn weighed_step(&mut self) -> Result<(StepReport, UpdateSize), TrainError> {
        let counts: Vec<_> = self.model.params.table().iter().map(|_| WeightCounts::default()).collect();
        let report = self.counted_step(Some(&counts))?;
        let of_all = counts.iter().map(WeightCounts::squares);
        let (updates, weights) = of_all.fold((0.0, 0.0), |sum, of| (sum.0 + of.0, sum.1 + of.1));
        // Without an update, or weights of 0 alone, there is nothing to compare.
        let ratio = Some((updates / weights).sqrt()).filter(|ratio| ratio.is_finite()).unwrap_or(0.0);
        Ok((report, UpdateSize { step: report.step, lr: report.lr, ratio }))
    }

    /// Returns counts of the step's updates if it is the first near the peak of the learning rate.
    fn look_for_lost_updates(&self, lr: f64) -> Option<Vec<WeightCounts>> {
        let wanted = !self.looked && self.is_near_peak(lr);
        wanted.then(|| self.model.params.table().iter().map(|_| WeightCounts::default()).collect())
    }

    /// True for a learning rate of at least half of its peak: the small updates of a warm-up or decay may be lost in a sound run.
    fn is_near_peak(&self, lr: f64) -> bool {
        lr > 0.0 && lr >= self.options.schedule.peak / 2.0
    }

    fn counted_step(&mut self, counts: Option<&[WeightCounts]>) -> Result<StepReport, TrainError> {
        let step = self.progress.steps + 1;
        let (loss_scale, lr) = (self.loss_scale(), self.options.schedule.rate(step - 1));
        let own = counts.is_none().then(|| self.look_for_lost_updates(lr)).flatten();
        let counts = counts.or(own.as_deref());
        let (nll, targets) = self
            .shared_gradients((loss_scale, lr), counts.is_some())
            .inspect_err(|_| self.batches.seek(self.progress.cursor))?;
        let loss = nll / targets as f64;
        // Before the update, which changes the weights.
        let mut signals = self.model.signals(loss);
        let updated = match &mut self.group {
            Some(group) => group.update(&mut self.model, &mut self.optimizer, (lr, loss_scale), counts),
            None => self.optimizer.counted_step(&mut self.model, lr, loss_scale.into(), counts),
        };
        let norm = match updated {
            Ok(norm) => Some(norm),
            Err(TrainError::NonFinite { .. }) => {
                self.overflow(step, loss, loss_scale)?;
                None
            }
            Err(error) => return Err(error),
        };
        if let Some(counts) = counts.filter(|_| norm.is_some() && self.is_near_peak(lr)) {
            self.looked = true;
            let (rates, rounded) = (self.optimizer.rates(), self.optimizer.rounds_updates());
            signals.lost_updates = Some(self.model.lost_updates(counts, rates, rounded));
        }
        let scale_event = self.scaler.as_mut().and_then(|scaler| scaler.update(norm.is_none()));
        self.signals = norm.map(|_| signals);
        if norm.is_none() {
            self.model.histories.forget();
            self.group.iter_mut().for_each(Group::forget_errors);
        }
        self.model.histories.commit(step);
        let before = self.progress;
        self.progress = Progress {
            steps: step,
            skipped: before.skipped + u64::from(norm.is_none()),
            skipped_in_a_row: if norm.is_none() { before.skipped_in_a_row + 1 } else { 0 },
            tokens: before.tokens + targets,
            cursor: self.batches.cursor(),
        };
        Ok(StepReport { step, loss, norm, lr, loss_scale: loss_scale.into(), tokens: targets, scale_event })
    }

    /// Loss scale of the next step.
    pub(crate) fn loss_scale(&self) -> f32 {
        self.scaler.as_ref().map_or(1.0, LossScaler::scale)
    }

    /// Returns the batches of the next step, and the factor of the gradient of their summed loss.
    pub(crate) fn next_samples(&mut self) -> Result<(f32, Vec<Sample>), TrainError> {
        let TrainerOptions { batch, accumulate, .. } = self.options;
        let mut samples = vec![Sample::default(); accumulate];
        let read = samples.iter_mut().try_for_each(|sample| self.batches.next(batch, sample));
        self.rewind();
        read?;
        let all = samples.iter().map(Sample::counted).sum::<usize>().max(1);
        Ok((self.loss_scale() / all as f32, samples))
    }

    /// Goes back to the batches of the next step.
    pub(crate) fn rewind(&mut self) {
        self.batches.seek(self.progress.cursor);
    }

    /// Reads the batches of the next step; returns the number of their targets.
    fn read_samples(&mut self) -> Result<usize, TrainError> {
        let TrainerOptions { batch, accumulate, .. } = self.options;
        self.samples.resize_with(accumulate, Sample::default);
        for sample in &mut self.samples {
            self.batches.next(batch, sample)?;
        }
        Ok(self.samples.iter().map(Sample::counted).sum::<usize>().max(1))
    }

    /// Forgets what the last step saw.
    fn begin_step(&mut self) -> Result<(), TrainError> {
        self.model.watch_weights()?;
        self.model.lost.clear();
        self.model.histories.forget();
        self.model.with_gradient = None;
        self.model.grad_sizes = None;
        Ok(())
    }

    /// Computes the gradients of the next batches, with the other ranks if there are any; returns the sum of the losses and the
    /// number of targets. `counts` asks for counts of the update.
    fn shared_gradients(
        &mut self,
        (loss_scale, lr): (f32, f64),
        counts: bool,
    ) -> Result<(f64, u64), TrainError> {
        let Some(mut group) = self.group.take() else { return self.gradients(loss_scale) };
        let losses = self.read_samples().and_then(|all| {
            self.begin_step()?;
            let (step, scale) = (self.progress.steps + 1, loss_scale / all as f32);
            let order = StepOrder { step, scale, loss_scale, lr, counts };
            let teacher = &mut self.teacher;
            group.gradients(&mut self.model, &self.samples, order, |model, batch, targets, scale| {
                match teacher {
                    Some(teacher) => model.distill_from_model(teacher, batch, targets, scale),
                    None => model.forward_backward(batch, targets, scale),
                }
            })
        });
        self.group = Some(group);
        Ok(losses?.into_iter().fold((0.0, 0), |sum, of| (sum.0 + of.0, sum.1 + of.1)))
    }

    /// Computes the gradients of the next batches on this rank; returns the sum of their losses and the number of targets.
    pub(crate) fn gradients(&mut self, loss_scale: f32) -> Result<(f64, u64), TrainError> {
        let (mut nll, mut targets) = (0.0, 0);
        let all = self.read_samples()?;
        self.model.zero_gradients();
        self.begin_step()?;
        let step = self.progress.steps + 1;
        for (batch_of_step, sample) in self.samples.iter().enumerate() {
            self.model.draw = Draw { step, batch: batch_of_step as u32 };
            let Sample { tokens, targets: next, lens } = sample;
            let scale = loss_scale / all as f32;
            let batch = Batch { tokens, lens };
            let loss = match &mut self.teacher {
                Some(teacher) => self.model.distill_from_model(teacher, &batch, next, scale)?,
                None => self.model.forward_backward(&batch, next, scale)?,
            };
            nll += loss.nll;
            targets += loss.targets as u64;
        }
        Ok((nll, targets))
    }

    /// Restores progress and scaler from a checkpoint.
    pub(crate) fn restore(&mut self, progress: Progress, scaler: Option<(f32, u32, i64)>) {
        self.progress = progress;
        self.model.histories.restored();
        self.batches.seek(progress.cursor);
        let options = self.model.options.policy.scaling;
        self.scaler = options.map(|options| match scaler {
            Some(state) => LossScaler::resume(options, state),
            None => LossScaler::new(options),
        });
    }

    /// Skips the step after a non-finite gradient if a smaller loss scale may help; fails otherwise.
    fn overflow(&mut self, step: u64, loss: f64, loss_scale: f32) -> Result<(), TrainError> {
        let bearable = |scaler: &LossScaler| {
            loss.is_finite() && !scaler.at_floor() && self.progress.skipped_in_a_row < MOST_SKIPPED
        };
        if self.scaler.as_ref().is_some_and(bearable) {
            return Ok(());
        }
        let tensor = self.first_non_finite(loss_scale)?;
        Err(TrainError::Diverged { step, loss, tensor })
    }

    /// Repeats forward and backward one operator at a time and names the first with a non-finite input or
    /// output. The numbers equal the first run's: weights are unchanged, and results do not depend on
    /// threads.
    fn first_non_finite(&mut self, loss_scale: f32) -> Result<String, TrainError> {
        self.batches.seek(self.progress.cursor);
        let threads = std::mem::replace(&mut self.model.options.threads, 1);
        self.model.watch = Watch::finite();
        let again = self.gradients(loss_scale);
        self.model.options.threads = threads;
        let found = std::mem::take(&mut self.model.watch).found(&self.model.config);
        self.batches.seek(self.progress.cursor);
        again?;
        // The sum over several batches can overflow though no batch does.
        Ok(found.or_else(|| self.model.first_non_finite()).unwrap_or_else(|| "loss".to_owned()))
    }
}
