//! Stored scales of inputs: static scales, and NVFP4's global scale.
//!
//! The unquantized model runs over the calibration text, and an [`Observer`] chooses a magnitude of each input. The
//! scale is that magnitude divided by the largest code. NVFP4 as compressed-tensors stores it has `448 · 6` divided by
//! the magnitude. An asymmetric scheme has a scale and a zero point from the least and the greatest value. Layers that read the same input share one scale, which engines that fuse them need.

mod observer;

use std::collections::BTreeMap;

use mantissa_model::{InputQuantizer, LinearInfo, LinearInput, ModelConfig, WeightSource};
use mantissa_num::format::{Affine, Format};
use mantissa_num::{Code, Rule, Scheme, StaticScale};
use mantissa_store::convention::ActivationQuant;

pub(crate) use observer::TOKENS;
pub use observer::{OBSERVERS, Observer, Percentile};

use crate::calibrate::{Calibration, CalibrationSet, Limits, Tick};
use crate::error::Result;

/// Input scales of linear layers, by module.
pub(crate) type InputScales = BTreeMap<String, StaticScale>;

/// Returns the scheme of the input of a linear layer.
pub(crate) type SchemeOf<'a> = dyn Fn(&LinearInfo) -> Option<&'a Scheme> + 'a;

/// Runs `set` through the unquantized model of `source` and returns the input scale of each linear layer under the
/// scheme that `scheme` returns for it.
///
/// # Errors
/// Errors of [`Calibration`].
pub(crate) fn collect(
    source: &dyn WeightSource,
    config: &ModelConfig,
    (scheme, observer): (&SchemeOf<'_>, Observer),
    set: &CalibrationSet,
    limits: impl Into<Limits>,
    tick: &mut Tick<'_>,
) -> Result<InputScales> {
    let mut calibration = Calibration::begin(source, config, &set.windows, limits)?;
    let mut scales = InputScales::new();
    while let Some(layer) = calibration.next_layer()? {
        let linears = config.layer_linears(layer.index());
        let kinds = || linears.iter().map(|info| info.kind);
        let of_input =
            |input: LinearInput| linears.iter().filter(|info| info.kind.input() == input).find_map(scheme);
        let asymmetric = linears.iter().filter_map(scheme).find(|scheme| scheme.format.has_zero());
        let ends = match asymmetric {
            Some(scheme) => observer.ends(&mut calibration, &layer, (kinds(), true), scheme, tick)?,
            None => BTreeMap::new(),
        };
        let magnitudes = match asymmetric {
            Some(_) => ends.iter().map(|(input, [low, high])| (*input, low.abs().max(high.abs()))).collect(),
            None => observer.magnitudes(&mut calibration, &layer, (kinds(), true), of_input, tick)?,
        };
        for info in linears {
            let Some(scheme) = scheme(&info) else { continue };
            let input = info.kind.input();
            let found = match scheme.format.has_zero() {
                true => ends.get(&input).map(|ends| affine(scheme, *ends)),
                false => magnitudes.get(&input).map(|amax| scale(scheme, *amax).into()),
            };
            scales.insert(info.module, found.unwrap_or_else(|| scale(scheme, 0.0).into()));
        }
    }
    Ok(scales)
}

/// Returns the quantizers of inputs under `scheme` with the stored `scales`. Inputs whose quantization needs more than
/// one token are left out.
pub(crate) fn quantizers<'a>(
    scheme: &'a Scheme,
    scales: Option<&'a InputScales>,
    linears: impl Iterator<Item = &'a LinearInfo>,
) -> BTreeMap<LinearInput, InputQuantizer> {
    let quantizer = |info: &LinearInfo| {
        let stored = scales.and_then(|scales| scales.get(&info.module)).copied();
        let quant = ActivationQuant::of(scheme.clone(), stored);
        Some((info.kind.input(), InputQuantizer::new(&info.module, &quant).ok()?))
    };
    linears.filter_map(quantizer).collect()
}

/// Returns the scale under which the largest code of `scheme` decodes to `amax`. An input that was always zero (an
/// expert without tokens) gets the scale of an amax of 1.
pub fn scale(scheme: &Scheme, amax: f32) -> f32 {
    let amax = if amax > 0.0 { amax } else { 1.0 };
    match &scheme.format {
        _ if scheme.has_outer_scale() => scheme.outer_scale(amax).unwrap_or(amax),
        Format::Affine(Affine { code: Code::Int(bits), .. }) if scheme.encoder.rule == Rule::Full => {
            amax / (((1u32 << bits) - 1) as f32 / 2.0)
        }
        Format::Affine(Affine { code, .. }) => amax / code.max(),
        _ => amax,
    }
}

/// Returns scale and zero point of an asymmetric integer scheme for values from `low` to `high`, as compressed-tensors
/// computes them (`calculate_qparams`): the range includes 0, `scale = (high - low) / (2^bits - 1)`, and the zero point is
/// `-2^(bits - 1) - low / scale`, to nearest.
pub(crate) fn affine(scheme: &Scheme, [low, high]: [f32; 2]) -> StaticScale {
    let Format::Affine(Affine { code: Code::Int(bits), .. }) = &scheme.format else {
        return scale(scheme, low.abs().max(high.abs())).into();
    };
    let (low, high) = (low.min(0.0), high.max(0.0));
    let (least, greatest) = (-(1i32 << (bits - 1)), (1i32 << (bits - 1)) - 1);
    let width = if high > low { high - low } else { 1.0 };
    let scale = width / (greatest - least) as f32;
    let zero = (least as f32 - low / scale).clamp(least as f32, greatest as f32);
    StaticScale { scale, zero: zero.round_ties_even() as i32 }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use mantissa_num::parse_activation;

    use super::*;

    #[test]
    fn the_ends_of_a_range_are_the_first_and_the_last_code() {
        let scheme = parse_activation("int8-tensor-asym@static").unwrap();
        assert_eq!(affine(&scheme, [-0.5, 2.05]), StaticScale { scale: 0.01, zero: -78 });
        // A range without 0 is widened to it.
        assert_eq!(affine(&scheme, [1.0, 2.55]), StaticScale { scale: 0.01, zero: -128 });
        assert_eq!(affine(&scheme, [-2.55, -1.0]), StaticScale { scale: 0.01, zero: 127 });
        assert!(affine(&scheme, [0.0, 0.0]).scale > 0.0);
    }

    #[test]
    fn the_largest_code_decodes_to_amax() {
        for (text, expected) in [
            ("fp8-e4m3-tensor@static", 3.5 / 448.0),
            ("int8-tensor@static", 3.5 / 127.5),
            ("int8-tensor:restricted@static", 3.5 / 127.0),
            ("nvfp4", 448.0 * 6.0 / 3.5),
            ("nvfp4:4over6", 3.5),
        ] {
            let scheme = parse_activation(text).unwrap();
            assert_eq!(scale(&scheme, 3.5), expected, "{text}");
            assert!(scale(&scheme, 0.0).is_finite(), "{text}");
        }
    }
}
