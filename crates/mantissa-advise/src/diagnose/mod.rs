//! Diagnosis of a model before and after quantization: examinations that measure it on a text, each with findings that
//! have a place, figures, a remedy and the command that applies it.
//!
//! [`EXAMINATIONS`] is the registry, one file for each. Examinations of one pass read the `activations` of every
//! input of a linear layer, of the states between layers and of keys and values; others run the model again. A sound
//! model must have no finding: thresholds are constants with their reason, and a test runs them over all test models.

mod activations;
mod cache_schemes;
mod compared;
mod examination;
mod experts;
mod finding;
mod harm;
mod head;
mod ladder;
mod measurements;
mod outliers;
mod overflow;
mod parts;
mod precision;
mod ranges;
mod readings;
mod request;
mod rope;
mod sensitivity;
mod spikes;
mod trials;

use mantissa_eval::{Sequence, check_sequences};
use mantissa_model::{ModelConfig, WeightSource, load_config};
use serde::Serialize;

pub use self::activations::{ActivationStats, CacheStats, InputStats, LayerStats, Peak};
pub use self::compared::{AtContext, AtPosition, Compared};
pub use self::examination::{Examination, Examined};
pub use self::finding::{Finding, Location, TokenAt};
pub use self::measurements::{Ablation, Alone, CacheScheme, Step};
pub use self::request::{Names, Request};
use self::trials::Trials;
use crate::doctor::check_same_shape;
use crate::doctor::score::Score;
use crate::error::Result;

/// Most tokens that an examination runs, and most tokens of a window: figures change little beyond, and a pass stays
/// within seconds on small models.
pub const TOKENS: usize = 2048;
const WINDOW: usize = 512;

/// Every examination, in the order of the report.
pub const EXAMINATIONS: [&dyn Examination; 15] = [
    &overflow::Overflow,
    &outliers::Outliers,
    &spikes::Spikes,
    &ranges::Inputs,
    &ranges::Calibration,
    &ranges::Cache,
    &experts::Unseen,
    &readings::Readings,
    &rope::Base,
    &parts::Damaged,
    &head::Head,
    &sensitivity::Sensitivity,
    &precision::Residual,
    &cache_schemes::Schemes,
    &ladder::Ladder,
];

/// Examination that ran.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Ran {
    /// Name of the examination.
    pub name: &'static str,
    /// Question that it answers.
    pub question: &'static str,
    /// Number of findings.
    pub findings: usize,
}

/// Examination that could not run.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Skipped {
    /// Name of the examination.
    pub name: &'static str,
    /// Missing input.
    pub lacks: &'static str,
}

/// Result of all examinations.
#[derive(Clone, Debug, Default, Serialize)]
pub struct Report {
    /// Tokens of the text that ran.
    pub tokens: usize,
    /// Windows of the text that ran; one has no standard error.
    pub windows: usize,
    /// NLL of the model on the first tokens, nats/token; absent if it is not finite.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub nll: Option<f64>,
    /// NLL of the frequencies of the same tokens, nats/token.
    pub nll_of_frequencies: f64,
    /// Findings.
    pub findings: Vec<Finding>,
    /// Examinations that ran.
    pub examined: Vec<Ran>,
    /// Examinations that could not run.
    pub skipped: Vec<Skipped>,
    /// The model beside its source.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub compared: Option<Compared>,
    /// Parts of layers alone, against the source.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub alone: Vec<Alone>,
    /// Residual stream, norms and softmax weights in other precisions.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub ablations: Vec<Ablation>,
    /// Schemes of the cache that were tried.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub cache_schemes: Vec<CacheScheme>,
    /// Relaxation of the model under a bound.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub ladder: Vec<Step>,
    /// Observations of the pass over the text.
    pub layers: Vec<LayerStats>,
}

impl Report {
    /// True if the model predicts the text worse than the frequencies of its tokens do.
    pub fn knows_nothing(&self) -> bool {
        self.nll.is_none_or(|nll| nll > self.nll_of_frequencies)
    }
}

