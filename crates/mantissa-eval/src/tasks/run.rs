//! Runs the items of a task on a model.

use std::ops::ControlFlow;

use mantissa_kernels::kernels;
use mantissa_model::{Bos, ForwardError, Tokenizer};
use serde::Serialize;

use super::Item;
use crate::error::EvalError;
use crate::parallel::each;
use crate::pass::{Evaluated, ROWS, Runner};

/// What has to run for an item.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Work {
    /// Passes whose log-likelihoods are needed.
    Choices(Vec<Pass>),
    /// Prompt to continue.
    Generate { prompt: Vec<u32>, new: usize },
}

/// One pass over tokens that choices share up to their last token.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Pass {
    /// Tokens of the pass.
    tokens: Vec<u32>,
    /// Index of the first token that counts, at least 1.
    from: usize,
    /// Choices, each with the token that follows.
    last: Vec<(usize, u32)>,
}

/// Tokens of an item.
#[derive(Clone, Debug)]
pub struct Encoded(Work);

impl Encoded {
    /// Returns the number of tokens that run on a model, at most.
    pub(super) fn tokens(&self) -> u64 {
        match &self.0 {
            Work::Choices(passes) => passes.iter().map(|pass| pass.tokens.len() as u64).sum(),
            Work::Generate { prompt, new } => prompt.len().saturating_add(*new) as u64,
        }
    }
}

/// Answer of a model to an item.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct Answer {
    /// True if the answer is right.
    pub correct: bool,
    /// True if the choice with the largest log-likelihood per character is right.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub correct_norm: Option<bool>,
    /// Choice with the largest log-likelihood.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub chosen: Option<usize>,
    /// Log-likelihood of each choice, nats.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub logprobs: Vec<f64>,
    /// Log-likelihood of the right choice, nats.
    #[serde(skip)]
    pub answer_logprob: Option<f64>,
    /// Generated text.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub text: Option<String>,
}

/// Tokenizes an item; `prompt` replaces the item's own where a chat template has rendered it.
///
/// # Errors
/// A text that the tokenizer refuses; a choice without a token of its own, or behind no token at all.
pub fn encode(
    item: &Item,
    prompt: Option<&str>,
    tokenizer: &Tokenizer,
    bos: Bos,
) -> Result<Encoded, EvalError> {
    Ok(Encoded(item.question.encode(prompt.unwrap_or(&item.prompt), tokenizer, bos)?))
}

/// Returns the tokens of the longest pass and of the longest sequence of these items.
pub fn longest<'a>(items: impl IntoIterator<Item = &'a Encoded>) -> (usize, usize) {
    let of = |item: &Encoded| match &item.0 {
        Work::Choices(passes) => {
            let longest = passes.iter().map(|pass| pass.tokens.len()).max().unwrap_or(0);
            (longest, longest + 1)
        }
        Work::Generate { prompt, new } => (prompt.len(), prompt.len().saturating_add(*new)),
    };
    items.into_iter().map(of).fold((0, 0), |most, of| (most.0.max(of.0), most.1.max(of.1)))
}

/// Tokenizes prompt and choices as lm-evaluation-harness does (`lm_eval/api/model.py`, `_encode_pair`).
pub(super) fn choices(
    prompt: &str,
    choices: &[String],
    tokenizer: &Tokenizer,
    bos: Bos,
) -> Result<Work, EvalError> {
    let (head, tail) = prompt.split_at(prompt.trim_end().len());
    let from = tokenizer.encode(head, bos)?.len();
    let mut passes: Vec<Pass> = Vec::new();
    for (choice, text) in choices.iter().enumerate() {
        let mut tokens = tokenizer.encode(&format!("{head}{tail}{text}"), bos)?;
        // The first token of a sequence cannot be predicted: nothing stands before it.
        let first = from.max(1);
        let last = match tokens.pop() {
            Some(last) if tokens.len() >= first => last,
            _ => return Err(EvalError::Choice { choice, text: text.clone() }),
        };
        match passes.iter_mut().find(|pass| pass.tokens == tokens) {
            Some(pass) => pass.last.push((choice, last)),
            None => passes.push(Pass { tokens, from: first, last: vec![(choice, last)] }),
        }
    }
    Ok(Work::Choices(passes))
}

