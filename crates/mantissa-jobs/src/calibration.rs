//! Calibration samples of a job: from texts, token windows, or the model itself.

use std::path::{Path, PathBuf};

use mantissa_eval::{
    Sequence, TextOptions, sequences_from_file, sequences_from_text, token_path, token_windows, whole,
};
use mantissa_model::{Bos, Tokenizer};
use mantissa_num::round::random_u32;
use mantissa_quant::calibrate::CalibrationSet;
use mantissa_store::TextFile;
use mantissa_store::convention::ModelFiles;
use serde::{Deserialize, Serialize};

use crate::conversations::{self, Lines};
use crate::default_text;
use crate::error::{BadInput, JobError, Result};
use crate::generated;
use crate::host::Host;
use crate::measured_text::{check_tokens, unused};
use crate::model::{self, load_tokenizer};

/// Calibration of a job: texts or token windows, how many samples of them, and samples that the model generates.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Calibration {
    /// Texts with their shares of the samples.
    pub texts: Vec<WeightedText>,
    /// Token windows, `FILE.json` or `FILE.json:KEY`, instead of texts.
    pub tokens: Option<String>,
    /// Number of samples; `None` is the default.
    pub samples: Option<u32>,
    /// Maximum sample length in tokens; `None` is the default.
    pub length: Option<usize>,
    /// Number of samples that the unquantized model generates in addition.
    pub generated: u32,
}

/// Calibration text with its share of the samples.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct WeightedText {
    /// File, or [`default_text::NAME`].
    pub path: PathBuf,
    /// Weight, above 0.
    pub weight: f64,
}

impl WeightedText {
    /// Makes a text of weight 1.
    pub fn new(path: impl Into<PathBuf>) -> Self {
        WeightedText { path: path.into(), weight: 1.0 }
    }

    /// Parses `TEXT[:WEIGHT]`.
    ///
    /// # Errors
    /// A message for a weight that is not above 0.
    pub fn parse(text: &str) -> std::result::Result<Self, String> {
        // A colon may be part of a file name.
        let Some((path, weight)) = text.rsplit_once(':').filter(|_| !Path::new(text).exists()) else {
            return Ok(WeightedText::new(text));
        };
        match weight.parse::<f64>() {
            Ok(weight) if weight.is_finite() && weight > 0.0 => {
                Ok(WeightedText { path: path.into(), weight })
            }
            _ if weight.contains('/') => Ok(WeightedText::new(text)),
            _ => Err(format!("expected a weight above 0, such as 0.7, got \"{weight}\"")),
        }
    }
}

/// Default sample length in tokens.
const LENGTH: usize = 2048;

/// Default number of samples.
const SAMPLES: u32 = 128;

impl Calibration {
    /// Returns the files that are read.
    pub fn inputs(&self) -> Vec<PathBuf> {
        let texts = self.texts.iter().map(|text| &text.path).filter(|path| !default_text::is(path));
        texts.cloned().chain(self.tokens.iter().map(|argument| token_path(argument).into())).collect()
    }

    /// True if there is a text to tokenize.
    pub fn is_text(&self) -> bool {
        !self.texts.is_empty()
    }

    /// Loads the calibration samples, if any. Text is split into documents at `split`.
    ///
    /// # Errors
    /// An unreadable file, or one without samples.
    pub fn load(
        &self,
        source: &ModelFiles,
        split: Option<&str>,
        seed: u64,
        host: &Host,
    ) -> Result<Option<CalibrationSet>> {
        Ok(self.load_apart(source, split, (0, seed), host)?.map(|(set, _)| set))
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
        (apart, seed): (u32, u64),
        host: &Host,
    ) -> Result<Option<(CalibrationSet, Vec<Vec<u32>>)>> {
        let read = || self.read(source, split, (apart, seed), host);
        if self.is_empty() { read() } else { host.reading_texts(read) }
    }

    fn read(
        &self,
        source: &ModelFiles,
        split: Option<&str>,
        (apart, seed): (u32, u64),
        host: &Host,
    ) -> Result<Option<(CalibrationSet, Vec<Vec<u32>>)>> {
        let (name, mut windows) = if let Some(argument) = &self.tokens {
            let given = [("--samples", self.samples.is_some()), ("--length", self.length.is_some())];
            host.warn_all(&unused("the windows of --calibration-tokens", &given))?;
            let windows = token_windows(argument, host.memory_left())?;
            check_tokens(argument, source, &windows)?;
            let windows: Vec<_> = windows.into_iter().map(|s| s.tokens).collect();
            let name = Path::new(argument).file_name();
            (name.map_or_else(String::new, |n| n.to_string_lossy().into()), windows)
        } else if self.is_text() {
            let count = self.samples.unwrap_or(SAMPLES) as usize + apart as usize;
            self.cut_texts(source, split, (count, seed), host)?
        } else if self.generated > 0 {
            let allowed = "--calibration or --calibration-tokens with it";
            return Err(BadInput::new("--generated-samples", "neither", allowed).into());
        } else {
            return Ok(None);
        };
        let held_out = hold_out(&mut windows, apart as usize)?;
        let count = self.generated as usize;
        if count == 0 {
            return Ok(Some((self.set(name, windows), held_out)));
        }
        let name = format!("{name} + {count} generated");
        let generated = generated::samples(source, &windows, count, seed, host)?;
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
        self.texts.iter().any(|text| default_text::is(&text.path))
    }