/// Runs every examination that can run. `progress` receives the number of finished [`steps`].
///
/// # Errors
/// A model that cannot be loaded or cannot run the text.
pub fn diagnose(request: &Request<'_>, progress: &dyn Fn(usize)) -> Result<Report> {
    let config = load_config(request.files)?;
    let windows = first_tokens(request.windows, &config);
    check_sequences(&config, &windows)?;
    let layers = config.num_hidden_layers;
    let seen = activations::collect(request, &config, &windows, None, progress)?;
    let calibration = match request.calibration {
        None => None,
        Some(given) => {
            let windows = first_tokens(given, &config);
            check_sequences(&config, &windows)?;
            Some(activations::collect(request, &config, &windows, None, &|done| progress(layers + done))?)
        }
    };
    let passes = 1 + usize::from(calibration.is_some());
    let trials = Trials::begin(request.files, &config, &windows, request.threads)?;
    let mut examined = Examined {
        request,
        config,
        windows,
        seen,
        calibration,
        trials,
        compared: None,
        alone: Vec::new(),
        ablations: Vec::new(),
        cache_schemes: Vec::new(),
        ladder: Vec::new(),
    };
    examined.beside_source()?;
    examined.ablations = precision::ablations(&examined)?;
    examined.cache_schemes = cache_schemes::schemes(&examined)?;
    if let Some(calibrated) = &examined.calibration {
        // Errors under the ranges of another text need these ranges while the inputs are held.
        let again =
            activations::collect(request, &examined.config, &examined.windows, Some(calibrated), &|_| {})?;
        examined.seen = again;
    }
    let (tokens, windows) = (examined.seen.tokens, examined.windows.len());
    let nll = examined.trials.base.as_ref().map(Score::nll);
    let nll_of_frequencies = examined.trials.entropy;
    let mut report = Report { tokens, windows, nll, nll_of_frequencies, ..Report::default() };
    for (i, examination) in EXAMINATIONS.iter().enumerate() {
        let name = examination.name();
        match examination.lacks(&examined) {
            Some(lacks) => report.skipped.push(Skipped { name, lacks }),
            None => {
                let found = examination.findings(&examined)?;
                let (question, findings) = (examination.question(), found.len());
                report.examined.push(Ran { name, question, findings });
                report.findings.extend(found);
            }
        }
        progress(passes * layers + i + 1);
    }
    let Examined { seen, compared, alone, ablations, cache_schemes, ladder, .. } = examined;
    let layers = seen.layers;
    Ok(Report { compared, alone, ablations, cache_schemes, ladder, layers, ..report })
}

/// Returns the number of steps of [`diagnose`].
pub fn steps(config: &ModelConfig, calibrated: bool) -> usize {
    (1 + usize::from(calibrated)) * config.num_hidden_layers + EXAMINATIONS.len()
}

/// Returns the windows of the first [`TOKENS`] tokens, none longer than the model's context.
fn first_tokens(windows: &[Sequence], config: &ModelConfig) -> Vec<Sequence> {
    let most = WINDOW.min(config.max_position_embeddings);
    let (mut left, mut first) = (TOKENS, Vec::new());
    for Sequence { tokens, from } in windows {
        let take = tokens.len().min(most).min(left);
        if take > 1 {
            first.push(Sequence { tokens: tokens[..take].to_vec(), from: *from });
            left -= take;
        }
    }
    first
}

impl Examined<'_> {
    /// Runs the model beside its source, if there is one.
    fn beside_source(&mut self) -> Result<()> {
        let Some(reference) = self.request.reference else { return Ok(()) };
        let theirs = load_config(reference)?;
        check_same_shape(self.request.files, reference, &self.config, &theirs)?;
        let (files, threads) = (self.request.files, self.request.threads);
        let both = ((files as &dyn WeightSource, &self.config), (reference as &dyn WeightSource, &theirs));
        let compared = compared::compare(both.0, both.1, &self.trials.windows, threads)?;
        let contexts = compared::contexts(both.0, both.1, &self.trials.windows, threads)?;
        self.compared = Some(Compared { contexts, ..compared });
        self.alone = sensitivity::alone(self)?;
        self.ladder = ladder::steps(self)?;
        Ok(())
    }
}
