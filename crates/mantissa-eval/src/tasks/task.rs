//! A task that is ready to run.

use std::ops::{ControlFlow, Range};

use mantissa_model::Tokenizer;

use super::Item;
use super::run::{Answer, Encoded, check_context, run};
use crate::error::EvalError;
use crate::pass::Evaluated;

/// Items of a task with their tokens.
#[derive(Clone, Debug)]
pub struct Task {
    /// Name in reports.
    pub name: String,
    /// Items.
    pub items: Vec<Item>,
    /// Tokens of each item.
    pub encoded: Vec<Encoded>,
}

impl Task {
    /// Checks that `context` tokens hold every item with its answer.
    ///
    /// # Errors
    /// [`EvalError::ItemContext`] for the first that is longer.
    pub fn check_context(&self, context: usize) -> Result<(), EvalError> {
        check_context(&self.pairs(), context)
    }

    fn pairs(&self) -> Vec<(&Item, &Encoded)> {
        self.items.iter().zip(&self.encoded).collect()
    }

    /// Runs all items, as [`run`].
    ///
    /// # Errors
    /// As [`run`].
    pub fn run(
        &self,
        model: Evaluated<'_>,
        tokenizer: &Tokenizer,
        threads: usize,
        progress: &(dyn Fn(u64) -> ControlFlow<()> + Sync),
    ) -> Result<Vec<Answer>, EvalError> {
        run(model, &self.pairs(), tokenizer, threads, progress)
    }

    /// Runs the items at `range`, as [`run`].
    ///
    /// # Errors
    /// As [`run`].
    ///
    /// # Panics
    /// If there are fewer items.
    pub fn run_part(
        &self,
        model: Evaluated<'_>,
        range: Range<usize>,
        tokenizer: &Tokenizer,
        (threads, progress): (usize, &(dyn Fn(u64) -> ControlFlow<()> + Sync)),
    ) -> Result<Vec<Answer>, EvalError> {
        run(model, &self.pairs()[range], tokenizer, threads, progress)
    }

    /// Returns the number of tokens that run on a model, at most: prompts, choices and generated text.
    pub fn tokens(&self) -> u64 {
        self.encoded.iter().map(Encoded::tokens).sum()
    }
}
