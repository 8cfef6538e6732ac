//! Task files of a job: built-in or given, tokenized for a model.

use std::path::{Path, PathBuf};

use mantissa_eval::EvalError;
use mantissa_eval::tasks::{self, Encoded, Item, Score, Task};
use mantissa_model::{Bos, Tokenizer};
use mantissa_num::nearest_list;
use mantissa_quant::{TaskRun, TaskRuns};
use mantissa_store::FileDigest;
use mantissa_store::convention::ModelFiles;
use serde::{Deserialize, Serialize};

use crate::chat;
use crate::error::{BadInput, InPlace, JobError, Result};
use crate::host::Host;
use crate::model::{ModelPath, context_length, load_tokenizer};
use crate::settings::read_text;

/// Built-in tasks: name and text.
const BUILT_IN: [(&str, &str); 4] = [
    ("cloze", include_str!("../tasks/cloze.jsonl")),
    ("retrieval", include_str!("../tasks/retrieval.jsonl")),
    ("arithmetic", include_str!("../tasks/arithmetic.jsonl")),
    ("format", include_str!("../tasks/format.jsonl")),
];

/// Returns the text of a built-in task.
fn built_in(path: &Path) -> Option<&'static str> {
    BUILT_IN.iter().find(|(name, _)| path.as_os_str() == *name).map(|(_, text)| *text)
}

/// True if `path` is the name of a task rather than of a file: one word without an ending, and no such file.
fn is_name(path: &Path) -> bool {
    path.components().count() == 1 && path.extension().is_none() && !path.exists()
}

/// Makes the error of a name that no built-in task has.
fn unknown(name: &str) -> BadInput {
    let allowed =
        format!("{}, or a file of items (.jsonl)", nearest_list(name, BUILT_IN.map(|(name, _)| name)));
    let fix = "mantissa help reference/tasks; tasks of lm-evaluation-harness: mantissa help guide/python";
    BadInput::new("--task", format!("\"{name}\""), allowed).with_fix(fix)
}

/// Returns the task files that are read.
pub fn inputs(given: &[PathBuf]) -> impl Iterator<Item = &PathBuf> {
    given.iter().filter(|path| built_in(path).is_none())
}

/// Returns the items of the built-in retrieval task.
///
/// # Errors
/// None: the task is part of the program.
pub fn retrieval() -> Result<Vec<Item>> {
    let text = built_in(Path::new("retrieval")).unwrap_or_default();
    Ok(tasks::items("retrieval", text)?)
}

/// Task as read from its file.
pub struct Read {
    /// Path as given, or name of a built-in task.
    path: PathBuf,
    /// SHA-256 of the file.
    sha256: String,
    items: Vec<Item>,
}

impl Read {
    /// Reads a built-in task or a file.
    ///
    /// # Errors
    /// A file that cannot be read; an item that is not valid, with its line.
    pub fn new(path: &Path) -> Result<Self> {
        let name = path.display().to_string();
        let of =
            |text: &str| Ok::<_, JobError>((FileDigest::of(text.as_bytes()), tasks::items(&name, text)?));
        let (digest, items) = match built_in(path) {
            Some(text) => of(text)?,
            None if is_name(path) => return Err(unknown(&name).into()),
            None => of(&read_text(path)?)?,
        };
        Ok(Read { path: path.to_owned(), sha256: digest.hex(), items })
    }

    /// Tokenizes the items for `model`; with `chat` each prompt is rendered as a message of the user.
    ///
    /// # Errors
    /// A prompt that the chat template or the tokenizer refuses; a choice without a token of its own.
    pub fn encode(
        self,
        model: &ModelPath,
        tokenizer: &Tokenizer,
        (chat, bos): (bool, Bos),
        host: &Host,
    ) -> Result<Task> {
        let name = self.path.display().to_string();
        let encoded = self.items.iter().map(|item| encoded(&name, item, model, tokenizer, (chat, bos), host));
        Ok(Task { encoded: encoded.collect::<Result<_>>()?, name, items: self.items })
    }
}

fn encoded(
    task: &str,
    item: &Item,
    model: &ModelPath,
    tokenizer: &Tokenizer,
    (chat, bos): (bool, Bos),
    host: &Host,
) -> Result<Encoded> {
    let named = model.named();
    let rendered = match chat {
        true => Some(chat::conversation(named, tokenizer, None, &item.prompt, host.chat(named)?)?),
        false => None,
    };
    // A chat template writes the special tokens itself.
    let bos = if chat { Bos::Never } else { bos };
    tasks::encode(item, rendered.as_deref(), tokenizer, bos)
        .map_err(|error| EvalError::Item { line: item.line, error: Box::new(error) })
        .at(task)
}

/// Tasks that run on an output before it appears.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct OutputTasks {
    /// Files, or names of built-in tasks.
    pub files: Vec<PathBuf>,
    /// True if each prompt is rendered as a chat message of the user.
    pub chat: bool,
    /// Largest accepted fall of the accuracy of a task, as a share.
    pub max_accuracy_drop: Option<f64>,
}

impl OutputTasks {
    /// Returns the task files that are read.
    pub fn inputs(&self) -> impl Iterator<Item = &PathBuf> {
        inputs(&self.files)
    }

    /// Reads the tasks and tokenizes them for `source`, the opened `model`; `None` without one.
    ///
    /// # Errors
    /// A task that cannot be read or run, with its line.
    pub fn runs(&self, model: &ModelPath, source: &ModelFiles, host: &Host) -> Result<Option<TaskRuns>> {
        if self.files.is_empty() {
            return Ok(None);
        }
        let read = self.files.iter().map(|path| Read::new(path)).collect::<Result<Vec<_>>>()?;
        let runs = host.reading_texts(|| {
            let tokenizer = load_tokenizer(source, host)?;
            let run = |read: Read| {
                let (sha256, chat) = (read.sha256.clone(), self.chat);
                let file = read.path.file_name().unwrap_or_default().to_string_lossy().into_owned();
                let task = read.encode(model, &tokenizer, (chat, Bos::Auto), host)?;
                task.check_context(context_length(source)?).at(task.name.clone())?;
                // quality.json names no folder.
                Ok(TaskRun { task: Task { name: file, ..task }, sha256, chat })
            };
            read.into_iter().map(run).collect::<Result<Vec<_>>>()
        })?;
        Ok(Some(TaskRuns::new(source, runs, self.max_accuracy_drop)?))
    }
}

/// Notes a reference that does not answer better than by guessing.
pub fn note_guessing(task: &str, score: &Score, host: &Host) {
    let Some(compared) = &score.reference else { return };
    // Standard error of guessing; generated text is never right by chance.
    let noise = (score.chance * (1.0 - score.chance) / score.items as f64).sqrt();
    if compared.accuracy <= score.chance + 2.0 * noise {
        host.note(&format!(
            "{task}: the reference answers no better than by guessing ({:.1} %, chance {:.1} %): this task cannot show a loss",
            100.0 * compared.accuracy,
            100.0 * score.chance
        ));
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    #[test]
    fn built_in_tasks_are_sound() {
        for (name, text) in BUILT_IN {
            let items = tasks::items(name, text).unwrap();
            assert!(items.len() >= 100, "{name}");
            let ids: std::collections::BTreeSet<_> = items.iter().map(|item| &item.id).collect();
            assert_eq!(ids.len(), items.len(), "{name}: each item has its own name");
            assert!(items.iter().all(|item| item.group.is_some()), "{name}");
        }
        assert!(built_in(Path::new("cloze")).is_some() && built_in(Path::new("cloze.jsonl")).is_none());
    }
}
