//! Calibration options: `--calibration` and `--calibration-tokens`.

use std::path::{Path, PathBuf};

use anyhow::Result;
use mantissa_eval::{
    Sequence, TextOptions, sequences_from_file, sequences_from_text, token_path, token_windows, whole,
};
use mantissa_model::{Bos, Tokenizer};
use mantissa_num::round::random_u32;
use mantissa_quant::calibrate::CalibrationSet;
use mantissa_store::convention::ModelFiles;
use mantissa_store::{Paths, TextFile};

use super::conversations::{self, Lines};
use super::default_text;
use super::generated;
use super::model;
use super::model::load_tokenizer;
use super::text::{check_tokens, unused};
use crate::context::Context;
use crate::error::BadInput;

/// Calibration options of a command.
#[derive(Clone, clap::Args)]
pub struct CalibrationArgs {
    /// Calibration text (repeatable)
    ///
    /// UTF-8. The text is cut into windows, of which --samples are taken evenly. In a .jsonl file each line is
    /// one sample: {"text": …}, or {"messages": […]}, rendered with the model's chat template. Several texts,
    /// each given as TEXT:WEIGHT, share the samples by weight [default: 1]. `default` is the built-in text:
    /// prose, code, dialogue and twelve languages, 200 kB, in samples of 512 tokens.
    #[arg(long, value_name = "TEXT", value_parser = weighted, conflicts_with = "calibration_tokens", help_heading = "Calibration")]
    calibration: Vec<Text>,
    /// Calibration token windows instead of text
    ///
    /// FILE.json is a list of lists of token ids, or with FILE.json:KEY an object of such lists. The windows are
    /// used as they are.
    #[arg(long, value_name = "FILE", help_heading = "Calibration", hide_short_help = true)]
    calibration_tokens: Option<String>,
    /// Number of calibration samples [default: 128]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..), help_heading = "Calibration")]
    samples: Option<u32>,
    /// Maximum sample length in tokens [default: 2048]
    ///
    /// BOS included. The default is the model's context if that is less.
    #[arg(long, value_name = "N", help_heading = "Calibration")]
    length: Option<usize>,
    /// Number of samples that the unquantized model generates
    ///
    /// They are added to the calibration. Each continues a few tokens of a calibration sample, sampled at
    /// temperature 1 with --seed. Learned rounding and GPTAQ overfit a small calibration set; such samples extend
    /// it without more text.
    #[arg(long, value_name = "N", default_value_t = 0, value_parser = clap::value_parser!(u32).range(..=100_000), help_heading = "Calibration", hide_short_help = true)]
    generated_samples: u32,
}

/// Calibration text with its share of the samples.
#[derive(Clone, Debug, PartialEq)]
struct Text {
    path: PathBuf,
    weight: f64,
}

/// Parses `TEXT[:WEIGHT]`.
///
/// # Errors
/// A message for a weight that is not above 0.
fn weighted(text: &str) -> Result<Text, String> {
    let whole = || Text { path: text.into(), weight: 1.0 };
    // A colon may be part of a file name.
    let Some((path, weight)) = text.rsplit_once(':').filter(|_| !Path::new(text).exists()) else {
        return Ok(whole());
    };
    match weight.parse::<f64>() {
        Ok(weight) if weight.is_finite() && weight > 0.0 => Ok(Text { path: path.into(), weight }),
        _ if weight.contains('/') => Ok(whole()),
        _ => Err(format!("expected a weight above 0, such as 0.7, got \"{weight}\"")),
    }
}

/// Default sample length in tokens.
const LENGTH: usize = 2048;

/// Default number of samples.
const SAMPLES: u32 = 128;

impl CalibrationArgs {
    /// Adds the calibration files to the inputs of a command.
    pub fn paths(&self, paths: &mut Paths) {
        let files = self.calibration.iter().filter(|text| !default_text::is(&text.path));
        files.for_each(|text| paths.read(&text.path));
        self.calibration_tokens.iter().for_each(|argument| paths.read(token_path(argument)));
    }

