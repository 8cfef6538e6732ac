//! Errors of quantization and verification.

mod calibrate;
mod recipe;

use std::path::PathBuf;

use mantissa_eval::EvalError;
use mantissa_methods::MethodError;
use mantissa_model::{KvCalibrationError, LoadError};
use mantissa_num::TensorError;
use mantissa_ranks::RankError;
use mantissa_store::convention::Container;
use mantissa_store::{ErrorClass, Shown};

use crate::quality::{Quality, TokenSet, Verification};

pub use calibrate::CalibrateError;
pub use recipe::RecipeError;

/// Result of the fallible functions of this crate.
pub type Result<T> = std::result::Result<T, QuantError>;

/// Error of the pipeline.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum QuantError {
    /// A file cannot be read or written.
    #[error(transparent)]
    Store(#[from] mantissa_store::Error),
    /// The model cannot be loaded.
    #[error(transparent)]
    Load(#[from] LoadError),
    /// A forward pass failed.
    #[error(transparent)]
    Forward(#[from] mantissa_model::ForwardError),
    /// An evaluation failed.
    #[error(transparent)]
    Eval(EvalError),
    /// A task failed.
    #[error("{task}: {error}")]
    Task {
        /// Name of the task.
        task: String,
        /// Cause.
        error: Box<EvalError>,
    },
    /// The tokenizer, which the output includes, cannot be read.
    #[error(transparent)]
    Tokenizer(#[from] mantissa_model::TokenizerError),
    /// The recipe is wrong.
    #[error(transparent)]
    Recipe(Box<RecipeError>),
    /// The source is already quantized.
    #[error("{}: expected a dense model, got weights quantized as {convention}; fix: give the model it was made from", .path.display())]
    AlreadyQuantized {
        /// Path of the model.
        path: PathBuf,
        /// Format of the source.
        convention: &'static str,
    },
    /// Layers, or the model as a whole, cannot be stored as the recipe asks. Nothing was written.
    #[error("{what} cannot be stored in {container}: {list}{}", fix.as_ref().map_or_else(String::new, |fix| format!("; fix: {fix}")))]
    NotStorable {
        /// Number of layers out of all, or the model.
        what: String,
        /// Container.
        container: &'static str,
        /// First reasons, each with its layers, and the number of others.
        list: String,
        /// Options under which the same model can be stored.
        fix: Option<String>,
    },
    /// A container cannot hold some layers, or the model as a whole, without loss. Nothing was written.
    #[error(
        "{what} cannot be stored in {container}{}: {list}{}", if *.requantized { "" } else { " without loss" },
        scheme.as_ref().map_or_else(String::new, |scheme| format!("; fix: --requantize {scheme}, which rounds them again"))
    )]
    NotLossless {
        /// Number of layers out of all, or the model.
        what: String,
        /// Container.
        container: &'static str,
        /// First reasons, each with its layers, and the number of others.
        list: String,
        /// True if the layers are already requantized.
        requantized: bool,
        /// Scheme to requantize to, which the container holds.
        scheme: Option<String>,
    },
    /// The model already has the requested format.
    #[error("{}: expected a format other than the source's, got {container}", .path.display())]
    NothingToConvert {
        /// Path of the model.
        path: PathBuf,
        /// Container.
        container: &'static str,
    },
    /// The recipe quantizes no layer.
    #[error(
        "recipe \"{recipe}\": expected at least one layer to quantize, got none: its `keep` and `layers` leave every layer unquantized"
    )]
    NothingToDo {
        /// Name of the recipe.
        recipe: String,
    },
    /// A name or pattern of layers to keep matches nothing in the model.
    #[error("keep: expected a module of the model or a pattern that matches one, got \"{}\"; fix: {}", Shown(.pattern), Shown(.nearest))]
    NoSuchLayer {
        /// Name or pattern.
        pattern: String,
        /// Nearest names or patterns that match.
        nearest: String,
    },
    /// Weights of decoder layers would be skipped, because the architecture does not know their names. Nothing was
    /// written.
    #[error(
        "{}: expected at least 95 % of the linear layers to be quantized, got {percent:.0} %: {architecture} does not know tensor \"{tensor}\" {shape:?}; fix: another model_type, or keep = [\"{tensor}\"] in a recipe file",
        .path.display()
    )]
    Uncovered {
        /// Path of the model.
        path: PathBuf,
        /// Percentage that would be quantized.
        percent: f64,
        /// Name of the architecture.
        architecture: &'static str,
        /// Largest weight of a decoder layer that it does not know.
        tensor: String,
        /// Its shape.
        shape: Vec<usize>,
    },
    /// The output has another size than was planned.
    #[error("{}: expected {expected} bytes of tensors, got {got}; fix: report it as an error of mantissa", .path.display())]
    Bytes {
        /// Path of the output.
        path: PathBuf,
        /// Bytes planned.
        expected: u64,
        /// Bytes written.
        got: u64,
    },
    /// The recipe has a scheme for modules that do not belong to the text model.
    #[error(
        "recipe \"{recipe}\": layers: expected modules of the text model, got \"{pattern}\", which matches {module} ({part}); towers and other parts are copied; fix: remove the pattern"
    )]
    NotText {
        /// Name of the recipe.
        recipe: String,
        /// Pattern of the recipe.
        pattern: String,
        /// Module that it matches.
        module: String,
        /// Part that the module belongs to.
        part: String,
    },
    /// A tensor holds values that the scheme cannot represent.
    #[error("{}: tensor \"{tensor}\": {error}", .path.display())]
    Tensor {
        /// Path of the model.
        path: PathBuf,
        /// Name of the tensor.
        tensor: String,
        /// Cause.
        error: TensorError,
    },
    /// The method calibrates, and no calibration text was given.
    #[error(
        "recipe \"{recipe}\": expected a calibration text or token windows, got none; fix: --calibration TEXT, --calibration-tokens FILE.json[:KEY], or --calibration default for the built-in text"
    )]
    NoCalibration {
        /// Name of the recipe.
        recipe: String,
    },
    /// The matmul operand dtype of calibration cannot be used with this recipe.
    #[error("recipe \"{recipe}\": expected calibration products in f32, got {got}: {why}")]
    Products {
        /// Name of the recipe.
        recipe: String,
        /// Requested dtype.
        got: &'static str,
        /// Reason.
        why: String,
    },
    /// Calibration failed.
    #[error(transparent)]
    Calibrate(CalibrateError),
    /// The method does not take the scheme.
    #[error("{}: {module}: {method}: expected {expected}, got scheme {scheme}", .path.display())]
    Unsuited {
        /// Path of the model.
        path: PathBuf,
        /// Module of the layer.
        module: String,
        /// Name of the method.
        method: &'static str,
        /// Scheme.
        scheme: String,
        /// Schemes that the method takes.
        expected: &'static str,
    },
    /// One run cannot mix methods as the rules of the recipe ask.
    #[error(transparent)]
    Mixed(Box<MixError>),
    /// The method failed.
    #[error("{}: {what}: {error}", .path.display())]
    Method {
        /// Path of the model.
        path: PathBuf,
        /// Layer or input.
        what: String,
        /// Cause.
        error: Box<MethodError>,
    },
    /// Rotations cannot be learned.
    #[error("{}: spin: {}; fix: use rotate, which needs no gradients", .path.display(), .error.cause())]
    Spin {
        /// Path of the model.
        path: PathBuf,
        /// Cause.
        error: Box<mantissa_train::TrainError>,
    },
    /// Scales and norms cannot be trained end to end.
    #[error("{}: e2e: {}; fix: leave out +e2e", .path.display(), .error.cause())]
    EndToEnd {
        /// Path of the model.
        path: PathBuf,
        /// Cause.
        error: Box<mantissa_train::TrainError>,
    },
    /// Work that is shared with other workers failed.
    #[error(transparent)]
    Ranks(RankError),
    /// The caller interrupted the run.
    #[error("interrupted before the end")]
    Interrupted,
    /// The quality loss exceeds the limit; the output was not put in place.
    #[error(transparent)]
    Gate(Box<GateFailure>),
    /// The finished output failed verification and was not put in place.
    #[error(transparent)]
    NotVerified(Box<NotVerified>),
    /// The finished output cannot be opened and was not put in place.
    #[error("{}: expected an output that can be opened, got one that cannot; nothing was put there: {error}", .out.display())]
    NotLoadable {
        /// Path of the output.
        out: PathBuf,
        /// Cause.
        error: Box<QuantError>,
    },
    /// A run ended early; finished work is kept.
    #[error(transparent)]
    Unfinished(Box<Unfinished>),
    /// The reference of a verification is another model.
    #[error("{}: expected the source of {}, got another model: {what}", .reference.display(), .model.display())]
    Reference {
        /// Path of the artifact.
        model: PathBuf,
        /// Path of the model given as its source.
        reference: PathBuf,
        /// Difference.
        what: String,
    },
    /// A verification was given another text than the recorded figures were measured on.
    #[error(
        "{}: expected the text that its figures were measured on ({}, {} windows of {} tokens with SHA-256 {}), got {} windows of {} tokens with SHA-256 {}",
        .path.display(), .recorded.name, .recorded.windows, .recorded.tokens, .recorded.sha256,
        .got.windows, .got.tokens, .got.sha256
    )]
    OtherText {
        /// Path of the artifact.
        path: PathBuf,
        /// Text of the recorded figures.
        recorded: Box<TokenSet>,
        /// Given text.
        got: Box<TokenSet>,
    },
}

