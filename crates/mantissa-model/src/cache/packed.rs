//! Keys, or values, of a sequence with most tokens quantized: the first and the last ones in f32, those between as
//! bytes. A token is quantized once, when it leaves the window.

use mantissa_num::TensorError;

use crate::kv::side::Side;
use crate::memory::zeros;

/// Keys or values of one layer.
#[derive(Debug)]
pub(crate) struct SideCache {
    /// Storage of tokens; `None` keeps all of them in f32.
    side: Option<Side>,
    width: usize,
    window: usize,
    sinks: usize,
    /// First tokens (sinks), in f32.
    first: Vec<f32>,
    /// Chunks of the quantized tokens.
    stored: Vec<u8>,
    /// Number of quantized tokens.
    stored_tokens: usize,
    /// Last tokens (window), in f32.
    recent: Vec<f32>,
}

impl SideCache {
    /// Allocates for `capacity` tokens; `None` if there is not enough memory.
    pub(crate) fn plan(
        side: Option<Side>,
        width: usize,
        window: usize,
        sinks: usize,
        capacity: usize,
    ) -> Option<Self> {
        let (kept, chunks) = Self::sizes(side.as_ref(), window, sinks, capacity);
        let (mut first, mut recent, mut stored) = (Vec::new(), Vec::new(), Vec::new());
        let sinks = sinks.min(capacity);
        first.try_reserve_exact(sinks.checked_mul(width)?).ok()?;
        recent.try_reserve_exact((kept - sinks).checked_mul(width)?).ok()?;
        let bytes = side.as_ref().map_or(0, Side::chunk_bytes);
        stored.try_reserve_exact(chunks.checked_mul(bytes)?).ok()?;
        Some(SideCache { side, width, window, sinks, first, stored, stored_tokens: 0, recent })
    }

    /// Bytes that [`plan`](Self::plan) allocates.
    pub(crate) fn bytes_needed(
        side: Option<&Side>,
        width: usize,
        window: usize,
        sinks: usize,
        capacity: usize,
    ) -> u64 {
        let (kept, chunks) = Self::sizes(side, window, sinks, capacity);
        let exact = (kept as u64).saturating_mul(4 * width as u64);
        exact.saturating_add((chunks as u64).saturating_mul(side.map_or(0, Side::chunk_bytes) as u64))
    }

    /// Largest number of tokens in f32 between two passes, and largest number of chunks.
    fn sizes(side: Option<&Side>, window: usize, sinks: usize, capacity: usize) -> (usize, usize) {
        let Some(side) = side else { return (capacity, 0) };
        let kept = sinks.saturating_add(window).saturating_add(side.span() - 1).min(capacity);
        (kept, capacity.saturating_sub(sinks.saturating_add(window)) / side.span())
    }

    /// Copies the held tokens and then `new`, unquantized, into `all` (`[tokens, width]`), and quantizes what leaves
    /// the window.
    ///
    /// # Errors
    /// [`TensorError`] for values without a code. Tokens may have left the window by then.
    pub(crate) fn append(&mut self, new: &[f32], all: &mut [f32]) -> Result<(), TensorError> {
        let (first, rest) = all.split_at_mut(self.first.len());
        first.copy_from_slice(&self.first);
        let (stored, rest) = rest.split_at_mut(self.stored_tokens * self.width);
        if let Some(side) = &self.side {
            side.decode(&self.stored, stored);
        }
        let (recent, rest) = rest.split_at_mut(self.recent.len());
        recent.copy_from_slice(&self.recent);
        rest[..new.len()].copy_from_slice(new);
        let end = self.first.len() + stored.len() + recent.len() + new.len();
        let sinks = self.sinks.saturating_mul(self.width).min(end);
        if self.first.len() < sinks {
            self.first.extend_from_slice(&all[self.first.len()..sinks]);
        }
        self.settle(&all[self.first.len() + self.stored_tokens * self.width..end])
    }

    /// Takes `exact`, the tokens not stored yet, and stores whole chunks of those beyond the window.
    fn settle(&mut self, exact: &[f32]) -> Result<(), TensorError> {
        let mut left = exact;
        if let Some(side) = &self.side {
            let tokens = exact.len() / self.width.max(1);
            for _ in 0..tokens.saturating_sub(self.window) / side.span() {
                let (chunk, rest) = left.split_at(side.span() * self.width);
                side.encode(chunk, &mut self.stored)?;
                self.stored_tokens += side.span();
                left = rest;
            }
        }
        self.recent.clear();
        self.recent.extend_from_slice(left);
        Ok(())
    }

