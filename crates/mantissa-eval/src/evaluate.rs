//! Forward passes over evaluation windows and their summary statistics.

use std::ops::{ControlFlow, Range};

use mantissa_kernels::{LogSumExp, kernels};
use mantissa_model::{Batch, Buffers, Decoder, ForwardError, ModelConfig};
use serde::{Deserialize, Serialize};

use crate::error::EvalError;
use crate::parallel::each;
use crate::pass::{Evaluated, ROWS, Runner};
use crate::stats::{Estimate, Sum, estimate, percentile};
use crate::tokens::Sequence;

/// Sums over the predicted positions of one window.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct WindowResult {
    /// Negative log-likelihood, nats.
    pub nll: Sum,
    /// Negative log-likelihood of the reference, nats.
    pub reference_nll: Sum,
    /// NLL minus the reference's NLL, per position (paired).
    pub delta: Sum,
    /// KL(reference ‖ model), nats.
    pub kl: Sum,
    /// Positions where both argmaxes agree (1 or 0 each).
    pub top1: Sum,
    /// KL divergence per position, nats.
    pub kl_positions: Vec<f32>,
    /// Tokens before the first predicted token.
    pub before: usize,
}

/// Comparison of a model with its reference.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Comparison {
    /// Mean NLL of the reference, nats/token.
    pub reference_nll: f64,
    /// Mean KL(reference ‖ model), nats/token.
    pub kl: f64,
    /// Standard error of `kl`.
    pub kl_se: f64,
    /// Median KL over positions, nats.
    pub kl_median: f32,
    /// 99th percentile of KL over positions, nats.
    pub kl_p99: f32,
    /// Largest KL over positions, nats.
    pub kl_max: f32,
    /// Percentiles of KL over positions, nats: the share in percent and the value.
    pub kl_percentiles: Vec<Percentile>,
    /// Mean KL by the length of the context before the predicted token.
    pub kl_by_context: Vec<ContextKl>,
    /// Share of positions where both models have the same argmax (top-1 agreement).
    pub top1: f64,
    /// Standard error of `top1`.
    pub top1_se: f64,
    /// Mean NLL minus the reference's, nats/token.
    pub delta_nll: f64,
    /// Paired standard error of `delta_nll`.
    pub delta_nll_se: f64,
}

/// A percentile of the KL divergence over positions.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct Percentile {
    /// Share of positions, percent.
    pub percent: f64,
    /// KL that they do not exceed, nats.
    pub kl: f32,
}

/// Mean KL of the tokens whose context has `from` to `to` tokens.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct ContextKl {
    /// Least number of tokens before the predicted one.
    pub from: usize,
    /// Largest number.
    pub to: usize,
    /// Number of predicted tokens.
    pub tokens: u64,
    /// Mean KL(reference ‖ model), nats/token.
    pub kl: f64,
    /// Standard error of `kl`, with the window as the independent unit.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub kl_se: Option<f64>,
}

/// Percentiles of the KL that a comparison lists.
const PERCENTS: [f64; 6] = [50.0, 90.0, 95.0, 99.0, 99.9, 100.0];

/// Result of an evaluation.
#[derive(Clone, Debug, PartialEq)]
pub struct Evaluation {
    /// Mean NLL, nats/token.
    pub nll: f64,
    /// Standard error of `nll`.
    pub nll_se: f64,
    /// Perplexity, `exp(nll)`.
    pub ppl: f64,
    /// Number of predicted tokens.
    pub tokens: u64,
    /// Comparison with the reference, if one was given.
    pub comparison: Option<Comparison>,
    /// Sums per window, in input order.
    pub windows: Vec<WindowResult>,
}