impl From<EvalError> for QuantError {
    fn from(error: EvalError) -> Self {
        match error {
            EvalError::Stopped => QuantError::Interrupted,
            error => QuantError::Eval(error),
        }
    }
}

impl From<RankError> for QuantError {
    fn from(error: RankError) -> Self {
        match error {
            RankError::Interrupted => QuantError::Interrupted,
            error => QuantError::Ranks(error),
        }
    }
}

impl From<CalibrateError> for QuantError {
    fn from(error: CalibrateError) -> Self {
        match error {
            CalibrateError::Interrupted => QuantError::Interrupted,
            error => QuantError::Calibrate(error),
        }
    }
}

impl From<KvCalibrationError> for QuantError {
    fn from(error: KvCalibrationError) -> Self {
        match error {
            KvCalibrationError::Stopped => QuantError::Interrupted,
            KvCalibrationError::Load(error) => error.into(),
            KvCalibrationError::Forward { window, error } => {
                QuantError::Calibrate(CalibrateError::Forward { window, error })
            }
        }
    }
}

impl From<RecipeError> for QuantError {
    fn from(error: RecipeError) -> Self {
        QuantError::Recipe(Box::new(error))
    }
}

/// Limit of the quality loss that an output exceeds.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
pub enum Exceeded {
    /// Limit of the KL divergence.
    #[error("KL: expected at most {allowed} nats/token, got {kl:.6} ± {se:.6}")]
    Kl {
        /// Maximum in nats per token.
        allowed: f64,
        /// Measured KL in nats per token.
        kl: f64,
        /// Standard error of `kl`.
        se: f64,
    },
    /// Limit of the drop of a task's accuracy.
    #[error("{task}: accuracy: expected a drop of at most {allowed}, got {drop:.4}")]
    Accuracy {
        /// Name of the task.
        task: String,
        /// Maximum drop, as a share.
        allowed: f64,
        /// Measured drop.
        drop: f64,
    },
}

