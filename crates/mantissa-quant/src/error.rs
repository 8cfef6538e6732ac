//! Why a model could not be quantized or verified.

use std::path::PathBuf;

use mantissa_eval::EvalError;
use mantissa_methods::MethodError;
use mantissa_model::{KvCalibrationError, LoadError};
use mantissa_num::TensorError;
use mantissa_store::ErrorClass;
use mantissa_store::convention::Container;

use crate::calibrate::error::CalibrateError;
use crate::quality::{Quality, TokenSet};
use crate::recipe::error::RecipeError;
use crate::verify::verification::Verification;

/// Result of the fallible functions of this crate.
pub type Result<T> = std::result::Result<T, QuantError>;

/// An error of the pipeline.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum QuantError {
    /// A file.
    #[error(transparent)]
    Store(#[from] mantissa_store::Error),
    /// The model.
    #[error(transparent)]
    Load(#[from] LoadError),
    /// A forward pass.
    #[error(transparent)]
    Forward(#[from] mantissa_model::ForwardError),
    /// An evaluation.
    #[error(transparent)]
    Eval(EvalError),
    /// The tokenizer, where it goes into the same file.
    #[error(transparent)]
    Tokenizer(#[from] mantissa_model::TokenizerError),
    /// The recipe.
    #[error(transparent)]
    Recipe(Box<RecipeError>),
    /// The source is quantized already.
    #[error("{}: expected a dense model, got weights quantized as {convention}; fix: give the model it was made from", .path.display())]
    AlreadyQuantized {
        /// The model.
        path: PathBuf,
        /// Its convention.
        convention: &'static str,
    },
    /// Layers, or the model as a whole, cannot be stored as the recipe asks; nothing has been written.
    #[error("{what} cannot be stored in {container}: {list}")]
    NotStorable {
        /// Number of layers out of all, or the model.
        what: String,
        /// The container.
        container: &'static str,
        /// The first of them with the reason, and how many more.
        list: String,
    },
    /// A container cannot hold some layers, or the model as a whole, as they are; nothing has been written.
    #[error(
        "{what} cannot be stored in {container}{}: {list}{}", if *.anew { "" } else { " without loss" },
        if *.anew { "" } else { "; --requantize SCHEME rounds them anew" }
    )]
    NotLossless {
        /// Number of layers out of all, or the model.
        what: String,
        /// The container.
        container: &'static str,
        /// The first of them with the reason, and how many more.
        list: String,
        /// True if they are requantized already.
        anew: bool,
    },
    /// The model is in the container that is asked for.
    #[error("{}: expected a format other than the source's, got {container}", .path.display())]
    NothingToConvert {
        /// The model.
        path: PathBuf,
        /// The container.
        container: &'static str,
    },
    /// Nothing would be quantized.
    #[error(
        "recipe \"{recipe}\": expected at least one layer to quantize, got none: its `keep` and `layers` leave every layer as it is"
    )]
    NothingToDo {
        /// The recipe.
        recipe: String,
    },
    /// A tensor holds values that the scheme cannot.
    #[error("{}: tensor \"{tensor}\": {error}", .path.display())]
    Tensor {
        /// The model.
        path: PathBuf,
        /// The tensor.
        tensor: String,
        /// Description of the fault.
        error: TensorError,
    },
    /// The method calibrates, and there is nothing to calibrate on.
    #[error(
        "recipe \"{recipe}\": expected a calibration text or token windows, got none; fix: give --calibration TEXT or --calibration-tokens FILE.json[:KEY]"
    )]
    NoCalibration {
        /// The recipe.
        recipe: String,
    },
    /// Products of the calibration are to be rounded where that is of no use, or not done.
    #[error("recipe \"{recipe}\": expected calibration products in f32, got {found}: {why}")]
    Products {
        /// The recipe.
        recipe: String,
        /// Requested value.
        found: &'static str,
        /// Why it is refused.
        why: String,
    },
    /// Calibration.
    #[error(transparent)]
    Calibrate(CalibrateError),
    /// A scheme that the method does not take.
    #[error("{}: {module}: expected for {method} {allowed}, got scheme {scheme}", .path.display())]
    Unsuited {
        /// The model.
        path: PathBuf,
        /// The layer.
        module: String,
        /// The method.
        method: &'static str,
        /// The scheme.
        scheme: String,
        /// Schemes that it takes.
        allowed: &'static str,
    },
    /// The method.
    #[error("{}: {what}: {error}", .path.display())]
    Method {
        /// The model.
        path: PathBuf,
        /// The layer or input.
        what: String,
        /// Description of the fault.
        error: Box<MethodError>,
    },
    /// Rotations cannot be learned.
    #[error("{}: spin: {error}; rotate needs no gradients", .path.display())]
    Spin {
        /// The model.
        path: PathBuf,
        /// Description of the fault.
        error: Box<mantissa_train::TrainError>,
    },
    /// The caller ended the run.
    #[error("expected to run to the end, got a request to stop")]
    Interrupted,
    /// The output lost more than is allowed, and was not put in place.
    #[error(transparent)]
    Gate(Box<GateFailure>),
    /// The finished output did not verify, and was not put in place.
    #[error(transparent)]
    NotVerified(Box<NotVerified>),
    /// The finished output cannot be opened, and was not put in place.
    #[error("{}: expected an output that can be opened, got one that cannot, so nothing was put there: {error}", .out.display())]
    NotLoadable {
        /// Intended place.
        out: PathBuf,
        /// Why it cannot be opened.
        error: Box<QuantError>,
    },
    /// A run ended early; what it had done is kept.
    #[error(transparent)]
    Unfinished(Box<Unfinished>),
    /// A verification was asked to compare models of different shapes.
    #[error("{}: expected the source of {}, got another model: {what}", .reference.display(), .model.display())]
    Reference {
        /// The artifact.
        model: PathBuf,
        /// The model given as its source.
        reference: PathBuf,
        /// Difference.
        what: String,
    },
    /// A verification was given another text than the recorded figures were measured on.
    #[error(
        "{}: expected the text that its figures were measured on ({}, {} windows of {} tokens with SHA-256 {}), got {} windows of {} tokens with SHA-256 {}",
        .path.display(), .recorded.name, .recorded.windows, .recorded.tokens, .recorded.sha256,
        .found.windows, .found.tokens, .found.sha256
    )]
    OtherText {
        /// The artifact.
        path: PathBuf,
        /// Text on which its figures were measured.
        recorded: Box<TokenSet>,
        /// Text that was given.
        found: Box<TokenSet>,
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

/// An output that lost more than is allowed.
#[derive(Debug, thiserror::Error)]
#[error(
    "KL: expected at most {allowed} nats/token, got {}; nothing was put at {}{}",
    .quality.evaluation.as_ref().map_or_else(String::new, |e| format!("{:.6} ± {:.6}", e.kl, e.kl_se)),
    .out.display(),
    .kept.as_ref().map_or_else(String::new, |kept| format!(
        "; the work is kept in {}: the same command with another --max-kl resumes from it, --restart starts over",
        kept.display()
    ))
)]
pub struct GateFailure {
    /// Description and measured loss of the output.
    pub quality: Quality,
    /// The largest KL allowed, nats.
    pub allowed: f64,
    /// Intended place.
    pub out: PathBuf,
    /// Folder of its parts, if the work can be resumed.
    pub kept: Option<PathBuf>,
}

