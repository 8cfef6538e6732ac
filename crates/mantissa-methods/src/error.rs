//! Errors of methods, without the names of files and layers, which the caller adds.

use mantissa_num::TensorError;

/// Any error of a caller's own code, which a method passes on.
pub type BoxedError = Box<dyn std::error::Error + Send + Sync>;

/// A weight, an input or a layer that a method could not quantize.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum MethodError {
    /// A weight holds values that are not numbers, or that the scheme cannot hold.
    #[error(transparent)]
    Weight(#[from] TensorError),
    /// The method does not take the scheme; `0` says which schemes it takes.
    #[error("expected {0}")]
    Scheme(&'static str),
    /// The format stores no scales for the weight.
    #[error("expected a weight with scales that the format can store, got non-finite or out-of-range values")]
    Scales,
    /// There is not enough memory, or another fault of the environment.
    #[error(transparent)]
    Environment(BoxedError),
    /// Any other fault of the input.
    #[error(transparent)]
    Input(BoxedError),
    /// The caller asked to stop.
    #[error("interrupted before the end")]
    Stopped,
}

impl MethodError {
    /// A fault of the input.
    pub fn input(error: impl Into<BoxedError>) -> Self {
        MethodError::Input(error.into())
    }
}
