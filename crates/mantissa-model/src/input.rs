//! Run-time quantization of a linear layer's input, each token by itself: the values of [`fake_quantize`] with a row
//! per token.
//!
//! Symmetric integers and scaled floats per token or group, the common cases, have a fast path with the same
//! operations in the same order (block scale by [`Scheme::block`], division, nearest-even, one product back) and so
//! the same values, except that zeros may differ in sign. Other schemes run the reference.

use mantissa_kernels::{Element, kernels};
use mantissa_num::blockwise::Range;
use mantissa_num::{
    Affine, Blocks, Code, Format, Given, Offset, Rounding, Rule, Scheme, Source, TensorError, fake_quantize,
    quantize,
};
use mantissa_store::convention::ActivationQuant;

use crate::error::LoadError;
use crate::factored::Factored;
use crate::packed::Packed;

/// Quantizes inputs as stated by a checkpoint. Two are equal if they give equal results.
#[derive(Clone, Debug, PartialEq)]
pub struct InputQuantizer {
    quant: ActivationQuant,
    path: Path,
}

#[derive(Clone, Copy, Debug, PartialEq)]
enum Path {
    Fast(Element),
    Reference,
}

impl InputQuantizer {
    /// Creates the quantizer of linear layer `module`.
    ///
    /// # Errors
    /// [`LoadError::InputScheme`] if a token's values would depend on other tokens, or a stored scale is missing.
    pub fn new(module: &str, quant: &ActivationQuant) -> Result<Self, LoadError> {
        let refuse = |allowed| {
            Err(LoadError::InputScheme {
                module: module.into(),
                scheme: quant.scheme.to_string(),
                given: quant
                    .outer
                    .map_or("no stored scale".into(), |scale| format!("the stored scale {scale}")),
                allowed,
            })
        };
        let scheme = &quant.scheme;
        // With one stored scale for all blocks, no scale is computed from the tokens.
        let fixed = quant.outer.is_some() && !scheme.has_outer_scale();
        if quant.outer.is_some_and(|scale| !scale.is_finite() || scale <= 0.0) {
            return refuse("a finite stored scale greater than 0");
        }
        if quant.outer.is_none() && (scheme.has_outer_scale() || scheme.source == Source::Static) {
            return refuse("a stored scale");
        }
        if quant.keep_above.is_some_and(|limit| limit.is_nan() || limit <= 0.0) {
            return refuse("an outlier threshold greater than 0");
        }
        if fixed && scheme.format.has_bias() {
            return refuse("a zero point and no bias if the scale is stored");
        }
        if !fixed && scheme.format.scale().is_some() && !within_rows(scheme.format.blocks()) {
            return refuse("scales per token or per group of a token");
        }
        let path = match fast_element(scheme) {
            Some(element) if !fixed => Path::Fast(element),
            _ => Path::Reference,
        };
        Ok(InputQuantizer { quant: quant.clone(), path })
    }

    /// Quantization stated by the checkpoint.
    pub fn quant(&self) -> &ActivationQuant {
        &self.quant
    }

    /// Element of the fast path.
    pub(crate) fn element(&self) -> Option<Element> {
        match self.path {
            Path::Fast(element) => Some(element),
            Path::Reference => None,
        }
    }

    /// Replaces `x` (`[tokens, width]`) by its quantized values.
    ///
    /// # Errors
    /// [`TensorError::NonFinite`] if the scheme has no code for a value.
    pub fn apply(&self, x: &mut [f32], width: usize) -> Result<(), TensorError> {
        if width == 0 {
            return Ok(());
        }
        let Some(limit) = self.quant.keep_above else { return self.quantize(x, width) };
        // Large values are set aside, so that scales ignore them, and restored unquantized.
        let mut kept = Vec::new();
        for (i, value) in x.iter_mut().enumerate().filter(|(_, x)| x.is_finite() && x.abs() >= limit) {
            kept.push((i, std::mem::replace(value, 0.0)));
        }
        let quantized = self.quantize(x, width);
        kept.into_iter().for_each(|(i, value)| x[i] = value);
        quantized
    }

    /// Returns the quantized values of `x` (`[tokens, width]`), which may be quantized already, as elements and
    /// factors; `None` unless elements are 8-bit floats.
    ///
    /// # Errors
    /// As [`apply`](Self::apply).
    pub(crate) fn factored(&self, x: &[f32], width: usize) -> Result<Option<Factored>, TensorError> {
        let q = quantize(&self.quant.scheme, x, x.len() / width.max(1), width, self.given())?;
        Ok(Packed::new(&q).and_then(|packed| packed.factored()))
    }

