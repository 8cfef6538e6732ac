//! Diagnosis of a model before and after quantization: examinations that measure it on a text, each with findings that
//! have a place, figures, a remedy and the command that applies it.
//!
//! [`EXAMINATIONS`] is the registry, one file for each. Those of one pass read what `look` has observed of every
//! input of a linear layer, of the states between layers and of keys and values; others run the model again. A sound
//! model must have no finding: thresholds are constants with their reason, and a test runs them over all test models.

mod cache_schemes;
mod compared;
mod experts;
mod harm;
mod head;
mod ladder;
mod look;
mod outliers;
mod overflow;
mod parts;
mod precision;
mod ranges;
mod readings;
mod rope;
mod sensitivity;
mod spikes;
mod trials;

use std::collections::BTreeMap;

use mantissa_eval::tasks::Item;
use mantissa_eval::{Sequence, check_sequences};
use mantissa_model::{KvPolicy, ModelConfig, Tokenizer, WeightSource, load_config};
use mantissa_store::convention::ModelFiles;
use serde::Serialize;

pub use self::cache_schemes::CacheScheme;
pub use self::compared::{AtContext, AtPosition, Compared};
pub use self::ladder::Step;
pub use self::look::{Peak, Seen, SeenCache, SeenInput, SeenLayer};
pub use self::precision::Ablation;
pub use self::sensitivity::Alone;
use self::trials::Trials;
use crate::doctor::check_same_shape;
use crate::error::AdviseError;

type Result<T> = std::result::Result<T, AdviseError>;

/// Most tokens that an examination runs, and most tokens of a window: figures change little beyond, and a pass stays
/// within seconds on small models.
pub const TOKENS: usize = 2048;
const WINDOW: usize = 512;

/// Model to examine, and what it is examined with.
pub struct Request<'a> {
    /// Files of the model.
    pub files: &'a ModelFiles,
    /// Text, tokenized.
    pub windows: &'a [Sequence],
    /// Calibration text, tokenized.
    pub calibration: Option<&'a [Sequence]>,
    /// Source of a quantized model.
    pub reference: Option<&'a ModelFiles>,
    /// Tokenizer, to show tokens.
    pub tokenizer: Option<&'a Tokenizer>,
    /// Schemes of the KV cache to try.
    pub kv: &'a [KvPolicy],
    /// Items of the retrieval task, for schemes of the cache.
    pub retrieval: &'a [Item],
    /// Bound of the KL to the source, nats/token.
    pub max_kl: Option<f64>,
    /// Names for commands.
    pub names: Names,
    /// Threads.
    pub threads: usize,
}

/// Names of a request in commands, quoted for a shell.
#[derive(Clone, Debug, Default)]
pub struct Names {
    /// Model.
    pub model: String,
    /// Model without its ending, for names of outputs.
    pub stem: String,
    /// Source; `SOURCE` if it is not known.
    pub source: String,
    /// Option that evaluates on the text, such as `--text T`.
    pub text: String,
    /// Option that calibrates on the text, such as `--calibration T`.
    pub calibrate: String,
    /// Scheme of the model's weights.
    pub weights: String,
    /// Command that makes the model again from its source; `None` without a source.
    pub again: Option<String>,
}

/// Place of a finding.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct Location {
    /// Layer index.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub layer: Option<usize>,
    /// Module, input of modules, or config field.
    pub part: String,
    /// Channel of that input or of the states.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub channel: Option<usize>,
    /// Token.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub token: Option<TokenAt>,
}

/// Token of the text.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct TokenAt {
    /// Window.
    pub window: usize,
    /// Position in the window.
    pub position: usize,
    /// Token id.
    pub id: u32,
    /// Its text, if there is a tokenizer.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub text: Option<String>,
}

/// Finding of an examination.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Finding {
    /// Name of the examination.
    pub examination: &'static str,
    /// Where.
    pub place: Location,
    /// Observation, with figures.
    pub found: String,
    /// Figures.
    pub figures: BTreeMap<&'static str, f64>,
    /// Cure, in words.
    pub remedy: String,
    /// Command that applies the remedy, or measures it.
    pub command: String,
}

/// Examination of a model.
pub trait Examination: Sync {
    /// Name in reports.
    fn name(&self) -> &'static str;

    /// Question that it answers.
    fn question(&self) -> &'static str;

    /// Returns what it lacks; `None` if it can run.
    fn lacks(&self, of: &Examined<'_>) -> Option<&'static str>;

    /// Examines the model. Findings are in the order of the model, at most one for each cause.
    ///
    /// # Errors
    /// A model that cannot be loaded or run.
    fn findings(&self, of: &Examined<'_>) -> Result<Vec<Finding>>;
}

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

/// Request with what one pass over the text has shown.
pub struct Examined<'a> {
    /// Request.
    pub request: &'a Request<'a>,
    /// Configuration of the model.
    pub config: ModelConfig,
    /// First tokens of the text, in windows.
    pub windows: Vec<Sequence>,
    /// Pass over the text.
    pub seen: Seen,
    /// Pass over the calibration text.
    pub calibration: Option<Seen>,
    /// The model on fewer tokens, for changes of all of it.
    trials: Trials,
    /// The model beside its source.
    pub compared: Option<Compared>,
    /// Parts of layers alone, against the source.
    pub alone: Vec<Alone>,
    /// Residual stream, norms and softmax in other precisions.
    pub ablations: Vec<Ablation>,
    /// Schemes of the cache.
    pub cache_schemes: Vec<CacheScheme>,
    /// Relaxation under a bound.
    pub ladder: Vec<Step>,
}

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
    pub layers: Vec<SeenLayer>,
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
    let seen = look::look(request, &config, &windows, None, progress)?;
    let calibration = match request.calibration {
        None => None,
        Some(given) => {
            let windows = first_tokens(given, &config);
            check_sequences(&config, &windows)?;
            Some(look::look(request, &config, &windows, None, &|done| progress(layers + done))?)
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
        let again = look::look(request, &examined.config, &examined.windows, Some(calibrated), &|_| {})?;
        examined.seen = again;
    }
    let mut report = Report { tokens: examined.seen.tokens, ..Report::default() };
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

    /// Returns the token at `position` of `window`.
    fn token(&self, window: usize, position: usize) -> Option<TokenAt> {
        let id = *self.windows.get(window)?.tokens.get(position)?;
        let text = self.request.tokenizer.and_then(|tokenizer| tokenizer.decode_with_special(&[id]).ok());
        Some(TokenAt { window, position, id, text })
    }
}

impl TokenAt {
    /// Describes the token: `token 12 ("The") at position 3`.
    fn described(&self) -> String {
        let text = self.text.as_ref().map_or_else(String::new, |text| format!(" ({text:?})"));
        format!("token {}{text} at position {}", self.id, self.position)
    }
}
