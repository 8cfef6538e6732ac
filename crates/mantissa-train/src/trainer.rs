//! The loop of training, a step at a time: batches, accumulation, loss scaling, learning rate, update; and what must be kept for
//! a run to go on with the same bits.

use mantissa_model::Batch;

use crate::data::{Batches, Cursor, Sample};
use crate::error::TrainError;
use crate::model::TrainModel;
use crate::optim::AdamW;
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
    pub(crate) optimizer: AdamW,
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
        optimizer: AdamW,
        batches: Batches,
        options: TrainerOptions,
    ) -> Result<Self, TrainError> {
        let (found, allowed) = (batches.vocab_size(), model.config().vocab_size);
        if found > allowed {
            return Err(TrainError::Tokens { found, allowed });
        }
        let scaler = model.options.policy.scaling.map(LossScaler::new);
        let progress = Progress { cursor: batches.cursor(), ..Progress::default() };
        Ok(Trainer { model, optimizer, scaler, batches, options, sample: Sample::default(), progress })
    }

    /// The model as it is.
    pub fn model(&self) -> &TrainModel {
        &self.model
    }

    /// How far the run is.
    pub fn progress(&self) -> Progress {
        self.progress
    }

    /// Does one step.
    ///
    /// # Errors
    /// [`TrainError::Diverged`] where loss or gradients are not finite for another reason than a loss scale that is still to be
    /// lowered, naming the first tensor; the weights are then those of the last good step. [`TrainError::Data`].
    pub fn step(&mut self) -> Result<StepReport, TrainError> {
        let TrainerOptions { batch, accumulate, schedule } = self.options;
        let step = self.progress.steps + 1;
        let loss_scale = self.scaler.as_ref().map_or(1.0, LossScaler::scale);
        let (mut nll, mut targets) = (0.0, 0);
        let all = batch * accumulate * self.batches.window();
        self.model.zero_gradients();
        for _ in 0..accumulate {
            self.batches.next(batch, &mut self.sample)?;
            let Sample { tokens, targets: next, lens } = &self.sample;
            let scale = loss_scale / all as f32;
            let loss = self.model.forward_backward(&Batch { tokens, lens }, next, scale)?;
            nll += loss.nll;
            targets += loss.targets as u64;
        }
        let (loss, lr) = (nll / targets as f64, schedule.rate(step - 1));
        let norm = match self.optimizer.step(&mut self.model, lr, loss_scale.into()) {
            Ok(norm) => Some(norm),
            Err(TrainError::NonFinite { .. }) => {
                self.overflow(step, loss)?;
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
    fn overflow(&self, step: u64, loss: f64) -> Result<(), TrainError> {
        let bearable = |scaler: &LossScaler| {
            loss.is_finite() && !scaler.at_floor() && self.progress.skipped_in_a_row < MOST_SKIPPED
        };
        if self.scaler.as_ref().is_some_and(bearable) {
            return Ok(());
        }
        let tensor = self.model.first_non_finite().unwrap_or_else(|| "loss".to_owned());
        Err(TrainError::Diverged { step, loss, tensor })
    }
}
