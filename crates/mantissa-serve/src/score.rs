//! Divergence of two models over a sequence, in passes of a few tokens and in turns with the engines.

use std::ops::ControlFlow;

use mantissa_eval::divergence;
use mantissa_kernels::kernels;
use mantissa_model::{ForwardError, LoadError};
use mantissa_runtime::{FastModel, Single};

use crate::fair::Turn;

/// Tokens of a pass: attention gives the same bits when a sequence is cut at its multiples.
const CHUNK: usize = 64;

/// Positions whose logits are held at once.
const ROWS: usize = 8;

/// Difference of two models at the place of one token.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct Score {
    /// KL(first ‖ second) in nats.
    pub(crate) kl: f64,
    /// Most probable token of each model, the first of equals.
    pub(crate) likely: [u32; 2],
}

/// Logits of both models at some positions.
#[derive(Debug)]
pub(crate) struct Logits([Vec<f32>; 2]);

impl Logits {
    /// Allocates for models with `vocabulary` tokens.
    pub(crate) fn new(vocabulary: usize) -> Self {
        Logits([vec![0.0; ROWS * vocabulary], vec![0.0; ROWS * vocabulary]])
    }
}

/// Allocates a sequence of up to `context` tokens that [`score`] can run.
///
/// # Errors
/// As [`Single::new`].
pub(crate) fn sequence(model: &FastModel, context: usize) -> Result<Single<'_>, LoadError> {
    Single::new(model, CHUNK, context)
}

/// Checks that two models have the same number of tokens.
///
/// # Errors
/// [`LoadError::Shape`].
pub(crate) fn same_vocabulary(first: &FastModel, second: &FastModel) -> Result<(), LoadError> {
    let (ours, theirs) = (first.config(), second.config());
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

/// Runs both models over `tokens` and calls `each` with their difference at every token after the first `prompt`
/// (at least 1), in order, until it breaks. Each pass waits for one of `turns`.
///
/// # Errors
/// [`ForwardError`] of either model.
pub(crate) fn score(
    models: [&mut Single<'_>; 2],
    tokens: &[u32],
    prompt: usize,
    turns: &dyn Fn() -> Turn,
    logits: &mut Logits,
    mut each: impl FnMut(Score) -> ControlFlow<()>,
) -> Result<(), ForwardError> {
    let [first, second] = models;
    let vocabulary = first.model().config().vocab_size;
    // The last token has no successor.
    let inputs = &tokens[..tokens.len() - 1];
    first.clear();
    second.clear();
    for (chunk, start) in inputs.chunks(CHUNK).zip((0..).step_by(CHUNK)) {
        {
            let _turn = turns();
            first.extend(chunk)?;
        }
        {
            let _turn = turns();
            second.extend(chunk)?;
        }
        let mut at = (prompt - 1).saturating_sub(start).min(chunk.len());
        while at < chunk.len() {
            let rows = at..(at + ROWS).min(chunk.len());
            let [ours, theirs] = &mut logits.0;
            let len = rows.len() * vocabulary;
            let turn = turns();
            first.logits(rows.clone(), &mut ours[..len])?;
            second.logits(rows.clone(), &mut theirs[..len])?;
            drop(turn);
            for (p, q) in ours[..len].chunks(vocabulary).zip(theirs[..len].chunks(vocabulary)) {
                if each(Score { kl: divergence(p, q), likely: [likely(p), likely(q)] }).is_break() {
                    return Ok(());
                }
            }
            at = rows.end;
        }
    }
    Ok(())
}

/// Returns the most probable token, the first of equals.
fn likely(logits: &[f32]) -> u32 {
    kernels().argmax(logits).unwrap_or(0) as u32
}
