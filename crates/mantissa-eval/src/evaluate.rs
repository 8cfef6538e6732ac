//! Running models over sequences and summing up.

use std::ops::ControlFlow;
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use mantissa_kernels::{LogSumExp, kernels, map_reduce_fixed};
use mantissa_model::{Batch, Buffers, Decoder, ForwardError, LoadError, ModelConfig};
use mantissa_store::ErrorClass;
use serde::Serialize;

use crate::pass::Runner;
use crate::stats::{Estimate, Sum, estimate, percentile};
use crate::tokens::Sequence;

/// Positions whose logits each thread holds at a time.
pub const ROWS: usize = 64;

/// Why an evaluation stopped.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum EvalError {
    /// A forward pass.
    #[error("window {window}: {error}")]
    Forward {
        /// Index of the window.
        window: usize,
        /// What is wrong.
        error: ForwardError,
    },
    /// A window is longer than the model's context.
    #[error("window {window}: found {needed} tokens, allowed {allowed} (max_position_embeddings)")]
    Context {
        /// Index of the window.
        window: usize,
        /// Its tokens.
        needed: usize,
        /// The model's context.
        allowed: usize,
    },
    /// Memory or context.
    #[error(transparent)]
    Load(#[from] LoadError),
    /// A model gives NaN or infinite log-probabilities.
    #[error(
        "window {window}, position {position}: found a loss of {value}, allowed finite; the {model} overflows or holds NaN"
    )]
    NonFinite {
        /// Index of the window.
        window: usize,
        /// Position in it.
        position: usize,
        /// The loss.
        value: f64,
        /// Which model.
        model: &'static str,
    },
    /// The two models do not share a vocabulary.
    #[error("reference: found a vocabulary of {reference}, allowed {model}, that of the model")]
    Vocabulary {
        /// Of the model.
        model: usize,
        /// Of the reference.
        reference: usize,
    },
    /// The model keeps recent keys and values in f32, of which one pass over a window shows nothing.
    #[error(
        "KV cache: found a window of tokens in f32, allowed with a prompt that decoding begins from (--prefill N)"
    )]
    KvWindow,
    /// No position counts.
    #[error("evaluation: found no token to predict in {windows} windows, allowed at least one: a window of two tokens{}",
        .prefill.map_or_else(String::new, |tokens| format!(", longer than its prompt of {tokens} (--prefill)")))]
    Nothing {
        /// How many windows there are.
        windows: usize,
        /// Tokens of the prompts that decoding begins from, where it does.
        prefill: Option<usize>,
    },
    /// The caller ended it.
    #[error("evaluation: found a request to stop, allowed to run to the end")]
    Stopped,
}

impl EvalError {
    /// Whether the input or the environment is at fault.
    pub fn class(&self) -> ErrorClass {
        match self {
            EvalError::Load(error) => error.class(),
            EvalError::Stopped => ErrorClass::Environment,
            _ => ErrorClass::Input,
        }
    }
}

/// Sums over one window.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct WindowResult {
    /// Loss.
    pub nll: Sum,
    /// Loss of the reference.
    pub reference_nll: Sum,
    /// Loss minus the reference's, position by position.
    pub delta: Sum,
    /// KL divergence.
    pub kl: Sum,
    /// Agreements of the argmax.
    pub top1: Sum,
    /// KL divergence of each position.
    pub kl_positions: Vec<f32>,
}

/// The comparison with a reference.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Comparison {
    /// NLL of the reference, nats.
    pub reference_nll: f64,
    /// Mean KL(reference ‖ model), nats.
    pub kl: f64,
    /// Its standard error.
    pub kl_se: f64,
    /// Median over positions.
    pub kl_median: f32,
    /// 99th percentile over positions.
    pub kl_p99: f32,
    /// Largest.
    pub kl_max: f32,
    /// Share of positions with the same argmax.
    pub top1: f64,
    /// Its standard error.
    pub top1_se: f64,
    /// NLL minus the reference's.
    pub delta_nll: f64,
    /// Its paired standard error.
    pub delta_nll_se: f64,
}