    /// True if neither a text nor token windows are given.
    pub fn is_empty(&self) -> bool {
        self.texts.is_empty() && self.tokens.is_none()
    }

    /// Returns these options with other names of the files; the built-in text keeps its name.
    ///
    /// # Errors
    /// As `name`.
    pub fn map_files<E>(mut self, mut name: impl FnMut(&str) -> Result<String, E>) -> Result<Self, E> {
        for text in self.texts.iter_mut().filter(|text| !default_text::is(&text.path)) {
            text.path = name(&text.path.to_string_lossy())?.into();
        }
        if let Some(tokens) = &mut self.tokens {
            *tokens = name(tokens)?;
        }
        Ok(self)
    }

    /// Returns these options with the built-in text, if they name no other.
    pub fn or_default(&self) -> Self {
        let mut args = self.clone();
        if args.is_empty() {
            args.texts.push(WeightedText::new(default_text::NAME));
        }
        args
    }

    /// Takes `count` samples of all texts together, each text's in order; returns them with the names of the texts.
    fn cut_texts(
        &self,
        source: &ModelFiles,
        split: Option<&str>,
        (count, seed): (usize, u64),
        host: &Host,
    ) -> Result<(String, Vec<Vec<u32>>)> {
        let options = TextOptions {
            split: split.map(str::to_owned),
            docs: None,
            context: self.length(source)?,
            stride: None,
            bos: Bos::Auto,
        };
        let tokenizer = load_tokenizer(source, host)?;
        let weights: Vec<f64> = self.texts.iter().map(|text| text.weight).collect();
        let (mut names, mut windows) = (Vec::new(), Vec::new());
        // Each text provides its share of the samples.
        for (i, (text, count)) in self.texts.iter().zip(shares(&weights, count)).enumerate() {
            windows.extend(samples(text, (i, count, seed), source, &tokenizer, &options, host)?);
            let name = text.path.file_name().unwrap_or_default().to_string_lossy();
            let several = self.texts.len() > 1;
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
    text: &WeightedText,
    (index, count, seed): (usize, usize, u64),
    source: &ModelFiles,
    tokenizer: &Tokenizer,
    options: &TextOptions,
    host: &Host,
) -> Result<Vec<Vec<u32>>> {
    let name = text.path.display().to_string();
    if default_text::is(&text.path) {
        let mut all = default_text::calibration(tokenizer, options)?;
        // As many as there are: the default of --samples is for longer texts.
        let places = evenly(all.len(), count, seed, index as u64);
        return Ok(places.into_iter().map(|at| std::mem::take(&mut all[at].tokens)).collect());
    }
    let chosen = |n: usize| -> Result<Vec<usize>> {
        if n < count {
            host.warn_all(&[format!("{name}: expected {count} calibration samples, got {n}")])?;
        }
        Ok(evenly(n, count, seed, index as u64))
    };
    if !conversations::is_of_lines(&text.path) {
        let mut all = cut(&text.path, &name, tokenizer, options, host)?;
        return Ok(chosen(all.len())?.into_iter().map(|at| std::mem::take(&mut all[at].tokens)).collect());
    }
    let lines = Lines::count(&text.path, host)?;
    if lines.count == 0 {
        return Err(blank(&name));
    }
    let (mut windows, dir) = (Vec::new(), source.dir());
    lines.each(&chosen(lines.count)?, host, |number, line| {
        let line = (number, line);
        windows.push(conversations::tokens(line, &name, dir, tokenizer, options.context, host)?);
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
    host: &Host,
) -> Result<Vec<Sequence>> {
    if options.split.is_some() {
        return Ok(sequences_from_file(path, tokenizer, options, None, host.memory_left())?);
    }
    let text = whole(TextFile::open(path)?, name, tokenizer, host.memory_left())?;
    if text.trim().is_empty() {
        return Err(blank(name));
    }
    Ok(sequences_from_text(name, &text, tokenizer, options)?)
}

fn blank(name: &str) -> JobError {
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
        let text = |path: &str, weight| Ok(WeightedText { path: path.into(), weight });
        let weighted = WeightedText::parse;
        assert_eq!(weighted("a.txt"), text("a.txt", 1.0));
        assert_eq!(weighted("a.txt:0.7"), text("a.txt", 0.7));
        assert_eq!(weighted("a:b/c.txt"), text("a:b/c.txt", 1.0));
        for bad in ["a.txt:", "a.txt:0", "a.txt:-1", "a.txt:nan", "a.txt:much"] {
            assert!(weighted(bad).is_err(), "{bad}");
        }
    }
}
