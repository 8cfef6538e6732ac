//! SpQR (Dettmers, Svirschevski, Egiazarian, Kuznedelev, Frantar, Ashkboos, Borzunov, Hoefler & Alistarh 2023, "SpQR:
//! A Sparse-Quantized Representation for Near-Lossless LLM Weight Compression", arXiv 2306.03078).
//!
//! A few weights cause most of the loss: they widen the range of their group, or round badly where the input is
//! sensitive. SpQR stores a share of them as outliers in f16 with their column
//! ([`mantissa_num::stored::Extra::Sparse`]). Group scales come from the other weights, and [`gptq`](mod@crate::gptq)
//! runs as usual; outliers err only by the rounding of f16.
//!
//! Differences from the published code:
//! - The number of outliers per layer is a fixed share instead of a threshold, so that the size is known beforehand.
//! - The range of a group is searched, as in GPTQ here.
//! - Columns are quantized by decreasing diagonal of the Hessian.
//! - An outlier is stored as the difference from its code, so that decoders add it.
//! - Scales are f16, not quantized again to 3 bits in groups of 16: `ScaleTree` has one scale above a block of
//!   scales, but no offset for it.

use mantissa_num::stored::Extra;
use mantissa_num::{Quantized, Scheme, TensorError};
use mantissa_options::{Accepts, Named, NamedMut, Value, options};

use crate::error::MethodError;
use crate::gptq::method::{self, on_gap, prepare};
use crate::gptq::{GptqOptions, as_f16, check_scheme, count, largest, solve_bytes, sparse};
use crate::method::{
    Arithmetic, Buffer, CalibrationGap, Extent, Feature, InputTask, Method, Phase, Prepared, SolveInput,
    Work, refused_by_most,
};

/// Largest share of outliers; beyond it, f16 values with columns take more than 8 bits per weight.
pub const MOST_OUTLIERS: f64 = 0.2;

/// Name in recipes, and of the table of its options.
const NAME: &str = "spqr";

options! {
    /// Options of SpQR, in addition to [`GptqOptions`].
    #[derive(Clone, Copy, Debug, PartialEq)]
    pub struct SpqrOptions {
        /// Share of a layer's weights stored as outliers, in f16. The default is roughly the paper's.
        outliers: f64 = 0.01, Outliers;
    }
}

/// Shares above 0, to [`MOST_OUTLIERS`].
struct Outliers;

impl Accepts<f64> for Outliers {
    fn read(&self, value: &Value) -> Option<f64> {
        value.as_float().filter(|share| *share > 0.0 && *share <= MOST_OUTLIERS)
    }

    fn print(&self, share: &f64) -> Option<Value> {
        Some((*share).into())
    }

    fn allowed(&self) -> String {
        format!("a share above 0.0, to {MOST_OUTLIERS}")
    }
}

impl SpqrOptions {
    /// Share of outliers, clamped to its limits.
    fn share(self) -> f64 {
        self.outliers.clamp(0.0, MOST_OUTLIERS)
    }

    /// Number of outliers of a weight `[rows, cols]`.
    pub fn count(self, rows: usize, cols: usize) -> usize {
        count(self.share(), rows, cols)
    }
}

/// Outliers for a layer that falls back to RTN: the `count` weights of `w` with the largest error under the codes
/// `q`.
///
/// # Errors
/// [`TensorError`] if the parts of `q` have inconsistent lengths.
pub fn furthest(w: &[f32], q: &Quantized, count: usize) -> Result<Extra, TensorError> {
    let mut errors = q.dequantize()?;
    errors.iter_mut().zip(w).for_each(|(q, w)| *q = w - *q);
    let far: Vec<f32> = errors.iter().map(|error| error.abs()).collect();
    let kept = largest(&far, count);
    let values = errors.iter().zip(&kept).filter(|(_, kept)| **kept).map(|(error, _)| as_f16(*error));
    Ok(sparse(&kept, q.cols, values.collect()))
}

/// SpQR (arXiv 2306.03078): GPTQ with outliers stored in f16.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Spqr {
    /// Options of GPTQ.
    pub gptq: GptqOptions,
    /// Options of SpQR itself.
    pub options: SpqrOptions,
}

impl Method for Spqr {
    fn name(&self) -> &'static str {
        NAME
    }

    fn work(&self) -> Work<'_> {
        Work::Input(self)
    }

    fn tables(&self) -> Vec<Named<'_>> {
        vec![(method::TABLE, &self.gptq), (NAME, &self.options)]
    }

    fn tables_mut(&mut self) -> Vec<NamedMut<'_>> {
        vec![(method::TABLE, &mut self.gptq), (NAME, &mut self.options)]
    }

    fn stored_scheme(&self, scheme: Scheme) -> Scheme {
        scheme.with_half_scales()
    }

    fn takes(&self, scheme: &Scheme, shape: (usize, usize), group_order: bool) -> Result<(), MethodError> {
        Ok(check_scheme(scheme, shape.0, shape.1, self.gptq, group_order)?)
    }

    fn refuses(&self, feature: Feature) -> Option<&'static str> {
        match feature {
            Feature::QuantizedInputs => {
                Some("SpQR stores outliers for unquantized inputs: it takes no activation scheme")
            }
            Feature::RotatedInputs => Some("outliers need unrotated inputs"),
            _ => refused_by_most(feature),
        }
    }

    fn outliers(&self, rows: usize, cols: usize) -> usize {
        self.options.count(rows, cols)
    }

    fn on_gap(&self, gap: CalibrationGap) -> Option<&'static str> {
        Some(on_gap(gap))
    }

    fn buffers(&self, phase: Phase, extent: &Extent<'_>) -> Vec<Buffer> {
        let solve = solve_bytes(extent.rows, extent.cols, extent.threads);
        let mut buffers = method::buffers(phase, extent, ("codes and rows at work", solve));
        if phase == Phase::Solve {
            // Gains, the largest of them, marks, and residuals, for the RTN weight too.
            let count = self.outliers(extent.rows, extent.cols) as u64;
            let bytes = if count > 0 { (4 + 4 + 4 + 1 + 1) * extent.weights() + 3 * 10 * count } else { 0 };
            buffers.push(("gains and marks of outliers", bytes));
        }
        buffers
    }

    fn arithmetic(&self, extent: &Extent<'_>) -> Arithmetic {
        // For each weight the range of its group is searched without it.
        let columns = method::arithmetic(self.gptq, extent);
        Arithmetic { steps: columns.steps * extent.group as f64, ..columns }
    }
}

impl SolveInput for Spqr {
    fn prepare(&self, task: InputTask) -> Result<Prepared, MethodError> {
        prepare(task, self.gptq, self.options.share())
    }
}
