//! Text that a job measures on, and the windows that it selects.

use std::path::{Path, PathBuf};

use mantissa_eval::{
    Sequence, TextOptions, check_sequences, parse_docs, sequences_from_file, token_file, token_path,
};
use mantissa_model::{Bos, load_config};
use mantissa_quant::{Evaluation, TaskRuns};
use mantissa_store::TextFile;
use mantissa_store::convention::ModelFiles;
use serde::{Deserialize, Serialize};

use crate::default_text;
use crate::error::{BadInput, InPlace, Result};
use crate::escape::quoted;
use crate::host::Host;
use crate::model::{self, ModelPath, load_tokenizer};
use crate::tasks::OutputTasks;

/// Beginning-of-text token before each window.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum BosChoice {
    /// As the tokenizer says.
    Auto,
    /// Always.
    Always,
    /// Never.
    Never,
}

impl From<BosChoice> for Bos {
    fn from(bos: BosChoice) -> Self {
        match bos {
            BosChoice::Auto => Bos::Auto,
            BosChoice::Always => Bos::Always,
            BosChoice::Never => Bos::Never,
        }
    }
}

/// Text, or token windows, to measure on.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct MeasuredText {
    /// UTF-8 text, or [`default_text::NAME`].
    pub text: Option<PathBuf>,
    /// Token windows, `FILE.json` or `FILE.json:KEY`, instead of a text.
    pub tokens: Option<String>,
    /// Window length in tokens.
    pub context: Option<usize>,
    /// Stride between windows in tokens.
    pub stride: Option<usize>,
    /// Beginning-of-text token before each window.
    pub bos: Option<BosChoice>,
    /// Separator of documents.
    pub split: Option<String>,
    /// Range of documents, `A..B`, 1-based and inclusive.
    pub docs: Option<String>,
    /// Number of predicted tokens after which the text ends.
    pub limit: Option<u32>,
}

impl MeasuredText {
    /// Returns the files that are read.
    pub fn inputs(&self) -> Vec<PathBuf> {
        let text = self.text.iter().filter(|path| !default_text::is(path)).cloned();
        text.chain(self.tokens.iter().map(|argument| token_path(argument).into())).collect()
    }

    /// Returns the BOS policy.
    pub fn bos(&self) -> Bos {
        self.bos.unwrap_or(BosChoice::Auto).into()
    }

    /// Returns the windows, tokenized for `model`; `None` without a text. `another` is true if the job splits another
    /// text at the same separator.
    ///
    /// # Errors
    /// A file that cannot be read, needs too much memory, or holds nothing to predict.
    pub fn sequences(&self, model: &Path, another: bool, host: &Host) -> Result<Option<Vec<Sequence>>> {
        let read = || self.read(model, another, host);
        if self.text.is_none() && self.tokens.is_none() { read() } else { host.reading_texts(read) }
    }

    fn read(&self, model: &Path, another: bool, host: &Host) -> Result<Option<Vec<Sequence>>> {
        if self.split.is_some() && self.text.is_none() && !another {
            return Err(BadInput::new("--split", "no text to split", "--text with it").into());
        }
        let sequences = match (&self.tokens, &self.text) {
            (Some(tokens), _) => {
                let given = [
                    ("--context", self.context.is_some()),
                    ("--stride", self.stride.is_some()),
                    ("--bos", self.bos.is_some()),
                ];
                host.warn_all(&unused("the windows of --tokens", &given))?;
                token_file(tokens, host.memory_left())?
            }
            (None, Some(path)) => self.cut(path, model, host)?,
            (None, None) => return Ok(None),
        };
        let sequences = limited(sequences, self.limit);
        // A model that cannot be opened is reported by the job that runs it.
        if let (Some(tokens), Ok(files)) = (&self.tokens, model::open_quietly(model)) {
            check_tokens(tokens, &files, &sequences)?;
        }
        Ok(Some(sequences))
    }

    /// Returns the name of the text for reports: the file without its folder, and the key.
    pub fn name(&self) -> String {
        if self.text.as_deref().is_some_and(default_text::is) {
            return default_text::HELD_OUT_NAME.to_owned();
        }
        let path = self.text.clone().or_else(|| self.tokens.as_ref().map(PathBuf::from)).unwrap_or_default();
        path.file_name().unwrap_or_default().to_string_lossy().into_owned()
    }

    /// Returns the options that measure on the text and those that calibrate on it, for a command; `None` without a
    /// text.
    pub fn options(&self) -> Option<(String, String)> {
        let of = |name: &str, value: &str| format!("--{name} {}", quoted(Path::new(value)));
        if let Some(tokens) = &self.tokens {
            return Some((of("tokens", tokens), of("calibration-tokens", tokens)));
        }
        let text = self.text.as_ref()?.display().to_string();
        let length = self.context.map_or_else(String::new, |context| format!(" --length {context}"));
        let context = self.context.map_or_else(String::new, |context| format!(" --context {context}"));
        Some((of("text", &text) + &context, of("calibration", &text) + &length))
    }

