//! KV cache of latent attention (DeepSeek-V2, arXiv 2405.04434, sec. 2.1.2): for each token the latent of its keys and
//! values, and the rotated part of its keys, which all heads share.

use mantissa_num::TensorError;

use super::packed::SideCache;
use crate::config::Latent;
use crate::kv::quantizer::KvQuantizer;
use crate::latent::LatentScratch;

/// One layer's part: the latents, which may be quantized, and the rotated parts and keys of an indexer, which are not.
#[derive(Debug)]
pub(crate) struct LatentCache {
    latents: SideCache,
    rotated: SideCache,
    index: Option<SideCache>,
}

impl LatentCache {
    /// Allocates for `capacity` tokens with index keys of width `index`; `None` if there is not enough memory.
    pub(crate) fn plan(
        latent: &Latent,
        index: usize,
        quantizer: Option<&KvQuantizer>,
        capacity: usize,
    ) -> Option<Self> {
        let side = quantizer.and_then(|quantizer| quantizer.parts().latent.clone());
        let latents = SideCache::plan(side, latent.kv_rank, 0, 0, capacity)?;
        let exact = |width| SideCache::plan(None, width, 0, 0, capacity);
        let rotated = exact(latent.rotated)?;
        Some(LatentCache { latents, rotated, index: if index > 0 { Some(exact(index)?) } else { None } })
    }

    /// Bytes that [`plan`](Self::plan) allocates.
    pub(crate) fn bytes_needed(
        latent: &Latent,
        index: usize,
        quantizer: Option<&KvQuantizer>,
        capacity: usize,
    ) -> u64 {
        let side = quantizer.and_then(|quantizer| quantizer.parts().latent.as_ref());
        let latents = SideCache::bytes_needed(side, latent.kv_rank, 0, 0, capacity);
        latents.saturating_add(SideCache::bytes_needed(None, latent.rotated + index, 0, 0, capacity))
    }

    /// Removes all tokens from `len` on.
    pub(crate) fn truncate(&mut self, len: usize) {
        self.latents.truncate(len);
        self.rotated.truncate(len);
        if let Some(index) = &mut self.index {
            index.truncate(len);
        }
    }

    /// Appends new latents `[t, kv_rank]`, rotated parts `[t, rotated]` and index keys `[t, width]`, and decodes all of them
    /// into `scratch`.
    ///
    /// # Errors
    /// [`TensorError`] for values without a code.
    pub(crate) fn append(
        &mut self,
        latents: &[f32],
        rotated: &[f32],
        index: &[f32],
        scratch: &mut LatentScratch,
    ) -> Result<(), TensorError> {
        self.latents.append(latents, &mut scratch.latents)?;
        self.rotated.append(rotated, &mut scratch.rotated)?;
        match &mut self.index {
            Some(keys) => keys.append(index, &mut scratch.index),
            None => Ok(()),
        }
    }
}
