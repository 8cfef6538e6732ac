//! Checked allocation: the context that is planned for, and zeroed memory without an abort.

use crate::config::ModelConfig;
use crate::error::LoadError;

/// Checks that the model has a context of `needed` tokens.
///
/// # Errors
/// [`LoadError::Context`] if `needed` exceeds the model's context.
pub(crate) fn check_context(config: &ModelConfig, needed: usize) -> Result<(), LoadError> {
    let allowed = config.max_position_embeddings;
    if needed > allowed { Err(LoadError::Context { needed, allowed }) } else { Ok(()) }
}

/// Allocates `n` zeros; `None` if there is not enough memory.
pub fn zeros<T: Clone + Default>(n: usize) -> Option<Vec<T>> {
    let mut values = Vec::new();
    values.try_reserve_exact(n).ok()?;
    values.resize(n, T::default());
    Some(values)
}