/// The result of an evaluation.
#[derive(Clone, Debug, PartialEq)]
pub struct Evaluation {
    /// Mean loss, nats.
    pub nll: f64,
    /// Its standard error.
    pub nll_se: f64,
    /// `exp(nll)`.
    pub ppl: f64,
    /// Predicted tokens.
    pub tokens: u64,
    /// Against the reference, if there was one.
    pub comparison: Option<Comparison>,
    /// Window by window.
    pub windows: Vec<WindowResult>,
}

/// Evaluates `model` on `sequences`, against `reference` where given. Windows run on `threads` threads; the result does not
/// depend on how many. `progress` is told the number of tokens done.
///
/// # Errors
/// [`EvalError`] names the window.
pub fn evaluate(
    model: &Decoder,
    reference: Option<&Decoder>,
    sequences: &[Sequence],
    threads: usize,
    progress: &(dyn Fn(u64) + Sync),
) -> Result<Evaluation, EvalError> {
    evaluate_while(model, reference, sequences, threads, &|done| {
        progress(done);
        ControlFlow::Continue(())
    })
}

/// Whether a model of this configuration can run `sequences`, without running it.
///
/// # Errors
/// As [`evaluate`] would fail for a token that is not in the vocabulary or a window longer than the model's context.
pub fn check_sequences(config: &ModelConfig, sequences: &[Sequence]) -> Result<(), EvalError> {
    for (window, Sequence { tokens, .. }) in sequences.iter().enumerate() {
        let (needed, allowed) = (tokens.len(), config.max_position_embeddings);
        if needed > allowed {
            return Err(EvalError::Context { window, needed, allowed });
        }
        let vocab_size = config.vocab_size;
        if let Some((index, &token)) = tokens.iter().enumerate().find(|(_, t)| **t as usize >= vocab_size) {
            let error = ForwardError::Vocabulary { index, token, vocab_size };
            return Err(EvalError::Forward { window, error });
        }
    }
    Ok(())
}

/// [`evaluate`], which `progress` may end between two windows.
///
/// # Errors
/// As [`evaluate`], and [`EvalError::Stopped`].
pub fn evaluate_while(
    model: &Decoder,
    reference: Option<&Decoder>,
    sequences: &[Sequence],
    threads: usize,
    progress: &(dyn Fn(u64) -> ControlFlow<()> + Sync),
) -> Result<Evaluation, EvalError> {
    run_windows(model, reference, sequences, threads, None, progress)
}

/// [`evaluate_while`] as text is generated: the first `prefill` tokens of each window go through the model's KV cache at once,
/// the others one by one, and positions from the last of the prompt on count. The reference runs whole windows.
///
/// # Errors
/// As [`evaluate_while`].
pub fn evaluate_decoding(
    model: &Decoder,
    reference: Option<&Decoder>,
    sequences: &[Sequence],
    threads: usize,
    prefill: usize,
    progress: &(dyn Fn(u64) -> ControlFlow<()> + Sync),
) -> Result<Evaluation, EvalError> {
    run_windows(model, reference, sequences, threads, Some(prefill.max(1)), progress)
}

