//! Checks of calibration windows.

use std::path::Path;

use mantissa_model::ModelConfig;

use super::CalibrationSet;
use crate::error::{CalibrateError, QuantError, Result};

/// Checks that the tokens are in the model's vocabulary and the windows fit its context.
///
/// # Errors
/// The first window that fails.
pub(crate) fn check_windows(set: &CalibrationSet, config: &ModelConfig) -> Result<()> {
    let fault = |window: usize, got: String, expected: String| {
        let path = Path::new(&set.name);
        QuantError::from(mantissa_store::Error::field(path, format!("window {window}"), got, expected, ""))
    };
    for (i, window) in set.windows.iter().enumerate() {
        if window.is_empty() && set.tokens() > 0 {
            return Err(CalibrateError::EmptyWindow { window: i }.into());
        }
        if let Some(id) = window.iter().find(|&&id| id as usize >= config.vocab_size) {
            let expected = format!("below {}, the model's vocabulary", config.vocab_size);
            return Err(fault(i, format!("token {id}"), expected));
        }
        if window.len() > config.max_position_embeddings {
            let expected = format!("at most {}, the model's context", config.max_position_embeddings);
            return Err(fault(i, format!("{} tokens", window.len()), expected));
        }
    }
    if set.tokens() == 0 { Err(CalibrateError::Empty.into()) } else { Ok(()) }
}
