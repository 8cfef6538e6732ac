//! Run-time quantization of a linear layer's input, each token by itself: the values of [`fake_quantize`] with a row per token.
//!
//! INT8 and FP8 E4M3 per token, the common cases, have loops of their own with the same operations in the same order (scale by
//! division, nearest-even, one product back) and so the same bits; other schemes run the reference.

use mantissa_kernels::kernels;
use mantissa_num::minifloat::E4M3;
use mantissa_num::{
    Affine, Blocks, Code, Format, Given, Offset, Rounding, Rule, ScaleTree, Scheme, Source, TensorError,
    fake_quantize,
};
use mantissa_store::convention::ActivationQuant;

use crate::error::LoadError;

/// Quantizes inputs as a checkpoint asks for. Two are equal when they give equal results.
#[derive(Clone, Debug, PartialEq)]
pub struct InputQuantizer {
    quant: ActivationQuant,
    path: Path,
}

#[derive(Clone, Copy, Debug, PartialEq)]
enum Path {
    Int8Token,
    E4m3Token,
    Reference,
}

impl InputQuantizer {
    /// For linear layer `module`.
    ///
    /// # Errors
    /// [`LoadError::InputScheme`] where a token's values would depend on its neighbours, or a stored scale is missing.
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
        // One stored scale for all blocks leaves nothing to be taken from the tokens.
        let fixed = quant.outer.is_some() && !scheme.has_outer_scale();
        if quant.outer.is_some_and(|scale| !scale.is_finite() || scale <= 0.0) {
            return refuse("a finite stored scale greater than 0");
        }
        if quant.outer.is_none() && (scheme.has_outer_scale() || scheme.source == Source::Static) {
            return refuse("a stored scale");
        }
        if fixed && scheme.format.has_zero() {
            return refuse("a symmetric scheme where the scale is stored");
        }
        if !fixed && scheme.format.scale().is_some() && !within_rows(scheme.format.blocks()) {
            return refuse("scales per token or per group of a token");
        }
        let path = if quant.outer.is_none() { fast_path(scheme) } else { Path::Reference };
        Ok(InputQuantizer { quant: quant.clone(), path })
    }

    /// What was asked for.
    pub fn quant(&self) -> &ActivationQuant {
        &self.quant
    }

    /// Replaces `x` (`[tokens, width]`) by its quantized values.
    ///
    /// # Errors
    /// [`TensorError::NonFinite`] where the scheme has no code for a value.
    pub fn apply(&self, x: &mut [f32], width: usize) -> Result<(), TensorError> {
        if width == 0 {
            return Ok(());
        }
        match self.path {
            Path::Int8Token => self.by_token(x, width, int8_token),
            Path::E4m3Token => self.by_token(x, width, e4m3_token),
            Path::Reference => self.reference(x, width),
        }
    }

    fn by_token(
        &self,
        x: &mut [f32],
        width: usize,
        quantize: impl Fn(&mut [f32], f32),
    ) -> Result<(), TensorError> {
        /// Close to the limit of f32 the reference holds scales back so that no code decodes to infinity.
        const LIMIT: f32 = 1e38;
        let kernels = kernels();
        let amax = kernels.amax(x);
        if amax > LIMIT || amax.is_nan() {
            return self.reference(x, width);
        }
        for token in x.chunks_exact_mut(width) {
            let amax = kernels.amax(token);
            quantize(token, amax);
        }
        Ok(())
    }

    fn reference(&self, x: &mut [f32], width: usize) -> Result<(), TensorError> {
        let given = Given { outer: self.quant.outer, first_index: 0 };
        fake_quantize(&self.quant.scheme, x, x.len() / width, width, given)
    }
}

/// Whether a block never holds values of two tokens.
fn within_rows(blocks: Blocks) -> bool {
    blocks.within_rows() || matches!(blocks, Blocks::Tile { rows: 1, .. })
}