fn run_windows(
    model: &Decoder,
    reference: Option<&Decoder>,
    sequences: &[Sequence],
    threads: usize,
    prefill: Option<usize>,
    progress: &(dyn Fn(u64) -> ControlFlow<()> + Sync),
) -> Result<Evaluation, EvalError> {
    if prefill.is_none() && [Some(model), reference].iter().flatten().any(|decoder| decoder.has_kv_window()) {
        return Err(EvalError::KvWindow);
    }
    if let Some(reference) = reference {
        let (model, reference) = (model.config().vocab_size, reference.config().vocab_size);
        if model != reference {
            return Err(EvalError::Vocabulary { model, reference });
        }
    }
    check_sequences(model.config(), sequences)?;
    let longest = sequences.iter().map(|s| s.tokens.len()).max().unwrap_or(0);
    let pool: Mutex<Vec<Worker<'_>>> = Mutex::new(Vec::new());
    let (done, stopped) = (AtomicU64::new(0), AtomicBool::new(false));
    let run = |range: std::ops::Range<usize>| {
        let pooled = pool.lock().map_or(None, |mut p| p.pop());
        let mut worker = match pooled {
            Some(worker) => worker,
            None => Worker::new(model, reference, longest, prefill)?,
        };
        let results: Result<Vec<_>, EvalError> = range
            .map(|i| {
                if stopped.load(Ordering::Relaxed) {
                    return Err(EvalError::Stopped);
                }
                let result = worker.window(i, &sequences[i])?;
                let tokens = sequences[i].tokens.len() as u64;
                if progress(done.fetch_add(tokens, Ordering::Relaxed) + tokens).is_break() {
                    stopped.store(true, Ordering::Relaxed);
                    return Err(EvalError::Stopped);
                }
                Ok(result)
            })
            .collect();
        if let Ok(mut pool) = pool.lock() {
            pool.push(worker);
        }
        results
    };
    let windows = map_reduce_fixed(threads, sequences.len(), 1, run, Ok(Vec::new()), |all, part| {
        let mut all: Vec<WindowResult> = all?;
        all.extend(part?);
        Ok::<_, EvalError>(all)
    })?;
    let found = summary(windows, reference.is_some());
    match found.tokens {
        0 => Err(EvalError::Nothing { windows: sequences.len(), prefill }),
        _ => Ok(found),
    }
}

/// [`evaluate_while`] against a reference, with the comparison beside.
///
/// # Errors
/// As [`evaluate_while`].
pub fn compare(
    model: &Decoder,
    reference: &Decoder,
    sequences: &[Sequence],
    threads: usize,
    progress: &(dyn Fn(u64) -> ControlFlow<()> + Sync),
) -> Result<(Evaluation, Comparison), EvalError> {
    let evaluation = evaluate_while(model, Some(reference), sequences, threads, progress)?;
    let comparison = Comparison::of(&evaluation.windows);
    Ok((evaluation, comparison))
}

fn summary(windows: Vec<WindowResult>, compared: bool) -> Evaluation {
    let nll = column(&windows, |w| w.nll);
    let comparison = compared.then(|| Comparison::of(&windows));
    let tokens = windows.iter().map(|w| w.nll.count).sum();
    Evaluation { nll: nll.mean, nll_se: nll.se, ppl: nll.mean.exp(), tokens, comparison, windows }
}

fn column(windows: &[WindowResult], sum: fn(&WindowResult) -> Sum) -> Estimate {
    estimate(&windows.iter().map(sum).filter(|s| s.count > 0).collect::<Vec<_>>())
}

impl Comparison {
    fn of(windows: &[WindowResult]) -> Self {
        let (kl, top1, delta) =
            (column(windows, |w| w.kl), column(windows, |w| w.top1), column(windows, |w| w.delta));
        let mut sorted: Vec<f32> = windows.iter().flat_map(|w| w.kl_positions.iter().copied()).collect();
        sorted.sort_by(f32::total_cmp);
        Comparison {
            reference_nll: column(windows, |w| w.reference_nll).mean,
            kl: kl.mean,
            kl_se: kl.se,
            kl_median: percentile(&sorted, 0.5),
            kl_p99: percentile(&sorted, 0.99),
            kl_max: percentile(&sorted, 1.0),
            top1: top1.mean,
            top1_se: top1.se,
            delta_nll: delta.mean,
            delta_nll_se: delta.se,
        }
    }
}

/// One thread's memory.
struct Worker<'a> {
    model: Runner<'a>,
    reference: Option<Runner<'a>>,
    /// Index of the first token that is predicted, at least.
    prefill: usize,
}

impl<'a> Worker<'a> {
    fn new(
        model: &'a Decoder,
        reference: Option<&'a Decoder>,
        longest: usize,
        prefill: Option<usize>,
    ) -> Result<Self, EvalError> {
        let reference = reference.map(|r| Runner::new(r, longest, None)).transpose()?;
        Ok(Worker { model: Runner::new(model, longest, prefill)?, reference, prefill: prefill.unwrap_or(1) })
    }

