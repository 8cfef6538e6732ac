//! Diagnosis of a model on a text: what quantization will break or has broken, and the remedies.

use std::path::{Path, PathBuf};

use mantissa_advise::diagnose::{Names, Report, Request, diagnose, steps};
use mantissa_eval::Sequence;
use mantissa_model::{KvPolicy, Tokenizer, load_config};
use mantissa_quant::Quality;
use mantissa_store::convention::ModelFiles;
use serde::{Deserialize, Serialize};

use crate::calibration::Calibration;
use crate::default_text;
use crate::doctor::built_in;
use crate::error::{GateFailed, Result};
use crate::escape::quoted;
use crate::host::Host;
use crate::job::{Job, JobOutput};
use crate::loaded::ModelUse;
use crate::measured_text::MeasuredText;
use crate::model::{ModelPath, open, open_quietly};
use crate::names::AsText;
use crate::progress::Unit;
use crate::tasks::retrieval;

/// Examines a model on a text.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Diagnose {
    /// Model folder or .gguf file.
    pub model: ModelPath,
    /// Source model to compare with.
    pub reference: Option<ModelPath>,
    /// Text to examine on; without one the built-in texts.
    pub text: MeasuredText,
    /// Calibration whose ranges are tried on the text.
    pub calibration: Calibration,
    /// Policies of the KV cache to try.
    pub kv: Vec<AsText<KvPolicy>>,
    /// Bound of the KL from the reference, beyond which its cause is sought, nats/token.
    pub max_kl: Option<f64>,
    /// Seed of all random numbers.
    pub seed: u64,
}

/// Result of a diagnosis.
#[derive(Clone, Debug, Serialize)]
pub struct DiagnoseReport {
    /// Model as named.
    pub model: PathBuf,
    /// Checkpoint format.
    pub convention: &'static str,
    /// Findings and measurements.
    #[serde(flatten)]
    pub report: Report,
}

impl DiagnoseReport {
    /// Fails if something is found.
    ///
    /// # Errors
    /// [`GateFailed`] with the first finding.
    pub fn require_nothing(&self) -> Result<(), GateFailed> {
        let findings = &self.report.findings;
        let Some(first) = findings.first() else { return Ok(()) };
        let more = match findings.len() {
            1 => String::new(),
            n => format!(" ({} more)", n - 1),
        };
        let (place, found) = (&first.place, &first.found);
        Err(GateFailed::new(format!("{}: {place}: {found}{more}; fix: {}", first.examination, first.command)))
    }
}

/// Opened models and texts.
struct Subject {
    files: ModelFiles,
    reference: Option<ModelFiles>,
    windows: Vec<Sequence>,
    calibration: Option<Vec<Sequence>>,
}

impl Subject {
    /// Predicts the memory in bytes, and names the models.
    fn needs(&self, host: &Host) -> Result<(String, u64)> {
        let models: Vec<&ModelFiles> = std::iter::once(&self.files).chain(&self.reference).collect();
        let (what, needs) = ModelUse::evaluation(&self.windows, host.threads).needed(&models)?;
        Ok((what, needs.saturating_add(needs / 100 * 25)))
    }
}

impl Diagnose {
    fn subject(&self, host: &Host) -> Result<Subject> {
        let files = open(&self.model, host)?;
        let reference = self.reference.as_ref().map(|path| open_quietly(path)).transpose()?;
        let windows = match self.text.sequences(&self.model, self.calibration.is_text(), host)? {
            Some(windows) => windows,
            None => host.reading_texts(|| built_in(&self.model, host))?,
        };
        let split = self.text.split.as_deref();
        let calibration = self.calibration.load(&files, split, self.seed, host)?;
        let window = |tokens| Sequence { tokens, from: 1 };
        let calibration = calibration.map(|set| set.windows.into_iter().map(window).collect());
        Ok(Subject { files, reference, windows, calibration })
    }

    /// Returns the names of the model and its texts in commands.
    fn names(&self, files: &ModelFiles) -> Names {
        let typed = quoted(self.model.typed());
        let stem = self.model.typed().display().to_string();
        let stem = stem.trim_end_matches('/').trim_end_matches(".gguf").to_owned();
        let source = match &self.reference {
            Some(source) => quoted(source.typed()),
            None if files.config().is_some_and(|config| config.get("quantization_config").is_some()) => {
                "SOURCE".to_owned()
            }
            None => typed.clone(),
        };
        let (text, calibrate) = self.text.options().unwrap_or_else(|| {
            let default = default_text::NAME;
            (format!("--text {default}"), format!("--calibration {default}"))
        });
        let quality = Quality::read(files.dir()).ok().flatten();
        let weights =
            quality.as_ref().map_or_else(|| "int8-channel".to_owned(), |quality| quality.weights.clone());
        let again = self.reference.is_some().then(|| {
            let recipe = quality.as_ref().map_or("bf16", |quality| quality.recipe.as_str());
            let calibration = match quality.as_ref().and_then(|quality| quality.calibration.as_ref()) {
                Some(_) => format!(" {calibrate}"),
                None => String::new(),
            };
            let out = quoted(Path::new(&format!("{stem}-again")));
            format!("mantissa quantize {source} --recipe {recipe}{calibration} --out {out}")
        });
        Names { model: typed, stem: quoted(Path::new(&stem)), source, text, calibrate, weights, again }
    }
}

impl Job for Diagnose {
    const NAME: &'static str = "diagnose";
    const VERSION: u32 = 1;
    type Report = DiagnoseReport;

    fn inputs(&self) -> Vec<PathBuf> {
        let mut all = self.model.inputs();
        all.extend(self.text.inputs());
        all.extend(self.calibration.inputs());
        all.extend(self.reference.iter().flat_map(ModelPath::inputs));
        all
    }

    fn outputs(&self) -> Vec<JobOutput> {
        Vec::new()
    }

    fn memory(&self, host: &Host) -> Result<u64> {
        Ok(self.subject(host)?.needs(host)?.1)
    }

    /// Examines the model. That something is found is left to [`DiagnoseReport::require_nothing`].
    ///
    /// # Errors
    /// Unreadable files or a model that cannot run.
    fn run(&self, host: &Host) -> Result<DiagnoseReport> {
        let subject = self.subject(host)?;
        let (what, needs) = subject.needs(host)?;
        host.require_memory(&what, needs)?;
        let Subject { files, reference, windows, calibration } = &subject;
        let tokenizer = Tokenizer::load(files.dir()).ok();
        let retrieval = if self.kv.is_empty() { Vec::new() } else { retrieval()? };
        let kv: Vec<KvPolicy> = self.kv.iter().map(|policy| policy.0.clone()).collect();
        let request = Request {
            files,
            windows,
            calibration: calibration.as_deref(),
            reference: reference.as_ref(),
            tokenizer: tokenizer.as_ref(),
            kv: &kv,
            retrieval: &retrieval,
            max_kl: self.max_kl,
            names: self.names(files),
            threads: host.threads,
        };
        let total = steps(&load_config(files)?, calibration.is_some());
        let progress = host.progress(total as u64, Unit::Items("steps"));
        let report = diagnose(&request, &|done| progress.set(done as u64))?;
        progress.finish();
        let convention = files.convention_name();
        Ok(DiagnoseReport { model: self.model.named().to_owned(), convention, report })
    }
}
