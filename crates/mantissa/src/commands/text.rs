//! Text options of a command, and the windows they select.

use std::path::PathBuf;

use mantissa_jobs::measured_text::{BosChoice, MeasuredText};
use mantissa_model::Bos;

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
        BosChoice::from(bos).into()
    }
}

impl From<BosArg> for BosChoice {
    fn from(bos: BosArg) -> Self {
        match bos {
            BosArg::Auto => BosChoice::Auto,
            BosArg::Always => BosChoice::Always,
            BosArg::Never => BosChoice::Never,
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
    /// Returns the options as a job has them.
    pub fn value(&self) -> MeasuredText {
        MeasuredText {
            text: self.text.clone(),
            tokens: self.tokens.clone(),
            context: self.context,
            stride: self.stride,
            bos: self.bos.map(BosChoice::from),
            split: self.split.clone(),
            docs: self.docs.clone(),
            limit: self.limit,
        }
    }
}