impl Exceeded {
    /// Returns the option of the command line that sets the limit.
    pub fn option(&self) -> &'static str {
        match self {
            Exceeded::Kl { .. } => "--max-kl",
            Exceeded::Accuracy { .. } => "--max-accuracy-drop",
        }
    }
}

/// An output whose quality loss exceeds a limit.
#[derive(Debug, thiserror::Error)]
#[error(
    "{exceeded}; nothing was put at {}{}",
    .out.display(),
    .kept.as_ref().map_or_else(String::new, |kept| format!(
        "; finished work is kept in {}: rerun with another {} to resume, or with --restart to start over",
        kept.display(),
        .exceeded.option()
    ))
)]
pub struct GateFailure {
    /// Contents of `quality.json`, with the measured loss.
    pub quality: Quality,
    /// Limit that the loss exceeds.
    pub exceeded: Exceeded,
    /// Path of the output.
    pub out: PathBuf,
    /// Folder of the finished parts, if the run can be resumed.
    pub kept: Option<PathBuf>,
}

/// An output that failed verification.
#[derive(Debug, thiserror::Error)]
#[error("verify: {}; nothing was put at {}", .verification.faults.join("; "), .out.display())]
pub struct NotVerified {
    /// Contents of `quality.json`.
    pub quality: Quality,
    /// Result of the verification, with its faults.
    pub verification: Verification,
    /// Path of the output.
    pub out: PathBuf,
}

