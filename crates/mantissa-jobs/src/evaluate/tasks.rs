//! Evaluation on tasks with right and wrong answers.

use std::ops::ControlFlow;
use std::path::PathBuf;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Instant;

use mantissa_eval::tasks::{Answer, Task, TaskSummary, summary};
use mantissa_eval::{EvalError, Evaluated};
use mantissa_model::Tokenizer;
use mantissa_store::write_file_atomic;
use serde::Serialize;
use serde_json::json;

use super::models::{Models, exceeds};
use super::value::Evaluate;
use crate::error::{GateFailed, InPlace, Result};
use crate::host::Host;
use crate::model::{ModelPath, load_tokenizer, open_quietly};
use crate::names::Engine;
use crate::progress::Unit;
use crate::tasks::{Read, note_guessing};

/// Result of an evaluation on tasks.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct TaskEvaluation {
    /// Model as named.
    pub model: PathBuf,
    /// Folder of the adapter.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub adapter: Option<PathBuf>,
    /// Checkpoint format of the model.
    pub convention: &'static str,
    /// Engine that ran the model.
    pub engine: Engine,
    /// Reference as named.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub reference: Option<PathBuf>,
    /// Format of the reference, if it is quantized itself.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub reference_format: Option<&'static str>,
    /// Policy of the KV cache.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub kv: Option<String>,
    /// Results in the order of the job.
    pub tasks: Vec<TaskResult>,
    /// Seconds of the evaluation, without loading.
    pub seconds: f64,
}

/// Result of one task.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct TaskResult {
    /// Task as named.
    pub task: String,
    /// Scores and flipped answers.
    #[serde(flatten)]
    pub summary: TaskSummary,
}

/// Answers of the model and of the reference to each task.
type Answers = Vec<(Vec<Answer>, Option<Vec<Answer>>)>;

/// Reads and tokenizes the tasks.
pub(super) fn read(job: &Evaluate, host: &Host) -> Result<Vec<Task>> {
    let read = job.tasks.iter().map(|path| Read::new(path)).collect::<Result<Vec<_>>>()?;
    let files = open_quietly(&job.model)?;
    let tokenizer = load_tokenizer(&files, host)?;
    let way = (job.chat, job.text.bos());
    read.into_iter().map(|read| read.encode(&job.model, &tokenizer, way, host)).collect()
}

/// Runs the tasks, and writes the answers if the job asks for them.
pub(super) fn run(job: &Evaluate, models: &Models, tasks: &[Task], host: &Host) -> Result<TaskEvaluation> {
    let compared = models.reference.as_ref().map(|reference| Evaluated::from(&reference.decoder));
    if let Some(reference) = compared {
        let (model, reference) = (models.evaluated().config().vocab_size, reference.config().vocab_size);
        if model != reference {
            return Err(EvalError::Vocabulary { model, reference }.into());
        }
    }
    let start = Instant::now();
    let tokenizer = load_tokenizer(models.files(), host)?;
    let answers = answers(tasks, (models.evaluated(), compared), &tokenizer, models.threads, host)?;
    if let Some(path) = &job.per_item {
        write_file_atomic(&host.output(path)?, per_item(tasks, &answers).as_bytes())?;
    }
    let result = |(task, (model, reference)): (&Task, &(Vec<Answer>, Option<Vec<Answer>>))| TaskResult {
        task: task.name.clone(),
        summary: summary(&task.items, model, reference.as_deref()),
    };
    let report = TaskEvaluation {
        model: job.model.named().to_owned(),
        adapter: job.adapter.clone(),
        convention: models.files().convention_name(),
        engine: job.engine,
        reference: job.reference.as_ref().map(ModelPath::named).map(Into::into),
        reference_format: models.quantized_reference(host),
        kv: models.kv_name(job.kv.as_deref()),
        tasks: tasks.iter().zip(&answers).map(result).collect(),
        seconds: start.elapsed().as_secs_f64(),
    };
    report.tasks.iter().for_each(|done| note_guessing(&done.task, &done.summary.score, host));
    Ok(report)
}

fn answers(
    tasks: &[Task],
    (model, reference): (Evaluated<'_>, Option<Evaluated<'_>>),
    tokenizer: &Tokenizer,
    threads: usize,
    host: &Host,
) -> Result<Answers> {
    let models = 1 + u64::from(reference.is_some());
    let total = tasks.iter().map(|task| task.items.len() as u64 * models).sum();
    let progress = host.progress(total, Unit::Items("items"));
    let before = AtomicU64::new(0);
    let told = |done| {
        progress.set(before.load(Ordering::Relaxed) + done);
        ControlFlow::Continue(())
    };
    let mut all = Vec::with_capacity(tasks.len());
    for task in tasks {
        let run = |model| {
            let answers = task.run(model, tokenizer, threads, &told);
            before.fetch_add(task.items.len() as u64, Ordering::Relaxed);
            answers.at(&task.name)
        };
        all.push((run(model)?, reference.map(run).transpose()?));
    }
    progress.finish();
    Ok(all)
}

/// One line for each item.
fn per_item(tasks: &[Task], answers: &Answers) -> String {
    let mut text = String::new();
    for (task, (model, reference)) in tasks.iter().zip(answers) {
        for (i, (item, answer)) in task.items.iter().zip(model).enumerate() {
            let mut line = json!({ "task": task.name, "id": item.id, "line": item.line, "model": answer });
            if let Some(group) = &item.group {
                line["group"] = json!(group);
            }
            if let Some(reference) = reference.as_ref().and_then(|answers| answers.get(i)) {
                line["reference"] = json!(reference);
            }
            text.push_str(&format!("{line}\n"));
        }
    }
    text
}

/// Fails if the accuracy of a task falls by more than the bound.
pub(super) fn gate(job: &Evaluate, found: &TaskEvaluation) -> Result<(), GateFailed> {
    let Some(most) = job.max_accuracy_drop else { return Ok(()) };
    for TaskResult { task, summary } in &found.tasks {
        let Some(compared) = &summary.score.reference else { continue };
        if exceeds(-compared.delta_accuracy, most) {
            let drop = -compared.delta_accuracy;
            let found = format!("{task}: accuracy: expected a drop of at most {most}, got {drop:.4}");
            return Err(GateFailed::new(found));
        }
    }
    Ok(())
}