/// An output that did not verify.
#[derive(Debug, thiserror::Error)]
#[error("verify: {}; nothing was put at {}", .verification.faults.join("; "), .out.display())]
pub struct NotVerified {
    /// Description and errors of the output.
    pub quality: Quality,
    /// Faults.
    pub verification: Verification,
    /// Intended place.
    pub out: PathBuf,
}

/// A run that ended early, and what of it is kept.
#[derive(Debug, thiserror::Error)]
#[error(
    "{error}; {done} finished tensors and layers are kept in {}: the same command goes on from there, --restart begins anew",
    .kept.display()
)]
pub struct Unfinished {
    /// Why it ended.
    pub error: QuantError,
    /// The staging folder.
    pub kept: PathBuf,
    /// Copied tensors and quantized layers in it.
    pub done: usize,
}

/// Parts that cannot be stored, each with its reason.
#[derive(Clone, Debug, Default)]
pub(crate) struct Refused {
    /// Reasons about the model as a whole: its KV cache, its inputs.
    pub(crate) whole: Vec<String>,
    /// Layers.
    pub(crate) layers: Vec<String>,
}

impl Refused {
    /// Refuses the model as a whole.
    pub(crate) fn whole(why: impl Into<String>) -> Self {
        Refused { whole: vec![why.into()], layers: Vec::new() }
    }

