//! The loop of training, a step at a time: batches, accumulation, loss scaling, learning rate, update; and what must be kept for
//! a run to go on with the same bits.

use mantissa_kernels::kernels;
use mantissa_model::Batch;

use crate::arena::ParamInfo;
use crate::data::{Batches, Cursor, Sample};
use crate::error::TrainError;
use crate::health::{StepHealth, Watch, WeightCounts};
use crate::model::TrainModel;
use crate::optim::Optimizer;
use crate::scaling::LossScaler;
use crate::schedule::Schedule;

/// Overflows in a row after which a run is given up: the scale has then been halved by a factor of a million, or cannot be.
const MOST_SKIPPED: u64 = 20;

/// What a run keeps fixed beside model, optimizer and data.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct TrainerOptions {
    /// Windows of a batch.
    pub batch: usize,
    /// Batches of a step, whose gradients are summed.
    pub accumulate: usize,
    /// Learning rate by step.
    pub schedule: Schedule,
}

/// A run.
#[derive(Debug)]
pub struct Trainer {
    pub(crate) model: TrainModel,
    pub(crate) optimizer: Optimizer,
    pub(crate) scaler: Option<LossScaler>,
    batches: Batches,
    options: TrainerOptions,
    sample: Sample,
    pub(crate) progress: Progress,
}

/// How far a run is.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Progress {
    /// Steps done, skipped ones among them.
    pub steps: u64,
    /// Steps whose update was left out because a scaled gradient overflowed.
    pub skipped: u64,
    /// Of those, how many came last.
    pub skipped_in_a_row: u64,
    /// Tokens predicted.
    pub tokens: u64,
    /// Place in the data.
    pub cursor: Cursor,
}

/// What a step did.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct StepReport {
    /// Number of the step, from 1.
    pub step: u64,
    /// Mean loss of its tokens before the update, nats.
    pub loss: f64,
    /// Norm of the gradients before clipping; absent where one overflowed and the update was left out.
    pub norm: Option<f64>,
    /// Learning rate.
    pub lr: f64,
    /// What the loss was multiplied by.
    pub loss_scale: f64,
    /// Tokens predicted.
    pub tokens: u64,
}

