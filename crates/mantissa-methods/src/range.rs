//! Weights outside the range of a scheme: values beyond the largest element, and values below the smallest scale, of
//! which rounding leaves nothing.
//!
//! A scale in f16 is at least 2^-24 ≈ 6e-8, so 8-bit blocks of magnitudes below 4e-6 become zeros (Q8_0: amax / 127).

use mantissa_num::format::{Affine, Format};
use mantissa_num::{Code, Scheme, TensorError};

use crate::error_stats::ErrorStats;
use crate::rtn;
use crate::source::{self, Scratch, WeightReader};

/// SQNR in dB below which a weight has lost its signal: four fifths of its power are error. RTN to 3 bits or more stays
/// above it, because the largest value of each block is a code.
pub const LOST: f64 = 1.0;

/// Gain in dB that shows a weight to be out of range, when it is scaled to magnitudes near 1 and rounded again.
const GAIN: f64 = 3.0;

/// Gain in dB over the result itself that no method gives up for its outputs: the scale that fused layers share (NVFP4) is
/// out of range for this one.
const SHARED_GAIN: f64 = 15.0;

/// True if `stats` show that a weight may be out of range; [`check`] tells.
pub fn is_suspect(stats: &ErrorStats) -> bool {
    !stats.is_finite() || stats.report().sqnr_db.is_some_and(|db| db < LOST)
}

/// Refuses a weight (`[rows, cols]`) outside the range of `scheme`; `stats` is its error under it. A weight that has
/// [lost](LOST) its signal is rounded again to tell why, once as it is and once scaled to magnitudes near 1.
///
/// # Errors
/// [`TensorError::ValueOverflow`], [`TensorError::OutOfReach`] and [`TensorError::Underflow`]; errors of `source`.
pub fn check<S: WeightReader + ?Sized>(
    scheme: &Scheme,
    source: &S,
    (rows, cols): (usize, usize),
    stats: &ErrorStats,
    threads: usize,
) -> Result<(), S::Error> {
    if !stats.is_finite() {
        let amax = source::amax(source, rows * cols, threads)?;
        return overflow(scheme, amax).map_or(Ok(()), |error| Err(error.into()));
    }
    let Some(sqnr_db) = stats.report().sqnr_db.filter(|&db| db < LOST) else { return Ok(()) };
    let amax = source::amax(source, rows * cols, threads)?;
    // Values coded together are not rounded one by one, and their scales are f32.
    if scheme.format.trellis().is_some() || amax == 0.0 {
        return Ok(());
    }
    let mut scratch = Scratch::default();
    let values = source.elements(0..rows * cols, &mut scratch)?;
    let near_one = f64::from(amax).log2().floor().exp2();
    let scaled: Vec<f32> = values.iter().map(|&value| (f64::from(value) / near_one) as f32).collect();
    let sqnr = |values: &[f32]| -> Result<f64, TensorError> {
        let (_, stats) = rtn::quantize(scheme, values, rows, cols, None, threads)?;
        Ok(stats.report().sqnr_db.unwrap_or(f64::INFINITY))
    };
    let within = sqnr(&scaled)?;
    if within - sqnr(values)? > GAIN || within - sqnr_db > SHARED_GAIN {
        let scheme = scheme.to_string();
        // Elements without a scale saturate.
        return Err(match amax < 1.0 {
            true => TensorError::Underflow { amax, scheme, sqnr_db: sqnr_db.max(0.0) },
            false => TensorError::OutOfReach { amax, scheme },
        }
        .into());
    }
    Ok(())
}

/// Returns why finite values up to `amax` have infinite errors under `scheme`.
fn overflow(scheme: &Scheme, amax: f32) -> Option<TensorError> {
    let error = match &scheme.format {
        Format::Affine(Affine { code: Code::Float(float), scale: None, .. }) => {
            TensorError::ValueOverflow { amax, allowed: float.max(), element: float.name }
        }
        _ => TensorError::OutOfReach { amax, scheme: scheme.to_string() },
    };
    amax.is_finite().then_some(error)
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    /// Rounds a row of 256 values up to `amax` and checks it.
    fn checked(scheme: &str, amax: f32) -> Result<(), TensorError> {
        let scheme: Scheme = scheme.parse().unwrap();
        let w: Vec<f32> = (0..512).map(|i| amax * ((i * 37 % 101) as f32 / 50.0 - 1.0)).collect();
        let (_, stats) = rtn::quantize(&scheme, &w, 2, 256, None, 1)?;
        check(&scheme, &w[..], (2, 256), &stats, 1)
    }

    #[test]
    fn magnitudes_below_the_smallest_scale_are_refused() {
        for (scheme, amax) in [("q8_0", 1e-6), ("q4_0", 1e-7), ("q4_k", 1e-6), ("q6_k", 1e-8), ("f16", 1e-8)]
        {
            let error = checked(scheme, amax).unwrap_err();
            assert!(matches!(error, TensorError::Underflow { .. }), "{scheme} {amax}: {error}");
        }
    }

    #[test]
    fn magnitudes_beyond_the_largest_element_are_refused() {
        assert!(matches!(checked("fp8-e4m3", 1e7), Err(TensorError::OutOfReach { .. })));
        assert!(matches!(checked("f16", 1e7), Err(TensorError::ValueOverflow { .. })));
    }

    #[test]
    fn small_magnitudes_that_fit_pass() {
        for (scheme, amax) in
            [("q8_0", 1e-4), ("q4_0", 1e-5), ("q4_k", 1e-3), ("f16", 1e-6), ("bf16", 1e-30), ("q8_0", 0.0)]
        {
            assert_eq!(checked(scheme, amax), Ok(()), "{scheme} {amax}");
        }
    }

    #[test]
    fn a_scheme_of_few_levels_is_no_fault_of_the_range() {
        let mut w = vec![0.3; 256];
        w[0] = 1.0;
        let scheme: Scheme = "tq2_0".parse().unwrap();
        let (_, stats) = rtn::quantize(&scheme, &w, 1, 256, None, 1).unwrap();
        assert!(is_suspect(&stats));
        assert_eq!(check(&scheme, &w[..], (1, 256), &stats, 1), Ok(()));
    }
}
