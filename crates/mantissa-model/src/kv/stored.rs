//! Levels stored with a model ([`KvLevels`]): checked, read back and applied.

use mantissa_store::convention::{KeyLevels, KvLevels, KvQuant};

use super::book::{KeyBook, LayerBooks, Span};
use super::policy::KvPolicy;
use super::quantizer::KvQuantizer;
use super::scheme::KvScheme;
use crate::config::ModelConfig;
use crate::error::LoadError;
use crate::source::{SourceView, WeightSource};

/// A model without its checkpoint's quantization of the cache.
pub struct CacheInF32<'a>(pub &'a dyn WeightSource);

impl SourceView for CacheInF32<'_> {
    fn base(&self) -> &dyn WeightSource {
        self.0
    }

    fn kv_quant(&self, _: &str, _: usize) -> Result<Option<KvQuant>, LoadError> {
        Ok(None)
    }

    fn kv_levels(&self, _: &str, _: usize) -> Result<Option<KvLevels>, LoadError> {
        Ok(None)
    }
}

/// Checks the levels that `source` stores, if any.
///
/// # Errors
/// Levels do not fit the model or their policy; as [`WeightSource::kv_levels`].
pub fn check_kv_levels(source: &dyn WeightSource, config: &ModelConfig) -> Result<(), LoadError> {
    config.attention_layers().try_for_each(|layer| of_layer(source, config, layer).map(|_| ()))
}

/// Builds the quantizer of a layer for which `source` stores levels.
pub(crate) fn of_layer(
    source: &dyn WeightSource,
    config: &ModelConfig,
    layer: usize,
) -> Result<Option<KvQuantizer>, LoadError> {
    let layer = config.kv_layer(layer);
    let config = &*config.of_layer(layer);
    let stored = source.kv_levels(&config.attention_module(layer), config.key_value_width())?;
    let Some(stored) = stored else { return Ok(None) };
    let refuse = |allowed| LoadError::KvScheme { scheme: stored.policy.clone(), allowed };
    let policy: KvPolicy = stored.policy.parse().map_err(|_| refuse("a KV cache policy, as for --kv"))?;
    if !policy.is_calibrated() || sizes(&stored) != sizes(&policy.blank_levels(config)) {
        return Err(refuse("one level per code, and ranges of keys"));
    }
    policy.quantizer_with(config, &LayerBooks::of(stored)).map(Some)
}

/// Numbers of levels and ranges.
fn sizes(levels: &KvLevels) -> (Option<[usize; 3]>, Option<usize>) {
    let keys = levels.keys.as_ref().map(|k| [k.levels.len(), k.middles.len(), k.halves.len()]);
    (keys, levels.values.as_ref().map(Vec::len))
}

impl KvPolicy {
    /// Creates the stored levels and ranges of a layer, all 0.
    pub fn blank_levels(&self, config: &ModelConfig) -> KvLevels {
        let width = config.key_value_width();
        let levels = |side: &Option<KvScheme>| match side {
            Some(KvScheme::Nuq { bits, .. }) => Some(vec![0.0; 1 << bits]),
            _ => None,
        };
        let zeros = || vec![0.0; width];
        let keys = levels(&self.keys);
        KvLevels {
            policy: self.to_string(),
            keys: keys.map(|levels| KeyLevels { levels, middles: zeros(), halves: zeros() }),
            values: levels(&self.values),
        }
    }
}

impl LayerBooks {
    pub(crate) fn stored(self, policy: &KvPolicy) -> KvLevels {
        let keys = self.keys.map(|KeyBook { levels, spans }| {
            let (middles, halves) = spans.into_iter().map(|span| (span.middle, span.half)).unzip();
            KeyLevels { levels, middles, halves }
        });
        KvLevels { policy: policy.to_string(), keys, values: self.values }
    }

    fn of(stored: KvLevels) -> Self {
        let keys = stored.keys.map(|KeyLevels { levels, middles, halves }| {
            let spans = middles.into_iter().zip(halves).map(|(middle, half)| Span { middle, half });
            KeyBook { levels, spans: spans.collect() }
        });
        LayerBooks { keys, values: stored.values }
    }
}
