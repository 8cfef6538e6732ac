//! SpQR (Dettmers, Svirschevski, Egiazarian, Kuznedelev, Frantar, Ashkboos, Borzunov, Hoefler & Alistarh 2023, "SpQR: A
//! Sparse-Quantized Representation for Near-Lossless LLM Weight Compression", arXiv 2306.03078).
//!
//! Few weights cost most of what a quantization costs: they widen the range of their group, or fall far from its grid where the input is
//! sensitive. A share of them stands beside the codes, in f16 with its column ([`mantissa_num::stored::Extra::Sparse`]); the groups'
//! scales are of the others, and [`gptq`](mod@crate::gptq) goes through the columns as ever, these weights erring by the rounding of f16.
//!
//! Unlike the published code: as many weights of a layer as the share says, not those above a threshold, so that the size is known
//! before the work; the range of a group is searched, as it is for GPTQ; columns by decreasing diagonal of the Hessian; what is stored beside the codes is what a
//! weight has over its code, so that decoders add it; and scales are f16, not quantized again to 3 bits in groups of 16: a scale here
//! has its own code and one above it for a block, and no offset of a block of scales (DESIGN's `ScaleTree`).

use mantissa_num::minifloat::F16;
use mantissa_num::stored::Extra;
use mantissa_num::{Code, Quantized, Scheme, TensorError};
use toml::Value;

use crate::error::MethodError;
use crate::gptq::method::{self, lacking, prepare};
use crate::gptq::{GptqOptions, as_f16, check_scheme, count, largest, solve_bytes, sparse};
use crate::method::{
    Buffer, Extent, Feature, InputTask, Lack, Method, Needs, Phase, Prepared, SolveInput, Work,
    refused_by_most,
};
use crate::options::{Key, OptionError, Options, Setting, TableSpec};

/// The largest share of outliers: from there on f16 with columns takes more than 8 bits a weight.
pub const MOST_OUTLIERS: f64 = 0.2;

/// Options of SpQR beside [`GptqOptions`].
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct SpqrOptions {
    /// Share of a layer's weights that stand beside the codes, up to [`MOST_OUTLIERS`].
    pub outliers: f64,
}

impl Default for SpqrOptions {
    /// About what the paper keeps.
    fn default() -> Self {
        SpqrOptions { outliers: 0.01 }
    }
}

impl SpqrOptions {
    /// Share of outliers, within its limits.
    fn share(self) -> f64 {
        self.outliers.clamp(0.0, MOST_OUTLIERS)
    }

    /// Outliers of a weight `[rows, cols]`.
    pub fn count(self, rows: usize, cols: usize) -> usize {
        count(self.share(), rows, cols)
    }
}

/// The scheme with scales of 16 bits, where they would be f32 and nothing stands above them.
pub fn with_f16_scales(mut scheme: Scheme) -> Scheme {
    if scheme.format.scale().is_some_and(|scale| scale.code == Code::F32 && scale.outer.is_none()) {
        scheme.format = scheme.format.with_scale_code(Code::Float(F16));
    }
    scheme
}

/// The `count` weights of `w` that rounding to nearest leaves furthest from themselves, to stand beside the codes `q`: what is stored of a
/// layer that is rounded to nearest after all.
///
/// # Errors
/// [`TensorError`] where the parts of `q` do not fit.
pub fn furthest(w: &[f32], q: &Quantized, count: usize) -> Result<Extra, TensorError> {
    let mut errors = q.dequantize()?;
    errors.iter_mut().zip(w).for_each(|(q, w)| *q = w - *q);
    let far: Vec<f32> = errors.iter().map(|error| error.abs()).collect();
    let kept = largest(&far, count);
    let values = errors.iter().zip(&kept).filter(|(_, kept)| **kept).map(|(error, _)| as_f16(*error));
    Ok(sparse(&kept, q.cols, values.collect()))
}

/// SpQR's table.
const TABLE: TableSpec = TableSpec {
    name: "spqr",
    keys: &[Key { name: "outliers", help: "share of the weights that stand beside the codes, in f16" }],
};

/// SpQR (arXiv 2306.03078): GPTQ with some weights beside the codes, in f16.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Spqr {
    /// Options of GPTQ.
    pub gptq: GptqOptions,
    /// Options of SpQR itself.
    pub options: SpqrOptions,
}

impl Method for Spqr {
    fn name(&self) -> &'static str {
        "spqr"
    }

    fn work(&self) -> Work<'_> {
        Work::Input(self)
    }

    fn tables(&self) -> &'static [TableSpec] {
        &[method::TABLE, TABLE]
    }

    fn set(&mut self, table: &str, options: Options<'_>) -> Result<(), OptionError> {
        if table != TABLE.name {
            return self.gptq.set(options);
        }
        let share = |value: &Value| value.as_float().filter(|share| *share > 0.0 && *share <= MOST_OUTLIERS);
        let share = options.read("outliers", share, || format!("a share above 0.0, to {MOST_OUTLIERS}"))?;
        self.options.outliers = share.unwrap_or(self.options.outliers);
        Ok(())
    }

    fn settings(&self) -> Vec<Setting> {
        let own = Setting::new(TABLE.name, "outliers", self.options.outliers);
        self.gptq.settings().into_iter().chain([own]).collect()
    }

    fn needs(&self) -> Needs {
        Needs { text: true, judged: true, ..Needs::default() }
    }

    fn stored_scheme(&self, scheme: Scheme) -> Scheme {
        with_f16_scales(scheme)
    }

    fn takes(&self, scheme: &Scheme, shape: (usize, usize), group_order: bool) -> Result<(), MethodError> {
        Ok(check_scheme(scheme, shape.0, shape.1, self.gptq, group_order)?)
    }

    fn refuses(&self, feature: Feature) -> Option<&'static str> {
        match feature {
            Feature::QuantizedInputs => {
                Some("spqr keeps weights beside codes, for inputs as they are: no scheme of activations")
            }
            Feature::RotatedInputs => Some("outliers read inputs as they are"),
            _ => refused_by_most(feature),
        }
    }

    fn outliers(&self, rows: usize, cols: usize) -> usize {
        self.options.count(rows, cols)
    }

    fn lacking(&self, lack: Lack) -> Option<&'static str> {
        Some(lacking(lack))
    }

    fn buffers(&self, phase: Phase, extent: &Extent<'_>) -> Vec<Buffer> {
        let solve = solve_bytes(extent.rows, extent.cols, extent.threads);
        let mut buffers = method::buffers(phase, extent, ("codes and rows at work", solve));
        if phase == Phase::Solve {
            // Gains, the largest of them, marks, and residuals; these of the rounded weight too.
            let count = self.outliers(extent.rows, extent.cols) as u64;
            let bytes = if count > 0 { (4 + 4 + 4 + 1 + 1) * extent.weights() + 3 * 10 * count } else { 0 };
            buffers.push(("gains and marks of outliers", bytes));
        }
        buffers
    }
}

impl SolveInput for Spqr {
    fn prepare(&self, task: InputTask) -> Result<Prepared, MethodError> {
        prepare(task, self.gptq, self.options.share())
    }
}
