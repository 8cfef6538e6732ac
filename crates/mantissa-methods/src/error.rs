//! Errors of methods, without file and layer names, which the caller adds.

use mantissa_num::TensorError;

/// Error of the caller's code that a method passes through.
pub type BoxedError = Box<dyn std::error::Error + Send + Sync>;

/// A weight, an input or a layer could not be quantized.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum MethodError {
    /// A weight holds values that are not finite or that the scheme cannot hold.
    #[error(transparent)]
    Weight(#[from] TensorError),
    /// The method does not take the scheme; `0` names the schemes it takes.
    #[error("expected {0}")]
    Scheme(&'static str),
    /// The format cannot store the weight's scales.
    #[error("expected a weight with scales that the format can store, got non-finite or out-of-range values")]
    Scales,
    /// There is not enough memory, or another fault of the environment.
    #[error(transparent)]
    Environment(BoxedError),
    /// Any other fault of the input.
    #[error(transparent)]
    Input(BoxedError),
    /// The caller requested a stop.
    #[error("interrupted before the end")]
    Stopped,
}

impl MethodError {
    /// A fault of the input.
    pub fn input(error: impl Into<BoxedError>) -> Self {
        MethodError::Input(error.into())
    }
}
