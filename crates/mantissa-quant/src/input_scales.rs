//! Scales of inputs that are stored with a model: static ones, and NVFP4's for the whole tensor.
//!
//! The model runs unquantized over the calibration text, and the scale of a layer's inputs follows from a magnitude that an [`Observer`]
//! takes from them: that magnitude over the largest code, or, for NVFP4 as compressed-tensors stores it, `448 · 6` over it. Layers
//! that read the same input have one scale, as servers that fuse them need.

mod observer;

use std::collections::BTreeMap;

use mantissa_model::{InputQuantizer, LinearInfo, LinearInput, ModelConfig, WeightSource};
use mantissa_num::format::{Affine, Format};
use mantissa_num::{Code, Rule, Scheme};
use mantissa_store::convention::ActivationQuant;

pub(crate) use observer::TOKENS;
pub use observer::{OBSERVERS, Observer, Share};

use crate::calibrate::{Calibration, CalibrationSet, Tick};
use crate::error::Result;

/// The scale of the inputs of each linear layer, by module.
pub(crate) type InputScales = BTreeMap<String, f32>;

/// Runs `set` through the model of `source`, unquantized, and takes the scale that each linear layer's inputs have under `scheme`.
///
/// # Errors
/// As [`Calibration`].
pub(crate) fn collect(
    source: &dyn WeightSource,
    config: &ModelConfig,
    (scheme, observer): (&Scheme, Observer),
    set: &CalibrationSet,
    threads: usize,
    tick: &mut Tick<'_>,
) -> Result<InputScales> {
    let mut calibration = Calibration::begin(source, config, &set.windows, threads)?;
    let mut scales = InputScales::new();
    while let Some(layer) = calibration.next_layer()? {
        let linears = config.layer_linears(layer.index());
        let kinds = linears.iter().map(|info| info.kind);
        let magnitudes =
            observer.magnitudes(&mut calibration, &layer, (kinds, true), |_| Some(scheme), tick)?;
        for info in linears {
            let magnitude = magnitudes.get(&info.kind.input()).copied().unwrap_or(0.0);
            scales.insert(info.module, scale(scheme, magnitude));
        }
    }
    Ok(scales)
}

/// Scales of `inputs` under `scheme` that a run finds, module by module, as they quantize the inputs; none of a scheme of which
/// a token by itself does not say how it is quantized.
pub(crate) fn quantizers<'a>(
    scheme: &'a Scheme,
    scales: Option<&'a InputScales>,
    linears: impl Iterator<Item = &'a LinearInfo>,
) -> BTreeMap<LinearInput, InputQuantizer> {
    let quantizer = |info: &LinearInfo| {
        let outer = scales.and_then(|scales| scales.get(&info.module)).copied();
        let quant = ActivationQuant::new(scheme.clone(), outer);
        Some((info.kind.input(), InputQuantizer::new(&info.module, &quant).ok()?))
    };
    linears.filter_map(quantizer).collect()
}

/// The scale under which the largest code of `scheme` stands for `amax`. Inputs that were never anything but zero (an expert that saw no token)
/// have the scale of an amax of 1.
pub(crate) fn scale(scheme: &Scheme, amax: f32) -> f32 {
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

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use mantissa_num::parse_activation;

    use super::*;

    #[test]
    fn the_largest_code_stands_for_the_peak() {
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
