//! Recalibration: recomputes stored scales of a quantized model on another text.

use std::ops::ControlFlow;
use std::path::PathBuf;

use mantissa_model::{KvPolicy, ModelConfig, Tokenizer, load_config};
use mantissa_quant::calibrate::{Calibration as HeldCalibration, CalibrationSet, Limits};
use mantissa_quant::input_scales::{OBSERVERS, Observer, Percentile};
use mantissa_quant::memory::level_bytes;
use mantissa_quant::{QuantError, Recalibration};
use mantissa_store::Kind;
use mantissa_store::convention::ModelFiles;
use serde::{Deserialize, Serialize};

use crate::adapt;
use crate::calibration::Calibration;
use crate::error::{BadInput, Result};
use crate::host::Host;
use crate::job::{Job, JobOutput};
use crate::measured_text::MeasuredText;
use crate::model::{self, ModelPath};
use crate::progress::Unit;

/// Parses an observer: a name, or a percentile such as `percentile-99.9`.
///
/// # Errors
/// A message with the accepted values.
pub fn parse_observer(text: &str) -> Result<Observer, String> {
    let named = OBSERVERS.iter().find(|(name, _)| *name == text).map(|(_, observer)| *observer);
    let given = || {
        let percent = text.strip_prefix("percentile-")?.parse().ok()?;
        Percentile::of_percent(percent).map(Observer::Percentile)
    };
    named.or_else(given).ok_or_else(|| {
        let names: Vec<_> = OBSERVERS.iter().map(|(name, _)| *name).collect();
        format!("expected {}, percentile-P with P from 50 to 100, got \"{text}\"", names.join(", "))
    })
}

/// Recomputes the static scales of inputs and of the KV cache; weights keep their bytes.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Recalibrate {
    /// Quantized model.
    pub source: ModelPath,
    /// Samples of texts.
    pub calibration: Calibration,
    /// Text of which all windows are used instead.
    pub text: MeasuredText,
    /// Observer of static scales, as [`parse_observer`] takes it.
    pub observer: String,
    /// Policy whose KV cache levels are stored.
    pub kv: Option<String>,
    /// Output folder.
    pub out: PathBuf,
    /// Seed of all random numbers.
    pub seed: u64,
}

/// Result of a recalibration.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RecalibrateReport {
    /// Number of activation scales.
    pub input_scales: usize,
    /// Number of KV cache scales.
    pub cache_scales: usize,
    /// True if KV cache levels were learned.
    pub cache_levels: bool,
    /// Number of windows of the text.
    pub windows: usize,
    /// Number of tokens of the text.
    pub tokens: usize,
}

/// Opened model with the windows to run.
struct Opened {
    source: ModelFiles,
    config: ModelConfig,
    set: CalibrationSet,
}

impl Opened {
    /// Predicts the peak memory in bytes.
    fn needs(&self, limits: Limits) -> u64 {
        let others = level_bytes(&self.config, &self.set)
            .saturating_add(self.source.checkpoint().total_bytes())
            .saturating_add(model::BASE);
        let reading = model::BASE.saturating_add(Tokenizer::bytes_to_load(self.source.dir()));
        HeldCalibration::held_bytes(&self.config, &self.set, limits).saturating_add(others).max(reading)
    }
}

impl Recalibrate {
    /// Opens the model and tokenizes the text: samples of the calibration, or all windows of the text.
    fn open(&self, host: &Host) -> Result<Opened> {
        let source = model::open(&self.source, host)?;
        let config = load_config(&source)?;
        let samples = self.calibration.load(&source, self.text.split.as_deref(), self.seed, host)?;
        let windows = self.text.sequences(&self.source, self.calibration.is_text(), host)?;
        let set = match (samples, windows) {
            (Some(samples), None) => samples,
            (None, Some(windows)) => {
                let windows = windows.into_iter().map(|sequence| sequence.tokens).collect();
                CalibrationSet::new(self.text.name(), windows)
            }
            (given, _) => {
                let found = if given.is_some() { "--text or --tokens as well" } else { "neither" };
                let allowed =
                    "--calibration or --calibration-tokens (--calibration default is the built-in text)";
                return Err(BadInput::new("recalibrate", found, allowed).into());
            }
        };
        Ok(Opened { source, config, set })
    }

    /// Returns observer and policy.
    fn how(&self) -> Result<(Observer, Option<KvPolicy>)> {
        let fault = |option: &str, found: &str, error: String| BadInput::new(option, found, error);
        let observer =
            parse_observer(&self.observer).map_err(|error| fault("--observer", &self.observer, error))?;
        let policy = |text: &String| {
            text.parse().map_err(|error: mantissa_model::KvParseError| fault("--kv", text, error.to_string()))
        };
        Ok((observer, self.kv.as_ref().map(policy).transpose()?))
    }
}

impl Job for Recalibrate {
    const NAME: &'static str = "recalibrate";
    const VERSION: u32 = 1;
    type Report = RecalibrateReport;

    fn inputs(&self) -> Vec<PathBuf> {
        let texts = self.calibration.inputs().into_iter().chain(self.text.inputs());
        self.source.inputs().into_iter().chain(texts).collect()
    }

    fn outputs(&self) -> Vec<JobOutput> {
        vec![JobOutput { option: "--out", path: self.out.clone(), kind: Kind::Folder }]
    }

    fn memory(&self, host: &Host) -> Result<u64> {
        Ok(self.open(host)?.needs(Limits::from(host.threads)))
    }

    /// # Errors
    /// A model or text that cannot be used; I/O; a stop.
    fn run(&self, host: &Host) -> Result<RecalibrateReport> {
        let (observer, kv) = self.how()?;
        let opened = self.open(host)?;
        let limits = adapt::fit_calibration("recalibrate", host, |limits| opened.needs(limits))?;
        let Opened { source, config, set } = &opened;
        let progress = host.progress(0, Unit::Items("steps"));
        let mut done = 0;
        let tick = &mut || {
            done += 1;
            progress.set(done);
            if host.stops() { ControlFlow::Break(()) } else { ControlFlow::Continue(()) }
        };
        let how = (observer, kv.as_ref());
        let found = host.orderly(
            || Recalibration::collect(source, config, set, how, limits, tick),
            QuantError::is_interruption,
        );
        progress.finish();
        let found = found?;
        found.write(source, set, &host.output(&self.out)?)?;
        let (cache_levels, input_scales, cache_scales) = (found.has_levels(), found.inputs, found.cache);
        let (windows, tokens) = (set.windows.len(), set.tokens());
        Ok(RecalibrateReport { input_scales, cache_scales, cache_levels, windows, tokens })
    }
}