/// Evaluates `model` on `sequences`, and compares it with `reference` if given.
///
/// Windows run on `threads` threads; the result does not depend on the number of threads. `progress` receives
/// the number of tokens done so far.
///
/// # Errors
/// [`EvalError`], which names the window.
pub fn evaluate(
    model: &Decoder,
    reference: Option<&Decoder>,
    sequences: &[Sequence],
    threads: usize,
    progress: &(dyn Fn(u64) + Sync),
) -> Result<Evaluation, EvalError> {
    evaluate_while(model.into(), reference, sequences, threads, None, &|done| {
        progress(done);
        ControlFlow::Continue(())
    })
}

/// Checks that a model with this configuration can run `sequences`, without running it.
///
/// # Errors
/// [`EvalError::Forward`] for a token outside the vocabulary, [`EvalError::Context`] for a window longer than
/// the model's context.
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

/// Evaluates a model on either engine; `progress` can end the run between two windows. The reference runs whole
/// windows.
///
/// With `prefill` the model runs as text is generated, through the KV cache: the first `prefill` tokens of each window
/// in one pass, the rest one by one. Positions count from the last prompt token on.
///
/// # Errors
/// As [`evaluate`], and [`EvalError::Stopped`].
pub fn evaluate_while(
    model: Evaluated<'_>,
    reference: Option<&Decoder>,
    sequences: &[Sequence],
    threads: usize,
    prefill: Option<usize>,
    progress: &(dyn Fn(u64) -> ControlFlow<()> + Sync),
) -> Result<Evaluation, EvalError> {
    let all = 0..sequences.len();
    let windows = evaluate_windows(model, reference, (sequences, all), threads, prefill, progress)?;
    summarize(windows, reference.is_some(), prefill)
}

/// Evaluates the windows with the numbers `range` of all `sequences`, as [`evaluate_while`] evaluates all: results do not
/// depend on what else is evaluated.
///
/// # Errors
/// As [`evaluate_while`], but for a text in which nothing is predicted.
pub fn evaluate_windows(
    model: Evaluated<'_>,
    reference: Option<&Decoder>,
    (sequences, range): (&[Sequence], Range<usize>),
    threads: usize,
    prefill: Option<usize>,
    progress: &(dyn Fn(u64) -> ControlFlow<()> + Sync),
) -> Result<Vec<WindowResult>, EvalError> {
    let prefill = prefill.map(|prefill| prefill.max(1));
    let reference = reference.map(Evaluated::from);
    if prefill.is_none() && [Some(model), reference].iter().flatten().any(Evaluated::hides_cache) {
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
    each(
        threads,
        range.len(),
        || Worker::new(model, reference, longest, prefill),
        |worker: &mut Worker<'_>, i| worker.window(range.start + i, &sequences[range.start + i]),
        |i| sequences[range.start + i].tokens.len() as u64,
        progress,
    )
}

/// Returns the evaluation of which `windows` are all results, in order; `compared` if with a reference.
///
/// # Errors
/// [`EvalError::Nothing`].
pub fn summarize(
    windows: Vec<WindowResult>,
    compared: bool,
    prefill: Option<usize>,
) -> Result<Evaluation, EvalError> {
    let count = windows.len();
    let found = summary(windows, compared);
    match found.tokens {
        0 => Err(EvalError::Nothing { windows: count, prefill: prefill.map(|prefill| prefill.max(1)) }),
        _ => Ok(found),
    }
}

/// Evaluates `model` against `reference`; returns the evaluation and the comparison.
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
    let evaluation = evaluate_while(model.into(), Some(reference), sequences, threads, None, progress)?;
    let comparison = Comparison::of(&evaluation.windows);
    Ok((evaluation, comparison))
}