    /// Quantizes every value, without setting large ones aside.
    fn quantize(&self, x: &mut [f32], width: usize) -> Result<(), TensorError> {
        /// Near the limit of f32 the reference reduces scales so that no code decodes to infinity.
        const LIMIT: f32 = 1e38;
        let amax = kernels().amax(x);
        match self.path {
            Path::Fast(element) if amax <= LIMIT => {
                let block = match self.quant.scheme.format.blocks() {
                    Blocks::Group(g) => width.min(g as usize),
                    _ => width,
                };
                x.chunks_exact_mut(width)
                    .flat_map(|token| token.chunks_mut(block))
                    .for_each(|block| self.block(element, block));
                Ok(())
            }
            _ => self.reference(x, width),
        }
    }

    fn block(&self, element: Element, x: &mut [f32]) {
        let (scheme, outer) = (&self.quant.scheme, self.quant.outer);
        // Bit patterns of magnitudes have the same order as the magnitudes, and integers are compared faster.
        let amax =
            f32::from_bits(x.iter().map(|x| (x.to_bits() & 0x7fff_ffff) as i32).fold(0, i32::max) as u32);
        let block = scheme.block(Range { min: -amax, max: amax, ..Range::EMPTY }, false, outer);
        let scale = scheme.format.decoder(block.scale, 0, outer).value(1.0);
        element.round_scaled(x, scale);
    }

    fn reference(&self, x: &mut [f32], width: usize) -> Result<(), TensorError> {
        fake_quantize(&self.quant.scheme, x, x.len() / width, width, self.given())
    }

    /// Returns the stored parameters of its blocks.
    fn given(&self) -> Given {
        Given { outer: self.quant.outer, zero: self.quant.zero, first_index: 0 }
    }
}

/// True if a block never holds values of two tokens.
fn within_rows(blocks: Blocks) -> bool {
    blocks.within_rows() || matches!(blocks, Blocks::Tile { rows: 1, .. })
}