    fn cut(&self, path: &Path, model: &Path, host: &Host) -> Result<Vec<Sequence>> {
        // A missing text is reported before a bad model. A pipe is opened only once.
        let built_in = default_text::is(path);
        if !built_in && !path.exists() {
            TextFile::open(path)?;
        }
        let files = model::open_quietly(model)?;
        let limit = model::context_length(&files)?;
        if let Some(context) = self.context.filter(|&context| context > limit) {
            let allowed = format!("2 to {limit} (max_position_embeddings)");
            return Err(BadInput::new("--context", context.to_string(), allowed).into());
        }
        let options = TextOptions {
            split: self.split.clone(),
            docs: self.docs.as_deref().map(parse_docs).transpose()?,
            context: self.context.unwrap_or(if built_in { default_text::WINDOW.min(limit) } else { limit }),
            stride: self.stride,
            bos: self.bos(),
        };
        let (tokenizer, limit) = (load_tokenizer(&files, host)?, self.limit.map(|limit| limit as usize));
        if built_in {
            return default_text::held_out_with(&tokenizer, &options);
        }
        Ok(sequences_from_file(path, &tokenizer, &options, limit, host.memory_left())?)
    }
}

/// Returns a warning about options that token windows do not use, each with true if it was given.
pub fn unused(windows: &str, options: &[(&str, bool)]) -> Vec<String> {
    let given: Vec<_> = options.iter().filter(|(_, given)| *given).map(|(name, _)| *name).collect();
    let names = given.join(", ");
    let warning = format!("{names}: ignored, because {windows} are used as they are; fix: leave out {names}");
    if given.is_empty() { Vec::new() } else { vec![warning] }
}

/// Checks that `model` can run the windows of the token file `argument`.
///
/// # Errors
/// An id outside the vocabulary or a window longer than the context, with file, key and window.
pub fn check_tokens(argument: &str, model: &ModelFiles, sequences: &[Sequence]) -> Result<()> {
    match load_config(model) {
        Ok(config) => check_sequences(&config, sequences).at(argument),
        Err(_) => Ok(()),
    }
}

/// Returns the first sequences that together predict `limit` tokens; the last is cut.
fn limited(mut sequences: Vec<Sequence>, limit: Option<u32>) -> Vec<Sequence> {
    let Some(mut left) = limit.map(|limit| limit as usize) else { return sequences };
    sequences.retain_mut(|s| {
        let predicted = s.tokens.len().saturating_sub(s.from).min(left);
        left -= predicted;
        s.tokens.truncate(s.from + predicted);
        predicted > 0
    });
    sequences
}

/// Evaluation of an output before it appears: a text, its limit, and tasks.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Measure {
    /// Text to measure on.
    pub text: MeasuredText,
    /// Largest accepted KL on that text in nats per token; without a text on the built-in one.
    pub max_kl: Option<f64>,
    /// Tasks that the output and its source answer.
    pub tasks: OutputTasks,
}

impl Measure {
    /// Returns the files that are read.
    pub fn inputs(&self) -> Vec<PathBuf> {
        self.text.inputs().into_iter().chain(self.tasks.inputs().cloned()).collect()
    }

    /// Makes the evaluation of an output on `sequences`, a part of the text that reports mark with `part`.
    ///
    /// # Errors
    /// Windows that the model cannot run.
    pub fn evaluation_on(
        &self,
        source: &ModelFiles,
        part: &str,
        sequences: Vec<Sequence>,
    ) -> Result<Evaluation> {
        let name = format!("{}{part}", self.text.name());
        Ok(Evaluation::new(source, &name, sequences, self.max_kl)?)
    }

    /// Makes the evaluation of the output against `source`, the opened `model`; `None` without a text.
    /// `another` is true if the job splits another text by the same options.
    ///
    /// # Errors
    /// A text that cannot be read or tokenized; windows that the model cannot run.
    pub fn evaluation(
        &self,
        model: &Path,
        source: &ModelFiles,
        another: bool,
        host: &Host,
    ) -> Result<Option<Evaluation>> {
        match self.text.sequences(model, another, host)? {
            Some(sequences) => Ok(Some(self.evaluation_on(source, "", sequences)?)),
            None if self.max_kl.is_some() => Ok(Some(default_text::evaluation(source, self.max_kl, host)?)),
            None => Ok(None),
        }
    }

    /// Reads the tasks to run on the output and on `source`, the opened `model`; `None` without one.
    ///
    /// # Errors
    /// A task that cannot be read or run, with its line.
    pub fn tasks(&self, model: &ModelPath, source: &ModelFiles, host: &Host) -> Result<Option<TaskRuns>> {
        self.tasks.runs(model, source, host)
    }
}
