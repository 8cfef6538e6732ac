//! Quantization of keys and values as they enter the cache, with stored scales: `decode(encode(x / scale)) · scale`, each value by
//! itself. Keys are quantized after their rotation, as servers keep them.

use mantissa_num::Blocks;
use mantissa_store::convention::KvQuant;

use crate::error::LoadError;
use crate::input::{Element, fast_element};

/// Quantizes the keys and values of one layer.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct KvQuantizer {
    element: Element,
    head_dim: usize,
    /// One, or one per head.
    k_scale: Vec<f32>,
    v_scale: Vec<f32>,
}

impl KvQuantizer {
    /// For the attention `module` with `heads` key-value heads of `head_dim`.
    ///
    /// # Errors
    /// [`LoadError::InputScheme`] of a scheme that is neither symmetric integers nor floats with stored scales.
    pub(crate) fn new(
        module: &str,
        quant: &KvQuant,
        heads: usize,
        head_dim: usize,
    ) -> Result<Self, LoadError> {
        let KvQuant { scheme, k_scale, v_scale } = quant;
        let refuse = |given: String, allowed| {
            Err(LoadError::InputScheme { module: module.into(), scheme: scheme.to_string(), given, allowed })
        };
        let whole = scheme.format.blocks() == Blocks::Tensor && !scheme.has_outer_scale();
        let mut in_rows = scheme.clone();
        if let mantissa_num::Format::Affine(affine) = &mut in_rows.format {
            affine.blocks = Blocks::Row;
        }
        let Some(element) = fast_element(&in_rows).filter(|_| whole) else {
            return refuse("a cache".into(), "symmetric integers or floats with one stored scale");
        };
        for scales in [k_scale, v_scale] {
            if scales.len() != 1 && scales.len() != heads {
                return refuse(format!("{} stored scales", scales.len()), "one, or one per key-value head");
            }
            if scales.iter().any(|scale| !scale.is_finite() || *scale <= 0.0) {
                return refuse("other scales".into(), "finite scales greater than 0");
            }
        }
        Ok(KvQuantizer { element, head_dim, k_scale: k_scale.clone(), v_scale: v_scale.clone() })
    }

    /// Replaces keys `[tokens, heads · head_dim]` by their quantized values.
    pub(crate) fn keys(&self, k: &mut [f32]) {
        self.apply(&self.k_scale, k);
    }

    /// Replaces values, likewise.
    pub(crate) fn values(&self, v: &mut [f32]) {
        self.apply(&self.v_scale, v);
    }

    fn apply(&self, scales: &[f32], x: &mut [f32]) {
        for (vector, scale) in x.chunks_exact_mut(self.head_dim.max(1)).zip(scales.iter().cycle()) {
            // A NaN shows in the result; rounding would make a number of it.
            vector
                .iter_mut()
                .filter(|x| !x.is_nan())
                .for_each(|x| *x = self.element.round(*x / scale) * scale);
        }
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
            let quantizer = KvQuantizer::new("m", &quant, heads, head_dim).unwrap();
            let x: Vec<f32> = (0..5 * heads * head_dim).map(|i| (i as f32 * 0.37).sin() * 9.0).collect();
            let (mut k, mut v) = (x.clone(), x.clone());
            quantizer.keys(&mut k);
            quantizer.values(&mut v);
            let reference = |x: &[f32], scale: f32| {
                let mut x = x.to_vec();
                let given = Given { outer: Some(scale), first_index: 0 };
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
    fn what_a_cache_cannot_have_is_refused() {
        let new = |text: &str, k_scale: Vec<f32>| {
            let quant = KvQuant { scheme: scheme(text), k_scale, v_scale: vec![1.0] };
            KvQuantizer::new("m", &quant, 2, 4)
        };
        assert!(new("fp8-e4m3-tensor@static", vec![1.0, 2.0]).is_ok());
        for k_scale in [vec![], vec![1.0; 3], vec![0.0], vec![f32::NAN], vec![-1.0, 1.0]] {
            assert!(new("fp8-e4m3-tensor@static", k_scale).is_err());
        }
        for text in ["nf4", "int4-g32", "nvfp4", "int8-tensor:minmax", "fp8-e4m3-token"] {
            if let Ok(scheme) = parse_activation(text) {
                let quant = KvQuant { scheme, k_scale: vec![1.0], v_scale: vec![1.0] };
                assert!(KvQuantizer::new("m", &quant, 2, 4).is_err(), "{text}");
            }
        }
    }
}
