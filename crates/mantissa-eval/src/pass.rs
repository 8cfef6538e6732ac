//! Logits of a window: from one pass over all tokens, or from a prefill followed by decode steps through the
//! KV cache.

use std::ops::Range;

use mantissa_model::{Batch, Buffers, Decoder, ForwardError, Hidden, KvCache, LoadError};

use crate::error::EvalError;

/// Number of positions whose logits each thread holds at a time.
pub const ROWS: usize = 64;

/// A model with the buffers of one thread.
pub(crate) struct Runner<'a> {
    decoder: &'a Decoder,
    buffers: Buffers,
    logits: Vec<f32>,
    decode: Option<(KvCache, usize)>,
}

/// Forward pass over one window.
pub(crate) struct Pass<'a> {
    source: PassKind<'a>,
    logits: &'a mut [f32],
    vocabulary: usize,
}

enum PassKind<'a> {
    Whole(Hidden<'a>),
    Decode { decoder: &'a Decoder, buffers: &'a mut Buffers, cache: &'a mut KvCache, prefill: usize },
}

impl<'a> Runner<'a> {
    /// Allocates buffers for windows of up to `longest` tokens. With `prefill`, that many tokens run in one
    /// pass and the rest one by one through the KV cache.
    pub(crate) fn new(
        decoder: &'a Decoder,
        longest: usize,
        prefill: Option<usize>,
    ) -> Result<Self, EvalError> {
        let config = decoder.config();
        let pass = prefill.map_or(longest, |prefill| prefill.clamp(1, longest.max(1)));
        let buffers = Buffers::plan(config, pass, longest)?;
        let (len, mut logits) = (ROWS * config.vocab_size, Vec::new());
        let memory = |_| LoadError::Memory { what: "logits", bytes: 4 * len as u64 };
        logits.try_reserve_exact(len).map_err(memory)?;
        logits.resize(len, 0.0);
        let decode = match prefill {
            Some(_) => Some((KvCache::for_decoder(decoder, longest)?, pass)),
            None => None,
        };
        Ok(Runner { decoder, buffers, logits, decode })
    }

    /// Starts a window.
    pub(crate) fn begin(&mut self, tokens: &[u32]) -> Result<Pass<'_>, ForwardError> {
        let Runner { decoder, buffers, logits, decode } = self;
        let source = match decode {
            None => PassKind::Whole(decoder.forward(&Batch { tokens, lens: &[tokens.len()] }, buffers)?),
            Some((cache, prefill)) => {
                cache.truncate(0);
                PassKind::Decode { decoder, buffers, cache, prefill: *prefill }
            }
        };
        Ok(Pass { source, logits, vocabulary: decoder.config().vocab_size })
    }
}

impl Pass<'_> {
    /// Returns the logits of positions `rows`, at most [`ROWS`], which must follow those of the previous
    /// call. When decoding, positions before the last prompt token are not computed and keep their old
    /// values.
    pub(crate) fn logits(&mut self, tokens: &[u32], rows: Range<usize>) -> Result<&[f32], ForwardError> {
        let vocabulary = self.vocabulary;
        let out = &mut self.logits[..rows.len() * vocabulary];
        match &mut self.source {
            PassKind::Whole(hidden) => hidden.logits(rows, out)?,
            PassKind::Decode { decoder, buffers, cache, prefill } => {
                for (position, out) in rows.zip(out.chunks_exact_mut(vocabulary.max(1))) {
                    // A prompt as long as the window ends at the window's last position.
                    let prompt = (*prefill).min(tokens.len());
                    if position + 1 < prompt {
                        continue;
                    }
                    let first = if position + 1 == prompt { 0 } else { position };
                    let input = &tokens[first..=position];
                    let mut hidden = decoder.forward_cached(input, cache, buffers)?;
                    hidden.logits(input.len() - 1..input.len(), out)?;
                }
            }
        }
        Ok(out)
    }
}
