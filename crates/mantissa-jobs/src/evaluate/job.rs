//! Evaluation as a job.

use std::path::PathBuf;

use mantissa_eval::tasks::{Task, longest};
use mantissa_eval::{ROWS, Sequence};
use mantissa_ranks::Team;
use mantissa_store::{AdapterFiles, Kind};
use serde::Serialize;

use super::models::Models;
use super::tasks::{self, TaskEvaluation};
use super::text::{self, TextEvaluation};
use super::value::Evaluate;
use crate::error::{BadInput, GateFailed, JobError, Result};
use crate::host::Host;
use crate::job::{Job, JobOutput};
use crate::load_needs::LoadNeeds;
use crate::loaded::ModelUse;
use crate::model::{ModelPath, open_quietly};
use crate::tasks::inputs;
use crate::{adapt, adapter};

/// Result of an evaluation.
#[derive(Clone, Debug, PartialEq, Serialize)]
#[serde(untagged)]
pub enum EvaluateReport {
    /// On a text.
    Text(Box<TextEvaluation>),
    /// On tasks.
    Tasks(TaskEvaluation),
}

/// Text or tasks, tokenized for the model.
enum Work {
    Windows(Vec<Sequence>),
    Tasks(Vec<Task>),
}

impl Evaluate {
    /// Fails if the report exceeds a bound of the job.
    ///
    /// # Errors
    /// [`GateFailed`] with the bound and the figure.
    pub fn require(&self, report: &EvaluateReport) -> Result<(), GateFailed> {
        match report {
            EvaluateReport::Text(found) => text::gates(self, found),
            EvaluateReport::Tasks(found) => tasks::gate(self, found),
        }
    }

    /// Predicts what [`run`](Job::run) would load, without loading it.
    ///
    /// # Errors
    /// Input that cannot be read; a config that cannot be read.
    pub fn preview(&self, host: &Host) -> Result<LoadNeeds> {
        let (work, adapter) = (self.read(host)?, adapter::open(self.adapter.as_deref())?);
        let models = [Some(&self.model), self.reference.as_ref()].into_iter().flatten();
        let files = models.map(|model| open_quietly(model)).collect::<Result<Vec<_>>>()?;
        let files: Vec<_> = files.iter().collect();
        let used = self.usage(&work, adapter.as_ref(), host);
        let needs = |threads| Ok::<_, JobError>(ModelUse { threads, ..used }.needed(&files)?.1);
        let threads = adapt::fit_threads(used.threads, host, needs)?;
        ModelUse { threads, ..used }.needs(&files)
    }

    /// Reads and tokenizes the text or the tasks.
    fn read(&self, host: &Host) -> Result<Work> {
        if !self.tasks.is_empty() {
            return Ok(Work::Tasks(host.reading_texts(|| tasks::read(self, host))?));
        }
        let sequences = self.text.sequences(&self.model, false, host)?;
        let none = || {
            BadInput::new("eval", "none of them", "--text, --tokens or --task")
                .with_fix("--text default, the built-in text")
        };
        Ok(Work::Windows(sequences.ok_or_else(none)?))
    }

    /// Describes the use of the models for `work`.
    fn usage<'a>(&'a self, work: &Work, adapter: Option<&'a AdapterFiles>, host: &Host) -> ModelUse<'a> {
        let used = match work {
            Work::Windows(sequences) => {
                let used = ModelUse::evaluation(sequences, host.threads);
                // Logits to write are held for a whole window, as numbers and as bytes.
                let logits = if self.logits.is_some() { used.longest.saturating_mul(2) } else { used.logits };
                ModelUse { cached: self.prefill.is_some(), logits, ..used }
            }
            Work::Tasks(tasks) => {
                let (pass, longest) = longest(tasks.iter().flat_map(|task| &task.encoded));
                let most = tasks.iter().map(|task| task.items.len()).max().unwrap_or(1);
                let threads = host.threads.min(most);
                ModelUse { pass, longest, threads, cached: true, logits: ROWS, ..ModelUse::default() }
            }
        };
        let kv = self.kv.as_ref().map(|policy| &policy.0);
        ModelUse { kv, calibration: Some((&self.calibration, self.seed)), adapter, ..used }
    }
}

impl Job for Evaluate {
    const NAME: &'static str = "evaluate";
    const VERSION: u32 = 1;
    type Report = EvaluateReport;

    fn inputs(&self) -> Vec<PathBuf> {
        let mut all = self.model.inputs();
        all.extend(self.text.inputs());
        all.extend(inputs(&self.tasks).cloned());
        all.extend(self.calibration.inputs());
        all.extend(self.adapter.clone());
        all.extend(self.reference.iter().flat_map(ModelPath::inputs));
        all
    }

    fn outputs(&self) -> Vec<JobOutput> {
        let files =
            [("--per-item", &self.per_item), ("--per-window", &self.per_window), ("--logits", &self.logits)];
        let file = |(option, path): (&'static str, &Option<PathBuf>)| {
            path.clone().map(|path| JobOutput { option, path, kind: Kind::File })
        };
        files.into_iter().filter_map(file).collect()
    }

    fn memory(&self, host: &Host) -> Result<u64> {
        let (work, adapter) = (self.read(host)?, adapter::open(self.adapter.as_deref())?);
        let models = [Some(&self.model), self.reference.as_ref()].into_iter().flatten();
        let files = models.map(|model| open_quietly(model)).collect::<Result<Vec<_>>>()?;
        let files: Vec<_> = files.iter().collect();
        Ok(self.usage(&work, adapter.as_ref(), host).needed(&files)?.1)
    }

    /// Evaluates the model. Bounds are left to [`Evaluate::require`].
    ///
    /// # Errors
    /// Input that cannot be read or evaluated; too little memory.
    fn run(&self, host: &Host) -> Result<EvaluateReport> {
        self.run_with(&Team::alone(), host)
    }
}

impl Evaluate {
    /// Evaluates the model with the other workers of `team`, which divide the windows of a text or the items of tasks.
    ///
    /// # Errors
    /// As [`run`](Job::run).
    pub fn run_with(&self, team: &Team, host: &Host) -> Result<EvaluateReport> {
        let (work, adapter) = (self.read(host)?, adapter::open(self.adapter.as_deref())?);
        let models = Models::load(self, self.usage(&work, adapter.as_ref(), host), host)?;
        Ok(match work {
            Work::Windows(sequences) => {
                EvaluateReport::Text(Box::new(text::run(self, &models, &sequences, (team, host))?))
            }
            Work::Tasks(tasks) => EvaluateReport::Tasks(tasks::run(self, &models, &tasks, (team, host))?),
        })
    }

    /// Computes windows or items that no other worker of `team` computes, until all have a result.
    ///
    /// # Errors
    /// As [`run_with`](Self::run_with).
    pub(crate) fn take_part_with(&self, team: &Team, host: &Host) -> Result<()> {
        let (work, adapter) = (self.read(host)?, adapter::open(self.adapter.as_deref())?);
        let models = Models::load(self, self.usage(&work, adapter.as_ref(), host), host)?;
        match work {
            Work::Windows(sequences) => text::take_part(self, &models, &sequences, (team, host)),
            Work::Tasks(tasks) => tasks::take_part(&models, &tasks, (team, host)),
        }
    }
}
