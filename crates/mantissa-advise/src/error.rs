//! Why a model could not be examined.

use mantissa_eval::EvalError;
use mantissa_model::{ForwardError, LoadError};
use mantissa_quant::QuantError;
use mantissa_store::ErrorClass;

/// An error of this crate.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum AdviseError {
    /// A file.
    #[error(transparent)]
    Store(#[from] mantissa_store::Error),
    /// The model.
    #[error(transparent)]
    Load(#[from] LoadError),
    /// A forward pass.
    #[error(transparent)]
    Forward(#[from] ForwardError),
    /// An evaluation.
    #[error(transparent)]
    Eval(#[from] EvalError),
    /// The configuration, or a quantization that is compared with.
    #[error(transparent)]
    Quant(#[from] QuantError),
    /// A reference that the model cannot be compared with.
    #[error("{reference}: found {found}, allowed the model that {model} was made from")]
    Reference {
        /// The reference.
        reference: String,
        /// The model.
        model: String,
        /// What differs.
        found: String,
    },
}

impl AdviseError {
    /// Whether the input or the environment is at fault.
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
