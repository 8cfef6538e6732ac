//! Tasks with right and wrong answers: multiple choice by log-likelihood, and generated text that is matched.
//!
//! Definitions as in lm-evaluation-harness (EleutherAI, `lm_eval/api/task.py`):
//! - A choice's log-likelihood is the sum of `ln p` of its tokens after the prompt. Prompt and choice are tokenized
//!   together, with white space at the end of the prompt moved to the choice; the choice has the tokens behind as many
//!   as the prompt alone has. `accuracy` takes the choice with the largest sum, `accuracy_norm` the one with the
//!   largest sum per character. The first of equal choices wins.
//! - A generated text is greedy and ends before the first stop text; a rule ([`Accept`]) compares it with the targets.
//! - Standard errors take the item as the independent unit. Differences from a reference are taken per item (paired).

mod accept;
mod file;
mod run;
mod summary;
mod task;

use mantissa_model::{Bos, Tokenizer};

pub use accept::Accept;
pub use file::{TaskError, items};
pub use run::{Answer, Encoded, encode, longest, run};
pub use summary::{Compared, Flip, Group, Score, TaskSummary, summary};
pub use task::Task;

use crate::error::EvalError;

/// An item of a task.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Item {
    /// Line in the task file, from 1.
    pub line: usize,
    /// Name; the line where the file gives none.
    pub id: String,
    /// Group with a score of its own.
    pub group: Option<String>,
    /// Text before the answer.
    pub prompt: String,
    /// What is asked.
    pub question: Question,
}

/// What an item asks.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Question {
    /// Choice with the largest log-likelihood.
    Choice {
        /// Continuations of the prompt.
        choices: Vec<String>,
        /// Index of the right one.
        answer: usize,
    },
    /// Greedy continuation.
    Generate {
        /// Texts that are right.
        targets: Vec<String>,
        /// Rule of the comparison.
        accept: Accept,
        /// Texts that end the continuation; they are not part of it.
        stop: Vec<String>,
        /// Largest number of new tokens.
        tokens: usize,
    },
}

impl Question {
    /// Probability of a right answer by chance: none for generated text.
    pub fn chance(&self) -> f64 {
        match self {
            Question::Choice { choices, .. } => 1.0 / choices.len() as f64,
            Question::Generate { .. } => 0.0,
        }
    }

    /// Characters of each choice; none for generated text.
    fn lengths(&self) -> Vec<f64> {
        match self {
            Question::Choice { choices, .. } => choices.iter().map(|c| c.chars().count() as f64).collect(),
            Question::Generate { .. } => Vec::new(),
        }
    }

    /// Tokenizes the question after `prompt`.
    fn encode(&self, prompt: &str, tokenizer: &Tokenizer, bos: Bos) -> Result<run::Work, EvalError> {
        match self {
            Question::Choice { choices, .. } => run::choices(prompt, choices, tokenizer, bos),
            Question::Generate { tokens, .. } => {
                Ok(run::Work::Generate { prompt: tokenizer.encode(prompt, bos)?, new: *tokens })
            }
        }
    }

    /// Judges log-likelihoods of the choices, nats.
    fn judge_choices(&self, logprobs: Vec<f64>) -> Answer {
        let Question::Choice { answer, .. } = self else { return Answer::default() };
        let lengths = self.lengths();
        let normalized: Vec<f64> = logprobs.iter().zip(&lengths).map(|(sum, length)| sum / length).collect();
        let (chosen, chosen_norm) = (first_largest(&logprobs), first_largest(&normalized));
        Answer {
            correct: chosen == *answer,
            correct_norm: Some(chosen_norm == *answer),
            chosen: Some(chosen),
            answer_logprob: logprobs.get(*answer).copied(),
            logprobs,
            text: None,
        }
    }

    /// Texts that end a continuation.
    fn stops(&self) -> &[String] {
        match self {
            Question::Choice { .. } => &[],
            Question::Generate { stop, .. } => stop,
        }
    }

    /// Judges a generated text.
    fn judge_text(&self, text: String) -> Answer {
        let Question::Generate { targets, accept, .. } = self else { return Answer::default() };
        Answer { correct: accept.accepts(&text, targets), text: Some(text), ..Answer::default() }
    }
}

/// Index of the largest value, the first of equals.
fn first_largest(values: &[f64]) -> usize {
    (0..values.len()).fold(0, |best, i| if values[i] > values[best] { i } else { best })
}
