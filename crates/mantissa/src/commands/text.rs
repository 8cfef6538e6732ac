//! Text options of a command, and the windows they select.

use std::path::{Path, PathBuf};

use anyhow::{Context as _, Result};
use mantissa_eval::{
    Sequence, TextOptions, check_sequences, parse_docs, sequences_from_file, token_file, token_path,
};
use mantissa_model::Bos;
use mantissa_quant::model_config;
use mantissa_store::convention::ModelFiles;
use mantissa_store::{Paths, TextFile, regular};

use super::default_text;
use super::model::{self, load_tokenizer};
use super::next_steps::quoted;
use crate::context::Context;
use crate::error::BadInput;
use crate::output::bytes;

/// Options that select a text. Flattened into a command, which can require one with `requires =
/// "measured_on"`.
#[derive(clap::Args)]
pub struct TextArgs {
    /// Text to measure on (UTF-8), or default
    ///
    /// default is the built-in text: prose, code and other languages, in windows of 512 tokens.
    #[arg(long, value_name = "TEXT", group = "measured_on", help_heading = "Evaluation")]
    text: Option<PathBuf>,
    /// Token windows instead of text
    ///
    /// FILE.json is a list of lists of token ids, or with FILE.json:KEY an object of such lists. The windows are
    /// used as they are.
    #[arg(
        long,
        value_name = "FILE",
        group = "measured_on",
        help_heading = "Evaluation",
        hide_short_help = true
    )]
    tokens: Option<String>,
    /// Window length in tokens [default: model's context]
    ///
    /// The longest window, BOS included.
    #[arg(long, value_name = "N", requires = "measured_on", help_heading = "Evaluation")]
    context: Option<usize>,
    /// Stride in tokens between windows [default: no overlap]
    #[arg(
        long,
        value_name = "N",
        requires = "measured_on",
        help_heading = "Evaluation",
        hide_short_help = true
    )]
    stride: Option<usize>,
    /// BOS before each window; auto follows the tokenizer [default: auto]
    #[arg(long, value_enum, requires = "measured_on", help_heading = "Evaluation", hide_short_help = true)]
    bos: Option<BosArg>,
    /// Split the text into documents at this separator
    ///
    /// Each is stripped and becomes one window.
    #[arg(long, value_name = "SEP", value_parser = separator, help_heading = "Evaluation", hide_short_help = true)]
    split: Option<String>,
    /// Range of documents, 1-based and inclusive
    #[arg(
        long,
        value_name = "A..B",
        requires = "split",
        help_heading = "Evaluation",
        hide_short_help = true
    )]
    docs: Option<String>,
    /// Stop after this many predicted tokens
    #[arg(long, value_name = "TOKENS", requires = "measured_on", value_parser = clap::value_parser!(u32).range(1..), help_heading = "Evaluation", hide_short_help = true)]
    limit: Option<u32>,
}

#[derive(Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
/// BOS policy on the command line.
pub enum BosArg {
    Auto,
    Always,
    Never,
}

impl From<BosArg> for Bos {
    fn from(bos: BosArg) -> Self {
        match bos {
            BosArg::Auto => Bos::Auto,
            BosArg::Always => Bos::Always,
            BosArg::Never => Bos::Never,
        }
    }
}

/// Parses a separator of documents.
///
/// # Errors
/// A message for an empty separator.
pub fn separator(text: &str) -> Result<String, String> {
    match text {
        "" => Err("expected at least one character, such as '<|endoftext|>', got nothing".to_owned()),
        text => Ok(text.to_owned()),
    }
}

/// Parses an upper bound. NaN is refused, since nothing would exceed it.
pub fn bound(text: &str) -> Result<f64, String> {
    let parsed = text.parse().ok().filter(|bound: &f64| !bound.is_nan());
    parsed.ok_or_else(|| format!("expected a number such as 0.05, got \"{text}\""))
}

impl TextArgs {
    /// Adds the text files to the inputs of a command.
    pub fn paths(&self, paths: &mut Paths) {
        self.text.iter().filter(|path| !default_text::is(path)).for_each(|path| paths.read(path));
        self.tokens.iter().for_each(|argument| paths.read(token_path(argument)));
    }

    /// Returns the BOS policy.
    pub fn bos(&self) -> Bos {
        self.bos.unwrap_or(BosArg::Auto).into()
    }

    /// Returns the separator of documents.
    pub fn split(&self) -> Option<&str> {
        self.split.as_deref()
    }

    /// Returns the windows, tokenized for `model`; `None` without a text. `another` is true if the command
    /// splits another text at the same separator.
    ///
    /// # Errors
    /// A file that cannot be read, needs too much memory, or holds nothing to predict.
    pub fn sequences(&self, model: &Path, another: bool, context: &Context) -> Result<Option<Vec<Sequence>>> {
        let read = || self.read(model, another, context);
        if self.text.is_none() && self.tokens.is_none() { read() } else { context.reading_texts(read) }
    }

    fn read(&self, model: &Path, another: bool, context: &Context) -> Result<Option<Vec<Sequence>>> {
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
                context.warn_all(&unused("the windows of --tokens", &given))?;
                token_file(tokens, context.memory_left())?
            }
            (None, Some(path)) => self.cut(path, model, context)?,
            (None, None) => return Ok(None),
        };
        let sequences = limited(sequences, self.limit);
        // A model that cannot be opened is reported by the command that runs it.
        if let (Some(tokens), Ok(files)) = (&self.tokens, model::open_quietly(model)) {
            check_tokens(tokens, &files, &sequences)?;
        }
        Ok(Some(sequences))
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

    /// Returns the name of the text for reports: the file without its folder, and the key.
    pub fn name(&self) -> String {
        if self.text.as_deref().is_some_and(default_text::is) {
            return default_text::HELD_OUT_NAME.to_owned();
        }
        let path = self.text.clone().or_else(|| self.tokens.as_ref().map(PathBuf::from)).unwrap_or_default();
        path.file_name().unwrap_or_default().to_string_lossy().into_owned()
    }

    fn cut(&self, path: &Path, model: &Path, context: &Context) -> Result<Vec<Sequence>> {
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
        let (tokenizer, limit) = (load_tokenizer(&files, context)?, self.limit.map(|limit| limit as usize));
        if built_in {
            return default_text::held_out_with(&tokenizer, &options);
        }
        Ok(sequences_from_file(path, &tokenizer, &options, limit, context.memory_left())?)
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
    match model_config(model) {
        Ok(config) => check_sequences(&config, sequences).context(argument.to_owned()),
        Err(_) => Ok(()),
    }
}

/// Maximum size of a settings file in bytes.
const MAX_SETTINGS: u64 = 16 << 20;

/// Reads a file of settings, which must be a regular file.
///
/// # Errors
/// A missing file, one of another type, one that is not UTF-8, or one that is too large.
pub fn read_settings(path: &Path) -> Result<String> {
    Ok(regular::read_text(path, MAX_SETTINGS, "a file of settings")?)
}

/// Reads a small text, from a file or a pipe.
///
/// # Errors
/// A missing file, one that is not UTF-8, or one that is too large.
pub fn read_text(path: &Path) -> Result<String> {
    let text = TextFile::open(path)?.whole(MAX_SETTINGS)?;
    text.ok_or_else(|| {
        let most = bytes(MAX_SETTINGS);
        BadInput::new(path.display().to_string(), format!("more than {most}"), format!("at most {most}"))
            .into()
    })
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
