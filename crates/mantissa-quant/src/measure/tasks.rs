//! Accuracy of an output on tasks, compared with its source on the same items.
//!
//! Scores as [`mantissa_eval::tasks`] defines them; the figures equal the output of `mantissa eval --task --reference`.

use std::ops::ControlFlow;
use std::sync::Arc;

use mantissa_eval::tasks::{Task, longest, summary};
use mantissa_model::{Decoder, Tokenizer};
use mantissa_store::FileDigest;
use mantissa_store::convention::ModelFiles;

use crate::error::Result;
use crate::quality::TaskScore;

/// Task to run on an output and on its source.
#[derive(Clone, Debug)]
pub struct TaskRun {
    /// Items and their tokens.
    pub task: Task,
    /// SHA-256 of the task file.
    pub sha256: String,
    /// True if the chat template rendered the prompts.
    pub chat: bool,
}

/// Tasks to run on an output before it is put in place, and the limit of its loss.
#[derive(Clone, Debug)]
pub struct TaskRuns {
    runs: Arc<[TaskRun]>,
    /// Maximum drop of a task's accuracy for the output to be put in place.
    pub max_accuracy_drop: Option<f64>,
    /// Bytes of the source's tensors.
    pub(crate) source_bytes: u64,
    /// Bytes of the tokenizer.
    pub(crate) tokenizer_bytes: u64,
}

impl TaskRuns {
    /// Takes tasks that are tokenized for `source`.
    ///
    /// # Errors
    /// [`mantissa_eval::EvalError::ItemContext`] for an item that the model's context does not hold.
    pub fn new(source: &ModelFiles, runs: Vec<TaskRun>, max_accuracy_drop: Option<f64>) -> Result<Self> {
        let context = mantissa_model::load_config(source)?.max_position_embeddings;
        runs.iter().try_for_each(|run| run.task.check_context(context))?;
        let source_bytes = source.checkpoint().total_bytes();
        let tokenizer_bytes = Tokenizer::bytes_to_load(source.dir());
        Ok(TaskRuns { runs: runs.into(), max_accuracy_drop, source_bytes, tokenizer_bytes })
    }

    /// Returns the total of its progress: the number of items that both models answer.
    pub fn work(&self) -> u64 {
        2 * self.runs.iter().map(|run| run.task.items.len() as u64).sum::<u64>()
    }

    /// Returns the number of tokens that run on each model, at most.
    pub fn tokens(&self) -> u64 {
        self.runs.iter().map(|run| run.task.tokens()).sum()
    }

    /// Returns the tokens of the longest pass and of the longest sequence, and the largest number of items of a task.
    pub(crate) fn extent(&self) -> (usize, usize, usize) {
        let (pass, sequence) = longest(self.runs.iter().flat_map(|run| &run.task.encoded));
        let items = self.runs.iter().map(|run| run.task.items.len()).max().unwrap_or(0);
        (pass, sequence, items)
    }

    /// Runs the tasks on the model in `artifact` and on `source`. `known` gives scores that an earlier run measured, and
    /// `record` takes new ones. The result does not depend on `threads`. `progress` gets the items done out of
    /// [`work`](Self::work); `Break` interrupts the run.
    ///
    /// # Errors
    /// Errors of loading and running the models, errors of an item under the name of its task;
    /// [`crate::QuantError::Interrupted`].
    pub(crate) fn measure(
        &self,
        (artifact, source): (&ModelFiles, &ModelFiles),
        threads: usize,
        known: impl Fn(&TaskRun) -> Option<TaskScore>,
        mut record: impl FnMut(&TaskScore) -> Result<()>,
        progress: &(dyn Fn(u64) -> ControlFlow<()> + Sync),
    ) -> Result<Vec<TaskScore>> {
        let found: Vec<_> = self.runs.iter().map(known).collect();
        if found.iter().all(Option::is_some) {
            return Ok(found.into_iter().flatten().collect());
        }
        let (model, reference) = (Decoder::load(artifact)?, Decoder::load(source)?);
        let tokenizer = Tokenizer::load(source.dir())?;
        let mut before = 0;
        let mut scores = Vec::with_capacity(self.runs.len());
        for (run, found) in self.runs.iter().zip(found) {
            let task = &run.task;
            let answers = |decoder: &Decoder, before: u64| {
                let told = |done| progress(before + done);
                task.run(decoder.into(), &tokenizer, threads, &told).map_err(|error| run.fault(error))
            };
            let items = task.items.len() as u64;
            let score = match found {
                Some(score) => score,
                None => {
                    let (own, reference_answers) =
                        (answers(&model, before)?, answers(&reference, before + items)?);
                    let score = run.scored(summary(&task.items, &own, Some(&reference_answers)));
                    record(&score)?;
                    score
                }
            };
            before += 2 * items;
            scores.push(score);
        }
        Ok(scores)
    }
}

impl TaskRuns {
    /// True if `scores` are those of these tasks on the same tokens, in their order.
    pub(crate) fn are_of(&self, scores: &[TaskScore]) -> bool {
        let alike = self.runs.iter().zip(scores).all(|(run, score)| run.is_of(score));
        self.runs.len() == scores.len() && alike
    }
}

impl TaskRun {
    /// True if `score` belongs to this task on the same tokens.
    pub(crate) fn is_of(&self, score: &TaskScore) -> bool {
        (&self.sha256, self.tokens(), self.chat) == (&score.sha256, score.tokens_sha256.clone(), score.chat)
    }

    /// SHA-256 of the tokens of all items.
    fn tokens(&self) -> String {
        FileDigest::of(format!("{:?}", self.task.encoded).as_bytes()).hex()
    }

    fn scored(&self, summary: mantissa_eval::tasks::TaskSummary) -> TaskScore {
        TaskScore {
            task: self.task.name.clone(),
            sha256: self.sha256.clone(),
            tokens_sha256: self.tokens(),
            chat: self.chat,
            score: summary.score,
            groups: summary.groups,
        }
    }

    fn fault(&self, error: mantissa_eval::EvalError) -> crate::QuantError {
        match error {
            mantissa_eval::EvalError::Stopped => crate::QuantError::Interrupted,
            error => crate::QuantError::Task { task: self.task.name.clone(), error: Box::new(error) },
        }
    }
}
