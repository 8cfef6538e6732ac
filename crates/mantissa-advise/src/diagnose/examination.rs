//! Examinations of a model, and what they read.

use mantissa_eval::Sequence;
use mantissa_eval::stats::with_error;
use mantissa_model::ModelConfig;

use super::activations::ActivationStats;
use super::compared::Compared;
use super::finding::{Finding, TokenAt};
use super::measurements::{Ablation, Alone, CacheScheme, Step};
use super::request::Request;
use super::trials::Trials;
use crate::error::Result;

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

/// Request with what one pass over the text has shown.
pub struct Examined<'a> {
    /// Request.
    pub request: &'a Request<'a>,
    /// Configuration of the model.
    pub config: ModelConfig,
    /// First tokens of the text, in windows.
    pub windows: Vec<Sequence>,
    /// Pass over the text.
    pub seen: ActivationStats,
    /// Pass over the calibration text.
    pub calibration: Option<ActivationStats>,
    /// The model on fewer tokens, for changes of all of it.
    pub(super) trials: Trials,
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

impl Examined<'_> {
    /// Formats a mean KL over the windows with its standard error, if it has one.
    pub(super) fn shown(&self, kl: f64, se: f64) -> String {
        with_error(&format!("{kl:.4}"), &format!("{se:.4}"), "nats/token", self.windows.len())
    }

    /// Returns the token at `position` of `window`.
    pub(super) fn token(&self, window: usize, position: usize) -> Option<TokenAt> {
        let id = *self.windows.get(window)?.tokens.get(position)?;
        let text = self.request.tokenizer.and_then(|tokenizer| tokenizer.decode_with_special(&[id]).ok());
        Some(TokenAt { window, position, id, text })
    }
}
