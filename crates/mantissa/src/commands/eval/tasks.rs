//! `mantissa eval --task`: accuracy on tasks with right and wrong answers.

use std::io::{self, Write};
use std::ops::ControlFlow;
use std::path::Path;
use std::sync::atomic::{AtomicU64, Ordering};

use anyhow::Result;
use mantissa_eval::tasks::{self, Answer, Task, TaskSummary};
use mantissa_eval::{EvalError, Evaluated, ROWS};
use mantissa_model::Tokenizer;
use mantissa_store::write_file_atomic;
use serde::Serialize;
use serde_json::json;

use super::super::loaded_models::Use;
use super::super::model::{self, load_tokenizer};
use super::super::run::Engine;
use super::super::tasks::{Read, note_guessing, score_table};
use super::args::{Args, TaskArgs};
use super::load::{exceeds, kv_name, load, quantized_reference};
use crate::context::Context;
use crate::error::GateFailed;
use crate::output::labelled;
use crate::progress::Unit;

#[derive(Serialize)]
struct Report<'a> {
    model: &'a Path,
    #[serde(skip_serializing_if = "Option::is_none")]
    adapter: Option<&'a Path>,
    convention: &'static str,
    engine: Engine,
    #[serde(skip_serializing_if = "Option::is_none")]
    reference: Option<&'a Path>,
    #[serde(skip_serializing_if = "Option::is_none")]
    reference_format: Option<&'static str>,
    #[serde(skip_serializing_if = "Option::is_none")]
    kv: Option<String>,
    tasks: Vec<Done<'a>>,
    seconds: f64,
}

/// Result of one task.
#[derive(Serialize)]
struct Done<'a> {
    task: &'a str,
    #[serde(flatten)]
    summary: TaskSummary,
}

/// Runs the tasks.
///
/// # Errors
/// A task or a model that cannot be read or run; [`GateFailed`] if an accuracy falls by more than allowed.
pub fn run(args: &Args, context: &Context) -> Result<()> {
    let tasks = context.reading_texts(|| read(args, context))?;
    let (pass, longest) = tasks::longest(tasks.iter().flat_map(|task| &task.encoded));
    let most = tasks.iter().map(|task| task.items.len()).max().unwrap_or(1);
    let adapter = args.adapter.open()?;
    let used = Use {
        pass,
        longest,
        threads: context.threads.min(most),
        cached: true,
        logits: ROWS,
        kv: None,
        calibration: None,
        adapter: adapter.as_ref(),
    };
    let (model, reference, threads) = load(args, used, context)?;
    let compared = reference.as_ref().map(|reference| Evaluated::from(&reference.decoder));
    if let Some(reference) = compared {
        let (model, reference) = (model.evaluated().config().vocab_size, reference.config().vocab_size);
        if model != reference {
            return Err(EvalError::Vocabulary { model, reference }.into());
        }
    }
    let start = std::time::Instant::now();
    let tokenizer = load_tokenizer(model.files(), context)?;
    let answers = answers(&tasks, (model.evaluated(), compared), &tokenizer, threads, context)?;
    if let Some(path) = &args.tasks.per_item {
        write_file_atomic(&context.output(path)?, per_item(&tasks, &answers).as_bytes())?;
    }
    let done = tasks.iter().zip(&answers).map(|(task, (model, reference))| Done {
        task: &task.name,
        summary: tasks::summary(&task.items, model, reference.as_deref()),
    });
    let report = Report {
        model: args.model.named(),
        adapter: args.adapter.named(),
        convention: model.files().convention_name(),
        engine: args.engine,
        reference: args.reference.as_ref().map(|model| model.named()),
        reference_format: quantized_reference(reference.as_ref(), context),
        kv: kv_name(args, &model),
        tasks: done.collect(),
        seconds: start.elapsed().as_secs_f64(),
    };
    context.report(&report, |out| human(out, &report))?;
    report.tasks.iter().for_each(|done| note_guessing(done.task, &done.summary.score, context));
    gate(args, &report)
}

/// Reads and tokenizes the tasks.
fn read(args: &Args, context: &Context) -> Result<Vec<Task>> {
    let TaskArgs { task, chat, .. } = &args.tasks;
    let read = task.iter().map(|path| Read::new(path)).collect::<Result<Vec<_>, _>>()?;
    let files = model::open_quietly(&args.model)?;
    let tokenizer = load_tokenizer(&files, context)?;
    let bos = args.text.bos();
    let encoded =
        read.into_iter().map(|read| read.encode(args.model.job_path(), &tokenizer, (*chat, bos), context));
    Ok(encoded.collect::<Result<_, _>>()?)
}

/// Answers of the model and of the reference to each task.
type Answers = Vec<(Vec<Answer>, Option<Vec<Answer>>)>;

fn answers(
    tasks: &[Task],
    (model, reference): (Evaluated<'_>, Option<Evaluated<'_>>),
    tokenizer: &Tokenizer,
    threads: usize,
    context: &Context,
) -> Result<Answers> {
    let models = 1 + u64::from(reference.is_some());
    let total = tasks.iter().map(|task| task.items.len() as u64 * models).sum();
    let progress = context.progress(total, Unit::Items("items"));
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
            answers.map_err(|error| anyhow::Error::from(error).context(task.name.clone()))
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

/// Flipped answers that are printed for each task.
const SHOWN: usize = 5;

fn human(out: &mut dyn Write, report: &Report<'_>) -> io::Result<()> {
    if let Some(adapter) = report.adapter {
        labelled(out, "adapter", &adapter.display().to_string())?;
    }
    if let Some(kv) = &report.kv {
        labelled(out, "KV cache", kv)?;
    }
    let scores =
        report.tasks.iter().map(|Done { task, summary }| (*task, &summary.score, &summary.groups[..]));
    score_table(scores, report.reference.map(|_| "reference")).write(out)?;
    for Done { task, summary } in &report.tasks {
        for flip in summary.flips.iter().take(SHOWN) {
            let way = if flip.gained { "now right" } else { "now wrong" };
            writeln!(out, "{task} {}: {way}{}", flip.id, answered(&flip.reference, &flip.model))?;
        }
        let more = summary.flips.len().saturating_sub(SHOWN);
        if more > 0 {
            writeln!(out, "{task}: {more} more answers flipped (--per-item FILE has all)")?;
        }
    }
    Ok(())
}

/// Describes both answers.
fn answered(reference: &Answer, model: &Answer) -> String {
    let of = |answer: &Answer| match (&answer.text, answer.chosen) {
        (Some(text), _) => format!("{:?}", text.trim()),
        (None, Some(chosen)) => format!("choice {}", chosen + 1),
        (None, None) => String::new(),
    };
    format!(", {} after {} of the reference", of(model), of(reference))
}

fn gate(args: &Args, report: &Report<'_>) -> Result<()> {
    let Some(most) = args.tasks.max_accuracy_drop else { return Ok(()) };
    for Done { task, summary } in &report.tasks {
        let Some(compared) = &summary.score.reference else { continue };
        if exceeds(-compared.delta_accuracy, most) {
            let drop = -compared.delta_accuracy;
            let found = format!("{task}: accuracy: expected a drop of at most {most}, got {drop:.4}");
            return Err(GateFailed::new(found).into());
        }
    }
    Ok(())
}
