//! Errors of a calibration.

use mantissa_model::{ForwardError, LoadError};
use mantissa_store::ErrorClass;

use crate::gptq::GptqError;

/// Error of a calibration.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum CalibrateError {
    /// There is nothing to calibrate with.
    #[error("calibration: expected at least one window of one token, got no tokens")]
    Empty,
    /// A window holds no token.
    #[error("calibration window {window}: expected at least one token, got none; fix: leave the window out")]
    EmptyWindow {
        /// Index of the window.
        window: usize,
    },
    /// A weight, the memory or the context.
    #[error(transparent)]
    Load(#[from] LoadError),
    /// A forward pass.
    #[error("calibration window {window}: {error}")]
    Forward {
        /// Index of the window.
        window: usize,
        /// The fault.
        error: ForwardError,
    },
    /// Memory for statistics.
    #[error(transparent)]
    Statistics(#[from] GptqError),
    /// Hidden states that are kept in a file.
    #[error(transparent)]
    States(#[from] mantissa_store::Error),
    /// The caller ended the run.
    #[error("expected to run to the end, got a request to stop")]
    Interrupted,
}

impl CalibrateError {
    /// Tells whether the input or the environment is at fault.
    pub fn class(&self) -> ErrorClass {
        match self {
            CalibrateError::Load(error) => error.class(),
            CalibrateError::States(error) => error.class(),
            CalibrateError::Interrupted | CalibrateError::Statistics(GptqError::Memory { .. }) => {
                ErrorClass::Environment
            }
            _ => ErrorClass::Input,
        }
    }
}