    fn window(&mut self, window: usize, sequence: &Sequence) -> Result<WindowResult, EvalError> {
        let mut result = WindowResult::default();
        let Sequence { tokens, from } = sequence;
        let from = *from.max(&self.prefill);
        if tokens.len() <= from {
            return Ok(result);
        }
        let forward = |error| EvalError::Forward { window, error };
        let mut pass = self.model.begin(tokens).map_err(forward)?;
        let mut reference = self.reference.as_mut().map(|r| r.begin(tokens)).transpose().map_err(forward)?;
        // The logits of position i predict token i + 1; all positions run in whole blocks, so that bits do not depend on `from`.
        for start in (0..tokens.len() - 1).step_by(ROWS) {
            let rows = start..(start + ROWS).min(tokens.len());
            let logits = pass.logits(tokens, rows.clone()).map_err(forward)?;
            let compare = match &mut reference {
                None => None,
                Some(pass) => Some(pass.logits(tokens, rows.clone()).map_err(forward)?),
            };
            let vocabulary = logits.len() / rows.len();
            for position in rows.clone().filter(|p| (from - 1..tokens.len() - 1).contains(p)) {
                let row = (position - start) * vocabulary..(position - start + 1) * vocabulary;
                let target = tokens[position + 1] as usize;
                let own = &logits[row.clone()];
                score(&mut result, own, compare.map(|c| &c[row]), target)
                    .map_err(|(value, model)| EvalError::NonFinite { window, position, value, model })?;
            }
        }
        Ok(result)
    }
}

/// Adds one position: its logits, the reference's, and the token that came.
fn score(
    result: &mut WindowResult,
    logits: &[f32],
    reference: Option<&[f32]>,
    target: usize,
) -> Result<(), (f64, &'static str)> {
    let finite = |value: f64, model| if value.is_finite() { Ok(value) } else { Err((value, model)) };
    let stats = kernels().log_softmax_stats(logits);
    let nll = finite(stats.nll(logits[target]), "model")?;
    result.nll.add(nll);
    let Some(reference) = reference else { return Ok(()) };
    let reference_stats = kernels().log_softmax_stats(reference);
    let reference_nll = finite(reference_stats.nll(reference[target]), "reference")?;
    let kl = divergence_of(reference, &reference_stats, logits, &stats);
    result.reference_nll.add(reference_nll);
    result.delta.add(nll - reference_nll);
    result.kl.add(finite(kl, "model")?);
    result.kl_positions.push(kl as f32);
    let same = kernels().argmax(logits) == kernels().argmax(reference);
    result.top1.add(if same { 1.0 } else { 0.0 });
    Ok(())
}

/// `KL(reference ‖ model)` of one position, nats, from the logits `[vocabulary]` of both. NaN where one has no probabilities.
pub fn divergence(reference: &[f32], model: &[f32]) -> f64 {
    let stats = |logits| kernels().log_softmax_stats(logits);
    divergence_of(reference, &stats(reference), model, &stats(model))
}

/// `sum_v p(v) (ln p(v) - ln q(v))` with p the reference.
fn divergence_of(p: &[f32], p_stats: &LogSumExp, q: &[f32], q_stats: &LogSumExp) -> f64 {
    p.iter().zip(q).fold(0.0, |sum, (&p, &q)| {
        let log_p = -p_stats.nll(p);
        sum + log_p.exp() * (log_p + q_stats.nll(q))
    })
}

/// Logits of every position of `sequence`, `[tokens, vocabulary]`: for comparing with another implementation.
///
/// # Errors
/// [`EvalError`] with `window` as its index.
pub fn logits(model: &Decoder, window: usize, sequence: &Sequence) -> Result<Vec<f32>, EvalError> {
    let tokens = &sequence.tokens;
    let mut buffers = Buffers::plan(model.config(), tokens.len(), tokens.len())?;
    let forward = |error| EvalError::Forward { window, error };
    let mut logits = vec![0.0; tokens.len() * model.config().vocab_size];
    let mut hidden =
        model.forward(&Batch { tokens, lens: &[tokens.len()] }, &mut buffers).map_err(forward)?;
    hidden.logits(0..tokens.len(), &mut logits).map_err(forward)?;
    Ok(logits)
}
