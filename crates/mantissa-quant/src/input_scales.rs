//! Scales of inputs that are stored with a model: static ones, and NVFP4's for the whole tensor.
//!
//! The model runs unquantized over the calibration text, and the scale of a layer's inputs follows from a magnitude that an [`Observer`]
//! takes from them: that magnitude over the largest code, or, for NVFP4 as compressed-tensors stores it, `448 · 6` over it. Layers
//! that read the same input have one scale, as servers that fuse them need.

use std::collections::BTreeMap;

use mantissa_model::{InputQuantizer, LinearInfo, LinearInput, ModelConfig, WeightSource};
use mantissa_num::format::{Affine, Format};
use mantissa_num::{Code, Given, Rule, Scheme};
use mantissa_store::convention::ActivationQuant;

use crate::calibrate::{Calibration, CalibrationSet, Sample, Tick};
use crate::error::Result;

/// Which magnitude the largest code stands for.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Observer {
    /// The greatest ("max" calibration of ModelOpt, the static minmax observer of llm-compressor).
    #[default]
    Max,
    /// The one that 99.99 % of the values of up to 2048 tokens do not exceed.
    Percentile,
    /// Of the greatest times 1, 0.975, …, 0.3 the one under which those values err least, squared.
    Mse,
}

/// Observers by name.
pub const OBSERVERS: [(&str, Observer); 3] =
    [("max", Observer::Max), ("percentile", Observer::Percentile), ("mse", Observer::Mse)];

/// Tokens that an observer looks at which does not take the greatest of all.
pub(crate) const TOKENS: usize = 2048;

/// The share of values that [`Observer::Percentile`] does not clip.
const SHARE: f64 = 0.9999;

/// Ratios of the greatest that [`Observer::Mse`] tries, 1/40 apart.
const RATIOS: u8 = 29;

impl Observer {
    /// The magnitude that the largest code of `scheme` is to stand for, of inputs `x` (`[_, cols]`) whose greatest is `peak`.
    fn magnitude(self, scheme: &Scheme, x: &[f32], cols: usize, peak: f32) -> f32 {
        match self {
            Observer::Max => peak,
            Observer::Percentile => {
                let mut magnitudes: Vec<f32> = x.iter().map(|v| v.abs()).collect();
                let at = ((magnitudes.len() as f64 * SHARE) as usize).min(magnitudes.len().saturating_sub(1));
                if magnitudes.is_empty() {
                    peak
                } else {
                    *magnitudes.select_nth_unstable_by(at, f32::total_cmp).1
                }
            }
            Observer::Mse => {
                let ratios = (0..RATIOS).map(|i| peak * (1.0 - f32::from(i) / 40.0));
                let error = |amax: f32| {
                    let (mut values, given) =
                        (x.to_vec(), Given { outer: Some(scale(scheme, amax)), first_index: 0 });
                    let rows = x.len() / cols.max(1);
                    let done = mantissa_num::fake_quantize(scheme, &mut values, rows, cols, given);
                    let squares = values.iter().zip(x).map(|(q, v)| f64::from(q - v).powi(2)).sum();
                    done.map_or(f64::INFINITY, |()| squares)
                };
                let best = ratios.map(|amax| (amax, error(amax))).min_by(|a, b| a.1.total_cmp(&b.1));
                best.map_or(peak, |(amax, _)| amax)
            }
        }
    }
}

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
        let magnitudes = match observer {
            Observer::Max => calibration.peaks(&layer, kinds, tick)?,
            _ => {
                let samples = calibration.samples(&layer, kinds, TOKENS, tick)?;
                let magnitude = |sample: &Sample| {
                    let peak = sample.peaks.iter().fold(0f32, |all, peak| all.max(*peak));
                    observer.magnitude(scheme, &sample.x, sample.peaks.len(), peak)
                };
                samples.iter().map(|(input, sample)| (*input, magnitude(sample))).collect()
            }
        };
        for info in linears {
            let magnitude = magnitudes.get(&info.kind.input()).copied().unwrap_or(0.0);
            scales.insert(info.module, scale(scheme, magnitude));
        }
        calibration.advance(&layer, tick)?;
    }
    Ok(scales)
}

/// What the scales of `inputs` under `scheme` are that a run finds, module by module, as they quantize the inputs; none of a scheme of which
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
    fn observers_clip_outliers_and_nothing_else() {
        // A wave with one outlier in 40 000 values.
        let mut x: Vec<f32> = (0..40_000).map(|i| (i as f32 * 0.7).sin()).collect();
        x[17_003] = 9.0;
        for text in ["int8-tensor@static", "fp8-e4m3-tensor@static"] {
            let scheme = parse_activation(text).unwrap();
            let magnitude = |observer: Observer| observer.magnitude(&scheme, &x, 100, 9.0);
            assert_eq!(magnitude(Observer::Max), 9.0);
            assert!((0.99..=1.0).contains(&magnitude(Observer::Percentile)), "{text}");
            let squares = |amax: f32| {
                let (mut values, outer) = (x.clone(), Some(scale(&scheme, amax)));
                let given = Given { outer, first_index: 0 };
                mantissa_num::fake_quantize(&scheme, &mut values, 400, 100, given).unwrap();
                values.iter().zip(&x).map(|(q, v)| f64::from(q - v).powi(2)).sum::<f64>()
            };
            assert!(squares(magnitude(Observer::Mse)) <= squares(9.0), "{text}");
        }
        let int8 = parse_activation("int8-tensor@static").unwrap();
        assert!(Observer::Mse.magnitude(&int8, &x, 100, 9.0) < 9.0);
        assert_eq!(Observer::Percentile.magnitude(&int8, &[], 100, 3.0), 3.0);
    }

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
