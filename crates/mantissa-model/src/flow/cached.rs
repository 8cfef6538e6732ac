//! Interface of a cache of earlier tokens.

use mantissa_kernels::ScoreRules;

use crate::attention::Attention;
use crate::error::ForwardError;
use crate::mixer::States;
use crate::operators::{Activations, LatentTokens, Operators, Sequences};

/// Attention of a pass through a cache of earlier tokens, provided by whoever holds the cache.
pub trait CachedAttention {
    /// True if it caches the latents of latent attention; false if it caches their heads, like those of any other
    /// attention.
    fn holds_latents(&self) -> bool {
        false
    }

    /// Rotates queries and keys by position, appends keys and values, and attends: reads `q`, `k` and `v` of `a`
    /// and writes `attended`, with zeros in padding. `rules` are those for scores.
    ///
    /// # Errors
    /// [`ForwardError::Cache`] if a value has no code; [`ForwardError::OtherModel`].
    fn attend(
        &mut self,
        attention: &Attention,
        seqs: &Sequences<'_>,
        rules: ScoreRules<'_>,
        a: &mut Activations<'_>,
    ) -> Result<(), ForwardError>;

    /// Returns the states of a layer with a recurrent mixer, of the sequences of the pass.
    ///
    /// # Errors
    /// [`ForwardError::OtherModel`] if the cache holds no state of the layer.
    fn states(&mut self) -> Result<States<'_>, ForwardError> {
        Err(ForwardError::OtherModel { what: "KV cache" })
    }

    /// Runs [`attend`](Self::attend) for latent attention if the cache [holds latents](Self::holds_latents). `rows`
    /// are the new ones.
    ///
    /// # Errors
    /// As [`attend`](Self::attend).
    fn attend_latents(
        &mut self,
        _attention: &Attention,
        _seqs: &Sequences<'_>,
        _rows: &mut LatentTokens<'_>,
        _operators: &mut dyn Operators,
    ) -> Result<(), ForwardError> {
        Err(ForwardError::OtherModel { what: "KV cache" })
    }
}
