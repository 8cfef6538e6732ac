//! Shadow comparison: a share of the answers is scored again by a reference, and the KL per token is a metric.
//!
//! An engine offers its finished sequences; each `1/share`-th is queued, if there is room. A thread of its own computes the
//! logits of both models over the sequence, a chunk at a time and in turns with the engines, and the divergence
//! KL(reference ‖ served) at every generated token. Answers do not wait for it.

use std::collections::BTreeMap;
use std::ops::ControlFlow;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Receiver, RecvTimeoutError, SyncSender, channel, sync_channel};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::JoinHandle;
use std::time::Duration;

use mantissa_model::LoadError;
use mantissa_runtime::{FastModel, Single};

use crate::fair::Turns;
use crate::metrics::ShadowMetrics;
use crate::score::{self, Logits, Score, same_vocabulary};

/// Sequences that wait to be scored; others are skipped.
const WAITING: usize = 16;

/// Tokens over which the recent KL is averaged.
const RECENT: f64 = 1000.0;

/// Fewest tokens that raise the alarm.
const ENOUGH: u64 = 100;

/// Time between two looks at whether the thread is to end.
const LOOK: Duration = Duration::from_millis(50);

/// Settings of a comparison.
#[derive(Clone, Debug, PartialEq)]
pub struct ShadowOptions {
    /// Name of the model that is the reference.
    pub reference: String,
    /// Share of the sequences of the other models that is scored, greater than 0 and at most 1.
    pub share: f64,
    /// KL in nats/token beyond which the alarm is raised.
    pub limit: f64,
}

/// A finished sequence.
#[derive(Debug)]
struct Sample {
    model: String,
    tokens: Vec<u32>,
    /// Tokens of the prompt.
    prompt: usize,
}

/// Takes the finished sequences of one model.
#[derive(Debug)]
pub(crate) struct Tap {
    model: String,
    share: f64,
    /// Sequences that are due, a fraction of one.
    due: Mutex<f64>,
    sender: SyncSender<Sample>,
    metrics: ShadowMetrics,
}

impl Tap {
    /// Takes a finished sequence, if its turn has come.
    pub(crate) fn offer(&self, prompt: &[u32], generated: &[u32]) {
        if generated.is_empty() || !self.is_due() {
            return;
        }
        let tokens = [prompt, generated].concat();
        let sample = Sample { model: self.model.clone(), tokens, prompt: prompt.len() };
        if self.sender.try_send(sample).is_err() {
            self.metrics.skipped.inc();
        }
    }

    fn is_due(&self) -> bool {
        let mut due = self.due.lock().unwrap_or_else(PoisonError::into_inner);
        *due += self.share;
        let is_due = *due >= 1.0;
        if is_due {
            *due -= 1.0;
        }
        is_due
    }

    /// Recent KL in nats/token; `None` before the first token.
    pub(crate) fn kl(&self) -> Option<f64> {
        (self.metrics.tokens.get() > 0).then(|| self.metrics.recent.get())
    }
}

/// A model that is compared.
#[derive(Debug)]
pub(crate) struct Compared {
    pub(crate) name: String,
    pub(crate) model: Arc<FastModel>,
    pub(crate) metrics: ShadowMetrics,
}

/// The thread that scores. Dropping it ends the thread.
#[derive(Debug)]
pub(crate) struct Shadow {
    stop: Arc<AtomicBool>,
    thread: Option<JoinHandle<()>>,
    /// Takers of finished sequences, by model.
    pub(crate) taps: BTreeMap<String, Arc<Tap>>,
}

/// State of the thread.
struct Scorer<'m> {
    reference: Single<'m>,
    served: BTreeMap<&'m str, (Single<'m>, &'m ShadowMetrics)>,
    turns: &'m Turns,
    limit: f64,
    log: &'m (dyn Fn(&str) + Send + Sync),
    logits: Logits,
}