/// A run that ended early, with its finished work.
#[derive(Debug, thiserror::Error)]
#[error(
    "{error}; {done} finished tensors and layers are kept in {}: rerun the same command to resume, or with --restart to start over",
    .kept.display()
)]
pub struct Unfinished {
    /// Cause.
    pub error: QuantError,
    /// Folder of the finished work.
    pub kept: PathBuf,
    /// Number of finished tensors and layers.
    pub done: usize,
}

/// Parts of a model that cannot be stored, each with its reason.
#[derive(Clone, Debug, Default)]
pub(crate) struct Refused {
    /// Reasons that concern the whole model: its KV cache, its inputs.
    pub(crate) whole: Vec<String>,
    /// Modules of layers, each with its reason.
    pub(crate) layers: Vec<(String, String)>,
}

impl Refused {
    /// Refuses the whole model.
    pub(crate) fn whole(why: impl Into<String>) -> Self {
        Refused { whole: vec![why.into()], layers: Vec::new() }
    }

    /// Refuses layers.
    pub(crate) fn layers(layers: Vec<(String, String)>) -> Self {
        Refused { whole: Vec::new(), layers }
    }

    /// True if everything can be stored.
    pub(crate) fn is_empty(&self) -> bool {
        self.whole.is_empty() && self.layers.is_empty()
    }

    fn what(&self, total: usize) -> String {
        // The whole model and layers are counted apart.
        match (self.layers.len(), self.whole.is_empty()) {
            (0, _) => "the model".to_owned(),
            (count, true) => format!("{count} of {total} layers"),
            (count, false) => format!("the model and {count} of {total} layers"),
        }
    }

    /// Lists the first reasons, each once with its layers, and the number of others.
    fn list(&self) -> String {
        const SHOWN: usize = 4;
        let mut reasons: Vec<(&str, &str, usize)> = Vec::new();
        for (module, why) in &self.layers {
            match reasons.iter_mut().find(|(known, ..)| known == why) {
                Some((.., count)) => *count += 1,
                None => reasons.push((why, module, 1)),
            }
        }
        let layer_reasons = reasons.iter().map(|(why, module, count)| match count {
            1 => format!("{module}: {why}"),
            _ => format!("{why} ({count} layers, first {module})"),
        });
        let all: Vec<String> = self.whole.iter().cloned().chain(layer_reasons).collect();
        let more = match all.len().saturating_sub(SHOWN) {
            0 => String::new(),
            others => format!("; and {others} more reasons"),
        };
        all[..all.len().min(SHOWN)].join("; ") + &more
    }
}

/// Methods that one run cannot mix.
#[derive(Debug, thiserror::Error)]
#[error("{recipe}: {what}: expected {expected}, got {got}; fix: {fix}")]
pub struct MixError {
    /// Name of the recipe.
    pub recipe: String,
    /// Module, decoder layer or key.
    pub what: String,
    /// Methods that can be mixed.
    pub expected: String,
    /// Methods.
    pub got: String,
    /// Change of the recipe.
    pub fix: String,
}

impl QuantError {
    /// Returns [`QuantError::NotStorable`] for refused parts of a model of `total` layers.
    pub(crate) fn not_storable(container: Container, total: usize, refused: &Refused) -> Self {
        let (what, list) = (refused.what(total), refused.list());
        QuantError::NotStorable { what, container: container.name(), list, fix: None }
    }

