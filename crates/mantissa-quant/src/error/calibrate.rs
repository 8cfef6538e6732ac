//! Errors of a calibration.

use mantissa_model::{ForwardError, LoadError};
use mantissa_ranks::RankError;
use mantissa_store::ErrorClass;

use crate::gptq::GptqError;

/// Error of a calibration.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum CalibrateError {
    /// The calibration set has no tokens.
    #[error("calibration: expected at least one window of one token, got no tokens")]
    Empty,
    /// A window holds no token.
    #[error("calibration window {window}: expected at least one token, got none; fix: leave the window out")]
    EmptyWindow {
        /// Index of the window.
        window: usize,
    },
    /// Loading a layer failed, or memory or context is too small.
    #[error(transparent)]
    Load(#[from] LoadError),
    /// A forward pass failed.
    #[error("calibration window {window}: {error}")]
    Forward {
        /// Index of the window.
        window: usize,
        /// Cause.
        error: ForwardError,
    },
    /// Too little memory for statistics.
    #[error(transparent)]
    Statistics(#[from] GptqError),
    /// The file of hidden states cannot be written or read.
    #[error(transparent)]
    States(#[from] mantissa_store::Error),
    /// Work that is shared with other workers failed.
    #[error(transparent)]
    Ranks(RankError),
    /// The caller interrupted the run.
    #[error("interrupted before the end")]
    Interrupted,
}

impl From<RankError> for CalibrateError {
    fn from(error: RankError) -> Self {
        match error {
            RankError::Interrupted => CalibrateError::Interrupted,
            error => CalibrateError::Ranks(error),
        }
    }
}

impl CalibrateError {
    /// Returns whether the input or the environment is at fault.
    pub fn class(&self) -> ErrorClass {
        match self {
            CalibrateError::Load(error) => error.class(),
            CalibrateError::States(error) => error.class(),
            CalibrateError::Ranks(error) => error.class(),
            CalibrateError::Interrupted | CalibrateError::Statistics(GptqError::Memory { .. }) => {
                ErrorClass::Environment
            }
            _ => ErrorClass::Input,
        }
    }
}
