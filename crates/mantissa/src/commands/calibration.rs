//! What a method calibrates on, from `--calibration` or `--calibration-tokens`.

use std::path::{Path, PathBuf};

use anyhow::Result;
use mantissa_eval::{Sequence, TextOptions, sequences_from_text, token_windows};
use mantissa_model::{Bos, Tokenizer};
use mantissa_quant::calibrate::CalibrationSet;
use mantissa_store::convention::ModelFiles;

use super::model;
use super::text::read_text;
use crate::app::Context;
use crate::error::BadInput;

/// Calibration of methods that need it.
#[derive(clap::Args)]
pub struct CalibrationArgs {
    /// UTF-8 text to calibrate on, for methods such as gptq: cut into windows, of which some are taken evenly
    #[arg(long, value_name = "TEXT", conflicts_with = "calibration_tokens")]
    calibration: Option<PathBuf>,
    /// Token windows to calibrate on instead of text: a list of lists of ids, or, with KEY, an object of such lists; used as they are
    #[arg(long, value_name = "FILE.json[:KEY]")]
    calibration_tokens: Option<String>,
    /// Windows of the calibration text to take
    #[arg(long, value_name = "N", default_value_t = 128, value_parser = clap::value_parser!(u32).range(1..))]
    samples: u32,
    /// Longest window of the calibration text in tokens, BOS included [default: 2048, or the model's context if that is less]
    #[arg(long, value_name = "N")]
    length: Option<usize>,
}

/// Tokens of a window where the model's context allows them.
const LENGTH: usize = 2048;

impl CalibrationArgs {
    /// Whether there is a text to be cut.
    pub fn is_text(&self) -> bool {
        self.calibration.is_some()
    }

    /// The windows, where there are some. Text is cut into documents at `split`.
    ///
    /// # Errors
    /// A file that cannot be read, or holds nothing to calibrate on.
    pub fn load(
        &self,
        source: &ModelFiles,
        split: Option<&str>,
        context: &Context,
    ) -> Result<Option<CalibrationSet>> {
        if let Some(argument) = &self.calibration_tokens {
            let windows = token_windows(argument)?.into_iter().map(|s| s.tokens).collect();
            let name =
                Path::new(argument).file_name().map_or_else(String::new, |n| n.to_string_lossy().into());
            return Ok(Some(CalibrationSet { name, windows }));
        }
        let Some(path) = &self.calibration else { return Ok(None) };
        let options = TextOptions {
            split: split.map(str::to_owned),
            docs: None,
            context: self.length(source)?,
            stride: None,
            bos: Bos::Auto,
        };
        let text = read_text(path)?;
        let name = path.display().to_string();
        if text.trim().is_empty() {
            return Err(BadInput::new(name, "only white space", "a text to calibrate on").into());
        }
        let all = sequences_from_text(&name, &text, &Tokenizer::load(source.dir())?, &options)?;
        let samples = self.samples as usize;
        if all.len() < samples {
            let few = format!("{name}: {} windows to calibrate on, {samples} asked for", all.len());
            context.warn_all(&[few])?;
        }
        let name = path.file_name().map_or_else(String::new, |n| n.to_string_lossy().into());
        Ok(Some(CalibrationSet { name, windows: evenly(all, samples) }))
    }

    fn length(&self, source: &ModelFiles) -> Result<usize> {
        let longest = model::context_length(source)?;
        match self.length {
            None => Ok(LENGTH.min(longest)),
            Some(length) if (2..=longest).contains(&length) => Ok(length),
            Some(length) => {
                let allowed = format!("2 to {longest}, the model's context");
                Err(BadInput::new("--length", length.to_string(), allowed).into())
            }
        }
    }
}

/// `count` of the windows, or all, at even distances.
fn evenly(all: Vec<Sequence>, count: usize) -> Vec<Vec<u32>> {
    let (n, count) = (all.len(), count.min(all.len()));
    let mut all: Vec<_> = all.into_iter().map(|s| s.tokens).collect();
    (0..count).map(|i| std::mem::take(&mut all[i * n / count])).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn windows_are_taken_from_the_whole_text() {
        let all = |n: u32| (0..n).map(|i| Sequence { tokens: vec![i], from: 1 }).collect::<Vec<_>>();
        let taken = |n, count| evenly(all(n), count).concat();
        assert_eq!(taken(10, 4), [0, 2, 5, 7]);
        assert_eq!(taken(3, 4), [0, 1, 2]);
        assert!(taken(0, 4).is_empty());
    }
}
