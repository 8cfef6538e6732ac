//! Scales of inputs that are stored with a model: static ones, and NVFP4's for the whole tensor.
//!
//! The model runs unquantized over the calibration text, and the scale of a layer's inputs follows from the greatest magnitude that they
//! had ("max" calibration of ModelOpt, the static minmax observer of llm-compressor): amax over the largest code, or, for NVFP4 as
//! compressed-tensors stores it, `448 · 6 / amax`. Layers that read the same input have one scale, as servers that fuse them need.

use std::collections::BTreeMap;

use mantissa_model::ModelConfig;
use mantissa_num::format::{Affine, Format};
use mantissa_num::{Code, Rule, Scheme};
use mantissa_store::convention::ModelFiles;

use crate::calibrate::{Calibration, CalibrationSet, Tick};
use crate::error::Result;

/// The scale of the inputs of each linear layer, by module.
pub(crate) type InputScales = BTreeMap<String, f32>;

/// Runs `set` through the model of `source`, unquantized, and takes the scale that each linear layer's inputs have under `scheme`.
///
/// # Errors
/// As [`Calibration`].
pub(crate) fn collect(
    source: &ModelFiles,
    config: &ModelConfig,
    scheme: &Scheme,
    set: &CalibrationSet,
    threads: usize,
    tick: &mut Tick<'_>,
) -> Result<InputScales> {
    let mut calibration = Calibration::begin(source, config, &set.windows, threads)?;
    let mut scales = InputScales::new();
    while let Some(layer) = calibration.next_layer()? {
        let linears = config.layer_linears(layer.index());
        let mut inputs: Vec<_> = linears.iter().map(|info| info.kind.input()).collect();
        inputs.sort_unstable();
        inputs.dedup();
        let peaks = calibration.peaks(&layer, &inputs, tick)?;
        for info in linears {
            let at = inputs.iter().position(|input| *input == info.kind.input());
            let peak = at.map_or(0.0, |at| peaks[at]);
            scales.insert(info.module, scale(scheme, peak));
        }
        calibration.advance(&layer, tick)?;
    }
    Ok(scales)
}

/// The scale under which the largest code of `scheme` stands for `amax`. Inputs that were never anything but zero (an expert that saw no token)
/// have the scale of an amax of 1.
pub(crate) fn scale(scheme: &Scheme, amax: f32) -> f32 {
    let amax = if amax > 0.0 { amax } else { 1.0 };
    match &scheme.format {
        Format::Affine(Affine { code: Code::Float(element), scale: Some(block), .. })
            if scheme.has_outer_scale() =>
        {
            element.max() * block.code.max() / amax
        }
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
        ] {
            let scheme = parse_activation(text).unwrap();
            assert_eq!(scale(&scheme, 3.5), expected, "{text}");
            assert!(scale(&scheme, 0.0).is_finite(), "{text}");
        }
    }
}
