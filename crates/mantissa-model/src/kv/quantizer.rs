//! Quantization of one layer's keys and values: with scales that a checkpoint stores, or by a policy.

use mantissa_store::convention::KvQuant;

use super::codec::RowCodec;
use super::side::Side;
use crate::config::ModelConfig;
use crate::error::LoadError;

/// Quantizes the keys and values of one layer.
#[derive(Clone, Debug, PartialEq)]
pub struct KvQuantizer {
    parts: KvStorage,
}

/// Parts of a quantizer.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct KvStorage {
    /// Storage of keys; `None` keeps them in f32.
    pub keys: Option<Side>,
    /// Storage of values; `None` keeps them in f32.
    pub values: Option<Side>,
    /// Latent of keys and values, cached in their place.
    pub latent: Option<Side>,
    /// Number of last tokens that stay in f32.
    pub window: usize,
    /// Number of first tokens that stay in f32.
    pub sinks: usize,
    /// True if keys are stored before RoPE.
    pub before_rope: bool,
    /// True if a pass sees its own keys and values quantized, as checkpoints with stored scales intend.
    pub as_written: bool,
}

impl KvQuantizer {
    /// Creates a quantizer of `parts`.
    pub fn new(parts: KvStorage) -> Self {
        KvQuantizer { parts }
    }

    /// Creates a quantizer with the scales that a checkpoint stores for the attention `module` with `heads` key-value
    /// heads of `head_dim`: `decode(encode(x / scale)) · scale`. Keys are quantized after RoPE, as in servers.
    ///
    /// # Errors
    /// [`LoadError::InputScheme`] for a scheme that is neither symmetric integers nor floats with stored scales.
    pub fn stored(module: &str, quant: &KvQuant, heads: usize, head_dim: usize) -> Result<Self, LoadError> {
        let KvQuant { scheme, k_scale, v_scale } = quant;
        let refuse = |given: String, allowed| {
            Err(LoadError::InputScheme { module: module.into(), scheme: scheme.to_string(), given, allowed })
        };
        let mut sides = Vec::new();
        for scales in [k_scale, v_scale] {
            if scales.len() != 1 && scales.len() != heads {
                return refuse(format!("{} stored scales", scales.len()), "one, or one per key-value head");
            }
            if scales.iter().any(|scale| !scale.is_finite() || *scale <= 0.0) {
                return refuse("other scales".into(), "finite scales greater than 0");
            }
            let Some(codec) = RowCodec::with_stored(scheme, head_dim, scales) else {
                return refuse("a cache".into(), "symmetric integers or floats with one stored scale");
            };
            sides.push(Some(Side::tokens(codec, heads * head_dim, None)));
        }
        let (values, keys) = (sides.pop().flatten(), sides.pop().flatten());
        Ok(KvQuantizer::new(KvStorage { keys, values, as_written: true, ..KvStorage::default() }))
    }

    /// True if heads are stored quantized; a latent is quantized before it is expanded to heads.
    pub fn stores_heads(&self) -> bool {
        self.parts.keys.is_some() || self.parts.values.is_some()
    }

    /// Returns its parts.
    pub fn parts(&self) -> &KvStorage {
        &self.parts
    }

    /// Replaces the keys of a whole sequence, `[tokens, heads · head_dim]`, by their stored values.
    pub(crate) fn keys(&self, k: &mut [f32]) {
        self.round_trip(self.parts.keys.as_ref(), k);
    }

    /// Replaces the values of a whole sequence by their stored values.
    pub(crate) fn values(&self, v: &mut [f32]) {
        self.round_trip(self.parts.values.as_ref(), v);
    }

    fn round_trip(&self, side: Option<&Side>, x: &mut [f32]) {
        if let Some(side) = side {
            let kept = self.parts.sinks.saturating_mul(side.width()).min(x.len());
            side.round_trip(&mut x[kept..]);
        }
    }

    /// Replaces latents, `[tokens, rank]`, by their stored values.
    pub(crate) fn latents(&self, x: &mut [f32]) {
        if let Some(side) = &self.parts.latent {
            side.round_trip(x);
        }
    }

    /// Bytes of a quantized token of this layer.
    pub(crate) fn bytes_per_token(&self, config: &ModelConfig) -> f64 {
        if let Some(latent) = &config.latent {
            let exact = latent.bytes_per_token();
            let saved = |side: &Side| 4.0 * latent.kv_rank as f64 - side.chunk_bytes() as f64;
            return exact - self.parts.latent.as_ref().map_or(0.0, saved);
        }
        let bytes = |side: &Option<Side>| match side {
            Some(side) => side.chunk_bytes() as f64 / side.span() as f64,
            None => 4.0 * config.key_value_width() as f64,
        };
        bytes(&self.parts.keys) + bytes(&self.parts.values)
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use mantissa_num::{Given, Scheme, fake_quantize, parse_activation};

    use super::*;

    fn scheme(text: &str) -> Scheme {
        parse_activation(text).unwrap()
    }

    #[test]
    fn each_head_has_the_values_of_the_reference_under_its_scale() {
        let (heads, head_dim) = (3, 8);
        for text in ["fp8-e4m3-tensor@static", "int8-tensor@static"] {
            let k_scale = vec![0.01, 0.2, 3.0];
            let quant = KvQuant { scheme: scheme(text), k_scale: k_scale.clone(), v_scale: vec![0.05] };
            let quantizer = KvQuantizer::stored("m", &quant, heads, head_dim).unwrap();
            let x: Vec<f32> = (0..5 * heads * head_dim).map(|i| (i as f32 * 0.37).sin() * 9.0).collect();
            let (mut k, mut v) = (x.clone(), x.clone());
            quantizer.keys(&mut k);
            quantizer.values(&mut v);
            let reference = |x: &[f32], scale: f32| {
                let mut x = x.to_vec();
                let given = Given { outer: Some(scale), first_index: 0, ..Given::default() };
                let n = x.len();
                fake_quantize(&quant.scheme, &mut x, 1, n, given).unwrap();
                x
            };
            assert_eq!(v, reference(&x, 0.05), "{text}");
            for (i, (x, k)) in x.chunks(head_dim).zip(k.chunks(head_dim)).enumerate() {
                assert_eq!(k, reference(x, k_scale[i % heads]), "{text} {i}");
            }
        }
    }

    #[test]
    fn unsupported_cache_schemes_are_refused() {
        let new = |text: &str, k_scale: Vec<f32>| {
            let quant = KvQuant { scheme: scheme(text), k_scale, v_scale: vec![1.0] };
            KvQuantizer::stored("m", &quant, 2, 4)
        };
        assert!(new("fp8-e4m3-tensor@static", vec![1.0, 2.0]).is_ok());
        for k_scale in [vec![], vec![1.0; 3], vec![0.0], vec![f32::NAN], vec![-1.0, 1.0]] {
            assert!(new("fp8-e4m3-tensor@static", k_scale).is_err());
        }
        for text in ["nf4", "int4-g32", "nvfp4", "int8-tensor:minmax", "fp8-e4m3-token"] {
            if let Ok(scheme) = parse_activation(text) {
                let quant = KvQuant { scheme, k_scale: vec![1.0], v_scale: vec![1.0] };
                assert!(KvQuantizer::stored("m", &quant, 2, 4).is_err(), "{text}");
            }
        }
    }
}