    /// Refuses layers.
    pub(crate) fn layers(layers: Vec<String>) -> Self {
        Refused { whole: Vec::new(), layers }
    }

    /// True if everything can be stored.
    pub(crate) fn is_empty(&self) -> bool {
        self.whole.is_empty() && self.layers.is_empty()
    }

    fn what(&self, total: usize) -> String {
        match (self.layers.len(), self.whole.is_empty()) {
            (0, _) => "the model".to_owned(),
            (count, true) => format!("{count} of {total} layers"),
            (count, false) => format!("the model, {count} of {total} layers among it,"),
        }
    }

    /// The first of them, and how many more.
    fn list(&self) -> String {
        const SHOWN: usize = 6;
        let all: Vec<&str> = self.whole.iter().chain(&self.layers).map(String::as_str).collect();
        let more =
            if all.len() > SHOWN { format!("; and {} more", all.len() - SHOWN) } else { String::new() };
        all[..all.len().min(SHOWN)].join("; ") + &more
    }
}

impl QuantError {
    /// [`QuantError::NotStorable`] of these of `total` layers.
    pub(crate) fn not_storable(container: Container, total: usize, refused: &Refused) -> Self {
        let (what, list) = (refused.what(total), refused.list());
        QuantError::NotStorable { what, container: container.name(), list }
    }

    /// [`QuantError::NotLossless`] of these of `total` layers.
    pub(crate) fn not_lossless(container: Container, total: usize, refused: &Refused) -> Self {
        let (what, list) = (refused.what(total), refused.list());
        QuantError::NotLossless { what, container: container.name(), list, anew: false }
    }

    /// The same of layers that are rounded `anew`, which is then no cure.
    pub(crate) fn rounding(mut self, rounds: bool) -> Self {
        if let QuantError::NotLossless { anew, .. } = &mut self {
            *anew = rounds;
        }
        self
    }

    /// Tells whether the input or the environment is at fault.
    pub fn class(&self) -> ErrorClass {
        match self {
            QuantError::Store(e) => e.class(),
            QuantError::Tokenizer(e) => e.class(),
            QuantError::Load(e) => e.class(),
            QuantError::Interrupted => ErrorClass::Environment,
            QuantError::Method { error, .. } => match **error {
                MethodError::Environment(_) => ErrorClass::Environment,
                _ => ErrorClass::Input,
            },
            QuantError::Calibrate(e) => e.class(),
            QuantError::Spin { error, .. } => error.class(),
            QuantError::Eval(e) => e.class(),
            QuantError::Unfinished(unfinished) => unfinished.error.class(),
            QuantError::NotLoadable { error, .. } => error.class(),
            QuantError::Recipe(error) => match &**error {
                RecipeError::Read(error) => error.class(),
                _ => ErrorClass::Input,
            },
            _ => ErrorClass::Input,
        }
    }

    /// True if the caller has ended the run.
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

    /// A KV cache is no layer, and is not counted as one.
    #[test]
    fn what_is_refused_of_the_whole_is_not_counted_among_layers() {
        let error = |whole: &[&str], layers: usize| {
            let refused = Refused {
                whole: whole.iter().map(|why| (*why).to_owned()).collect(),
                layers: (0..layers).map(|i| format!("layer {i}: why")).collect(),
            };
            QuantError::not_lossless(mantissa_store::convention::gptq::CONTAINER, 35, &refused).to_string()
        };
        assert!(
            error(&[], 2)
                .starts_with("2 of 35 layers cannot be stored in gptq without loss: layer 0: why; layer 1")
        );
        assert!(
            error(&["KV cache: why"], 0)
                .starts_with("the model cannot be stored in gptq without loss: KV cache: why;")
        );
        let both = error(&["KV cache: why"], 35);
        assert!(both.starts_with("the model, 35 of 35 layers among it, cannot be stored"), "{both}");
        assert!(both.contains(": KV cache: why; layer 0: why;") && both.contains("; and 30 more;"), "{both}");
    }
}