    /// True if there is a text to tokenize.
    pub fn is_text(&self) -> bool {
        !self.calibration.is_empty()
    }

    /// Loads the calibration samples, if any. Text is split into documents at `split`.
    ///
    /// # Errors
    /// An unreadable file, or one without samples.
    pub fn load(
        &self,
        source: &ModelFiles,
        split: Option<&str>,
        context: &Context,
    ) -> Result<Option<CalibrationSet>> {
        Ok(self.load_apart(source, split, 0, context)?.map(|(set, _)| set))
    }

    /// Loads the samples, and sets `apart` others, taken evenly among them, aside. Texts provide that many
    /// more.
    ///
    /// # Errors
    /// As [`load`](Self::load), and if no sample would be left.
    pub fn load_apart(
        &self,
        source: &ModelFiles,
        split: Option<&str>,
        apart: u32,
        context: &Context,
    ) -> Result<Option<(CalibrationSet, Vec<Vec<u32>>)>> {
        let read = || self.read(source, split, apart, context);
        if self.is_empty() { read() } else { context.reading_texts(read) }
    }

    fn read(
        &self,
        source: &ModelFiles,
        split: Option<&str>,
        apart: u32,
        context: &Context,
    ) -> Result<Option<(CalibrationSet, Vec<Vec<u32>>)>> {
        let (name, mut windows) = if let Some(argument) = &self.calibration_tokens {
            let given = [("--samples", self.samples.is_some()), ("--length", self.length.is_some())];
            context.warn_all(&unused("the windows of --calibration-tokens", &given))?;
            let windows = token_windows(argument, context.memory_left())?;
            check_tokens(argument, source, &windows)?;
            let windows: Vec<_> = windows.into_iter().map(|s| s.tokens).collect();
            let name = Path::new(argument).file_name();
            (name.map_or_else(String::new, |n| n.to_string_lossy().into()), windows)
        } else if self.is_text() {
            self.texts(source, split, self.samples.unwrap_or(SAMPLES) as usize + apart as usize, context)?
        } else if self.generated_samples > 0 {
            let allowed = "--calibration or --calibration-tokens with it";
            return Err(BadInput::new("--generated-samples", "neither", allowed).into());
        } else {
            return Ok(None);
        };
        let held_out = hold_out(&mut windows, apart as usize)?;
        let count = self.generated_samples as usize;
        if count == 0 {
            return Ok(Some((self.set(name, windows), held_out)));
        }
        let name = format!("{name} + {count} generated");
        let generated = generated::samples(source, &windows, count, context)?;
        windows.extend(generated);
        Ok(Some((self.set(name, windows), held_out)))
    }

    /// Makes the set; the built-in text is recorded by its hash.
    fn set(&self, name: String, windows: Vec<Vec<u32>>) -> CalibrationSet {
        let text_sha256 = self.has_default().then(default_text::sha256);
        CalibrationSet { text_sha256, ..CalibrationSet::new(name, windows) }
    }

    /// True if the built-in text is among the texts.
    fn has_default(&self) -> bool {
        self.calibration.iter().any(|text| default_text::is(&text.path))
    }

    /// True if neither a text nor token windows are given.
    pub fn is_empty(&self) -> bool {
        self.calibration.is_empty() && self.calibration_tokens.is_none()
    }

    /// Returns these options with the built-in text, if they name no other.
    pub fn or_default(&self) -> Self {
        let mut args = self.clone();
        if args.is_empty() {
            args.calibration.push(Text { path: default_text::NAME.into(), weight: 1.0 });
        }
        args
    }

