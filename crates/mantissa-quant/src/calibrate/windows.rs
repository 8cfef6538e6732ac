//! Checks of token windows.

use std::path::Path;

use mantissa_model::ModelConfig;

use super::CalibrationSet;
use super::error::CalibrateError;
use crate::error::{QuantError, Result};

/// Checks that the windows hold tokens of the model's vocabulary and fit its context.
///
/// # Errors
/// The first window that does not.
pub(crate) fn check_windows(set: &CalibrationSet, config: &ModelConfig) -> Result<()> {
    let fault = |window: usize, found: String, allowed: String| {
        let path = Path::new(&set.name);
        QuantError::from(mantissa_store::Error::field(path, format!("window {window}"), found, allowed, ""))
    };
    for (i, window) in set.windows.iter().enumerate() {
        if window.is_empty() && set.tokens() > 0 {
            return Err(CalibrateError::EmptyWindow { window: i }.into());
        }
        if let Some(id) = window.iter().find(|&&id| id as usize >= config.vocab_size) {
            let allowed = format!("below {}, the model's vocabulary", config.vocab_size);
            return Err(fault(i, format!("token {id}"), allowed));
        }
        if window.len() > config.max_position_embeddings {
            let allowed = format!("at most {}, the model's context", config.max_position_embeddings);
            return Err(fault(i, format!("{} tokens", window.len()), allowed));
        }
    }
    if set.tokens() == 0 { Err(CalibrateError::Empty.into()) } else { Ok(()) }
}