fn fast_path(scheme: &Scheme) -> Path {
    let plain_scale = ScaleTree::leaf(Code::F32);
    match &scheme.format {
        Format::Affine(Affine { code, blocks: Blocks::Row, scale: Some(scale), offset: Offset::None })
            if *scale == plain_scale && scheme.encoder.rounding == Rounding::NearestEven =>
        {
            match (*code, scheme.encoder.rule) {
                (Code::Int(8), Rule::Full) => Path::Int8Token,
                (Code::Float(float), _) if float == E4M3 => Path::E4m3Token,
                _ => Path::Reference,
            }
        }
        _ => Path::Reference,
    }
}

fn nonzero(scale: f32) -> f32 {
    if scale == 0.0 { f32::EPSILON } else { scale }
}

fn int8_token(token: &mut [f32], amax: f32) {
    // Adding and taking away 1.5·2^23 rounds to an integer, ties to even, anything below 2^22.
    const ROUND: f32 = 12_582_912.0;
    let scale = nonzero(amax / 127.5);
    for x in token {
        let code = ((*x / scale).clamp(-128.0, 127.0) + ROUND) - ROUND;
        *x = code * scale;
    }
}

fn e4m3_token(token: &mut [f32], amax: f32) {
    /// Exponent field of 2^-6, the least normal E4M3.
    const MIN_NORMAL: u32 = (127 - 6) << 23;
    let scale = nonzero(amax / 448.0);
    for x in token {
        let scaled = *x / scale;
        let magnitude = scaled.abs();
        // 2^20 times the value's power of two has an ulp of 2^-3 of it: E4M3's step.
        let step = f32::from_bits((magnitude.to_bits() & 0x7f80_0000).max(MIN_NORMAL) + (20 << 23));
        let element = ((magnitude + step) - step).min(448.0).copysign(scaled);
        *x = element * scale;
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]
mod tests {
    use mantissa_num::parse_activation;

    use super::*;

    fn quantizer(text: &str, outer: Option<f32>) -> InputQuantizer {
        let scheme = parse_activation(text).unwrap();
        InputQuantizer::new("m", &ActivationQuant { scheme, outer }).unwrap()
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
    fn fast_paths_have_the_bits_of_the_reference() {
        for text in ["int8-token", "fp8-e4m3-token"] {
            let quantizer = quantizer(text, None);
            assert_ne!(quantizer.path, Path::Reference, "{text}");
            let width = 96;
            for mut x in [tokens(500, width), vec![f32::MAX; width], vec![1e38; width]] {
                let mut expected = x.clone();
                quantizer.apply(&mut x, width).unwrap();
                quantizer.reference(&mut expected, width).unwrap();
                for (i, (a, b)) in x.iter().zip(&expected).enumerate() {
                    // The sign of a zero is not a matter of the integer code.
                    assert!(
                        a.to_bits() == b.to_bits() || (*a == 0.0 && *b == 0.0),
                        "{text} {i}: {a:e} for {b:e}"
                    );
                }
            }
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
    fn static_scales_are_used_as_they_are() {
        let mut x = [0.3, -1.0, 500.0, -500.0, 1.25];
        quantizer("int8-tensor@static", Some(0.5)).apply(&mut x, 5).unwrap();
        assert_eq!(x, [0.5, -1.0, 63.5, -64.0, 1.0]);
        let mut x = [1.06, 1e4];
        quantizer("fp8-e4m3-tensor@static", Some(1.0)).apply(&mut x, 2).unwrap();
        assert_eq!(x, [1.0, 448.0]);
    }

    #[test]
    fn what_one_token_cannot_have_is_refused() {
        for (text, outer) in
            [("int8-tensor", None), ("int8-tensor@static", None), ("nvfp4", None), ("nf4", None)]
        {
            let scheme = parse_activation(text).unwrap();
            let error = InputQuantizer::new("m", &ActivationQuant { scheme, outer }).unwrap_err();
            assert!(matches!(error, LoadError::InputScheme { .. }), "{text}: {error}");
        }
    }

    #[test]
    fn non_finite_inputs_are_errors() {
        for text in ["int8-token", "fp8-e4m3-token"] {
            let error = quantizer(text, None).apply(&mut [1.0, f32::NAN], 2).unwrap_err();
            assert!(matches!(error, TensorError::NonFinite { index: 1, .. }), "{text}");
        }
    }
}
