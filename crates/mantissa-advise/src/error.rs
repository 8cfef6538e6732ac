//! Error type of this crate.

use mantissa_eval::EvalError;
use mantissa_model::{ForwardError, LoadError};
use mantissa_quant::QuantError;
use mantissa_store::ErrorClass;

/// Result of the fallible functions of this crate.
pub(crate) type Result<T> = std::result::Result<T, AdviseError>;

/// Error of diagnosing or describing a model.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum AdviseError {
    /// A file cannot be read.
    #[error(transparent)]
    Store(#[from] mantissa_store::Error),
    /// The model cannot be loaded.
    #[error(transparent)]
    Load(#[from] LoadError),
    /// A forward pass failed.
    #[error(transparent)]
    Forward(#[from] ForwardError),
    /// An evaluation failed.
    #[error(transparent)]
    Eval(#[from] EvalError),
    /// The configuration is invalid, or the comparison quantization failed.
    #[error(transparent)]
    Quant(#[from] QuantError),
    /// The reference has another shape than the model.
    #[error("{reference}: expected the source model of {model}, got {found}")]
    Reference {
        /// Path of the reference.
        reference: String,
        /// Path of the model.
        model: String,
        /// Shape of the reference.
        found: String,
    },
}

impl AdviseError {
    /// Returns who has to act: the input or the environment is at fault.
    pub fn class(&self) -> ErrorClass {
        match self {
            AdviseError::Store(error) => error.class(),
            AdviseError::Load(error) => error.class(),
            AdviseError::Eval(error) => error.class(),
            AdviseError::Quant(error) => error.class(),
            AdviseError::Forward(_) | AdviseError::Reference { .. } => ErrorClass::Input,
        }
    }
}
