//! Search for the fault of a checkpoint with garbled output.

use std::path::{Path, PathBuf};

use mantissa_advise::doctor::{Diagnosis, Fault, Verdict, against, bytes_against, examine, steps};
use mantissa_eval::{Sequence, TextOptions, sequences_from_text};
use mantissa_model::{Bos, Tokenizer, load_config};
use mantissa_quant::as_in_gguf;
use mantissa_store::convention::ModelFiles;
use serde::{Deserialize, Serialize};

use crate::embedded;
use crate::error::{BadInput, GateFailed, Result};
use crate::host::Host;
use crate::job::{Job, JobOutput};
use crate::loaded::ModelUse;
use crate::measured_text::MeasuredText;
use crate::model::{BASE, ModelPath, context_length, open, open_quietly};
use crate::progress::Unit;

/// Tokens per window of the built-in text, and number of windows.
const WINDOW: usize = 128;
const WINDOWS: usize = 8;

/// Tries known disagreements between writers and readers of checkpoints on a model.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Doctor {
    /// Model folder or .gguf file.
    pub model: ModelPath,
    /// Source model to compare with.
    pub reference: Option<ModelPath>,
    /// Text that judges alternatives; without one the built-in texts do.
    pub text: MeasuredText,
}

/// Result of the search.
#[derive(Clone, Debug, Serialize)]
pub struct DoctorReport {
    /// Model.
    pub model: PathBuf,
    /// Checkpoint format.
    pub convention: &'static str,
    /// Conclusion.
    pub verdict: Verdict,
    /// Measurements, and the fault if one is found.
    #[serde(flatten)]
    pub diagnosis: Diagnosis,
}

impl DoctorReport {
    /// Fails if a fault is found.
    ///
    /// # Errors
    /// [`GateFailed`] with the fault and its fix.
    pub fn require_sound(&self) -> Result<(), GateFailed> {
        let Some(Fault { tensor, alternative, cause, fix, .. }) = &self.diagnosis.fault else {
            return Ok(());
        };
        let repaired = alternative.map_or(String::new(), |name| format!(" (repaired by: {name})"));
        Err(GateFailed::new(format!("{tensor}: {cause}{repaired}; fix: {fix}")))
    }
}

impl Doctor {
    /// Returns the windows to judge by.
    fn windows(&self, given: Option<Vec<Sequence>>, host: &Host) -> Result<Vec<Sequence>> {
        given.map_or_else(|| host.reading_texts(|| built_in(&self.model, host)), Ok)
    }

    /// Opens the source as the rows of `files` are stored.
    fn source(&self, files: &ModelFiles) -> Result<Option<ModelFiles>> {
        let Some(path) = &self.reference else { return Ok(None) };
        let reference = open_quietly(path)?;
        Ok(Some(if files.gguf().is_some() { as_in_gguf(reference)? } else { reference }))
    }
}

/// Predicts the memory of a comparison with the source, in bytes.
fn needs_against(files: &ModelFiles, source: &ModelFiles, host: &Host) -> Result<u64> {
    Ok(BASE.saturating_add(bytes_against(files, source, host.threads)?))
}

/// Predicts the memory of the trials on `windows`, in bytes, and names the models: the unchanged one, and one altered
/// reading of it.
fn needs_alone(files: &ModelFiles, windows: &[Sequence], host: &Host) -> Result<(String, u64)> {
    let (what, needs) = ModelUse::evaluation(windows, host.threads).needed(&[files, files])?;
    Ok((what, needs.saturating_add(needs / 100 * 15)))
}

impl Job for Doctor {
    const NAME: &'static str = "doctor";
    const VERSION: u32 = 1;
    type Report = DoctorReport;

    fn inputs(&self) -> Vec<PathBuf> {
        let reference = self.reference.iter().flat_map(ModelPath::inputs);
        self.model.inputs().into_iter().chain(self.text.inputs()).chain(reference).collect()
    }

    fn outputs(&self) -> Vec<JobOutput> {
        Vec::new()
    }

    fn memory(&self, host: &Host) -> Result<u64> {
        let files = open_quietly(&self.model)?;
        match self.source(&files)? {
            Some(source) => needs_against(&files, &source, host),
            None => {
                let given = self.text.sequences(&self.model, false, host)?;
                Ok(needs_alone(&files, &self.windows(given, host)?, host)?.1)
            }
        }
    }

    /// Searches for the fault. That there is one is left to [`DoctorReport::require_sound`].
    ///
    /// # Errors
    /// Unreadable files or a model that cannot run.
    fn run(&self, host: &Host) -> Result<DoctorReport> {
        let files = open(&self.model, host)?;
        let given = self.text.sequences(&self.model, false, host)?;
        let config = load_config(&files)?;
        let total = if self.reference.is_some() { config.num_hidden_layers } else { steps(&config) };
        let progress = host.progress(total as u64, Unit::Items("steps"));
        let told = |done: usize| progress.set(done as u64);
        let diagnosis = match self.source(&files)? {
            Some(source) => {
                host.require_memory("doctor", needs_against(&files, &source, host)?)?;
                against(&files, &source, &given.unwrap_or_default(), host.threads, &told)?
            }
            None => {
                let windows = self.windows(given, host)?;
                let (what, needs) = needs_alone(&files, &windows, host)?;
                host.require_memory(&what, needs)?;
                examine(&files, &windows, host.threads, &told)?
            }
        };
        progress.finish();
        Ok(DoctorReport {
            model: self.model.shown().to_owned(),
            convention: files.convention_name(),
            verdict: diagnosis.verdict(),
            diagnosis,
        })
    }
}

/// Tokenizes the held-out texts of the embedded model for `model`.
///
/// # Errors
/// No tokenizer, or not enough memory.
pub(crate) fn built_in(model: &Path, host: &Host) -> Result<Vec<Sequence>> {
    let files = open_quietly(model)?;
    let longest = embedded::DOMAINS.iter().map(|domain| domain.held_out.len()).max().unwrap_or(0) as u64;
    let needs = Tokenizer::bytes_to_load(files.dir()).saturating_add(longest * Tokenizer::ENCODING);
    host.require_more_memory("doctor: tokenizer and built-in text", needs)?;
    let tokenizer = Tokenizer::load(files.dir()).map_err(|error| {
        let found = format!("no tokenizer for the built-in text ({error})");
        let allowed = "a tokenizer, --tokens FILE.json, or --reference SOURCE";
        BadInput::new(model.display().to_string(), found, allowed)
    })?;
    let window = WINDOW.min(context_length(&files)?);
    let options = TextOptions { split: None, docs: None, context: window, stride: None, bos: Bos::Auto };
    let mut all = Vec::new();
    for text in embedded::DOMAINS.iter().map(|domain| domain.held_out) {
        let text = text.split(embedded::SEPARATOR).next().unwrap_or(text);
        all.extend(sequences_from_text("built-in text", text, &tokenizer, &options)?);
    }
    all.truncate(WINDOWS);
    Ok(all)
}