    /// Returns [`QuantError::NotLossless`] for refused parts of a model of `total` layers.
    pub(crate) fn not_lossless(container: Container, total: usize, refused: &Refused) -> Self {
        let (what, list) = (refused.what(total), refused.list());
        QuantError::NotLossless { what, container: container.name(), list, requantized: false, scheme: None }
    }

    /// Adds options under which the model can be stored to [`QuantError::NotStorable`].
    pub(crate) fn with_fix(mut self, found: Option<String>) -> Self {
        if let QuantError::NotStorable { fix, .. } = &mut self {
            *fix = found;
        }
        self
    }

    /// Adds a scheme to requantize to to [`QuantError::NotLossless`].
    pub(crate) fn with_scheme(mut self, found: Option<String>) -> Self {
        if let QuantError::NotLossless { scheme, .. } = &mut self {
            *scheme = found;
        }
        self
    }

    /// Marks [`QuantError::NotLossless`] as an error of requantization, for which requantizing is no fix.
    pub(crate) fn of_requantization(mut self, rounds: bool) -> Self {
        if let QuantError::NotLossless { requantized, .. } = &mut self {
            *requantized = rounds;
        }
        self
    }

    /// Returns whether the input or the environment is at fault.
    pub fn class(&self) -> ErrorClass {
        match self {
            QuantError::Store(e) => e.class(),
            QuantError::Tokenizer(e) => e.class(),
            QuantError::Load(e) => e.class(),
            QuantError::Ranks(error) => error.class(),
            QuantError::Interrupted => ErrorClass::Environment,
            QuantError::Method { error, .. } => match **error {
                MethodError::Environment(_) => ErrorClass::Environment,
                _ => ErrorClass::Input,
            },
            QuantError::Calibrate(e) => e.class(),
            QuantError::Spin { error, .. } | QuantError::EndToEnd { error, .. } => error.class(),
            QuantError::Eval(error) => error.class(),
            QuantError::Task { error, .. } => error.class(),
            QuantError::Unfinished(unfinished) => unfinished.error.class(),
            QuantError::NotLoadable { error, .. } => error.class(),
            QuantError::Recipe(error) => match &**error {
                RecipeError::Read(error) => error.class(),
                _ => ErrorClass::Input,
            },
            _ => ErrorClass::Input,
        }
    }

    /// True if the caller interrupted the run.
    pub fn is_interruption(&self) -> bool {
        match self {
            QuantError::Interrupted => true,
            QuantError::Unfinished(unfinished) => unfinished.error.is_interruption(),
            _ => false,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn error(whole: &[&str], layers: &[&str]) -> String {
        let refused = Refused {
            whole: whole.iter().map(|why| (*why).to_owned()).collect(),
            layers: layers
                .iter()
                .enumerate()
                .map(|(i, why)| (format!("layer {i}"), (*why).to_owned()))
                .collect(),
        };
        QuantError::not_lossless(mantissa_store::convention::gptq::CONTAINER, 35, &refused).to_string()
    }

    /// A KV cache is not counted among layers.
    #[test]
    fn refusals_of_the_whole_model_are_not_counted_as_layers() {
        assert_eq!(
            error(&[], &["a", "b"]),
            "2 of 35 layers cannot be stored in gptq without loss: layer 0: a; layer 1: b"
        );
        assert_eq!(
            error(&["KV cache: why"], &[]),
            "the model cannot be stored in gptq without loss: KV cache: why"
        );
        let both = error(&["KV cache: why"], &["a"; 35]);
        assert!(both.starts_with("the model and 35 of 35 layers cannot be stored"), "{both}");
        assert!(both.ends_with(": KV cache: why; a (35 layers, first layer 0)"), "{both}");
    }

    #[test]
    fn reasons_are_listed_once() {
        let line = error(&[], &["a", "b", "a", "c", "d", "e", "f"]);
        assert!(
            line.ends_with(
                "a (2 layers, first layer 0); layer 1: b; layer 3: c; layer 4: d; and 2 more reasons"
            ),
            "{line}"
        );
    }
}
