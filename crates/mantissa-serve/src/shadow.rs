//! Shadow comparison: a share of the answers is scored again by a reference, and the KL per token is a metric.
//!
//! An engine offers its finished sequences; each `1/share`-th is queued, if there is room. A thread of its own computes the
//! logits of both models over the sequence, a chunk at a time and in turns with the engines, and the divergence
//! KL(reference ‖ served) at every generated token. Answers do not wait for it.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Receiver, RecvTimeoutError, SyncSender, channel, sync_channel};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::JoinHandle;
use std::time::Duration;

use mantissa_eval::divergence;
use mantissa_model::{ForwardError, LoadError};
use mantissa_runtime::{FastModel, Single};

use crate::engine::Turns;
use crate::metrics::ShadowMetrics;

/// Sequences that wait to be scored; others are skipped.
const WAITING: usize = 16;

/// Tokens of a pass: attention gives the same bits when a sequence is cut at its multiples.
const CHUNK: usize = 64;

/// Positions whose logits are held at once.
const ROWS: usize = 8;

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
    logits: [Vec<f32>; 2],
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

/// Checks that two models have the same number of tokens.
fn same_vocabulary(reference: &FastModel, served: &FastModel) -> Result<(), LoadError> {
    let (ours, theirs) = (reference.config(), served.config());
    if ours.vocab_size == theirs.vocab_size {
        return Ok(());
    }
    Err(LoadError::Shape {
        location: "model compared with the reference".into(),
        tensor: theirs.embedding_module(),
        found: vec![theirs.vocab_size, theirs.hidden_size],
        expected: vec![ours.vocab_size, theirs.hidden_size],
    })
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
        let single = |model| Single::new(model, CHUNK, context);
        let one = |compared: &'m Compared| {
            Ok((compared.name.as_str(), (single(&compared.model)?, &compared.metrics)))
        };
        let served = compared.iter().map(one).collect::<Result<_, LoadError>>()?;
        let rows = ROWS * reference.config().vocab_size;
        let logits = [vec![0.0; rows], vec![0.0; rows]];
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
        let scored = score(&mut self.reference, served, sample, self.turns, &mut self.logits, stop);
        let Ok(scores) = scored else {
            metrics.skipped.inc();
            return;
        };
        metrics.sequences.inc();
        for (kl, same) in scores {
            let seen = metrics.tokens.inc();
            metrics.kl.inc_by(kl);
            if same {
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

/// Computes KL(reference ‖ served) and whether both have the same most probable token, at every generated token.
fn score<'m>(
    reference: &mut Single<'m>,
    served: &mut Single<'m>,
    sample: &Sample,
    turns: &Turns,
    logits: &mut [Vec<f32>; 2],
    stop: &AtomicBool,
) -> Result<Vec<(f64, bool)>, ForwardError> {
    let mut scores = Vec::with_capacity(sample.tokens.len() - sample.prompt);
    let vocabulary = reference.model().config().vocab_size;
    // The last token has no successor.
    let inputs = &sample.tokens[..sample.tokens.len() - 1];
    [&mut *reference, &mut *served].into_iter().for_each(Single::clear);
    for (chunk, start) in inputs.chunks(CHUNK).zip((0..).step_by(CHUNK)) {
        if stop.load(Ordering::Relaxed) {
            break;
        }
        for model in [&mut *reference, &mut *served] {
            let _turn = turns.take();
            model.extend(chunk)?;
        }
        let first = (sample.prompt - 1).saturating_sub(start).min(chunk.len());
        let mut at = first;
        while at < chunk.len() {
            let rows = at..(at + ROWS).min(chunk.len());
            let [ours, theirs] = &mut *logits;
            let len = rows.len() * vocabulary;
            let turn = turns.take();
            reference.logits(rows.clone(), &mut ours[..len])?;
            served.logits(rows.clone(), &mut theirs[..len])?;
            drop(turn);
            for (p, q) in ours[..len].chunks(vocabulary).zip(theirs[..len].chunks(vocabulary)) {
                scores.push((divergence(p, q), most_probable(p) == most_probable(q)));
            }
            at = rows.end;
        }
    }
    Ok(scores)
}

/// Returns the most probable token, the first of equals.
fn most_probable(logits: &[f32]) -> usize {
    let mut best = 0;
    for (i, x) in logits.iter().enumerate() {
        if *x > logits[best] {
            best = i;
        }
    }
    best
}
