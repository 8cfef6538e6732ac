//! Evaluation on tasks with right and wrong answers.

use std::ops::{ControlFlow, Range};
use std::path::PathBuf;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Instant;

use mantissa_eval::tasks::{Answer, Task, TaskSummary, summary};
use mantissa_eval::{EvalError, Evaluated};
use mantissa_ranks::{Reader, Team, Writer, ranges};
use mantissa_store::write_file_atomic;
use serde::Serialize;
use serde_json::json;

use super::groups;
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
pub(super) fn run(
    job: &Evaluate,
    models: &Models,
    tasks: &[Task],
    (team, host): (&Team, &Host),
) -> Result<TaskEvaluation> {
    let start = Instant::now();
    let answers = answers(models, tasks, (team, host))?;
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

/// Computes answers that no other worker of `team` computes, until all have a result.
pub(super) fn take_part(models: &Models, tasks: &[Task], (team, host): (&Team, &Host)) -> Result<()> {
    answers(models, tasks, (team, host)).map(drop)
}

/// Computes the answers to all items, alone or with the other workers of `team`. A worker that computes a part of them returns
/// that part.
fn answers(models: &Models, tasks: &[Task], (team, host): (&Team, &Host)) -> Result<Answers> {
    let (model, reference) = (models.evaluated(), models.reference.as_ref());
    let reference = reference.map(|reference| Evaluated::from(&reference.decoder));
    if let Some(reference) = reference {
        let (model, reference) = (model.config().vocab_size, reference.config().vocab_size);
        if model != reference {
            return Err(EvalError::Vocabulary { model, reference }.into());
        }
    }
    let tokenizer = load_tokenizer(models.files(), host)?;
    let count = 1 + u64::from(reference.is_some());
    let total = tasks.iter().map(|task| task.items.len() as u64 * count).sum();
    let progress = host.progress(total, Unit::Items("items"));
    let before = AtomicU64::new(0);
    let told = |done| {
        progress.set(before.load(Ordering::Relaxed) + done);
        ControlFlow::Continue(())
    };
    let mut all = Vec::with_capacity(tasks.len());
    for task in tasks {
        let part = |model, range: Range<usize>| {
            let count = range.len() as u64;
            let found = task.run_part(model, range, &tokenizer, (models.threads, &told));
            before.fetch_add(count, Ordering::Relaxed);
            found.at(&task.name)
        };
        let mut both = |range: Range<usize>| {
            let answers = part(model, range.clone())?;
            Ok((answers, reference.map(|reference| part(reference, range)).transpose()?))
        };
        all.push(match team.is_shared() {
            false => both(0..task.items.len())?,
            true => shared_answers(task, &mut both, (team, host))?,
        });
    }
    progress.finish();
    Ok(all)
}

/// Answers of the model and of the reference to some items.
type Both = (Vec<Answer>, Option<Vec<Answer>>);

/// Computes the answers to a task with the other workers of `team`.
fn shared_answers(
    task: &Task,
    both: &mut dyn FnMut(Range<usize>) -> Result<Both>,
    work: (&Team, &Host),
) -> Result<Both> {
    let groups = ranges(task.items.len(), groups::GROUPS);
    let names: Vec<String> = groups.iter().map(|group| format!("{} items {group:?}", task.name)).collect();
    let read = |group: usize, bytes: &[u8]| {
        from_bytes(bytes).filter(|(answers, _)| answers.len() == groups[group].len())
    };
    let mut run = |group: usize| both(groups[group].clone());
    let (mut all, mut references) = (Vec::new(), None::<Vec<Answer>>);
    for (answers, reference) in groups::shared(&names, &mut run, |both| Ok(to_bytes(both)), read, work)? {
        all.extend(answers);
        if let Some(reference) = reference {
            references.get_or_insert_default().extend(reference);
        }
    }
    Ok((all, references))
}

/// Returns answers as bytes, which workers exchange.
fn to_bytes((answers, references): &Both) -> Vec<u8> {
    let write = |out: &mut Writer, answers: &Vec<Answer>| {
        out.len(answers.len());
        for answer in answers {
            // Every field is named, so that a new one is not forgotten.
            let Answer { correct, correct_norm, chosen, logprobs, answer_logprob, text } = answer;
            out.byte(u8::from(*correct));
            out.option(*correct_norm, |out, correct| out.byte(u8::from(correct)));
            out.option(*chosen, Writer::len);
            out.numbers(logprobs.iter().map(|logprob| logprob.to_bits().to_le_bytes()));
            out.option(*answer_logprob, Writer::f64);
            out.option(text.as_ref(), |out, text| out.text(text));
        }
    };
    let mut out = Writer::default();
    write(&mut out, answers);
    out.option(references.as_ref(), write);
    out.0
}

/// Reads answers; `None` if the bytes are not that.
fn from_bytes(bytes: &[u8]) -> Option<Both> {
    let answer = |from: &mut Reader<'_>| {
        Some(Answer {
            correct: from.byte()? != 0,
            correct_norm: from.option(|from| Some(from.byte()? != 0))?,
            chosen: from.option(|from| usize::try_from(from.u64()?).ok())?,
            logprobs: from.numbers(|bytes| f64::from_bits(u64::from_le_bytes(bytes)))?,
            answer_logprob: from.option(Reader::f64)?,
            text: from.option(Reader::text)?,
        })
    };
    let read = |from: &mut Reader<'_>| (0..from.len(1)?).map(|_| answer(from)).collect::<Option<Vec<_>>>();
    let mut from = Reader(bytes);
    let found = (read(&mut from)?, from.option(read)?);
    from.0.is_empty().then_some(found)
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn answers_are_read_back_bit_for_bit() {
        let answer = Answer {
            correct: true,
            correct_norm: Some(false),
            chosen: Some(3),
            logprobs: vec![-1.5, f64::NEG_INFINITY, -0.0],
            answer_logprob: Some(-0.1),
            text: Some("ü".to_owned()),
        };
        for both in [(vec![answer.clone(), Answer::default()], None), (Vec::new(), Some(vec![answer]))] {
            let bytes = to_bytes(&both);
            assert_eq!(from_bytes(&bytes), Some(both));
            assert!((0..bytes.len()).all(|cut| from_bytes(&bytes[..cut]).is_none()));
        }
    }
}