/// Returns the element of a scheme with the codes `round(x / scale)`, the values `code · scale`, and one scale per row
/// or part of it that depends only on the largest magnitude.
pub(crate) fn fast_element(scheme: &Scheme) -> Option<Element> {
    let Format::Affine(Affine {
        code,
        blocks: Blocks::Row | Blocks::Group(_),
        scale: Some(_),
        offset: Offset::None,
    }) = &scheme.format
    else {
        return None;
    };
    let rule = scheme.encoder.rule;
    if scheme.encoder.rounding != Rounding::NearestEven {
        return None;
    }
    match (*code, rule) {
        (Code::Int(bits), Rule::Full | Rule::Clip(_) | Rule::Restricted) => {
            let high = ((1i32 << (bits - 1)) - 1) as f32;
            Some(Element::Int { low: if rule == Rule::Restricted { -high } else { -high - 1.0 }, high })
        }
        (Code::Float(float), Rule::Amax | Rule::Floor | Rule::Ceil | Rule::Even | Rule::Rceil | Rule::Ct)
            if float.bits() <= 8 =>
        {
            let (mantissa_bits, min_normal, max) = (float.mantissa_bits, float.min_normal(), float.max());
            Some(Element::Float { mantissa_bits, min_normal, max })
        }
        _ => None,
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]
mod tests {
    use mantissa_num::parse_activation;

    use super::*;

    fn quantizer(text: &str, outer: Option<f32>) -> InputQuantizer {
        let scheme = parse_activation(text).unwrap();
        InputQuantizer::new("m", &ActivationQuant::new(scheme, outer)).unwrap()
    }

    /// Tokens of every magnitude, with ties, zeros of both signs and subnormals.
    fn tokens(count: usize, width: usize) -> Vec<f32> {
        let mut state = 1u32;
        let mut next = || {
            state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
            state
        };
        let mut x = Vec::new();
        for token in 0..count {
            let scale = 2f32.powi((token as i32 * 5) % 230 - 140);
            for _ in 0..width {
                let bits = next();
                x.push(match bits % 7 {
                    0 => 0.0,
                    1 => -0.0,
                    2 => (((bits >> 8) % 511) as f32 - 255.0) * 0.5 * scale,
                    3 => (((bits >> 8) % 31) as f32 / 16.0) * scale * 1e-3,
                    _ => ((bits >> 8) as f32 / 8_388_608.0 - 1.0) * 127.5 * scale,
                });
            }
        }
        x.extend(vec![0.0; width]);
        x
    }

    #[test]
    fn fast_paths_have_the_values_of_the_reference() {
        let schemes = [
            ("int8-token", None),
            ("int8-token:restricted", None),
            ("int4-token:clip85", None),
            ("int4-g32", None),
            ("int5-g7", None),
            ("fp8-e4m3-token", None),
            ("fp8-e5m2-g16", None),
            ("fp6-e2m3-g32", None),
            ("mxfp4", None),
            ("mxfp4:ct", None),
            ("mxfp8-e4m3:ct", None),
            ("mxfp8-e5m2:rceil", None),
            ("mxfp6-e3m2:even", None),
            ("mxfp4:ceil", None),
            ("nvfp4", Some(37.5)),
            ("nvfp4", Some(1e-30)),
            ("nvfp4", Some(1e20)),
        ];
        for (text, outer) in schemes {
            let quantizer = quantizer(text, outer);
            assert_ne!(quantizer.path, Path::Reference, "{text}");
            let width = 96;
            for mut x in [tokens(500, width), vec![f32::MAX; width], vec![-1e38; width]] {
                let mut expected = x.clone();
                quantizer.apply(&mut x, width).unwrap();
                quantizer.reference(&mut expected, width).unwrap();
                for (i, (a, b)) in x.iter().zip(&expected).enumerate() {
                    let same = a.to_bits() == b.to_bits() || (*a == 0.0 && *b == 0.0);
                    assert!(same, "{text} {outer:?} {i}: {a:e} for {b:e}");
                }
            }
        }
    }

    #[test]
    fn values_beyond_a_clipped_range_take_the_outermost_codes() {
        let mut x = [-10.0, 8.0, 10.0, 1.0, -0.5, 0.0];
        quantizer("int4-token:clip60", None).apply(&mut x, 6).unwrap();
        let s = 10.0 * 0.6 / 7.5;
        let expected = [-8.0 * s, 7.0 * s, 7.0 * s, s, -s, 0.0];
        assert!(x.iter().zip(expected).all(|(x, e)| (x - e).abs() < 1e-6), "{x:?} for {expected:?}");
    }

    #[test]
    fn other_schemes_run_the_reference() {
        for (text, outer) in [
            ("int8-token:torchao", None),
            ("int8-g32-asym", None),
            ("mxfp4:torchao-rceil", None),
            ("mxint8", None),
            ("nvfp4:te", Some(3.0)),
        ] {
            assert_eq!(quantizer(text, outer).path, Path::Reference, "{text}");
        }
    }

    #[test]
    fn tokens_do_not_depend_on_their_neighbours() {
        for (text, outer) in
            [("int8-token", None), ("mxfp4:ct", None), ("nvfp4", Some(37.5)), ("int4-g16", None)]
        {
            let quantizer = quantizer(text, outer);
            let width = 64;
            let x: Vec<f32> =
                (0..5 * width).map(|i| (i as f32 * 0.37).sin() * (1 + i / width) as f32).collect();
            let mut all = x.clone();
            quantizer.apply(&mut all, width).unwrap();
            for (token, expected) in x.chunks(width).zip(all.chunks(width)) {
                let mut alone = token.to_vec();
                quantizer.apply(&mut alone, width).unwrap();
                assert_eq!(alone, expected, "{text}");
            }
        }
    }

    #[test]
    fn static_scales_are_used_unchanged() {
        let mut x = [0.3, -1.0, 500.0, -500.0, 1.25];
        quantizer("int8-tensor@static", Some(0.5)).apply(&mut x, 5).unwrap();
        assert_eq!(x, [0.5, -1.0, 63.5, -64.0, 1.0]);
        let mut x = [1.06, 1e4];
        quantizer("fp8-e4m3-tensor@static", Some(1.0)).apply(&mut x, 2).unwrap();
        assert_eq!(x, [1.0, 448.0]);
    }

    #[test]
    fn schemes_beyond_one_token_are_refused() {
        for (text, outer) in
            [("int8-tensor", None), ("int8-tensor@static", None), ("nvfp4", None), ("nf4", None)]
        {
            let scheme = parse_activation(text).unwrap();
            let error = InputQuantizer::new("m", &ActivationQuant::new(scheme, outer)).unwrap_err();
            assert!(matches!(error, LoadError::InputScheme { .. }), "{text}: {error}");
        }
    }

    #[test]
    fn large_values_are_kept_and_the_others_scaled_without_them() {
        let scheme = parse_activation("int8-token:restricted").unwrap();
        let plain = ActivationQuant::new(scheme, None);
        let quant = ActivationQuant { keep_above: Some(6.0), ..plain.clone() };
        let (plain, quantizer) = (plain, InputQuantizer::new("m", &quant).unwrap());
        let mut x = [0.5, -6.0, 1.27, 5.99, 0.3, -0.7, 0.1, 40.0];
        let mut others = [0.5, 0.0, 1.27, 5.99, 0.3, -0.7, 0.1, 0.0];
        quantizer.apply(&mut x, 4).unwrap();
        InputQuantizer::new("m", &plain).unwrap().apply(&mut others, 4).unwrap();
        (others[1], others[7]) = (-6.0, 40.0);
        assert_eq!(x, others);
        assert!(quantizer.apply(&mut [1.0, f32::INFINITY], 2).is_err());
        let quant = ActivationQuant { keep_above: Some(0.0), ..plain };
        assert!(InputQuantizer::new("m", &quant).is_err());
    }

    #[test]
    fn non_finite_inputs_are_errors() {
        for text in ["int8-token", "fp8-e4m3-token"] {
            let error = quantizer(text, None).apply(&mut [1.0, f32::NAN], 2).unwrap_err();
            assert!(matches!(error, TensorError::NonFinite { index: 1, .. }), "{text}");
        }
    }
}