    /// Removes all tokens from `len` on. Stored tokens stay stored; a partly removed chunk is kept by its values.
    pub(crate) fn truncate(&mut self, len: usize) {
        self.first.truncate(len.saturating_mul(self.width));
        let len = len.saturating_sub(self.sinks);
        if len >= self.stored_tokens {
            return self.recent.truncate((len - self.stored_tokens) * self.width);
        }
        self.recent.clear();
        if let Some(side) = &self.side {
            let (whole, cut) = (len / side.span(), len % side.span());
            if cut > 0 {
                let mut chunk = vec![0.0; side.span() * self.width];
                side.decode(&self.stored[whole * side.chunk_bytes()..], &mut chunk);
                self.recent.extend_from_slice(&chunk[..cut * self.width]);
            }
            self.stored.truncate(whole * side.chunk_bytes());
            self.stored_tokens = whole * side.span();
        }
    }
}

/// Decoded keys and values of a layer during attention, `[capacity, width]` each.
#[derive(Debug)]
pub(crate) struct Scratch {
    pub(crate) keys: Vec<f32>,
    pub(crate) values: Vec<f32>,
}

impl Scratch {
    pub(crate) fn plan(len: usize) -> Option<Self> {
        Some(Scratch { keys: zeros(len)?, values: zeros(len)? })
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use crate::config::{ModelConfig, example};
    use crate::kv::KvPolicy;

    use super::*;

    fn wave(n: usize) -> Vec<f32> {
        (0..n).map(|i| (i as f32 * 0.61).sin() * (1.0 + (i % 5) as f32)).collect()
    }

    fn key_cache(text: &str, capacity: usize) -> (SideCache, usize) {
        let config = ModelConfig::from_json(&example("llama"), "config.json").unwrap();
        let quantizer = text.parse::<KvPolicy>().unwrap().quantizer(&config).unwrap();
        let (parts, width) = (quantizer.parts(), config.key_value_width());
        (SideCache::plan(parts.keys.clone(), width, parts.window, parts.sinks, capacity).unwrap(), width)
    }

    /// Tokens are f32 in the window and at the beginning, quantized once in between, however the pass is split.
    #[test]
    fn tokens_are_quantized_once_when_they_leave_the_window() {
        let policies =
            ["int4-head-asym,window=3,sinks=2", "int4-g4-asym:minmax,channel-keys,window=3,sinks=2,rotate"];
        for text in policies {
            let (tokens, mut seen) = (23, Vec::new());
            for pieces in [1, 4, 23] {
                let (mut cache, width) = key_cache(text, tokens + 1);
                let x = wave((tokens + 1) * width);
                let mut all = vec![f32::NAN; x.len()];
                for new in x[..tokens * width].chunks(pieces * width) {
                    cache.append(new, &mut all).unwrap();
                }
                cache.append(&x[tokens * width..], &mut all).unwrap();
                assert_eq!(all[..2 * width], x[..2 * width], "sinks");
                assert_eq!(all[(tokens - 3) * width..], x[(tokens - 3) * width..], "window");
                let changed =
                    (2..tokens - 3).filter(|i| all[i * width..][..width] != x[i * width..][..width]);
                let span = cache.side.as_ref().unwrap().span();
                assert_eq!(changed.count(), (tokens - 5) / span * span, "{text}");
                let near = all.iter().zip(&x).all(|(a, b)| (a - b).abs() < 1.0);
                assert!(near, "{text}");
                seen.push(all);
            }
            assert!(seen.windows(2).all(|w| w[0] == w[1]), "{text}");
        }
    }

    #[test]
    fn a_truncated_cache_continues_like_a_shorter_one() {
        for text in ["int8-head,sinks=1", "int8-g4-asym:minmax,channel-keys"] {
            for len in [0, 1, 4, 6, 9, 12] {
                let (mut cache, width) = key_cache(text, 16);
                let x = wave(16 * width);
                let mut all = vec![f32::NAN; x.len()];
                cache.append(&x[..12 * width], &mut all).unwrap();
                let mut expected = vec![f32::NAN; x.len()];
                cache.append(&[], &mut expected).unwrap();
                cache.truncate(len);
                cache.append(&x[len * width..][..2 * width], &mut all).unwrap();
                assert_eq!(all[..len * width], expected[..len * width], "{text} {len}");
                assert_eq!(all[len * width..][..2 * width], x[len * width..][..2 * width], "{text} {len}");
            }
        }
    }
}