impl Trainer {
    /// A run of `model` from its beginning.
    ///
    /// # Errors
    /// [`TrainError::Tokens`] where the data was made for a larger vocabulary.
    pub fn new(
        model: TrainModel,
        optimizer: impl Into<Optimizer>,
        batches: Batches,
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
            optimizer: optimizer.into(),
            scaler,
            batches,
            options,
            sample: Sample::default(),
            progress,
        })
    }

    /// The model as it is.
    pub fn model(&self) -> &TrainModel {
        &self.model
    }

    /// How far the run is.
    pub fn progress(&self) -> Progress {
        self.progress
    }

    /// Asks `stop` between two layers whether to end a step, which [`step`](Self::step) then does with [`TrainError::Stopped`] and
    /// leaves the run as it was after the step before.
    pub fn set_stop(&mut self, stop: fn() -> bool) {
        self.model.stop = Some(stop);
    }

    /// Does one step.
    ///
    /// # Errors
    /// [`TrainError::Diverged`] where loss or gradients are not finite for another reason than a loss scale that is still to be
    /// lowered, naming the first tensor; the weights are then those of the last good step. [`TrainError::Data`],
    /// [`TrainError::Stopped`].
    pub fn step(&mut self) -> Result<StepReport, TrainError> {
        self.counted_step(None)
    }

    /// [`step`](Self::step), to the same bits, which looks at the numbers on its way.
    ///
    /// # Errors
    /// As there.
    pub fn measured_step(&mut self) -> Result<(StepReport, StepHealth), TrainError> {
        let counts: Vec<_> = self.model.params.table().iter().map(|_| WeightCounts::default()).collect();
        self.model.watch = Watch::health();
        let report = self.counted_step(Some(&counts));
        let watch = std::mem::take(&mut self.model.watch);
        let report = report?;
        let operands = watch.operands(&self.model.options.policy);
        let updated = report.norm.is_some();
        let of = |(param, counts): (&ParamInfo, &WeightCounts)| {
            let n = param.range.len();
            let amax = kernels().amax(&self.model.grads.get(param.range.clone()).widened());
            counts.health(&param.tensor.name, n, amax / report.loss_scale as f32)
        };
        let weights = self.model.params.table().iter().zip(&counts).filter(|_| updated).map(of).collect();
        Ok((report, StepHealth { step: report.step, weights, operands }))
    }

    fn counted_step(&mut self, counts: Option<&[WeightCounts]>) -> Result<StepReport, TrainError> {
        let step = self.progress.steps + 1;
        let loss_scale = self.scaler.as_ref().map_or(1.0, LossScaler::scale);
        let (nll, targets) =
            self.gradients(loss_scale).inspect_err(|_| self.batches.seek(self.progress.cursor))?;
        let (loss, lr) = (nll / targets as f64, self.options.schedule.rate(step - 1));
        let norm = match self.optimizer.step(&mut self.model, lr, loss_scale.into(), counts) {
            Ok(norm) => Some(norm),
            Err(TrainError::NonFinite { .. }) => {
                self.overflow(step, loss, loss_scale)?;
                None
            }
            Err(error) => return Err(error),
        };
        if let Some(scaler) = &mut self.scaler {
            scaler.update(norm.is_none());
        }
        let before = self.progress;
        self.progress = Progress {
            steps: step,
            skipped: before.skipped + u64::from(norm.is_none()),
            skipped_in_a_row: if norm.is_none() { before.skipped_in_a_row + 1 } else { 0 },
            tokens: before.tokens + targets,
            cursor: self.batches.cursor(),
        };
        Ok(StepReport { step, loss, norm, lr, loss_scale: loss_scale.into(), tokens: targets })
    }

    /// The gradients of the next batches: the sum of their losses, and the number of targets.
    fn gradients(&mut self, loss_scale: f32) -> Result<(f64, u64), TrainError> {
        let TrainerOptions { batch, accumulate, .. } = self.options;
        let (mut nll, mut targets) = (0.0, 0);
        let all = batch * accumulate * self.batches.window();
        self.model.zero_gradients();
        self.model.watch_weights();
        for _ in 0..accumulate {
            self.batches.next(batch, &mut self.sample)?;
            let Sample { tokens, targets: next, lens } = &self.sample;
            let scale = loss_scale / all as f32;
            let loss = self.model.forward_backward(&Batch { tokens, lens }, next, scale)?;
            nll += loss.nll;
            targets += loss.targets as u64;
        }
        Ok((nll, targets))
    }

    /// A run as a checkpoint has it.
    pub(crate) fn restore(&mut self, progress: Progress, scaler: Option<(f32, u32, i64)>) {
        self.progress = progress;
        self.batches.seek(progress.cursor);
        let options = self.model.options.policy.scaling;
        self.scaler = options.map(|options| match scaler {
            Some(state) => LossScaler::resume(options, state),
            None => LossScaler::new(options),
        });
    }

    /// Whether a gradient that is not finite is borne: where a smaller scale may help.
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

    /// Does the forward and backward of the step again, operator by operator, and names the first that gives or is given what is
    /// not finite. The numbers are those of the first time: the weights have not changed, and threads change no bit.
    fn first_non_finite(&mut self, loss_scale: f32) -> Result<String, TrainError> {
        self.batches.seek(self.progress.cursor);
        let threads = std::mem::replace(&mut self.model.options.threads, 1);
        self.model.watch = Watch::finite();
        let again = self.gradients(loss_scale);
        self.model.options.threads = threads;
        let found = std::mem::take(&mut self.model.watch).found();
        self.batches.seek(self.progress.cursor);
        again?;
        // Sums of several batches can overflow where none of them has.
        Ok(found.or_else(|| self.model.first_non_finite()).unwrap_or_else(|| "loss".to_owned()))
    }
}