/// Returns the mean KL of model `a` less that of model `b`, both compared with one reference on the same windows, with the
/// error of the difference, which is paired; `None` if the windows are not the same.
pub fn kl_difference(a: &[WindowResult], b: &[WindowResult]) -> Option<Estimate> {
    let lengths = |windows: &[WindowResult]| windows.iter().map(|w| w.kl_positions.len()).collect::<Vec<_>>();
    if lengths(a) != lengths(b) {
        return None;
    }
    let differences = a.iter().zip(b).map(|(a, b)| {
        let mut sum = Sum::default();
        a.kl_positions.iter().zip(&b.kl_positions).for_each(|(a, b)| sum.add(f64::from(*a) - f64::from(*b)));
        sum
    });
    let found: Vec<Sum> = differences.filter(|sum| sum.count > 0).collect();
    (!found.is_empty()).then(|| estimate(&found))
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
            kl_percentiles: PERCENTS
                .map(|percent| Percentile { percent, kl: percentile(&sorted, percent / 100.0) })
                .to_vec(),
            kl_by_context: by_context(windows),
            top1: top1.mean,
            top1_se: top1.se,
            delta_nll: delta.mean,
            delta_nll_se: delta.se,
        }
    }
}

/// Averages the KL over positions by the length of their context, in intervals that double.
fn by_context(windows: &[WindowResult]) -> Vec<ContextKl> {
    let end = |w: &WindowResult| w.before + w.kl_positions.len();
    let longest = windows.iter().map(end).max().unwrap_or(0);
    let starts =
        std::iter::successors(Some(1usize), |start| start.checked_mul(2)).take_while(|&s| s < longest);
    let interval = |from: usize| {
        let to = (2 * from - 1).min(longest - 1);
        let sums = windows.iter().map(|w| {
            let mut sum = Sum::default();
            let kl = w.kl_positions.iter().enumerate();
            let within = kl.filter(|(i, _)| (from..=to).contains(&(w.before + i)));
            within.for_each(|(_, &kl)| sum.add(kl.into()));
            sum
        });
        let sums: Vec<Sum> = sums.filter(|sum| sum.count > 0).collect();
        let Estimate { mean, se } = estimate(&sums);
        let tokens = sums.iter().map(|sum| sum.count).sum();
        let kl_se = Some(se).filter(|se| se.is_finite());
        (tokens > 0).then_some(ContextKl { from, to, tokens, kl: mean, kl_se })
    };
    starts.filter_map(interval).collect()
}

/// Buffers of one thread.
struct Worker<'a> {
    model: Runner<'a>,
    reference: Option<Runner<'a>>,
    /// Index of the first predicted token; a window's own `from` may be larger.
    prefill: usize,
}

impl<'a> Worker<'a> {
    fn new(
        model: Evaluated<'a>,
        reference: Option<Evaluated<'a>>,
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
        result.before = from;
        if tokens.len() <= from {
            return Ok(result);
        }
        let forward = |error| EvalError::Forward { window, error };
        let mut pass = self.model.begin(tokens).map_err(forward)?;
        let mut reference = self.reference.as_mut().map(|r| r.begin(tokens)).transpose().map_err(forward)?;
        // Position i predicts token i + 1. Blocks start at fixed positions, so that results do not depend on
        // `from`.
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

/// Adds one position to `result`: its logits and the reference's, `[vocabulary]` each, and the target token.
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

/// Returns KL(reference ‖ model) of one position in nats from both logits `[vocabulary]`; NaN if a softmax is
/// undefined.
pub fn divergence(reference: &[f32], model: &[f32]) -> f64 {
    let stats = |logits| kernels().log_softmax_stats(logits);
    divergence_of(reference, &stats(reference), model, &stats(model))
}

/// Returns `sum_v p(v) (ln p(v) - ln q(v))`, with p the reference.
fn divergence_of(p: &[f32], p_stats: &LogSumExp, q: &[f32], q_stats: &LogSumExp) -> f64 {
    p.iter().zip(q).fold(0.0, |sum, (&p, &q)| {
        let log_p = -p_stats.nll(p);
        sum + log_p.exp() * (log_p + q_stats.nll(q))
    })
}

/// Returns the logits of every position of `sequence`, `[tokens, vocabulary]`, for comparison with another
/// implementation.
///
/// # Errors
/// [`EvalError`], with `window` as its index.
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