/// Checks that `context` tokens hold each of `items` with its answer.
///
/// # Errors
/// [`EvalError::ItemContext`] for the first that is longer.
pub(super) fn check_context(items: &[(&Item, &Encoded)], context: usize) -> Result<(), EvalError> {
    for (item, encoded) in items {
        let (_, needed) = longest([*encoded]);
        if needed > context {
            return Err(EvalError::ItemContext { line: item.line, needed, allowed: context });
        }
    }
    Ok(())
}

/// Runs `items`, each with its tokens, on `threads` threads; the answers do not depend on their number. `progress`
/// receives the number of items done and can end the run.
///
/// # Errors
/// [`EvalError`], with the line of the item; a generation beyond the model's context.
pub fn run(
    model: Evaluated<'_>,
    items: &[(&Item, &Encoded)],
    tokenizer: &Tokenizer,
    threads: usize,
    progress: &(dyn Fn(u64) -> ControlFlow<()> + Sync),
) -> Result<Vec<Answer>, EvalError> {
    check_context(items, model.config().max_position_embeddings)?;
    let (pass, sequence) = longest(items.iter().map(|(_, encoded)| *encoded));
    each(
        threads,
        items.len(),
        || Runner::for_tasks(model, pass, sequence),
        |runner: &mut Runner<'_>, i| {
            let (item, encoded) = items[i];
            let failed = |error| EvalError::Item { line: item.line, error: Box::new(error) };
            match &encoded.0 {
                Work::Choices(passes) => {
                    Ok(item.question.judge_choices(logprobs(runner, passes).map_err(failed)?))
                }
                Work::Generate { prompt, new } => {
                    let text = generated(runner, prompt, *new, item.question.stops(), tokenizer);
                    Ok(item.question.judge_text(text.map_err(failed)?))
                }
            }
        },
        |_| 1,
        progress,
    )
}

/// Returns the log-likelihood of each choice, nats.
fn logprobs(runner: &mut Runner<'_>, passes: &[Pass]) -> Result<Vec<f64>, EvalError> {
    let count = passes.iter().map(|pass| pass.last.len()).sum();
    let mut sums = vec![0.0; count];
    for (window, Pass { tokens, from, last }) in passes.iter().enumerate() {
        let forward = |error: ForwardError| EvalError::Forward { window, error };
        let mut pass = runner.begin(tokens).map_err(forward)?;
        let mut shared = 0.0;
        for start in (0..tokens.len()).step_by(ROWS) {
            let rows = start..(start + ROWS).min(tokens.len());
            let logits = pass.logits(tokens, rows.clone()).map_err(forward)?;
            let vocabulary = logits.len() / rows.len();
            for position in rows.filter(|&position| position + 1 >= *from) {
                let row = &logits[(position - start) * vocabulary..][..vocabulary];
                let stats = kernels().log_softmax_stats(row);
                let logprob = |token: u32| {
                    let nll = row.get(token as usize).map_or(f64::NAN, |&logit| stats.nll(logit));
                    let model = "model";
                    let beyond = EvalError::NonFinite { window, position, value: nll, model };
                    if nll.is_finite() { Ok(-nll) } else { Err(beyond) }
                };
                match tokens.get(position + 1) {
                    Some(&token) => shared += logprob(token)?,
                    None => {
                        for &(choice, token) in last {
                            sums[choice] = shared + logprob(token)?;
                        }
                    }
                }
            }
        }
    }
    Ok(sums)
}

/// Continues `prompt` greedily until an end token, a stop text or `new` tokens; returns the text before the stop.
fn generated(
    runner: &mut Runner<'_>,
    prompt: &[u32],
    new: usize,
    stop: &[String],
    tokenizer: &Tokenizer,
) -> Result<String, EvalError> {
    let mut stream = tokenizer.stream();
    stream.skip(prompt)?;
    let mut text = String::new();
    let mut failed = None;
    runner.greedy(prompt, new, &mut |token| {
        match stream.push(token) {
            Ok(piece) => text.push_str(&piece),
            Err(error) => failed = Some(error),
        }
        if failed.is_some() || stop.iter().any(|stop| text.contains(stop.as_str())) {
            ControlFlow::Break(())
        } else {
            ControlFlow::Continue(())
        }
    })?;
    if let Some(error) = failed {
        return Err(error.into());
    }
    text.push_str(&stream.finish()?);
    let end = stop.iter().filter_map(|stop| text.find(stop.as_str())).min();
    text.truncate(end.unwrap_or(text.len()));
    Ok(text)
}