impl Shadow {
    /// Plans memory for sequences of up to `context` tokens and starts the thread. `log` gets a line when the alarm is
    /// raised or ends.
    ///
    /// # Errors
    /// [`LoadError::Shape`] if a vocabulary differs from the reference's, [`LoadError::Memory`], [`LoadError::Context`].
    pub(crate) fn start(
        options: &ShadowOptions,
        reference: Arc<FastModel>,
        compared: Vec<Compared>,
        context: usize,
        turns: Arc<Turns>,
        log: Arc<dyn Fn(&str) + Send + Sync>,
    ) -> Result<Self, LoadError> {
        let (sender, receiver) = sync_channel(WAITING);
        let tap = |compared: &Compared| {
            compared.metrics.limit.set(options.limit);
            let tap = Tap {
                model: compared.name.clone(),
                share: options.share,
                due: Mutex::new(0.0),
                sender: sender.clone(),
                metrics: compared.metrics.clone(),
            };
            (compared.name.clone(), Arc::new(tap))
        };
        let taps = compared.iter().map(tap).collect();
        for compared in &compared {
            same_vocabulary(&reference, &compared.model)?;
        }
        let stop = Arc::new(AtomicBool::new(false));
        let (flag, limit) = (Arc::clone(&stop), options.limit);
        let (planned, result) = channel();
        let work = move || match Scorer::new(&reference, &compared, context, limit, &turns, &*log) {
            Err(error) => {
                let _ = planned.send(Err(error));
            }
            Ok(mut scorer) => {
                let _ = planned.send(Ok(()));
                scorer.run(&receiver, &flag);
            }
        };
        let no_thread = || LoadError::Memory { what: "thread of the shadow comparison", bytes: 2 << 20 };
        let thread =
            std::thread::Builder::new().name("shadow".into()).spawn(work).map_err(|_| no_thread())?;
        result.recv().map_err(|_| no_thread())??;
        Ok(Shadow { stop, thread: Some(thread), taps })
    }
}

impl Drop for Shadow {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::Relaxed);
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

impl<'m> Scorer<'m> {
    fn new(
        reference: &'m FastModel,
        compared: &'m [Compared],
        context: usize,
        limit: f64,
        turns: &'m Turns,
        log: &'m (dyn Fn(&str) + Send + Sync),
    ) -> Result<Self, LoadError> {
        let single = |model| score::sequence(model, context);
        let one = |compared: &'m Compared| {
            Ok((compared.name.as_str(), (single(&compared.model)?, &compared.metrics)))
        };
        let served = compared.iter().map(one).collect::<Result<_, LoadError>>()?;
        let logits = Logits::new(reference.config().vocab_size);
        Ok(Scorer { reference: single(reference)?, served, turns, limit, log, logits })
    }

    /// Scores sequences until the end.
    fn run(&mut self, samples: &Receiver<Sample>, stop: &AtomicBool) {
        while !stop.load(Ordering::Relaxed) {
            match samples.recv_timeout(LOOK) {
                Ok(sample) => self.take(&sample, stop),
                Err(RecvTimeoutError::Timeout) => {}
                Err(RecvTimeoutError::Disconnected) => break,
            }
        }
    }

    /// Scores a sequence and adds it to the metrics.
    fn take(&mut self, sample: &Sample, stop: &AtomicBool) {
        let Some((served, metrics)) = self.served.get_mut(sample.model.as_str()) else { return };
        let metrics: &ShadowMetrics = metrics;
        let mut scores = Vec::with_capacity(sample.tokens.len() - sample.prompt);
        let each = |score| {
            scores.push(score);
            if stop.load(Ordering::Relaxed) { ControlFlow::Break(()) } else { ControlFlow::Continue(()) }
        };
        let models = [&mut self.reference, served];
        if score::score(models, &sample.tokens, sample.prompt, &|| self.turns.take(), &mut self.logits, each)
            .is_err()
        {
            metrics.skipped.inc();
            return;
        }
        metrics.sequences.inc();
        for Score { kl, likely: [ours, theirs] } in scores {
            let seen = metrics.tokens.inc();
            metrics.kl.inc_by(kl);
            if ours == theirs {
                metrics.top1.inc();
            }
            // The mean of the first tokens, then of about the last thousand.
            let weight = 1.0 / RECENT.min(seen as f64 + 1.0);
            let recent = metrics.recent.get();
            metrics.recent.set(recent + weight * (kl - recent));
        }
        let (recent, tokens) = (metrics.recent.get(), metrics.tokens.get());
        let alarm = i64::from(tokens >= ENOUGH && recent > self.limit);
        if metrics.alarm.set(alarm) != alarm {
            let is = if alarm == 1 { "exceeds" } else { "is within" };
            let name = &sample.model;
            let limit = self.limit;
            (self.log)(&format!("shadow: {name}: KL {recent:.3} nats/token {is} the limit of {limit}"));
        }
    }
}