    /// Takes `count` samples of all texts together, each text's in order; returns them with the names of the texts.
    fn texts(
        &self,
        source: &ModelFiles,
        split: Option<&str>,
        count: usize,
        context: &Context,
    ) -> Result<(String, Vec<Vec<u32>>)> {
        let options = TextOptions {
            split: split.map(str::to_owned),
            docs: None,
            context: self.length(source)?,
            stride: None,
            bos: Bos::Auto,
        };
        let tokenizer = load_tokenizer(source, context)?;
        let weights: Vec<f64> = self.calibration.iter().map(|text| text.weight).collect();
        let (mut names, mut windows) = (Vec::new(), Vec::new());
        // Each text provides its share of the samples.
        for (i, (text, count)) in self.calibration.iter().zip(shares(&weights, count)).enumerate() {
            windows.extend(samples(text, (i, count), source, &tokenizer, &options, context)?);
            let name = text.path.file_name().unwrap_or_default().to_string_lossy();
            let several = self.calibration.len() > 1;
            names.push(if several { format!("{name}:{}", text.weight) } else { name.into_owned() });
        }
        if windows.is_empty() {
            let allowed = "at least one sample of some text";
            return Err(BadInput::new("--samples", count.to_string(), allowed).into());
        }
        Ok((names.join(" + "), windows))
    }

    fn length(&self, source: &ModelFiles) -> Result<usize> {
        let longest = model::context_length(source)?;
        // The built-in text is short, and its kinds alternate within a window of the usual length.
        let length = if self.has_default() { default_text::WINDOW } else { LENGTH };
        match self.length {
            None => Ok(length.min(longest)),
            Some(length) if (2..=longest).contains(&length) => Ok(length),
            Some(length) => {
                let allowed = format!("2 to {longest}, the model's context");
                Err(BadInput::new("--length", length.to_string(), allowed).into())
            }
        }
    }
}

/// Removes `count` evenly spaced windows and returns them; at least one must be left.
fn hold_out(windows: &mut Vec<Vec<u32>>, count: usize) -> Result<Vec<Vec<u32>>> {
    if count > 0 && count >= windows.len() {
        let allowed = format!("fewer than the {} calibration samples", windows.len());
        return Err(BadInput::new("--hold-out", count.to_string(), allowed).into());
    }
    let places: Vec<usize> = (0..count).map(|i| i * windows.len() / count).collect();
    Ok(places.iter().rev().map(|&place| windows.remove(place)).collect())
}

/// Takes `count` samples of one text, the one with this `index`; fewer, with a warning, if it has fewer.
fn samples(
    text: &Text,
    (index, count): (usize, usize),
    source: &ModelFiles,
    tokenizer: &Tokenizer,
    options: &TextOptions,
    context: &Context,
) -> Result<Vec<Vec<u32>>> {
    let name = text.path.display().to_string();
    if default_text::is(&text.path) {
        let mut all = default_text::calibration(tokenizer, options)?;
        // As many as there are: the default of --samples is for longer texts.
        let places = evenly(all.len(), count, context.seed, index as u64);
        return Ok(places.into_iter().map(|at| std::mem::take(&mut all[at].tokens)).collect());
    }
    let chosen = |n: usize| -> Result<Vec<usize>> {
        if n < count {
            context.warn_all(&[format!("{name}: expected {count} calibration samples, got {n}")])?;
        }
        Ok(evenly(n, count, context.seed, index as u64))
    };
    if !conversations::is_of_lines(&text.path) {
        let mut all = cut(&text.path, &name, tokenizer, options, context)?;
        return Ok(chosen(all.len())?.into_iter().map(|at| std::mem::take(&mut all[at].tokens)).collect());
    }
    let lines = Lines::count(&text.path, context)?;
    if lines.count == 0 {
        return Err(blank(&name));
    }
    let (mut windows, dir) = (Vec::new(), source.dir());
    lines.each(&chosen(lines.count)?, context, |number, line| {
        let line = (number, line);
        windows.push(conversations::tokens(line, &name, dir, tokenizer, options.context, context)?);
        Ok(())
    })?;
    Ok(windows)
}

