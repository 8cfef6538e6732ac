//! Working memory of attention over cached latents.

use crate::config::{Latent, ModelConfig};
use crate::memory::zeros;

/// Queries that attend at a time.
pub(crate) const LATENT_QUERIES: usize = 16;

/// Decoded tokens of a layer of latent attention, and its working memory.
#[derive(Debug)]
pub(crate) struct LatentScratch {
    /// `[capacity, kv_rank]`.
    pub(crate) latents: Vec<f32>,
    /// `[capacity, rotated]`.
    pub(crate) rotated: Vec<f32>,
    /// Both of each token, `[capacity, kv_rank + rotated]`.
    pub(crate) joined: Vec<f32>,
    /// Projection from latents to heads, `[heads · (unrotated + value), kv_rank]`.
    pub(crate) weight: Vec<f32>,
    /// Queries projected onto latents, `[LATENT_QUERIES, heads · (kv_rank + rotated)]`.
    pub(crate) queries: Vec<f32>,
    /// Weighted sums of latents, of the same shape.
    pub(crate) weighted: Vec<f32>,
    pub(crate) scores: Vec<f32>,
    /// Keys of an indexer, `[capacity, dim]`.
    pub(crate) index: Vec<f32>,
    /// Joined tokens that a query attends to, `[chosen, kv_rank + rotated]`.
    pub(crate) gathered: Vec<f32>,
}

impl LatentScratch {
    /// Lengths of the fields, in their order; `None` if one overflows.
    fn lengths(latent: &Latent, config: &ModelConfig, capacity: usize) -> Option<[usize; 9]> {
        let (heads, joined) = (config.num_attention_heads, latent.kv_rank.checked_add(latent.rotated)?);
        let queries = LATENT_QUERIES.checked_mul(heads)?.checked_mul(joined)?;
        Some([
            capacity.checked_mul(latent.kv_rank)?,
            capacity.checked_mul(latent.rotated)?,
            capacity.checked_mul(joined)?,
            heads.checked_mul(latent.unrotated + latent.value)?.checked_mul(latent.kv_rank)?,
            queries,
            queries,
            latent
                .attention(config.num_attention_heads, 1.0)
                .scratch_len(LATENT_QUERIES.min(capacity), capacity),
            capacity.checked_mul(config.indexer.as_ref().map_or(0, |indexer| indexer.dim))?,
            config
                .indexer
                .as_ref()
                .map_or(0, |indexer| if indexer.chosen < capacity { indexer.chosen } else { 0 })
                .checked_mul(joined)?,
        ])
    }

    /// Allocates for `capacity` tokens; `None` if there is not enough memory.
    pub(crate) fn plan(latent: &Latent, config: &ModelConfig, capacity: usize) -> Option<Self> {
        let [latents, rotated, joined, weight, queries, weighted, scores, index, gathered] =
            Self::lengths(latent, config, capacity)?;
        Some(LatentScratch {
            latents: zeros(latents)?,
            rotated: zeros(rotated)?,
            joined: zeros(joined)?,
            weight: zeros(weight)?,
            queries: zeros(queries)?,
            weighted: zeros(weighted)?,
            scores: zeros(scores)?,
            index: zeros(index)?,
            gathered: zeros(gathered)?,
        })
    }

    /// Bytes that [`plan`](Self::plan) allocates.
    pub(crate) fn bytes_needed(latent: &Latent, config: &ModelConfig, capacity: usize) -> u64 {
        let lengths = Self::lengths(latent, config, capacity);
        let sum = lengths.and_then(|all| all.into_iter().try_fold(0u64, |sum, n| sum.checked_add(n as u64)));
        sum.map_or(u64::MAX, |n| n.saturating_mul(4))
    }

    /// Joins the first `tokens` latents and rotated parts.
    pub(crate) fn join(&mut self, latent: &Latent, tokens: usize) {
        let parts = self.latents.chunks_exact(latent.kv_rank).zip(self.rotated.chunks_exact(latent.rotated));
        let joined = self.joined.chunks_exact_mut(latent.kv_rank + latent.rotated);
        for (joined, (latents, rotated)) in joined.zip(parts).take(tokens) {
            joined[..latent.kv_rank].copy_from_slice(latents);
            joined[latent.kv_rank..].copy_from_slice(rotated);
        }
    }
}
