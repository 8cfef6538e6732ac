//! Importance matrix: the mean square of every input column of a model's weights on a text.

use std::ops::ControlFlow;
use std::path::PathBuf;

use mantissa_model::{ModelConfig, load_config};
use mantissa_quant::calibrate::{CalibrationSet, Limits};
use mantissa_quant::{Importance, QuantError};
use mantissa_store::Kind;
use mantissa_store::convention::ModelFiles;
use serde::{Deserialize, Serialize};

use crate::adapt;
use crate::calibration::Calibration;
use crate::error::{BadInput, Result};
use crate::host::Host;
use crate::job::{Job, JobOutput};
use crate::model::{self, ModelPath};
use crate::progress::Unit;

/// Calibration that the job needs.
const NEEDED: &str = "--calibration or --calibration-tokens (--calibration default is the built-in text)";

/// Computes an importance matrix and writes it in llama.cpp's encoding.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Imatrix {
    /// Model.
    pub source: ModelPath,
    /// Text to compute it on.
    pub calibration: Calibration,
    /// Separator of documents in the text.
    pub split: Option<String>,
    /// File to write.
    pub out: PathBuf,
    /// Seed of all random numbers.
    pub seed: u64,
}

/// Result of computing an importance matrix.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ImatrixReport {
    /// Name of the text.
    pub text: String,
    /// Number of weights with an importance.
    pub weights: usize,
    /// Number of windows of the text.
    pub windows: usize,
    /// Number of tokens of the text.
    pub tokens: usize,
}

impl Imatrix {
    /// Opens the model and tokenizes the text.
    fn open(&self, host: &Host) -> Result<(ModelFiles, ModelConfig, CalibrationSet)> {
        let source = model::open(&self.source, host)?;
        let config = load_config(&source)?;
        let set = self.calibration.load(&source, self.split.as_deref(), self.seed, host)?;
        let set = set.ok_or_else(|| BadInput::new("imatrix", "neither", NEEDED))?;
        Ok((source, config, set))
    }
}

/// Predicts the peak memory in bytes.
fn needs(config: &ModelConfig, set: &CalibrationSet, limits: Limits) -> u64 {
    model::BASE.saturating_add(Importance::bytes_needed(config, set, limits))
}

impl Job for Imatrix {
    const NAME: &'static str = "imatrix";
    const VERSION: u32 = 1;
    type Report = ImatrixReport;

    fn inputs(&self) -> Vec<PathBuf> {
        self.source.inputs().into_iter().chain(self.calibration.inputs()).collect()
    }

    fn outputs(&self) -> Vec<JobOutput> {
        vec![JobOutput { option: "--out", path: self.out.clone(), kind: Kind::File }]
    }

    fn memory(&self, host: &Host) -> Result<u64> {
        let (_, config, set) = self.open(host)?;
        Ok(needs(&config, &set, Limits::from(host.threads)))
    }

    /// # Errors
    /// A model or text that cannot be used; I/O; a stop.
    fn run(&self, host: &Host) -> Result<ImatrixReport> {
        let (source, config, set) = self.open(host)?;
        let limits = adapt::fit_calibration("imatrix", host, |limits| needs(&config, &set, limits))?;
        let progress = host.progress(config.num_hidden_layers as u64, Unit::Items("layers"));
        let tick = &mut |layer: usize| {
            progress.set(layer as u64);
            if host.stops() { ControlFlow::Break(()) } else { ControlFlow::Continue(()) }
        };
        let found = host.orderly(
            || Importance::collect(&source, &config, &set, limits, tick),
            QuantError::is_interruption,
        );
        progress.finish();
        let found = found?;
        found.write(&host.output(&self.out)?)?;
        let (weights, windows, tokens) = (found.entries.len(), set.windows.len(), set.tokens());
        Ok(ImatrixReport { text: found.name, weights, windows, tokens })
    }
}