/// Tokenizes a text into windows, or into one window per document.
fn cut(
    path: &Path,
    name: &str,
    tokenizer: &Tokenizer,
    options: &TextOptions,
    context: &Context,
) -> Result<Vec<Sequence>> {
    if options.split.is_some() {
        return Ok(sequences_from_file(path, tokenizer, options, None, context.memory_left())?);
    }
    let text = whole(TextFile::open(path)?, name, tokenizer, context.memory_left())?;
    if text.trim().is_empty() {
        return Err(blank(name));
    }
    Ok(sequences_from_text(name, &text, tokenizer, options)?)
}

fn blank(name: &str) -> anyhow::Error {
    BadInput::new(name, "only white space", "a text to calibrate on").into()
}

/// Splits `count` in proportion to `weights` (all above 0): rounded down, with the rest given to the largest
/// remainders, first come first on ties.
fn shares(weights: &[f64], count: usize) -> Vec<usize> {
    let total: f64 = weights.iter().sum();
    let exact: Vec<f64> = weights.iter().map(|weight| weight / total * count as f64).collect();
    let mut shares: Vec<usize> = exact.iter().map(|part| *part as usize).collect();
    let mut order: Vec<usize> = (0..weights.len()).collect();
    order.sort_by(|a, b| exact[*b].fract().total_cmp(&exact[*a].fract()));
    let left = count.saturating_sub(shares.iter().sum());
    order.into_iter().cycle().take(left).for_each(|i| shares[i] += 1);
    shares
}

/// Returns the indices of `count` of `n` windows (or all) at equal distances. With a `seed` other than 0,
/// seed and text number choose the window within each interval; 0 takes the first.
fn evenly(n: usize, count: usize, seed: u64, text: u64) -> Vec<usize> {
    let count = count.min(n);
    let place = |i: usize| {
        let stretch = i * n / count..(i + 1) * n / count;
        match seed {
            0 => stretch.start,
            _ => stretch.start + random_u32(seed, text << 32 | i as u64) as usize % stretch.len().max(1),
        }
    };
    (0..count).map(place).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn windows_are_taken_from_the_whole_text() {
        let taken = |n, count| evenly(n, count, 0, 0);
        assert_eq!(taken(10, 4), [0, 2, 5, 7]);
        assert_eq!(taken(3, 4), [0, 1, 2]);
        assert!(taken(0, 4).is_empty());
        // A seed chooses within each interval, reproducibly.
        let seeded = |seed, text| evenly(1000, 10, seed, text);
        assert_eq!(seeded(5, 0), seeded(5, 0));
        assert!(seeded(5, 0) != seeded(6, 0) && seeded(5, 0) != seeded(5, 1));
        assert!(seeded(5, 0).iter().zip(0..).all(|(window, i)| (100 * i..100 * i + 100).contains(window)));
    }

    #[test]
    fn texts_share_the_windows_by_their_weights() {
        assert_eq!(shares(&[0.7, 0.3], 128), [90, 38]);
        assert_eq!(shares(&[1.0], 5), [5]);
        assert_eq!(shares(&[1.0, 1.0, 1.0], 128), [43, 43, 42]);
        assert_eq!(shares(&[9.0, 1.0], 3), [3, 0]);
        assert_eq!(shares(&[1e-300, 1e300], 4), [0, 4]);
    }

    #[test]
    fn a_weight_follows_the_last_colon() {
        let text = |path: &str, weight| Ok(Text { path: path.into(), weight });
        assert_eq!(weighted("a.txt"), text("a.txt", 1.0));
        assert_eq!(weighted("a.txt:0.7"), text("a.txt", 0.7));
        assert_eq!(weighted("a:b/c.txt"), text("a:b/c.txt", 1.0));
        for bad in ["a.txt:", "a.txt:0", "a.txt:-1", "a.txt:nan", "a.txt:much"] {
            assert!(weighted(bad).is_err(), "{bad}");
        }
    }
}
